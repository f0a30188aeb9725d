"""Do kernels of primitives write results once, read joined maps in place, and have work for all cores?"""

import numpy as np
import pytest
import tvm
import tvm_ffi
from graphs import outputs
from kernel_graphs import constant, convolution, graph
from length import long_but
from test_select_primitives import layers
from tvm import relax, tirx
from tvm.relax import op

from pimflow.compiler import phases
from pimflow.core.kernel import ConvGeometry
from pimflow.hardware import system
from pimflow.pim_backend.runtime.targets import this_cpu_target
from pimflow.primitives import PRIMITIVES
from pimflow.primitives.kernels.prim_func import kernel
from pimflow.relay_passes.flat import main_bindings, operator
from pimflow.relay_passes.kernels.select_primitives import SelectPrimitives
from pimflow.relay_passes.schedules.schedule_cpu import ScheduleCpu

ONE_BY_ONE = ("pointwise-hwc-14x32", "pointwise-chw-7x32", "direct-hwc-14x32")


def schedule_cpu(mod: tvm.IRModule) -> tvm.IRModule:
    target = this_cpu_target()
    with target:
        return tvm.transform.Sequential(phases.scheduling_phases(target, system()))(mod)


def loops(function: tirx.PrimFunc, kind: tirx.ForKind) -> list[int]:
    """Extents of loops of a kind."""
    extents: list[int] = []

    def note(loop: tirx.For) -> None:
        if loop.kind == kind:
            extents.append(int(loop.extent))

    tvm_ffi.structural_walk(function.body, [(tirx.For, note)], order="pre")
    return extents


def joining(*channels: int):
    """A 1x1 layer over a concatenation, with a bias, a residual and a clamp behind it."""

    def network(emit, x):
        parts = [emit(convolution(x, constant(c, 1, 1, 16))) for c in channels]
        joined = emit(op.concat(parts, axis=3))
        y = emit(convolution(joined, constant(16, 1, 1, sum(channels))))
        y = emit(op.add(y, constant(1, 1, 1, 16)))
        return emit(op.clip(emit(op.add(y, x)), 0, 6))

    return graph(network, (1, 9, 9, 16))


@pytest.mark.long
@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize("channels", long_but([(8, 8, 24)], [(16, 32), (8, 8, 24), (5, 3)]))
def test_joined_maps(name, channels):
    mod = joining(*channels)
    last = list(layers(mod))[-1]
    after = SelectPrimitives({last: PRIMITIVES[name]})(mod)
    x = np.random.default_rng(0).standard_normal((1, 9, 9, 16), np.float32)
    (expected,), (result,) = outputs(mod, [x]), outputs(after, [x])
    assert np.abs(result - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", ONE_BY_ONE[::2])
def test_a_joined_map_is_read_where_its_parts_lie(name):
    """No copy of it, no sums written before what is behind them, and one nest with all that."""
    mod = joining(16, 32)
    last = list(layers(mod))[-1]
    lowered = schedule_cpu(SelectPrimitives({last: PRIMITIVES[name]})(mod))
    calls = [b.value for b in main_bindings(lowered) if operator(b.value) == "call_tir"]
    function = lowered[calls[-1].args[0]]
    assert len(calls) == 3 and "pimflow.workspaces" not in function.attrs
    assert isinstance(calls[-1].ty, relax.TensorType)
    assert len(loops(function, tirx.ForKind.PARALLEL)) == 1
    assert 3 in loops(function, tirx.ForKind.UNROLLED)  # pieces of 16 channels


@pytest.mark.parametrize(
    "name", ["pointwise-hwc-14x32", "direct-hwc-14x32", "direct-chw-7x32", "direct-chwc16-14x16"]
)
@pytest.mark.parametrize("size, channels", [(27, 32), (14, 64), (7, 256)])
def test_every_core_has_work(name, size, channels):
    """Where filters fit into one panel or two and the map near a core, too."""
    layer = ConvGeometry(n=1, h=size, w=size, c=64, oc=channels)
    function = kernel(PRIMITIVES[name], layer).with_attr("global_symbol", "main")
    tasks = loops(ScheduleCpu()(tvm.IRModule({"main": function}))["main"], tirx.ForKind.PARALLEL)
    count = max(tasks)
    for cores in (2, 4):
        assert count >= 2 * cores and -(-count // cores) * cores <= 1.25 * count, (count, cores)
