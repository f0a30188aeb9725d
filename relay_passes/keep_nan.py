"""Signs, clamps, maxima and minima that are right for NaN, infinities and bool; TVM's kernels are not.

They are as fast: on CPUs they are the same instructions with operands in another order.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence

import tvm
import tvm_ffi
from tvm import relax, te, tirx, topi

from pimflow.relay_passes.flat import bare_operator


def relu(value: tirx.Expr) -> tirx.Expr:
    """``max(value, 0)``; NaN for NaN."""
    zero = tirx.const(0, value.ty.dtype)
    return tirx.Select(value < zero, zero, value)


def clamp(value: tirx.Expr, low: float, high: float) -> tirx.Expr:
    """``min(max(value, low), high)``; NaN for NaN."""
    lower, upper = (tirx.const(bound, value.ty.dtype) for bound in (low, high))
    return tirx.Select(value > upper, upper, tirx.Select(value < lower, lower, value))


def larger(a: tirx.Expr, b: tirx.Expr) -> tirx.Expr:
    """``max(a, b)``; NaN if one of them is."""
    return tirx.Select(a < b, b, tirx.Select(a >= b, a, a + b))


def smaller(a: tirx.Expr, b: tirx.Expr) -> tirx.Expr:
    """``min(a, b)``; NaN if one of them is."""
    return tirx.Select(a > b, b, tirx.Select(a <= b, a, a + b))


def sign(value: tirx.Expr) -> tirx.Expr:
    """-1, 0 or 1; NaN for NaN."""
    unit, zero = tirx.const(1, value.ty.dtype), tirx.const(0, value.ty.dtype)
    if "uint" in str(value.ty.dtype):
        return tirx.Select(value > zero, unit, zero)
    # Both comparisons are false for NaN and 0, which are their own signs.
    return tirx.Select(value > zero, unit, tirx.Select(value < zero, -unit, value))


def elementwise(formula: Callable[[tirx.Expr], tirx.Expr], name: str) -> Callable:
    """A legalisation rule for `relax.transform.LegalizeOps`: `formula` on each element of one tensor."""

    def kernel(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        """The kernel of `call`."""

        def compute(x: te.Tensor) -> te.Tensor:
            return te.compute(x.shape, lambda *index: formula(x(*index)), name=name, tag="elemwise")

        return builder.call_te(compute, call.args[0], primfunc_name_hint=name)

    return kernel


def _clip(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    low, high = (float(bound.value) for bound in call.args[1:])
    return elementwise(lambda value: clamp(value, low, high), "clip")(builder, call)


def _leakyrelu(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """TVM's kernel; `relu` for slope 0, since TVM gives NaN for -infinity then."""
    if call.attrs.alpha:
        return builder.call_te(topi.nn.leaky_relu, call.args[0], call.attrs.alpha)
    return elementwise(relu, "leaky_relu")(builder, call)


def _binary_kernel(floats: Callable, others: Callable, name: str) -> Callable:
    """A legalisation rule for two operands, one maybe a number; `others` is the formula for integers."""

    def kernel(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        """The kernel of `call`."""
        dtype = str(call.ty.dtype)
        formula = floats if dtype.startswith("float") else others
        numbers = [_number(arg) for arg in call.args]

        def with_number(x: te.Tensor) -> te.Tensor:
            """The formula of a tensor and the constant number."""
            number = tirx.const(next(value for value in numbers if value is not None), dtype)
            return te.compute(x.shape, lambda *index: formula(x(*index), number), name=name, tag="elemwise")

        def broadcast_pair(a: te.Tensor, b: te.Tensor) -> te.Tensor:
            """The formula of two tensors, which are broadcast."""
            places = topi.add(a, b).shape
            a, b = (topi.broadcast_to(tensor, places) for tensor in (a, b))
            return te.compute(places, lambda *i: formula(a(*i), b(*i)), name=name, tag="broadcast")

        tensors = [arg for arg, number in zip(call.args, numbers) if number is None]
        if len(tensors) == 1:
            return builder.call_te(with_number, *tensors, primfunc_name_hint=name)
        return builder.call_te(broadcast_pair, *call.args, primfunc_name_hint=name)

    return kernel


def _number(expr: relax.Expr) -> float | None:
    """The value of a constant without axes; None for other expressions."""
    if not isinstance(expr, tvm.ir.GenericConst) or expr.ty.ndim:
        return None
    return float(expr.value.numpy())


def _extreme(formula: Callable, sign: int, name: str) -> Callable:
    """A legalisation rule for a maximum or minimum along axes; TVM's begins at the least finite number."""

    def kernel(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        """The kernel of `call`."""
        x, dtype = call.args[0], str(call.args[0].ty.dtype)
        if not dtype.startswith("float"):
            function = topi.max if sign > 0 else topi.min

            def reduce_integers(tensor: te.Tensor) -> te.Tensor:
                """TVM's reduction; it has none of bool."""
                wide = topi.cast(tensor, "int8") if dtype == "bool" else tensor
                return topi.cast(function(wide, call.attrs.axis, call.attrs.keepdims), dtype)

            return builder.call_te(reduce_integers, x, primfunc_name_hint=name)
        dims = [int(size) for size in x.ty.shape]
        axes = range(len(dims)) if call.attrs.axis is None else [int(a) % len(dims) for a in call.attrs.axis]
        reducer = te.comm_reducer(formula, lambda kind: tirx.const(-sign * float("inf"), kind), name=name)

        def reduce(tensor: te.Tensor) -> te.Tensor:
            """The reduction."""
            reduced = {axis: te.reduce_axis((0, dims[axis]), f"k{axis}") for axis in axes}
            kept = [axis for axis in range(len(dims)) if axis not in reduced or call.attrs.keepdims]

            def element(*index: tirx.Var) -> tirx.Expr:
                """An element of the result."""
                place = dict(zip(kept, index)) | reduced
                return reducer(
                    tensor(*(place[axis] for axis in range(len(dims)))), axis=list(reduced.values())
                )

            return te.compute([1 if axis in reduced else dims[axis] for axis in kept], element, name=name)

        return builder.call_te(reduce, x, primfunc_name_hint=name) if axes else x

    return kernel


def _extreme_place(sign: int, name: str) -> Callable:
    """A legalisation rule for the first place of a maximum or minimum along an axis, or of all elements.

    As in ONNX Runtime, NaN counts in the first place alone. TVM's kernel has no place for the least number,
    and one of ours that reduces values and places at once has no schedule in which threads share it.
    """

    def kernel(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        """The kernel of `call`."""
        dims, place_type = [int(size) for size in call.args[0].ty.shape], str(call.ty.dtype)
        axis = None if call.attrs.axis is None else int(call.attrs.axis) % len(dims)

        def places(tensor: te.Tensor) -> te.Tensor:
            """The places, in the shape of the call."""
            flat = topi.reshape(tensor, [math.prod(dims)]) if axis is None else tensor
            result = _first_places(flat, axis or 0, sign, place_type, name)
            target = [int(size) for size in call.ty.shape]
            return result if [int(s) for s in result.shape] == target else topi.reshape(result, target)

        return builder.call_te(places, call.args[0], primfunc_name_hint=name)

    return kernel


def _first_places(tensor: te.Tensor, axis: int, sign: int, place_type: str, name: str) -> te.Tensor:
    """The least place along `axis` that has the extreme value; of one element if that is the only axis."""
    dtype, rank = str(tensor.dtype), len(tensor.shape)
    shape = [size for i, size in enumerate(tensor.shape) if i != axis] or [1]
    nowhere, first = tirx.max_value(place_type), tirx.const(0, place_type)
    k, place = (te.reduce_axis((0, tensor.shape[axis]), axis_name) for axis_name in ("k", "place"))

    def value(index: tuple[tirx.Var, ...], number: tirx.Var) -> tirx.Expr:
        """An element, in place of NaN one that is extreme in the first place and nowhere else."""
        element = tensor(*index[:axis], number, *(index[axis:] if rank > 1 else ()))
        if not dtype.startswith("float"):
            return element
        best, worst = (tirx.const(end * float("inf"), dtype) for end in (sign, -sign))
        return tirx.Select(tirx.isnan(element), tirx.Select(number == 0, best, worst), element)

    def first_place(*index: tirx.Var) -> tirx.Expr:
        """The least place of the extreme value."""
        is_there = value(index, place.var) == values(*index)
        return te.min(tirx.Select(is_there, tirx.Cast(place_type, place.var), nowhere), axis=place)

    extreme = te.max if sign > 0 else te.min
    values = te.compute(shape, lambda *index: extreme(value(index, k.var), axis=k), f"{name}_value")
    places = te.compute(shape, first_place, name)
    # Where all are infinite, none is as large as the finite number with which a maximum begins.
    return te.compute(
        shape,
        lambda *index: tirx.Select(places(*index) == nowhere, first, places(*index)),
        f"{name}_place",
    )


def _max_pool(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """A pooling kernel that keeps NaN, and whose padding is less than all numbers."""
    x, attrs = call.args[0], call.attrs
    dims, result_dims = ([int(size) for size in value.ty.shape] for value in (x, call))
    axes = [attrs.layout.index(axis) for axis in "DHW" if axis in attrs.layout]
    windows, strides, dilations, pads = (
        [int(size) for size in sizes]
        for sizes in (attrs.pool_size, attrs.strides, attrs.dilation, attrs.padding)
    )
    before, after = [0] * len(dims), [0] * len(dims)
    for place, axis in enumerate(axes):
        reach = (result_dims[axis] - 1) * strides[place] + (windows[place] - 1) * dilations[place] + 1
        before[axis], after[axis] = pads[place], max(0, reach - dims[axis] - pads[place])
    dtype = str(x.ty.dtype)
    least = tirx.const(-float("inf"), dtype) if dtype.startswith("float") else tirx.min_value(dtype)
    combine = larger if dtype.startswith("float") else lambda a, b: tirx.max(a, b)
    reducer = te.comm_reducer(combine, lambda _: least, name="max")

    def pool(tensor: te.Tensor) -> te.Tensor:
        """The maxima of windows."""
        if any(before) or any(after):
            tensor = topi.nn.pad(tensor, before, after, least)
        offsets = [te.reduce_axis((0, size), f"k{place}") for place, size in enumerate(windows)]

        def element(*index: tirx.Var) -> tirx.Expr:
            """An element of the result."""
            places = list(index)
            for axis, offset, stride, dilation in zip(axes, offsets, strides, dilations, strict=True):
                places[axis] = index[axis] * stride + offset * dilation
            return reducer(tensor(*places), axis=offsets)

        return te.compute(result_dims, element, name="pool_max")

    return builder.call_te(pool, x, primfunc_name_hint=bare_operator(call))


def _equal(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """TVM's kernel; LLVM has no comparison of one bit, so that bool is compared as int8."""
    function = topi.equal if call.op.name == "relax.equal" else topi.not_equal
    if str(call.args[0].ty.dtype) != "bool":
        return builder.call_te(function, *call.args, primfunc_name_hint="equal")

    def compare(a: te.Tensor, b: te.Tensor) -> te.Tensor:
        """The comparison."""
        return function(topi.cast(a, "int8"), topi.cast(b, "int8"))

    return builder.call_te(compare, *call.args, primfunc_name_hint="equal")


def _register_extremes() -> None:
    """Let schedules share the reductions of `_extreme` among threads, as they do TVM's own."""
    register = tvm_ffi.get_global_func("s_tir.schedule.RegisterReducer")
    for formula, direction in ((larger, 1), (smaller, -1)):

        def combiner(lhs: Sequence[tirx.Var], rhs: Sequence[tirx.Var], formula: Callable = formula) -> list:
            return [formula(lhs[0], rhs[0])]

        def identity(values: Sequence[tirx.Expr], direction: int = direction) -> list:
            return [tirx.const(-direction * math.inf, values[0].ty.dtype)]

        functions = [tvm_ffi.convert(function) for function in (combiner, identity)]
        for function in functions:  # TVM drops its references when Python has ended already
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(function))
        register(1, *functions)


_register_extremes()
LEGAL = {
    "relax.sign": elementwise(sign, "sign"),
    "relax.nn.relu": elementwise(relu, "relu"),
    "relax.nn.leakyrelu": _leakyrelu,
    "relax.clip": _clip,
    "relax.maximum": _binary_kernel(larger, tirx.max, "maximum"),
    "relax.minimum": _binary_kernel(smaller, tirx.min, "minimum"),
    **{f"relax.nn.max_pool{rank}d": _max_pool for rank in (1, 2, 3)},
    "relax.max": _extreme(larger, 1, "max"),
    "relax.min": _extreme(smaller, -1, "min"),
    "relax.argmax": _extreme_place(1, "argmax"),
    "relax.argmin": _extreme_place(-1, "argmin"),
    "relax.equal": _equal,
    "relax.not_equal": _equal,
}
