"""Lower bounds on the time of a layer on DRAM-PIM, which share no code with the lowering.

The mapping space: a unit is one tile of output channels (the banks of the first gangs) for one output pixel;
its reduction lies in chunks, each in one row. A GWRITE puts the chunk of up to `w` pixels into one
buffer, where it is multiplied with `u` tiles before it is overwritten. A COMP needs its row open in every
gang of the tile, and its vector in a buffer. The products of a unit add up in the latch of that buffer, which
is read once. The order of the commands, and the units of each channel, are free. Timing is ``strict``;
docs/devices.md derives the terms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from pimflow.core.kernel import ConvGeometry
from pimflow.hardware import PimSpec
from pimflow.simulators.pim.bound import dense_equivalents


@dataclass(frozen=True, kw_only=True)
class LatencyBound:
    """A lower bound on the cycles of the busiest channel.

    Attributes
    ----------
    activation_cycles : int
        Cycles of row changes, during which no COMP can issue.
    bus_cycles : int
        Cycles of the bus: GWRITE and READRES bursts, turnarounds, and COMPs that wait for a latch to be read.
    refreshes : int
        Refreshes that fall due in these cycles and were not served ahead.
    gangs, tiles, tiles_per_write, pixels_per_write : int
        The mapping with this bound: gangs of a tile, tiles of the channel, `u` and `w`.
    """

    cycles: int
    comp_cycles: int
    activation_cycles: int
    bus_cycles: int
    refreshes: int
    gangs: int
    tiles: int
    tiles_per_write: int
    pixels_per_write: int


def row_limited_ns(row_bytes: float, uses: float, pim: PimSpec, channels: int) -> float:
    """Lower bound on the time for products with all rows of `channels` channels, each row opened once.

    It counts a COMP for every column and use, a row change after each row, and the share of refreshes. These
    limit products that use many weights few times, as decoding does.

    Parameters
    ----------
    row_bytes : float
        Bytes of weights, or of a cache, in whole rows.
    uses : float
        How often each weight is multiplied: number of requests, or of heads that share a cache.
    """
    rows = row_bytes / (channels * pim.banks * pim.columns_per_row * pim.column_bytes)
    comps = uses * pim.columns_per_row * pim.timing["nCCDS"]
    return rows * (comps + pim.row_switch_cycles) / (1 - pim.refresh_share) * pim.tCK_ns


def lower_bound(
    geometry: ConvGeometry, pim: PimSpec, dtype: str, channels: int, pixels: int | None = None
) -> LatencyBound:
    """The lower bound on the cycles of all programs of the mapping space, on `channels` channels.

    Parameters
    ----------
    geometry : ConvGeometry
        Convolution or FC; for a grouped one, it holds for any number of groups in a matrix.
    pixels : int, optional
        Output pixels to compute; all by default.
    """
    bounds = (
        channel.bound(*mapping) for channel, *mapping in _mappings(geometry, pim, dtype, channels, pixels)
    )
    return min(bounds, key=lambda bound: bound.cycles)


def simple_bound(
    geometry: ConvGeometry, pim: PimSpec, dtype: str, channels: int, pixels: int | None = None
) -> int:
    """The usual estimate in cycles: the larger of COMPs with row changes, and bus transfers.

    It leaves out turnarounds, latches and latencies, and counts refreshes by their average share of time. A
    short layer may have no refresh, so for it this is not a lower bound. Parameters as in `lower_bound`.
    """
    mappings = _mappings(geometry, pim, dtype, channels, pixels)
    slots = min(channel.simple_cycles(*mapping) for channel, *mapping in mappings)
    return math.ceil(slots / (1 - pim.refresh_share))


def _mappings(
    geometry: ConvGeometry, pim: PimSpec, dtype: str, channels: int, pixels: int | None
) -> Iterator[tuple[_Channel, int, int, int, int]]:
    """Every mapping: channel, units, tiles, `u` and `w`."""
    for layer, vectors, gangs in dense_equivalents(geometry, pim, pixels):
        channel = _Channel(layer, pim, dtype, gangs)
        units = -(-vectors * channel.tiles // channels)
        for tiles in range(-(-units // vectors), min(channel.tiles, units) + 1):
            max_tiles_per_write = (
                tiles if channel.chunks == 1 or channel.can_resume else min(tiles, pim.accumulators)
            )
            for tiles_per_write in range(1, max_tiles_per_write + 1):
                for slots in range(1, channel.slots + 1):
                    yield channel, units, tiles, tiles_per_write, slots


def mode_changes(pim: PimSpec, levels: tuple[str, ...]) -> tuple[int, int]:
    """Cycles beyond the transfer itself that a device needs to change between its bus and its banks and back.

    Only rules of `thresholds` count. The first is from the last COMP before a READRES to the first COMP
    after it, the second from a COMP to the next one with a GWRITE in between. Zero if READRESs and COMPs may
    come in any order.
    """

    def gap(before: str, after: str) -> int:
        """The largest gap that a rule requires between two commands."""
        rules = (rule for rule in pim.constraints if before in rule.before and after in rule.after)
        level_rules = (rule for rule in rules if rule.window == 1 and rule.level in levels)
        return max((pim.timing[rule.latency] for rule in level_rules), default=0)

    n = pim.timing
    if not all(itertools.starmap(gap, itertools.permutations(("GWRITE", "READRES", "COMP"), 2))):
        return 0, 0
    written = gap("GWRITE", "COMP") - n["nBL"]
    read = min(gap("READRES", "COMP"), gap("READRES", "GWRITE") + written)
    return (
        max(0, gap("COMP", "READRES") + read - n["nCCDS"]),
        max(0, gap("COMP", "GWRITE") + written - n["nCCDS"]),
    )


class _Channel:
    """Lower bounds for one channel, whose tiles lie over `gangs` gangs."""

    def __init__(self, geometry: ConvGeometry, pim: PimSpec, dtype: str, gangs: int):
        n = pim.timing
        columns = -(-geometry.reduction // pim.elements_per_column(dtype))
        self.chunks = -(-columns // pim.buffer_columns)
        self.columns = -(-columns // self.chunks)
        self.slots = pim.buffer_columns // self.columns if self.chunks == 1 else 1
        self.chunks_per_row = pim.columns_per_row // pim.buffer_columns
        self.buffers, self.gangs = pim.global_buffers, gangs
        self.latches = pim.global_buffers * pim.accumulators
        self.can_resume = self.chunks > 1 and pim.can_write_latches
        self.tiles = -(-geometry.oc // (gangs * pim.banks_per_gang))
        self.comp_cycles = self.columns * n["nCCDS"]
        self.write_cycles, self.result_cycles = self.columns * n["nBL"], n["nBL"] * pim.readres_bursts(dtype)
        self.nCCDS, self.nREFI = n["nCCDS"], n["nREFI"]
        self.turn_cycles = max(0, n["nTURN"] - n["nBL"])
        window = max(1, pim.faw_banks // pim.banks_per_gang)
        self.opening_cycles = (
            max((gangs - 1) * max(1, n["nRRD"]), (gangs - 1) // window * n["nFAW"]) + n["nRCDR"]
        )
        self.switch_cycles = n["nRTP"] + n["nRP"] + self.opening_cycles - n["nCCDS"]
        self.refresh_cycles = n["nRFC"] + gangs - 1
        self.refreshes_ahead = pim.refreshes_ahead
        self.nBL, self.nRFC, self.nCL = n["nBL"], n["nRFC"], n["nCL"]
        # A turnaround shorter than a burst lets the next transfer start within it.
        self.overlap_cycles = max(0, n["nBL"] - n["nTURN"])
        self.between_units, self.between_chunks = mode_changes(pim, ("channel", "buffer"))
        self.between_reads, self.between_writes = mode_changes(pim, ("channel",))
        self.write_costs: dict[int, list[tuple[float, float]]] = {}
        self.tail_cycles = n["nTREE"] + n["nCL"] + self.result_cycles

    def simple_cycles(self, units: int, tiles: int, tiles_per_write: int, slots: int) -> int:
        """Cycles of COMPs with row changes, or of bus transfers if these take longer, of a mapping."""
        changes = self._row_openings(units, tiles, tiles_per_write, slots) - 1
        write_cycles = self._vector_writes(units, tiles, tiles_per_write) * self.write_cycles
        return max(
            units * self.chunks * self.comp_cycles + changes * self.switch_cycles,
            write_cycles + units * self.result_cycles,
        )

    def bound(self, units: int, tiles: int, tiles_per_write: int, slots: int) -> LatencyBound:
        """The lower bound of one mapping."""
        comp = units * self.chunks * self.comp_cycles
        visits = self._row_openings(units, tiles, tiles_per_write, slots)
        bus_cycles = self._bus_cycles(units, tiles, tiles_per_write, slots)
        first = 1 + max(self.write_cycles, self.opening_cycles)
        latch_cycles, stalled = self._latch_cycles(units, tiles, tiles_per_write), self._stall_cycles(slots)
        cycles, refreshes = 0, -1
        while refreshes < (
            due := max(0, max(0, cycles - self.tail_cycles) // self.nREFI - self.refreshes_ahead)
        ):
            refreshes = due
            # Rows that a refresh closed are reopened: a row change, at best one that was planned anyway.
            changes = max(visits - 1, refreshes)
            idle_cycles = self._idle_cycles(units, tiles, tiles_per_write, slots, refreshes)
            activation = max(
                changes * self.switch_cycles,
                idle_cycles,
                self._mode_change_cycles(units, tiles, tiles_per_write),
            )
            comp_end = (
                first + comp - self.nCCDS + activation + refreshes * self.refresh_cycles + self.tail_cycles
            )
            bus_end = 1 + bus_cycles + refreshes * stalled + self.nCL
            cycles = max(comp_end, bus_end, latch_cycles + refreshes * self.nRFC)
        return LatencyBound(
            cycles=cycles,
            comp_cycles=comp,
            activation_cycles=activation,
            bus_cycles=bus_cycles,
            refreshes=refreshes,
            gangs=self.gangs,
            tiles=tiles,
            tiles_per_write=tiles_per_write,
            pixels_per_write=slots,
        )

    def _latch_cycles(self, units: int, tiles: int, tiles_per_write: int) -> int:
        """Cycles of the busiest latch, which works serially: its buffer is written, then computes."""
        latch_units = -(-units // self.latches)
        rounds = -(-latch_units // tiles_per_write)
        vectors = rounds
        if self.chunks > 1:
            if not self._partial_reads(units, tiles_per_write):
                rounds = latch_units
            vectors = rounds * self.chunks - (rounds - 1 if tiles > 1 else 0)
        work_cycles = vectors * self.write_cycles + latch_units * self.chunks * self.comp_cycles
        changes = (latch_units - 1) * self.between_units + max(0, vectors - latch_units) * self.between_chunks
        return 1 + work_cycles - self.nCCDS + self.tail_cycles + changes

    def _stall_cycles(self, slots: int) -> int:
        """Cycles of a refresh, and until rows are open again, in which the bus is idle.

        Meanwhile it can end a GWRITE and fill the buffers.
        """
        stalled = (
            self.switch_cycles
            + self.refresh_cycles
            - self.buffers * slots * self.write_cycles
            - self.latches * self.result_cycles
            - 2 * self.turn_cycles
        )
        return max(0, stalled, self.nRFC - slots * self.write_cycles + self.nBL)

    def _vector_writes(self, units: int, tiles: int, tiles_per_write: int) -> int:
        """Least number of vectors written.

        Each is used for `tiles_per_write` tiles; units may share the last.
        """
        if self.chunks == 1:
            return -(-units // tiles_per_write)
        rounds = -(-units // tiles_per_write)
        return rounds * self.chunks - (rounds if tiles > 1 else 0)

    def _partial_reads(self, units: int, tiles_per_write: int) -> int:
        """Least number of READRESs of incomplete sums, each of which needs a WRBIAS later.

        When the buffers get other chunks, sums in the latches stay there; all other sums have to be resumed.
        """
        if not self.can_resume or tiles_per_write <= self.latches // self.buffers:
            return 0
        latch_units = -(-units // tiles_per_write) * self.latches
        return max(0, units - latch_units) * (-(-self.chunks // self.buffers) - 1)

    def _mode_change_cycles(self, units: int, tiles: int, tiles_per_write: int) -> int:
        """Cycles without a COMP on devices whose banks wait while the bus works; zero on others.

        A run of READRESs reads each latch once; a buffer is written once between two of its COMPs.
        """
        if not self.between_reads:
            return 0
        reads = units + self._partial_reads(units, tiles_per_write)
        writes = self._vector_writes(units, tiles, tiles_per_write)
        runs = -(-reads // self.latches)
        runs_of_writes = -(-writes // (self.buffers * self.slots))
        waiting = (runs - 1) * self.between_reads + max(0, runs_of_writes - runs) * self.between_writes
        return waiting + max(0, writes - self.buffers * self.slots) * self.write_cycles

    def _row_openings(self, units: int, tiles: int, tiles_per_write: int, slots: int) -> int:
        """Least number of opened rows.

        A row can be used with vectors that are written while it is open, and with those in the buffers
        before.
        """
        rows = -(-tiles * self.chunks // self.chunks_per_row)
        if self.chunks > 1 and not self._partial_reads(units, tiles_per_write):
            rows_of_unit = -(-self.chunks // self.chunks_per_row)
            return max(rows, -(-units // self.latches) * (rows_of_unit - 1) + 1)
        extra_uses = -(-units * self.chunks // self.chunks_per_row) - self._vector_writes(
            units, tiles, tiles_per_write
        )
        return max(rows, 1 - (-extra_uses // (self.buffers * slots)))

    def _idle_cycles(self, units: int, tiles: int, tiles_per_write: int, slots: int, refreshes: int) -> int:
        """Cycles without a COMP: row changes, and GWRITEs that neither row changes nor products hide.

        In a run of GWRITEs, each latch takes the products of one unit. A GWRITE during a row change costs
        nothing by itself, but its vectors have missed the row before: so `slots` further pairs of vector and
        row need another visit. There are two lower bounds on the number of row changes; both hold, and so
        does any weighted mean of them.
        """
        if self.chunks > 1 or self.chunks_per_row > 1:
            return 0
        vectors = self._vector_writes(units, tiles, tiles_per_write)
        # GWRITEs before the first COMP are free.
        writes = -(-vectors // slots) - 2 - self.opening_cycles // (slots * self.write_cycles)
        if writes <= 0:
            return 0
        row_changes, vector_changes = max(tiles - 1, refreshes), (units - vectors) / (self.buffers * slots)
        return int(
            max(
                (share * vector_changes + (1 - share) * row_changes) * self.switch_cycles
                + writes * write_cost
                for share, write_cost in self._write_costs(slots)
            )
        )

    def _write_costs(self, slots: int) -> list[tuple[float, float]]:
        """For some weights of the mean, the least cost of a GWRITE in any run of GWRITEs."""
        if slots not in self.write_costs:
            self.write_costs[slots] = [
                (
                    share,
                    min(
                        (
                            self._write_run_idle(count, at_row_change, slots)
                            + at_row_change * share * self.switch_cycles / self.buffers
                        )
                        / count
                        for count in range(1, 2 * self.latches + 1)
                        for at_row_change in range(count + 1)
                    ),
                )
                for share in (0.0, 0.25, 0.5, 0.75, 1.0)
            ]
        return self.write_costs[slots]

    def _write_run_idle(self, count: int, at_row_change: int, slots: int) -> int:
        """Cycles without a COMP in a run of `count` GWRITEs, `at_row_change` of which are at a row change."""
        length, hidden = slots * self.write_cycles, self.latches * self.comp_cycles + self.nCCDS - 1
        if at_row_change:
            return max(0, (count - at_row_change) * length - hidden)
        if count == 1:  # its buffer computes in the turnaround at best
            hidden -= self.comp_cycles - min(self.comp_cycles, self.turn_cycles + self.nCCDS - 1)
        return max(0, count * length + self.turn_cycles - hidden)

    def _bus_cycles(self, units: int, tiles: int, tiles_per_write: int, slots: int) -> int:
        """Cycles of the bus, which alternates between runs of GWRITEs and of READRESs.

        With one chunk, each latch takes the products of one unit between two reads, which limits the COMPs
        during a run of GWRITEs.
        """
        vectors = self._vector_writes(units, tiles, tiles_per_write)
        write_total = vectors * (self.write_cycles - self.overlap_cycles)
        read_total = units * (self.result_cycles - self.overlap_cycles)
        if partial_reads := self._partial_reads(units, tiles_per_write):
            return (
                write_total
                + read_total
                + 2 * partial_reads * (self.result_cycles - self.overlap_cycles)
                + self.turn_cycles
            )
        if self.chunks > 1:  # a latch needs a write between two reads
            return write_total + read_total + (2 * -(-units // self.latches) - 1) * self.turn_cycles
        writes = -(-vectors // slots)
        products = units * self.comp_cycles

        def cycles(runs: int) -> int:
            """Cycles with so many runs of each kind."""
            # Runs of one GWRITE: its buffer computes before or after it, in a turnaround at best.
            single = max(0, 2 * runs - writes)
            hidden = min(self.comp_cycles, self.turn_cycles + self.nCCDS - 1)
            meanwhile = (runs * self.latches - single) * self.comp_cycles + single * hidden
            turns = (2 * runs - 1) * self.turn_cycles
            # The last COMP during a run of READRESs may end after the run.
            waiting = write_total + turns + products - meanwhile - runs * (self.nCCDS - 1)
            return max(write_total + read_total + turns, waiting)

        # Between two reads of a latch, its buffer is written at most twice.
        min_runs = -(-writes // (2 * self.latches))
        # One term rises with the number of runs, the other falls: the minimum is where they meet.
        low, high = min_runs, writes
        while low < high:
            runs = (low + high) // 2
            if cycles(runs + 1) < cycles(runs):
                low = runs + 1
            else:
                high = runs
        return cycles(low)
