"""Do primitives compute convolutions, in the memory that their formulas say?"""

import numpy as np
import pytest
import tvm
import tvm_ffi
from conv_layers import ON_CPU, convolve, kernel_network, layers_for, operands, to_layout
from length import long_but
from tvm import s_tir, tirx

from pimflow.core.kernel import ConvGeometry
from pimflow.errors import UnknownNameError, UsageError
from pimflow.primitives import PRIMITIVES, get_primitive
from pimflow.primitives.families import FAMILIES, input_shape, output_shape
from pimflow.primitives.filters import transform_filters, winograd_matrices
from pimflow.primitives.kernels.prim_func import kernel
from pimflow.primitives.primitive import STACK_BYTES
from pimflow.relay_passes.memory.lift_workspaces import LiftWorkspaces
from pimflow.relay_passes.schedules.schedule_cpu import ScheduleCpu

CPU = tvm.target.Target("llvm")
BOUND = {"winograd": 1e-4}  # of the largest output: its tiles add and subtract larger numbers (F(4, 3) most)


# Of those that differ in tiles alone, the first computes two layers, the others one each.
FIRST = {(p.family, p.layout, p.directions): p.name for p in map(PRIMITIVES.get, reversed(ON_CPU))}.values()


def schedule(chosen, layer):
    return ScheduleCpu()(tvm.IRModule({"main": kernel(chosen, layer).with_attr("global_symbol", "main")}))


@pytest.mark.long
@pytest.mark.parametrize("name", long_but(ON_CPU[::8], ON_CPU))
def test_values(name):
    chosen = PRIMITIVES[name]
    for layer in layers_for(chosen, 2 if name in FIRST else 1):
        x, filters = operands(layer)
        y = tvm.runtime.tensor(np.full(output_shape(chosen, layer), np.nan, np.float32))
        inputs = [to_layout(chosen.layout, x), transform_filters(chosen, layer, filters)]
        tvm.compile(schedule(chosen, layer), target=CPU)["main"](*map(tvm.runtime.tensor, inputs), y)
        expected = to_layout(chosen.layout, convolve(layer, x, filters))
        error = np.abs(y.numpy() - expected).max() / np.abs(expected).max()
        assert error <= BOUND.get(chosen.family, 2e-6), layer


@pytest.mark.long
@pytest.mark.parametrize("name", long_but(ON_CPU[::8], ON_CPU))
def test_memory_is_what_the_formulas_say(name):
    chosen = PRIMITIVES[name]
    for layer in layers_for(chosen, 3):
        function = schedule(chosen, layer)["main"]
        shapes = [tuple(int(d) for d in p.shape) for p in function.params]
        assert shapes == [input_shape(chosen, layer), chosen.filter_shape(layer), output_shape(chosen, layer)]
        assert sorted(workspace_shapes(function)) == sorted(chosen.workspaces(layer).values()), layer
        workspaces = chosen.workspaces(layer).values()
        assert chosen.workspace_bytes(layer) == 4 * sum(int(np.prod(s)) for s in workspaces)


def workspace_shapes(function: tirx.PrimFunc) -> list[tuple[int, ...]]:
    """Shapes of what the kernel needs besides its operands, as the planner of memory sees them."""
    with CPU:
        lifted = LiftWorkspaces()(kernel_network(function))
    (after,) = (f for f in lifted.functions.values() if isinstance(f, tirx.PrimFunc))
    inside: list[tirx.Buffer] = []
    visitors = [
        (tirx.For, lambda loop: tvm_ffi.WalkResult.SKIP),
        (s_tir.SBlock, lambda block: inside.extend(block.alloc_buffers)),
    ]
    tvm_ffi.structural_walk(after.body, visitors, order="pre")
    large = [
        b for b in inside if b.scope() == "global" and 4 * np.prod([int(d) for d in b.shape]) >= STACK_BYTES
    ]
    assert not large
    return [tuple(int(d) for d in p.shape) for p in after.params[3:]]


def test_there_are_enough_and_every_family_has_some():
    assert len(ON_CPU) >= 57
    assert {p.family for p in PRIMITIVES.values()} == set(FAMILIES)
    plain = ConvGeometry(n=1, h=14, w=14, c=64, oc=64, kh=3, kw=3, padding=(1, 1, 1, 1))
    assert sum(PRIMITIVES[name].applies(plain) for name in ON_CPU) >= 50


@pytest.mark.parametrize("outputs, taps", [(2, 3), (4, 3), (2, 5), (3, 2), (6, 3)])
def test_winograd_matrices_give_every_correlation(outputs, taps):
    a, g, b = winograd_matrices(outputs, taps)
    for i in range(outputs + taps - 1):
        for k in range(taps):
            data, tap = np.eye(outputs + taps - 1)[i], np.eye(taps)[k]
            expected = [float(o + k == i) for o in range(outputs)]
            assert np.allclose(a @ ((g @ tap) * (b @ data)), expected, atol=1e-12)


def test_wrong_uses():
    with pytest.raises(UnknownNameError, match="im2row-hwc-7x32"):
        get_primitive("im2row-7x32")
    with pytest.raises(UsageError, match="does not apply"):
        kernel(get_primitive("winograd-2d-f2-hwc-7x32"), ConvGeometry(n=1, h=8, w=8, c=4, oc=4))
    with pytest.raises(UsageError, match="is the operator as it is"):
        kernel(get_primitive("operator-cuda-hwc"), ConvGeometry(n=1, h=8, w=8, c=4, oc=4))
