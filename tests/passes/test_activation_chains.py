"""Is a run of layers one kernel, which gives the same and never holds the tensors between them?"""

import functools
from math import prod
from unittest import mock

import numpy as np
import pytest
import tvm
import tvm_ffi
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_graphs import ACTIVATIONS, RNG, constant, convolution, fused_chain, graph, kernels
from length import examples, long_but
from tvm import relax
from tvm.relax import op

from pimflow.compiler import phases as pipeline
from pimflow.fusion.kernels import relax_formulas
from pimflow.fusion.kernels.emitter import LANES, MAX_PIXELS
from pimflow.fusion.kernels.generator import ON_STACK_BYTES
from pimflow.fusion.kernels.tile_groups import TileGroups
from pimflow.hardware import system
from pimflow.pim_backend.runtime.targets import target_by_name
from pimflow.relay_passes.flat import LAYER_ROLES, layer_name, main_bindings, operator
from pimflow.relay_passes.kernels.activation_chains import activation_chains, chain_regions, region_runs
from pimflow.relay_passes.kernels.outline_groups import OutlineGroups
from pimflow.relay_passes.memory.buffers import buffers
from pimflow.relay_passes.memory.lift_workspaces import WORKSPACES, LiftWorkspaces
from pimflow.relay_passes.operators import BINARY, UNARY
from pimflow.relay_passes.regions.kernel_groups import kernel_groups
from pimflow.relay_passes.schedules.schedule_cpu import ScheduleCpu

CPU = target_by_name("llvm+pim")


def lower_kernels(mod: tvm.IRModule) -> tvm.IRModule:
    phases = [*pipeline.kernel_phases(CPU, "fp32"), ScheduleCpu(), LiftWorkspaces()]
    with CPU:
        return tvm.transform.Sequential(phases)(mod)


def ran(mod: tvm.IRModule, *arrays: np.ndarray) -> np.ndarray:
    machine = relax.VirtualMachine(pipeline.build(mod, CPU, system()), tvm.cpu())
    return machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()


@st.composite
def chains(draw) -> tvm.IRModule:
    window, step = draw(st.sampled_from([(0, 0), (2, 2), (3, 2), (3, 1)]))
    pool = (window, step, draw(st.integers(0, window // 2))) if window else None
    n, h, w = draw(st.tuples(st.integers(1, 2), st.integers(3, 9), st.integers(3, 21)))
    r, c, o = draw(st.sampled_from([(5, 36, 7), (1, 64, 13), (16, 8, 1), (3, 17, 40)]))
    o = 0 if pool and draw(st.booleans()) else o
    activation, mean = draw(st.sampled_from(["relu", "swish", ""])), draw(st.booleans())
    return fused_chain((n, h, w, r), c, o, activation=activation, pool=pool, mean=mean)


@pytest.mark.long
@given(mod=chains())
@settings(max_examples=examples(6), deadline=None)
def test_one_kernel_gives_the_same(mod):
    together = fuse_whole(mod)
    assert len(kernel_groups(together)) == 1
    (kernel,) = kernels(lower_kernels(together)).values()
    assert kernel.attrs["tirx.is_scheduled"]
    assert WORKSPACES not in kernel.attrs, "tiles lie on the stack"
    assert sum(allocation_bytes(kernel)) <= ON_STACK_BYTES + 4 * LANES * MAX_PIXELS
    assert_alike(mod, together)


def fuse(mod: tvm.IRModule) -> tvm.IRModule:
    """The network with every run as a function."""
    return OutlineGroups(dict.fromkeys(chain_regions(mod), ""))(mod)


def fuse_whole(mod: tvm.IRModule) -> tvm.IRModule:
    """A network that is one run, as a function."""
    assert activation_chains(mod) == [[layer_name(mod, b.var) for b in main_bindings(mod)]]
    return fuse(mod)


def assert_alike(mod: tvm.IRModule, together: tvm.IRModule) -> None:
    (x,) = mod["main"].params
    values = np.random.default_rng(0).standard_normal([int(d) for d in x.ty.shape]).astype(np.float32)
    expected = ran(mod, values)
    assert np.allclose(ran(together, values), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.long
@pytest.mark.parametrize("activation", long_but([*ACTIVATIONS][::6], [*ACTIVATIONS]))
def test_any_activation_is_in_the_kernel(activation):
    """Of a count of channels that fills no vector."""
    mod = fused_chain((1, 3, 5, 3), 17, 4, activation=activation)
    together = fuse_whole(mod)
    assert len(kernel_groups(together)) == 1
    assert_alike(mod, together)


def test_elementwise_operators_have_formulas_and_tests():
    """What is fused with a convolution at all may be in a kernel of several layers."""
    formulas = {*relax_formulas.UNARY, *relax_formulas.BINARY, *relax_formulas.BOUNDED}
    assert formulas == {*UNARY, *BINARY}
    chains = (fused_chain((1, 2, 2, 2), 3, 2, activation=activation) for activation in ACTIVATIONS)
    tried = {operator(b.value) for chain in chains for b in main_bindings(chain)}
    assert formulas <= tried


def test_slopes_along_rows_end_a_run():
    def network(emit, x):
        y = emit(convolution(x, constant(8, 1, 1, 8)), name_hint="lconv")
        y = emit(op.nn.prelu(y, constant(8), axis=1))
        return emit(convolution(y, constant(4, 1, 1, 8)), name_hint="fconv")

    assert chains_of(network) == []


def allocation_bytes(func: tvm.tirx.PrimFunc) -> list[int]:
    """Sizes of what a kernel declares."""
    sizes = [0]

    def visit(stmt: tvm.tirx.AllocBuffer) -> None:
        sizes.append(prod(map(int, stmt.buffer.shape)) * tvm.DataType(str(stmt.buffer.dtype)).itemsize)

    tvm_ffi.structural_walk(func.body, [(tvm.tirx.AllocBuffer, visit)], order="pre")
    return sizes


@pytest.mark.parametrize(("pool", "outputs"), [(None, 6), ((2, 2, 0), 6), ((3, 2, 1), 6), ((3, 2, 1), 0)])
def test_tensors_between_are_gone(pool, outputs):
    """What a kernel holds beside its operands is little of the tensor that it does not hold."""
    mod = fused_chain((1, 112, 112, 6), 64, outputs, pool=pool)
    (kernel,) = kernels(lower_kernels(fuse(mod))).values()
    assert WORKSPACES not in kernel.attrs
    assert sum(allocation_bytes(kernel)) * 32 < 4 * 112 * 112 * 64


def test_chains_are_found_by_role_not_by_shape():
    mod = fused_chain((1, 8, 8, 4), 32, 4)
    assert len(activation_chains(mod)) == 1
    assert activation_chains(LAYER_ROLES.attach(mod, {"lconv": "lconv"})) == []


def read_twice(emit, x):
    y = emit(convolution(x, constant(32, 1, 1, 8)), name_hint="lconv")
    y = emit(op.nn.relu(y), name_hint="act")
    z = emit(convolution(y, constant(32, 1, 1, 32)), name_hint="fconv")
    return emit(op.add(z, y), name_hint="skip")


def residual(emit, x):
    y = emit(convolution(x, constant(8, 1, 1, 8)), name_hint="lconv")
    y = emit(op.add(y, x), name_hint="sum")
    return emit(op.nn.relu(emit(convolution(y, constant(4, 1, 1, 8)), name_hint="fconv")))


def two_windows(emit, x):
    y = emit(convolution(x, constant(8, 1, 1, 8)), name_hint="lconv")
    y = emit(op.nn.max_pool2d(y, (2, 2), layout="NHWC"), name_hint="pool1")
    y = emit(op.nn.max_pool2d(y, (2, 2), layout="NHWC"), name_hint="pool2")
    return emit(op.nn.relu(emit(convolution(y, constant(4, 1, 1, 8)), name_hint="fconv")))


def two_pools(emit, x):
    y = emit(convolution(x, constant(8, 1, 1, 8)), name_hint="lconv")
    z = emit(op.nn.max_pool2d(y, (2, 2), layout="NHWC"), name_hint="pool1")
    return emit(op.add(z, emit(op.nn.avg_pool2d(y, (2, 2), layout="NHWC"), name_hint="pool2")))


def residual_behind_a_pool(emit, x):
    y = emit(convolution(x, constant(8, 1, 1, 8)), name_hint="lconv")
    y = emit(op.nn.max_pool2d(y, (3, 3), (2, 2), (1, 1), layout="NHWC"), name_hint="pool1")
    z = emit(convolution(y, constant(8, 1, 1, 8)), name_hint="fconv")
    return emit(op.nn.relu(emit(op.add(y, emit(op.nn.relu(z))))))


def with_part(emit, x, part):
    """A sum of parts, as where a layer is split over its inputs."""
    y = emit(op.nn.relu(emit(convolution(x, constant(32, 1, 1, 8)), name_hint="lconv")))
    z = emit(convolution(y, constant(4, 1, 1, 32)), name_hint="fconv")
    return emit(op.nn.relu(emit(op.add(z, part))))


def with_row(emit, x, row):
    y = emit(op.nn.relu(emit(convolution(x, constant(32, 1, 1, 8)), name_hint="lconv")))
    return emit(op.add(emit(convolution(y, constant(4, 1, 1, 32)), name_hint="fconv"), row))


def flat_result(emit, x, _):
    y = emit(op.nn.relu(emit(convolution(x, constant(32, 1, 1, 8)), name_hint="lconv")))
    y = emit(convolution(y, constant(4, 1, 1, 32)), name_hint="fconv")
    return emit(op.reshape(emit(op.permute_dims(y, [0, 3, 1, 2])), (1, -1)))


def roles_of(network, *shapes) -> tvm.IRModule:
    mod = relax.transform.CanonicalizeBindings()(graph(network, *shapes))
    return LAYER_ROLES.attach(mod, {"lconv": "lconv", "fconv": "fconv", "lconv_2": "lconv"})


def restored_residual(n, h, w, *, channels=32, activation="relu", pool=False, first=True, strides=1):
    """fconv(relu(lconv_2(y) + pool(activation(lconv(x))))), one of the maps `first`."""

    def network(emit, x, y):
        def restore():
            z = emit(convolution(x, constant(channels, 1, 1, 5)), name_hint="lconv")
            z = ACTIVATIONS[activation](emit, emit(op.add(z, constant(1, 1, 1, channels))))
            return emit(op.nn.max_pool2d(z, (2, 2), (2, 2), layout="NHWC")) if pool else z

        def form():
            return emit(convolution(y, constant(channels, 1, 1, 3)), name_hint="lconv_2")

        parts = (restore(), form()) if first else (form(), restore())
        total = emit(op.nn.relu(emit(op.add(*parts))))
        return emit(convolution(total, constant(4, 1, 1, channels), strides=strides))

    scale = 2 if pool else 1
    mod = roles_of(network, (n, scale * h, scale * w, 5), (n, h, w, 3))
    last = main_bindings(mod)[-1].var.name
    return LAYER_ROLES.attach(mod, {**LAYER_ROLES.read(mod), last: "fconv"})


@pytest.mark.long
@given(
    extents=st.tuples(st.integers(1, 2), st.integers(2, 7), st.integers(2, 9)),
    activation=st.sampled_from(["", "relu", "silu"]),
    pool=st.booleans(),
    first=st.booleans(),
    strides=st.sampled_from([1, 2]),
)
@settings(max_examples=examples(4), deadline=None)
def test_a_restored_residual_is_inside_its_run(extents, **options):
    mod = restored_residual(*extents, **options)
    (run,) = activation_chains(mod)
    assert len(run) == len(main_bindings(mod)) and len(region_runs(mod)) == 1
    arrays = [RNG.standard_normal([int(d) for d in p.ty.shape]).astype("float32") for p in mod["main"].params]
    expected = ran(mod, *arrays)
    by_chunks = OutlineGroups({region_runs(mod)[0]: "tiles 1x2x1 by 8 channels"})(mod)
    with mock.patch.object(pipeline, "TileGroups", functools.partial(TileGroups, as_planned=True)):
        results = [ran(by_chunks, *arrays)]
    together = fuse(mod)
    assert len(kernels(lower_kernels(together))) == 1
    for result in (*results, ran(together, *arrays)):
        assert np.abs(result - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("first", [True, False])
def test_neither_map_of_a_sum_is_there_in_full(first):
    mod = restored_residual(1, 56, 56, channels=64, pool=True, first=first)
    (kernel,) = kernels(lower_kernels(fuse(mod))).values()
    assert WORKSPACES not in kernel.attrs
    assert sum(allocation_bytes(kernel)) * 8 < 4 * 56 * 56 * 64


def scale_by_gate(emit, x, y):
    """A gate of one pixel has another shape than the map that it scales."""
    gate = emit(convolution(y, constant(32, 1, 1, 3)), name_hint="lconv_2")
    z = emit(convolution(x, constant(32, 1, 1, 8)), name_hint="lconv")
    z = emit(op.multiply(z, emit(op.sigmoid(gate))))
    return emit(op.nn.relu(emit(convolution(z, constant(4, 1, 1, 32)), name_hint="fconv")))


def test_a_map_of_another_shape_is_in_no_run():
    assert activation_chains(roles_of(scale_by_gate, (1, 8, 8, 8), (1, 1, 1, 3))) == []


@pytest.mark.long
@pytest.mark.parametrize("network", [with_part, flat_result])
def test_the_last_region_of_a_run_may_go_on(network):
    """Pixel by pixel, or with moves alone. It is one kernel for a plan too, which knows regions alone."""
    mod = roles_of(network, (1, 5, 7, 8), (1, 5, 7, 4))
    assert region_runs(mod) == (("lconv", "fconv"),)
    together = OutlineGroups({("lconv", "fconv"): ""})(mod)
    assert len(kernel_groups(together)) == 1
    arrays = [RNG.standard_normal([int(d) for d in p.ty.shape]).astype("float32") for p in mod["main"].params]
    expected, result = (ran(module, *arrays) for module in (mod, together))
    assert np.abs(result - expected).max() <= 1e-5 * np.abs(expected).max()


def sum_of_parts(emit, x, y):
    x = emit(op.nn.relu(emit(convolution(x, constant(32, 1, 1, 8)), name_hint="lconv")))
    part = emit(op.nn.relu(emit(convolution(y, constant(4, 1, 1, 4)), name_hint="part")))
    return emit(op.add(part, emit(convolution(x, constant(4, 1, 1, 32)), name_hint="fconv")))


def window_of_a_part(emit, _, y):
    part = emit(op.nn.relu(emit(convolution(y, constant(4, 1, 1, 4)), name_hint="part")))
    y = emit(convolution(part, constant(32, 3, 3, 4), padding=(1, 1)), name_hint="lconv")
    return emit(op.nn.relu(emit(convolution(y, constant(4, 1, 1, 32)), name_hint="fconv")))


@pytest.mark.parametrize(("network", "count"), [(sum_of_parts, 1), (window_of_a_part, 0)])
def test_a_result_lies_over_an_operand_that_has_its_tiles(network, count):
    """A tile with a halo reads elements that another tile has stored."""
    mod = roles_of(network, (1, 40, 40, 8), (1, 40, 40, 4))
    together = fuse(mod) if count else OutlineGroups({("lconv", "fconv"): ""})(mod)
    assert len(kernel_groups(together)) == 2
    lowered = pipeline.allocate(together, CPU, system())
    tiled = [gv for gv in buffers(lowered).kernels_in_place if gv.name_hint.startswith("tiled")]
    assert len(tiled) == count
    arrays = [RNG.standard_normal([int(d) for d in p.ty.shape]).astype("float32") for p in mod["main"].params]
    expected, result = (ran(module, *arrays) for module in (mod, together))
    assert np.abs(result - expected).max() <= 1e-5 * np.abs(expected).max()


def test_a_region_that_does_more_is_in_no_run():
    mod = roles_of(with_row, (1, 5, 7, 8), (1, 1, 7, 4))
    assert activation_chains(mod) and region_runs(mod) == ()


def chains_of(network) -> list[list[str]]:
    return activation_chains(roles_of(network, (1, 8, 8, 8)))


@pytest.mark.parametrize("network", [read_twice, residual, two_pools])
def test_what_others_need_stays(network):
    assert chains_of(network) == []


@pytest.mark.parametrize("network", [two_windows, residual_behind_a_pool])
def test_a_run_ends_at_its_pooling_where_more_is_read(network):
    assert chains_of(network) == [["lconv", "pool1"]]


def test_fusing_runs_twice_changes_nothing():
    once = fuse_whole(fused_chain((1, 8, 8, 4), 32, 4))
    assert activation_chains(once) == [] and fuse(once).same_as(once)
