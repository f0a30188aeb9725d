"""Does shape transfer give exactly what a tile depends on, traced element by element?"""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_graphs import graphs
from length import examples

from pimflow.core.ranges import RangeMap
from pimflow.fusion.tiling import pieces, transfer

PROPERTY = settings(derandomize=True, deadline=None, max_examples=examples(36))


def dependency_boxes(drawn, begin, end, tile, parts):
    """By tensor, the bounding box of all that the stored pieces of a tile depend on."""
    graph, boxes = drawn.graph, {}

    def add(name, box):
        if any(high <= low for low, high in box):
            return
        have = boxes.get(name, box)
        boxes[name] = tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(have, box))

    for layer in reversed(graph.layers[begin:end]):
        if graph.is_stored(layer.name, range(begin, end)):
            shape = graph.shapes[layer.name]
            cut = [pieces(shape[axis], parts[axis])[tile[axis]] for axis in range(3)]
            add(layer.name, (*cut, (0, shape[3])))
        if layer.name not in boxes:
            continue
        for name in layer.inputs:
            read = {
                index
                for position in itertools.product(*(range(*span) for span in boxes[layer.name]))
                for index in drawn.reads[layer.name](name, position)
            }
            if read:
                add(name, tuple((min(i[a] for i in read), max(i[a] for i in read) + 1) for a in range(4)))
    return boxes


@st.composite
def cut_groups(draw, plain):
    drawn = draw(graphs(plain=plain))
    end = draw(st.integers(1, len(drawn.graph.layers)))
    begin = draw(st.integers(0, end - 1))
    return drawn, begin, end, [draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 2))]


def compare(case, exact):
    drawn, begin, end, parts = case
    spans = [transfer(drawn.graph, begin, end, axis, parts[axis]) for axis in range(3)]
    for tile in itertools.product(*map(range, parts)):
        for name, box in dependency_boxes(drawn, begin, end, tile, parts).items():
            for axis in range(3):
                low, high = spans[axis][name].held[tile[axis]]
                if exact:
                    assert (low, high) == box[axis], (name, axis, tile)
                assert low <= box[axis][0] and box[axis][1] <= high


@PROPERTY
@given(cut_groups(plain=False))
def test_a_tile_gets_all_that_it_depends_on(case):
    compare(case, exact=False)


@PROPERTY
@given(cut_groups(plain=True))
def test_and_nothing_else_where_windows_leave_no_gaps(case):
    drawn, begin, end, parts = case
    stored = [d for d in drawn.graph.layers[begin:end] if drawn.graph.is_stored(d.name, range(begin, end))]
    small = any(drawn.graph.shapes[d.name][axis] < parts[axis] for d in stored for axis in range(3))
    padded = any(layer.kind == "pad" for layer in drawn.graph.layers)
    if not small and not padded:
        compare(case, exact=True)


@PROPERTY
@given(graphs(most=3, plain=True), st.data())
def test_every_axis_of_every_operand_is_read_as_its_map_says(drawn, data):
    """Batch, rows, columns and channels, padding as a layer of its own: what a range of results reads."""
    layer = data.draw(st.sampled_from(drawn.graph.layers))
    axis, place = data.draw(st.integers(0, 3)), data.draw(st.integers(0, len(layer.inputs) - 1))
    shape = drawn.graph.shapes[layer.name]
    end = data.draw(st.integers(1, shape[axis]))
    begin = data.draw(st.integers(0, end - 1))
    box = [range(extent) for extent in shape]
    box[axis] = range(begin, end)
    source = layer.inputs[place]
    read = {index[axis] for p in itertools.product(*box) for index in drawn.reads[layer.name](source, p)}
    span = layer.maps[place][axis].inputs(begin, end)
    lows, highs = layer.maps[place][axis].spans(np.array([begin]), np.array([end]))
    assert (span.begin, span.end) == (lows[0], highs[0])
    if read:
        assert (span.begin, span.end) == (min(read), max(read) + 1)
    elif all(len(m.inputs(0, m.output_extent)) for m in layer.maps[place]):
        assert not len(span)  # nothing but padding


@PROPERTY
@given(graphs(), st.integers(1, 3), st.integers(2, 4))
def test_retained_rows_are_made_once(drawn, bands, tiles):
    """What is new in each tile of a band, put together, is what any tile holds, without repetition."""
    spans = transfer(drawn.graph, 0, len(drawn.graph.layers), 1, bands * tiles, bands)
    alone = transfer(drawn.graph, 0, len(drawn.graph.layers), 1, bands)
    for name, axis_spans in spans.items():
        for band in range(bands):
            part = slice(band * tiles, (band + 1) * tiles)
            fresh = [row for low, high in axis_spans.fresh[part] for row in range(low, high)]
            assert len(fresh) == len(set(fresh)) and set(fresh) <= set(range(*alone[name].held[band])), name
            here: set[int] = set()
            for resident, new in zip(axis_spans.held[part], axis_spans.fresh[part]):
                here = {row for row in here if resident[0] <= row} | set(range(*new))
                assert set(range(*resident)) <= here, name


def test_padding_is_a_layer_of_its_own():
    """A padded window is the window over the padded axis, composed with the pad."""
    for extent, window, stride, before, after in itertools.product((5, 8), (1, 3), (1, 2), (0, 2), (0, 1)):
        padded = RangeMap(extent=extent, window=window, stride=stride, pad_before=before, pad_after=after)
        pad = RangeMap.pad(extent, before, after)
        plain = RangeMap(extent=pad.output_extent, window=window, stride=stride)
        assert plain.output_extent == padded.output_extent
        for begin in range(plain.output_extent):
            for end in range(begin + 1, plain.output_extent + 1):
                middle, direct = plain.inputs(begin, end), padded.inputs(begin, end)
                composed = pad.inputs(middle.begin, middle.end)
                assert (composed.begin, composed.end) == (direct.begin, direct.end)
