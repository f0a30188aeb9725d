"""Do primitives for GPUs compute convolutions, in the launches and the memory that they say?

There is no GPU here: a schedule's values are those of its loops with the threads run one after the other,
on LLVM. That is what it means before barriers are inserted, which is TVM's part; `tests/gpu` runs them.
"""

import re

import numpy as np
import pytest
import tvm
from conv_layers import ON_CUDA, convolve, kernel_network, layers_for, operands
from length import long_but
from tvm import tirx

from pimflow.core.kernel import ConvGeometry
from pimflow.pim_backend.runtime.cuda_binary import cuda_compiler
from pimflow.pim_backend.runtime.targets import target_by_name
from pimflow.primitives import PRIMITIVES
from pimflow.primitives.families import output_shape
from pimflow.primitives.filters import transform_filters
from pimflow.primitives.kernels.prim_func import kernel
from pimflow.relay_passes.memory.lift_workspaces import LiftWorkspaces
from pimflow.relay_passes.schedules.schedule_gpu import ScheduleGpu

CUDA = target_by_name("cuda+pim")
TILED = [name for name in ON_CUDA if PRIMITIVES[name].places]
BOUND = {"winograd": 1e-4}  # of the largest output
LAUNCHES = {"im2row": 2, "winograd": 3}  # others: one


def schedule(chosen, layer) -> tirx.PrimFunc:
    with CUDA:
        plain = kernel(chosen, layer).with_attr("global_symbol", "main")
        return ScheduleGpu()(tvm.IRModule({"main": plain}))["main"]


def serialise_threads(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func` with loops in place of threads."""
    loops = re.sub(r'T\.thread_binding\((.*?), thread="[\w.]+"\)', r"T.serial(\1)", func.script())
    return tvm.script.from_source(loops)


@pytest.mark.parametrize("name", long_but(TILED[::4], TILED))
def test_values(name):
    chosen = PRIMITIVES[name]
    (layer,) = layers_for(chosen, 1)
    x, filters = operands(layer)
    y = tvm.runtime.tensor(np.full(output_shape(chosen, layer), np.nan, np.float32))
    mod = tvm.IRModule({"main": serialise_threads(schedule(chosen, layer))})
    inputs = (x, transform_filters(chosen, layer, filters))
    tvm.compile(mod, "llvm")["main"](*map(tvm.runtime.tensor, inputs), y)
    expected = convolve(layer, x, filters)
    error = np.abs(y.numpy() - expected).max() / np.abs(expected).max()
    assert error <= BOUND.get(chosen.family, 2e-6), layer


@pytest.mark.long
@pytest.mark.parametrize("name", long_but(TILED[::4], TILED))
def test_launches_and_shared_memory(name):
    """As CUDA source, which asks for threads in every launch; barriers where threads share a tile."""
    chosen = PRIMITIVES[name]
    (layer,) = layers_for(chosen, 1)
    mod = tvm.IRModule({"main": schedule(chosen, layer)})
    source = tvm.compile(mod, CUDA).mod.imports[0].inspect_source()
    launches = len(re.findall(r"__global__ [^;{]*\{", source))
    assert launches == LAUNCHES.get(name.split("-")[0], 1)
    sizes = [int(n) for n in re.findall(r"__shared__ alignas\(64\) float \w+\[(\d+)\]", source)]
    assert len(sizes) == (2 if chosen.shared else 0) and 4 * sum(sizes) <= 48 << 10
    assert ("__syncthreads" in source) == chosen.shared
    assert all(int(n) <= 1024 for n in re.findall(r"__launch_bounds__\((\d+)\)", source))


@pytest.mark.long
@pytest.mark.parametrize("name", TILED)
def test_workspaces_are_what_the_formulas_say(name):
    chosen = PRIMITIVES[name]
    (layer,) = layers_for(chosen, 1)
    with CUDA:
        lifted = LiftWorkspaces()(kernel_network(schedule(chosen, layer)))
    (after,) = (f for f in lifted.functions.values() if isinstance(f, tirx.PrimFunc))
    extra = [tuple(int(d) for d in param.shape) for param in after.params[3:]]
    assert sorted(extra) == sorted(chosen.stages(layer).values())


@pytest.mark.long
@pytest.mark.skipif(not cuda_compiler(), reason="needs nvcc or NVRTC")
def test_they_compile_for_turing():
    from pimflow.pim_backend.runtime.cuda_binary import compile_kernels

    layer = ConvGeometry(n=1, h=14, w=14, c=32, oc=48, kh=3, kw=3, padding=(1, 1, 1, 1))
    names = ["direct-cuda-hwc-32x32", "implicit-gemm-cuda-hwc-64x64", "winograd-2d-f4-cuda-hwc-32x64"]
    functions = {f"k{n}": schedule(PRIMITIVES[name], layer) for n, name in enumerate(names)}
    named = {name: f.with_attr("global_symbol", name) for name, f in functions.items()}
    _, build = compile_kernels(lambda: tvm.compile(tvm.IRModule(named), CUDA), CUDA)
    assert build.compiler and not build.problem
