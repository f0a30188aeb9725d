"""A lower bound of the time of a step of a language model: either device reads its weights and caches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pimflow.core.region import ELEMENT_BYTES, RegionGraph
from pimflow.hardware import System
from pimflow.simulators.pim.bound import row_limited_ns


@dataclass(frozen=True, kw_only=True)
class ReadTimes:
    """The least time in which PIM, or the GPU, does all products with some bytes.

    PIM's is that of opening each row once (`row_limited_ns`), the GPU's that of reading each byte once at the
    peak bandwidth of all channels.
    """

    pim_ns: float
    gpu_ns: float

    def scale(self, times: float) -> ReadTimes:
        """The times of `times` as many bytes."""
        return ReadTimes(pim_ns=times * self.pim_ns, gpu_ns=times * self.gpu_ns)


def read_times(read_bytes: float, uses: float, system: System) -> ReadTimes:
    """The times for `read_bytes` of weights or caches, each element multiplied `uses` times."""
    gpu = system.gpu
    return ReadTimes(
        pim_ns=row_limited_ns(read_bytes, uses, system.pim, system.pim_channels),
        gpu_ns=read_bytes / (gpu.memory_channels * gpu.channel_bytes_per_ns),
    )


def weight_times(graph: RegionGraph, uses: float, system: System) -> ReadTimes:
    """The times for a network's products with weights, each weight multiplied `uses` times."""
    geometries = [region.geometry for region in graph.regions if region.geometry]
    weight_bytes = sum(g.oc * g.reduction for g in geometries) * ELEMENT_BYTES[system.dtype]
    return read_times(weight_bytes, uses, system)


def shared_bound_ns(parts: Iterable[ReadTimes]) -> float:
    """The least time in which PIM and the GPU together do all parts, each part divided between them at will.

    PIM does the parts at which it is best in relation to the GPU; at most one part is divided.
    """
    parts = sorted(parts, key=lambda part: part.pim_ns / part.gpu_ns if part.gpu_ns else 0.0)
    pim_ns, gpu_ns = 0.0, sum(part.gpu_ns for part in parts)
    for part in parts:
        if pim_ns + part.pim_ns >= gpu_ns - part.gpu_ns:
            share = (gpu_ns - pim_ns) / (part.pim_ns + part.gpu_ns) if part.pim_ns + part.gpu_ns else 0.0
            return pim_ns + share * part.pim_ns
        pim_ns, gpu_ns = pim_ns + part.pim_ns, gpu_ns - part.gpu_ns
    return pim_ns
