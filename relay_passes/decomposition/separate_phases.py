"""Runs over transposed convolutions as one run for each phase, without depth to space inside a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from pimflow.relay_passes.canonical.subpixel_convolution import PHASES_TO_PIXELS
from pimflow.relay_passes.flat import (
    LAYER_NAMES,
    LAYER_ROLES,
    layer_name,
    main_bindings,
    operator,
    rebuild,
    shape,
    substitute,
)
from pimflow.relay_passes.kernels.activation_chains import RunGraph
from pimflow.relay_passes.operators import POOL


@tvm.transform.module_pass(opt_level=0, name="SeparatePhases")
class SeparatePhases:
    """Compute a decomposed transposed convolution (`SubpixelConvolution`) one phase at a time.

    A phase is one pixel of each s x s block of the larger map; its channels are a part of those of ``lconv``.
    All operators up to ``fconv`` treat every pixel alike, so the few results of ``fconv`` are interleaved
    instead of the many of ``lconv``.

    Rewrite: ``fconv(relu(depth_to_space(lconv(x)))) ->
    depth_to_space(concat(fconv(relu(lconv_p(x)))))`` over the phases p; of layer ``a`` the new ones are
    called ``a.phase0`` and so on, with its role.
    Preserves: values exactly, names and shapes of all other layers.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        runs = {run.last.var: run for run in _runs(mod)}
        if not runs:
            return mod
        names, role_of = LAYER_NAMES.read(mod), LAYER_ROLES.read(mod)

        operands: dict[relax.Var, relax.Expr] = {}  # by convolution, its operand over new variables

        def record(var: relax.Var, phase_var: relax.Var, number: int) -> None:
            """Name the layer of a phase after the layer of `var`, with its role."""
            layer = layer_name(mod, var)
            names[phase_var.name] = f"{layer}.phase{number}"
            if layer in role_of:
                role_of[names[phase_var.name]] = role_of[layer]

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            if operator(value) == "nn.conv2d":
                operands[var] = value.args[0]
            if var not in runs:
                return None
            run = runs[var]
            x, phases = operands[run.first.var], range(run.rows * run.columns)
            parts = [_phase(builder, run, number, x, record) for number in phases]
            role_of.pop(layer_name(mod, var))
            joined = builder.emit(op.concat(parts, 3))
            n, h, w, c = shape(parts[0])
            blocks = builder.emit(op.reshape(joined, (n, h, w, run.rows, run.columns, c)))
            moved = builder.emit(op.permute_dims(blocks, [0, 1, 3, 2, 4, 5]))
            return op.reshape(moved, (n, h * run.rows, w * run.columns, c))

        return LAYER_ROLES.attach(LAYER_NAMES.attach(rebuild(mod, rewrite), names), role_of)


@dataclass(frozen=True)
class _PhaseRun:
    """``lconv``, the interleaving of `rows` x `columns` phases, elementwise operators, ``fconv``."""

    first: relax.VarBinding
    interleaved: relax.Var
    rest: list[relax.VarBinding]
    rows: int
    columns: int

    @property
    def last(self) -> relax.VarBinding:
        return self.rest[-1]


def _runs(mod: tvm.IRModule) -> list[_PhaseRun]:
    graph, runs = RunGraph.from_module(mod), []
    begins = {begin[-1].var: begin for begin in _interleavings(mod, graph)}
    for last in main_bindings(mod) if begins else ():
        if not graph.has_role(last, "fconv"):
            continue
        run = graph.run_to(last, begins)
        found = [b.var for b in run if b.var in begins]
        others = any(operator(b.value) in POOL or graph.has_role(b, "lconv") for b in run)
        if len(found) == 1 and not others and graph.is_isolated([*begins[found[0]], *run[1:]]):
            first, to_blocks, *_ = begins[found[0]]
            blocks = shape(to_blocks.var)
            runs.append(_PhaseRun(first, found[0], run[1:], blocks[4], blocks[5]))
    return runs


def _interleavings(mod: tvm.IRModule, graph: RunGraph) -> list[list[relax.VarBinding]]:
    """Each ``lconv`` that computes phases as channels, and the three operators that interleave them."""
    begins = []
    for first in main_bindings(mod):
        if not graph.has_role(first, "lconv"):
            continue
        begin = [first]
        while len(begin) < 4 and len(graph.readers.get(begin[-1].var, [])) == 1:
            begin.append(graph.readers[begin[-1].var][0])
        if [operator(b.value) for b in begin[1:]] != ["reshape", "permute_dims", "reshape"]:
            continue
        blocks, axes = shape(begin[1].var), [int(a) for a in begin[2].value.attrs.axes]
        if len(blocks) == 7 and blocks[3] == 1 and axes == PHASES_TO_PIXELS:
            begins.append(begin)
    return begins


def _phase(
    builder: relax.BlockBuilder,
    run: _PhaseRun,
    number: int,
    x: relax.Expr,
    record: Callable[[relax.Var, relax.Var, int], None],
) -> relax.Var:
    """Emit the operators of one phase; tells `record` the variable of the phase for each of the run."""
    call = run.first.value
    filters = np.from_dlpack(call.args[1].value)
    channels = len(filters) // (run.rows * run.columns)
    part = np.ascontiguousarray(filters[number * channels : (number + 1) * channels])

    def bind(binding: relax.VarBinding, value: relax.Expr) -> relax.Var:
        """Emit `value` as the phase's variable for that of `binding`."""
        var = builder.emit(value, name_hint=f"{binding.var.name}_phase{number}")
        record(binding.var, var, number)
        return var

    args = [x, relax.const(part, str(call.args[1].ty.dtype))]
    env = {run.interleaved: bind(run.first, relax.Call(call.op, args, call.attrs, call.ty_args))}
    for binding in run.rest:
        env[binding.var] = bind(binding, substitute(binding.value, env))
    return env[run.last.var]
