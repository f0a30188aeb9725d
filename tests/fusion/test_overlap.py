"""Is deep reuse safe and no larger than it must be? Figure 5's figures, and a run pixel by pixel."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from papers.deep_reuse import overlap

from pimflow.core.ranges import RangeMap
from pimflow.fusion.overlap import row_lead

PROPERTY = settings(derandomize=True, deadline=None, max_examples=examples(90))


def survives(rows, columns, channels, filters, lead, strict):
    """Run the layer in one array: is every element there when it is read?"""
    height, width = rows.extent, columns.extent
    operand = np.arange(1, height * width * channels + 1)
    memory = np.zeros(
        max(lead + operand.size, rows.output_extent * columns.output_extent * filters), np.int64
    )
    memory[lead : lead + operand.size] = operand

    def is_intact(r, c):
        for y, x, k in itertools.product(range(*r), range(*c), range(channels)):
            address = (y * width + x) * channels + k
            if memory[lead + address] != operand[address]:
                return False
        return True

    pixels = itertools.product(range(rows.output_extent), range(columns.output_extent))
    for index, (row, column) in enumerate(pixels):
        r, c = rows.inputs(row, row + 1), columns.inputs(column, column + 1)
        window = (r.begin, r.end), (c.begin, c.end)
        for k in range(filters):
            if (strict or k == 0) and not is_intact(*window):
                return False
            memory[index * filters + k] = -1
        if strict and not is_intact(*window):
            return False
    return True


@pytest.mark.parametrize("strict, begin, end, saved", [(False, 2096, 8240, 31.88), (True, 2160, 8304, 31.35)])
def test_figure_5(strict, begin, end, saved):
    """[8, 64, 3] through 4 x 4 with stride 2 to [3, 31, 16], in fp32."""
    rows, columns = (RangeMap(extent=extent, window=4, stride=2) for extent in (8, 64))
    layout = overlap(rows, columns, 3, 16, strict=strict)
    assert (4 * layout.lead, 4 * (layout.lead + layout.operand)) == (begin, end)
    assert 4 * layout.result == 5952
    assert round(100 * layout.saving, 2) == saved
    assert survives(rows, columns, 3, 16, layout.lead, strict)
    assert not survives(rows, columns, 3, 16, layout.lead - 1, strict)


@st.composite
def windows(draw):
    window = draw(st.integers(1, 3))
    axis = RangeMap(
        extent=draw(st.integers(1, 6)),
        window=window,
        stride=draw(st.integers(1, 3)),
        dilation=draw(st.integers(1, 2)),
        pad_before=draw(st.integers(0, 2)),
        pad_after=draw(st.integers(0, 2)),
    )
    return axis if axis.output_extent > 0 else RangeMap.same(axis.extent)


@PROPERTY
@given(windows(), windows(), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_the_lead_is_safe_and_the_smallest(rows, columns, channels, filters, strict):
    layout = overlap(rows, columns, channels, filters, strict=strict)
    assert survives(rows, columns, channels, filters, layout.lead, strict)
    if layout.lead:
        assert not survives(rows, columns, channels, filters, layout.lead - 1, strict)


@PROPERTY
@given(windows(), windows(), st.integers(1, 3), st.integers(1, 4))
def test_the_lead_of_whole_rows_is_enough(rows, columns, channels, filters):
    exact = overlap(rows, columns, channels, filters)
    sizes = [np.int64(x) for x in (rows.extent, columns.extent, rows.output_extent, columns.output_extent)]
    lead = row_lead(rows, (*sizes[:2], channels), (*sizes[2:], filters), np.int64(1))
    assert lead >= exact.lead
