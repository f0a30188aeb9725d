"""Zero padding in front of convolutions, folded into the convolutions."""

from __future__ import annotations

import tvm
from tvm import relax

from pimflow.relay_passes.flat import main_bindings, operator, rebuild, shape, with_padding


@tvm.transform.module_pass(opt_level=0, name="FoldPadding")
class FoldPadding:
    """Fold zero padding in front of convolutions into the convolutions, which saves a copy.

    Only where no other operators read the padded tensor: otherwise it has to exist anyway. A convolution
    with windows that would lie entirely in padding stays unchanged.

    Rewrite: ``conv2d(pad(x, zeros), w, padding) -> conv2d(x, w, padding + zeros)``.
    Preserves: values bit by bit, names.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        padding = _foldable_padding(mod)
        if not padding:
            return mod

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            if var not in padding:
                return None
            (x, *_) = builder.lookup_binding(value.args[0]).args
            return with_padding(value, x, padding[var])

        return rebuild(mod, rewrite)


def _foldable_padding(mod: tvm.IRModule) -> dict[relax.Var, list[int]]:
    """Padding after the rewrite, for each convolution that can include the zeros in front of it."""
    bindings = main_bindings(mod)
    pads = {b.var: b.value for b in bindings if operator(b.value) == "nn.pad"}
    padding_of: dict[relax.Var, list[int]] = {}
    unfoldable = set(relax.analysis.free_vars(mod["main"].body.body))
    for binding in bindings if pads else ():
        read = pads.keys() & set(relax.analysis.free_vars(binding.value))
        call = binding.value
        first = call.args[0] if operator(call) == "nn.conv2d" else None
        padding = _padding(call, pads[first]) if first in read else None
        if padding is None or len(read) > 1 or first.same_as(call.args[1]):
            unfoldable |= read
        else:
            padding_of[binding.var] = padding
    values = {b.var: b.value for b in bindings}
    return {var: padding for var, padding in padding_of.items() if values[var].args[0] not in unfoldable}


def _padding(call: relax.Call, pad: relax.Call) -> list[int] | None:
    """Top, left, bottom and right padding of `call` with the zeros of `pad`; None if that cannot be."""
    widths, layout = [int(width) for width in pad.attrs.pad_width], str(call.attrs.data_layout)
    around = {axis: (widths[2 * index], widths[2 * index + 1]) for index, axis in enumerate(layout)}
    zeros = str(pad.attrs.pad_mode) == "constant" and float(pad.attrs.pad_value) == 0.0
    if len(layout) != 4 or not zeros or min(widths) < 0 or any(around[axis] != (0, 0) for axis in "NC"):
        return None
    before = [int(amount) for amount in call.attrs.padding]
    padding = [
        p + around[axis][end] for p, (axis, end) in zip(before, (("H", 0), ("W", 0), ("H", 1), ("W", 1)))
    ]
    kernel = dict(zip(str(call.attrs.kernel_layout), shape(call.args[1])))
    windows = [(kernel[axis] - 1) * int(d) + 1 for axis, d in zip("HW", call.attrs.dilation)]
    return padding if all(p < window for p, window in zip(padding, windows * 2)) else None
