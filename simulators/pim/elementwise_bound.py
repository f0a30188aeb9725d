"""Lower bounds of grouped convolutions on PIM, if a device multiplied them element by element.

Each is a lower bound of the time of programs that such a device could run, although no command of
`core.commands` expresses all of it. None of them is lowered, as dense products are. Compared with the GPU's
time, the bound says how much a lowering could gain at most, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pimflow.core.kernel import ConvGeometry
from pimflow.core.ranges import RangeMap
from pimflow.core.region import Region
from pimflow.hardware import PimSpec, System


@dataclass(frozen=True, kw_only=True)
class ElementwiseBound:
    """A method to compute a grouped convolution, and a lower bound of its time, launches included."""

    how: str
    lower_bound_ns: float


def elementwise_bounds(region: Region, system: System, submission_ns: float) -> list[ElementwiseBound]:
    """Methods to compute a grouped convolution on PIM, which are no candidates; none for other regions."""
    g = region.geometry
    if g is None or g.groups == 1 or not system.pim_channels:
        return []
    return [
        ElementwiseBound(how=method, lower_bound_ns=submission_ns + ns)
        for method, ns in _lower_bounds_ns(g, system)
    ]


def _lower_bounds_ns(g: ConvGeometry, system: System) -> Iterator[tuple[str, float]]:
    pim, channels = system.pim, system.pim_channels
    if not pim.elementwise_multiply:
        return
    elements = pim.elements_per_column(system.dtype)
    if pim.result_lanes == elements and pim.can_write:
        cycles = lane_cycles(g, pim, system.dtype, channels)
        yield "by lanes, inputs in the banks; no COMP names a column of the buffer", cycles * pim.tCK_ns
    elif pim.result_lanes == 1:
        # No adder sums what is multiplied element by element: all products go to the GPU.
        read, written = g.pixels * g.oc / elements, g.n * g.h * g.w * g.c / elements
        cycles = (written + g.reduction * read) * pim.timing["nBL"]
        launch_ns = system.gpu.launch_ns
        yield "by elementwise products, which the GPU adds", cycles * pim.tCK_ns / channels + launch_ns


def lane_cycles(g: ConvGeometry, pim: PimSpec, dtype: str, channels: int) -> float:
    """A lower bound of the cycles of a grouped convolution by lanes, with its inputs in the banks.

    A lane is an output channel. A column of a bank has the inputs of a pixel, one for each lane; a column of
    the buffer, which all banks read, the weights of these channels for one tap. So a bank takes a tile of
    pixels, and a result of each bank takes a COMP for each tap. WRITEs bring the inputs, since a GWRITE
    reaches all banks alike: with inputs in the buffer and weights in the banks, a COMP would serve only those
    banks whose pixel reads this input, by tap of the same number.

    Tiles are of equal size and evenly distributed over banks and channels. The bound counts COMPs, WRITEs,
    the delay until a sum can be read, and weights that do not fit a buffer. It does not count row changes,
    mode changes, refreshes and turnarounds.
    """
    tilings = ((rows, columns) for rows in _cuts(g.rows) for columns in _cuts(g.columns))
    return min(_tile_cycles(g, pim, dtype, channels, *tiling) for tiling in tilings)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """An output axis cut into parts of at most `longest` outputs, and the number of inputs of each part."""

    longest: int
    inputs: tuple[int, ...]


def _cuts(axis: RangeMap) -> Iterator[Cut]:
    """All cuts into equal parts: each length that gives fewer parts than the next smaller length."""
    extent = axis.output_extent
    for longest in sorted({-(-extent // parts) for parts in range(1, extent + 1)}):
        parts = (axis.inputs(begin, min(begin + longest, extent)) for begin in range(0, extent, longest))
        yield Cut(longest=longest, inputs=tuple(part.end - part.begin for part in parts))


def _tile_cycles(g: ConvGeometry, pim: PimSpec, dtype: str, channels: int, rows: Cut, columns: Cut) -> float:
    timing = pim.timing
    # With one latch, a sum is read before the next begins.
    wait_cycles = timing["nTREE"] if pim.accumulators == 1 else timing["nCCDS"]
    reloaded_columns = max(0, g.reduction - pim.global_buffers * pim.buffer_columns)
    result_cycles = (g.reduction - 1) * timing["nCCDS"] + wait_cycles + reloaded_columns * timing["nBL"]
    multiply_cycles = rows.longest * columns.longest * result_cycles
    tiles = g.n * len(rows.inputs) * len(columns.inputs)
    rounds = -(-tiles // pim.banks)  # of banks, for the channels of one column
    all_rounds = -(-g.oc // pim.elements_per_column(dtype)) * rounds
    # Each pixel has a column for each input channel of a group.
    pixel_cycles = g.c // g.groups * timing["nBL"]
    write_cycles = g.n * sum(rows.inputs) * sum(columns.inputs) * pixel_cycles * (all_rounds // rounds)
    min_write_cycles = tiles // rounds * min(rows.inputs) * min(columns.inputs) * pixel_cycles
    busiest_cycles = -(-all_rounds // channels) * (multiply_cycles + min_write_cycles)
    return max(busiest_cycles, (all_rounds * multiply_cycles + write_cycles) / channels)
