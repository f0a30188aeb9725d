"""Matrix-vector products as functions for the PIM code generator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from tvm import relax

from pimflow.core.program import PimProgram
from pimflow.core.split import INPUT_SUFFIX
from pimflow.errors import PlanError
from pimflow.relay_passes.flat import (
    main_bindings,
    operator,
    rebuild,
    shape,
    slice_begin,
    substitute,
    use_counts,
)

PROGRAM_ATTR = "pim.program"
PRODUCTS = ("matmul", "nn.conv2d")  # a convolution only if it is grouped


def symbol(name: str) -> str:
    """Name of the function that computes variable `name`."""
    return f"pim_{name}"


@tvm.transform.module_pass(opt_level=0, name="OutlinePim")
class OutlinePim:
    """Outline products, with the slicing and padding in front of them, as functions for ``relax.ext.pim``.

    The gather of GWRITE reads the layer's whole input and pads with zeros, so the operators that splits and
    `DecomposeToMatrixVector` put in front of a product become part of the function.

    Parameters
    ----------
    programs : mapping of str to PimProgram
        By name of the product's variable.

    Rewrite: ``matmul(gather(x), w) -> pim_name(x)``, a function with the program as an attribute. A grouped
    convolution has no gather: ``conv2d(x, w) -> pim_name(x)``. If the latches of a program start from values
    (`PimProgram.initial`), or the program adds a tensor (`PimProgram.added_channels`), the function includes
    the addition behind the product: ``add(matmul(gather(x), w), y) -> pim_name(x, y)``, without ``y`` if that
    is a constant. With both, it includes two additions. It also includes the activation behind them
    (`PimProgram.activation`).
    Preserves: values up to the storage type of the device, names.
    """

    def __init__(self, programs: Mapping[str, PimProgram]):
        self.programs = dict(programs)

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        chains = _epilogue_chains(
            mod, {name: _program_epilogue(program) for name, program in self.programs.items()}
        )
        inner_vars = {var for chain in chains.values() for var, _ in chain}

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            chain = chains.get(var, [])
            product = chain[-1][0] if chain else var
            program = self.programs.get(product.name)
            # A product with an addition is part of the function of the addition; by itself it is dead.
            if program is None or var in inner_vars or (operator(value) not in PRODUCTS and not chain):
                return None
            positions = [position for _, position in chain]
            sources, function = _outline(value, positions, _gather_depth(program), product.name, builder)
            name = symbol(product.name)
            attrs = {"Codegen": "pim", "global_symbol": name, PROGRAM_ATTR: program.to_json()}
            callee = builder.add_func(function.with_attrs(attrs), name)
            return builder.emit(relax.Call(callee, sources), name_hint=var.name)

        return rebuild(mod, rewrite)


# By activation of a program, the operator that it implements.
_ACTIVATIONS = {"relu": "nn.relu", "relu6": "clip"}


def _program_epilogue(program: PimProgram) -> tuple[str, ...]:
    """The operators behind its product that a program implements."""
    additions = bool(program.initial) + bool(program.added_channels)
    return ("add",) * additions + ((_ACTIVATIONS[program.activation],) if program.activation else ())


# From the last operator behind a product back to the product: each operand and its position.
_Chain = list[tuple[relax.Var, int]]


def _epilogue_chains(mod: tvm.IRModule, epilogues: Mapping[str, tuple[str, ...]]) -> dict[relax.Var, _Chain]:
    """By variable of the last operator behind a product, the chain from it back to the product.

    `epilogues` has the operators behind each product by its name (`_program_epilogue`).

    Raises
    ------
    PlanError
        If other operators follow such a product, or if it, or a result between, has other readers.
    """
    if not any(epilogues.values()):
        return {}
    counts, bindings = use_counts(mod), main_bindings(mod)
    products = {b.var for b in bindings if epilogues.get(b.var.name) and operator(b.value) in PRODUCTS}
    chains: dict[relax.Var, _Chain] = {product: [] for product in products}
    for binding in bindings:
        for position, read in enumerate(getattr(binding.value, "args", ())):
            if isinstance(read, relax.Var) and read in chains and counts[read] == 1:
                product = chains[read][-1][0] if chains[read] else read
                remaining = epilogues[product.name][len(chains[read]) :]
                if remaining[:1] == (operator(binding.value),):
                    chains[binding.var] = [(read, position), *chains.pop(read)]
    complete = {
        var: chain
        for var, chain in chains.items()
        if chain and len(chain) == len(epilogues[chain[-1][0].name])
    }
    if missing := sorted({p.name for p in products} - {chain[-1][0].name for chain in complete.values()}):
        missing_operators = ", ".join(epilogues[missing[0]])
        raise PlanError(
            f"'{missing[0]}': its program does {missing_operators} after it, but the network does not"
        )
    return complete


def _gather_depth(program: PimProgram) -> int:
    """How many operators between the layer's input and the windows become part of the function.

    These are the operators of `SplitMdDp` or `SplitAxis` and of `DecomposeToMatrixVector`: slice, padding, a
    slice for each tap, and their concatenation, as far as the convolution needs them. A grouped convolution
    needs only the slice. A slice of channels (a split reduction) is not in the program, and not counted.
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


def _is_channel_slice(value: relax.Expr | None) -> bool:
    """Whether `value` is a slice of channels, as a split reduction has for PIM."""
    begin = slice_begin(value) if operator(value) == "strided_slice" else None
    return begin is not None and begin[0] == len(shape(value.args[0])) - 1


def _outline(
    value: relax.Call, positions: Sequence[int], depth: int, name: str, outer: relax.BlockBuilder
) -> tuple[list[relax.Var], relax.Function]:
    """Operands of the function of product `name`, with the operators behind it, and the function.

    The operands are the tensor from which the product gathers by `depth` operators, and the tensors that are
    added to it; constants stay inside. `positions` are those of the operands that lead from the last operator
    `value` back to the product.
    """
    gathers: dict[relax.Var, relax.Expr] = {}

    def visit(var: relax.Var, depth: int) -> relax.Var:
        """The tensor from which `var` is gathered by `depth` operators; collects these."""
        value = outer.lookup_binding(var)
        part = depth == 0 and var.name == name + INPUT_SUFFIX and _is_channel_slice(value)
        if depth == 0 and not part:
            return var
        (root,) = {visit(v, max(depth - 1, 0)) for v in relax.analysis.free_vars(value)}
        gathers.setdefault(var, value)
        return root

    product, steps = value, []
    for position in positions:
        steps.append((product, position))
        product = outer.lookup_binding(product.args[position])
    steps.reverse()
    added = [call.args[1 - position] for call, position in steps if operator(call) == "add"]
    source = visit(product.args[0], depth)
    sources = [source, *(operand for operand in added if isinstance(operand, relax.Var))]
    builder = relax.BlockBuilder()
    params = [relax.Var(name, operand.ty) for name, operand in zip("xyz", sources)]
    starts = iter(params[1:])
    env: dict[relax.Var, relax.Expr] = {source: params[0]}
    with builder.function("outlined", params):
        with builder.dataflow():
            for var, gather in gathers.items():
                env[var] = builder.emit(substitute(gather, env))
            result = substitute(product, env)
            for call, position in steps:
                before = builder.emit(result)
                if operator(call) == "add":
                    operand = call.args[1 - position]
                    result = relax.op.add(before, next(starts) if isinstance(operand, relax.Var) else operand)
                else:
                    result = substitute(call, {call.args[position]: before})
            result = builder.emit_output(result)
        builder.emit_func_output(result)
    return sources, builder.get()["outlined"]
