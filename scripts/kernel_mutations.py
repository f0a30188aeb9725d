"""Faulty versions of GPU kernels, each with one fault: what a check of kernels has to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm_ffi
from tvm import ir, tirx

from pimflow.compiler.kernel_checks.kernels import ScheduledKernel


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A kernel with a fault, and what the fault is."""

    fault: str
    kernel: ScheduledKernel


def mutants(kernel: ScheduledKernel, rng: np.random.Generator) -> Iterator[Mutant]:
    """One mutant for each kind of fault that the kernel has a place for, at a place that `rng` draws."""
    needed = _needed_barriers(kernel.lowered.body)
    kinds: dict[str, tuple[type, Callable[[Any], bool], Callable[[Any], Any]]] = {
        "a dropped barrier": (
            tirx.Evaluate,
            lambda stmt: any(map(stmt.same_as, needed)),
            lambda _: tirx.Evaluate(tirx.IntImm("int32", 0)),
        ),
        "a predicate that always holds": (tirx.IfThenElse, _bounds_an_index, lambda branch: branch.then_case),
        "a store that is one element further on": (tirx.BufferStore, lambda _: True, _shifted),
        "a sum that begins with one": (tirx.BufferStore, _stores_zero, _begun_with_one),
    }
    for fault, (kind, applies, change) in kinds.items():
        nodes: list[Any] = []
        tvm_ffi.structural_walk(kernel.lowered.body, [((kind,), nodes.append)], order="pre")
        places = [index for index, node in enumerate(nodes) if applies(node)]
        if places:
            body = _with_change(kernel.lowered.body, kind, nodes[int(rng.choice(places))], change)
            yield Mutant(fault=fault, kernel=replace(kernel, lowered=kernel.lowered.with_body(body)))


def _with_change(body: tirx.Stmt, kind: type, place: Any, change: Callable[[Any], Any]) -> tirx.Stmt:
    """`body` with one of its nodes changed."""
    return tvm_ffi.structural_map(body, [(kind, lambda node: change(node) if node.same_as(place) else node)])


def _is_barrier(stmt: tirx.Stmt) -> bool:
    value = getattr(stmt, "value", None)
    return isinstance(stmt, tirx.Evaluate) and "tvm_storage_sync" in str(getattr(value, "op", ""))


def _needed_barriers(body: tirx.Stmt) -> list[tirx.Evaluate]:
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


def _bounds_an_index(branch: tirx.IfThenElse) -> bool:
    """Whether a branch keeps threads beyond the border from storing a result."""
    stores: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk(branch.then_case, [((tirx.BufferStore,), stores.append)], order="pre")
    return any(store.buffer.scope() == "global" for store in stores)


def _shifted(store: tirx.BufferStore) -> tirx.BufferStore:
    *outer, last = store.indices
    if isinstance(last, tirx.Ramp):
        moved = tirx.Ramp(last.base + last.stride * last.lanes, last.stride, last.lanes)
    else:
        moved = last + 1
    return tirx.BufferStore(store.buffer, store.value, [*outer, moved])


def _stores_zero(store: tirx.BufferStore) -> bool:
    return isinstance(store.value, tirx.FloatImm) and store.value.value == 0


def _begun_with_one(store: tirx.BufferStore) -> tirx.BufferStore:
    return tirx.BufferStore(
        store.buffer, tirx.const(1, str(store.value.ty).removeprefix("T.")), store.indices
    )
