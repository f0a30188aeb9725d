"""Group normalisation that is right for large means; TVM's subtracts squares, which cancel then."""

from __future__ import annotations

from tvm import relax, te, tirx, topi


def _group_norm(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """The legalisation rule for `relax.transform.LegalizeOps`: TVM's kernel of differences.

    Each element less the first one of its group has the same normalisation, and squares of its own size.
    """
    attrs, dims = call.attrs, [int(size) for size in call.args[0].ty.shape]
    channel_axis, groups = int(attrs.channel_axis) % len(dims), int(attrs.num_groups)
    axes = [int(axis) % len(dims) for axis in attrs.axes]
    channels = dims[channel_axis] // groups

    def normalise(x: te.Tensor, scale: te.Tensor, shift: te.Tensor) -> te.Tensor:
        """The normalised tensor."""

        def difference(*index: tirx.Var) -> tirx.Expr:
            """An element less the first of its group."""
            first = list(index)
            first[channel_axis] = tirx.floordiv(index[channel_axis], channels) * channels
            for axis in axes:
                first[axis] = tirx.const(0, index[axis].ty.dtype)
            return x(*index) - x(*first)

        differences = te.compute(x.shape, difference, name="difference")
        return topi.nn.group_norm(differences, scale, shift, groups, channel_axis, axes, attrs.epsilon)

    return builder.call_te(normalise, *call.args, primfunc_name_hint="group_norm")


LEGAL = {"relax.nn.group_norm": _group_norm}
