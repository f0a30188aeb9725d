"""Samples of a map at places of a grid, also of a map of one row or column."""

from __future__ import annotations

from tvm import relax, te, topi


def _grid_sample(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """The legalisation rule for `relax.transform.LegalizeOps`: TVM's kernel.

    Its reflection divides by the distance of the corners, which is zero along an axis of one element if these
    are the corners. Twice that element has the same samples.
    """
    attrs = call.attrs
    corners = attrs.align_corners and attrs.padding_mode == "reflection"

    def sample(x: te.Tensor, grid: te.Tensor) -> te.Tensor:
        """The samples."""
        for axis in range(2, len(x.shape)) if corners else ():
            if int(x.shape[axis]) == 1:
                x = topi.repeat(x, 2, axis)
        return topi.image.grid_sample(
            x, grid, attrs.method, attrs.layout, attrs.padding_mode, attrs.align_corners
        )

    return builder.call_te(sample, *call.args, primfunc_name_hint="grid_sample")


LEGAL = {"relax.image.grid_sample": _grid_sample}
