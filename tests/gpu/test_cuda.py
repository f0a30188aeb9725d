"""Does a network run on a CUDA device, its PIM regions on device tensors, with the right outputs?"""

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
import tvm_ffi
from tvm import relax

import pimflow
from pimflow import zoo
from pimflow.compiler import phases
from pimflow.pim_backend.runtime.targets import local_cuda
from pimflow.tvm_extension import relay
from pimflow.tvm_extension.relay import graph_executor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not tvm.cuda().exist, reason="needs a CUDA device")]


def check_the_stand_in(compiled, folder):
    """The CPU in place of the card gives the same: each of them is within the bound of the reference."""
    y, twin = pimflow.run(folder)[0], pimflow.run(folder, target="llvm+pim")[0]
    assert np.abs(y - twin).max() <= 2 * compiled.verification.bound * np.abs(twin).max()


@pytest.mark.parametrize("name", ["toy", "mobilenet-v2", "resnet-50", "efficientnet-b0", "mnasnet-1.0"])
def test_a_network_runs_verified_and_timed(name, tmp_path):
    compiled = pimflow.compile(name, tmp_path / "out", target="cuda+pim", conventions="none")
    assert compiled.verification.is_verified
    part = compiled.report.gpu_part
    assert part.measured_ns > 0 and part.measured_on and part.compiler
    print(f"{name}: measured {part.measured_ns / 1e6:.4f} ms on {part.measured_on}, ", end="")
    print(f"modelled {part.modelled_ns / 1e6:.4f} ms on {part.modelled_on}")
    check_the_stand_in(compiled, tmp_path / "out")


def test_the_snippet_on_a_device(tmp_path):
    model = zoo.load("toy")
    onnx.save(model, tmp_path / "toy.onnx")
    x = zoo.example_inputs(model)["input"]
    reference = onnxruntime.InferenceSession(tmp_path / "toy.onnx").run(None, {"input": x})[0]
    mod, params = relay.frontend.from_onnx(onnx.load(tmp_path / "toy.onnx"))
    lib = relay.build(mod, target="cuda+pim", params=params)
    dev = tvm.cuda()
    m = graph_executor.GraphModule(lib["default"](dev))
    m.set_input("input", x)
    m.run()
    assert np.abs(m.get_output(0).numpy() - reference).max() <= 2e-3 * np.abs(reference).max()
    assert m.benchmark(dev, repeat=2, number=2).mean > 0


@pytest.mark.parametrize("options", [{"decompose": "tucker:0.5", "fuse_activations": True}, {"fuse": True}])
def test_a_fused_run_computes_the_same(options, tmp_path):
    compiled = pimflow.compile(
        "toy", tmp_path / "out", target="cuda+pim", modes="gpu", **options, conventions="none"
    )
    assert compiled.search_result.group_tilings()
    assert compiled.verification.is_verified
    check_the_stand_in(compiled, tmp_path / "out")


@pytest.mark.parametrize(("name", "modes"), [("mobilenet-v2", "gpu"), ("toy", "gpu,pim,split")])
def test_kernels_replayed_as_graphs_compute_the_same(name, modes, tmp_path):
    """Captured at the first inference, replayed at the second, on other values."""
    results, inputs = [], zoo.example_inputs(zoo.load(name))["input"]
    for cuda_graphs in (False, True):
        folder = tmp_path / str(cuda_graphs)
        pimflow.compile(
            name, folder, target="cuda+pim", modes=modes, cuda_graphs=cuda_graphs, conventions="none"
        )
        executor = tvm.runtime.load_module(str(folder / "model-cuda.so"))["default"](tvm.cuda())
        for scale in (1.0, 0.5, 0.25):
            executor["set_input"]("input", tvm.runtime.tensor(scale * inputs))
            executor["run"]()
            results.append(executor["get_output"](0).numpy())
    assert tvm_ffi.get_global_func("pimflow.runtime.can_capture_kernels")()
    for plain, replayed in zip(results[:3], results[3:]):
        np.testing.assert_array_equal(plain, replayed)


@pytest.mark.parametrize("ahead", [0, 1, 8])
def test_streamed_weights_compute_the_same(ahead, tmp_path):
    """Copied from page-locked memory, beside the kernels with `ahead`, at every inference anew."""
    x, outputs = zoo.example_inputs(zoo.load("mobilenet-v2"))["input"], []
    for weights, distance in (("resident", 0), ("streamed", ahead)):
        folder, system = tmp_path / weights, pimflow.system(weights=weights, copy_ahead=distance)
        pimflow.compile(
            "mobilenet-v2", folder, system=system, target="cuda+pim", modes="gpu", conventions="none"
        )
        executor = tvm.runtime.load_module(str(folder / "model-cuda.so"))["default"](tvm.cuda())
        for scale in (1.0, 0.5, 0.25):
            executor["set_input"]("input", tvm.runtime.tensor(scale * x))
            executor["run"]()
            outputs.append(executor["get_output"](0).numpy())
    for resident, streamed in zip(outputs[:3], outputs[3:], strict=True):
        np.testing.assert_array_equal(resident, streamed)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_running_sum_along_any_axis(axis):
    x = relax.Var("x", relax.TensorType((6, 40, 5), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(builder.emit(relax.op.cumsum(x, axis=axis)))
        builder.emit_func_output(y)
    machine = relax.VirtualMachine(phases.build(builder.get(), local_cuda()), tvm.cuda())
    values = np.random.default_rng(0).standard_normal((6, 40, 5)).astype("float32")
    result = machine["main"](tvm.runtime.tensor(values, tvm.cuda())).numpy()
    np.testing.assert_allclose(result, values.cumsum(axis), atol=0.1)  # stored in fp16
