"""Small ONNX networks, an operator or two each: what ONNX Runtime computes, pimflow computes or refuses."""

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper

F, I64, I32, B = T.FLOAT, T.INT64, T.INT32, T.BOOL
SHAPE = (1, 8, 6, 6)
KINDS: dict[str, onnx.ModelProto] = {}


def weight(*dims, low=-1.0, high=1.0):
    return np.random.default_rng([*dims, 3]).uniform(low, high, dims).astype(np.float32)


def net(name, nodes, inputs, weights=None, opset=17):
    """A network from `inputs`, by name (type, shape), to what its last node gives."""
    values = [h.make_tensor_value_info(n, kind, dims) for n, (kind, dims) in inputs.items()]
    results = [onnx.ValueInfoProto(name=output) for output in nodes[-1].output if output]
    stored = [numpy_helper.from_array(np.asarray(array), n) for n, array in (weights or {}).items()]
    graph = h.make_graph(nodes, "net", values, results, stored)
    version = 10 if opset > 19 else 8
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", opset)], ir_version=version)
    model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    for value in model.graph.output:  # which some functions of the standard leave open
        value.type.tensor_type.elem_type = value.type.tensor_type.elem_type or F
    assert name not in KINDS
    KINDS[name] = model


def op(name, kind, operands="x", outs="y", x=SHAPE, t=F, opset=17, extra=None, weights=None, **attributes):
    """A network of one node, from ``x`` of type `t`, further inputs and weights."""
    names = operands.split(" ")
    inputs = {n: value for n, value in {"x": (t, x), **(extra or {})}.items() if n in names}
    net(name, [h.make_node(kind, names, outs.split(" "), name="n", **attributes)], inputs, weights, opset)


def net_after(name, first, kind, *operands, inputs="x", weights=None, opset=17, **attributes):
    """A network of one node whose first operand is what the nodes `first` make of ``x``, called ``u``."""
    values = {n: (F, SHAPE) for n in inputs.split(" ")}
    last = h.make_node(kind, ["u", *operands], ["y"], name="n", **attributes)
    net(name, [*first, last], values, weights, opset)


# ---- elementwise ----

UNARY = """
Abs Asinh Atan Ceil Celu Cos Cosh Elu Erf Exp Floor HardSigmoid HardSwish Identity LeakyRelu Mish Neg
Relu Round Selu Sigmoid Sign Sin Sinh Softplus Softsign Tan Tanh ThresholdedRelu
"""
for k in UNARY.split():
    op(k, k, opset=18)
for k in ("Acos", "Asin", "Atanh"):
    within = [h.make_node("Tanh", ["x"], ["t"], name="t"), h.make_node("Mul", ["t", "half"], ["u"], name="m")]
    net_after(k, within, k, weights={"half": np.float32([0.9])})
for k in ("Acosh", "Log", "Reciprocal", "Sqrt"):
    above = [h.make_node("Abs", ["x"], ["t"], name="t"), h.make_node("Add", ["t", "one"], ["u"], name="m")]
    net_after(k, above, k, weights={"one": np.float32([1.5])})
op("Gelu", "Gelu", opset=20)
op("Gelu tanh", "Gelu", opset=20, approximate="tanh")
op("Not", "Not", t=B)
op("IsNaN", "IsNaN")
op("IsInf", "IsInf")
op("BitwiseNot", "BitwiseNot", t=I32, opset=18)
for k in ("Add", "Max", "Mean", "Min", "Mul", "Sub", "Sum"):
    op(k, k, "x z", extra={"z": (F, SHAPE)})
op("Mod", "Mod", "x z", extra={"z": (F, SHAPE)}, fmod=1)
net_after("Pow", [h.make_node("Abs", ["x"], ["u"], name="t")], "Pow", "z", inputs="x z")
divisor = [h.make_node("Exp", ["z"], ["t"], name="t"), h.make_node("Div", ["x", "t"], ["u"], name="m")]
net_after("Div", divisor, "Neg", inputs="x z")
op("PRelu", "PRelu", "x s", weights={"s": weight(8, 1, 1)})
op("PRelu one", "PRelu", "x s", weights={"s": np.float32([0.3])})
op("Add broadcast", "Add", "x z", extra={"z": (F, (6,))})
for k in ("Add", "Sub", "Mul", "Max", "Min"):
    op(k + " i64", k, "x z", t=I64, extra={"z": (I64, SHAPE)})
    op(k + " i32", k, "x z", t=I32, extra={"z": (I32, SHAPE)})
op("Div i32", "Div", "x z", t=I32, weights={"z": np.int32([3])})
op("Mod i32", "Mod", "x z", t=I32, weights={"z": np.int32([3])})
op("Mod i32 neg", "Mod", "x z", t=I32, weights={"z": np.int32([-3])})
op("Pow i32", "Pow", "x z", t=I32, weights={"z": np.int32([2])})
op("Pow i32, real", "Pow", "x z", t=I32, weights={"z": np.float32([1.7])})
for k in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"):
    op(k, k, "x z", extra={"z": (F, SHAPE)})
    op(k + " i32", k, "x z", t=I32, extra={"z": (I32, SHAPE)})
for k in ("And", "Or", "Xor"):
    op(k, k, "x z", t=B, extra={"z": (B, SHAPE)})
for k in ("BitwiseAnd", "BitwiseOr", "BitwiseXor"):
    op(k, k, "x z", t=I32, opset=18, extra={"z": (I32, SHAPE)})
op("BitShift", "BitShift", "x z", t=T.UINT8, weights={"z": np.uint8([1])}, direction="LEFT")
op("Where", "Where", "c x z", extra={"c": (B, SHAPE), "z": (F, SHAPE)})
op("Mean 1", "Mean")
op("Max 1", "Max")
op("Min of maps, pixels, one", "Min", "x z one", extra={"z": (F, (8, 1, 1))}, weights={"one": np.float32(1)})
op("Mean 3", "Mean", "x z v", extra={"z": (F, SHAPE), "v": (F, SHAPE)})
op("Mean broadcast", "Mean", "x z", extra={"z": (F, (8, 1, 1))})
op("Sum broadcast", "Sum", "x z", extra={"z": (F, (8, 1, 1))})
# ---- reductions and places ----
for k in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare"):
    k = f"Reduce{k}"
    if k == "ReduceLogSum":
        net_after(k, [h.make_node("Exp", ["x"], ["u"], name="t")], k, axes=[1])
        continue
    op(k, k, axes=[2, 3])
    op(k + " 18", k, "x a", opset=18, weights={"a": np.int64([1])}, keepdims=0)
    if k not in ("ReduceL2", "ReduceLogSumExp"):
        op(k + " i32", k, t=I32, axes=[1])
op("ReduceSum", "ReduceSum", "x a", weights={"a": np.int64([1, 2])})
op("ReduceSum i64", "ReduceSum", "x a", t=I64, weights={"a": np.int64([1])}, keepdims=0)
op("ReduceSum all", "ReduceSum")
op("ReduceMean all", "ReduceMean", keepdims=0)
op("ReduceSum none", "ReduceSum", "x a", weights={"a": np.zeros(0, np.int64)}, noop_with_empty_axes=1)
op("ReduceMax uint8", "ReduceMax", t=T.UINT8, axes=[1])
op("ReduceMin int8", "ReduceMin", t=T.INT8, axes=[1])
op("ArgMax", "ArgMax", axis=1)
op("ArgMin", "ArgMin", axis=1, keepdims=0)
op("ArgMax last", "ArgMax", axis=1, select_last_index=1)
op("ArgMax i32", "ArgMax", t=I32, axis=2)
op("ArgMax uint8", "ArgMax", t=T.UINT8, axis=1)
op("ArgMin uint8", "ArgMin", t=T.UINT8, axis=1)
op("ArgMax int8", "ArgMax", t=T.INT8, axis=1)
op("ArgMin last", "ArgMin", axis=1, select_last_index=1)
op("ArgMin i32 last", "ArgMin", t=I32, axis=1, select_last_index=1)
op("CumSum", "CumSum", "x a", weights={"a": np.int64(1)})
op("CumSum rev", "CumSum", "x a", weights={"a": np.int64(1)}, reverse=1)
op("CumSum excl", "CumSum", "x a", weights={"a": np.int64(1)}, exclusive=1)
op("TopK", "TopK", "x k", "v i", weights={"k": np.int64([3])}, axis=1)
op("TopK smallest", "TopK", "x k", "v i", weights={"k": np.int64([3])}, axis=3, largest=0)
op("Softmax", "Softmax", axis=1)
op("LogSoftmax", "LogSoftmax")
op("Hardmax", "Hardmax", axis=1)
op("Softmax 11", "Softmax", axis=1, opset=11)
op("LogSoftmax 11", "LogSoftmax", axis=2, opset=11)


# ---- convolutions ----
def conv(name, xd=SHAPE, wd=(12, 8, 3, 3), b=True, kind="Conv", bias=None, opset=17, **a):
    ws = {"w": weight(*wd)}
    ins = "x w"
    if b:
        ins += " b"
        ws["b"] = weight(bias or wd[0])
    op(name, kind, ins, x=xd, weights=ws, opset=opset, **a)


conv("Conv")
conv("Conv 1x1", wd=(16, 8, 1, 1))
conv("Conv pad", pads=[1, 1, 1, 1])
conv("Conv asym", pads=[0, 1, 2, 1])
conv("Conv stride", strides=[2, 2], pads=[1, 1, 1, 1])
conv("Conv dil", dilations=[2, 2], pads=[2, 2, 2, 2])
conv("Conv dw", wd=(8, 1, 3, 3), group=8, pads=[1, 1, 1, 1])
conv("Conv dwm", wd=(16, 1, 3, 3), group=8, bias=16)
conv("Conv group", wd=(12, 4, 3, 3), group=2)
conv("Conv same upper", auto_pad="SAME_UPPER", strides=[2, 2], xd=(1, 8, 7, 7))
conv("Conv same lower", auto_pad="SAME_LOWER", strides=[2, 2], xd=SHAPE)
conv("Conv valid", auto_pad="VALID")
conv("Conv batch", xd=(3, 8, 6, 6))
conv("Conv 1d", xd=(1, 8, 12), wd=(12, 8, 3))
conv("Conv 3d", xd=(1, 4, 5, 5, 5), wd=(6, 4, 3, 3, 3))
conv("Conv nobias", b=False)
conv("Conv 1d pad stride", xd=(2, 8, 12), wd=(12, 8, 3), pads=[1, 1], strides=[2])
ct = dict(kind="ConvTranspose", wd=(8, 6, 3, 3), bias=6)
conv("CT", **ct)
conv("CT stride", **ct, strides=[2, 2])
conv("CT pad", **ct, strides=[2, 2], pads=[1, 1, 1, 1])
conv("CT outpad", **ct, strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1])
conv("CT output_shape", **ct, strides=[2, 2], output_shape=[12, 12])
conv("CT output_shape odd", **ct, strides=[2, 2], output_shape=[14, 13])
conv("CT dil", **ct, dilations=[2, 2])
conv("CT same", **ct, strides=[2, 2], auto_pad="SAME_UPPER")
conv("CT same lower", **ct, strides=[2, 2], auto_pad="SAME_LOWER")
conv("CT group", kind="ConvTranspose", wd=(8, 3, 3, 3), bias=6, group=2)
conv("CT 1d", kind="ConvTranspose", xd=(1, 8, 12), wd=(8, 6, 3), bias=6, strides=[2])
ct_1d = dict(kind="ConvTranspose", xd=(1, 8, 12), wd=(8, 6, 3), bias=6, strides=[2])
conv("CT output_shape 1d", **ct_1d, output_shape=[24])
conv("CT asym", **ct, strides=[2, 2], pads=[0, 1, 2, 1])
# ---- products of which PIM computes some ----
for k in ("Mean", "Sum", "Max", "Add", "Mul", "Concat", "Mean of 3"):
    kind, *three = k.split(" of ")
    tail = h.make_node(kind, ["a", "b", *(["x"] if three else [])], ["y"], name="n")
    if kind == "Concat":
        tail.attribute.append(h.make_attribute("axis", 1))
    products = [h.make_node("Conv", ["x", v], [y], name=f"c{y}") for v, y in (("w", "a"), ("v", "b"))]
    stored = {"w": weight(16, 16, 1, 1), "v": weight(16, 16, 1, 1) * 0.5}
    net(f"products {k}", [*products, tail], {"x": (F, (1, 16, 8, 8))}, stored)
# ---- pools ----
op("MaxPool", "MaxPool", kernel_shape=[2, 2])
op("MaxPool s", "MaxPool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
op("MaxPool ceil", "MaxPool", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)
op("MaxPool dil", "MaxPool", kernel_shape=[2, 2], dilations=[2, 2])
op("MaxPool same", "MaxPool", kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER")
op("MaxPool idx", "MaxPool", outs="y i", kernel_shape=[2, 2], strides=[2, 2])
op("MaxPool 1d", "MaxPool", x=(1, 8, 12), kernel_shape=[2])
op("MaxPool 3d", "MaxPool", x=(1, 4, 5, 5, 5), kernel_shape=[2, 2, 2])
op("MaxPool uint8", "MaxPool", t=T.UINT8, kernel_shape=[2, 2])
op("MaxPool same lower", "MaxPool", kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_LOWER")
op("AvgPool", "AveragePool", kernel_shape=[2, 2])
op("AvgPool pad", "AveragePool", kernel_shape=[3, 3], pads=[1, 1, 1, 1])
op("AvgPool incl", "AveragePool", kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1)
op("AvgPool ceil", "AveragePool", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1, opset=19)
op("AvgPool 1d", "AveragePool", x=(1, 8, 12), kernel_shape=[3])
op("AvgPool dil", "AveragePool", kernel_shape=[2, 2], dilations=[2, 2], opset=19)
op("AvgPool same", "AveragePool", kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER")
window = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
op("AvgPool ceil incl", "AveragePool", **window, ceil_mode=1, count_include_pad=1, opset=19)
op("AvgPool 3d", "AveragePool", x=(1, 4, 5, 5, 5), kernel_shape=[2, 2, 2])
op("GAP", "GlobalAveragePool")
op("GMP", "GlobalMaxPool")
op("LpPool", "LpPool", kernel_shape=[2, 2], opset=18)
op("GlobalLp", "GlobalLpPool")
op("LpPool p1", "LpPool", kernel_shape=[2, 2], p=1, opset=18)
op("MaxRoiPool", "MaxRoiPool", "x r", weights={"r": np.float32([[0, 0, 0, 4, 4]])}, pooled_shape=[2, 2])
stored, sizes = {"r": np.float32([[0, 0, 4, 4]]), "i": np.int64([0])}, {"output_height": 2, "output_width": 2}
op("RoiAlign", "RoiAlign", "x r i", weights=stored, opset=16, sampling_ratio=2, **sizes)
# ---- normalisation ----
stored = {"s": weight(8), "b": weight(8), "m": weight(8), "v": weight(8, low=0.5, high=2)}
op("BN", "BatchNormalization", "x s b m v", weights=stored)
op("IN", "InstanceNormalization", "x s b", weights={"s": weight(8), "b": weight(8)})
op("LN", "LayerNormalization", "x s b", weights={"s": weight(6), "b": weight(6)})
op("LN axis", "LayerNormalization", "x s b", weights={"s": weight(8, 6, 6), "b": weight(8, 6, 6)}, axis=1)
op("LN nobias", "LayerNormalization", "x s", weights={"s": weight(6)})
op("GN18", "GroupNormalization", "x s b", weights={"s": weight(2), "b": weight(2)}, num_groups=2, opset=18)
op("GN21", "GroupNormalization", "x s b", weights={"s": weight(8), "b": weight(8)}, num_groups=2, opset=21)
groups = [
    h.make_node("Conv", ["x", "w"], ["c"], name="c"),
    h.make_node("GroupNormalization", ["c", "s", "b"], ["g"], name="g", num_groups=2),
    h.make_node("Relu", ["g"], ["y"], name="n"),
]
stored = {"w": weight(8, 8, 1, 1), "s": weight(8), "b": weight(8)}
net("GN21 between layers", groups, {"x": (F, SHAPE)}, stored, opset=21)
op("LRN", "LRN", size=3)
op("LpNorm", "LpNormalization", axis=1)
op("MVN9", "MeanVarianceNormalization", opset=9)
op("MVN13", "MeanVarianceNormalization", opset=13)
op("LpNorm1", "LpNormalization", axis=1, p=1)
op("LpNorm last", "LpNormalization")
for k in (1, 2):  # of nothing in every second row
    rows = [h.make_node("Mul", ["x", "c"], ["u"], name="m")]
    net_after(f"LpNorm{k} 0", rows, "LpNormalization", weights={"c": np.float32([[1], [0]] * 3)}, axis=3, p=k)
op("RMSNorm", "RMSNormalization", "x s", weights={"s": weight(6)}, opset=23)
op("Dropout", "Dropout")
op("Dropout mask", "Dropout", outs="y m")
op("Dropout 11 mask", "Dropout", outs="y m", opset=11)
relu, typed = h.make_node("Relu", ["x"], ["a"], name="r"), {"x": (F, SHAPE)}
dropout = h.make_node("Dropout", ["a", "q"], ["y", "m"], name="n")
net("Dropout mask only", [relu, dropout], typed, {"q": np.float32(0.3)})
dropout = h.make_node("Dropout", ["a", "q", "t"], ["y"], name="n")
net("Dropout training", [relu, dropout], typed, {"q": np.float32(0.3), "t": np.bool_(True)})
# ---- data movement ----
op("Reshape", "Reshape", "x s", weights={"s": np.int64([1, -1, 12])})
op("Reshape 0", "Reshape", "x s", weights={"s": np.int64([0, 4, -1])})
op("Flatten", "Flatten")
op("Flatten 2", "Flatten", axis=2)
op("Transpose", "Transpose", perm=[0, 2, 3, 1])
op("Transpose default", "Transpose")
op("Squeeze", "Squeeze", "x a", weights={"a": np.int64([0])})
op("Unsqueeze", "Unsqueeze", "x a", weights={"a": np.int64([0, 5])})
op("Squeeze all", "Squeeze")
op("Concat", "Concat", "x z", extra={"z": (F, (1, 3, 6, 6))}, axis=1)
op("Concat neg", "Concat", "x z", extra={"z": (F, (1, 8, 6, 2))}, axis=-1)
op("Split", "Split", "x s", "a b", weights={"s": np.int64([3, 5])}, axis=1)
op("Split even", "Split", outs="a b", axis=1, opset=13)
op("Split 18", "Split", outs="a b c", axis=1, num_outputs=3, opset=18)
stored = {"b": np.int64([1, 0]), "e": np.int64([7, 6]), "a": np.int64([1, 2]), "s": np.int64([2, 1])}
op("Slice", "Slice", "x b e a s", weights=stored)
stored = {"b": np.int64([-1]), "e": np.int64([-100]), "a": np.int64([1]), "s": np.int64([-1])}
op("Slice neg", "Slice", "x b e a s", weights=stored)
op("Gather", "Gather", "x i", weights={"i": np.int64([[0, 2], [-1, 1]])}, axis=1)
op("Gather scalar", "Gather", "x i", weights={"i": np.int64(2)}, axis=1)
op("GatherElements", "GatherElements", "x i", weights={"i": np.zeros((1, 2, 6, 6), np.int64)}, axis=1)
op("GatherND", "GatherND", "x i", weights={"i": np.int64([[0, 1], [0, 2]])})


def scatter(name, width=6, **attributes):
    stored = {"i": np.ones((1, 1, 6, width), np.int64), "u": weight(1, 1, 6, width)}
    op(name, "ScatterElements", "x i u", weights=stored, axis=1, **attributes)


scatter("ScatterElements")
op("GatherElements part", "GatherElements", "x i", weights={"i": np.ones((1, 2, 6, 4), np.int64)}, axis=1)
scatter("Scatter part", width=4)
op("ScatterND", "ScatterND", "x i u", weights={"i": np.int64([[0, 1], [0, 2]]), "u": weight(2, 6, 6)})
scatter("ScatterElements add", reduction="add")
stored = {"i": np.int64([[0, 1], [0, 1]]), "u": weight(2, 6, 6)}
op("ScatterND add", "ScatterND", "x i u", weights=stored, reduction="add")
scatter("Scatter max", reduction="max", opset=18)
op("Expand", "Expand", "x s", x=(1, 8, 1, 6), weights={"s": np.int64([2, 8, 6, 6])})
op("Tile", "Tile", "x r", weights={"r": np.int64([1, 2, 1, 3])})
op("Pad", "Pad", "x p", weights={"p": np.int64([0, 0, 1, 1, 0, 0, 1, 2])})
op("Pad value", "Pad", "x p v", weights={"p": np.int64([0, 0, 1, 1, 0, 0, 1, 2]), "v": np.float32(2.5)})
op("Pad reflect", "Pad", "x p", weights={"p": np.int64([0, 0, 1, 1, 0, 0, 1, 2])}, mode="reflect")
op("Pad edge", "Pad", "x p", weights={"p": np.int64([0, 0, 1, 1, 0, 0, 1, 2])}, mode="edge")
op("Pad neg", "Pad", "x p", weights={"p": np.int64([0, 0, -1, 1, 0, 0, 1, -2])})
op("Pad axes", "Pad", "x p  a", weights={"p": np.int64([1, 2]), "a": np.int64([2])}, opset=18)
op("Pad wrap", "Pad", "x p", weights={"p": np.int64([0, 0, 1, 1, 0, 0, 1, 2])}, mode="wrap", opset=19)
op("Pad i32", "Pad", "x p", t=I32, weights={"p": np.int64([0, 0, 1, 1, 0, 0, 1, 2])})
op("DepthToSpace", "DepthToSpace", blocksize=2)
op("DepthToSpace CRD", "DepthToSpace", blocksize=2, mode="CRD")
op("SpaceToDepth", "SpaceToDepth", blocksize=2)
op("Shape", "Shape")
op("Size", "Size")
op("Shape start", "Shape", start=1, end=3)
op("OneHot", "OneHot", "x d v", x=(4,), t=I64, weights={"d": np.int64(5), "v": np.float32([0, 1])})
stored = {"d": np.int64(5), "v": np.float32([2, 7])}
op("OneHot axis", "OneHot", "x d v", x=(4, 3), t=I64, weights=stored, axis=0)
op("EyeLike", "EyeLike", x=(5, 6), dtype=T.FLOAT)
op("Trilu", "Trilu", x=(5, 6))
op("Trilu lower", "Trilu", "x k", x=(5, 6), upper=0, weights={"k": np.int64(1)})
op("NonZero", "NonZero")
op("Unique", "Unique", x=(6,))
op("ReverseSequence", "ReverseSequence", "x l", x=(4, 3, 5), weights={"l": np.int64([2, 4, 1])})
op("Compress", "Compress", "x c", weights={"c": np.array([True, False, True])}, axis=1)
op("CastF2I", "Cast", to=T.INT32)
op("CastI2F", "Cast", t=I32, to=T.FLOAT)
op("CastF2B", "Cast", to=T.BOOL)
op("Cast f16", "Cast", to=T.FLOAT16)
op("Cast u8", "Cast", t=I32, to=T.UINT8)
op("CastLike", "CastLike", "x z", extra={"z": (I32, (1,))})
op("Clip", "Clip", "x a b", weights={"a": np.float32(-0.5), "b": np.float32(0.5)})
op("Clip lo", "Clip", "x a", weights={"a": np.float32(-0.5)})
op("Clip i32", "Clip", "x a b", t=I32, weights={"a": np.int32(0), "b": np.int32(1)})
op("Clip 6", "Clip", min=-0.5, max=0.5, opset=6)
op("Shrink", "Shrink", lambd=0.4, bias=0.2)
op("CenterCropPad", "CenterCropPad", "x s", weights={"s": np.int64([4, 8])}, axes=[2, 3], opset=18)
# ---- resizing ----


def resize(name, scales=(1, 1, 2, 2), sizes=(), x=SHAPE, coordinates="", opset=18, **attributes):
    operands, weights = ("x   z", {"z": np.int64(sizes)}) if sizes else ("x  s", {"s": np.float32(scales)})
    attributes |= {"coordinate_transformation_mode": coordinates} if coordinates else {}
    op(name, "Resize", operands, x=x, weights=weights, opset=opset, **attributes)


resize("Resize nearest", coordinates="asymmetric", nearest_mode="floor")
resize("Resize half")
resize("Resize linear", mode="linear")
resize("Resize align", mode="linear", coordinates="align_corners")
resize("Resize cubic", mode="cubic")
resize("Resize sizes", sizes=(1, 8, 9, 11), mode="linear")
resize("Resize axes", (2, 2), axes=[2, 3])
resize("Resize axes sizes", sizes=(12, 9), axes=[2, 3], mode="linear")
resize("Resize axes swapped", (2, 3), axes=[3, 2])
resize("Resize antialias", (1, 1, 0.5, 0.5), mode="linear", antialias=1)
resize("Resize antialias cubic", (1, 1, 0.5, 0.5), mode="cubic", antialias=1)
resize("Resize antialias up", mode="linear", antialias=1)
resize("Resize down", (1, 1, 0.5, 0.5), mode="linear")
resize("Resize aspect", sizes=(9, 11), axes=[2, 3], mode="linear", keep_aspect_ratio_policy="not_larger")
resize("Resize exclude", mode="cubic", exclude_outside=1)
crop = {"r": np.float32([0, 0, 0.2, 0.2, 1, 1, 0.8, 0.8]), "z": np.int64([1, 8, 5, 5])}
mode = {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"}
op("Resize crop", "Resize", "x r  z", weights=crop, opset=18, **mode)
resize("Resize pytorch", mode="linear", coordinates="pytorch_half_pixel")
resize("Resize ceil", (1, 1, 1.7, 1.7), nearest_mode="ceil")
symmetric = {"coordinates": "half_pixel_symmetric", "opset": 19}
resize("Resize half sym", (1, 1, 1.7, 1.7), mode="linear", **symmetric)
for k in ("nearest", "linear", "cubic"):
    resize(f"Resize half sym {k}", (1, 1, 2, 1.5), mode=k, **symmetric)
for k in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"):
    resize(f"Resize half sym {k}", (1.7, 0.6), axes=[2, 3], nearest_mode=k, **symmetric)
resize("Resize half sym sizes", sizes=(1, 8, 9, 11), mode="linear", **symmetric)
resize("Resize half sym cubic 1.7", (1, 1, 1.7, 1.7), mode="cubic", **symmetric)
resize("Resize 1d", (1, 1, 2), x=(1, 8, 12), mode="linear")
resize("Resize 3d", (1, 1, 2, 2, 2), x=(1, 2, 4, 4, 4), mode="linear")
resize("Resize channels", (1, 2, 1, 1))
resize("Resize round ceil", (1, 1, 1.7, 1.7), nearest_mode="round_prefer_ceil")
resize("Resize cubic a", mode="cubic", cubic_coeff_a=-0.5)
op("Upsample", "Upsample", "x s", weights={"s": np.float32([1, 1, 2, 2])}, opset=9)
# ---- matrix products ----
op("MatMul", "MatMul", "x w", x=(4, 32), weights={"w": weight(32, 24)})
op("MatMul 3d", "MatMul", "x w", x=(2, 4, 32), weights={"w": weight(32, 24)})
op("MatMul batched", "MatMul", "x z", x=(2, 4, 6), extra={"z": (F, (2, 6, 5))})
op("MatMul vec", "MatMul", "x w", x=(32,), weights={"w": weight(32, 24)})
op("MatMul vecr", "MatMul", "x w", x=(4, 32), weights={"w": weight(32)})
stored = {"w": np.arange(32 * 24, dtype=np.int32).reshape(32, 24) % 7 - 3}
op("MatMul i32", "MatMul", "x w", t=I32, x=(4, 32), weights=stored)
op("MatMul i64 dyn", "MatMul", "x z", t=I64, x=(4, 6), extra={"z": (I64, (6, 5))})
op("MatMul i32 3d", "MatMul", "x w", t=I32, x=(2, 4, 32), weights=stored)
op("MatMul broadcast", "MatMul", "x z", x=(3, 1, 4, 6), extra={"z": (F, (2, 6, 5))})
op("Gemm", "Gemm", "x w b", x=(4, 32), weights={"w": weight(24, 32), "b": weight(24)}, transB=1)
stored = {"w": weight(32, 24), "b": weight(4, 1)}
op("Gemm ab", "Gemm", "x w b", x=(4, 32), weights=stored, alpha=0.5, beta=2.0)
op("Gemm transA", "Gemm", "x w", x=(32, 4), weights={"w": weight(32, 24)}, transA=1)
op("Einsum", "Einsum", "x z", x=(2, 4, 6), extra={"z": (F, (2, 6, 5))}, equation="bij,bjk->bik")
op("Einsum w", "Einsum", "x w", x=(2, 4, 6), weights={"w": weight(6, 5)}, equation="bij,jk->bik")
op("MatMulInteger", "MatMulInteger", "x w", t=T.UINT8, x=(4, 8), weights={"w": np.ones((8, 5), np.uint8)})
op("ConvInteger", "ConvInteger", "x w", t=T.UINT8, weights={"w": np.ones((4, 8, 3, 3), np.uint8)})
integers = np.random.default_rng(5)
filters = integers.integers(0, 256, (6, 4, 3, 2), np.uint8)
stored = {"w": filters, "a": np.uint8(7), "b": np.uint8(131)}
window = {"pads": [1, 0, 2, 1], "strides": [2, 1], "group": 2}
op("ConvInteger zeros", "ConvInteger", "x w a b", t=T.UINT8, weights=stored, **window)
stored = {"w": integers.integers(-128, 128, (6, 8, 3, 3), np.int8), "b": np.int8(-5)}
op("ConvInteger signed", "ConvInteger", "x w  b", t=T.UINT8, weights=stored, dilations=[2, 1])
op("QDQ", "QuantizeLinear", "x s z", weights={"s": np.float32(0.02), "z": np.uint8(128)})
pair = [
    h.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="q"),
    h.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], name="n"),
]
net("QDQ2", pair, {"x": (F, SHAPE)}, {"s": np.float32(0.02), "z": np.uint8(128)})
op("DynQuant", "DynamicQuantizeLinear", outs="y s z")
op("Det", "Det", x=(2, 4, 4))
# ---- recurrent and other layers ----
for k, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)):
    stored = {"w": weight(1, 8 * gates, 6), "r": weight(1, 8 * gates, 8), "b": weight(1, 16 * gates)}
    op(k, k, "x w r b", x=(5, 1, 6), weights=stored, hidden_size=8)
samples = {
    "": {},
    " near": {"mode": "nearest"},
    " border": {"padding_mode": "border"},
    " bicubic": {"mode": "bicubic"},
    " align": {"align_corners": 1},
    " reflection": {"padding_mode": "reflection"},
}
for k, attributes in samples.items():
    op(f"GridSample{k}", "GridSample", "x g", extra={"g": (F, (1, 5, 5, 2))}, opset=16, **attributes)
op("AffineGrid", "AffineGrid", "x s", x=(1, 2, 3), weights={"s": np.int64([1, 3, 4, 5])}, opset=20)
op("NMS", "NonMaxSuppression", "x z m", x=(1, 6, 4), extra={"z": (F, (1, 1, 6))}, weights={"m": np.int64(3)})
heads = {"q_num_heads": 2, "kv_num_heads": 2}
operands = {"k": (F, (1, 4, 16)), "v": (F, (1, 4, 16))}
op("Attention", "Attention", "x k v", x=(1, 4, 16), extra=operands, opset=23, **heads)
stored = {"i": np.int64([4, 4]), "b": np.int64([2, 2])}
op("Col2Im", "Col2Im", "x i b", x=(1, 8 * 4, 9), weights=stored, opset=18)
stored = {"i": np.int64([[[[5, 7], [13, 15]]]])}
op("MaxUnpool", "MaxUnpool", "x i", x=(1, 1, 2, 2), weights=stored, kernel_shape=[2, 2], strides=[2, 2])
op("NLL", "NegativeLogLikelihoodLoss", "x t", x=(3, 5), weights={"t": np.int64([1, 0, 2])}, opset=13)
op("SCE", "SoftmaxCrossEntropyLoss", "x t", x=(3, 5), weights={"t": np.int64([1, 0, 2])}, opset=13)
op("Cast bool", "Cast", t=B, to=T.FLOAT)
op("Relu i32", "Relu", t=I32, opset=14)
op("Abs i32", "Abs", t=I32)
op("Neg i64", "Neg", t=I64)
op("Sign i32", "Sign", t=I32)
op("Where i64", "Where", "c x z", t=I64, extra={"c": (B, SHAPE), "z": (I64, SHAPE)})
