"""Random layer graphs, and what their layers read by definition: no range map is used here."""

import itertools
import math
from dataclasses import dataclass

from hypothesis import strategies as st

from pimflow.core.ranges import RangeMap
from pimflow.fusion.layers import Layer, LayerGraph, elementwise_maps


@dataclass(frozen=True)
class GraphWithReads:
    """A graph, and by layer a function from (operand, result index) to the operand's indices."""

    graph: LayerGraph
    reads: dict


def _window(draw, extent, plain):
    window = draw(st.integers(1, min(4, extent)))
    return dict(
        window=window,
        stride=draw(st.integers(1, window if plain else 3)),
        dilation=1 if plain else draw(st.integers(1, 2)),
        pad_before=draw(st.integers(0, window - 1)),
        pad_after=draw(st.integers(0, window - 1)),
    )


def _taps(window, extent, i):
    first = i * window["stride"] - window["pad_before"]
    taps = [first + d * window["dilation"] for d in range(window["window"])]
    return [x for x in taps if 0 <= x < extent]


def _convolution(draw, name, source, shape, plain):
    rows, columns = _window(draw, shape[1], plain), _window(draw, shape[2], plain)
    maps = [RangeMap(extent=shape[1], **rows), RangeMap(extent=shape[2], **columns)]
    groups = draw(st.sampled_from([g for g in range(1, shape[3] + 1) if shape[3] % g == 0]))
    filters = groups * draw(st.integers(1, 2))
    result = (shape[0], maps[0].output_extent, maps[1].output_extent, filters)
    if min(result) < 1:
        return _elementwise(draw, name, [source], shape)
    size, per = shape[3] // groups, filters // groups

    def reads(_, index):
        run = range(index[3] // per * size, index[3] // per * size + size)
        return itertools.product(
            [index[0]], _taps(rows, shape[1], index[1]), _taps(columns, shape[2], index[2]), run
        )

    channels = RangeMap.blocks(shape[3], filters, groups)
    weights = filters * size * rows["window"] * columns["window"]
    macs = math.prod(result) * weights // filters
    layer = Layer(
        name=name, kind="convolution", inputs=(source,), weight_elements=weights, filters=filters,
        maps=((RangeMap.same(shape[0]), *maps, channels),), macs=macs, operations=2 * macs,
    )  # fmt: skip
    return layer, result, reads


def _elementwise(draw, name, sources, shape):
    weights = draw(st.sampled_from([0, shape[3]]))
    layer = Layer(
        name=name, kind="eltwise", inputs=tuple(sources), maps=(elementwise_maps(shape),) * len(sources),
        is_in_place=True, weight_elements=weights, operations=math.prod(shape),
    )  # fmt: skip
    return layer, shape, lambda _, index: [index]


def _pad(draw, name, source, shape):
    before, after = draw(st.integers(-1, 2)), draw(st.integers(0, 2))
    if shape[1] + before < 1:
        before = 0
    result = (shape[0], shape[1] + before + after, *shape[2:])
    maps = (RangeMap.same(shape[0]), RangeMap.pad(shape[1], before, after), *map(RangeMap.same, shape[2:]))

    def reads(_, index):
        row = index[1] - before
        return [(index[0], row, *index[2:])] if 0 <= row < shape[1] else []

    return Layer(name=name, kind="pad", inputs=(source,), maps=(maps,)), result, reads


def _concat(name, sources, shapes):
    total, maps, begins, begin = sum(s[3] for s in shapes), [], {}, 0
    for source, shape in zip(sources, shapes):
        maps.append((*map(RangeMap.same, shape[:3]), RangeMap.concat_operand(shape[3], begin, total)))
        begins[source] = (begin, shape[3])
        begin += shape[3]

    def reads(source, index):
        low, size = begins[source]
        return [(*index[:3], index[3] - low)] if 0 <= index[3] - low < size else []

    layer = Layer(name=name, kind="concat", inputs=tuple(sources), maps=tuple(maps))
    return layer, (*shapes[0][:3], total), reads


def _upsample(name, source, shape):
    rows = RangeMap(extent=shape[1], repeat=2)
    maps = (RangeMap.same(shape[0]), rows, RangeMap.same(shape[2]), RangeMap.same(shape[3]))
    result = (shape[0], 2 * shape[1], *shape[2:])
    layer = Layer(name=name, kind="other", inputs=(source,), maps=(maps,), operations=math.prod(result))
    return layer, result, lambda _, index: [(index[0], index[1] // 2, *index[2:])]


def _softmax(name, source, shape):
    maps = (*map(RangeMap.same, shape[:3]), RangeMap.whole(shape[3], shape[3]))
    layer = Layer(name=name, kind="softmax", inputs=(source,), maps=(maps,), operations=math.prod(shape))
    return layer, shape, lambda _, index: [(*index[:3], c) for c in range(shape[3])]


@st.composite
def graphs(draw, most=6, plain=False):
    """A directed acyclic graph of up to `most` layers; `plain`: windows leave no gaps."""
    shapes = {
        "x": (draw(st.integers(1, 2)), *(draw(st.integers(1, 7)) for _ in range(2)), draw(st.integers(1, 3)))
    }
    layers, reads = [], {}
    for index in range(draw(st.integers(1, most))):
        name = f"l{index}"
        source = draw(st.sampled_from(sorted(shapes)[-3:]))
        shape = shapes[source]
        same_shape = [n for n in shapes if shapes[n] == shape and n != source]
        same_rows = [n for n in shapes if shapes[n][:3] == shape[:3] and n != source]
        kind = draw(
            st.sampled_from(["convolution"] * 3 + ["unary", "binary", "pad", "concat", "up", "softmax"])
        )
        if kind == "binary" and same_shape:
            layer_parts = _elementwise(draw, name, [source, draw(st.sampled_from(same_shape))], shape)
        elif kind == "concat" and same_rows:
            second = draw(st.sampled_from(same_rows))
            layer_parts = _concat(name, [source, second], [shape, shapes[second]])
        elif kind == "pad":
            layer_parts = _pad(draw, name, source, shape)
        elif kind == "up" and shape[1] <= 6:
            layer_parts = _upsample(name, source, shape)
        elif kind == "softmax":
            layer_parts = _softmax(name, source, shape)
        elif kind == "convolution":
            layer_parts = _convolution(draw, name, source, shape, plain)
        else:
            layer_parts = _elementwise(draw, name, [source], shape)
        layer, shapes[name], reads[name] = layer_parts
        layers.append(layer)
    return GraphWithReads(LayerGraph(name="d", layers=tuple(layers), shapes=shapes, outputs=(name,)), reads)
