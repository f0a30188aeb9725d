"""A layer as two, along the inferences of a batch."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import relax

from pimflow.relay_passes.splits.split_parts import slice_axis, split_layers


@tvm.transform.module_pass(opt_level=0, name="SplitBatch")
class SplitBatch:
    """Split convolutions and fully connected layers so that each device has some of the inferences.

    Parameters
    ----------
    gpu_inferences : mapping of str to int
        By layer, how many inferences, the first ones, go to the GPU.

    Rewrite: ``conv2d(x, w) -> concat(conv2d(x[:g], w), conv2d(x[g:], w), axis=N)``, the same for ``matmul``,
    parts named ``*__gpu`` and ``*__pim``.
    Preserves: values bit by bit, names of all else.

    Raises
    ------
    PlanError
        If a part would have no inferences.
    """

    def __init__(self, gpu_inferences: Mapping[str, int]):
        self.gpu_inferences = dict(gpu_inferences)

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""

        def operands(call, begin, end):
            """Input and filters of a part."""
            return slice_axis(call.args[0], 0, begin, end), call.args[1]

        def join(builder, parts, name):
            return relax.op.concat(parts, axis=0)

        return split_layers(mod, "batch", self.gpu_inferences, operands, join)
