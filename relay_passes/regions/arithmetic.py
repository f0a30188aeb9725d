"""What the operators of a region compute: matrix products and other operations, counted in TIR.

Each operator is lowered separately, as by `LegalizeOps`, and the operations in its loops are counted. A block
that adds products of two tensors to its result, ``c += a * b``, is a matrix product. Its axes say its sizes:

    axes of `a` and the result: rows (M)      axes of `b` and the result: columns (N)
    axes of `a` and `b`: reduction (K)        axes of all three: products of their own, such as groups

All else counts as one operation for each addition, multiplication, comparison or function of an element.
Copies, padding and index arithmetic count as none. Operators that TVM lowers only for a target, such as sorts
and scans, count as none either: their kernels are modelled as streams of their operands.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx

from pimflow.core.kernel import Product
from pimflow.errors import UnsupportedOpError, last_line
from pimflow.host import stderr
from pimflow.relay_passes import grid_sample, keep_nan
from pimflow.relay_passes.flat import operator, shape
from pimflow.relay_passes.operators import LOOKUP

_COMPARISONS = (tirx.Max, tirx.Min, tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)
_OPERATIONS = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, *_COMPARISONS)
# Calls that choose or reinterpret a value.
_NO_OPERATION = ("prim.if_then_else", "prim.reinterpret", "prim.likely")


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """The arithmetic of a kernel.

    Attributes
    ----------
    operations : int
        All other operations, those of smaller products included.
    multiplications : int
        How many of `operations` are multiplications or divisions.
    """

    product: Product | None = None
    operations: int = 0
    multiplications: int = 0


def arithmetic(bindings: Sequence[relax.VarBinding]) -> Arithmetic:
    """The arithmetic of several operators together; calls of other functions count as none."""
    products: list[Product] = []
    operations = multiplications = 0
    lookups = {b.var: math.prod(shape(b.var)) for b in bindings if operator(b.value) == LOOKUP}
    for binding in bindings:
        kind = operator(binding.value)
        if not kind:
            continue
        count = _operator_count(tvm_ffi.StructuralKey(_single_operator(binding.value)))
        op_products = count.products
        if kind.startswith("nn.conv") and kind.endswith("_transpose"):
            op_products = [_dense_product(binding.value, product) for product in op_products]
        constants = [a.value.shape for a in binding.value.args if isinstance(a, tvm.ir.GenericConst)]
        sizes = {math.prod(dims) for dims in constants}
        sizes |= {lookups[arg] for arg in binding.value.args if arg in lookups}
        products += [replace(product, weighted=product.second_elements in sizes) for product in op_products]
        operations += count.operations
        multiplications += count.multiplications
    products.sort(key=lambda product: product.macs)
    largest = products.pop() if products else None
    scalar = sum(product.macs for product in products)
    return Arithmetic(
        product=largest, operations=operations + scalar, multiplications=multiplications + scalar
    )


def _dense_product(call: relax.Call, product: Product) -> Product:
    """The product of a transposed convolution without the zeros that TIR inserts between its elements.

    Each element is multiplied by all taps. As in `SubpixelConvolution`, each phase of the result has separate
    taps, hence separate columns, if the stride divides the taps.
    """
    channels = product.k // product.window  # of a group
    phases = math.prod(int(stride) for stride in call.attrs.strides)
    phases = phases if product.window % phases == 0 else 1
    return Product(
        many=product.many,
        m=math.prod(shape(call.args[0])) // (product.many * channels),
        n=product.n * phases,
        k=product.k // phases,
        window=product.window // phases,
    )


@functools.lru_cache(maxsize=1 << 12)
def _operator_count(source: tvm_ffi.StructuralKey) -> _OperationCount:
    """Operations of a function of one operator; equal functions are lowered once."""
    count = _OperationCount()
    module = relax.transform.Normalize()(tvm.IRModule({"main": source.key}))
    for _, function in _kernel_module(module).functions_items():
        if isinstance(function, tirx.PrimFunc):
            count.add(function.body)
    return count


def _kernel_module(module: tvm.IRModule) -> tvm.IRModule:
    """The kernels of `module`: TVM's, or ours where it has none, as for extremes of bool."""
    with stderr.hidden():
        try:
            return relax.transform.LegalizeOps()(module)
        except tvm.error.InternalError:
            pass
        try:
            return relax.transform.LegalizeOps(keep_nan.LEGAL | grid_sample.LEGAL)(module)
        except tvm.error.InternalError as error:
            raise UnsupportedOpError(f"TVM has no kernel for an operator: {last_line(error)}") from error


def _single_operator(call: relax.Call) -> relax.Function:
    """A function with one operator; constant tensors become parameters, since their values do not matter."""
    params: list[relax.Var] = []

    def operand(arg: relax.Expr) -> relax.Expr:
        """The parameter for `arg`; values that are no tensors stay."""
        if isinstance(arg, relax.Tuple):
            return relax.Tuple([operand(field) for field in arg.fields])
        if isinstance(arg, relax.Var | tvm.ir.GenericConst) and isinstance(arg.ty, relax.TensorType):
            params.append(relax.Var(f"p{len(params)}", arg.ty))
            return params[-1]
        return arg

    copy = relax.Call(call.op, [operand(arg) for arg in call.args], call.attrs, call.ty_args)
    relax.expr._update_type(copy, call.ty)  # else lowering would change it, and with it the key
    return relax.Function(params, copy, call.ty)


class _OperationCount:
    """Counts the operations of TIR statements, without the initial values of sums."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.operations = 0
        self.multiplications = 0

    def add(self, stmt: tirx.Stmt, times: int = 1, block: s_tir.SBlock | None = None) -> None:
        """Count `stmt`, which is in `block` and is executed so many `times`."""
        if isinstance(stmt, tirx.For):
            extent = int(stmt.extent) if isinstance(stmt.extent, tirx.IntImm) else 1
            self.add(stmt.body, times * extent, block)
        elif isinstance(stmt, s_tir.SBlockRealize):
            self.add(stmt.block.body, times, stmt.block)
        elif isinstance(stmt, tirx.BufferStore):
            product = _product(stmt, block) if block is not None else None
            if product is not None:
                self.products.append(product)
            else:
                operations, multiplications, _ = _value_count(stmt.value)
                self.operations += times * operations
                self.multiplications += times * multiplications
        elif isinstance(stmt, tirx.SeqStmt):
            for part in stmt.seq:
                self.add(part, times, block)
        elif isinstance(stmt, tirx.IfThenElse):
            for part in filter(None, (stmt.then_case, stmt.else_case)):
                self.add(part, times, block)
        elif getattr(stmt, "body", None) is not None:
            self.add(stmt.body, times, block)


def _value_count(value: tirx.Expr) -> tuple[int, int, bool]:
    """Operations of a value, how many are multiplications, and whether it reads elements of tensors.

    A value that reads none is index arithmetic or a test for padding, and counts as no operation.
    """
    if isinstance(value, tvm.ir.TensorLoad):
        return 0, 0, True
    if isinstance(value, tvm.ir.Call):
        operands, counts = list(value.args), value.op.name not in _NO_OPERATION
    elif isinstance(value, tirx.Select):
        operands, counts = [value.condition, value.true_value, value.false_value], False
    elif isinstance(value, tirx.Cast):
        operands, counts = [value.value], False
    elif hasattr(value, "a"):
        operands = [value.a, value.b] if hasattr(value, "b") else [value.a]
        counts = isinstance(value, _OPERATIONS)
    else:
        return 0, 0, False
    parts = [_value_count(operand) for operand in operands]
    reads = any(part_reads for _, _, part_reads in parts)
    operations = sum(count for count, _, _ in parts) + (counts and reads)
    multiplies = reads and isinstance(value, tirx.Mul | tirx.Div)
    return operations, sum(count for _, count, _ in parts) + multiplies, reads


def _product(store: tirx.BufferStore, block: s_tir.SBlock) -> Product | None:
    """The matrix product that a TIR block computes; None if it computes something else."""
    value = store.value
    reduced = any(axis.iter_type == tirx.IterVar.CommReduce for axis in block.iter_vars)
    if not (reduced and isinstance(value, tirx.Add) and isinstance(value.b, tirx.Mul)):
        return None
    first, second = _load(value.b.a), _load(value.b.b)
    if first is None or second is None:
        return None
    sizes = {"many": 1, "m": 1, "n": 1, "k": 1}
    rows: list[tirx.Var] = []
    taps: list[tuple[tirx.Var, int]] = []
    is_matrix_product = (
        False  # False if both operands have all axes of the result: a sum of elementwise products
    )
    for axis in block.iter_vars:
        extent = int(axis.dom.extent)
        in_first, in_second = (_group(load.indices, axis.var) for load in (first, second))
        if axis.iter_type == tirx.IterVar.CommReduce:
            sizes["k"] *= extent
            taps.append((axis.var, extent))
        elif in_first and in_second:  # groups of rows, or of columns, share a product
            sizes["many"] *= extent // max(in_first, in_second)
            sizes["m"] *= in_second
            sizes["n"] *= in_first
            is_matrix_product |= max(in_first, in_second) > 1
        elif in_second:
            sizes["n"] *= extent
            is_matrix_product = True
        else:
            sizes["m"] *= extent
            rows.append(axis.var)
            is_matrix_product = True
    if not is_matrix_product:
        return None
    window = {var: extent for var, extent in taps if any(_is_window(i, rows, var) for i in first.indices)}
    stride = max((_step(index, var) for index in first.indices for var in rows), default=1)
    return Product(**sizes, window=math.prod(window.values()), stride=stride if window else 1)


def _load(value: tirx.Expr) -> tvm.ir.TensorLoad | None:
    while isinstance(value, tirx.Cast):
        value = value.value
    return value if isinstance(value, tvm.ir.TensorLoad) else None


def _group(indices: Sequence[tirx.Expr], var: tirx.Var) -> int:
    """How many consecutive values of axis `var` give the same indices; 0 if no index depends on it."""
    sizes: list[int] = []

    def visit(value: tirx.Expr, size: int) -> None:
        """Collect in `sizes` how many values of `var` give the same `value`."""
        if isinstance(value, tirx.Var):
            sizes.extend([size] if value.same_as(var) else [])
        elif isinstance(value, tirx.FloorDiv) and isinstance(value.b, tirx.IntImm):
            visit(value.a, size * int(value.b))
        elif hasattr(value, "a"):
            visit(value.a, size)
            visit(value.b, size)

    for index in indices:
        visit(index, 1)
    return min(sizes, default=0)


def _is_window(index: tirx.Expr, rows: Sequence[tirx.Var], tap: tirx.Var) -> bool:
    """Whether an index depends on `rows` of the result and on `tap`, as in a window."""
    return bool(_group([index], tap)) and any(_group([index], row) for row in rows)


def _step(index: tirx.Expr, var: tirx.Var) -> int:
    """Stride of an index along an axis; 1 where the expression does not show it."""
    if isinstance(index, tirx.Mul) and isinstance(index.b, tirx.IntImm) and index.a.same_as(var):
        return int(index.b)
    if isinstance(index, tirx.Add):
        return max(_step(index.a, var), _step(index.b, var))
    return 1
