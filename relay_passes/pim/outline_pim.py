"""Matrix-vector products handed to the PIM code generator."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import tvm
from tvm import relax

from pimflow.core.program import PimProgram
from pimflow.errors import PlanError
from pimflow.relay_passes.flat import main_bindings, operator, rebuild, substitute, uses

PROGRAM_ATTR = "pim.program"
PRODUCTS = ("matmul", "nn.conv2d")  # a convolution only if it is grouped


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

    Rewrite: ``matmul(gather(x), w) -> pim_name(x)``, a function with the program as an attribute. A grouped
    convolution has no such form: ``conv2d(x, w) -> pim_name(x)``. Where its
    latches start from values (`PimProgram.initial`), the addition behind the product is part of it:
    ``add(matmul(gather(x), w), y) -> pim_name(x, y)``, and without `y` if that is a constant.
    Preserves: values up to the storage type of the device, names.
    """

    def __init__(self, programs: Mapping[str, PimProgram]):
        self.programs = dict(programs)

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        sums = _sums(mod, {name for name, program in self.programs.items() if program.initial})
        added = {product for product, _ in sums.values()}

        def rewrite(builder, var, value):
            product, position = sums.get(var, (var, None))
            program = self.programs.get(product.name)
            # A product that is added to goes into the function of the addition, and is dead without it.
            kinds = PRODUCTS if position is None else ("add",)
            if program is None or var in added or operator(value) not in kinds:
                return None
            sources, function = _outlined(value, position, _gather_depth(program), builder)
            name = symbol(product.name)
            attrs = {"Codegen": "pim", "global_symbol": name, PROGRAM_ATTR: program.to_json()}
            callee = builder.add_func(function.with_attrs(attrs), name)
            return builder.emit(relax.Call(callee, sources), name_hint=var.name)

        return rebuild(mod, rewrite)


def _sums(mod: tvm.IRModule, names: Collection[str]) -> dict[relax.Var, tuple[relax.Var, int]]:
    """By the variable of an addition, the product in it called one of `names`, and which operand that is.

    Raises
    ------
    PlanError
        If nothing adds to such a product, or more reads it than that.
    """
    if not names:
        return {}
    sums: dict[relax.Var, tuple[relax.Var, int]] = {}
    counts, bindings = uses(mod), main_bindings(mod)
    for binding in bindings:
        for position, read in enumerate(binding.value.args if operator(binding.value) == "add" else ()):
            if isinstance(read, relax.Var) and read.name in names and counts[read] == 1:
                sums[binding.var] = read, position
    products = {b.var.name for b in bindings if b.var.name in names and operator(b.value) in PRODUCTS}
    if missing := sorted(products - {product.name for product, _ in sums.values()}):
        raise PlanError(f"'{missing[0]}': its latches start from values that no addition behind it has")
    return sums


def _gather_depth(program: PimProgram) -> int:
    """How many operators between the layer's input and the windows become part of the function.

    Those of `SplitMdDp` or `SplitBatch`, and `DecomposeToMatrixVector`: slice, padding, a slice a tap, and
    their concatenation, as far as the convolution needs them. A grouped convolution pads and gathers itself.
    """
    g = program.geometry
    top, left, bottom, right = g.padding
    sliced = False
    if g.n > 1:
        sliced = (program.pixel_begin, program.pixel_end) != (0, g.pixels)
    elif program.pixel_begin > 0:
        rows = g.rows.inputs(program.pixel_begin // g.ow, g.oh)
        top, bottom, sliced = rows.pad_before, rows.pad_after, len(rows) < g.h
    if g.groups > 1:
        return int(sliced)
    taps = g.kh * g.kw
    return sliced + any((top, left, bottom, right)) + (taps > 1 or g.stride != (1, 1)) + (taps > 1)


def _outlined(
    value: relax.Call, position: int | None, depth: int, outer: relax.BlockBuilder
) -> tuple[list[relax.Var], relax.Function]:
    """What the function of a product reads, or of a sum whose operand at `position` is one, and the function.

    That is the tensor that the product gathers from by `depth` operators and, of a sum, what it adds, unless
    that is a constant.
    """
    gathers: dict[relax.Var, relax.Expr] = {}

    def visit(var: relax.Var, depth: int) -> relax.Var:
        if depth == 0:
            return var
        value = outer.lookup_binding(var)
        (root,) = {visit(v, depth - 1) for v in relax.analysis.free_vars(value)}
        gathers.setdefault(var, value)
        return root

    product, added = value, None
    if position is not None:
        product, added = outer.lookup_binding(value.args[position]), value.args[1 - position]
    source = visit(product.args[0], depth)
    sources = [source, *([added] if isinstance(added, relax.Var) else [])]
    builder = relax.BlockBuilder()
    params = [relax.Var(name, each.ty) for name, each in zip("xy", sources)]
    env: dict[relax.Var, relax.Expr] = {source: params[0]}
    with builder.function("outlined", params):
        with builder.dataflow():
            for var, gather in gathers.items():
                env[var] = builder.emit(substitute(gather, env))
            result = substitute(product, env)
            if added is not None:
                start = params[1] if isinstance(added, relax.Var) else added
                result = relax.op.add(builder.emit(result), start)
            result = builder.emit_output(result)
        builder.emit_func_output(result)
    return sources, builder.get()["outlined"]
