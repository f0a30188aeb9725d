"""Is the lower bound one? Against the fastest stream there is, and against every lowered loop order."""

import itertools
import random
from dataclasses import dataclass, replace

import pytest
from calibration.latency_bound import lower_bound, simple_bound
from exhaustive import Search, TooManyStates, Work, as_program
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from timing_programs import with_timing

from pimflow.core.kernel import ConvGeometry
from pimflow.hardware.pim import PimSpec
from pimflow.hardware.systems import SCHEDULINGS
from pimflow.pim_backend.programs.lowering import LoweringLimits, ProgramRequest, lower
from pimflow.pim_backend.programs.schedule import schedules
from pimflow.simulators.pim.timing import time_program

NEWTON = PimSpec.load("newton-gddr6")
# Beyond, a case is given up: it would take seconds.
MOST_STATES = 2500
RANGES = {
    "nBL": (1, 3),
    "nCCDS": (1, 4),
    "nCL": (1, 5),
    "nRCDR": (0, 8),
    "nRP": (0, 6),
    "nRAS": (0, 12),
    "nRC": (0, 16),
    "nRRD": (0, 4),
    "nFAW": (0, 9),
    "nRTP": (0, 4),
    "nTREE": (0, 3),
    "nTURN": (0, 6),
}


@dataclass(frozen=True)
class Case:
    """A tiny layer on `channels` channels of a tiny device."""

    pim: PimSpec
    pixels: int
    tiles: int
    chunks: int
    columns: int
    channels: int

    @classmethod
    def from_random(cls, draw: random.Random, refreshes: bool) -> "Case":
        cycles = {name: draw.randint(*ends) for name, ends in RANGES.items()}
        if refreshes:
            cycles |= {"nREFI": draw.randint(45, 80), "nRFC": draw.randint(1, 12)}
        else:
            cycles["nREFI"] = 10**6
        buffer_columns = draw.randint(1, 3)
        pim = replace(
            with_timing(NEWTON, **cycles),
            gangs=draw.choice((1, 2)),
            global_buffers=draw.choice((1, 2)),
            buffer_columns=buffer_columns,
            columns_per_row=buffer_columns * draw.choice((1, 1, 2)),
            result_lanes=draw.choice((1, 1, 16)),
            dtypes=("fp16",),
            refreshes_ahead=draw.choice((0, 1)) if refreshes else 0,
        )
        chunks = draw.choice((1, 1, 1, 2, 3))
        columns = draw.randint(1, buffer_columns) if chunks == 1 else buffer_columns
        sizes = draw.randint(1, 3), draw.randint(1, 3), chunks, columns
        return cls(pim, *sizes, draw.choice((1, 1, 2)))

    @property
    def comps(self) -> int:
        return self.pixels * self.tiles * self.chunks * self.columns

    @property
    def geometry(self) -> ConvGeometry:
        c = self.columns * self.chunks * self.pim.elements_per_column("fp16")
        return ConvGeometry(n=1, h=self.pixels, w=1, c=c, oc=self.tiles * self.pim.banks)

    def works(self) -> list[Work]:
        """What a channel may do: tiles over all gangs or fewer, chunks in rows as they come, or shuffled."""
        work_list = []
        for gangs in (g for g in range(1, self.pim.gangs + 1) if self.pim.gangs % g == 0):
            tiles = -(-self.geometry.oc // (gangs * self.pim.banks_per_gang))
            per_row = self.pim.columns_per_row // self.pim.buffer_columns
            places = range(tiles * self.chunks)
            rows = {tuple(place // per_row for place in places)}
            if per_row > 1:
                rows.add(tuple(place % -(-len(places) // per_row) for place in places))
            for chunk_rows in sorted(rows):
                work_list.append(
                    Work(
                        pixels=self.pixels,
                        tiles=tiles,
                        chunks=self.chunks,
                        columns=self.columns,
                        units=-(-self.pixels * tiles // self.channels),
                        slots=self.pim.buffer_columns // self.columns if self.chunks == 1 else 1,
                        rows=chunk_rows,
                        gangs=gangs,
                    )
                )
        return work_list

    def fastest(self, refreshes: bool) -> int:
        """Cycles of the fastest stream of all mappings; the engine must find the same."""
        bursts = self.pim.readres_bursts("fp16")
        best = []
        for work in self.works():
            search = Search(self.pim, work, bursts, refreshes=refreshes)
            cycles, stream = search.fastest(MOST_STATES)
            source = as_program(self.pim, work, stream, bursts)
            assert time_program(source, self.pim).cycles == cycles
            best.append(cycles)
        return min(best)


@pytest.mark.long
@pytest.mark.parametrize(("refreshes", "comps"), [(False, 5), (True, 4)])
def test_no_stream_is_faster(refreshes, comps):
    draw, ratios, tried = random.Random(f"refreshes: {refreshes}"), [], 0
    cases = (Case.from_random(draw, refreshes) for _ in itertools.count())
    for case in itertools.islice((case for case in cases if 2 <= case.comps <= comps), 50):
        tried += 1
        try:
            fastest = case.fastest(refreshes)
        except TooManyStates:
            continue
        bound = lower_bound(case.geometry, case.pim, "fp16", case.channels).cycles
        assert bound <= fastest, case
        ratios.append(fastest / bound)
    mean = sum(ratios) / len(ratios)
    print(f"{len(ratios)} of {tried} cases, optimum / bound: mean {mean:.3f}, largest {max(ratios):.3f}")
    assert len(ratios) > 0.6 * tried
    assert mean < 1.25, "no longer tight"


def test_the_search_finds_what_is_computed_by_hand():
    """One unit of one column: G_ACT at 1, GWRITE at 2 behind it, COMP at 1 + 11, READRES at 13, + 11 + 2."""
    pim = replace(NEWTON, gangs=1, global_buffers=1, buffer_columns=1, columns_per_row=1)
    work = Work(pixels=1, tiles=1, chunks=1, columns=1, units=1, slots=1, rows=(0,), gangs=1)
    cycles, stream = Search(pim, work, 1).fastest()
    assert (cycles, [type(node).__name__ for node in stream]) == (26, ["GAct", "Gwrite", "Comp", "Readres"])


DEVICES = tuple(PimSpec.load(name) for name in ("newton-gddr6", "newton-hbm2", "aim-gddr6", "hbm-pim"))


@st.composite
def layers(draw) -> tuple[ConvGeometry, PimSpec, str, int]:
    pim = draw(st.sampled_from(DEVICES))
    if pim.name == "newton-gddr6":
        pim = draw(
            st.sampled_from(
                (
                    pim,
                    with_timing(pim, nREFI=500, nRFC=60),
                    with_timing(pim, nTURN=0, nFAW=3, nTREE=9),
                    with_timing(pim, nCCDS=5, nRTP=14, nBL=3, nREFI=1000, nRFC=100),
                    replace(pim, buffer_columns=8),
                )
            )
        )
        pim = replace(pim, global_buffers=draw(st.integers(1, 4)))
    side = draw(st.integers(1, 9))
    c = draw(st.one_of(st.integers(1, 600), st.integers(600, 2500)))
    geometry = ConvGeometry(n=1, h=side, w=side, c=c, oc=draw(st.integers(1, 200)))
    return geometry, pim, draw(st.sampled_from(pim.dtypes)), draw(st.integers(1, 8))


@settings(max_examples=examples(60), deadline=None)
@given(layers())
def test_no_loop_order_is_faster(layer):
    geometry, pim, dtype, channels = layer
    bound = lower_bound(geometry, pim, dtype, channels)
    orders = {order for level in SCHEDULINGS for order in schedules(geometry, pim, dtype, level)}
    for order in orders:
        request = ProgramRequest("layer", geometry, order)
        limits = LoweringLimits(only_busiest=True)
        source = lower(request, pim, dtype=dtype, channels=channels, limits=limits)
        assert bound.cycles <= time_program(source, pim).cycles, (order, bound)


@settings(max_examples=examples(40), deadline=None)
@given(layers())
def test_the_plain_bound_of_work_without_refreshes_is_lower(layer):
    geometry, pim, dtype, channels = layer
    pim = with_timing(pim, nREFI=10**9, nTURN=max(pim.timing["nTURN"], pim.timing["nBL"]))
    bound = lower_bound(geometry, pim, dtype, channels)
    assert simple_bound(geometry, pim, dtype, channels) <= bound.cycles
