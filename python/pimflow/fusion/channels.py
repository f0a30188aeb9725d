"""Channel tiles: runs of a group's layers that go channel by channel, without whole maps on chip.

Where weights are larger than maps, tiles of rows would load the weights again for each tile; a pass over
the channels of a whole map loads every weight once. A run may begin with a convolution that forms a channel
from all channels of its operand, and may end with one that adds the products of a channel to the sums of
all its results; the layers between keep channels separate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pimflow.core.ranges import RangeMap
from pimflow.fusion.layers import Layer

# Sums that wait on chip for further channels are fp32, which does not fit a narrower storage type.
SUM_BYTES = 4


@dataclass(frozen=True, kw_only=True, order=True)
class ChannelRun:
    """Layers ``[begin, end)`` of a group that go one or a few channels at a time.

    Attributes
    ----------
    sums : bool
        Whether the last layer sums over the channels of the run; its whole result is on chip.
    """

    begin: int
    end: int
    sums: bool = False
    channels: int = 1

    def __contains__(self, step: int) -> bool:
        return self.begin <= step < self.end

    @property
    def forming_steps(self) -> range:
        """Steps whose results are on chip one or a few channels at a time."""
        return range(self.begin, self.end - self.sums)


def keeps_channels(layer: Layer) -> bool:
    """Whether each channel of the result needs only the same channel of every operand."""
    channels = layer.maps[0][3].output_extent
    is_per_channel = all(maps[3] == RangeMap.same(channels) for maps in layer.maps)
    return is_per_channel and not layer.extra_output_elements and layer.filters in (1, channels)


def forms_channels(layer: Layer) -> bool:
    """Whether weights can be loaded for one channel of the result at a time."""
    return (
        layer.macs > 0
        and not layer.extra_output_elements
        and layer.filters == layer.maps[0][3].output_extent
        and all(maps[3] == RangeMap.same(maps[3].extent) for maps in layer.maps[1:])
    )


def sums_channels(layer: Layer) -> bool:
    """Whether results are sums over all channels of the only operand."""
    if layer.macs == 0 or layer.extra_output_elements or len(layer.inputs) != 1:
        return False
    channels = layer.maps[0][3]
    reads_all_channels = (
        channels.window == channels.extent and channels.repeat == channels.output_extent == layer.filters
    )
    return reads_all_channels and layer.weight_elements >= slice_elements(layer) * channels.extent


def slice_elements(layer: Layer) -> int:
    """Number of weights of one channel of the operand, if results are sums over channels."""
    return layer.maps[0][1].window * layer.maps[0][2].window * layer.filters


def run_weights(layer: Layer, sums: bool) -> int:
    """Number of weights on chip while a layer goes channel by channel."""
    if sums:  # a bias stays on chip
        channels = layer.maps[0][3].extent
        return layer.weight_elements - slice_elements(layer) * (channels - 1)
    return layer.filter_elements


def single_run(layers: Sequence[Layer], channels: int) -> ChannelRun | None:
    """All `layers` as one run with `channels` at a time; None if they cannot be one.

    Layers form channels, each from all channels of an operand from outside, or keep channels separate; the
    last may sum over them.
    """
    count, formed_names, sums = layers[0].maps[0][3].output_extent, set[str](), False
    for step, layer in enumerate(layers):
        inner_maps = [maps[3] for name, maps in zip(layer.inputs, layer.maps) if name in formed_names]
        is_padded = any(axes[3].pad_before or axes[3].pad_after for axes in layer.maps)
        is_linked = not step or inner_maps or forms_channels(layer)
        if is_padded or layer.is_view or layer.extra_output_elements or sums or not is_linked:
            return None
        has_same_channels = layer.maps[0][3].output_extent == count
        if has_same_channels and all(axis == RangeMap.same(count) for axis in inner_maps):
            formed_names.add(layer.name)
        elif layer.inputs[0] in formed_names and len(inner_maps) == 1 and is_whole(inner_maps[0]):
            sums = True
        else:
            return None
    fits = 0 < channels < count and count % channels == 0 and len(layers) > 1
    return ChannelRun(begin=0, end=len(layers), sums=sums, channels=channels) if fits else None


def is_whole(axis: RangeMap) -> bool:
    """Whether every output index reads every input index."""
    return axis == RangeMap.whole(axis.extent, axis.output_extent)


def channels_on_chip(layers: Sequence[Layer], runs: Sequence[ChannelRun]) -> dict[str, int]:
    """Number of channels on chip at a time, by tensor that is not on chip with all channels."""
    channel_counts: dict[str, int] = {}
    for run in runs:
        names = [layers[step].name for step in run.forming_steps]
        channel_counts |= dict.fromkeys((*names, *sorted(_operands_by_chunk(layers, run))), run.channels)
    return channel_counts


def _operands_by_chunk(layers: Sequence[Layer], run: ChannelRun) -> set[str]:
    """Tensors that a run loads channel by channel: only it reads them, and no layer all channels at once."""
    layer_names = {layer.name for layer in layers}
    run_layers = layers[run.begin : run.end]
    forming = [layers[step] for step in run.forming_steps]
    whole_tensors = {layer.inputs[0] for layer in forming if not keeps_channels(layer)} - layer_names
    whole_tensors |= set(run_layers[-1].inputs[1:]) if run.sums else set()
    outside_reads = {name for step, layer in enumerate(layers) if step not in run for name in layer.inputs}
    return (
        {name for layer in run_layers for name in layer.inputs} - layer_names - whole_tensors - outside_reads
    )


def possible_runs(layers: Sequence[Layer], sums: bool) -> Iterator[ChannelRun]:
    """All runs of these layers that can go channel by channel.

    Parameters
    ----------
    sums : bool
        Whether sums may wait on chip for further channels.
    """
    last = {name: step for step, layer in enumerate(layers) for name in layer.inputs}
    for begin, first in enumerate(layers):
        if sums and sums_channels(first):
            run = ChannelRun(begin=begin, end=begin + 1, sums=True)
            if first.inputs[0] in _operands_by_chunk(layers, run):
                yield run
        if not (keeps_channels(first) or forms_channels(first)):
            continue
        formed_names: set[str] = set()
        last_reader, channels = 0, first.maps[0][3].output_extent
        for end in range(begin + 1, len(layers) + 1):
            layer = layers[end - 1]
            if end > begin + 1 and layer.maps[0][3].extent != channels:
                break
            if end > begin + 1 and not keeps_channels(layer):
                run = ChannelRun(begin=begin, end=end, sums=True)
                can_sum = sums and sums_channels(layer) and last_reader < end
                if can_sum and layer.inputs[0] in formed_names | _operands_by_chunk(layers, run):
                    yield run
                break
            formed_names.add(layer.name)
            last_reader = max(last_reader, last.get(layer.name, 0))
            if last_reader < end:
                yield ChannelRun(begin=begin, end=end)


def fitting_runs(
    layers: Sequence[Layer],
    elements: Mapping[str, int],
    channels: Callable[[str], int],
    capacity: int,
    sums: bool,
) -> tuple[tuple[ChannelRun, ...], int] | None:
    """The smallest number of runs with which untiled layers fit, and their memory; None if no runs fit.

    A filter is loaded when it is needed, and no live tensor overlaps another.
    """
    producer_step = {layer.name: step for step, layer in enumerate(layers)}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for step, layer in enumerate(layers):
        for name in layer.inputs:
            first.setdefault(name, producer_step.get(name, step))
            last[name] = step
    for name, step in producer_step.items():
        first.setdefault(name, step)
        last.setdefault(name, step)

    def run_elements(run: ChannelRun, single: bool) -> int:
        """Elements of the tiles that are live in a step, channel by channel unless `single`."""
        channel_counts = set() if single else channels_on_chip(layers, (run,))
        alive = sum(
            -(-elements[name] // channels(name)) if name in channel_counts else elements[name]
            for name in elements
            if first[name] < run.end and last[name] >= run.begin
        )
        return alive + sum(
            run_weights(layers[step], run.sums and step == run.end - 1) for step in range(run.begin, run.end)
        )

    steps = [(ChannelRun(begin=step, end=step + 1), True) for step in range(len(layers))]
    edges = steps + [(run, False) for run in possible_runs(layers, sums)]
    best: list[tuple[float, int, tuple[ChannelRun, ...]]] = [(0, 0, ())]
    best += [(math.inf, 0, ())] * len(layers)
    for run, single in sorted(edges, key=lambda edge: edge[0].end):
        count, max_elements, runs = best[run.begin]
        if count < math.inf and (size := run_elements(run, single)) <= capacity:
            new = (
                (count, max(max_elements, size), runs)
                if single
                else (count + 1, max(max_elements, size), (*runs, run))
            )
            best[run.end] = min(best[run.end], new)
    count, max_elements, runs = best[-1]
    return None if count == math.inf else (runs, max_elements)
