"""Skip connections kept in their reduced form and restored where they are used (TeMCO, section 3.1)."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import tvm
from tvm import relax

from pimflow.core.liveness import Liveness
from pimflow.relay_passes.decomposition.layer_flops import layer_flops
from pimflow.relay_passes.flat import (
    LAYER_NAMES,
    LAYER_ROLES,
    TextAttribute,
    emit_as,
    layer_name,
    main_bindings,
    rebuild,
    substitute,
    tensor_bytes,
    unique_name,
)

# A tensor counts as a skip connection if more operators than these lie between two of its uses. The paper
# names no value: there are three from one decomposed layer to the next (bias, activation, fconv), and six or
# more across one layer.
DISTANCE = 4
# By name of each layer that `copy_skips` made, the layer of which it is a copy.
COPY_SOURCES = TextAttribute("pimflow.restored")


@dataclass(frozen=True, kw_only=True)
class Skip:
    """A skip connection: a tensor with a distant use, and the operators that restore it.

    Attributes
    ----------
    uses : tuple of str
        Variables whose operators are distant uses, each with a copy in front of it. Uses soon after a distant
        one read the same copy.
    restores : tuple of str
        Variables whose operators compute it from its reduced form, in the order of execution, each once.
    reduced : tuple of str
        Variables that these operators read: results of cores, and inputs of the network.
    flops : int
        Operations of one copy (`layer_flops`).
    flops_original : int
        Operations of the original layers of the restoring ones, before decomposition: the paper's threshold.
    peak_bytes : int
        Bytes live at once while it is restored.
    operands_bytes : int
        Bytes of the tensor and of the operands of its operator: what it takes to compute it without a copy.
    """

    name: str
    size_bytes: int
    uses: tuple[str, ...]
    restores: tuple[str, ...]
    reduced: tuple[str, ...]
    flops: int
    flops_original: int
    peak_bytes: int
    operands_bytes: int

    def is_profitable(self) -> bool:
        """Whether a copy is profitable by the paper's rule (algorithm 1, ``Overhead``)."""
        return self.flops <= self.flops_original and self.peak_bytes <= self.operands_bytes


def skips(
    mod: tvm.IRModule, *, distance: int = DISTANCE, original_flops: Mapping[str, int] | None = None
) -> tuple[Skip, ...]:
    """Skip connections of a flat module with roles that can be restored from reduced tensors.

    Parameters
    ----------
    distance : int
        A tensor is restored for a use if more operators than these lie between it and the use before.
    original_flops : mapping of str to int, optional
        By name of an ``lconv``, the operations of the layer before decomposition; those of the ``lconv`` if
        it is missing.
    """
    if "lconv" not in LAYER_ROLES.read(mod).values():
        return ()
    program = _SkipAnalysis(mod)
    restores, restorable = _restores(program), []
    for life in program.liveness.lifetimes:
        var = program.variables[life.name]
        if life.pinned or var in program.copies or not restores[var]:
            continue
        uses = program.distant_uses(life.begin, program.read_at[var], distance)
        if uses:
            restorable.append(_skip(program, var, restores[var], uses, original_flops or {}))
    return tuple(restorable)


class _SkipAnalysis:
    """The bindings of ``main`` as steps."""

    def __init__(self, mod: tvm.IRModule):
        self.mod, self.roles = mod, LAYER_ROLES.read(mod)
        self.bindings = main_bindings(mod)
        self.params = list(mod["main"].params)
        self.value = {b.var: b.value for b in self.bindings}
        self.reads = {b.var: _operands(b.value) for b in self.bindings}
        self.variables = {v.name: v for v in (*self.params, *self.value)}
        self.size_bytes = {v.name: _bytes(v) for v in self.variables.values()}
        self.read_at: dict[relax.Var, list[int]] = {v: [] for v in self.variables.values()}
        for step, binding in enumerate(self.bindings):
            for var in self.reads[binding.var]:
                self.read_at[var].append(step)
        # Copies stand right before their readers, and do not count as distance.
        done = COPY_SOURCES.read(mod)
        self.copies = {var for var in self.value if layer_name(mod, var) in done}
        self.clock = list(itertools.accumulate((b.var not in self.copies for b in self.bindings), initial=0))
        returned = _operands(mod["main"].body.body)
        for var in returned:  # a tuple's fields are returned with it
            if var in self.value and not isinstance(self.value[var], relax.Call):
                returned += self.reads[var]
        names = list(dict.fromkeys(v.name for v in returned))
        self.liveness = self.run_liveness(list(self.value), [v.name for v in self.params], names)

    def role(self, var: relax.Var) -> str:
        return self.roles.get(layer_name(self.mod, var), "") if var in self.value else ""

    def run_liveness(self, results: list[relax.Var], inputs: list[str], outputs: list[str]) -> Liveness:
        """Liveness of the operators that compute `results`, in this order."""
        steps = [([v.name for v in self.reads[var]], [var.name]) for var in results]
        return Liveness.from_steps(steps, self.size_bytes, inputs=inputs, outputs=outputs)

    def distant_uses(self, begin: int, read_at: list[int], distance: int) -> list[int]:
        """Steps of uses that are more than `distance` operators behind the use before."""
        pairs = zip([begin, *read_at], read_at)
        return [use for before, use in pairs if self.clock[use] - self.clock[before] > distance]


def _operands(expr: relax.Expr) -> list[relax.Var]:
    return list(dict.fromkeys(relax.analysis.free_vars(expr)))


def _bytes(var: relax.Var) -> int:
    return tensor_bytes(var) if isinstance(var.ty, relax.TensorType) else 0


@dataclass(frozen=True)
class _Restore:
    """``FindReduced`` of a tensor: its operators in order, its bytes, and peak bytes while they run."""

    order: tuple[relax.Var, ...]
    size_bytes: int
    peak_bytes: int


def _restores(program: _SkipAnalysis) -> dict[relax.Var, tuple[relax.Var, ...]]:
    """By variable, the operators that compute it from reduced tensors, in order (algorithm 2).

    Empty for reduced tensors, at which the search ends: results of fconvs and cores, and inputs of the
    network. A tensor that several operators read is computed once.
    """
    restore_of = {param: _Restore((), 0, 0) for param in program.params}
    for binding in program.bindings:
        var, reads = binding.var, program.reads[binding.var]
        size_bytes = program.size_bytes[var.name]
        role = program.role(var)
        if role in ("fconv", "core"):
            restore_of[var] = _Restore((), 0, 0)
        elif role == "lconv":
            read_bytes = sum(program.size_bytes[v.name] for v in reads)
            restore_of[var] = _Restore((var,), size_bytes, size_bytes + read_bytes)
        else:
            # Compare(a, b): a.size + b.peak < b.size + a.peak.
            before = sorted((restore_of[v] for v in reads), key=lambda r: r.size_bytes - r.peak_bytes)
            order = dict.fromkeys(op_var for restore in before for op_var in restore.order)
            peak_bytes = resident_bytes = 0
            for restore in before:
                peak_bytes = max(peak_bytes, resident_bytes + restore.peak_bytes)
                resident_bytes += restore.size_bytes
            peak_bytes = max(peak_bytes, resident_bytes + size_bytes)
            restore_of[var] = _Restore((*order, var), size_bytes, peak_bytes)
    return {var: restore.order for var, restore in restore_of.items()}


def _skip(
    program: _SkipAnalysis,
    var: relax.Var,
    restores: tuple[relax.Var, ...],
    uses: list[int],
    original_flops: Mapping[str, int],
) -> Skip:
    reads = dict.fromkeys(v for op_var in restores for v in program.reads[op_var] if v not in restores)
    copy = program.run_liveness(list(restores), [v.name for v in reads], [var.name])
    costs = {op_var: layer_flops(program.value[op_var]) for op_var in restores}
    originals = {
        op_var: original_flops.get(layer_name(program.mod, op_var), costs[op_var]) for op_var in restores
    }
    operands = sum(program.size_bytes[v.name] for v in program.reads[var])
    return Skip(
        name=var.name,
        size_bytes=program.size_bytes[var.name],
        uses=tuple(program.bindings[use].var.name for use in uses),
        restores=tuple(v.name for v in restores),
        reduced=tuple(v.name for v in reads),
        flops=sum(costs.values()),
        flops_original=sum(originals.values()),
        peak_bytes=copy.peak_bytes,
        operands_bytes=program.size_bytes[var.name] + operands,
    )


def copy_skips(mod: tvm.IRModule, selected: Collection[Skip]) -> tvm.IRModule:
    """`mod` in which the distant uses of the skip connections `selected` read copies right before them.

    Rewrite: ``v = relu(lconv(r)); y = f(v); z = g(y, v) -> v = relu(lconv(r)); y = f(v);
    v' = relu(lconv(r)); z = g(y, v')``. Copies have names of their own and the roles of what they copy.
    Preserves: values exactly, names, interface.
    """
    if not selected:
        return mod
    skips_by_use: dict[str, list[Skip]] = {}
    for skip in selected:
        for use in skip.uses:
            skips_by_use.setdefault(use, []).append(skip)
    values = {b.var.name: (b.var, b.value) for b in main_bindings(mod)}
    names, role_of, copies = LAYER_NAMES.read(mod), LAYER_ROLES.read(mod), COPY_SOURCES.read(mod)
    used_names = {layer_name(mod, var) for var, _ in values.values()} | {p.name for p in mod["main"].params}
    var_remap: dict[relax.Var, relax.Expr] = {}  # by variable of `mod`, its replacement in the result
    latest: dict[relax.Var, relax.Expr] = {}  # by skip connection, the copy that later operators read

    def copy(builder: relax.BlockBuilder, skip: Skip, here: dict[relax.Var, relax.Expr]) -> None:
        """Emit the operators that restore `skip`, except those already in `here`."""
        for name in skip.restores:
            var, value = values[name]
            if var in here:
                continue  # another skip connection with this use has restored it already
            here[var] = emit_as(builder, var, substitute(value, var_remap | here), f"{name}_copy")
            layer = unique_name(f"{layer_name(mod, var)}.copy", used_names)
            used_names.add(layer)
            names[here[var].name], copies[layer] = layer, layer_name(mod, var)
            if role := role_of.get(layer_name(mod, var)):
                role_of[layer] = role

    def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
        """The new value of `var`; None if `value` stays."""
        here: dict[relax.Var, relax.Expr] = {}
        for skip in skips_by_use.get(var.name, ()):
            copy(builder, skip, here)
        for skip in skips_by_use.get(var.name, ()):
            original = values[skip.name][0]
            latest[var_remap[original]] = here[original]
        value = substitute(value, latest)
        if isinstance(value, relax.Var):
            var_remap[var] = value
            return None
        var_remap[var] = emit_as(builder, var, value)
        return var_remap[var]

    new = LAYER_ROLES.attach(LAYER_NAMES.attach(rebuild(mod, rewrite), names), role_of)
    return COPY_SOURCES.attach(new, copies)
