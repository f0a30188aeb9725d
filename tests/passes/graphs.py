"""Running Relax modules on LLVM, and ONNX models of a few nodes."""

import numpy as np
import onnx
import tvm
from onnx import TensorProto
from onnx_models import onnx_model
from tvm import relax
from tvm.script import relax as R

from pimflow.compiler import phases
from pimflow.frontend import relax_module
from pimflow.pim_backend.runtime.network_module import infer, pack
from pimflow.pim_backend.runtime.targets import TARGETS
from pimflow.relay_passes.flat import main_bindings, operator, shape

# LLVM's optimisations do not matter here, and take longer than the passes under test.
PLAIN_CODE = tvm.target.Target(TARGETS["llvm+pim"] | {"opt-level": 0})


def as_module(function) -> tvm.IRModule:
    """Decorator of a function in TVMScript: the module whose ``main`` it is, as one dataflow block."""
    main = R.function(function).with_attr("global_symbol", "main")
    return relax.transform.ConvertToDataflow(1)(tvm.IRModule({"main": main}))


as_module.dispatch_token = "relax"  # the language, for TVM's parser


def main_module(params: list[relax.Var], result) -> tvm.IRModule:
    """The module whose ``main`` takes `params` and gives ``result(builder)``."""
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            output = builder.emit_output(result(builder))
        builder.emit_func_output(output)
    return builder.get()


def inline_functions(mod: tvm.IRModule) -> tvm.IRModule:
    """`mod` whose functions for PIM are plain Relax."""
    functions = dict(mod.functions_items())
    return tvm.IRModule(
        {gv: f.without_attr("Codegen") if "Codegen" in (f.attrs or {}) else f for gv, f in functions.items()}
    )


def inputs(mod: tvm.IRModule, seed: int = 0) -> list[np.ndarray]:
    """Random operands for ``main``, of any sign and order 1."""
    rng = np.random.default_rng(seed)
    return [(2 * rng.standard_normal(shape(var))).astype(str(var.ty.dtype)) for var in mod["main"].params]


def run(mod: tvm.IRModule, *operands: np.ndarray) -> list[np.ndarray]:
    """Results of ``main`` on LLVM, by TVM's own default pipeline."""
    machine = relax.VirtualMachine(tvm.compile(mod, PLAIN_CODE), tvm.cpu())
    results = machine["main"](*(tvm.runtime.tensor(x) for x in operands))
    return [r.numpy() for r in (results if isinstance(results, tvm.ir.Array | tuple | list) else [results])]


def same_bits(before: tvm.IRModule, after: tvm.IRModule, *operands: np.ndarray) -> bool:
    """Whether both give the same results on `operands`, random ones if there are none."""
    operands = operands or inputs(before)
    pairs = zip(run(before, *operands), run(after, *operands), strict=True)
    return all(a.shape == b.shape and np.array_equal(a, b, equal_nan=True) for a, b in pairs)


def close(before: tvm.IRModule, after: tvm.IRModule) -> None:
    """The same up to the order of sums."""
    operands = inputs(before)
    for expected, got in zip(run(before, *operands), run(after, *operands), strict=True):
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def runs_alike(mod: tvm.IRModule) -> None:
    """Built kernel by kernel, `mod` gives what TVM's own fusion gives, within rounding."""
    operands = inputs(mod)
    machine = relax.VirtualMachine(phases.build(mod, PLAIN_CODE), tvm.cpu())
    results = machine["main"](*(tvm.runtime.tensor(x) for x in operands))
    results = [results] if isinstance(results, tvm.runtime.Tensor) else results
    for result, expected in zip(results, run(mod, *operands), strict=True):
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-5)


def conv2d_nhwc(x: relax.Expr, filters, **attributes) -> relax.Call:
    """`x` [N, H, W, C] with constant `filters` [O, H, W, I]; TVMScript can call it."""
    return relax.op.nn.conv2d(x, relax.const(filters), data_layout="NHWC", kernel_layout="OHWI", **attributes)


def operators(mod: tvm.IRModule) -> list[str]:
    return [operator(binding.value) for binding in main_bindings(mod)]


def names(mod: tvm.IRModule, kind: str) -> list[str]:
    """Variables that hold the results of operator `kind`."""
    return [b.var.name for b in main_bindings(mod) if operator(b.value) == kind]


def shaped_model(
    nodes: list[onnx.NodeProto],
    shapes: dict[str, tuple[int, ...]],
    weights: dict[str, np.ndarray],
    outputs: list[str],
    dtype: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    """A model that says the shapes of all its values."""
    inputs = {name: (dtype, dims) for name, dims in shapes.items()}
    model = onnx_model(nodes, inputs, dict.fromkeys(outputs, (dtype, None)), weights)
    return onnx.shape_inference.infer_shapes(model)


def outputs(mod: tvm.IRModule, operands: list[np.ndarray]) -> list[np.ndarray]:
    """What `mod` computes, by the passes that pimflow compiles it with."""
    packed = pack(phases.build(mod, PLAIN_CODE), relax_module.inputs(mod), relax_module.outputs(mod))
    return infer(packed, dict(zip(relax_module.inputs(mod), operands, strict=True)))


def exported(function, *operands):
    """The program of PyTorch whose ``forward`` takes ``x`` and gives ``function(x)``."""
    import torch

    class Program(torch.nn.Module):
        def forward(self, x):
            return function(x)

    return torch.export.export(Program(), operands)
