"""Which operators run as one kernel: the same rule for regions, costs and compiled code."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tvm
from tvm import relax

from pimflow.core.kernel import STORED_BYTES
from pimflow.core.liveness import view_obstacle
from pimflow.core.region import GATHERS, MOVES
from pimflow.core.split import PIM_SUFFIX
from pimflow.relay_passes.attention import NAME as ATTENTION
from pimflow.relay_passes.attention import attention_from_call, emit_attention, operator_kind
from pimflow.relay_passes.caches import IN_PLACE
from pimflow.relay_passes.flat import (
    cached_by_module,
    is_pure_reshape,
    layer_name,
    main_bindings,
    operator,
    shape,
    slice_begin,
    substitute,
    tensor_bytes,
    use_counts,
)
from pimflow.relay_passes.operators import ELEMENTWISE, LOOKUP, OPERAND_USES
from pimflow.relay_passes.regions.read_order import ReadOrder

# Operators that TVM lowers to kernels that it cannot fuse.
OPAQUE = ("scatter_nd", "scatter_elements", "topk", "sort", "argsort", "cumsum", "cumprod", "bucketize")
WEIGHTED = ("nn.conv2d", "matmul")
# Maximum of operands and operators in the expression of one result, with all operators inlined. An operand
# that is named twice counts twice: 60 sums of a tensor with itself would have 2^60 terms. The time in which
# TVM compiles an expression grows faster than its size.
MAX_TERMS = 256
_AUTOMATIC = re.compile(r"(lv|gv)\d*(_nchw\d*)?$")


@dataclass(eq=False)
class KernelGroup:
    """Bindings that become one kernel, or the kernels of `attention_kernels` if the anchor is attention.

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
        (`core.liveness.view_obstacle`), or a change of shape (`is_pure_reshape`).
    copy_reasons : dict of Var to str
        Slices and concatenations of the group that are no views, each with the reason.
    extra_outputs : list of Var
        Results of fused operators that other kernels read too: outputs besides the last one.
    is_epilogue : bool
        Whether it is the epilogue of a layer on PIM or of a view that has no other reader. On the GPU these
        operators join the kernel of the layer. They join no other kernel, or plans would differ in launches.
    fusible_inputs : set of Var
        Operands that no kernel before it reads: if an elementwise kernel had one of them as its last result,
        the two would be one kernel.
    prologue_kernels : list of list of VarBinding
        Prologues that would be separate kernels, if the anchor were not in this kernel.
    ordered_after : set of Var
        Variables whose kernels must come before it, although it does not read them: if it came first, it
        would fuse operators that belong to those kernels.
    """

    bindings: list[relax.VarBinding] = field(default_factory=list)
    anchor: relax.VarBinding | None = None
    fusible: bool = True
    view: bool = False
    copy_reasons: dict[relax.Var, str] = field(default_factory=dict)
    extra_outputs: list[relax.Var] = field(default_factory=list)
    is_epilogue: bool = False
    fusible_inputs: set[relax.Var] = field(default_factory=set)
    prologue_kernels: list[list[relax.VarBinding]] = field(default_factory=list)
    ordered_after: set[relax.Var] = field(default_factory=set)

    @property
    def result(self) -> relax.Var:
        return self.bindings[-1].var

    @property
    def copies(self) -> dict[relax.Var, str]:
        """Slices and concatenations that the kernel copies in memory, each with the reason.

        A slice that other operators of the kernel compute with or concatenate is read in place.
        """
        kinds = {b.var: operator(b.value) for b in self.bindings}
        moves = set(kinds.values()) <= {*MOVES, "strided_slice"}
        return {var: reason for var, reason in self.copy_reasons.items() if moves or kinds[var] == "concat"}

    @property
    def title(self) -> relax.Var:
        """The variable that gives the group its name.

        That is an anchor with weights, since PIM programs find their product by its name; else the anchor,
        if its name is not automatic; else the first variable whose name is not.
        """
        anchors = [] if self.anchor is None else [self.anchor]
        with_own_name = (b for b in anchors + self.bindings if not _AUTOMATIC.match(b.var.name))
        weighted = (b for b in anchors if operator(b.value) in WEIGHTED)
        return next(weighted, next(with_own_name, (anchors or self.bindings)[-1])).var


@dataclass(frozen=True, kw_only=True)
class TensorCopy:
    """The copy of a slice or concatenation."""

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
    - The look-up of a product's second operand, as of the weights of experts, is a prologue of the product.
    - An operator that cannot join (it follows a call, a graph input, or a tensor with two readers) is a
      prologue of the first anchor that reads it, directly or through other prologues. If others read it too,
      that kernel also stores it.
    - All others are separate kernels. No operator joins a kernel in which its result would have more than
      `MAX_TERMS`.

    Without `views`, all slices and concatenations are work of kernels. Callers share the groups of a module,
    and change none of them.
    """
    grouping = _Grouping(mod, views)
    for binding in main_bindings(mod):
        grouping.add(binding)
    groups = grouping.groups
    for group in groups:
        if group.fusible and is_pure_reshape(group.bindings):
            group.fusible, group.view = False, True
            group.copy_reasons.clear()
    return groups


def attention_kernels(mod: tvm.IRModule, group: KernelGroup) -> tvm.IRModule | None:
    """The kernels of a group with attention: a module whose `kernel_groups` they are; None for other groups.

    Parameters of its ``main`` are the `free_variables` of the group. It returns the group's extra outputs,
    then its result. Other operators of the group join the first product or the last.
    """
    attention = None if group.anchor is None else attention_from_call(mod, group.anchor.value)
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

                    env[binding.var] = emit_attention(attention, list(value.args), emit)
                else:
                    env[binding.var] = builder.emit(value, name_hint=binding.var.name)
            results = [env[var] for var in (*group.extra_outputs, group.result)]
            output = builder.emit_output(results[0] if len(results) == 1 else relax.Tuple(results))
        builder.emit_func_output(output)
    return relax.transform.CanonicalizeBindings()(builder.get())


def free_variables(bindings: Sequence[relax.VarBinding]) -> list[relax.Var]:
    """Variables that `bindings` read from outside, in the order of their first use."""
    inside = {binding.var for binding in bindings}
    read = (var for binding in bindings for var in relax.analysis.free_vars(binding.value)[:])
    return [var for var in dict.fromkeys(read) if var not in inside]


class _Grouping:
    """Groups of the bindings of ``main`` so far, by the rules of `kernel_groups`."""

    def __init__(self, mod: tvm.IRModule, views: bool):
        # By group, the place of its last binding: in the order in which their results appear.
        self._places: dict[KernelGroup, int] = {}
        self._mod, self._views = mod, views
        self._counts = use_counts(mod)
        self._order = ReadOrder(mod, self._counts)
        self._anchor_operands = _anchor_operands(mod)
        self._producers: dict[relax.Var, KernelGroup] = {}
        # By variable, the groups that read it besides its producer, each with its first reading variable.
        self._readers: dict[relax.Var, dict[int, relax.Var]] = {}
        self._enclosing: dict[
            relax.Var, relax.Var
        ] = {}  # by variable, the concatenation inside which it lies
        self._terms: dict[relax.Var, int] = {}  # by variable, the terms of its expression in its kernel

    @property
    def groups(self) -> list[KernelGroup]:
        """The groups, in the order in which their results appear."""
        return list(self._places)

    def add(self, binding: relax.VarBinding) -> None:
        """Add the next binding to the group of an operand, or to a group of its own."""
        kind = operator_kind(self._mod, binding.value)
        operands = [v for v in relax.analysis.free_vars(binding.value)[:] if v in self._producers]
        copy_reason = ""
        if kind in GATHERS:
            copy_reason = self._copy_reason(binding.value) if self._views else "copies are made"
        if kind in GATHERS and not copy_reason:
            group = KernelGroup(fusible=False, view=True)
            self._enclosing.update(dict.fromkeys(operands if kind == "concat" else (), binding.var))
        elif kind in ELEMENTWISE:
            group = self._elementwise_group(binding, kind, operands)
        else:
            group = self._anchor_group(binding, kind, operands)
        group.is_epilogue |= kind not in GATHERS and any(
            self._is_read_once(v) and not self._producers[v].fusible for v in operands
        )
        group.is_epilogue |= _is_split_join(binding)
        group.bindings.append(binding)
        group.copy_reasons |= {binding.var: copy_reason} if copy_reason else {}
        self._places.pop(group, None)  # it comes last
        self._places[group] = len(self._producers)
        self._producers[binding.var] = group  # `_merge` has done so for the bindings that were merged
        inside = {v: self._terms[v] for v in operands if self._producers[v] is group}
        self._terms[binding.var] = 1 if group.anchor is binding else _term_count(binding.value, inside)
        for var in operands:
            if self._producers[var] is not group:
                self._readers.setdefault(var, {}).setdefault(id(group), binding.var)

    def _is_read_once(self, var: relax.Var) -> bool:
        return self._counts.get(var, 0) == 1

    def _elementwise_group(
        self, binding: relax.VarBinding, kind: str, operands: Sequence[relax.Var]
    ) -> KernelGroup:
        """The group that an elementwise operator joins, or a new one."""
        open_ends = self._open_ends(binding, kind, operands)
        # Other kernels read the extra outputs of a host, so the host must not depend on these kernels.
        hosts = [
            host for host in open_ends if not any(self._readers.get(output) for output in host.extra_outputs)
        ]
        pim_groups = [
            self._producers[v]
            for v in operands
            if self._is_read_once(v) and not self._producers[v].fusible and _is_on_pim(self._producers[v])
        ]
        # The last one is the host. If PIM computes it, or a part of it, this operator is its epilogue.
        is_epilogue = _is_split_join(binding) or (
            bool(hosts and pim_groups) and max(hosts + pim_groups, key=self._places.__getitem__) in pim_groups
        )
        if hosts and not is_epilogue:
            return self._join_hosts(hosts)
        group = KernelGroup()
        last = max(open_ends, key=self._places.__getitem__, default=None)
        group.fusible_inputs |= {v for v in operands if self._is_read_once(v) and self._producers[v] is last}
        group.ordered_after |= {
            _first_reader(self._readers[v])
            for host in open_ends
            for v in host.extra_outputs
            if self._readers.get(v)
        }
        if kind == "concat":
            group.ordered_after |= {self._enclosing[v] for v in operands if v in self._enclosing}
        return group

    def _open_ends(
        self, binding: relax.VarBinding, kind: str, operands: Sequence[relax.Var]
    ) -> list[KernelGroup]:
        """Groups whose results only this elementwise operator reads, and that may have it in their kernel."""
        hosts = [
            self._producers[v]
            for v in operands
            if self._is_read_once(v)
            and self._producers[v].fusible
            and not _is_broadcast(binding.var, v, self._producers[v])
        ]
        hosts = [
            host
            for host in hosts
            if _term_count(binding.value, {v: self._terms[v] for v in operands if self._producers[v] is host})
            <= MAX_TERMS
        ]
        if kind not in GATHERS:
            return hosts
        return [
            host for host in hosts if kind == "concat" and _has_slices(host) and self._can_move_later(host)
        ]

    def _join_hosts(self, hosts: Sequence[KernelGroup]) -> KernelGroup:
        """The last of `hosts`, joined by the others that may be one kernel with it if one of them slices."""
        group = max(hosts, key=self._places.__getitem__)
        for host in dict.fromkeys(hosts):
            if host is group or not (_has_slices(group) or _has_slices(host)):
                continue
            if self._can_move_later(group) and self._can_move_later(host):
                group.bindings[:0] = host.bindings
                self._merge(host, group)
        return group

    def _anchor_group(
        self, binding: relax.VarBinding, kind: str, operands: Sequence[relax.Var]
    ) -> KernelGroup:
        """A new group of an operator that is not elementwise, with its prologue."""
        has_tensor = isinstance(binding.var.ty, relax.TensorType)
        is_fusible = kind not in ("", "call_dps_packed", IN_PLACE, *OPAQUE) and has_tensor
        group = KernelGroup(anchor=binding, fusible=is_fusible)
        if is_fusible:
            is_attention = kind == ATTENTION
            # A mask is never computed in a prologue of attention.
            read = [v for v in operands if v in binding.value.args[:3]] if is_attention else operands
            self._fuse_producers(group, binding, read, reads_whole_tensors=is_attention)
        return group

    def _fuse_producers(
        self,
        group: KernelGroup,
        anchor: relax.VarBinding,
        operands: Sequence[relax.Var],
        reads_whole_tensors: bool,
    ) -> None:
        """Fuse into `group`, before its anchor, the elementwise kernels that no other kernel reads yet.

        Parameters
        ----------
        reads_whole_tensors : bool
            Whether the anchor reads whole tensors only, such as a cache: kernels with copies are not fused
            then.
        """
        worklist = list(operands)
        inside: list[relax.VarBinding] = [anchor]
        while worklist:
            var = worklist.pop(0)
            other_readers = {
                number: reader for number, reader in self._readers.get(var, {}).items() if number != id(group)
            }
            is_overtaken = self._order.is_overtaken(anchor.var, [b.var for b in inside], var)
            group.fusible_inputs |= set() if other_readers or is_overtaken else {var}
            producer = self._producers.get(var)
            if producer is None or producer is group or not producer.fusible:
                continue
            if producer.anchor is not None and not _looks_up_operand(anchor, producer):
                continue
            if not var.same_as(producer.result) or (reads_whole_tensors and producer.copies):
                continue
            if other_readers:
                group.ordered_after.add(_first_reader(other_readers))
                continue
            if is_overtaken and self._reads_pim(producer):
                continue  # else the epilogue of the anchor would be a separate kernel
            fused_terms = _inline_terms(producer.bindings + inside[:-1])
            if max(fused_terms.values()) > MAX_TERMS:
                continue
            self._terms |= fused_terms
            inside = producer.bindings + inside
            group.prologue_kernels.append(producer.bindings)
            group.extra_outputs += [] if use_count(inside, var) == self._counts.get(var, 0) else [var]
            group.fusible_inputs |= producer.fusible_inputs
            self._merge(producer, group)
            worklist += _tensors_read_twice(producer.bindings)
        group.bindings += inside[:-1]

    def _reads_pim(self, group: KernelGroup) -> bool:
        producers = [self._producers[v] for v in free_variables(group.bindings) if v in self._producers]
        return any(map(_is_on_pim, producers))

    def _can_move_later(self, group: KernelGroup) -> bool:
        """Whether a whole kernel may be executed later: it belongs to no layer, and no kernel reads it yet.

        Nor may a layer read its operands: the first reader of a layer on PIM may have to do its epilogue.
        """
        is_free = group.anchor is None and group.fusible and not group.extra_outputs and not group.is_epilogue
        is_read = any(self._readers.get(binding.var) for binding in group.bindings)
        return is_free and not is_read and self._anchor_operands.isdisjoint(free_variables(group.bindings))

    def _merge(self, source: KernelGroup, group: KernelGroup) -> None:
        """Record that `group` now has the bindings of `source`, which is no longer a kernel."""
        group.copy_reasons |= source.copy_reasons
        group.ordered_after |= source.ordered_after
        del self._places[source]
        self._producers.update((b.var, group) for b in source.bindings)
        for readers in self._readers.values():
            if id(source) in readers:
                readers.setdefault(id(group), readers.pop(id(source)))

    def _copy_reason(self, value: relax.Call) -> str:
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
        if not all(isinstance(part, relax.Var) and part in self._producers for part in parts):
            return "a part is an input or a constant"
        if len(set(parts)) != len(parts) or any(part in self._enclosing for part in parts):
            return "a part lies in two places"
        if not all(_is_written(part, self._producers[part]) for part in parts):
            return "a part is another name of a tensor that lies elsewhere"
        axis = int(value.attrs.axis or 0) % len(shape(value))
        begins = itertools.accumulate([shape(part)[axis] for part in parts[:-1]], initial=0)
        problems = (view_obstacle(shape(value), axis, begin, STORED_BYTES) for begin in begins)
        return next(filter(None, problems), "")


def _tensors_read_twice(bindings: Sequence[relax.VarBinding]) -> list[relax.Var]:
    """Tensors that several operators read, such as the operand of a SiLU.

    The result of another kernel, such as a residual, is read once. Slices and concatenations read stored
    tensors.
    """
    values = [binding.value for binding in bindings if operator(binding.value) not in GATHERS]
    read = [var for value in values for var in relax.analysis.free_vars(value)]
    return [var for var in dict.fromkeys(read) if read.count(var) > 1]


def _anchor_operands(mod: tvm.IRModule) -> set[relax.Var]:
    """Operands of the operators that are not elementwise."""
    anchors = (b.value for b in main_bindings(mod) if operator_kind(mod, b.value) not in ELEMENTWISE)
    return {var for value in anchors for var in relax.analysis.free_vars(value)}


def _is_on_pim(group: KernelGroup) -> bool:
    """Whether PIM computes the group, or parts of it; its epilogue may need a GPU kernel."""
    binding = group.bindings[-1]
    if group.view:
        return _is_split_join(binding)
    called = isinstance(binding.value, relax.Call) and isinstance(binding.value.op, tvm.ir.GlobalVar)
    return called or operator(binding.value) == "call_dps_packed"


def _is_split_join(binding: relax.VarBinding) -> bool:
    """Whether it concatenates or adds the parts of a split layer."""
    part = binding.var.name + PIM_SUFFIX
    return operator(binding.value) in ("concat", "add") and any(
        v.name == part for v in relax.analysis.free_vars(binding.value)
    )


def _looks_up_operand(anchor: relax.VarBinding, producer: KernelGroup) -> bool:
    """Whether `producer` only looks up, in a constant, the second operand of the product `anchor`."""
    if len(producer.bindings) > 1 or operator(anchor.value) != "matmul":
        return False
    lookup = producer.bindings[0]
    return (
        operator(lookup.value) == LOOKUP
        and isinstance(lookup.value.args[0], tvm.ir.GenericConst)
        and anchor.value.args[1].same_as(lookup.var)
    )


def _is_broadcast(result: relax.Var, operand: relax.Var, group: KernelGroup) -> bool:
    """Whether `result` is larger than `operand`, the result of a layer with weights or of its epilogue."""
    weighted = group.is_epilogue or (group.anchor is not None and operator(group.anchor.value) in WEIGHTED)
    return weighted and math.prod(shape(result)) > math.prod(shape(operand))


def _has_slices(group: KernelGroup) -> bool:
    return any(operator(binding.value) == "strided_slice" for binding in group.bindings)


def _first_reader(readers: Mapping[int, relax.Var]) -> relax.Var:
    return next(iter(readers.values()))


def _term_count(value: relax.Expr, inside: Mapping[relax.Var, int]) -> int:
    """Operands and operators in the expression of `value`, with the terms of inlined operands (`inside`)."""
    args = getattr(value, "args", ())
    operands = [
        field for arg in args[:] for field in (arg.fields[:] if isinstance(arg, relax.Tuple) else [arg])
    ]
    read = sum(inside.get(operand, 1) if isinstance(operand, relax.Var) else 1 for operand in operands)
    return 1 + OPERAND_USES.get(operator(value), 1) * read


def _inline_terms(bindings: Sequence[relax.VarBinding]) -> dict[relax.Var, int]:
    """By variable, the terms of its expression if all `bindings` before it are inlined."""
    terms: dict[relax.Var, int] = {}
    for binding in bindings:
        terms[binding.var] = _term_count(binding.value, terms)
    return terms


def use_count(bindings: Sequence[relax.VarBinding], var: relax.Var) -> int:
    """How many of the bindings read a variable."""
    return sum(var in relax.analysis.free_vars(binding.value) for binding in bindings)


def _is_written(var: relax.Var, group: KernelGroup) -> bool:
    """Whether a kernel or PIM writes `var`, or the parts of it; False for aliases."""
    if group.view:
        return operator(group.bindings[-1].value) == "concat"
    if not group.fusible:
        call = group.bindings[-1].value
        return isinstance(call, relax.Call) and (
            isinstance(call.op, tvm.ir.GlobalVar) or operator(call) == "call_dps_packed"
        )
    kinds = {operator(b.value) for b in group.bindings}
    stored = var.same_as(group.result) or var in group.extra_outputs
    return stored and ("concat" in kinds or not kinds <= {*MOVES, *GATHERS})


def copies(mod: tvm.IRModule, *, views: bool = True) -> tuple[TensorCopy, ...]:
    """Copies of slices and concatenations that the kernels of a flat module make."""
    return tuple(
        TensorCopy(layer=layer_name(mod, var), size_bytes=tensor_bytes(var), reason=reason)
        for group in kernel_groups(mod, views=views)
        for var, reason in group.copies.items()
    )
