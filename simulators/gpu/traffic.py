"""How the tensors of a kernel share its traffic: for tensors that lie in different memory channels.

A kernel at all channels, some of whose tensors lie in a part of them, loads some channels more than others.
With a `balance` of ``b``, the channels with most to do move ``b`` times what they would of evenly spread
tensors: the kernel's demands of DRAM and L2 (`simulators.gpu.roofline`) are up to ``b`` times those at all
channels, which is what they are at ``1 / b`` of the channels. Time is a norm of demands, hence convex in
them: between all channels and some of them, it is at most as much further as the balance is, for one tiling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pimflow.core.region import Kernel
from pimflow.hardware.gpu import GpuSpec
from pimflow.simulators.gpu.machine import RooflineMachine, family
from pimflow.simulators.gpu.model import KernelCost

STEPS = 16  # parts of the weights that are placed in one set of channels or the other
_FIRSTS = tuple(step / STEPS for step in range(STEPS + 1))


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Shares of a kernel's traffic with DRAM, and of that through the L2: pairs that add up to 1 each.

    Attributes
    ----------
    read, weights, result, rest : (float, float)
        What is read beside weights, that again too; weights; the result; partial sums.
    read_bytes : int
        Unique bytes of `read`.
    again : float
        Share of DRAM's traffic that is read again.
    tiled : bool
        Whether the L2 hands some operands out several times, once for each tile.
    """

    read: tuple[float, float]
    weights: tuple[float, float]
    result: tuple[float, float]
    rest: tuple[float, float]
    read_bytes: int
    again: float
    tiled: bool

    @classmethod
    def of(cls, kernel: Kernel, cost: KernelCost, gpu: GpuSpec, dtype: str) -> Traffic:
        """That of a kernel which costs `cost` at all channels."""
        machine = RooflineMachine(gpu, dtype, family=family(kernel))
        factor = gpu.write_factor / machine["dram_write"]  # of a byte written, by the time that it takes
        split = bool(cost.tile and cost.tile[2] > 1)
        once = kernel.input_bytes + kernel.weight_bytes
        more = max(cost.dram_bytes - once - kernel.output_bytes * gpu.write_factor, 0.0)
        read, rest = (kernel.input_bytes, more) if split else (kernel.input_bytes + more, 0.0)
        dram = (read, kernel.weight_bytes, kernel.output_bytes * factor, rest)
        loads = max(cost.l2_bytes - kernel.output_bytes, 0.0)
        first = kernel.input_bytes / max(once, 1)
        if cost.tile:
            rows, columns, _ = cost.tile
            first = rows / (rows + columns)
        l2 = (loads * first, loads * (1 - first), kernel.output_bytes, 0.0)
        shares = [[part / max(sum(parts), 1e-9) for part in parts] for parts in (dram, l2)]
        read_share, weights, result, rest = zip(*shares)
        return cls(
            read=read_share,
            weights=weights,
            result=result,
            rest=rest,
            read_bytes=kernel.input_bytes,
            again=0.0 if split else more / max(sum(dram), 1e-9),
            tiled=cost.tile is not None,
        )

    def share(self, read_bytes: int) -> float:
        """The share of a tensor of so many bytes that is read, of DRAM's traffic or the L2's."""
        part = min(read_bytes / max(self.read_bytes, 1), 1.0)
        # Which of several operands is read again, or by most tiles, is not known: this one.
        from_dram = part * (self.read[0] - self.again) + self.again
        return min(max(from_dram, self.read[1] if self.tiled else part * self.read[1]), 1.0)

    def balance(
        self, sets: Mapping[str, float], read_in: Mapping[str, float], result_in: Mapping[str, float]
    ) -> float:
        """How many times more the channels with most to do have to do than on average, at least 1.

        Weights are placed where that makes it least.

        Parameters
        ----------
        sets : mapping
            By set of channels, of two that have no channel in common, which share of all channels it has.
        read_in, result_in : mapping
            By set, which part of what is read, and of the result, lies there.
        """
        one, _ = sets
        loads = [
            (
                self.read[kind] * read_in[each],
                self.weights[kind],
                each == one,
                self.result[kind] * result_in[each],
                self.rest[kind] * share,
                share,
            )
            for kind in (0, 1)
            for each, share in sets.items()
        ]
        best = math.inf
        for first in (sets[one], *_FIRSTS):
            most, second = 1.0, 1 - first
            for read, weights, is_first, result, rest, share in loads:
                load = (read + weights * (first if is_first else second) + result + rest) / share
                if load > most:
                    most = load
            best = min(best, most)
        return best
