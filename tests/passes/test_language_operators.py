"""Do operators of language models give what ONNX and ONNX Runtime say they give?"""

import importlib
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from decoders import MICROSOFT, gqa_model, one_node, query, tables
from graphs import PLAIN_CODE
from length import long_but
from onnx.backend.test.case import node
from onnx.backend.test.case.test_case import TestCase
from tvm import relax

from pimflow import frontend, zoo
from pimflow.compiler import phases
from pimflow.errors import UnsupportedOpError
from pimflow.relay_passes.attention import attention_from_call
from pimflow.relay_passes.flat import main_bindings


def run_build(model: onnx.ModelProto, arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    """What a build of `model` gives."""
    network = frontend.load(model)
    machine = relax.VirtualMachine(phases.build(network.module, PLAIN_CODE), tvm.cpu())
    operands = [tvm.runtime.tensor(arrays[name].astype(dtype)) for name, (_, dtype) in network.inputs.items()]
    results = machine["main"](*operands)
    return [result.numpy() for result in ([results] if isinstance(results, tvm.runtime.Tensor) else results)]


def require_alike(model: onnx.ModelProto, arrays: dict[str, np.ndarray], places: int | None = None) -> None:
    """Raise unless a build gives what ONNX Runtime gives, in the first `places` of a cache."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    data = {value.name for value in model.graph.input}
    expected = session.run(None, {name: array for name, array in arrays.items() if name in data})
    for got, reference in zip(run_build(model, arrays), expected, strict=True):
        assert got.shape == reference.shape
        filled = slice(None) if got.ndim < 4 else slice(places)
        np.testing.assert_allclose(got[..., filled, :], reference[..., filled, :], rtol=1e-4, atol=1e-4)


def onnx_cases(kind: str) -> dict[str, TestCase]:
    """The cases of the onnx package, by name, without those that are spelled out.

    It makes them when their module is imported. To ask it for one kind computes those of all others too.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(f"{node.__name__}.{kind.lower()}")
    cases = (case for case in node._NodeTestCases if any(n.op_type == kind for n in case.model.graph.node))
    return {case.name.removeprefix("test_"): case for case in cases}


CASES = onnx_cases("Attention") | onnx_cases("RotaryEmbedding")
QUICK = (
    "attention_4d_gqa_with_past_and_present",
    "attention_4d_attn_mask_bool",
    "attention_3d_diff_heads_with_past_and_present",
    "attention_4d_causal_padded_kv_bf16",
    "attention_4d_with_past_and_present_qk_matmul_bias",
    "rotary_embedding_with_interleaved_rotary_dim",
)


@pytest.mark.long
@pytest.mark.parametrize("case", long_but([n for n in QUICK if n in CASES], CASES))
def test_a_shipped_case_is_right(case):
    ((inputs, outputs),) = case.data_sets
    names = [value.name for value in case.model.graph.input]
    results = run_build(case.model, dict(zip(names, map(np.asarray, inputs), strict=True)))
    for got, expected in zip(results, outputs, strict=True):
        assert got.shape == expected.shape
        bound = 2e-2 if expected.dtype.itemsize == 2 else 1e-4
        np.testing.assert_allclose(got.astype("f"), expected.astype("f"), rtol=bound, atol=bound)


def test_the_package_ships_what_the_issue_counts():
    assert sum(name.startswith("attention") for name in CASES) >= 93
    assert set(QUICK) <= set(CASES)


GROUPED = {
    "a step": {"past": 5, "tokens": 1},
    "a step with angles": {"past": 5, "tokens": 1, "do_rotary": 1, "batch": 2},
    "turned in pairs": {"past": 5, "tokens": 1, "do_rotary": 1, "rotary_interleaved": 1},
    "a cache of fixed length": {"past": 5, "tokens": 1, "length": 12, "do_rotary": 1},
    "capped": {"past": 5, "tokens": 1, "softcap": 1.5, "scale": 0.2},
    "a window": {"past": 6, "tokens": 1, "local_window_size": 3},
    "a prompt": {"past": 0, "tokens": 4, "do_rotary": 1},
    "one head for all": {"past": 5, "tokens": 1, "kv_heads": 1},
    "a smooth softmax": {"past": 5, "tokens": 1, "length": 12, "smooth_softmax": 1},
    "sinks": {"past": 5, "tokens": 1, "do_rotary": 1, "sinks": True, "local_window_size": 3},
}


@pytest.mark.long
@pytest.mark.parametrize("case", long_but(["a step with angles", "a cache of fixed length"], GROUPED))
def test_grouped_queries(case):
    require_alike(*gqa_model(**case), places=case["past"] + case["tokens"])


def test_grouped_queries_are_one_call_over_the_cache():
    network = frontend.load(gqa_model(5, 1, length=12)[0])
    calls = (attention_from_call(network.module, item.value) for item in main_bindings(network.module))
    (attention,) = (item for item in calls if item is not None)
    assert (attention.heads, attention.kv_heads, attention.keys) == (4, 2, 12)
    assert attention.positioned and attention.causal


@pytest.mark.long
@pytest.mark.parametrize("attributes", [{"sliding_window_cache": 1}, {"k_quant_type": "PER_TENSOR"}])
def test_what_is_not_supported_is_refused_by_name(attributes):
    model, _ = gqa_model(5, 1, **attributes)
    with pytest.raises(
        UnsupportedOpError, match=f"GroupQueryAttention of node 'node'.*{next(iter(attributes))}"
    ):
        frontend.load(model)


EXPERTS = {
    "a few rows": {"rows": 1, "activation_type": "silu"},
    "many rows": {"rows": 5, "activation_type": "gelu", "normalize_routing_weights": 1},
    "gates": {"rows": 5, "activation_type": "swiglu", "swiglu_fusion": 1, "normalize_routing_weights": 1},
    "clamped gates": {
        "rows": 1,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": 1.702,
        "activation_beta": 1.0,
        "swiglu_limit": 0.5,
    },
    "without biases": {"rows": 5, "activation_type": "relu", "biased": False},
}


def experts_model(rows: int, activation_type: str, biased: bool = True, **attributes):
    """MoE of 6 experts, of which 2 are chosen, and its operands."""
    wide = 2 if activation_type == "swiglu" else 1
    inputs = {
        "x": query(1, rows, 8),
        "router": query(rows, 6, seed=1),
        "first": query(6, 10 * wide, 8, seed=2),
        "first_bias": query(6, 10 * wide, seed=3),
        "second": query(6, 8, 10, seed=4),
        "second_bias": query(6, 8, seed=5),
    }
    names = [name if biased or "bias" not in name else "" for name in inputs]
    inputs = {name: array for name, array in inputs.items() if name in names}
    constants = [name for name in inputs if name not in ("x", "router")]
    attributes |= {"k": 2, "activation_type": activation_type}
    model = one_node("MoE", inputs, {"y": (1, rows, 8)}, constants, **attributes)
    model.graph.node[0].input[:] = names
    return model, inputs


@pytest.mark.long
@pytest.mark.parametrize("case", long_but(["a few rows", "many rows"], EXPERTS))
def test_experts_of_microsoft(case):
    require_alike(*experts_model(**case))


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "says"),
    [({"activation_type": "tanh"}, "'tanh'"), ({"activation_type": "swiglu"}, "do not take turns")],
)
def test_experts_that_are_not_supported_are_refused(changes, says):
    with pytest.raises(UnsupportedOpError, match=f"MoE of node 'node'.*{says}"):
        frontend.load(experts_model(rows=1, **changes)[0])


def heads_of_microsoft(*, past=0, bias=False, added=False, padded=False, tokens=2, keys=5, **attributes):
    """MultiHeadAttention of 2 heads of 4, and its operands."""
    inputs = {
        "query": query(1, tokens, 8),
        "key": query(1, keys, 8, seed=1),
        "value": query(1, keys, 8, seed=2),
        "bias": query(24) if bias else None,
        "key_padding_mask": np.array([[1] * (keys - 2) + [0, 1]], np.int32) if padded else None,
        "attention_bias": query(1, 2, tokens, keys + past) if added else None,
    }
    inputs = {name if array is not None else "": array for name, array in inputs.items()}
    optional = zip(("bias", "key_padding_mask", "attention_bias"), (bias, padded, added))
    names = ["query", "key", "value", *(name if is_given else "" for name, is_given in optional)]
    results = {"y": [1, tokens, 8]}
    if past:
        names += ["past_key", "past_value"]
        inputs |= {name: query(1, 2, past, 4, seed=3) for name in names[-2:]}
        results |= {name: [1, 2, past + keys, 4] for name in ("present_key", "present_value")}
    inputs.pop("", None)
    model = one_node("MultiHeadAttention", inputs, results, num_heads=2, **attributes)
    model.graph.node[0].input[:] = names
    return model, inputs


MANY = {
    "plain": {},
    "all that is added": {"bias": True, "added": True},
    "a cache": {"past": 4, "tokens": 1, "keys": 1},
    "causal over a cache": {"past": 4, "tokens": 3, "keys": 3, "unidirectional": 1},
    "padded keys": {"padded": True, "scale": 0.3},
}


@pytest.mark.parametrize("case", long_but(["all that is added"], MANY))
def test_many_heads(case):
    require_alike(*heads_of_microsoft(**case))


ROTATED = {
    "a first place": (query(2, 3, 16), np.array([2]), {}),
    "places": (query(2, 3, 16), np.array([[0, 1, 2], [4, 5, 6]]), {}),
    "apart": (query(1, 2, 3, 8), np.array([[3, 4, 5]]), {"interleaved": 1}),
    "in part": (query(1, 3, 32), np.array([1]), {"num_heads": 2, "rotary_embedding_dim": 8}),
}


@pytest.mark.parametrize("case", long_but(["places"], ROTATED))
def test_rotary_embedding_of_microsoft(case):
    x, ids, attributes = case
    cosines, sines = tables(16, 4)
    inputs = {"x": x, "ids": ids, "cosines": cosines, "sines": sines}
    constants = ("cosines", "sines")
    require_alike(one_node("RotaryEmbedding", inputs, {"y": x.shape}, constants, **attributes), inputs)


def test_normalisation_without_a_mean():
    inputs = {"x": query(1, 3, 16), "scale": query(16)}
    norm = one_node("SimplifiedLayerNormalization", inputs, {"y": (1, 3, 16)}, ("scale",), "", epsilon=1e-5)
    require_alike(norm, inputs)


@pytest.mark.parametrize("bias", [False, True])
def test_normalisation_of_a_sum(bias):
    inputs = {"x": query(1, 3, 16), "skip": query(1, 3, 16, seed=1), "scale": query(16)}
    inputs |= {"bias": query(16, seed=1)} if bias else {}
    results = {"y": (1, 3, 16), "": (), "sum": (1, 3, 16)}
    model = one_node("SkipSimplifiedLayerNormalization", inputs, results, ("scale",), epsilon=1e-5)
    model.graph.node[0].output[:] = ["y", "", "", "sum"]
    require_alike(model, inputs)
    assert zoo.load_model(model).graph.node[0].domain == MICROSOFT
