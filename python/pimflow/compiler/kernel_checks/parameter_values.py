"""Values of a kernel's parameters: drawn ones that no access of its plain loops leaves its bounds with."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm
import tvm_ffi
from tvm import ir, s_tir, sym, tirx

from pimflow.compiler.kernel_checks.kernels import ScheduledKernel
from pimflow.compiler.kernel_checks.launch import Purpose, deciding_variables, nodes
from pimflow.compiler.kernel_checks.threads import blank_value, is_floating
from pimflow.errors import UnsupportedOpError

WIDE_BITS = {4: 20, 8: 40}  # by bytes of an integer: of drawn ones, so that a kernel's sums have room
_QUOTIENTS = (tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod)


@dataclass(frozen=True)
class IntegerRange:
    """Integers from `low` to `high`, both included."""

    low: int
    high: int

    def intersection(self, other: IntegerRange) -> IntegerRange:
        """What both have; zero if they have nothing in common."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        return IntegerRange(low, high) if low <= high else ZERO

    def draw(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.int64]:
        """Integers of a narrow range as likely as one another; of a wide one, of all magnitudes."""
        if self.high - self.low < 1 << 16:
            return rng.integers(self.low, self.high, size, endpoint=True)
        magnitudes = np.exp2(rng.uniform(0, np.log2(self.high), size)).astype(np.int64)
        signs = rng.choice([-1, 1], size) if self.low < 0 else 1
        return np.clip(magnitudes * signs, self.low, self.high)


ZERO = IntegerRange(0, 0)


def parameter_values(
    kernel: ScheduledKernel, results: Collection[ir.Var], seed: int
) -> dict[ir.Var, npt.NDArray[Any]]:
    """By parameter of the scheduled kernel, a flat array: constants, drawn values, and blank results."""
    rng = np.random.default_rng(seed)
    ranges = integer_ranges(kernel)
    arrays: dict[ir.Var, npt.NDArray[Any]] = {}
    for index, parameter in enumerate(kernel.lowered.params):
        dtype = np.dtype(str(parameter.dtype))
        if not all(isinstance(extent, tirx.IntImm) for extent in parameter.shape):
            raise UnsupportedOpError(f"no meaning for the shape of {parameter.name}, which is no constant")
        size = math.prod(map(int, parameter.shape))
        if index in kernel.constants:
            values = kernel.constants[index].reshape(-1)
        elif parameter in results:
            values = np.full(size, blank_value(dtype))
        elif is_floating(dtype):
            values = rng.uniform(-1, 1, size)
        else:
            values = ranges[index].draw(rng, size)
        arrays[parameter] = values.astype(dtype)
    return arrays


def integer_ranges(kernel: ScheduledKernel) -> dict[int, IntegerRange]:
    """By parameter of integers, the values that it may have.

    An index lies within what it indexes, a divisor is positive, and a shift less than the bits of a type. An
    index of which that is not provable is zero.
    """
    ranges = {
        index: _type_range(np.dtype(str(parameter.dtype)))
        for index, parameter in enumerate(kernel.lowered.params)
        if not is_floating(np.dtype(str(parameter.dtype)))
    }
    if isinstance(kernel.plain, tirx.PrimFunc):
        return _PlainUses(kernel.plain).restrict(ranges)
    deciding = deciding_variables(kernel.lowered.body, Purpose.BOUNDS)
    return {
        index: ZERO if kernel.lowered.params[index] in deciding else whole for index, whole in ranges.items()
    }


def _type_range(dtype: np.dtype[Any]) -> IntegerRange:
    if dtype.kind == "b":
        return IntegerRange(0, 1)
    bits = WIDE_BITS.get(dtype.itemsize)
    if bits is None:
        limits = np.iinfo(dtype)
        return IntegerRange(int(limits.min), int(limits.max))
    return IntegerRange(0 if dtype.kind == "u" else -(1 << bits), 1 << bits)


class _PlainUses:
    """How the plain loops of a kernel use its parameters of integers."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self._body = func.body
        self._origins = self._find_origins(func)
        self._axes = dict(_axes(func.body))

    def restrict(self, ranges: dict[int, IntegerRange]) -> dict[int, IntegerRange]:
        """`ranges` without values that end in an access out of bounds, or in no value at all."""
        ranges = dict(ranges)

        def narrow(expr: ir.Expr, allowed: IntegerRange) -> None:
            for index in self._parameters(expr) & ranges.keys():
                ranges[index] = ranges[index].intersection(allowed)

        for access in nodes(self._body, ir.TensorLoad, tirx.BufferStore):
            buffer = access.source if isinstance(access, ir.TensorLoad) else access.buffer
            for expr, extent in zip(access.indices, buffer.shape):
                if parameters := self._parameters(expr) & ranges.keys():
                    whole = ranges[min(parameters)]
                    narrow(expr, self._index_range(expr, int(extent), whole))
        for quotient in nodes(self._body, *_QUOTIENTS):
            narrow(quotient.b, IntegerRange(1, 1 << 62))
        for shift in _shifts(self._body):
            narrow(shift, IntegerRange(0, 7))
        for loop in nodes(self._body, tirx.For):
            narrow(loop.extent, ZERO)
        return ranges

    def _find_origins(self, func: tirx.PrimFunc) -> dict[ir.Var, set[int]]:
        """By buffer or variable, the parameters that its values come from."""
        origins = {parameter: {index} for index, parameter in enumerate(func.params)}
        targets = [(store.buffer, store.value) for store in nodes(func.body, tirx.BufferStore)]
        targets += [(bind.var, bind.value) for bind in nodes(func.body, tirx.Bind, tirx.Let)]
        is_changed = True
        while is_changed:
            is_changed = False
            for variable, value in targets:
                own = origins.setdefault(variable, set())
                new = {i for v in nodes(value, ir.Var) for i in origins.get(v, ())} - own
                own |= new
                is_changed |= bool(new)
        return origins

    def _parameters(self, expr: ir.Expr) -> set[int]:
        """The parameters that the value of an expression comes from."""
        return {index for variable in nodes(expr, ir.Var) for index in self._origins.get(variable, ())}

    def _index_range(self, index: ir.Expr, extent: int, whole: IntegerRange) -> IntegerRange:
        """Values of what an index reads with which it lies below `extent`, whatever its axes are."""
        loads: list[tirx.Var] = []

        def replace_load(load: ir.Expr) -> tirx.Var:
            """A variable in place of what a load gives."""
            loads.append(tirx.Var("value", str(load.ty).removeprefix("T.")))
            return loads[-1]

        expr = tvm_ffi.structural_map(index, [(ir.TensorLoad, replace_load)])
        for allowed in (whole, IntegerRange(-extent, extent - 1), IntegerRange(0, extent - 1)):
            bound = self._bound(expr, loads, allowed)
            if bound.low >= 0 and bound.high < extent:
                return allowed
        slack = bound.high - extent + 1  # what other parts of the index add
        allowed = IntegerRange(0, extent - 1 - slack)
        if bound.low < 0 or allowed.high < 0:
            return ZERO
        bound = self._bound(expr, loads, allowed)
        return allowed if bound.low >= 0 and bound.high < extent else ZERO

    def _bound(self, expr: ir.Expr, loads: list[tirx.Var], allowed: IntegerRange) -> IntegerRange:
        analyzer = sym.Analyzer()
        for axis, extent in self._axes.items():
            analyzer.bind(axis, tvm.ir.Range.from_min_extent(0, extent))
        for load in loads:
            dtype = str(load.ty).removeprefix("T.")
            low, high = (tirx.const(value, dtype) for value in (allowed.low, allowed.high + 1))
            analyzer.bind(load, tvm.ir.Range(low, high))
        bound = analyzer.const_int_bound(analyzer.simplify(expr))
        return IntegerRange(int(bound.min_value), int(bound.max_value))


def _axes(body: tirx.Stmt) -> Iterator[tuple[ir.Var, int]]:
    """The axes of loops and blocks, and their extents."""
    for loop in nodes(body, tirx.For):
        if isinstance(loop.extent, tirx.IntImm):
            yield loop.loop_var, int(loop.extent)
    for block in nodes(body, s_tir.SBlock):
        for axis in block.iter_vars:
            if isinstance(axis.dom.extent, tirx.IntImm):
                yield axis.var, int(axis.dom.extent)


def _shifts(body: tirx.Stmt) -> Iterator[ir.Expr]:
    """By how many bits something is shifted."""
    for node in nodes(body, tirx.LShift, tirx.RShift):
        yield node.b
    for call in nodes(body, ir.Call):
        if str(call.op.name).rpartition(".")[2] in ("shift_left", "shift_right"):
            yield call.args[1]
