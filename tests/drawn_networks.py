"""Small networks of random layers, in any order, as ONNX."""

import math
from random import Random

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx_models import onnx_model

Shape = tuple[int, ...]
MOST_ELEMENTS = 20000  # of a tensor
VIEWS = {"Concat", "Expand", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"}


class Graph:
    """An ONNX network that grows by a layer at a time; methods add operators and return what they give."""

    def __init__(self, *inputs: Shape, seed: int = 0):
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.shapes = {f"x{number}": dims for number, dims in enumerate(inputs)}
        self.inputs = tuple(self.shapes)
        self.values = np.random.default_rng(seed)

    def constant(self, array: object) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def weight(self, *dims: int) -> str:
        scale = math.prod(dims[1:]) ** -0.5
        return self.constant((self.values.standard_normal(dims) * scale).astype(np.float32))

    def add(self, kind: str, operands: list[str], dims: Shape, name: str = "", **attributes: object) -> str:
        """A node `kind` of these operands, whose result has the shape `dims` and the node's name."""
        name = name or f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, operands, [name], name=name, **attributes))
        self.shapes[name] = tuple(dims)
        return name

    def conv(self, x: str, channels: int, kernel=1, *, stride=1, groups=1, bias=True, name: str = "") -> str:
        n, c, h, w = self.shapes[x]
        operands = [x, self.weight(channels, c // groups, kernel, kernel)]
        operands += [self._bias(channels)] if bias else []
        pads = [kernel // 2] * 4
        size = [(extent + 2 * pads[0] - kernel) // stride + 1 for extent in (h, w)]
        attributes = {"strides": [stride] * 2, "pads": pads, "group": groups}
        return self.add("Conv", operands, (n, channels, *size), name, **attributes)

    def _bias(self, channels: int) -> str:
        return self.constant(self.values.standard_normal(channels).astype(np.float32))

    def relu(self, x: str) -> str:
        return self.add("Relu", [x], self.shapes[x])

    def concat(self, *parts: str, axis: int = 1) -> str:
        dims = self.shapes[parts[0]]
        joined = sum(self.shapes[part][axis] for part in parts)
        return self.add("Concat", [*parts], (*dims[:axis], joined, *dims[axis + 1 :]), axis=axis)

    def product(self, x: str, width: int, *, bias: bool = False) -> str:
        *outer, inner = self.shapes[x]
        matrix = self.constant((self.values.standard_normal((inner, width)) * inner**-0.5).astype(np.float32))
        y = self.add("MatMul", [x, matrix], (*outer, width))
        return self.add("Add", [y, self._bias(width)], (*outer, width)) if bias else y

    def reshape(self, x: str, *dims: int) -> str:
        return self.add("Reshape", [x, self.constant(np.int64(dims))], dims)

    def transpose(self, x: str, *axes: int) -> str:
        return self.add("Transpose", [x], tuple(self.shapes[x][axis] for axis in axes), perm=axes)

    def slice(self, x: str, axis: int, begin: int, end: int, step: int = 1) -> str:
        dims = list(self.shapes[x])
        dims[axis] = len(range(begin, end, step))
        ends = [self.constant(np.int64([value])) for value in (begin, end, axis, step)]
        return self.add("Slice", [x, *ends], tuple(dims))

    def hard_swish(self, x: str) -> str:
        """Spelled out: its operand is read twice."""
        dims = self.shapes[x]
        shifted = self.add("Add", [x, self.constant(np.float32(3))], dims)
        ends = [self.constant(np.float32(value)) for value in (0, 6)]
        gate = self.add("Div", [self.add("Clip", [shifted, *ends], dims), ends[1]], dims)
        return self.add("Mul", [x, gate], dims)

    def attention(self, x: str, heads: int, places: str = "") -> str:
        """Of `x` over itself and added to it; `places` is added to the scores."""
        n, length, width = self.shapes[x]
        size = width // heads

        def parts(axes: tuple[int, ...]) -> str:
            y = self.product(x, width, bias=axes[1] == 2)
            return self.transpose(self.reshape(y, n, length, heads, size), *axes)

        queries, keys, values = parts((0, 2, 1, 3)), parts((0, 2, 3, 1)), parts((0, 2, 1, 3))
        scores = (n, heads, length, length)
        y = self.add("MatMul", [queries, keys], scores)
        y = self.add("Mul", [y, self.constant(np.float32(size**-0.5))], scores)
        y = self.add("Add", [y, places], scores) if places else y
        y = self.add("Softmax", [y], scores, axis=-1)
        y = self.add("MatMul", [y, values], (n, heads, length, size))
        y = self.reshape(self.transpose(y, 0, 2, 1, 3), n, length, width)
        return self.add("Add", [self.product(y, width), x], (n, length, width))

    def results(self) -> list[str]:
        """Tensors that nothing reads."""
        read = {name for node in self.nodes for name in node.input}
        return [name for name in self.shapes if name not in read and name not in self.inputs]

    def model(self, *also: str) -> onnx.ModelProto:
        """The network, with all results that nothing reads as outputs, and `also`."""
        read = {name for node in self.nodes for name in node.input}
        inputs = {name: self.shapes[name] for name in self.inputs if name in read}
        outputs = {name: self.shapes[name] for name in [*self.results(), *also]}
        model = onnx_model(self.nodes, inputs, outputs, self.constants, name="drawn", opset=18)
        onnx.checker.check_model(model)
        return model


# ---- layers, each of a tensor of any shape; None where it does not fit ----


def _activation(graph: Graph, draw: Random, x: str) -> str:
    kind = draw.choice(["Relu", "Sigmoid", "Tanh", "Elu", "Abs", "Softplus", "swish"])
    return graph.hard_swish(x) if kind == "swish" else graph.add(kind, [x], graph.shapes[x])


def _conv(graph: Graph, draw: Random, x: str) -> str | None:
    dims = graph.shapes[x]
    if len(dims) != 4 or min(dims[2:]) < 2:
        return None
    groups = draw.choice([1, 1, 1, dims[1], 2 if dims[1] % 2 == 0 else 1])
    channels = dims[1] if groups == dims[1] else draw.choice([8, 16, 24])
    kernel, stride, bias = draw.choice([1, 1, 3]), draw.choice([1, 1, 2]), draw.random() < 0.6
    return graph.conv(x, channels, kernel, stride=stride, groups=groups, bias=bias)


def _pool(graph: Graph, draw: Random, x: str) -> str | None:
    dims = graph.shapes[x]
    if len(dims) != 4 or min(dims[2:]) < 3:
        return None
    kind, size = draw.choice(["MaxPool", "AveragePool"]), tuple((extent - 2) // 2 + 1 for extent in dims[2:])
    return graph.add(kind, [x], (*dims[:2], *size), kernel_shape=[2, 2], strides=[2, 2])


def _squeeze_excite(graph: Graph, draw: Random, x: str) -> str | None:
    dims = graph.shapes[x]
    if len(dims) != 4:
        return None
    mean = graph.add("GlobalAveragePool", [x], (*dims[:2], 1, 1))
    inner = graph.conv(mean, 4)
    gate = graph.conv(graph.add("Relu", [inner], graph.shapes[inner]), dims[1])
    return graph.add("Mul", [x, graph.add("Sigmoid", [gate], graph.shapes[gate])], dims)


def _resize(graph: Graph, draw: Random, x: str) -> str | None:
    n, c, *size = graph.shapes[x] if len(graph.shapes[x]) == 4 else (0, 0)
    if not n or max(size) > 10:
        return None
    scales = graph.constant(np.float32([1, 1, 2, 2]))
    mode = draw.choice(["nearest", "linear"])
    return graph.add("Resize", [x, "", scales], (n, c, 2 * size[0], 2 * size[1]), mode=mode)


def _product(graph: Graph, draw: Random, x: str) -> str | None:
    dims = graph.shapes[x]
    if len(dims) not in (2, 3) or dims[-1] > 512:
        return None
    return graph.product(x, draw.choice([8, 16, 32]), bias=draw.random() < 0.5)


def _flat(graph: Graph, draw: Random, x: str) -> str | None:
    n, *inner = graph.shapes[x]
    return graph.product(graph.reshape(x, n, math.prod(inner)), 16, bias=True) if inner else None


def _attention(graph: Graph, draw: Random, x: str) -> str | None:
    dims = graph.shapes[x]
    heads = draw.choice([1, 2, 4])
    return graph.attention(x, heads) if len(dims) == 3 and not dims[2] % heads and dims[1] <= 64 else None


def _norm(graph: Graph, draw: Random, x: str) -> str | None:
    dims = graph.shapes[x]
    if len(dims) not in (2, 3):
        return None
    scales = [graph.constant(np.ones(dims[-1], np.float32)) for _ in range(2)]
    return graph.add("LayerNormalization", [x, *scales], dims, axis=-1)


def _softmax(graph: Graph, draw: Random, x: str) -> str:
    return graph.add("Softmax", [x], graph.shapes[x], axis=draw.randrange(len(graph.shapes[x])))


def _slice(graph: Graph, draw: Random, x: str) -> str | None:
    dims = graph.shapes[x]
    axis = draw.randrange(len(dims))
    begin = draw.choice([0, dims[axis] // 2])
    return graph.slice(x, axis, begin, dims[axis] if begin else (dims[axis] + 1) // 2)


def _join(graph: Graph, draw: Random, x: str) -> str:
    dims = graph.shapes[x]
    axis = draw.randrange(len(dims))
    others = [
        name
        for name, partner in graph.shapes.items()
        if len(partner) == len(dims)
        and all(a == b for i, (a, b) in enumerate(zip(partner, dims)) if i != axis)
    ]
    return graph.concat(x, draw.choice(others), axis=axis)


def _residual(graph: Graph, draw: Random, x: str) -> str:
    others = [name for name, dims in graph.shapes.items() if dims == graph.shapes[x]]
    return graph.add(draw.choice(["Add", "Mul", "Max"]), [x, draw.choice(others)], graph.shapes[x])


def _transpose(graph: Graph, draw: Random, x: str) -> str:
    axes = list(range(len(graph.shapes[x])))
    draw.shuffle(axes)
    return graph.transpose(x, *axes)


def _reshape(graph: Graph, draw: Random, x: str) -> str:
    dims = graph.shapes[x]
    n, last = dims[0], dims[-1]
    flat = math.prod(dims)
    return graph.reshape(x, *draw.choice([(n, flat // n), (flat // last, last), (1, flat // last, last)]))


def _tokens(graph: Graph, draw: Random, x: str) -> str | None:
    dims = graph.shapes[x]
    if len(dims) != 4:
        return None
    n, c, h, w = dims
    return graph.transpose(graph.reshape(x, n, c, h * w), 0, 2, 1)


def _map(graph: Graph, draw: Random, x: str) -> str | None:
    dims = graph.shapes[x]
    if len(dims) != 3 or dims[1] % 2:
        return None
    n, length, c = dims
    return graph.reshape(graph.transpose(x, 0, 2, 1), n, c, 2, length // 2)


def _reduce(graph: Graph, draw: Random, x: str) -> str | None:
    dims = graph.shapes[x]
    if len(dims) < 2:
        return None
    axis, keepdims = draw.randrange(len(dims)), draw.choice([0, 1])
    axes = graph.constant(np.int64([axis]))
    kind = draw.choice(["ReduceMean", "ReduceSum", "ReduceMax", "ReduceL2"])
    return graph.add(kind, [x, axes], (*dims[:axis], *[1] * keepdims, *dims[axis + 1 :]), keepdims=keepdims)


def _cast(graph: Graph, draw: Random, x: str) -> str:
    narrow = graph.add("Cast", [x], graph.shapes[x], to=TensorProto.FLOAT16)
    return graph.add("Cast", [narrow], graph.shapes.pop(narrow), to=TensorProto.FLOAT)


LAYERS = {
    _conv: 5, _product: 4, _attention: 2, _activation: 4, _residual: 3, _join: 2, _slice: 2, _reshape: 2,
    _transpose: 2, _pool: 1, _squeeze_excite: 1, _resize: 1, _flat: 1, _norm: 1, _softmax: 1, _tokens: 2,
    _map: 1, _reduce: 1, _cast: 1,
}  # fmt: skip


def _unary(graph: Graph, draw: Random, x: str) -> str:
    kind = draw.choice(UNARY)
    return graph.add(kind, [x], graph.shapes[x])


def _scalar(graph: Graph, draw: Random, x: str) -> str:
    """An operator with a number, on either side where it may be."""
    kind = draw.choice(["Add", "Sub", "Mul", "Div", "Max", "Min", "PRelu", "Clip"])
    number = graph.constant(np.float32(draw.choice([0.25, 1.5, 3])))
    if kind == "Clip":
        operands = [x, graph.constant(np.float32(-0.5)), number]
    else:
        operands = [number, x] if kind in ("Sub", "Mul", "Min") and draw.random() < 0.5 else [x, number]
    return graph.add(kind, operands, graph.shapes[x])


def _vector(graph: Graph, draw: Random, x: str) -> str:
    """An operator with numbers along one axis."""
    dims = graph.shapes[x]
    axis = draw.randrange(len(dims))
    numbers = np.abs(graph.values.standard_normal((dims[axis], *[1] * (len(dims) - axis - 1)))) + 0.5
    kind = draw.choice(["Add", "Sub", "Mul", "Div", "Min", "PRelu"])
    return graph.add(kind, [x, graph.constant(numbers.astype(np.float32))], dims)


def _conditional_leaky_relu(graph: Graph, draw: Random, x: str) -> str:
    """A leaky ReLU by its condition."""
    dims = graph.shapes[x]
    positive = graph.add(draw.choice(["Greater", "GreaterOrEqual"]), [x, graph.constant(np.float32(0))], dims)
    small = graph.add("Mul", [x, graph.constant(np.float32(0.25))], dims)
    del graph.shapes[positive]
    return graph.add("Where", [positive, x, small], dims)


def _pad(graph: Graph, draw: Random, x: str) -> str:
    dims = graph.shapes[x]
    mode = draw.choice(["constant", "edge", "reflect"])
    pads = [[draw.choice([0, 0, 1]) if extent > 1 else 0 for extent in dims] for _ in range(2)]
    size = tuple(sum(extents) for extents in zip(dims, *pads, strict=True))
    return graph.add("Pad", [x, graph.constant(np.int64([*pads[0], *pads[1]]))], size, mode=mode)


def _tile(graph: Graph, draw: Random, x: str) -> str:
    dims = graph.shapes[x]
    times = [draw.choice([1, 1, 2]) for _ in dims]
    return graph.add("Tile", [x, graph.constant(np.int64(times))], tuple(a * b for a, b in zip(dims, times)))


def _expand(graph: Graph, draw: Random, x: str) -> str:
    dims = (draw.choice([1, 2]), *graph.shapes[x])
    return graph.add("Expand", [x, graph.constant(np.int64(dims))], dims)


def _gather(graph: Graph, draw: Random, x: str) -> str:
    dims = graph.shapes[x]
    axis = draw.randrange(len(dims))
    places = [draw.randrange(-dims[axis], dims[axis]) for _ in range(draw.choice([1, 2, 5]))]
    size = (*dims[:axis], len(places), *dims[axis + 1 :])
    return graph.add("Gather", [x, graph.constant(np.int64(places))], size, axis=axis)


def _strided_slice(graph: Graph, draw: Random, x: str) -> str | None:
    axis = draw.randrange(len(graph.shapes[x]))
    extent = graph.shapes[x][axis]
    return graph.slice(x, axis, draw.choice([0, 1]), extent, 2) if extent > 1 else None


def _split(graph: Graph, draw: Random, x: str) -> str | None:
    dims = graph.shapes[x]
    axis = draw.randrange(len(dims))
    first = dims[axis] // 2
    if not first:
        return None
    sizes = graph.constant(np.int64([first, dims[axis] - first]))
    name = graph.add("Split", [x, sizes], (*dims[:axis], first, *dims[axis + 1 :]), axis=axis)
    graph.nodes[-1].output.append(f"{name}_rest")
    graph.shapes[f"{name}_rest"] = (*dims[:axis], dims[axis] - first, *dims[axis + 1 :])
    return name


def _blocks(graph: Graph, draw: Random, x: str) -> str | None:
    n, c, *size = graph.shapes[x] if len(graph.shapes[x]) == 4 else (0, 0)
    if n and c % 4 == 0 and draw.random() < 0.5:
        mode = draw.choice(["DCR", "CRD"])
        dims = (n, c // 4, 2 * size[0], 2 * size[1])
        return graph.add("DepthToSpace", [x], dims, blocksize=2, mode=mode)
    if n and not size[0] % 2 and not size[1] % 2:
        return graph.add("SpaceToDepth", [x], (n, 4 * c, size[0] // 2, size[1] // 2), blocksize=2)
    return None


def _conv_transpose(graph: Graph, draw: Random, x: str) -> str | None:
    n, c, *size = graph.shapes[x] if len(graph.shapes[x]) == 4 else (0, 0)
    if not n or max(size) > 10:
        return None
    groups, kernel, stride = draw.choice([1, 1, c]), draw.choice([2, 3]), draw.choice([1, 2])
    outputs = draw.choice([1, 2]) if groups == c else draw.choice([4, 8])
    dims = [(extent - 1) * stride + kernel for extent in size]
    parts = [x, graph.weight(c, outputs, kernel, kernel)]
    return graph.add("ConvTranspose", parts, (n, outputs * groups, *dims), strides=[stride] * 2, group=groups)


def _long_conv(graph: Graph, draw: Random, x: str) -> str | None:
    """Along a sequence, or dilated."""
    dims = graph.shapes[x]
    if len(dims) == 3 and dims[2] > 3:
        operands = [x, graph.weight(8, dims[1], 3)]
        return graph.add("Conv", operands, (dims[0], 8, dims[2] - 2))
    if len(dims) != 4 or min(dims[2:]) < 5:
        return None
    size = [extent - 4 for extent in dims[2:]]
    operands = [x, graph.weight(8, dims[1], 3, 3)]
    return graph.add("Conv", operands, (dims[0], 8, *size), dilations=[2, 2])


def _channel_norm(graph: Graph, draw: Random, x: str) -> str | None:
    dims = graph.shapes[x]
    if len(dims) < 3 or math.prod(dims[2:]) < 4:
        return None
    kind, c = draw.choice(["InstanceNormalization", "BatchNormalization"]), dims[1]
    count = 2 if kind == "InstanceNormalization" else 4
    numbers = [
        graph.constant((np.abs(graph.values.standard_normal(c)) + 0.5).astype(np.float32))
        for _ in range(count)
    ]
    return graph.add(kind, [x, *numbers], dims, epsilon=0.01)


def _window(graph: Graph, draw: Random, x: str) -> str | None:
    """A pooling with overlapping windows, padding or rounded up."""
    dims = graph.shapes[x]
    if len(dims) != 4 or min(dims[2:]) < 3:
        return None
    kind, pad = draw.choice(["MaxPool", "AveragePool"]), draw.choice([0, 1])
    pool_attributes = {"count_include_pad": draw.choice([0, 1])} if kind == "AveragePool" else {}
    size = tuple((extent + 2 * pad - 3) // 2 + 1 for extent in dims[2:])
    return graph.add(
        kind, [x], (*dims[:2], *size), kernel_shape=[3, 3], strides=[2, 2], pads=[pad] * 4, **pool_attributes
    )


def _reduce_other(graph: Graph, draw: Random, x: str) -> str | None:
    dims = graph.shapes[x]
    if len(dims) < 2:
        return None
    axis, keepdims = draw.randrange(len(dims)), draw.choice([0, 1])
    kind = draw.choice(["ReduceMin", "ReduceL1", "ReduceLogSumExp", "ReduceSumSquare"])
    axes = graph.constant(np.int64([axis]))
    return graph.add(kind, [x, axes], (*dims[:axis], *[1] * keepdims, *dims[axis + 1 :]), keepdims=keepdims)


def _running_sum(graph: Graph, draw: Random, x: str) -> str:
    dims = graph.shapes[x]
    axis = graph.constant(np.int64(draw.randrange(len(dims))))
    flags = {"exclusive": draw.choice([0, 1]), "reverse": draw.choice([0, 1])}
    return graph.add("CumSum", [x, axis], dims, **flags)


def _log_softmax(graph: Graph, draw: Random, x: str) -> str:
    return graph.add("LogSoftmax", [x], graph.shapes[x], axis=draw.randrange(len(graph.shapes[x])))


def _top_k(graph: Graph, draw: Random, x: str) -> str:
    dims = graph.shapes[x]
    axis = draw.randrange(len(dims))
    count = (dims[axis] + 1) // 2
    operands = [x, graph.constant(np.int64([count]))]
    name = graph.add("TopK", operands, (*dims[:axis], count, *dims[axis + 1 :]), axis=axis)
    graph.nodes[-1].output.append(f"{name}_places")
    return name


def _gemm(graph: Graph, draw: Random, x: str) -> str | None:
    dims = graph.shapes[x]
    if len(dims) != 2 or max(dims) > 512:
        return None
    transpose_a, transpose_b = draw.choice([0, 1]), draw.choice([0, 1])
    inner, rows = dims[1 - transpose_a], dims[transpose_a]
    matrix = graph.weight(*((16, inner) if transpose_b else (inner, 16)))
    bias = graph.constant(graph.values.standard_normal((1, 16)).astype(np.float32))
    scales = {"alpha": 0.5, "beta": 0.75} if draw.random() < 0.5 else {}
    return graph.add("Gemm", [x, matrix, bias], (rows, 16), transA=transpose_a, transB=transpose_b, **scales)


def _gram(graph: Graph, draw: Random, x: str) -> str | None:
    """A tensor times itself, turned."""
    dims = graph.shapes[x]
    if len(dims) < 2 or dims[-2] > 64:
        return None
    axes = (*range(len(dims) - 2), len(dims) - 1, len(dims) - 2)
    turned = graph.transpose(x, *axes)
    product = graph.add("MatMul", [x, turned], (*dims[:-1], dims[-2]))
    return graph.add("Div", [product, graph.constant(np.float32(dims[-1]))], graph.shapes[product])


def _change_rank(graph: Graph, draw: Random, x: str) -> str:
    dims = graph.shapes[x]
    ones = [axis for axis, extent in enumerate(dims) if extent == 1]
    if ones and len(dims) > 1:
        axis = draw.choice(ones)
        operands = [x, graph.constant(np.int64([axis]))]
        return graph.add("Squeeze", operands, (*dims[:axis], *dims[axis + 1 :]))
    axis = draw.randrange(len(dims) + 1)
    operands = [x, graph.constant(np.int64([axis]))]
    return graph.add("Unsqueeze", operands, (*dims[:axis], 1, *dims[axis:]))


def _triangle(graph: Graph, draw: Random, x: str) -> str | None:
    dims = graph.shapes[x]
    return graph.add("Trilu", [x], dims, upper=draw.choice([0, 1])) if len(dims) > 1 else None


def _cast_like(graph: Graph, draw: Random, x: str) -> str:
    like = graph.constant(np.float16([1]))
    narrow = graph.add("CastLike", [x, like], graph.shapes[x])
    return graph.add("Cast", [narrow], graph.shapes.pop(narrow), to=TensorProto.FLOAT)


UNARY = (
    *("Asinh", "Atan", "Celu", "Cos", "Erf", "Exp", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "Neg"),
    *("Selu", "Sin", "Softsign", "ThresholdedRelu", "Identity", "Sigmoid", "Tanh"),
)
# Beside `LAYERS`, for networks that are compared by value.
OTHERS = {
    _unary: 5, _scalar: 3, _vector: 2, _conditional_leaky_relu: 1, _pad: 2, _tile: 1, _expand: 1, _gather: 2,
    _strided_slice: 2, _split: 2, _blocks: 2, _conv_transpose: 2, _long_conv: 2, _channel_norm: 2, _window: 2,
    _reduce_other: 2, _running_sum: 1, _log_softmax: 1, _top_k: 1, _gemm: 2, _gram: 1, _change_rank: 2,
    _triangle: 1, _cast_like: 1,
}  # fmt: skip


def random_network(draw: Random, most_layers: int = 10, others: bool = False) -> onnx.ModelProto:
    """A network of up to so many layers over a map, a sequence or both: of `LAYERS`, and `others` too."""
    layers = LAYERS | OTHERS if others else LAYERS
    sequence = (draw.choice([1, 1, 2]), draw.choice([4, 9, 16]), draw.choice([16, 32]))
    inputs = draw.choice(
        [
            [(draw.choice([1, 2]), draw.choice([1, 3, 8]), 8, draw.choice([6, 8]))],
            [sequence],
            [(1, 8, 6, 8), sequence],
        ]
    )
    graph = Graph(*inputs, seed=draw.randrange(1 << 30))
    for _ in range(draw.randint(2, most_layers)):
        layer = draw.choices(list(layers), list(layers.values()))[0]
        recent = list(graph.shapes)[-5:]
        output = layer(graph, draw, draw.choice(recent))
        if output and not 0 < math.prod(graph.shapes[output]) <= MOST_ELEMENTS:
            del graph.shapes[output]
    if all(node.op_type in VIEWS for node in graph.nodes):  # a network of views alone is refused
        graph.conv("x0", 8) if len(inputs[0]) == 4 else graph.product("x0", 8)
    also = [name for name in graph.shapes if name not in graph.inputs]
    return graph.model(*draw.sample(also, min(len(also), draw.choice([0, 0, 1]))))
