"""Is attention over a cache in PIM what it is elsewhere, step after step, and is what is wrong refused?"""

import re
from dataclasses import replace

import numpy as np
import pytest
import tvm
from decoders import DecoderModel, gqa_model
from length import long_but
from small_system import small

import pimflow
from pimflow import frontend
from pimflow.compiler import build
from pimflow.compiler.artifact import PlacedRegions
from pimflow.compiler.interface import Interface
from pimflow.compiler.verification import verify
from pimflow.core.plan import Choice
from pimflow.core.program import PimProgram
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import AttentionRewrite
from pimflow.errors import ArtifactError, UnknownNameError, UsageError, VerificationError
from pimflow.frontend import onnx_runtime
from pimflow.hardware import System
from pimflow.pim_backend.programs.cache_places import all_places_program
from pimflow.pim_backend.programs.cached_attention import CachedGroup
from pimflow.pim_backend.programs.dynamic_product import DynamicProduct
from pimflow.pim_backend.runtime import codegen, targets
from pimflow.placement import SearchResult, plan_application, search
from pimflow.relay_passes.regions.extract_regions import extract_regions
from pimflow.relay_passes.regions.kernel_groups import kernel_groups
from pimflow.simulators.pim.coverage import program_coverage

CONTEXT, TOKENS = 24, 20
ROUNDING = 2e-3  # of what PIM stores in fp16
SCHEDULES = {
    "newton-gddr6": "keys vector-stationary, spread 2; values vector-stationary, spread 2",
    "aim-gddr6": "keys vector-stationary, spread 2; values vector-stationary, spread 2; 2 parts",
}
FORMS = {"many heads": {"heads": 2, "kv_heads": 2}, "shared heads": {"kv_heads": 2, "layers": 2}}


def plan_attention_on_pim(graph: RegionGraph, small_system: System, schedule: str) -> SearchResult:
    """The plan of a search without attention in PIM, with all attention done by `schedule`."""
    plan = search(graph, small_system).plan
    runs = {}
    for before, after, region in zip(graph.regions, graph.regions[1:], graph.regions[2:]):
        if region.attention is not None:
            runs[before.name] = (before.name, after.name, region.name)
    inside = {name for run in runs.values() for name in run}
    choices = []
    for region in graph.regions:
        if region.name in runs:
            covers = runs[region.name]
            choices.append(Choice(regions=covers, rewrite=AttentionRewrite(schedule=schedule)))
        elif region.name not in inside:
            choices.append(plan.choice(region.name))
    return plan_application.apply(graph, small_system, replace(plan, choices=tuple(choices)))


CASES = {f"{device}, {form}": (device, form) for device in SCHEDULES for form in FORMS}


@pytest.fixture(
    scope="module", params=long_but(["newton-gddr6, shared heads", "aim-gddr6, many heads"], CASES)
)
def built(request):
    device, form = request.param
    network = frontend.load(DecoderModel(past=CONTEXT - 1, **FORMS[form]).model(), context=CONTEXT)
    search_result = plan_attention_on_pim(extract_regions(network.module), small(device), SCHEDULES[device])
    network_build = build.build(network, search_result, targets.target_by_name("llvm+pim"))
    return network, search_result, network_build, FORMS[form]


@pytest.mark.long
def test_a_step_is_verified(built):
    network, search_result, network_build, _ = built
    inputs = network.example_inputs()
    verification = verify(network, network_build, search_result.system, inputs, network.reference(inputs))
    verification.require()
    checked = {check.region for check in verification.regions}
    for cached in search_result.attention().values():
        assert cached.programs.keys() <= checked
    assert verification.timing_violations == 0


def test_decoding_with_the_cache_is_prefill_of_the_whole_sequence(built):
    """Over rows, tiles and channels, behind a token that is in the caches from the start."""
    network, _, network_build, form = built
    rng = np.random.default_rng(0)
    ids = rng.integers(50, size=(1, TOKENS))
    prefill = onnx_runtime.reference(DecoderModel(tokens=TOKENS, past=1, mask="causal", **form).model())
    dims = (1, form["kv_heads"], 1, 8)
    past = {state.name: rng.standard_normal(dims).astype(np.float32) for state in network.states}
    logits, *presents = prefill({"input_ids": ids, **past})
    executor = network_build.module["default"](network_build.device)
    for name, value in past.items():  # bound once
        assert network_build.states.inputs[name].first_layout.rows > 1
        cache = np.concatenate([value, np.zeros((*value.shape[:2], CONTEXT - 1, 8), np.float32)], axis=2)
        executor["set_input"](name, tvm.runtime.tensor(network_build.states.pack_input(name, cache)))
    for turn in range(TOKENS):
        executor["set_input"]("input_ids", tvm.runtime.tensor(ids[:, turn : turn + 1]))
        executor["set_input"]("position", tvm.runtime.tensor(np.array([1 + turn])))
        executor["run"]()
        step_logits = executor["get_output"](0).numpy()[0, 0]
        np.testing.assert_allclose(step_logits, logits[0, turn], rtol=0, atol=ROUNDING * abs(logits).max())
    outputs = [executor["get_output"](n).numpy() for n in range(network.outputs)]
    for cache, present in zip(network_build.states.unpack(outputs)[1:], presents, strict=True):
        bound = ROUNDING * abs(present).max()
        np.testing.assert_allclose(cache[:, :, : 1 + TOKENS], present, rtol=0, atol=bound)
        assert (cache[:, :, 1 + TOKENS :] == 0).all()


def test_kernels_between_the_products_are_those_that_are_charged(built):
    """One for each group's softmax, and one for all sums."""
    network, search_result, *_ = built
    kernels = kernel_groups(build.apply_search_result(network.module, search_result))
    for region in search_result.attention():
        charged = [task for task in search_result.candidate_by_region[region].tasks if task.resource == "gpu"]
        between = [group for group in kernels if group.title.name.startswith(region.replace(".", "_"))]
        assert len(charged) == sum(group.fusible for group in between), region


@pytest.mark.long
@pytest.mark.parametrize("parts", long_but([4], [1, 2, 4]))
def test_requests_have_positions_of_their_own(parts):
    """Two requests of two KV heads, by themselves, by request, and by head."""
    model, arrays = gqa_model(CONTEXT - 1, 1, length=CONTEXT, batch=2)
    pairs = {"past_key": "present_key", "past_value": "present_value"}
    network = frontend.load(model, context=CONTEXT, states=pairs)
    small_system = small("newton-gddr6")
    schedule = SCHEDULES["newton-gddr6"] + (f"; {parts} parts" if parts > 1 else "")
    search_result = plan_attention_on_pim(extract_regions(network.module), small_system, schedule)
    network_build = build.build(network, search_result, targets.target_by_name("llvm+pim"))
    places = np.array([17, 5], np.int32)
    inputs = {name: arrays[name] for name in network.inputs} | {"seqlens_k": places}
    expected = network.reference(inputs)
    for past, present in zip(pairs, expected[1:], strict=True):
        for request, place in enumerate(places):  # ONNX Runtime clears what is behind
            present[request, :, place + 1 :] = inputs[past][request, :, place + 1 :]
    verification = verify(network, network_build, small_system, inputs, expected)
    verification.require()
    cached = next(iter(search_result.attention().values()))
    assert cached.programs.keys() == {check.region for check in verification.regions}


@pytest.mark.parametrize("position", [-1, CONTEXT])
def test_a_position_that_is_not_in_the_cache_is_refused(built, position):
    network, _, network_build, _ = built
    inputs = network.example_inputs() | {"position": np.array([position])}
    with pytest.raises(ArtifactError, match=rf"no place {position} in a cache of {CONTEXT}; compile with"):
        network_build.infer(inputs)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A decoder compiled by a plan with attention in PIM; not all conventions that it reports know WRITEs."""
    folder = tmp_path_factory.mktemp("compiled") / "out"
    model = DecoderModel(past=CONTEXT - 1, **FORMS["shared heads"]).model()
    graph = extract_regions(frontend.load(model, context=CONTEXT).module)
    plan = plan_attention_on_pim(graph, small("newton-gddr6"), SCHEDULES["newton-gddr6"]).plan
    compiled = pimflow.compile(model, folder, system=small("newton-gddr6"), context=CONTEXT, plan=plan)
    assert len(compiled.search_result.attention()) == 2
    return folder


@pytest.mark.long
def test_a_compiled_directory_runs_with_its_caches(directory):
    """Given whole and given back whole, step after step, as the network has them."""
    interface = Interface.load(directory)
    assert sorted(interface.states) == sorted(name for name in interface.inputs if "past" in name)
    assert all(state["layout"] for state in interface.states.values())
    caches = {name: np.zeros(interface.inputs[name][0], np.float32) for name in interface.states}
    outputs = {state["output"]: name for name, state in interface.states.items()}
    session = pimflow.Session(directory)
    for position in range(3):
        step_inputs = {"input_ids": np.array([[position]]), "position": np.array([position])}
        results = pimflow.run(directory, step_inputs | caches)
        # its caches stay in place
        np.testing.assert_array_equal(session.run(step_inputs)["logits"], results[0])
        for number, name in outputs.items():
            previous, caches[name] = caches[name], results[number]
            changed = (previous != caches[name]).any(axis=(0, 1, 3))
            assert list(np.flatnonzero(changed)) == [position]
            np.testing.assert_array_equal(session.cache(name), caches[name])
    session.set(caches)
    np.testing.assert_array_equal(session.run()["logits"], results[0])
    assert session.caches == tuple(caches)
    with pytest.raises(UnknownNameError, match="unknown cache"):
        session.cache("input_ids")
    with pytest.raises(UsageError, match=f"'position' has {CONTEXT}, and picks one of {CONTEXT}"):
        session.run({"position": np.array([CONTEXT])})


def test_its_regions_are_read_back(directory):
    """Attention too, with the kernels that a GPU would launch for it."""
    model = DecoderModel(past=CONTEXT - 1, **FORMS["shared heads"]).model()
    graph = extract_regions(frontend.load(model, context=CONTEXT).module)
    stored = PlacedRegions.load(directory).graph
    assert stored.regions == graph.regions


def test_its_programs_are_right_and_legal(directory):
    """Those that append too, as `pimflow simulate` judges them."""
    programs = sorted((directory / "programs").glob("*__*.pimprog"))
    parts = {path.stem.partition("__")[2] for path in programs}
    assert parts >= {"new_keys", "scores", "new_values", "values"}
    for path in programs:
        assert pimflow.simulate(path).violations == 0
        assert program_coverage(PimProgram.load(path)).exact


def test_traces_of_its_programs(directory, tmp_path):
    """Formats without WRITE refuse it, and say which have one."""
    says = "it has no command that writes into banks; formats that do: pimprog, perfetto"
    with pytest.raises(UsageError, match=re.escape(says)):
        pimflow.trace(directory, tmp_path / "out", "pim")
    summary = pimflow.trace(directory, tmp_path / "out", "pimprog")
    assert sum(layer.commands.get("WRITE", 0) > 0 for layer in summary.layers) == 4
    for path in (tmp_path / "out").glob("*.pimprog"):
        assert path.read_text() == (directory / "programs" / path.name).read_text()


def drop_last_commands(program: PimProgram) -> PimProgram:
    """Without the last commands of the channel that has most: of the last bank, where they are of keys."""
    longest = max((len(nodes), channel) for channel, nodes in enumerate(program.channels))[1]
    channels = list(program.channels)
    channels[longest] = channels[longest][:-1]
    return replace(program, channels=tuple(channels))


def other_heads(growing: DynamicProduct) -> DynamicProduct:
    """With the vectors of another query head."""
    vectors = tuple(np.roll(head_vectors, 1, axis=0) for head_vectors in growing.full_product.operand_indices)
    return replace(growing, full_product=replace(growing.full_product, operand_indices=vectors))


FAULTS = ("a token is not written", "another head", "a program lacks a command")


@pytest.mark.long
@pytest.mark.parametrize("fault", long_but(FAULTS[:1], FAULTS))
def test_what_is_wrong_is_refused(monkeypatch, fault):
    network = frontend.load(DecoderModel(past=7, heads=2, kv_heads=2).model(), context=8)
    target = small("newton-gddr6")
    search_result = plan_attention_on_pim(extract_regions(network.module), target, SCHEDULES["newton-gddr6"])
    if fault == "a token is not written":
        monkeypatch.setattr(
            codegen, "all_places_program", lambda layout: drop_last_commands(all_places_program(layout))
        )
    elif fault == "another head":
        right = CachedGroup.dynamic_product
        monkeypatch.setattr(CachedGroup, "dynamic_product", lambda self, *of: other_heads(right(self, *of)))
    network_build = build.build(network, search_result, targets.target_by_name("llvm+pim"))
    if fault == "a program lacks a command":
        programs = {
            symbol: drop_last_commands(program) if "new_values" in symbol else program
            for symbol, program in network_build.programs.items()
        }
        network_build = replace(network_build, programs=programs)
    inputs = network.example_inputs()
    with pytest.raises(VerificationError, match=r"layer0\.values__"):
        verify(network, network_build, target, inputs, network.reference(inputs)).require()
