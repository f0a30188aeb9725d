"""Do stages compute every row that is read, once, and before it is read?"""

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pimflow.core.ranges import RangeMap
from pimflow.core.rewrite import Mode
from pimflow.core.stages import Pipeline, stage_name, stage_rows, whole_name


def taps(window: RangeMap, output: int) -> set[int]:
    """Input rows that an output row reads, by the definition of a convolution."""
    first = output * window.stride - window.pad_before
    rows = {first + tap * window.dilation for tap in range(window.window)}
    return {row for row in rows if 0 <= row < window.extent}


@st.composite
def chains(draw):
    """Windows of two to four layers, each over the rows of the one before, and where stages end."""
    extent, maps = draw(st.integers(4, 30)), []
    for _ in range(draw(st.integers(2, 4))):
        window, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 2))
        before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        stride = draw(st.integers(1, 3))
        steps = {"window": window, "stride": stride, "dilation": dilation}
        maps.append(RangeMap(extent=extent, **steps, pad_before=before, pad_after=after))
        extent = maps[-1].output_extent
        assume(extent >= 2)
    cuts = draw(st.sets(st.integers(1, extent - 1), min_size=1, max_size=7))
    return maps, sorted(cuts)


@given(chains())
def test_rows_are_computed_once_and_before_they_are_read(case):
    maps, cuts = case
    try:
        rows = stage_rows(maps, cuts)
    except ValueError:
        assume(False)
    assert [end for _, end in rows[-1]] == [*cuts, maps[-1].output_extent]
    for parts in rows:
        assert parts[0][0] == 0 and all(begin < end for begin, end in parts)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
    for stage in range(len(cuts) + 1):
        for position in range(1, len(maps)):
            read = set().union(*(taps(maps[position], row) for row in range(*rows[position][stage])))
            there = rows[position - 1][stage][1]
            assert max(read) < there, "a stage reads an unknown tensor yet"
    for position in range(1, len(maps)):
        window, last = maps[position], rows[position][-1][1] - 1
        reach = last * window.stride - window.pad_before + (window.window - 1) * window.dilation + 1
        assert rows[position - 1][-1][1] == min(reach, window.extent), "rows are computed that nobody reads"


@given(st.lists(st.sampled_from((Mode.GPU, Mode.PIM)), min_size=2, max_size=5), st.integers(1, 7))
def test_parts_are_issued_in_an_order_that_can_be(modes, stages):
    names = tuple(f"r{position}" for position in range(len(modes)))
    steps = Pipeline(regions=names, modes=tuple(modes), cuts=tuple(range(1, stages))).steps
    assert sorted(steps) == list(itertools.product(range(len(modes)), range(stages)))
    order = {step: place for place, step in enumerate(steps)}
    for position, stage in steps:
        assert position == 0 or order[position - 1, stage] < order[position, stage]
        assert stage == 0 or order[position, stage - 1] < order[position, stage]
        if position and stage + 1 < stages:
            overlaps = order[position - 1, stage + 1] < order[position, stage]
            assert overlaps == (modes[position] != modes[position - 1])


@pytest.mark.parametrize(
    ("window", "cuts", "says"),
    [
        (3, [], "ascending rows"),
        (3, [8], "1 to 7"),
        (3, [7], "stage 1 computes no rows of region 0"),
        (17, [4], "stage 1 computes no rows of region 0"),
    ],
)
def test_what_has_no_stages_says_so(window, cuts, says):
    wide = RangeMap(extent=8)
    deep = RangeMap(extent=8, window=window, pad_before=window // 2, pad_after=window // 2)
    with pytest.raises(ValueError, match=says):
        stage_rows([wide, deep], cuts)


def test_a_first_stage_that_reads_all_is_none():
    deep = RangeMap(extent=4, window=7, pad_before=3, pad_after=3)
    with pytest.raises(ValueError, match="the first stage reads all rows"):
        stage_rows([deep, RangeMap(extent=4)], [1])


@given(st.text("ab_/", min_size=1), st.integers(0, 99))
def test_names_of_parts_say_of_what(name, stage):
    assert whole_name(stage_name(name, stage), {name}) == name == whole_name(name, ())
    assert whole_name(stage_name(name, stage), {name, stage_name(name, stage)}) == stage_name(name, stage)
