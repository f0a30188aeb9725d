"""Do caches stay where they are, and does one compilation serve every length?"""

from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from command_line import error_line
from decoders import DecoderModel, gqa_model
from length import long_but

from pimflow import compile, frontend, run
from pimflow.commands.main import main
from pimflow.compiler import build
from pimflow.compiler.interface import Interface
from pimflow.core.region import APPEND
from pimflow.core.state import State
from pimflow.errors import ModelError, UnknownNameError, UnsupportedOpError, UsageError
from pimflow.hardware import system
from pimflow.pim_backend.runtime import targets
from pimflow.pim_backend.runtime.network_module import infer
from pimflow.placement import Goal, search
from pimflow.relay_passes.regions.extract_regions import extract_regions
from pimflow.simulators.gpu.region_kernels import gpu_kernels

CONTEXT = 8
CACHES = ("past_key_values.0.key", "past_key_values.0.value")
DECODERS = {
    "many heads": {},
    "shared heads": {"kv_heads": 2, "layers": 2},
    "several tokens": {"kv_heads": 1, "tokens": 2, "mask": "causal"},
}


def decoder(**fields) -> onnx.ModelProto:
    return DecoderModel(**{"past": CONTEXT - fields.get("tokens", 1)} | fields).model()


def open_lengths(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` with open lengths, as exporters leave them."""
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        dims[0].dim_param = "batch_size"
        if len(dims) == 4:
            dims[2].dim_param = "past_sequence_length"
        elif "mask" in value.name:
            dims[1].dim_param = "total_sequence_length"
    for value in model.graph.output:
        if value.name.startswith("present"):
            value.type.tensor_type.shape.dim[2].dim_param = "past_sequence_length + 1"
    return model


@pytest.fixture(scope="module", params=long_but([*DECODERS][:1], DECODERS))
def built(request):
    """A decoder with a context, its plan and its build."""
    network = frontend.load(decoder(**request.param), context=CONTEXT)
    search_result = search(extract_regions(network.module), system())
    network_build = build.build(network, search_result, targets.target_by_name("llvm+pim"))
    return network, search_result, network_build, request.param


@pytest.mark.long
def test_one_compilation_serves_every_length(built):
    """Step after step, the logits and the caches are those of a network of just this length."""
    network, _, network_build, form = built
    tokens, layers = form.get("tokens", 1), form.get("layers", 1)
    executor = network_build.module["default"](network_build.device)
    for state in network.states:  # bound once, full of what must not matter
        dims, dtype = network.inputs[state.name]
        full = network_build.states.pack_input(state.name, np.full(dims, 1e3, dtype))
        executor["set_input"](state.name, tvm.runtime.tensor(full))
    names = [state.name for state in network.states]
    rng = np.random.default_rng(0)
    past: dict[str, np.ndarray] = {}
    for position in range(0, CONTEXT, tokens):
        ids = rng.integers(50, size=(1, tokens))
        executor["set_input"]("input_ids", tvm.runtime.tensor(ids))
        executor["set_input"]("position", tvm.runtime.tensor(np.array([position])))
        executor["run"]()
        outputs = [executor["get_output"](n).numpy() for n in range(1 + len(names))]
        caches = [c[:, :, : position + tokens] for c in network_build.states.unpack(outputs)[1:]]
        if position:  # ONNX has no tensors without elements
            full_network = frontend.load(decoder(**form | {"past": position}))
            logits, *presents = full_network.reference({"input_ids": ids, **past})
            near = {"rtol": 2e-3, "atol": 2e-3 * abs(logits).max()}
            np.testing.assert_allclose(executor["get_output"](0).numpy(), logits, **near)
            for cache, present in zip(caches, presents, strict=True):
                np.testing.assert_allclose(cache, present, rtol=2e-3, atol=2e-3 * abs(present).max())
        past = {name: cache.copy() for name, cache in zip(names, caches, strict=True)}
    assert len(names) == 2 * layers


def test_a_step_moves_its_tokens_alone(built):
    """What is appended is charged by the token, and no cache is copied."""
    _, search_result, network_build, form = built
    regions = [region for region in search_result.graph.regions if region.operator == APPEND]
    assert len(regions) == 2 * form.get("layers", 1)
    for region in regions:
        (kernel,) = gpu_kernels(region, "fp16")
        batch, heads, _, size = region.output_shape
        assert kernel.output_bytes == 2 * batch * heads * form.get("tokens", 1) * size
    assert search_result.graph.buffer_uses("fp16").size_bytes[regions[0].name] == 0
    assert not network_build.copies


def test_open_lengths_follow_from_the_context():
    network = frontend.load(open_lengths(decoder(kv_heads=2, mask="given")), context=CONTEXT)
    assert network.inputs["attention_mask"][0] == (1, CONTEXT)
    assert network.inputs[CACHES[0]][0] == (1, 2, CONTEXT, 8)
    assert network.states[0] == State(name=CACHES[0], result=1, grown=1)
    assert (network.example_inputs()["attention_mask"] == 1).all()


def decoder_with_names(*names: str, **fields) -> onnx.ModelProto:
    """A decoder whose caches are called so: as inputs, then as outputs."""
    model = decoder(**fields)
    values = [*model.graph.input[1:], *model.graph.output[1:]]
    for value, name in zip(values, names, strict=True):
        for node in model.graph.node:
            for names in (node.input, node.output):
                names[:] = [name if tensor_name == value.name else tensor_name for tensor_name in names]
        value.name = name
    return model


@pytest.mark.parametrize(
    "names", [("past_k", "past_v", "present_k", "present_v"), ("keys", "values", "keys_then", "values_then")]
)
@pytest.mark.parametrize("lengths", ["fixed", "open"])
def test_names_and_shapes_tell_which_are_caches(names, lengths):
    model = decoder_with_names(*names)
    if lengths == "open":
        for value, places in zip((*model.graph.input, *model.graph.output), ("", "p", "p", "", "p+1", "p+1")):
            if places:
                value.type.tensor_type.shape.dim[2].dim_param = places
    network = frontend.load(model, context=CONTEXT)
    pairs = {state.name: network.output_names[state.result] for state in network.states}
    assert pairs == dict(zip(names[:2], names[2:]))


def test_other_names_are_paired_by_the_user():
    model = decoder_with_names("keys", "values", "keys_then", "values_then")
    outputs = [*model.graph.output]
    model.graph.output[1].CopyFrom(outputs[2])
    model.graph.output[2].name = "keys_then"  # in another order than the inputs
    states = {"keys": "keys_then"}
    assert len(frontend.load(model, context=CONTEXT, states=states).states) == 2
    with pytest.raises(UnsupportedOpError, match="is not input 'keys' with new tokens at its end"):
        frontend.load(model, context=CONTEXT)
    with pytest.raises(UsageError, match="two caches become one output"):
        frontend.load(model, context=CONTEXT, states=states | {"values": "keys_then"})
    with pytest.raises(UnknownNameError):
        frontend.load(model, context=CONTEXT, states={"key": "keys_then"})
    with pytest.raises(UnsupportedOpError, match="is not input 'keys'"):
        frontend.load(model, context=CONTEXT, states={"keys": "logits"})


@pytest.mark.parametrize(
    ("made", "given", "error"),
    [
        ({"mask": "given", "tokens": 2}, {"context": CONTEXT}, UnsupportedOpError),
        ({}, {"context": CONTEXT + 3}, ModelError),
        ({}, {"context": 1}, UsageError),
        ({}, {"states": {"a": "b"}}, UsageError),
    ],
    ids=["a mask by token", "another length", "no room", "no context"],
)
def test_what_cannot_be_kept_is_refused(made, given, error):
    with pytest.raises(error):
        frontend.load(decoder(**made), **given)


def test_a_cache_that_others_read_is_refused():
    model = decoder()
    model.graph.node.append(onnx.helper.make_node("Neg", ["present.0.key"], ["negative"], "negative"))
    model.graph.output.append(onnx.helper.make_tensor_value_info("negative", 1, [1, 4, CONTEXT, 8]))
    with pytest.raises(UnsupportedOpError, match=r"'negative' reads the cache 'past_key_values\.0\.key'"):
        frontend.load(model, context=CONTEXT)


def test_a_network_without_caches_has_no_context():
    with pytest.raises(ModelError, match="has no cache"):
        frontend.load("toy", context=CONTEXT)


def test_a_model_of_the_zoo_is_made_for_the_context():
    network = frontend.load("tiny-lm", context=40)
    assert {network.inputs[state.name][0] for state in network.states} == {(1, 2, 40, 32)}
    with pytest.raises(UsageError, match="give 2 to 1024 tokens"):
        frontend.load("tiny-lm", context=1025)


@pytest.mark.long
def test_a_position_behind_the_context_is_refused(tmp_path, capsys):
    """A kernel would write to the last place."""
    model, folder = str(tmp_path / "step.onnx"), str(tmp_path / "out")
    onnx.save(decoder(), model)
    arguments = ["--context", str(CONTEXT), "--modes", "gpu,pim", "--quiet", "--cache", "none"]
    arguments += ["--channel-sharing", "partitioned"]  # which takes less time to search
    assert main(["compile", model, "-o", folder, *arguments, "--conventions", "none"]) == 0
    arrays = {n: np.zeros(dims, dtype) for n, (dims, dtype) in Interface.load(Path(folder)).inputs.items()}
    assert len(run(folder, arrays | {"position": [CONTEXT - 1]})) == 3
    capsys.readouterr()
    for place in (CONTEXT, -1):
        inputs = [part for name in arrays for part in ("--input", f"{name}={tmp_path / name}.npy")]
        for name, array in (arrays | {"position": np.array([place])}).items():
            np.save(tmp_path / f"{name}.npy", array)
        assert f"'position' has {place}, and picks one of {CONTEXT}" in error_line(
            capsys, 2, "run", folder, *inputs, "--quiet"
        )
    step_inputs = frontend.load(model, context=CONTEXT).example_inputs() | {"position": np.array([3])}
    with pytest.raises(UsageError, match="no cache with free places"):
        compile(model, context=CONTEXT, inputs=step_inputs)


@pytest.mark.long
@pytest.mark.parametrize("length", [CONTEXT, 0], ids=["full length", "growing"])
def test_the_caches_of_grouped_queries_are_kept(length):
    """What the operator appends by a computed position is written in place, without another input."""
    model, arrays = gqa_model(CONTEXT - 1, 1, length=length)
    pairs = {"past_key": "present_key", "past_value": "present_value"}
    network = frontend.load(model, context=CONTEXT, states=pairs)
    assert [region.operator for region in extract_regions(network.module).regions].count(APPEND) == 2
    assert "position" not in network.inputs
    search_result = search(extract_regions(network.module), system(), goal=Goal(modes="gpu"))
    network_build = build.build(network, search_result, targets.target_by_name("llvm+pim"))
    inputs = {name: np.zeros(dims, dtype) for name, (dims, dtype) in network.inputs.items()}
    for name, array in arrays.items():
        if name in inputs:
            inputs[name][tuple(map(slice, array.shape))] = array
    results = infer(network_build.module, inputs)
    for result, expected in zip(results, network.reference(inputs), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
