"""Does every thread of TVM's own kernels have its registers for itself?"""

import pytest
import tvm
import tvm_ffi
from graphs import main_module
from tvm import relax, tirx
from tvm.script import tirx as T

from pimflow.compiler import phases
from pimflow.hardware import system
from pimflow.pim_backend.runtime.targets import target_by_name
from pimflow.relay_passes.schedules.thread_registers import allocate_in_threads


@T.prim_func(s_tir=True)
def shared(x: T.Buffer((2, 4), "int32"), y: T.Buffer((2, 4), "int32")):
    for step in range(2):
        place = T.alloc_local((1,), "int32")
        with T.launch_thread("threadIdx.x", 4) as thread:
            block = T.launch_thread("blockIdx.x", 2)
            place[0] = thread + step
            if place[0] < 4:
                y[block, place[0]] = x[block, thread]


@T.prim_func(s_tir=True)
def own(x: T.Buffer((2, 4), "int32"), y: T.Buffer((2, 4), "int32")):
    for step in range(2):
        with T.launch_thread("threadIdx.x", 4) as thread:
            block = T.launch_thread("blockIdx.x", 2)
            place = T.alloc_local((1,), "int32")
            place[0] = thread + step
            if place[0] < 4:
                y[block, place[0]] = x[block, thread]


def test_rewrite():
    named = own.with_attr("global_symbol", "shared")
    tvm.ir.assert_structural_equal(allocate_in_threads(shared), named)
    tvm.ir.assert_structural_equal(allocate_in_threads(named), named)


def registers_outside(body: tirx.Stmt) -> list[tirx.Buffer]:
    """Registers that no thread allocates."""
    outer, inside = [], []

    def launch(stmt: tirx.AttrStmt) -> None:
        if stmt.attr_key == "thread_extent":
            tvm_ffi.structural_walk(
                stmt.body, [(tirx.AllocBuffer, lambda allocation: inside.append(allocation.buffer))]
            )

    visitors = [(tirx.AttrStmt, launch), (tirx.AllocBuffer, lambda a: outer.append(a.buffer))]
    tvm_ffi.structural_walk(body, visitors)
    return [b for b in outer if b.scope() == "local" and not any(b.same_as(a) for a in inside)]


SCANS = [(relax.op.cumsum, axis, exclusive) for axis in (0, 1, 2) for exclusive in (False, True)]


@pytest.mark.long
@pytest.mark.parametrize(("scan", "axis", "exclusive"), [*SCANS, (relax.op.cumprod, 1, False)])
def test_scans_along_any_axis(scan, axis, exclusive):
    x = relax.Var("x", relax.TensorType((6, 40, 5), "float32"))
    module = main_module([x], lambda builder: builder.emit(scan(x, axis=axis, exclusive=exclusive)))
    lowered = phases.allocate(module, target_by_name("cuda+pim"), system())
    kernels = [f for f in lowered.functions.values() if isinstance(f, tirx.PrimFunc)]
    assert kernels and not any(registers_outside(kernel.body) for kernel in kernels)


def test_registers_outside_are_found():
    assert len(registers_outside(shared.body)) == 1 and not registers_outside(own.body)
