"""Matrix-vector products handed to the PIM code generator."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import relax

from pimflow.core.program import PimProgram
from pimflow.relay_passes.flat import operator, rebuild, substitute

PROGRAM_ATTR = "pim.program"


def symbol(name: str) -> str:
    """What the function that computes variable `name` is called."""
    return f"pim_{name}"


@tvm.transform.module_pass(opt_level=0, name="OutlinePim")
class OutlinePim:
    """Products, with the slicing and padding in front of them, as functions for ``relax.ext.pim``.

    The gather of GWRITE reads the layer's whole input and pads with zeros, so what `SplitMdDp`, `SplitBatch`
    and `DecomposeToMatrixVector` put in front of a product disappears into the function.

    Parameters
    ----------
    programs : mapping of str to PimProgram
        By name of the product's variable.

    Rewrite: ``matmul(gather(x), w) -> pim_name(x)``, a function with the program as an attribute.
    Preserves: values up to the storage type of the device, names.
    """

    def __init__(self, programs: Mapping[str, PimProgram]):
        self.programs = dict(programs)

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        def rewrite(builder, var, value):
            program = self.programs.get(var.name)
            if program is None or operator(value) != "matmul":
                return None
            source, function = _outlined(value, _gather_depth(program), builder)
            name = symbol(var.name)
            attrs = {"Codegen": "pim", "global_symbol": name, PROGRAM_ATTR: program.to_json()}
            callee = builder.add_func(function.with_attrs(attrs), name)
            return builder.emit(relax.Call(callee, [source]), name_hint=var.name)

        return rebuild(mod, rewrite)


def _gather_depth(program: PimProgram) -> int:
    """How many operators between the layer's input and the windows become part of the function.

    Those of `SplitMdDp` or `SplitBatch`, and `DecomposeToMatrixVector`: slice, padding, a slice a tap, and
    their concatenation, as far as the convolution needs them.
    """
    g = program.geometry
    top, left, bottom, right = g.padding
    sliced = False
    if g.n > 1:
        sliced = (program.pixel_begin, program.pixel_end) != (0, g.pixels)
    elif program.pixel_begin > 0:
        rows = g.rows.inputs(program.pixel_begin // g.ow, g.oh)
        top, bottom, sliced = rows.pad_before, rows.pad_after, len(rows) < g.h
    taps = g.kh * g.kw
    return sliced + any((top, left, bottom, right)) + (taps > 1 or g.stride != (1, 1)) + (taps > 1)


def _outlined(product: relax.Call, depth: int, outer: relax.BlockBuilder) -> tuple[relax.Var, relax.Function]:
    """The tensor that `product` gathers from by `depth` operators, and the function that computes it."""
    gathers: dict[relax.Var, relax.Expr] = {}

    def visit(var: relax.Var, depth: int) -> relax.Var:
        if depth == 0:
            return var
        value = outer.lookup_binding(var)
        (root,) = {visit(v, depth - 1) for v in relax.analysis.free_vars(value)}
        gathers.setdefault(var, value)
        return root

    source = visit(product.args[0], depth)
    builder = relax.BlockBuilder()
    x = relax.Var("x", source.ty)
    env: dict[relax.Var, relax.Expr] = {source: x}
    with builder.function("outlined", [x]):
        with builder.dataflow():
            for var, value in gathers.items():
                env[var] = builder.emit(substitute(value, env))
            result = builder.emit_output(substitute(product, env))
        builder.emit_func_output(result)
    return source, builder.get()["outlined"]
