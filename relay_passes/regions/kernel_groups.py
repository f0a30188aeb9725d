"""Which operators run as one kernel: the same rule for regions, costs and compiled code."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import tvm
from tvm import relax

from pimflow.core.liveness import view_obstacle
from pimflow.core.region import GATHERS, MOVES, STORED_BYTES
from pimflow.core.split import PIM_SUFFIX
from pimflow.relay_passes.attention import NAME as ATTENTION
from pimflow.relay_passes.attention import attention_of, kind_of, spelled_out
from pimflow.relay_passes.caches import IN_PLACE
from pimflow.relay_passes.flat import (
    cached_by_module,
    layer_name,
    main_bindings,
    operator,
    renames,
    shape,
    slice_begin,
    substitute,
    tensor_bytes,
    uses,
)
from pimflow.relay_passes.operators import BINARY, NAMINGS, UNARY

# Operators that TVM lowers to kernels that it cannot fuse.
OPAQUE = ("scatter_nd", "scatter_elements", "topk", "sort", "argsort", "cumsum", "cumprod", "bucketize")
ELEMENTWISE = UNARY + BINARY + MOVES + GATHERS
WEIGHTED = ("nn.conv2d", "matmul")
# Maximum of operands and operators in the expression of one result, with all operators inlined. An operand
# that is named twice counts twice: 60 sums of a tensor with itself would have 2^60 terms. The time in which
# TVM compiles an expression grows faster than its size.
MOST_TERMS = 256
_AUTOMATIC = re.compile(r"(lv|gv)\d*(_nchw\d*)?$")


@dataclass(eq=False)
class KernelGroup:
    """Bindings that become one kernel, or the kernels of `parts` if the anchor is attention.

    Attributes
    ----------
    bindings : list of VarBinding
        In order.
    anchor : VarBinding or None
        The operator that is not elementwise, if there is one.
    fusible : bool
        False for calls of other functions, `OPAQUE` operators and views, which are never fused.
    view : bool
        Whether the group needs no kernel: a slice inside its operand, a concatenation of operands inside it
        (`core.liveness.view_obstacle`), or a change of shape (`renames`).
    copied : dict of Var to str
        Slices and concatenations of the group that are no views, each with the reason.
    kept : list of Var
        Results of fused operators that other kernels read too: outputs besides the last one.
    finishes : bool
        Whether it is the epilogue of a layer on PIM or of a view that has no other reader. On the GPU these
        operators join the kernel of the layer. They join no other kernel, or plans would differ in launches.
    takes : set of Var
        Operands that no kernel before it reads: if an elementwise kernel had one of them as its last result,
        the two would be one kernel.
    before : list of list of VarBinding
        Prologues that would be separate kernels, if the anchor were not in this kernel.
    follows : set of Var
        Variables whose kernels must come before it, although it does not read them: if it came first, it
        would fuse operators that belong to those kernels.
    """

    bindings: list[relax.VarBinding] = field(default_factory=list)
    anchor: relax.VarBinding | None = None
    fusible: bool = True
    view: bool = False
    copied: dict[relax.Var, str] = field(default_factory=dict)
    kept: list[relax.Var] = field(default_factory=list)
    finishes: bool = False
    takes: set[relax.Var] = field(default_factory=set)
    before: list[list[relax.VarBinding]] = field(default_factory=list)
    follows: set[relax.Var] = field(default_factory=set)

    @property
    def result(self) -> relax.Var:
        return self.bindings[-1].var

    @property
    def copies(self) -> dict[relax.Var, str]:
        """Slices and concatenations that the kernel copies in memory, each with the reason.

        A slice that other operators of the kernel compute with or concatenate is read in place.
        """
        made = {b.var: operator(b.value) for b in self.bindings}
        moves = set(made.values()) <= {*MOVES, "strided_slice"}
        return {var: why for var, why in self.copied.items() if moves or made[var] == "concat"}

    @property
    def title(self) -> relax.Var:
        """The variable that gives the group its name.

        That is an anchor with weights, since PIM programs find their product by its name; else the anchor,
        if its name is not automatic; else the first variable whose name is not.
        """
        anchors = [] if self.anchor is None else [self.anchor]
        named = (b for b in anchors + self.bindings if not _AUTOMATIC.match(b.var.name))
        weighted = (b for b in anchors if operator(b.value) in WEIGHTED)
        return next(weighted, next(named, (anchors or self.bindings)[-1])).var


@dataclass(frozen=True, kw_only=True)
class Copied:
    """The copy of a slice or concatenation.

    Attributes
    ----------
    layer : str
    size_bytes : int
        Bytes of the copy.
    reason : str
    """

    layer: str
    size_bytes: int
    reason: str


@cached_by_module
def kernel_groups(mod: tvm.IRModule, *, views: bool = True) -> list[KernelGroup]:
    """Kernels of ``main``, in the order in which their results appear.

    The rules, in this order:

    - An elementwise operator joins the kernel that computes its operand, if it is the only reader. It does
      not join a layer with weights if its result is larger than the layer's, such as the scale of a map.
    - A kernel that computes with slices joins its only reader, if that is an elementwise operator or a copied
      concatenation; so do other elementwise kernels with the same only reader. So rotary positions are one
      kernel.
    - An operator that cannot join (it follows a call, a graph input, or a tensor with two readers) is a
      prologue of the first anchor that reads it, directly or through other prologues. If others read it too,
      that kernel also stores it.
    - All others are separate kernels. No operator joins a kernel in which its result would have more than
      `MOST_TERMS`.

    Without `views`, all slices and concatenations are work of kernels. Callers share the groups of a module,
    and change none of them.
    """
    counts = uses(mod)
    groups: list[KernelGroup] = []
    made: dict[relax.Var, KernelGroup] = {}
    # By variable, the groups that read it besides its producer, each with its first reading variable.
    readers: dict[relax.Var, dict[int, relax.Var]] = {}
    joined: dict[relax.Var, relax.Var] = {}  # by variable, the concatenation inside which it lies
    anchored = _anchored(mod)
    order = _Order(mod, counts)
    terms: dict[relax.Var, int] = {}  # by variable, the terms of its expression in its kernel

    def sole(var: relax.Var) -> bool:
        return counts.get(var, 0) == 1

    for binding in main_bindings(mod):
        kind = kind_of(mod, binding.value)
        operands = [v for v in relax.analysis.free_vars(binding.value) if v in made]
        copied = _copied(binding.value, made, joined) if views and kind in GATHERS else "copies are made"
        if kind in GATHERS and not copied:
            group = KernelGroup(fusible=False, view=True)
            groups.append(group)
            joined.update(dict.fromkeys(operands if kind == "concat" else (), binding.var))
        elif kind in ELEMENTWISE:
            open_ends = [
                made[v]
                for v in operands
                if sole(v) and made[v].fusible and not _broadcasts(binding.var, v, made[v])
            ]
            open_ends = [
                host
                for host in open_ends
                if _terms(binding.value, {v: terms[v] for v in operands if made[v] is host}) <= MOST_TERMS
            ]
            if kind in GATHERS:
                open_ends = [each for each in open_ends if kind == "concat" and _slices(each)]
                open_ends = [each for each in open_ends if _floats(each, readers, anchored)]
            # Other kernels read the extra outputs of a host, so the host must not depend on these kernels.
            hosts = [host for host in open_ends if not any(readers.get(kept) for kept in host.kept)]
            left = [made[v] for v in operands if sole(v) and not made[v].fusible and _left(made[v])]
            # The last one is the host. If PIM computes it, or a part of it, this operator is its epilogue.
            finishes = bool(hosts and left) and max(hosts + left, key=groups.index) in left
            finishes |= _joins_parts(binding)
            if hosts and not finishes:
                group = max(hosts, key=groups.index)
                for other in dict.fromkeys(hosts):
                    if other is group or not (_slices(group) or _slices(other)):
                        continue
                    if all(_floats(each, readers, anchored) for each in (group, other)):
                        group.bindings[:0] = other.bindings
                        _move(other, group, made, groups, readers)
            else:
                group = KernelGroup()
                last = max(open_ends, key=groups.index, default=None)
                group.takes |= {v for v in operands if sole(v) and made[v] is last}
                group.follows |= {
                    _first(readers[v]) for host in open_ends for v in host.kept if readers.get(v)
                }
                group.follows |= {joined[v] for v in operands if kind == "concat" and v in joined}
                groups.append(group)
        else:
            single = kind not in ("", "call_dps_packed", IN_PLACE, *OPAQUE) and isinstance(
                binding.var.ty, relax.TensorType
            )
            group = KernelGroup(anchor=binding, fusible=single)
            whole = kind == ATTENTION
            # A mask is never computed in a prologue of attention.
            read = [v for v in operands if v in binding.value.args[:3]] if whole else operands
            read = read if single else []
            _absorb(group, binding, read, made, groups, readers, counts, whole, order, terms)
            groups.append(group)
        group.finishes |= kind not in GATHERS and any(sole(v) and not made[v].fusible for v in operands)
        group.finishes |= _joins_parts(binding)
        group.bindings.append(binding)
        group.copied |= {binding.var: copied} if kind in GATHERS and copied else {}
        groups.remove(group)
        groups.append(group)
        made[binding.var] = group  # `_move` has done so for the bindings that were merged
        inside = {v: terms[v] for v in operands if made[v] is group}
        terms[binding.var] = 1 if group.anchor is binding else _terms(binding.value, inside)
        for var in operands:
            if made[var] is not group:
                readers.setdefault(var, {}).setdefault(id(group), binding.var)
    for group in groups:
        if group.fusible and renames(group.bindings):
            group.fusible, group.view = False, True
            group.copied.clear()
    return groups


def parts(mod: tvm.IRModule, group: KernelGroup) -> tvm.IRModule | None:
    """The kernels of a group with attention: a module whose `kernel_groups` they are; None for other groups.

    Parameters of its ``main`` are the `free_variables` of the group. It returns the group's extra outputs,
    then its result. Other operators of the group join the first product or the last.
    """
    attention = None if group.anchor is None else attention_of(mod, group.anchor.value)
    if attention is None or group.anchor is None:
        return None
    env: dict[relax.Var, relax.Expr] = {v: relax.Var(v.name, v.ty) for v in free_variables(group.bindings)}
    name = group.anchor.var.name
    builder = relax.BlockBuilder()
    with builder.function("main", list(env.values())):
        with builder.dataflow():
            for binding in group.bindings:
                value = substitute(binding.value, env)
                if binding is group.anchor:

                    def emit(inner: relax.Expr, part: str) -> relax.Var:
                        return builder.emit(inner, name_hint=f"{name}_{part}")

                    env[binding.var] = spelled_out(attention, list(value.args), emit)
                else:
                    env[binding.var] = builder.emit(value, name_hint=binding.var.name)
            results = [env[var] for var in (*group.kept, group.result)]
            output = builder.emit_output(results[0] if len(results) == 1 else relax.Tuple(results))
        builder.emit_func_output(output)
    return relax.transform.CanonicalizeBindings()(builder.get())


def free_variables(bindings: Sequence[relax.VarBinding]) -> list[relax.Var]:
    """Variables that `bindings` read from outside, in the order of their first use."""
    inside = {binding.var for binding in bindings}
    read = (var for binding in bindings for var in relax.analysis.free_vars(binding.value))
    return [var for var in dict.fromkeys(read) if var not in inside]


def _absorb(
    group: KernelGroup,
    anchor: relax.VarBinding,
    operands: list[relax.Var],
    made: dict[relax.Var, KernelGroup],
    groups: list[KernelGroup],
    readers: dict[relax.Var, dict[int, relax.Var]],
    counts: Mapping[relax.Var, int],
    whole: bool,
    order: _Order,
    terms: dict[relax.Var, int],
) -> None:
    """Fuse into `group`, in front of its `anchor`, the elementwise kernels that no other kernel reads yet.

    Parameters
    ----------
    whole : bool
        Whether the anchor reads whole tensors only, such as a cache: kernels with copies are not fused then.
    """
    wanted = list(operands)
    inside: list[relax.VarBinding] = [anchor]
    while wanted:
        var = wanted.pop(0)
        others = {number: by for number, by in readers.get(var, {}).items() if number != id(group)}
        late = order.overtaken(anchor.var, [b.var for b in inside], var)
        group.takes |= set() if others or late else {var}
        before = made.get(var)
        floats = before is not None and before is not group and before.anchor is None and before.fusible
        if not floats or not var.same_as(before.result) or (whole and before.copies):
            continue
        if others:
            group.follows.add(_first(others))
            continue
        if late and any(v in made and _left(made[v]) for v in free_variables(before.bindings)):
            continue  # else the epilogue of the anchor would be a separate kernel
        joined: dict[relax.Var, int] = {}
        for binding in before.bindings + inside[:-1]:
            joined[binding.var] = _terms(binding.value, joined)
        if max(joined.values()) > MOST_TERMS:
            continue
        terms |= joined
        inside = before.bindings + inside
        group.before.append(before.bindings)
        group.kept += [] if _uses(inside, var) == counts.get(var, 0) else [var]
        group.takes |= before.takes
        _move(before, group, made, groups, readers)
        # A tensor that several of its operators read is fused too, such as the operand of a SiLU. The result
        # of another kernel, such as a residual, is read once. Slices and concatenations read stored tensors.
        within = [b.value for b in before.bindings if operator(b.value) not in GATHERS]
        read_by = [v for value in within for v in relax.analysis.free_vars(value)]
        wanted += [v for v in dict.fromkeys(read_by) if read_by.count(v) > 1]
    group.bindings += inside[:-1]


class _Order:
    """The order in which the operators of a module read its tensors.

    Parameters
    ----------
    mod : IRModule
    counts : mapping of Var to int
        How many `uses` each variable has.
    """

    def __init__(self, mod: tvm.IRModule, counts: Mapping[relax.Var, int]):
        self._counts = counts
        self._readers: dict[relax.Var, list[relax.Var]] = {}
        self._places: dict[relax.Var, int] = {}
        self._joins: set[relax.Var] = set()
        for place, binding in enumerate(main_bindings(mod)):
            self._places[binding.var] = place
            kind = kind_of(mod, binding.value)
            self._joins |= {binding.var} if kind in ELEMENTWISE and kind not in GATHERS else set()
            for var in relax.analysis.free_vars(binding.value):
                self._readers.setdefault(var, []).append(binding.var)

    def overtaken(self, anchor: relax.Var, inside: Sequence[relax.Var], var: relax.Var) -> bool:
        """Whether another kernel reads `var` before the last operator of the epilogue of `anchor`.

        The epilogue is the chain of elementwise operators behind the anchor, each the only reader of the one
        before. Bindings of `inside` belong to the kernel of the anchor too.
        """
        kernel = [anchor]
        while self._counts.get(kernel[-1], 0) == 1:
            read_by = self._readers.get(kernel[-1], [])
            if not self._joins.issuperset(read_by) or not read_by:
                break
            kernel += read_by
        end = self._places[kernel[-1]]
        return any(self._places[by] < end for by in self._readers[var] if by not in (*inside, *kernel))


def _anchored(mod: tvm.IRModule) -> set[relax.Var]:
    """Operands of the operators that are not elementwise."""
    anchors = (b.value for b in main_bindings(mod) if kind_of(mod, b.value) not in ELEMENTWISE)
    return {var for value in anchors for var in relax.analysis.free_vars(value)}


def _floats(
    group: KernelGroup, readers: Mapping[relax.Var, Mapping[int, relax.Var]], anchored: Set[relax.Var]
) -> bool:
    """Whether a whole kernel may be executed later: it belongs to no layer, and no kernel reads it yet.

    Nor may a layer read its operands: the first reader of a layer on PIM may have to do its epilogue.
    """
    alone = group.anchor is None and group.fusible and not group.kept and not group.finishes
    read = any(readers.get(binding.var) for binding in group.bindings)
    return alone and not read and anchored.isdisjoint(free_variables(group.bindings))


def _left(group: KernelGroup) -> bool:
    """Whether PIM computes the group, or parts of it; its epilogue may need a GPU kernel."""
    binding = group.bindings[-1]
    if group.view:
        return _joins_parts(binding)
    called = isinstance(binding.value, relax.Call) and isinstance(binding.value.op, tvm.ir.GlobalVar)
    return called or operator(binding.value) == "call_dps_packed"


def _joins_parts(binding: relax.VarBinding) -> bool:
    """Whether it concatenates or adds the parts of a split layer."""
    part = binding.var.name + PIM_SUFFIX
    return operator(binding.value) in ("concat", "add") and any(
        v.name == part for v in relax.analysis.free_vars(binding.value)
    )


def _broadcasts(result: relax.Var, operand: relax.Var, group: KernelGroup) -> bool:
    """Whether `result` is larger than `operand`, the result of a layer with weights or of its epilogue."""
    weighted = group.finishes or (group.anchor is not None and operator(group.anchor.value) in WEIGHTED)
    return weighted and math.prod(shape(result)) > math.prod(shape(operand))


def _slices(group: KernelGroup) -> bool:
    return any(operator(binding.value) == "strided_slice" for binding in group.bindings)


def _move(
    before: KernelGroup,
    group: KernelGroup,
    made: dict[relax.Var, KernelGroup],
    groups: list[KernelGroup],
    readers: dict[relax.Var, dict[int, relax.Var]],
) -> None:
    """Record that `group` now has the bindings of `before`, which is no longer a kernel."""
    group.copied |= before.copied
    group.follows |= before.follows
    groups.remove(before)
    made.update((b.var, group) for b in before.bindings)
    for others in readers.values():
        if id(before) in others:
            others.setdefault(id(group), others.pop(id(before)))


def _first(readers: Mapping[int, relax.Var]) -> relax.Var:
    return next(iter(readers.values()))


def _terms(value: relax.Expr, inside: Mapping[relax.Var, int]) -> int:
    """Operands and operators in the expression of `value`, with the terms of inlined operands (`inside`)."""
    args = getattr(value, "args", ())
    operands = [field for arg in args for field in (arg.fields if isinstance(arg, relax.Tuple) else [arg])]
    read = sum(inside.get(operand, 1) if isinstance(operand, relax.Var) else 1 for operand in operands)
    return 1 + NAMINGS.get(operator(value), 1) * read


def _uses(bindings: list[relax.VarBinding], var: relax.Var) -> int:
    return sum(var in relax.analysis.free_vars(binding.value) for binding in bindings)


def _copied(value: relax.Call, made: Mapping[relax.Var, KernelGroup], joined: Set[relax.Var]) -> str:
    """Why a slice or concatenation needs a copy; empty if its parts can lie inside their tensor.

    Kernels or PIM must write the parts of a concatenation there: they must be distinct, in no other
    concatenation, and no aliases of tensors elsewhere.
    """
    if operator(value) == "strided_slice":
        begin = slice_begin(value)
        if begin is None or not isinstance(value.args[0], relax.Var):
            return "the slice skips elements, or slices a constant"
        return view_obstacle(shape(value.args[0]), *begin, STORED_BYTES)
    parts = list(value.args[0].fields) if isinstance(value.args[0], relax.Tuple) else []
    if not all(isinstance(part, relax.Var) and part in made for part in parts):
        return "a part is an input or a constant"
    if len(set(parts)) != len(parts) or any(part in joined for part in parts):
        return "a part lies in two places"
    if not all(_written(part, made[part]) for part in parts):
        return "a part is another name of a tensor that lies elsewhere"
    axis = int(value.attrs.axis or 0) % len(shape(value))
    begins = itertools.accumulate([shape(part)[axis] for part in parts[:-1]], initial=0)
    problems = (view_obstacle(shape(value), axis, begin, STORED_BYTES) for begin in begins)
    return next(filter(None, problems), "")


def _written(var: relax.Var, group: KernelGroup) -> bool:
    """Whether a kernel or PIM writes `var`, or the parts of it; False for aliases."""
    if group.view:
        return operator(group.bindings[-1].value) == "concat"
    if not group.fusible:
        call = group.bindings[-1].value
        return isinstance(call, relax.Call) and (
            isinstance(call.op, tvm.ir.GlobalVar) or operator(call) == "call_dps_packed"
        )
    kinds = {operator(b.value) for b in group.bindings}
    stored = var.same_as(group.result) or var in group.kept
    return stored and ("concat" in kinds or not kinds <= {*MOVES, *GATHERS})


def copies(mod: tvm.IRModule, *, views: bool = True) -> tuple[Copied, ...]:
    """Copies of slices and concatenations that the kernels of a flat module make."""
    return tuple(
        Copied(layer=layer_name(mod, var), size_bytes=tensor_bytes(var), reason=reason)
        for group in kernel_groups(mod, views=views)
        for var, reason in group.copies.items()
    )
