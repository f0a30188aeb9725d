"""How the tensors of a kernel share its traffic, where tensors lie in different memory channels.

A kernel uses all channels, but some of its tensors lie in only a part of them, so some channels have more
traffic than others. With a `balance` of ``b``, the busiest channels move ``b`` times the bytes that they
would move if all tensors were spread evenly. The kernel's demands of DRAM and L2 (`simulators.gpu.roofline`)
are then at most ``b`` times those with all channels, which are its demands with ``1 / b`` of the channels.
Time is a norm of the demands, hence convex in them: for one tiling, linear interpolation by the balance,
between the times with all and with some channels, is an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pimflow.core.kernel import Kernel
from pimflow.core.tensor_placement import ChannelSet
from pimflow.hardware.gpu import GpuSpec
from pimflow.simulators.gpu.machine import RooflineMachine, family
from pimflow.simulators.gpu.model import KernelCost

STEPS = 16  # equal parts of the weights, each of which lies in one set of channels or the other
_FIRST_SHARES = tuple(step / STEPS for step in range(STEPS + 1))


@dataclass(frozen=True, kw_only=True)
class TrafficShares:
    """Shares of tensors in a kernel's traffic, as pairs for DRAM and for the L2; each sums to 1.

    Attributes
    ----------
    read, weights, result, rest : (float, float)
        Inputs, rereads included; weights; the result; partial sums.
    tiled : bool
        Whether the L2 serves some operands several times, once for each tile.
    """

    read: tuple[float, float]
    weights: tuple[float, float]
    result: tuple[float, float]
    rest: tuple[float, float]
    read_bytes: int
    reread_share: float
    tiled: bool

    @classmethod
    def from_cost(cls, kernel: Kernel, cost: KernelCost, gpu: GpuSpec, dtype: str) -> TrafficShares:
        """The shares of a kernel that costs `cost` with all channels."""
        machine = RooflineMachine(gpu, dtype, family=family(kernel))
        factor = gpu.write_factor / machine["dram_write"]  # time of a written byte over a read one
        split = bool(cost.tile and cost.tile[2] > 1)
        unique_bytes = kernel.input_bytes + kernel.weight_bytes
        extra_bytes = max(cost.dram_bytes - unique_bytes - kernel.output_bytes * gpu.write_factor, 0.0)
        read, rest = (kernel.input_bytes, extra_bytes) if split else (kernel.input_bytes + extra_bytes, 0.0)
        dram = (read, kernel.weight_bytes, kernel.output_bytes * factor, rest)
        loads = max(cost.l2_bytes - kernel.output_bytes, 0.0)
        row_share = kernel.input_bytes / max(unique_bytes, 1)
        if cost.tile:
            rows, columns, _ = cost.tile
            row_share = rows / (rows + columns)
        l2 = (loads * row_share, loads * (1 - row_share), kernel.output_bytes, 0.0)
        shares = [[part / max(sum(parts), 1e-9) for part in parts] for parts in (dram, l2)]
        read_share, weights, result, rest_share = zip(*shares)
        return cls(
            read=read_share,
            weights=weights,
            result=result,
            rest=rest_share,
            read_bytes=kernel.input_bytes,
            reread_share=0.0 if split else extra_bytes / max(sum(dram), 1e-9),
            tiled=cost.tile is not None,
        )

    def share(self, read_bytes: int) -> float:
        """Upper bound on the share of an input tensor of `read_bytes` bytes in DRAM or L2 traffic."""
        part = min(read_bytes / max(self.read_bytes, 1), 1.0)
        # It is not known which input is read again, or by the most tiles: assume this one.
        from_dram = part * (self.read[0] - self.reread_share) + self.reread_share
        return min(max(from_dram, self.read[1] if self.tiled else part * self.read[1]), 1.0)

    def balance(
        self,
        sets: Mapping[ChannelSet, float],
        read_in: Mapping[ChannelSet, float],
        result_in: Mapping[ChannelSet, float],
    ) -> float:
        """Traffic of the busiest channels over the average of all channels, at least 1.

        Weights are divided between the sets so that it is minimal.

        Parameters
        ----------
        sets : mapping
            By set of channels (two disjoint sets), its share of all channels.
        read_in, result_in : mapping
            By set, the parts of the inputs, and of the result, that lie there.
        """
        first_set, _ = sets
        loads = [
            (
                self.read[kind] * read_in[channel_set],
                self.weights[kind],
                channel_set == first_set,
                self.result[kind] * result_in[channel_set],
                self.rest[kind] * share,
                share,
            )
            for kind in (0, 1)
            for channel_set, share in sets.items()
        ]
        best = math.inf
        for first_share in (sets[first_set], *_FIRST_SHARES):
            max_load, second_share = 1.0, 1 - first_share
            for read, weights, in_first, result, rest, share in loads:
                load = (read + weights * (first_share if in_first else second_share) + result + rest) / share
                if load > max_load:
                    max_load = load
            best = min(best, max_load)
        return best
