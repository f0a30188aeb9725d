"""A layer as two, along what its products are summed over."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import relax

from pimflow.relay_passes.flat import operator
from pimflow.relay_passes.splits.split_parts import part_of, split_layers


@tvm.transform.module_pass(opt_level=0, name="SplitReduction")
class SplitReduction:
    """Split layers over one pixel so that each device sums some of the products.

    The sum of the two is an operator with an anchor: as an elementwise one it would join the kernel of
    the GPU's part, which would then wait for PIM.

    Parameters
    ----------
    gpu_channels : mapping of str to int
        By layer, how many input channels, the first ones, go to the GPU.

    Rewrite: ``matmul(x, w) -> sum(concat(matmul(x[:, :g], w[:g]), matmul(x[:, g:], w[g:]), axis=0))``, over
    the first axis, the same for ``conv2d`` of one pixel, parts named ``*__gpu`` and ``*__pim``.
    Preserves: values up to the order of sums, names of all else.

    Raises
    ------
    PlanError
        If a part would have no channels, or its input could not lie inside the layer's.
    """

    def __init__(self, gpu_channels: Mapping[str, int]):
        self.gpu_channels = dict(gpu_channels)

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        def operands(call, begin, end):
            x, filters = call.args
            return part_of(x, -1, begin, end), part_of(
                filters, 0 if operator(call) == "matmul" else -1, begin, end
            )

        def join(builder, parts, name):
            both = builder.emit(relax.op.concat(parts, axis=0), name_hint=f"{name}_parts")
            return relax.op.sum(both, axis=0, keepdims=True)

        return split_layers(mod, "reduction", self.gpu_channels, operands, join)
