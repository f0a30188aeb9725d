"""A layer as two, along the reduction axis of its products."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import relax

from pimflow.relay_passes.flat import operator
from pimflow.relay_passes.splits.split_parts import slice_axis, split_layers


@tvm.transform.module_pass(opt_level=0, name="SplitReduction")
class SplitReduction:
    """Split dense convolutions and fully connected layers so that each device sums some of the products.

    The kernel that reads the result adds the two parts (`kernel_groups`): in the kernel of the GPU's part,
    the addition would wait for PIM.

    Parameters
    ----------
    gpu_channels : mapping of str to int
        By layer, how many input channels, the first ones, go to the GPU.

    Rewrite: ``conv2d(x, w) -> add(conv2d(x[..., :g], w[..., :g]), conv2d(x[..., g:], w[..., g:]))``, the same
    for ``matmul``, parts named ``*__gpu`` and ``*__pim``.
    Preserves: values up to the order of sums, names of all else.

    Raises
    ------
    PlanError
        If a part would have no channels, or the layer has groups.
    """

    def __init__(self, gpu_channels: Mapping[str, int]):
        self.gpu_channels = dict(gpu_channels)

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""

        def operands(call, begin, end):
            """Input and filters of a part."""
            x, filters = call.args
            return slice_axis(x, -1, begin, end), slice_axis(
                filters, 0 if operator(call) == "matmul" else -1, begin, end
            )

        def join(builder, parts, name):
            return relax.op.add(*parts)

        return split_layers(mod, "reduction", self.gpu_channels, operands, join)
