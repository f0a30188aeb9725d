"""Is the range algebra that splits, pipelines and fusion share the one that convolution defines?"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples

from pimflow.core.ranges import RangeMap

settings.register_profile("ranges", derandomize=True, deadline=None, max_examples=examples(400))
PROPERTY = settings.get_profile("ranges")


@st.composite
def maps(draw):
    return RangeMap(
        extent=draw(st.integers(1, 12)),
        window=draw(st.integers(1, 5)),
        stride=draw(st.integers(1, 4)),
        dilation=draw(st.integers(1, 3)),
        pad_before=draw(st.integers(0, 6)),
        pad_after=draw(st.integers(0, 6)),
    )


@st.composite
def all_maps(draw):
    """What other operators have besides: outputs that share a window, crops."""
    crops = {name: draw(st.integers(-2, 6)) for name in ("pad_before", "pad_after")}
    return dataclasses.replace(draw(maps()), repeat=draw(st.integers(1, 3)), **crops)


@st.composite
def map_and_part(draw):
    window = draw(maps().filter(lambda m: m.output_extent > 0))
    begin = draw(st.integers(0, window.output_extent - 1))
    return window, begin, draw(st.integers(begin + 1, window.output_extent))


def taps(window: RangeMap, output: int) -> list[int | None]:
    """Input index of every tap, None in padding: what the convolution reads, by its definition."""
    first = output // window.repeat * window.stride - window.pad_before
    positions = [first + d * window.dilation for d in range(window.window)]
    return [p if 0 <= p < window.extent else None for p in positions]


def read(window: RangeMap, begin: int, end: int) -> set[int]:
    return {p for output in range(begin, end) for p in taps(window, output) if p is not None}


@PROPERTY
@given(maps())
def test_output_extent_counts_the_windows_that_fit(window):
    padded = window.extent + window.pad_before + window.pad_after
    starts = range(0, padded, window.stride)
    fits = [s for s in starts if s + (window.window - 1) * window.dilation < padded]
    assert window.output_extent == len(fits)


@PROPERTY
@given(map_and_part())
def test_inputs_hold_all_that_is_read(case):
    window, begin, end = case
    part = window.inputs(begin, end)
    assert 0 <= part.begin <= part.end <= window.extent
    assert read(window, begin, end) <= set(range(part.begin, part.end))


@PROPERTY
@given(map_and_part())
def test_inputs_hold_nothing_else_where_windows_leave_no_gaps(case):
    window, begin, end = case
    if window.stride <= window.window and window.dilation == 1:
        part = window.inputs(begin, end)
        assert set(range(part.begin, part.end)) == read(window, begin, end)


@PROPERTY
@given(map_and_part())
def test_a_part_over_its_own_inputs_reads_the_same_taps(case):
    """What makes a split bit-identical: the same value, or the same padding, under every tap."""
    window, begin, end = case
    part, alone = window.inputs(begin, end), window.output_part(begin, end)
    if not len(part):
        assert read(window, begin, end) == set()
        return
    assert alone.output_extent == end - begin
    for output in range(end - begin):
        shifted = [None if t is None else t + part.begin for t in taps(alone, output)]
        assert shifted == taps(window, begin + output)


@PROPERTY
@given(all_maps().filter(lambda m: m.output_extent > 0))
def test_many_parts_at_once_are_each_part_alone(window):
    parts = [(b, e) for e in range(window.output_extent + 1) for b in range(e)]
    begins, ends = window.spans(*(np.array(column) for column in zip(*parts)))
    for (begin, end), low, high in zip(parts, begins, ends):
        alone = window.inputs(begin, end)
        assert (low, high) == (alone.begin, alone.end)
        assert read(window, begin, end) <= set(range(low, high))


@PROPERTY
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_groups_of_channels_read_their_own(groups, size, per):
    channels = RangeMap.blocks(groups * size, groups * per, groups)
    assert channels.output_extent == groups * per
    for output in range(groups * per):
        group = output // per
        assert read(channels, output, output + 1) == set(range(group * size, (group + 1) * size))


def test_outputs_of_one_window_are_not_parted():
    with pytest.raises(ValueError, match="no whole runs of 2"):
        RangeMap(extent=4, repeat=2).output_part(1, 4)
    assert RangeMap(extent=4, repeat=2).output_part(2, 6) == RangeMap(extent=2, repeat=2)


def test_rows_that_read_only_padding_have_no_inputs():
    pointwise = RangeMap(extent=4, window=1, pad_before=2, pad_after=2)
    assert pointwise.output_extent == 8
    assert len(pointwise.inputs(0, 2)) == len(pointwise.inputs(6, 8)) == 0
    assert len(pointwise.inputs(0, 3)) == 1


@pytest.mark.parametrize(("begin", "end"), [(0, 0), (2, 1), (-1, 2), (0, 5), (4, 5)])
def test_outputs_outside_the_axis_are_refused(begin, end):
    with pytest.raises(ValueError, match=r"not within \[0, 4\)"):
        RangeMap(extent=4).inputs(begin, end)
