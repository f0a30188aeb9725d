"""The layers of a network as pimflow compiles it: each region, with all operators in it, is a layer."""

from __future__ import annotations

import math

from pimflow.core.ranges import RangeMap
from pimflow.core.region import Region
from pimflow.core.region_graph import RegionGraph
from pimflow.fusion.layers import Layer, LayerGraph, Maps, Shape, broadcast_maps, full_maps

_KINDS = {
    "conv2d": "convolution",
    "depthwise": "convolution",
    "grouped": "convolution",
    "fc": "inner_product",
}
_KINDS |= {"mean": "pooling", "concat": "concat", "nn.softmax": "softmax", "nn.pad": "pad"}
EXTRA = ".extra"  # what the name of an extra output has after that of its region
# Operators that move elements to other places: results may read any element.
_MOVING = {"permute_dims", "reshape", "strided_slice", "take", "split", "flip", "tile", "nn.pad"}


def layers_from_regions(regions: RegionGraph) -> LayerGraph:
    """Read regions as layers; an unfused concatenation whose operands are parts of it moves nothing."""
    shapes: dict[str, Shape] = {}
    layers = []
    extra_outputs = {
        name
        for region in regions.regions
        for position, name in enumerate(input_tensors(region))
        if position in region.extra_inputs
    }
    for region in regions.regions:
        for name, dims in zip(input_tensors(region), region.input_shapes):
            if name.startswith("%"):
                shapes.setdefault(name, _input_shape(region, dims))
            elif name in extra_outputs:
                shapes[name] = _shape(dims)
        extra_output = region.name + EXTRA
        layers.append(_layer(region, shapes, extra_output if extra_output in extra_outputs else ""))
    return LayerGraph(name=regions.name, layers=tuple(layers), shapes=shapes, outputs=regions.outputs)


def input_tensors(region: Region) -> tuple[str, ...]:
    """The tensors that a region reads, in the order of its inputs; an extra output has a name of its own."""
    return tuple(
        name + EXTRA if position in region.extra_inputs else name
        for position, name in enumerate(region.inputs)
    )


def _shape(dims: tuple[int, ...]) -> Shape:
    """Shape as (n, h, w, c): missing axes in the middle are 1, additional ones are merged into h."""
    if len(dims) > 3:
        return (dims[0], math.prod(dims[1:-2]), dims[-2], dims[-1])
    if len(dims) < 2:
        return (1, 1, 1, math.prod(dims))
    return (dims[0], dims[1] if len(dims) > 2 else 1, 1, dims[-1])


def _input_shape(region: Region, dims: tuple[int, ...]) -> Shape:
    """NHWC shape of a network input; the layer that reads it transforms the layout."""
    window = region.geometry or region.kernel.pooling
    if window is not None and len(dims) == 4 and (window.h, window.w, window.c) == (*dims[2:], dims[1]):
        return (window.n, window.h, window.w, window.c)
    return _shape(dims)


def _layer(region: Region, shapes: dict[str, Shape], extra_output: str) -> Layer:
    window = region.geometry or region.kernel.pooling
    result = _shape(region.output_shape)
    if window is not None and window.n * window.oh * window.ow * window.oc == region.output_elements:
        result = (window.n, window.oh, window.ow, window.oc)  # a reshape after the window moves nothing
    shapes[region.name] = result
    moves = not _MOVING.isdisjoint(region.operators) and not (window and "%" in "".join(region.inputs))
    maps: list[Maps] = []
    begin = 0
    inputs = input_tensors(region)
    for name in inputs:
        x = shapes[name]
        if window is not None and not maps and x == (window.n, window.h, window.w, window.c):
            channels = RangeMap.blocks(window.c, window.oc, window.groups)
            maps.append((RangeMap.same(window.n), window.rows, window.columns, channels))
        elif region.is_view and region.operator == "concat" and x[:3] == result[:3]:
            maps.append((*map(RangeMap.same, x[:3]), RangeMap.concat_operand(x[3], begin, result[3])))
            begin += x[3]
        elif moves or (region.kernel.has_anchor and window is None):
            maps.append(_reduction_maps(region, x, result))
        else:
            maps.append(broadcast_maps(x, result))
    maps = [
        axes if tuple(axis.output_extent for axis in axes) == result else full_maps(shapes[name], result)
        for name, axes in zip(inputs, maps)
    ]
    geometry = region.geometry
    filters = geometry.oc if geometry else 1
    macs = geometry.macs if geometry else 0
    taps = window.kh * window.kw if window and not geometry else 1
    steps = 0 if region.is_view else taps + len(region.epilogue.operators) - (1 if geometry else 0)
    kind = _KINDS.get(region.operator, "other" if region.kernel.has_anchor else "eltwise")
    return Layer(
        name=region.name,
        kind="pooling" if region.kernel.pooling else kind,
        inputs=inputs,
        maps=tuple(maps),
        weight_elements=region.kernel.weight_elements,
        filters=min(filters, max(1, region.kernel.weight_elements)),
        macs=macs,
        operations=2 * macs + region.output_elements * steps,
        is_in_place=not region.kernel.has_anchor
        and not moves
        and all(shapes[name] == result for name in inputs),
        is_view=region.is_view,
        extra_output_elements=region.kernel.extra_output_elements,
        extra_output=extra_output,
    )


def _reduction_maps(region: Region, x: Shape, result: Shape) -> Maps:
    """Maps of a reduction: a mean over a map reads only its channel, others read the whole operand."""
    if region.operators == ("mean",) and (x[0], x[3]) == (result[0], result[3]):
        ends = RangeMap.same(x[0]), RangeMap.same(x[3])
        return (ends[0], RangeMap.whole(x[1], result[1]), RangeMap.whole(x[2], result[2]), ends[1])
    return full_maps(x, result)
