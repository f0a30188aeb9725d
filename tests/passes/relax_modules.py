"""What the tests of passes share: running modules, and a few ONNX networks."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

from pimflow.relay_passes.flat import shape


def draw(*dims: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *dims)).standard_normal(dims).astype(np.float32)


def run(mod: tvm.IRModule | relax.VMExecutable, *inputs: np.ndarray) -> list[np.ndarray]:
    """Outputs of ``main`` on TVM's own LLVM build."""
    executable = tvm.compile(mod, "llvm") if isinstance(mod, tvm.IRModule) else mod
    result = relax.VirtualMachine(executable, tvm.cpu())["main"](*(tvm.runtime.tensor(x) for x in inputs))
    return [r.numpy() for r in ([result] if isinstance(result, tvm.runtime.Tensor) else result)]


def inputs_of(mod: tvm.IRModule) -> list[np.ndarray]:
    """An input for each parameter of ``main``, wide enough to reach both bounds of a ReLU6."""
    return [4 * draw(*shape(v), seed=i) for i, v in enumerate(mod["main"].params)]


def same_values(before: tvm.IRModule, after: tvm.IRModule, tolerance: float = 0.0) -> None:
    """Both modules compute the same, to `tolerance` times the largest value."""
    inputs = inputs_of(before)
    for want, got in zip(run(before, *inputs), run(after, *inputs), strict=True):
        assert got.shape == want.shape
        assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


def network(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, ...]],
    outputs: dict[str, tuple[int, ...]],
    **weights: np.ndarray,
) -> onnx.ModelProto:
    def values(table):
        return [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in table.items()]

    constants = [numpy_helper.from_array(np.asarray(v, np.float32), n) for n, v in weights.items()]
    graph = helper.make_graph(nodes, "network", values(inputs), values(outputs), constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.checker.check_model(model)
    return model


def node(op: str, inputs: str, output: str, name: str | None = None, **attributes) -> onnx.NodeProto:
    """``node("Conv", "x w", "y")``; named like its output if `name` is None."""
    given = [i if i != "-" else "" for i in inputs.split()]
    return helper.make_node(op, given, [output], output if name is None else name, **attributes)


def reference(model: onnx.ModelProto, *inputs: np.ndarray) -> list[np.ndarray]:
    """Outputs of ONNX Runtime."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip((i.name for i in session.get_inputs()), inputs, strict=True)))
