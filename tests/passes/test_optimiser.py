"""Does ONNX Runtime's optimiser serve again after its process has ended?"""

import signal

import onnx
import pytest
from onnx import helper
from onnx_models import onnx_model

from pimflow.frontend.optimiser import OptimiserProcess, optimise


def shape_model(name: str) -> onnx.ModelProto:
    shape = helper.make_node("Shape", ["x"], ["s"], "shape")
    nodes = [shape, helper.make_node("Reshape", ["x", "s"], ["y"], "reshape")]
    return onnx_model(nodes, {"x": [2, 3]}, {"y": [2, 3]}, {}, name=name)


def test_shapes_are_folded_and_a_broken_network_is_none():
    for name in ("first", "second"):
        assert "Shape" not in {node.op_type for node in optimise(shape_model(name)).graph.node}
    broken = shape_model("broken")
    broken.graph.node[1].op_type = "NoOperator"
    assert optimise(broken) is None
    assert optimise(shape_model("third")) is not None


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_an_ended_process_is_started_again(tmp_path, number):
    server = OptimiserProcess()
    (tmp_path / "model.onnx").write_bytes(shape_model("net").SerializeToString())
    server.optimise(str(tmp_path))
    first = server._process
    first.send_signal(number)
    first.wait()
    (tmp_path / "optimised.onnx").unlink()
    server.optimise(str(tmp_path))
    assert (tmp_path / "optimised.onnx").exists() and server._process.pid != first.pid
    server.end()
    assert first.poll() is not None and server._process is None
