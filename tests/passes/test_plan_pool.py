"""Do tensors that share bytes keep their values, and does the machine allocate what was planned?"""

import dataclasses
import itertools

import numpy as np
import pytest
import tvm
from graphs import PLAIN_CODE, as_module, inputs, main_module
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from tvm import relax
from tvm.script import relax as R

from pimflow import system
from pimflow.compiler import phases as pipeline
from pimflow.core.liveness import ALIGNMENT_BYTES
from pimflow.hardware import System
from pimflow.memory import plan
from pimflow.pim_backend.runtime.targets import target_by_name
from pimflow.relay_passes.flat import main_bindings, operator
from pimflow.relay_passes.kernels.group_kernels import GroupKernels
from pimflow.relay_passes.kernels.store_half import StoreHalf
from pimflow.relay_passes.memory.buffers import buffers
from pimflow.relay_passes.memory.keep_views import JOIN, PART, KeepViews
from pimflow.relay_passes.memory.plan_pool import PlanPool
from pimflow.relay_passes.regions.kernel_groups import copies, kernel_groups

ELIDED, MADE = system(), system(copies="made")


def views(mod: tvm.IRModule) -> list[str]:
    return [group.result.name for group in kernel_groups(mod) if group.view]


def allocate(mod: tvm.IRModule, target_system: System = ELIDED) -> tvm.IRModule:
    return pipeline.allocate(mod, target_by_name("llvm+pim"), target_system)


def execute(mod: tvm.IRModule, target_system: System = ELIDED) -> tuple[list[np.ndarray], list[int]]:
    """Results of `mod` as pimflow builds it, and the bytes of every storage that the machine allocates."""
    machine = relax.VirtualMachine(pipeline.build(mod, PLAIN_CODE, target_system), tvm.cpu())
    storages: list[int] = []

    def watch(_function, name, before, _result, *args):
        if before and name == "vm.builtin.alloc_storage":
            storages.append(int(args[1][0]))

    machine.set_instrument(watch)
    results = machine["main"](*(tvm.runtime.tensor(x) for x in inputs(mod)))
    results = [results] if isinstance(results, tvm.runtime.Tensor) else results
    return [result.numpy() for result in results], storages


def run_unshared(mod: tvm.IRModule) -> list[np.ndarray]:
    """Results with every tensor in an allocation of its own, and every copy made."""
    transform = relax.transform
    phases = [
        transform.LowerAllocTensor(),
        transform.KillAfterLastUse(),
        transform.LowerRuntimeBuiltin(),
        transform.ComputePrimValue(),
        transform.VMShapeLower(),
        transform.AttachGlobalSymbol(),
    ]
    lower = tvm.transform.module_pass(
        lambda module, _: tvm.transform.Sequential(phases)(allocate(module, MADE)), opt_level=0, name="apart"
    )
    machine = relax.VirtualMachine(tvm.compile(mod, PLAIN_CODE, relax_pipeline=lower), tvm.cpu())
    results = machine["main"](*(tvm.runtime.tensor(x) for x in inputs(mod)))
    results = [results] if isinstance(results, tvm.runtime.Tensor) else results
    return [result.numpy() for result in results]


# ---- any graph ----

FILTERS = np.random.default_rng(0).standard_normal((8, 1, 1, 8), np.float32)


@st.composite
def graphs_of_parts(draw):
    """Up to twelve operators over maps of 4 columns and 8 channels: a row is 64 B in fp16."""
    builder = relax.BlockBuilder()
    params = [relax.Var(name, relax.TensorType((1, 4, 4, 8), "float32")) for name in ("x", "y")]
    kinds = ["relu", "add", "conv", "pool", "slice", "slice", "concat", "concat", "columns", "flat"]
    with builder.function("main", params):
        with builder.dataflow():
            values, read = list(params), set()

            def operand(rows=None):
                pool = [v for v in values if rows is None or int(v.ty.shape[1]) == rows]
                var = pool[-1 - draw(st.integers(0, min(4, len(pool) - 1)))]
                read.add(var)
                return var

            for _ in range(draw(st.integers(1, 12))):
                kind, a = draw(st.sampled_from(kinds)), operand()
                rows = int(a.ty.shape[1])
                if kind == "add":
                    value = relax.op.add(a, operand(rows))
                elif kind == "conv":
                    filters = relax.const(FILTERS)
                    value = relax.op.nn.conv2d(a, filters, data_layout="NHWC", kernel_layout="OHWI")
                elif kind == "pool":
                    value = relax.op.nn.max_pool2d(a, (3, 3), padding=(1, 1), layout="NHWC")
                elif kind == "slice":
                    begin = draw(st.integers(0, rows - 1))
                    end = draw(st.integers(begin + 1, rows))
                    value = relax.op.strided_slice(a, [1], [begin], [end], assume_inbound=True)
                elif kind == "columns":  # not contiguous
                    left = relax.op.strided_slice(a, [2], [0], [2], assume_inbound=True)
                    value = relax.op.concat([builder.emit(left), builder.emit(left)], axis=2)
                elif kind == "concat" and rows < 16:
                    value = relax.op.concat([a, operand()], axis=1)
                elif kind == "flat":
                    flat = builder.emit(relax.op.reshape(a, (1, rows * 4, 1, 8)))
                    value = relax.op.reshape(flat, (1, rows, 4, 8))
                else:
                    value = relax.op.nn.relu(a)
                values.append(builder.emit(value))
            results = [v for v in values[2:] if v not in read]
            output = builder.emit_output(relax.Tuple(results) if len(results) > 1 else results[0])
        builder.emit_func_output(output)
    return builder.get()


@pytest.mark.long
@settings(max_examples=examples(18))
@given(graphs_of_parts())
def test_any_graph_keeps_its_values(mod):
    """Bit by bit: in one pool, with parts and results in place, as with every tensor by itself."""
    planned, storages = execute(mod)
    for result, expected in zip(planned, run_unshared(mod), strict=True):
        assert np.array_equal(result, expected)
    liveness = buffers(allocate(mod)).liveness()
    assert storages == ([plan(liveness.lifetimes).pool_bytes] if liveness.lifetimes else [])


@pytest.mark.long
@settings(max_examples=examples(90))
@given(graphs_of_parts())
def test_what_shares_bytes_of_any_graph(mod):
    """Taking over operands never needs more memory; copies that are left have a reason."""
    lowered = allocate(mod)
    separate, shared = (buffers(lowered, in_place=in_place).liveness() for in_place in (False, True))
    assert shared.peak_bytes <= separate.peak_bytes
    assert all(life.within_bytes % ALIGNMENT_BYTES == 0 for life in shared.lifetimes)
    assert all(copied.reason and copied.size_bytes for copied in copies(mod))
    kinds = ("concat", "strided_slice", "reshape")
    movable = {b.var.name for b in main_bindings(mod) if operator(b.value) in kinds}
    assert {copied.layer for copied in copies(mod)} | set(views(mod)) <= movable


# ---- which slices and concatenations are no copies ----


def graph(make) -> tvm.IRModule:
    """``main`` of a map of 4 rows of 64 B in fp16, whose result `make` gives."""
    x = relax.Var("x", relax.TensorType((1, 4, 4, 8), "float32"))
    return main_module([x], lambda builder: make(builder, x))


def rows(builder, x, begin, end, axis=1, stride=1):
    options = {} if stride == 1 else {"strides": [stride]}
    call = relax.op.strided_slice(x, [axis], [begin], [end], assume_inbound=True, **options)
    return builder.emit(call, name_hint="part")


def relu(builder, x):
    return builder.emit(relax.op.nn.relu(x))


def concatenate(builder, *parts, axis=1):
    return builder.emit(relax.op.concat(parts, axis=axis), name_hint="joined")


CASES = [
    ("rows", lambda b, x: relu(b, rows(b, x, 1, 3)), ["part"], ""),
    ("of a result", lambda b, x: relu(b, rows(b, relu(b, x), 2, 4)), ["part"], ""),
    ("from the end", lambda b, x: relu(b, rows(b, x, -2, 4)), ["part"], ""),
    ("every other row", lambda b, x: relu(b, rows(b, x, 0, 4, stride=2)), [], ""),
    ("columns", lambda b, x: relu(b, rows(b, x, 0, 2, axis=2)), [], ""),
    ("joined rows", lambda b, x: concatenate(b, relu(b, x), relu(b, x)), ["joined"], ""),
    ("an input", lambda b, x: concatenate(b, x, relu(b, x)), [], "an input or a constant"),
    ("twice", lambda b, x: concatenate(b, *[relu(b, x)] * 2), [], "two places"),
    ("channels", lambda b, x: concatenate(b, relu(b, x), relu(b, x), axis=3), [], "not contiguous"),
    ("a part", lambda b, x: concatenate(b, rows(b, relu(b, x), 0, 2), relu(b, x)), ["part"], "another name"),
]


@pytest.mark.parametrize("make, expected, reason", [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_which_parts_are_no_copies(make, expected, reason):
    mod = graph(make)
    assert views(mod) == expected
    assert [reason in copied.reason for copied in copies(mod)] == ([True] if reason else [])
    assert not any(group.view for group in kernel_groups(mod, views=False))


def test_a_part_that_begins_off_the_alignment_is_copied():
    x = relax.Var("x", relax.TensorType((1, 4, 4, 7), "float32"))
    (copied,) = copies(main_module([x], lambda builder: rows(builder, x, 1, 3)))
    assert "begins 56 B into its tensor" in copied.reason
    assert copied.size_bytes == 2 * 4 * 7 * 4


# ---- KeepViews ----


@as_module
def PooledHalves(x: R.Tensor((1, 4, 4, 8), "float32")):
    top = R.strided_slice(x, [1], [0], [2], assume_inbound=True)
    bottom = R.strided_slice(x, [1], [2], [4], assume_inbound=True)
    above = R.nn.relu(top)
    below = R.exp(bottom)
    y = R.concat((above, below), axis=1)
    return y


def test_keep_views():
    after = KeepViews()(GroupKernels()(PooledHalves))
    calls = [b.value for b in main_bindings(after) if operator(b.value) == "call_pure_packed"]
    assert [str(call.args[0].global_symbol) for call in calls] == [PART, PART, JOIN]
    assert [int(call.args[2].value) for call in calls[:2]] == [0, 2 * 4 * 8 * 4]
    tvm.ir.assert_structural_equal(KeepViews()(after), after)
    assert [b.name for b in calls[2].args[1:]] == ["lv", "lv1"] or len(calls[2].args) == 3


def test_keep_views_leaves_kernels_alone():
    """Where copies are made, slices and concatenations are inside of kernels."""
    grouped = GroupKernels(views=False)(PooledHalves)
    tvm.ir.assert_structural_equal(KeepViews()(grouped), grouped)


def test_parts_in_half_precision_have_one_type():
    """What lies inside a result of the network keeps its type, and so does what shares that result."""
    after = StoreHalf()(GroupKernels()(PooledHalves))
    types = {b.var.name: str(b.var.ty.dtype) for b in main_bindings(after)}
    assert set(types.values()) == {"float32"}

    mod = graph(lambda b, x: relu(b, concatenate(b, relu(b, x), relu(b, x))))
    after = StoreHalf()(GroupKernels()(mod))
    (concatenation,) = [b for b in main_bindings(after) if operator(b.value) == "concat"]
    assert str(concatenation.var.ty.dtype) == "float16"
    assert {str(part.ty.dtype) for part in concatenation.value.args[0].fields} == {"float16"}


# ---- which results take over an operand ----


def overwritten(mod: tvm.IRModule) -> list[tuple[str, str]]:
    lowered = buffers(allocate(mod))
    return [(new.var.name, old.var.name) for new, old in lowered.overwritten.items()]


def conv(builder, x):
    call = relax.op.nn.conv2d(x, relax.const(FILTERS), data_layout="NHWC", kernel_layout="OHWI")
    return builder.emit(call)


def pool(builder, x):
    return builder.emit(relax.op.nn.max_pool2d(x, (3, 3), padding=(1, 1), layout="NHWC"))


def add(builder, x, y):
    return builder.emit(relax.op.add(x, y))


def shared_residual(builder, x):
    """A sum whose residual the next kernel reads too."""
    first = pool(builder, x)
    second = pool(builder, add(builder, conv(builder, x), first))
    return add(builder, conv(builder, second), first)


OVERWRITING = [
    ("an input stays", lambda b, x: relu(b, x), 0),
    ("a window reads its neighbours", lambda b, x: pool(b, pool(b, x)), 0),
    ("a residual that dies", lambda b, x: add(b, conv(b, x), pool(b, x)), 1),
    ("a residual that is read again", shared_residual, 1),
    ("a product's own operand", lambda b, x: (lambda p: add(b, conv(b, p), p))(pool(b, x)), 0),
]


@pytest.mark.long
@pytest.mark.parametrize("make, count", [c[1:] for c in OVERWRITING], ids=[c[0] for c in OVERWRITING])
def test_which_results_overwrite(make, count):
    mod = graph(make)
    assert len(overwritten(mod)) == count
    results, expected = execute(mod)[0], run_unshared(mod)
    assert all(np.array_equal(a, b) for a, b in zip(results, expected, strict=True))


def test_a_kernel_that_overwrites_promises_nothing_about_aliases():
    mod = allocate(graph(lambda b, x: add(b, conv(b, x), pool(b, x))))
    after = PlanPool(lambda liveness: plan(liveness.lifetimes))(mod)
    flags = [bool(f.attrs["tirx.noalias"]) for gv, f in after.functions_items() if gv.name_hint != "main"]
    assert sorted(flags) == [False, True]


# ---- PlanPool ----


@dataclasses.dataclass
class Stacked:
    """A placement of our own: every tensor above the one before."""

    offsets_bytes: dict[str, int]
    pool_bytes: int


def stack_lifetimes(liveness) -> Stacked:
    sizes = [-(-life.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for life in liveness.lifetimes]
    begins = list(itertools.accumulate(sizes, initial=0))
    offsets = {life.name: begin for life, begin in zip(liveness.lifetimes, begins)}
    return Stacked(offsets, begins[-1])


def test_plan_pool_rewrites_every_allocation():
    before = allocate(graph(lambda b, x: pool(b, conv(b, x))))
    after = PlanPool(stack_lifetimes)(before)
    kinds = [operator(b.value) for block in after["main"].body.blocks for b in block.bindings]
    assert kinds.count("memory.alloc_storage") == 1 and "builtin.alloc_tensor" not in kinds
    values = [b.value for block in after["main"].body.blocks for b in block.bindings]
    tensors = [value for value in values if operator(value) == "memory.alloc_tensor"]
    assert [int(call.args[1].value) for call in tensors] == [0, 4 * 4 * 8 * 4]


def test_plan_pool_leaves_what_allocates_nothing():
    after = PlanPool(stack_lifetimes)(PlanPool(stack_lifetimes)(allocate(graph(lambda b, x: relu(b, x)))))
    kinds = [operator(b.value) for block in after["main"].body.blocks for b in block.bindings]
    assert kinds.count("memory.alloc_storage") == 1
