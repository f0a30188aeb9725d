"""Do functions of fp16 have a name in every target's library, and the values of fp32?"""

import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx
from tvm.relax import op

import pimflow
from pimflow import frontend
from pimflow.compiler.kernel_checks.check import check_kernels
from pimflow.compiler.kernel_checks.kernels import PlainKernels
from pimflow.compiler.kernel_checks.resources import launch_resources
from pimflow.compiler.phases import build
from pimflow.pim_backend.runtime.cuda_binary import cuda_compiler
from pimflow.relay_passes.schedules.widen_half import WidenHalf

UNARY = (
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "sin", "sinh", "tan", "tanh"),
    *("abs", "ceil", "erf", "exp", "floor", "log", "round", "rsqrt", "sigmoid", "sqrt", "trunc"),
)
BINARY = ("atan2", "mod", "power")
# Those that CUDA or TVM's rules for it lack in fp16.
ABSENT = ("acos", "acosh", "asin", "asinh", "atanh", "atan2", "cosh", "sinh", "mod", "round")


def network(*names):
    """Operators of fp16 tensors, each with a result of its own."""
    a, b = (relax.Var(name, relax.TensorType((4, 33), "float16")) for name in "ab")
    builder = relax.BlockBuilder()
    with builder.function("main", [a, b]):
        with builder.dataflow():
            calls = (getattr(op, name)(*((a, b) if name in BINARY else (a,))) for name in names)
            result = builder.emit_output(relax.Tuple([builder.emit(call) for call in calls]))
        builder.emit_func_output(result)
    return frontend.load(builder.get()).module


def operands():
    """Values between 1/16 and 15/16, for which all of these functions but one are defined."""
    return [np.random.default_rng(i).integers(1, 16, (4, 33)).astype(np.float16) / 16 for i in range(2)]


def expected(name, a, b):
    from scipy.special import erf, expit

    others = {"erf": erf, "sigmoid": expit, "rsqrt": lambda x: 1 / np.sqrt(x), "mod": np.fmod}
    numpy_name = f"arc{name[1:]}" if name.startswith(("acos", "asin", "atan")) else name
    function = others.get(name) or getattr(np, numpy_name)
    with np.errstate(invalid="ignore"):
        return function(*(x.astype(np.float64) for x in ((a, b) if name in BINARY else (a,))))


@pytest.mark.long
def test_results_on_the_cpu_are_those_of_fp32():
    names = (*UNARY, *BINARY)
    machine = relax.VirtualMachine(build(network(*names), "llvm+pim"), tvm.cpu())
    a, b = operands()
    results = machine["main"](*map(tvm.runtime.tensor, (a, b)))
    for name, result in zip(names, results, strict=True):
        np.testing.assert_allclose(result.numpy(), expected(name, a, b), 1e-3, 1e-6, err_msg=name)


@pytest.fixture(scope="module")
def gpu_kernels():
    return PlainKernels.from_network(network(*ABSENT), pimflow.system())


@pytest.mark.long
def test_kernels_on_the_gpu_hold(gpu_kernels):
    checks = list(check_kernels(gpu_kernels.schedule()))
    assert checks and [(check.name, check.verdict) for check in checks if not check.holds] == []


@pytest.mark.long
@pytest.mark.skipif(not cuda_compiler(), reason="needs nvcc or NVRTC")
def test_cuda_has_every_function(gpu_kernels):
    """It has no ``hnearbyint``, ``hcosh``, ``hsinh`` and ``hfmod``, and TVM no name for arc functions."""
    assert len(launch_resources(gpu_kernels, ["sm_75"])) == len(ABSENT)


def test_vectors_keep_their_lanes_and_other_types_their_functions():
    x = tirx.Var("x", "float16x8")
    wide = WidenHalf()(tvm.IRModule({"main": tirx.PrimFunc([x], tirx.Evaluate(tirx.exp(x)))}))["main"]
    assert str(wide.body.value.ty) == "float16x8" and str(wide.body.value.value.ty) == "float32x8"
    a = te.placeholder((16,), "float32", "a")
    module = tvm.IRModule({"main": te.create_prim_func([a, te.compute((16,), lambda i: te.exp(a[i]))])})
    tvm.ir.assert_structural_equal(WidenHalf()(module), module)
    tvm.ir.assert_structural_equal(WidenHalf()(tvm.IRModule({"main": wide}))["main"], wide)
