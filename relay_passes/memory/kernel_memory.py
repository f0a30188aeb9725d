"""Lifetimes of what a flat module computes, before it is lowered."""

from __future__ import annotations

import math
from collections.abc import Iterable

import tvm
from tvm import relax

from pimflow.core.liveness import ALIGNMENT_BYTES, Lifetime, Liveness
from pimflow.core.region import GATHERS, MOVES
from pimflow.relay_passes.flat import main_bindings, operator, uses
from pimflow.relay_passes.regions.kernel_groups import KernelGroup, kernel_groups

_NAMES = tuple(kind for kind in MOVES if kind not in ("astype", "nn.pad", "broadcast_to"))
# What schedules compute where it is read (`ScheduleCpu`).
_CHEAP = (*MOVES, *GATHERS, "add", "subtract", "")
_BY_CHANNEL = ("add", "subtract", "multiply", "divide")


def kernel_liveness(mod: tvm.IRModule, element_bytes: int = 4, *, views: bool = True) -> Liveness:
    """Lifetimes over the kernels of `mod`, a step a kernel (`kernel_groups`).

    An estimate for searches: lowering, which takes seconds, finds more workspaces and results that
    overwrite their operands. What a kernel computes in front of its anchor, such as the batch norm and
    activation of a concatenation, is a workspace. A call of another function counts as a kernel with a
    result and no workspace; so run passes that fuse chains before.

    Parameters
    ----------
    element_bytes : int
        Bytes of a stored floating-point number.
    views : bool
        See `kernel_groups`.
    """
    account = _Account(mod, element_bytes)
    for group in kernel_groups(mod, views=views):
        inside = {b.var for b in group.bindings}
        reads = [v for b in group.bindings for v in relax.analysis.free_vars(b.value) if v not in inside]
        if group.view or _renames(group):
            account.rename(group.result, reads)
        else:
            account.step(reads, [group.result, *group.kept], _workspaces(group))
    return account.liveness()


def operator_liveness(mod: tvm.IRModule, element_bytes: int = 4) -> Liveness:
    """Lifetimes over the layers of `mod`, each with a result of its own, as eager frameworks have it.

    Activations are out of place (TeMCO, equations 3 and 4). A convolution or product includes its bias,
    a batch norm is one layer, transposed convolutions are too, and layout is no layer.
    """
    account, counts = _Account(mod, element_bytes), uses(mod)
    adjusted: set[relax.Var] = set()  # may get a bias, or a shift, in place
    for binding in main_bindings(mod):
        var, value = binding.var, binding.value
        reads = relax.analysis.free_vars(value)
        kind = operator(value)
        constant = kind in _BY_CHANNEL and len(reads) == 1 and isinstance(value.args[1], tvm.ir.GenericConst)
        if kind in _NAMES or kind == "":
            account.rename(var, reads)
            adjusted |= {var} if reads and reads[0] in adjusted and counts[reads[0]] == 1 else set()
            continue
        if constant and reads[0] in adjusted and counts[reads[0]] == 1:
            account.rename(var, reads)
        else:
            account.step(reads, [var], [])
        adjusted |= {var} if constant or kind in ("nn.conv2d", "matmul") else set()
    return account.liveness()


def _workspaces(group: KernelGroup) -> list[relax.Var]:
    """Operands of the anchor that a kernel computes once and keeps."""
    if group.anchor is None:
        return []
    inside = {b.var: operator(b.value) for b in group.bindings[: group.bindings.index(group.anchor)]}
    read = [v for v in relax.analysis.free_vars(group.anchor.value) if v in inside and v not in group.kept]
    return read if any(kind not in _CHEAP for kind in inside.values()) else []


def _renames(group: KernelGroup) -> bool:
    return all(operator(b.value) in ("reshape", "") for b in group.bindings)


class _Account:
    """Collects steps, and which tensors each variable names."""

    def __init__(self, mod: tvm.IRModule, element_bytes: int):
        self.mod, self.element_bytes = mod, element_bytes
        self.held: dict[relax.Var, tuple[str, ...]] = {param: () for param in mod["main"].params}
        self.steps: list[tuple[list[str], list[str]]] = []
        self.size_bytes: dict[str, int] = {}

    def rename(self, var: relax.Var, reads: Iterable[relax.Var]) -> None:
        self.held[var] = tuple(dict.fromkeys(name for v in reads for name in self.held[v]))

    def step(
        self, reads: Iterable[relax.Var], results: Iterable[relax.Var], workspaces: Iterable[relax.Var]
    ) -> None:
        taken = dict.fromkeys(name for v in reads for name in self.held[v])
        written = []
        for var in (*results, *workspaces):
            written.append(var.name)
            self.size_bytes[var.name] = _stored_bytes(var, self.element_bytes)
        self.held.update((var, (var.name,)) for var in results)
        self.steps.append((list(taken), written))

    def liveness(self) -> Liveness:
        returned = relax.analysis.free_vars(self.mod["main"].body.body)
        outputs = dict.fromkeys(name for v in returned for name in self.held[v])
        unaligned = Liveness.of(self.steps, self.size_bytes, outputs=outputs)
        return Liveness(steps=unaligned.steps, lifetimes=tuple(map(_aligned, unaligned.lifetimes)))


def _aligned(life: Lifetime) -> Lifetime:
    return Lifetime(
        name=life.name,
        begin=life.begin,
        end=life.end,
        size_bytes=life.size_bytes,
        pinned=life.pinned,
        alignment_bytes=ALIGNMENT_BYTES,
    )


def _stored_bytes(var: relax.Var, element_bytes: int) -> int:
    """Bytes of a tensor, or of a tuple of tensors, with floats of `element_bytes`; other values take none."""
    fields = var.ty.fields if isinstance(var.ty, relax.TupleType) else [var.ty]
    total = 0
    for ty in fields:
        if isinstance(ty, relax.TensorType):
            dtype = tvm.DataType(str(ty.dtype))
            bytes_each = element_bytes if str(ty.dtype).startswith("float") else (dtype.bits + 7) // 8
            total += math.prod(int(d) for d in ty.shape.values) * bytes_each
    return total
