"""Are weights copied in time, is their place free again behind them, and is the pool what was planned?"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from onnx import helper, numpy_helper
from onnx_models import onnx_model
from tvm import relax
from tvm_ffi import libinfo

import pimflow
from pimflow import frontend
from pimflow.compiler import phases
from pimflow.compiler.c_code import builds
from pimflow.compiler.c_code import source as c_source
from pimflow.compiler.measurement.allocations import NAIVE, heap_bytes
from pimflow.core.candidate import Event, Timeline
from pimflow.errors import UsageError
from pimflow.hardware import system
from pimflow.pim_backend.runtime.network_module import infer, load, pack, store
from pimflow.pim_backend.runtime.weights_module import create_weights
from pimflow.relay_passes.memory.buffers import buffers
from pimflow.relay_passes.memory.stream_weights import AWAIT_COPY, StreamWeights, is_weight, weight_copy
from pimflow.simulators.streamed_weights import StreamedInference

CHANNELS, SIZE = 8, 4


@st.composite
def networks(draw) -> onnx.ModelProto:
    """Products, sums and activations over one map; weights may be read several times, and be results."""
    values = np.random.default_rng(draw(st.integers(0, 99)))
    nodes, weights, maps = [], [], ["x"]
    for index in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(["Conv", "Conv", "AddWeight", "Add", "Relu", "Concat"]))
        operands, name, attributes = [draw(st.sampled_from(maps))], f"t{index}", {}
        if kind == "Conv":
            read_again = [weight.name for weight in weights if weight.name.startswith("w")]
            if not read_again or draw(st.booleans()):
                filters = values.standard_normal((CHANNELS, CHANNELS, 1, 1)).astype("float32") / 4
                weights.append(numpy_helper.from_array(filters, f"w{index}"))
                read_again = [f"w{index}"]
            operands.append(draw(st.sampled_from(read_again)))
        elif kind == "AddWeight":
            kind, whole = "Add", values.standard_normal((1, CHANNELS, SIZE, SIZE)).astype("float32")
            weights.append(numpy_helper.from_array(whole, f"a{index}"))
            operands.append(f"a{index}")
        elif kind in ("Add", "Concat"):
            operands.append(draw(st.sampled_from(maps)))
        if kind == "Concat":  # back to as many channels as the others have
            nodes.append(helper.make_node("Concat", operands, [f"c{index}"], name=f"c{index}", axis=1))
            filters = values.standard_normal((CHANNELS, 2 * CHANNELS, 1, 1)).astype("float32") / 4
            weights.append(numpy_helper.from_array(filters, f"v{index}"))
            kind, operands = "Conv", [f"c{index}", f"v{index}"]
        nodes.append(helper.make_node(kind, operands, [name], name=name, **attributes))
        maps.append(name)
    ends = sorted({nodes[-1].output[0], draw(st.sampled_from(maps[1:]))})
    dims = (1, CHANNELS, SIZE, SIZE)
    return onnx_model(nodes, {"x": dims}, dict.fromkeys(ends, dims), weights)


def run(module: tvm.IRModule, target_system, inputs, allocation="pool", times=1) -> tuple[list[bytes], int]:
    """Outputs of the last of some inferences, and bytes of the pool that was planned."""
    plans = []
    executable = phases.build(module, "llvm+pim", target_system, plans.append, allocation)
    machine = relax.VirtualMachine(executable, tvm.cpu(), memory_cfg=NAIVE)
    for _ in range(times):
        result = machine["main"](*map(tvm.runtime.tensor, inputs.values()))
    tensors = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    return [tensor.numpy().tobytes() for tensor in tensors], plans[-1].pool_bytes if plans else 0


@pytest.mark.long
@settings(max_examples=examples(6), deadline=None)
@given(networks(), st.sampled_from([0, 1, 3, 100]))
def test_streamed_weights_give_the_same_bits(model, ahead):
    network = frontend.load(model)
    inputs = network.example_inputs()
    resident, _ = run(network.module, system(), inputs)
    streaming = system(weights="streamed", copy_ahead=ahead)
    streamed, pool_bytes = run(network.module, streaming, inputs, times=3)
    assert streamed == resident
    for allocation in ("eager", "lazy"):
        assert run(network.module, streaming, inputs, allocation)[0] == resident
    tensors = buffers(phases.allocate(network.module, tvm.target.Target("llvm"), streaming))
    assert pool_bytes == tensors.liveness().peak_bytes  # what lives at once, which the planner meets here
    _check_copies(tensors, ahead)


def _check_copies(tensors, ahead: int) -> None:
    """Each weight lives from its copy, `ahead` kernels before its first reader, to its last reader."""
    readers = {buffer: [] for buffer in tensors.weights}
    copies = {}
    for number, step in enumerate(tensors.steps):
        for buffer in readers.keys() & set(step.operands):
            if step.copies_weight and step.copies_weight != AWAIT_COPY:
                assert buffer not in copies  # each once
                copies[buffer] = number
            elif not step.copies_weight:
                readers[buffer].append(number)
    for buffer, steps in readers.items():
        assert buffer.begin == copies[buffer] < steps[0]
        kernel = tensors.kernels_before[steps[0]]
        assert tensors.kernels_before[copies[buffer]] == max(kernel - ahead, 0)
        assert buffer.pinned or buffer.end >= steps[-1] + 1


@pytest.mark.long
def test_the_pool_is_one_allocation_of_weights_and_tensors():
    """As the C library counts it, and as the plan says."""
    streaming = system(weights="streamed")
    planned = pimflow.plan_memory("toy", streaming)
    runs = pimflow.measure_allocations("toy", streaming, runs=1)
    assert runs["pool"].allocated_bytes == planned.plan.pool_bytes
    assert (runs["pool"].allocations, runs["pool"].groups) == (1, 1)
    assert runs["eager"].allocated_bytes == planned.eager_bytes
    assert (runs["lazy"].allocations, runs["lazy"].groups) == (planned.eager_allocations, planned.lazy_groups)
    resident = pimflow.plan_memory("toy", system())
    assert resident.plan.pool_bytes < planned.plan.pool_bytes
    assert planned.kernels == resident.kernels and planned.lazy_groups == resident.lazy_groups
    weight_bytes = planned.eager_bytes - resident.eager_bytes
    assert weight_bytes == planned.internal.weight_bytes > planned.plan.pool_bytes - resident.plan.pool_bytes


@pytest.mark.long
@pytest.mark.parametrize("ahead", [0, 2])
def test_nothing_is_left_to_stream(ahead):
    """No kernel reads a constant, and the pass finds nothing more; nor where there are no weights."""
    target, streaming = tvm.target.Target("llvm"), system(weights="streamed", copy_ahead=ahead)
    lowered = phases.allocate(frontend.load("toy").module, target, streaming)
    node = helper.make_node("Relu", ["x"], ["y"], name="y")
    model = onnx_model([node], {"x": (1, 8)}, {"y": (1, 8)}, [])
    plain = phases.allocate(frontend.load(model).module, target, streaming)
    for module in (lowered, plain):
        tvm.ir.assert_structural_equal(StreamWeights(ahead)(module), module)
    assert not buffers(plain).weights
    for binding in (b for block in lowered["main"].body.blocks for b in block.bindings):
        if isinstance(binding.value, relax.Call) and not weight_copy(binding.value):
            assert not any(map(is_weight, binding.value.args))


def large_product() -> onnx.ModelProto:
    """Two products whose weights are larger than all that they are multiplied with."""
    values = np.random.default_rng(0).standard_normal((2, 512, 512)).astype("float32") / 16
    weights = [numpy_helper.from_array(matrix, name) for matrix, name in zip(values, "vw")]
    first = helper.make_node("MatMul", ["x", "v"], ["t"], name="t")
    nodes = [first, helper.make_node("MatMul", ["t", "w"], ["y"], name="y")]
    return onnx_model(nodes, {"x": (1, 512)}, {"y": (1, 512)}, weights)


@pytest.mark.skipif(heap_bytes() is None, reason="the C library does not say what it has handed out")
@pytest.mark.parametrize("weights", ["streamed", "resident"])
def test_a_stored_network_reads_weights_where_its_file_is_mapped(tmp_path, weights):
    network, path = frontend.load(large_product()), tmp_path / "network.so"
    executable = phases.build(network.module, "llvm+pim", system(weights=weights))
    packed, inputs = pack(executable, network.inputs, network.outputs), network.example_inputs()
    expected = infer(packed, inputs)
    store(packed, path, 1 << 21)
    assert np.array_equal(infer(packed, inputs)[0], expected[0])  # as before it was stored
    del packed, executable
    before = heap_bytes()
    loaded = load(path)
    actual = infer(loaded, inputs)
    grown = heap_bytes() - before
    assert np.array_equal(actual[0], expected[0])
    matrix = 4 * 512 * 512
    if weights == "resident":
        assert grown > 2 * matrix
    else:
        assert grown < matrix + (1 << 17)  # the pool, which holds one of them at a time


def test_copies_that_are_begun_but_not_awaited_do_no_harm():
    """An inference may end in between; the next one has another pool."""
    weights = [tvm.runtime.tensor(np.full(1 << 16, value, "float32")) for value in range(8)]
    module = create_weights(weights)
    places = [tvm.runtime.tensor(np.zeros(1 << 16, "float32")) for _ in range(16)]
    for index, place in enumerate(places):
        module["pimflow.begin_weight_copy"](index % 8, place)
    for index in (15, 0, 7):
        module["pimflow.await_weight_copy"](places[index])
        assert np.all(places[index].numpy() == index % 8)
    module["pimflow.await_weight_copy"](tvm.runtime.tensor(np.zeros(1, "float32")))  # nothing was begun
    with pytest.raises(RuntimeError, match="does not fit"):
        module["pimflow.begin_weight_copy"](0, tvm.runtime.tensor(np.zeros(1, "float32")))


def test_a_plan_with_pim_streams_the_other_weights(tmp_path):
    """Compiled, verified by value, stored and run; weights on PIM stay in its banks."""
    streaming = system(weights="streamed", copy_ahead=1)
    compiled = pimflow.compile("toy", tmp_path / "toy", system=streaming, conventions="none")
    streamed = compiled.report.memory.streaming
    assert compiled.report.verification.verified
    assert 0 < streamed.plan.copied_bytes < streamed.gpu_only.copied_bytes
    assert compiled.report.plan.latency_ns < streamed.plan.latency_ns
    resident = pimflow.compile("toy", tmp_path / "resident", conventions="none")
    actual, expected = (pimflow.run(tmp_path / name) for name in ("toy", "resident"))
    assert all(np.array_equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert resident.report.memory.streaming is None
    assert compiled.report.memory.pool.pool_bytes > resident.report.memory.pool.pool_bytes


@pytest.mark.long
@pytest.mark.parametrize("ahead", [0, 2])
def test_c_copies_weights_too(ahead):
    network = frontend.load("toy")
    inputs = list(network.example_inputs().values())
    resident = c_source.source(network.module, system(), "toy")
    streamed = c_source.source(network.module, system(weights="streamed", copy_ahead=ahead), "toy")
    assert streamed.pool_bytes > resident.pool_bytes
    assert len(streamed.weights) == len(resident.weights)
    if builds.local_compiler():
        outputs = [builds.Library(code)(inputs) for code in (resident, streamed)]
        assert np.array_equal(*(output[0] for output in outputs))


def test_cuda_code_is_built_with_weights_on_the_host():
    """Nothing runs it here: no constant goes to the card, and a module on the host has the weights."""
    streaming = system(weights="streamed", copy_ahead=1)
    lowered = phases.lower(frontend.load("toy").module, tvm.target.Target("cuda"), streaming)
    text = lowered["main"].script()
    assert "metadata" not in text and text.count("pimflow.begin_weight_copy") > 1
    assert [module.kind for module in lowered.attrs["external_mods"]] == ["pimflow_weights"]


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("c++"), reason="builds a device with a C++ compiler")
def test_copies_to_cuda_run_beside_kernels_and_in_time(tmp_path):
    """On a device that only records, kernels read their weights, whether other streams are early or late."""
    folder, library = Path(__file__).parent, tmp_path / "device.so"
    tvm_folder = Path(tvm.__file__).parent
    headers = [tvm_folder / "include", libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
    command = ["c++", "-std=c++17", "-w", "-shared", "-fPIC", *(f"-I{header}" for header in headers)]
    command += [str(folder / "recording_device.cc"), "-o", str(library)]
    command += [f"-L{tvm_folder / 'lib'}", "-ltvm_runtime"]
    subprocess.run(command, check=True)
    replay_command = [sys.executable, str(folder / "replay_copies.py"), str(library)]
    replayed = subprocess.run(replay_command, capture_output=True, text=True)
    assert replayed.returncode == 0, replayed.stderr
    replays = json.loads(replayed.stdout)
    expected = [(ahead, eager) for ahead in (0, 2) for eager in (False, True)]
    assert [(replay["ahead"], replay["eager"]) for replay in replays] == expected
    for replay in replays:
        assert replay["wrong"] == [] and replay["pageable"] == 0
        assert replay["among_kernels"] == (0 if replay["ahead"] else replay["copies"])
        assert replay["copies"] > 8
    # Two kernels ahead, each with a filter and a bias at most; streams are used again.
    assert [replay["streams"] for replay in replays] == [0, 0, 4, 0]


def timeline(*spans: tuple[float, float]) -> Timeline:
    return Timeline(
        events=tuple(
            Event(start_ps=int(1e3 * a), end_ps=int(1e3 * b), resource="gpu", label="", regions=(f"r{n}",))
            for n, (a, b) in enumerate(spans)
        )
    )


def test_time_of_copies_by_hand():
    """A link of 1 B/ns and launches of 10 ns: copies of 110, 60 and 10 + 300 ns."""
    weight_bytes = {"r0": 100, "r1": 50, "r3": 300}
    spans = timeline((0, 100), (100, 200), (200, 300), (300, 400))

    def latency_ns(ahead: int) -> float:
        linked = system(weights="streamed", copy_ahead=ahead, host_link_bytes_per_ns=1.0)
        linked = linked.with_launches(gpu_ns=10, pim_ns=0)
        streamed = StreamedInference.from_timeline(spans, weight_bytes, linked)
        assert (streamed.copied_bytes, streamed.copying_ns) == (450, 480)
        return streamed.latency_ns

    assert latency_ns(0) == 400 + 480  # one after the other
    # r0 from 110 on, r1's copy during it, r3's during r2, which ends at 410: it is 210 late
    assert latency_ns(1) == 110 + 300 + 210 + 100
    # the link never waits: r3's copy is from 170 to 480
    assert latency_ns(9) == 480 + 100


def test_refused():
    with pytest.raises(UsageError, match="copy_ahead 2 is for streamed weights"):
        system(copy_ahead=2)
    with pytest.raises(UsageError, match="resident, streamed"):
        system(weights="cached")
    with pytest.raises(UsageError, match="need host_link_bytes_per_ns"):
        system(weights="streamed", host_link_bytes_per_ns=0.0)
