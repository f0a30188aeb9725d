"""A lower bound of the time of a step of a language model: either device reads each weight and cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pimflow.core.kernel import ELEMENT_BYTES
from pimflow.core.region_graph import RegionGraph
from pimflow.hardware import System
from pimflow.simulators.pim.bound import min_read_ns
from pimflow.weight_types import WEIGHT_TYPES, plain_type


@dataclass(frozen=True, kw_only=True)
class ReadTimes:
    """The least time in which PIM, or the GPU, does all products with some weights or caches.

    PIM's is that of opening each row once (`min_read_ns`), the GPU's that of reading each byte once at the
    peak bandwidth of all channels, but for bytes that its model takes to be in the L2.
    """

    pim_ns: float
    gpu_ns: float

    def scale(self, times: float) -> ReadTimes:
        """The times of `times` as many bytes."""
        return ReadTimes(pim_ns=times * self.pim_ns, gpu_ns=times * self.gpu_ns)


def cache_times(
    elements: float, uses: float, kernels: int, system: System, cache_type: str | None = None
) -> ReadTimes:
    """The times for `elements` of caches, each multiplied `uses` times, in so many kernels of the GPU.

    Those of a `cache_type` of their own have its bits; their scales, which the GPU reads, are left out.
    """
    kind = plain_type(cache_type)
    element_bytes = WEIGHT_TYPES[kind].bits / 8 if kind else ELEMENT_BYTES[system.dtype]
    return ReadTimes(
        pim_ns=_pim_read_ns(elements, uses, (kind, None), system),
        gpu_ns=_gpu_read_ns(elements * element_bytes, kernels, system),
    )


def weight_times(graph: RegionGraph, uses: float, system: System) -> list[ReadTimes]:
    """The times for each of a network's products with weights, each weight multiplied `uses` times."""
    geometries = [region.geometry for region in graph.regions if region.geometry]
    return [
        ReadTimes(
            pim_ns=_pim_read_ns(g.oc * g.reduction, uses, (g.weights, g.activations), system),
            gpu_ns=_gpu_read_ns(g.filter_bytes(system.dtype), 1, system),
        )
        for g in geometries
    ]


def _pim_read_ns(elements: float, uses: float, types: tuple[str | None, str | None], system: System) -> float:
    """The least time of programs that multiply so many elements, by types of both operands; 0 without PIM."""
    weights, activations = types
    pim = system.pim.with_weights(weights, activations or system.dtype)
    operand = pim.operand(pim.weights, pim.activations)
    dtype, channels = operand.container if operand else system.dtype, system.pim_channels
    return min_read_ns(elements, uses, pim, dtype, channels) if channels else 0.0


def _gpu_read_ns(read_bytes: float, kernels: int, system: System) -> float:
    """The least time of kernels that read so many bytes together."""
    gpu = system.gpu
    resident_share = gpu.efficiency.get("l2_resident", 0.0)
    resident_bytes = kernels * resident_share * gpu.l2_bytes_per_channel * gpu.memory_channels
    return max(read_bytes - resident_bytes, 0.0) / (gpu.memory_channels * gpu.channel_bytes_per_ns)


def shared_bound_ns(parts: Iterable[ReadTimes], pim_share: float) -> float:
    """The least time in which PIM and the GPU together do all parts, each part divided between them at will.

    A channel computes or serves the GPU. So while PIM works, the GPU reads with the other channels, and its
    reads take at least their time with all channels and the share of PIM's time in these.

    Parameters
    ----------
    pim_share : float
        Share of the memory channels that has PIM; 0 if all products are the GPU's.
    """
    # PIM takes the parts at which it is best in relation to the GPU; at most one of them is divided.
    parts = sorted(parts, key=lambda part: part.pim_ns / part.gpu_ns if part.gpu_ns else float("inf"))
    pim_ns, gpu_ns = 0.0, sum(part.gpu_ns for part in parts)
    for part in parts if pim_share else ():
        saved_ns = part.gpu_ns - pim_share * part.pim_ns
        if saved_ns <= 0:
            break
        if pim_ns + part.pim_ns >= gpu_ns - saved_ns:
            share = (gpu_ns - pim_ns) / (part.pim_ns + saved_ns)
            return pim_ns + share * part.pim_ns
        pim_ns, gpu_ns = pim_ns + part.pim_ns, gpu_ns - saved_ns
    return max(pim_ns, gpu_ns)


def pim_share(system: System) -> float:
    """Share of the memory channels that has PIM."""
    return system.pim_channels / system.gpu.memory_channels
