"""Lower bounds on the time of a layer on DRAM-PIM that need no search, and share no code with the lowering.

`calibration.latency_bound` in scripts/ has the tighter bound that schedules are judged by.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

from pimflow.core.kernel import ConvGeometry
from pimflow.hardware import PimSpec


def dense_equivalents(
    geometry: ConvGeometry, pim: PimSpec, pixels: int | None
) -> Iterator[tuple[ConvGeometry, int, int]]:
    """Dense convolutions with the same number of products, each with its pixels and the gangs of a tile.

    A grouped convolution has its pixels once for each matrix: if all were of one matrix, it would take no
    longer.
    """
    pixels = geometry.pixels if pixels is None else pixels
    outputs = geometry.oc // geometry.groups
    for groups_per_matrix in range(1, geometry.groups + 1):
        # Groups that do not fit into one tile may as well be in several matrices.
        if geometry.groups % groups_per_matrix == 0 and (
            groups_per_matrix == 1 or groups_per_matrix * outputs <= pim.banks
        ):
            for gangs in range(1, pim.gangs + 1):
                if pim.gangs % gangs == 0:
                    yield (
                        geometry.dense(groups_per_matrix),
                        pixels * (geometry.groups // groups_per_matrix),
                        gangs,
                    )


@functools.lru_cache(maxsize=1 << 16)  # every search of a network calls it for parts of layers
def min_work_ns(
    geometry: ConvGeometry, pim: PimSpec, dtype: str, channels: int, pixels: int | None = None
) -> float:
    """A lower bound for programs of any loop order: products or results of the busiest channel.

    It holds for both timings. `pixels` are the output pixels to compute, all by default.
    """
    pim = pim.with_weights(geometry.weights, geometry.activations or dtype)
    n, elements = pim.timing, pim.elements_per_column(dtype)

    def cycles(layer: ConvGeometry, vectors: int) -> int:
        """Cycles of the busiest channel for a dense layer and so many vectors."""
        unit_cycles = max(-(-layer.reduction // elements) * n["nCCDS"], n["nBL"] * pim.readres_bursts(dtype))
        return -(-vectors * -(-layer.oc // pim.banks) // channels) * unit_cycles

    # With fewer gangs in a tile there are more units, so all gangs give the minimum.
    equivalents = (
        equivalent for equivalent in dense_equivalents(geometry, pim, pixels) if equivalent[-1] == pim.gangs
    )
    return min(cycles(layer, vectors) for layer, vectors, _ in equivalents) * pim.tCK_ns


def min_read_ns(elements: float, uses: float, pim: PimSpec, dtype: str, channels: int) -> float:
    """Lower bound on the time of any programs for products with so many weights, each row opened once.

    It counts a COMP for every column and use, and the change to each row, in the number of gangs that takes
    the least time. Refreshes are not counted: they may be served before a program, while the GPU works.

    Parameters
    ----------
    elements : float
        Weights, or elements of a cache, which rows hold without gaps.
    uses : float
        How often each is multiplied: number of requests, or of heads that share a cache.
    pim : PimSpec
        The device as it is for these weights (`PimSpec.with_weights`).
    """
    rows = elements / (channels * pim.banks * pim.elements_per_row(dtype))
    comps = uses * pim.columns_per_row * pim.timing["nCCDS"]
    return rows * min(count * (comps + cycles) for count, cycles in _row_switches(pim)) * pim.tCK_ns


@functools.lru_cache(maxsize=64)
def _row_switches(pim: PimSpec) -> tuple[tuple[int, int], ...]:
    """For programs on some of the gangs: by how much they take more rows, and cycles of a row change."""
    divisors = (count for count in range(1, pim.gangs + 1) if pim.gangs % count == 0)
    return tuple((count, replace(pim, gangs=pim.gangs // count).row_switch_cycles) for count in divisors)
