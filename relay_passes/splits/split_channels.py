"""A layer as two, along its output channels."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import relax

from pimflow.relay_passes.flat import operator
from pimflow.relay_passes.splits.split_parts import slice_axis, split_layers


@tvm.transform.module_pass(opt_level=0, name="SplitChannels")
class SplitChannels:
    """Split dense convolutions and fully connected layers so that each device has some of the filters.

    Parameters
    ----------
    gpu_channels : mapping of str to int
        By layer, how many output channels, the first ones, go to the GPU.

    Rewrite: ``conv2d(x, w) -> concat(conv2d(x, w[:g]), conv2d(x, w[g:]), axis=C)``, the same for ``matmul``,
    parts named ``*__gpu`` and ``*__pim``.
    Preserves: values bit by bit, names of all else.

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
            return x, slice_axis(filters, 1 if operator(call) == "matmul" else 0, begin, end)

        def join(builder, parts, name):
            return relax.op.concat(parts, axis=-1)

        return split_layers(mod, "channels", self.gpu_channels, operands, join)
