"""Do operators of other domains give what ONNX Runtime gives?"""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_models import onnx_model
from test_frontend import matches_onnx_runtime, weight

from pimflow import zoo
from pimflow.errors import UnsupportedOpError
from pimflow.frontend import onnx_graph
from pimflow.relay_passes.regions.extract_regions import extract_regions

MICROSOFT, LEARNING = "com.microsoft", "ai.onnx.ml"
WIDTH = 8


def foreign_model(nodes, inputs, outputs, weights=(), opset: int = 17) -> onnx.ModelProto:
    """A network with operators of other domains, as `zoo.load_model` reads it."""
    model = onnx_model(nodes, inputs, outputs, weights, opset=opset)
    model.opset_import.extend([helper.make_opsetid(MICROSOFT, 1), helper.make_opsetid(LEARNING, 2)])
    return zoo.load_model(model)


def single(kind: str, operands: str, result_shape, weights=(), domain=MICROSOFT, x=(2, 3, WIDTH), **attrs):
    """A network of one foreign operator of `x` and `weights`."""
    node = helper.make_node(kind, operands.split(), ["y"], "node", domain=domain, **attrs)
    return foreign_model([node], {"x": x}, {"y": result_shape}, weights)


SEQUENCE = (2, 3, WIDTH)
VECTOR, MATRIX = weight(WIDTH), weight(WIDTH, WIDTH)
QKV = {"w": weight(WIDTH, 3 * WIDTH), "b": weight(3 * WIDTH)}
INTEGERS = {"q": np.arange(24, dtype="uint8").reshape(3, 8), "w": np.arange(40, dtype="int8").reshape(8, 5)}
INTEGERS |= {"s": np.float32(0.02), "t": weight(5), "zero": np.uint8(7)}
INTEGERS |= {"zeros": np.arange(5, dtype="int8"), "b": weight(5)}
DYNAMIC = {"w": np.arange(40, dtype="uint8").reshape(8, 5), "s": np.float32(0.02), "z": np.uint8(9)}
DYNAMIC |= {"b": weight(5)}
FLOATS = {
    "BiasGelu": single("BiasGelu", "x b", SEQUENCE, {"b": VECTOR}),
    "Gelu": single("Gelu", "x", SEQUENCE),
    "FastGelu": single("FastGelu", "x b", SEQUENCE, {"b": VECTOR}),
    "FastGelu without bias": single("FastGelu", "x", SEQUENCE),
    "QuickGelu": single("QuickGelu", "x", SEQUENCE, alpha=1.5),
    "SkipLayerNormalization": single(
        "SkipLayerNormalization",
        "x s g b c",
        SEQUENCE,
        {"s": weight(*SEQUENCE), **dict.fromkeys("gbc", VECTOR)},
    ),
    "FusedMatMul": single("FusedMatMul", "x m", SEQUENCE, {"m": MATRIX}, alpha=0.5, transB=1),
    "FusedMatMul of activations": single("FusedMatMul", "x x", (2, 3, 3), alpha=0.5, transB=1),
    "FusedConv": single(
        *("FusedConv", "x k b z", (1, 4, 4, 4)),
        {"k": weight(4, 3, 3, 3), "b": weight(4), "z": weight(1, 4, 4, 4)},
        x=(1, 3, 6, 6),
        activation="LeakyRelu",
        activation_params=[0.3],
    ),
    "FusedGemm": single(
        "FusedGemm", "x m b", (3, WIDTH), {"m": MATRIX, "b": VECTOR}, x=(3, WIDTH), activation="Relu"
    ),
    "Attention": single("Attention", "x w b", SEQUENCE, QKV, num_heads=2),
    "Attention of uneven sizes": single(
        *("Attention", "x w b", (2, 3, 4), {"w": weight(WIDTH, 20), "b": weight(20)}),
        num_heads=2,
        qkv_hidden_sizes=[8, 8, 4],
    ),
    "causal Attention": single("Attention", "x w b", SEQUENCE, QKV, num_heads=2, unidirectional=1, scale=0.5),
    "Attention of lengths": single(
        "Attention", "x w b m", SEQUENCE, QKV | {"m": np.array([2, 3], "int32")}, num_heads=4
    ),
    "Attention with a mask": single(
        *("Attention", "x w b m", SEQUENCE, QKV | {"m": np.array([[1, 0, 1], [1, 1, 1]], "int32")}),
        num_heads=4,
    ),
    "MatMulIntegerToFloat": single("MatMulIntegerToFloat", "q w s t zero zeros b", (3, 5), INTEGERS, x=(1,)),
    "DynamicQuantizeMatMul": single("DynamicQuantizeMatMul", "x w s z b", (2, 3, 5), DYNAMIC),
    "Scaler": single("Scaler", "x", (3, 2), domain=LEARNING, x=(3, 2), offset=[0.5, 1.0], scale=[2.0, 3.0]),
    "Normalizer": single("Normalizer", "x", (3, 4), domain=LEARNING, x=(3, 4), norm="L2"),
    "Normalizer by maxima": single("Normalizer", "x", (3, 4), domain=LEARNING, x=(3, 4), norm="MAX"),
    "Binarizer": single("Binarizer", "x", (3, 4), domain=LEARNING, x=(3, 4), threshold=0.25),
    "ArrayFeatureExtractor": single(
        "ArrayFeatureExtractor", "x i", (3, 2), {"i": np.array([3, 1])}, LEARNING, x=(3, 4)
    ),
    "LinearRegressor": single(
        *("LinearRegressor", "x", (3, 2), (), LEARNING),
        x=(3, 2),
        coefficients=[1.0, 2.0, 3.0, 4.0],
        intercepts=[0.5, -0.5],
        targets=2,
    ),
    "LinearClassifier": foreign_model(
        [
            helper.make_node(
                *("LinearClassifier", ["x"], ["label", "y"], "node"),
                domain=LEARNING,
                coefficients=[1.0, -2.0, 3.0, 1.0, -1.0, 0.5],
                intercepts=[0.5, -0.5, 0.1],
                classlabels_ints=[7, 3, 5],
                post_transform="SOFTMAX",
            )
        ],
        {"x": (3, 2)},
        {"label": (TensorProto.INT64, (3,)), "y": (3, 3)},
    ),
    "QuantizeLinear and DequantizeLinear of 16 bits": foreign_model(
        [
            helper.make_node(kind, [x, "s", "z"], [y], y, domain=MICROSOFT, axis=1)
            for kind, x, y in (("QuantizeLinear", "x", "q"), ("DequantizeLinear", "q", "y"))
        ],
        {"x": (2, 3, 4)},
        {"y": (2, 3, 4)},
        {"s": np.array([1e-3, 2e-3, 1e-5], "float32"), "z": np.array([5, -3, 40], "int16")},
    ),
    "Imputer": single(
        *("Imputer", "x", (3, 2), (), LEARNING),
        x=(3, 2),
        imputed_value_floats=[7.0, 8.0],
        replaced_value_float=0.5,
    ),
}


@pytest.mark.parametrize("model", FLOATS.values(), ids=FLOATS.keys())
def test_a_foreign_operator(model):
    matches_onnx_runtime(model)


def test_results_of_an_embedding():
    weights = {"words": weight(9, WIDTH), "places": weight(6, WIDTH), "kinds": weight(3, WIDTH)}
    weights |= {"g": VECTOR, "b": VECTOR, "mask": np.array([[1, 1, 0]], "int32")}
    operands = ["ids", "segments", "words", "places", "kinds", "g", "b", "mask"]
    node = helper.make_node(
        "EmbedLayerNormalization", operands, ["y", "length", "sum"], "node", domain=MICROSOFT, epsilon=1e-5
    )
    ids = {name: (TensorProto.INT32, (1, 3)) for name in ("ids", "segments")}
    results = {"y": (1, 3, WIDTH), "length": (TensorProto.INT32, (1,)), "sum": (1, 3, WIDTH)}
    matches_onnx_runtime(foreign_model([node], ids, results, weights))


@pytest.mark.long
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", [False, True])
def test_weights_of_a_few_bits(bits, zeros):
    """The last block is not full."""
    rows, columns, block = 5, 40, 16
    random, blocks = np.random.default_rng(bits), 3
    weights = {
        "w": random.integers(0, 256, (rows, blocks, block * bits // 8), dtype="uint8"),
        "s": random.uniform(0.1, 1, rows * blocks).astype("float32"),
    }
    if zeros:
        weights["z"] = random.integers(0, 256, rows * -(-blocks * bits // 8), dtype="uint8")
    matches_onnx_runtime(
        single(
            *("MatMulNBits", f"x w s {'z' if zeros else ''}", (2, rows), weights),
            x=(2, columns),
            **{"N": rows, "K": columns, "bits": bits, "block_size": block},
        )
    )


@pytest.mark.parametrize("bias", [False, True])
def test_the_weights_of_a_product_keep_their_type(bias):
    """In memory, and on PIM that takes it; blocks of 16 are widened."""
    weights = {"b": weight(8)} if bias else {}
    sizes = {"N": 8, "K": 256, "bits": 4}
    operands = "x w s z  b" if bias else "x w s z"
    for block, kind in ((128, "uint4_g128"), (16, None)):
        weights |= {"w": np.zeros((8, 256 // block, block // 2), "uint8"), "s": weight(8 * 256 // block)}
        weights["z"] = np.zeros((8, -(-256 // block // 2)), "uint8")
        node = helper.make_node(
            *("MatMulNBits", operands.split(" "), ["y"], "proj"), domain=MICROSOFT, block_size=block, **sizes
        )
        model = foreign_model([node], {"x": (1, 256)}, {"y": (1, 8)}, weights)
        (region,) = extract_regions(onnx_graph.from_onnx(model), "net").regions
        assert region.geometry.weights == kind


# ---- 8 bits ----

QUANTISED = {"s": np.float32(0.03), "z": np.uint8(120), "t": np.float32(0.05), "u": np.uint8(90)}


def quantised(kind: str, operands: str, result_shape, weights, x, domain: str = MICROSOFT, **attrs):
    """A network of one 8-bit operator of `q`, which is `x` in 8 bits, with fp32 results."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], "narrow"),
        helper.make_node(kind, operands.split(), ["r"], "node", domain=domain, **attrs),
        helper.make_node("DequantizeLinear", ["r", "t", "u"], ["y"], "wide"),
    ]
    return foreign_model(nodes, {"x": x}, {"y": result_shape}, QUANTISED | weights)


FILTERS = {"w": np.random.default_rng(0).integers(-90, 90, (4, 3, 3, 3), "int8"), "ws": weight(4) ** 2 / 9}
FILTERS |= {"wz": np.zeros(4, "int8"), "b": np.arange(-200, 200, 100, dtype="int32")}
TABLE = {"w": np.arange(40, dtype="int8").reshape(8, 5), "ws": np.float32(0.01), "wz": np.int8(3)}
BYTES = {
    "QLinearConv": quantised(
        *("QLinearConv", "q s z w ws wz t u b", (1, 4, 6, 6), FILTERS, (1, 3, 6, 6), ""), pads=[1, 1, 1, 1]
    ),
    "QLinearMatMul": quantised("QLinearMatMul", "q s z w ws wz t u", (3, 5), TABLE, (3, 8), ""),
    "QGemm": quantised(
        *("QGemm", "q s z w ws wz b t u", (3, 8)),
        {"w": np.arange(64, dtype="int8").reshape(8, 8), "ws": np.float32(0.01), "wz": np.int8(3)}
        | {"b": np.arange(8, dtype="int32")},
        (3, 8),
        transB=1,
    ),
    "QLinearAdd": quantised("QLinearAdd", "q s z q s z t u", (3, 8), {}, (3, 8)),
    "QLinearMul": quantised("QLinearMul", "q s z q s z t u", (3, 8), {}, (3, 8)),
    "QLinearConcat": quantised("QLinearConcat", "t u q s z q s z", (3, 16), {}, (3, 8), axis=1),
    "QLinearSigmoid": quantised("QLinearSigmoid", "q s z t u", (3, 8), {}, (3, 8)),
    "QLinearLeakyRelu": quantised("QLinearLeakyRelu", "q s z t u", (3, 8), {}, (3, 8), alpha=0.2),
    "QLinearAveragePool": quantised(
        "QLinearAveragePool", "q s z t u", (1, 3, 2, 2), {}, (1, 3, 4, 4), kernel_shape=[2, 2], strides=[2, 2]
    ),
    "QLinearGlobalAveragePool": quantised(
        "QLinearGlobalAveragePool", "q s z t u", (1, 3, 1, 1), {}, (1, 3, 4, 4)
    ),
}


@pytest.mark.parametrize("model", BYTES.values(), ids=BYTES.keys())
def test_an_operator_of_8_bits_is_exact(model):
    matches_onnx_runtime(model)


@pytest.mark.parametrize("kind", ["QLinearConv", "QGemm", "QLinearMatMul"])
def test_a_product_of_8_bits_is_one_kernel(kind):
    (product,) = extract_regions(onnx_graph.from_onnx(BYTES[kind])).regions
    assert product.kernel.integers and product.geometry.weights == product.geometry.activations == "int8"
    kinds = [name for name in product.operators if name != "permute_dims"]
    narrow = ["round", "add", "clip", "astype"]
    assert kinds[1:5] == narrow and kinds[-7:] == [*narrow, "astype", "subtract", "multiply"]


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (
            lambda: single(
                *("MatMulNBits", "x w s", (2, 5), {"w": np.zeros((5, 1, 6), "uint8"), "s": weight(5)}),
                **{"x": (2, 16), "N": 5, "K": 16, "bits": 3, "block_size": 16},
            ),
            "of 3 bits",
        ),
        (lambda: single("Normalizer", "x", (3, 4), (), LEARNING, (3, 4), norm="L3"), "norm 'L3' is not"),
        (
            lambda: single("CDist", "x x", (3, 3), x=(3, 8), metric="cosine"),
            "'node': CDist with metric 'cosine' is not supported",
        ),
        (
            lambda: single("FusedGemm", "x m", (3, 8), {"m": MATRIX}, x=(3, 8), activation="Swish"),
            "activation 'Swish' is not supported",
        ),
    ],
)
def test_what_is_refused(model, why):
    with pytest.raises(UnsupportedOpError, match=why):
        onnx_graph.from_onnx(model())
