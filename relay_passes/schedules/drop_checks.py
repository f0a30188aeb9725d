"""Kernels check only those arguments that may come from a caller of the network."""

from __future__ import annotations

from collections.abc import Sequence, Set

import tvm
import tvm_ffi
from tvm import tirx

from pimflow.relay_passes.schedules.loops import nodes

CHECKED = "pimflow.checked_arguments"  # attribute of a kernel: positions of arguments to check


@tvm.transform.module_pass(opt_level=0, name="DropChecks")
class DropChecks:
    """Remove checks of those arguments that cannot come from a caller (`MarkChecked`).

    TVM makes a dozen checks for each argument, each with a message that names all arguments. LLVM spends most
    of its time on them, and nearly all of it where a kernel has many arguments.

    Rewrite: ``assert condition of such arguments, message -> 0``.
    Preserves: kernels that are not marked, all other checks.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        functions = {gv: _drop_checks(function) for gv, function in mod.functions_items()}
        return tvm.IRModule(functions, attrs=mod.attrs)


def _drop_checks(function: tvm.ir.BaseFunc) -> tvm.ir.BaseFunc:
    if not isinstance(function, tirx.PrimFunc) or CHECKED not in (function.attrs or {}):
        return function
    checked = {int(position) for position in function.attrs[CHECKED]}
    params = function.params[:]
    positions: dict[tirx.Var, set[int]] = {}  # by variable, the arguments from which it is read
    for binding in nodes(function.body, tirx.Bind):
        positions[binding.var] = _argument_positions(binding.value, positions, params)

    def rewrite(check: tirx.AssertStmt) -> tirx.Stmt:
        """The new value of `var`; None if `value` stays."""
        remaining = checked & _argument_positions(check.condition, positions, params)
        return check if remaining else tirx.Evaluate(0)

    return function.with_body(tvm_ffi.structural_map(function.body, [(tirx.AssertStmt, rewrite)]))


def _argument_positions(
    expr: tirx.Expr, positions: dict[tirx.Var, set[int]], params: Sequence[tirx.Var]
) -> Set[int]:
    """Positions of the arguments, packed in `params`, on which `expr` depends."""
    argument_positions: set[int] = set()
    for node in nodes(expr, tirx.Var, tvm.ir.Call):
        if isinstance(node, tirx.Var):
            argument_positions |= positions.get(node, set())
        elif getattr(node.op, "name", "") == "tirx.tvm_struct_get":
            struct, index, *_ = node.args[:]
            if any(struct.same_as(param) for param in params):
                argument_positions.add(int(index))
    return argument_positions
