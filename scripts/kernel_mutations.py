"""Faulty versions of GPU kernels, each with one fault: what a check of kernels has to find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import tvm_ffi
from tvm import ir, sym, tirx

from pimflow.compiler.kernel_checks.access_log import Accesses, AccessLog, Report
from pimflow.compiler.kernel_checks.check import check_kernel, run_borders, shared_elements, used_regions
from pimflow.compiler.kernel_checks.kernels import ScheduledKernel

Change = Callable[[Any], Any]
_FAR = 1 << 24  # elements, more than any buffer of the kernels has


def mutant(kernel: ScheduledKernel, fault: str, rng: np.random.Generator) -> ScheduledKernel | None:
    """`kernel` with a fault of `FAULTS` at a place that `rng` draws; None if it has no place for it."""
    return _MAKERS[fault](kernel, rng)


def _without_barrier(kernel: ScheduledKernel, rng: np.random.Generator) -> ScheduledKernel | None:
    needed = _necessary_barriers(kernel.lowered.body)
    nothing = tirx.Evaluate(tirx.IntImm("int32", 0))
    without = _changed(
        kernel, rng, tirx.Evaluate, lambda stmt: nothing if any(map(stmt.same_as, needed)) else None
    )
    # A barrier behind which each thread reads what it wrote itself orders nothing: no check could miss it.
    return without if without is not None and _has_unordered_accesses(without) else None


def _without_predicate(kernel: ScheduledKernel, rng: np.random.Generator) -> ScheduledKernel | None:
    return _changed(
        kernel, rng, tirx.IfThenElse, lambda branch: branch.then_case if _bounds_an_index(branch) else None
    )


def _with_shifted_store(kernel: ScheduledKernel, rng: np.random.Generator) -> ScheduledKernel | None:
    """A store one element further on: of those that some thread executes, which one far outside shows."""
    seed = int(rng.integers(1 << 31))  # of the place, which both kernels have in common

    def with_store_at(offset: int) -> ScheduledKernel | None:
        """The kernel with that store so many elements further on."""
        place_rng = np.random.default_rng(seed)
        return _changed(kernel, place_rng, tirx.BufferStore, lambda store: _shifted(store, offset))

    outside = with_store_at(_FAR)
    is_executed = outside is not None and check_kernel(outside).findings
    return with_store_at(1) if is_executed else None


def _with_begun_sum(kernel: ScheduledKernel, rng: np.random.Generator) -> ScheduledKernel | None:
    return _changed(kernel, rng, tirx.BufferStore, _begun_with_one)


def _with_swapped_index(kernel: ScheduledKernel, rng: np.random.Generator) -> ScheduledKernel | None:
    return _changed(kernel, rng, tirx.BufferStore, lambda store: _swapped(store, rng))


def _with_smaller_buffer(kernel: ScheduledKernel, rng: np.random.Generator) -> ScheduledKernel | None:
    """A buffer in shared memory, or a tile of a fused group, lacks the last element that the kernel uses."""
    if kernel.separate is None:
        return None
    if kernel.regions_bytes:
        regions = list(used_regions(kernel))
        index = int(rng.integers(len(regions)))
        begin, end = regions[index]
        regions[index] = (begin, end - 1)
        return replace(kernel, regions_bytes=tuple(regions))
    sizes = {buffer: size for buffer, size in shared_elements(kernel).items() if size > 1}
    if not sizes:
        return None
    chosen = list(sizes)[int(rng.integers(len(sizes)))]

    smaller = tirx.decl_buffer((sizes[chosen] - 1,), str(chosen.dtype), chosen.name, scope=chosen.scope())
    rules = [(ir.Var, lambda variable: smaller if variable.same_as(chosen) else variable)]
    body = tvm_ffi.structural_map(kernel.separate.body, rules)
    return replace(kernel, separate=kernel.separate.with_body(body))


_MAKERS: dict[str, Callable[[ScheduledKernel, np.random.Generator], ScheduledKernel | None]] = {
    "a dropped barrier": _without_barrier,
    "a predicate that always holds": _without_predicate,
    "a swapped index": _with_swapped_index,
    "a shared buffer of one element less": _with_smaller_buffer,
    "a store that is one element further on": _with_shifted_store,
    "a sum that begins with one": _with_begun_sum,
}
FAULTS = tuple(_MAKERS)


def _changed(
    kernel: ScheduledKernel, rng: np.random.Generator, kind: type, change: Change
) -> ScheduledKernel | None:
    """`kernel` with a statement of `kind` changed; `change` gives None for one that has no place for it."""
    body, nodes = kernel.lowered.body, list[Any]()
    tvm_ffi.structural_walk(body, [((kind,), nodes.append)], order="pre")
    changes = ((nodes[index], change(nodes[index])) for index in rng.permutation(len(nodes)))
    place, changed = next(((node, new) for node, new in changes if new is not None), (None, None))
    if changed is None:
        return None
    rules = [(kind, lambda node: changed if node.same_as(place) else node)]
    return replace(kernel, lowered=kernel.lowered.with_body(tvm_ffi.structural_map(body, rules)))


def _is_barrier(stmt: tirx.Stmt) -> bool:
    value = getattr(stmt, "value", None)
    return isinstance(stmt, tirx.Evaluate) and "tvm_storage_sync" in str(getattr(value, "op", ""))


def _necessary_barriers(body: tirx.Stmt) -> list[tirx.Evaluate]:
    """Barriers between a store of registers to shared memory and a read of it; others may be redundant."""
    needed: list[tirx.Evaluate] = []
    barrier: tirx.Evaluate | None = None
    stored_before: set[str] = set()  # shared buffers that are stored to before the last barrier
    stored: set[str] = set()  # and behind it

    def visit(node: Any) -> None:
        """Follow a node, in the order of execution."""
        nonlocal barrier, stored_before, stored
        if _is_barrier(node):
            barrier, stored_before, stored = node, stored, set()
        elif isinstance(node, tirx.BufferStore) and node.buffer.scope().startswith("shared"):
            stored.add(node.buffer.name)
        elif isinstance(node, ir.TensorLoad) and node.source.name in stored_before and barrier is not None:
            needed.append(barrier)

    tvm_ffi.structural_walk(body, [((object,), visit)], order="pre")
    return needed


class _AllAccesses(AccessLog):
    """Keeps all accesses, and compares each two: slow, and nothing like what the check does."""

    def __init__(self, name: str, elements: int, is_shared: bool, report: Report, _: bool = False):
        super().__init__(name, elements, is_shared, report)
        self._columns: list[np.ndarray] = []

    def write(self, accesses: Accesses, epoch: int, warp_epochs: np.ndarray) -> None:
        """Keep writes."""
        super().write(accesses, epoch, warp_epochs)
        self._keep(accesses, epoch, warp_epochs[accesses.lanes], True)

    def read(self, accesses: Accesses, epoch: int, warp_epochs: np.ndarray) -> None:
        """Keep reads."""
        self._keep(accesses, epoch, warp_epochs[accesses.lanes], False)

    def _keep(self, accesses: Accesses, epoch: int, warp_epochs: np.ndarray, is_write: bool) -> None:
        count = len(accesses.elements)
        of_all = np.full(count, epoch), np.full(count, is_write)
        of_each = accesses.blocks, accesses.elements, accesses.warps, warp_epochs, accesses.threads
        self._columns.append(np.stack([*of_each, *of_all]).astype(np.int64))

    def are_unordered(self) -> bool:
        """Whether two threads of a block access an element, one writes it, and no barrier is between them."""
        if not self._columns:
            return False
        blocks, elements, warps, warp_epochs, threads, epochs, writes = np.concatenate(self._columns, axis=1)
        places = np.stack([blocks, elements, epochs], axis=1)
        in_warps = np.concatenate([places, np.stack([warps, warp_epochs], axis=1)], axis=1)
        return _has_conflict(places, warps, writes) or _has_conflict(in_warps, threads, writes)


def _has_conflict(places: np.ndarray, actors: np.ndarray, writes: np.ndarray) -> bool:
    """Whether several actors are at one place, and one of them writes."""
    _, numbers = np.unique(places, axis=0, return_inverse=True)
    numbers = numbers.reshape(-1)
    written = np.zeros(numbers.max() + 1, bool)
    written[numbers[writes > 0]] = True
    first = np.zeros(len(written), np.int64)
    first[numbers] = actors
    return bool((written[numbers] & (actors != first[numbers])).any())


def _has_unordered_accesses(kernel: ScheduledKernel) -> bool:
    """Whether any two accesses of blocks at borders are not ordered by a barrier."""
    logs: list[_AllAccesses] = []

    def make_log(*arguments: Any) -> AccessLog:
        """A log that is kept."""
        logs.append(_AllAccesses(*arguments))
        return logs[-1]

    run_borders(kernel, make_log)
    return any(log.are_unordered() for log in logs)


def _bounds_an_index(branch: tirx.IfThenElse) -> bool:
    """Whether a branch keeps threads beyond the border from storing a result."""
    stores: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk(branch.then_case, [((tirx.BufferStore,), stores.append)], order="pre")
    return any(store.buffer.scope() == "global" for store in stores)


def _shifted(store: tirx.BufferStore, offset: int) -> tirx.BufferStore | None:
    """A store `offset` elements further on; None for padding, which may lie in rows that no result reads."""
    is_constant = isinstance(store.value, tirx.FloatImm | tirx.IntImm | tirx.Broadcast)
    if is_constant and store.buffer.scope() != "local":
        return None
    *outer, last = store.indices
    if isinstance(last, tirx.Ramp):
        moved = tirx.Ramp(last.base + last.stride * last.lanes * offset, last.stride, last.lanes)
    else:
        moved = last + offset
    return tirx.BufferStore(store.buffer, store.value, [*outer, moved])


def _begun_with_one(store: tirx.BufferStore) -> tirx.BufferStore | None:
    if not isinstance(store.value, tirx.FloatImm | tirx.IntImm) or store.value.value != 0:
        return None
    one = tirx.const(1, str(store.value.ty).removeprefix("T."))
    return tirx.BufferStore(store.buffer, one, store.indices)


def _swapped(store: tirx.BufferStore, rng: np.random.Generator) -> tirx.BufferStore | None:
    """A store whose index has two variables in each other's place; None for one that stores a constant."""
    variables: list[ir.Var] = []
    for index in store.indices:
        tvm_ffi.structural_walk(index, [((ir.Var,), variables.append)], order="pre")
    distinct = list(dict.fromkeys(v for v in variables if str(v.ty) == str(variables[0].ty)))
    if len(distinct) < 2 or isinstance(store.value, tirx.FloatImm | tirx.IntImm | tirx.Broadcast):
        return None
    first, second = (distinct[i] for i in rng.permutation(len(distinct))[:2])
    swaps = {first: second, second: first}
    rules = [(ir.Var, lambda variable: swaps.get(variable, variable))]
    indices = [tvm_ffi.structural_map(index, rules) for index in store.indices]
    analyzer = sym.Analyzer()
    if all(
        analyzer.can_prove_equal(_first_lane(old), _first_lane(new))
        for old, new in zip(store.indices, indices)
    ):
        return None
    return tirx.BufferStore(store.buffer, store.value, indices)


def _first_lane(index: ir.Expr) -> ir.Expr:
    """The first element of a vector of indices; an index alone as it is."""
    if isinstance(index, tirx.Add):
        return _first_lane(index.a) + _first_lane(index.b)
    if isinstance(index, tirx.Ramp):
        return index.base
    return index.value if isinstance(index, tirx.Broadcast) else index
