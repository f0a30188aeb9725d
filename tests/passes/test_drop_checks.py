"""Do kernels check what a caller hands them, and nothing that the network made itself?"""

import numpy as np
import onnx
import pytest
import tvm
import tvm_ffi
from onnx import helper
from onnx_models import onnx_model
from tvm import relax, tirx
from tvm.ir.instrument import pass_instrument

from pimflow.compiler import phases
from pimflow.frontend import onnx_graph
from pimflow.relay_passes.schedules.drop_checks import CHECKED

NODES = 40


def chain(nodes: int = NODES) -> onnx.ModelProto:
    """Two softmaxes behind a chain of sums and products, each with a weight of its own."""
    chain_nodes = [
        helper.make_node(("Add", "Mul")[i % 2], [f"t{i}" if i else "x", f"w{i}"], [f"t{i + 1}"], f"n{i}")
        for i in range(nodes)
    ]
    chain_nodes.append(helper.make_node("Softmax", [f"t{nodes}"], ["s"], "soft"))
    chain_nodes.append(helper.make_node("Softmax", ["s"], ["y"], "softer"))
    values = np.random.default_rng(0).uniform(0.5, 1, (nodes, 4, 8)).astype(np.float32)
    weights = {f"w{i}": value for i, value in enumerate(values)}
    return onnx_model(chain_nodes, {"x": [4, 8]}, {"y": [4, 8]}, weights, name="chain")


def build_and_count(model: onnx.ModelProto) -> tuple[relax.VMExecutable, dict[tuple[int, ...], int]]:
    """An executable, and by what kernels may be handed of a caller the checks that LLVM gets with one."""
    counts = {}

    @pass_instrument
    class CheckCount:
        def run_after_pass(self, mod, info):
            if info.name != "DropChecks":
                return
            for _, function in mod.functions_items():
                if isinstance(function, tirx.PrimFunc):
                    checks = []
                    tvm_ffi.structural_walk(function.body, [(tirx.AssertStmt, checks.append)])
                    counts[tuple(int(position) for position in function.attrs[CHECKED])] = len(checks)

    with tvm.transform.PassContext(opt_level=3, instruments=[CheckCount()]):
        return phases.build(onnx_graph.from_onnx(model)), counts


def test_only_inputs_are_checked():
    """A kernel of 40 weights had 500 checks, each with a message that names all of its arguments."""
    _, counts = build_and_count(chain())
    assert set(counts) == {(), (0,)}
    assert counts[()] == 0
    assert 8 <= counts[0,] <= 12 + NODES + 1  # one check of the device for all arguments


def test_a_callers_tensor_in_pieces_is_refused():
    """`main` checks shapes and types only: read as one piece, it gave wrong values."""
    executable, _ = build_and_count(chain(2))
    run = relax.VirtualMachine(executable, tvm.cpu())["main"]
    value = np.arange(64, dtype=np.float32).reshape(4, 16)
    contiguous = np.ascontiguousarray(value[:, ::2])
    assert run(tvm.runtime.tensor(contiguous)).numpy().shape == (4, 8)
    with pytest.raises(ValueError, match="strides"):
        run(tvm_ffi.from_dlpack(value[:, ::2]))


def test_views_of_inputs_are_checked():
    """A reshape of an input is the caller's memory under another name."""
    model = onnx_model(
        [helper.make_node("Flatten", ["x"], ["f"], "flat"), helper.make_node("Softmax", ["f"], ["y"], "s")],
        {"x": [2, 4, 8]},
        {"y": [2, 32]},
    )
    _, counts = build_and_count(model)
    assert counts[0,] > 8
