"""A fused group: its traffic and arithmetic, and the placement of its tiles on chip."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np

from pimflow import memory
from pimflow.core.liveness import Lifetime, Liveness
from pimflow.fusion.channels import SUM_BYTES, ChannelRun, channels_on_chip, run_weights, single_run
from pimflow.fusion.fragments import FRAGMENT, MAX_SUMS, STAGE_BYTES, STAGING_BYTES, ProductTile, is_product
from pimflow.fusion.layers import Layer, LayerGraph, Shape
from pimflow.fusion.overlap import row_lead
from pimflow.fusion.tiling import GroupTiling, Spans, transfer

Reuse = Literal["none", "lifetime", "deep"]
REUSES: tuple[Reuse, ...] = get_args(Reuse)
CPU_LANES, GPU_LANES = (16, 8, 4), (8,)  # vector lengths that channels are padded to in kernels of a network


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layers ``[begin, end)`` of a graph that run tile by tile.

    Attributes
    ----------
    reuse : Reuse
        ``none``: every tile has memory of its own; ``lifetime``: tiles and weights that are
        not live at the same time share memory; ``deep``: also, results overwrite consumed operands.
    resident : frozenset of str
        Layers whose weights stay on chip over all tiles; those of others are loaded for each tile.
    channel_runs : tuple of ChannelRun
        Steps that go channel by channel, in order; none of their layers is resident.
    weights_placed : bool
        Whether weights have space beside the tiles; if not, they come through a cache, as on a GPU.
    lanes : tuple of int
        Lengths of vectors; tiles have a multiple of one of them; see `pad_channels`.
    tensor_cores : bool
        Whether products run on tensor cores, with operands staged in shared memory and sums in registers.
    """

    graph: LayerGraph
    begin: int
    end: int
    tiling: GroupTiling = field(default_factory=GroupTiling)
    reuse: Reuse = "deep"
    resident: frozenset[str] = field(default_factory=frozenset)
    channel_runs: tuple[ChannelRun, ...] = ()
    weights_placed: bool = True
    lanes: tuple[int, ...] = ()
    tensor_cores: bool = False

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of the group."""
        return self.graph.layers[self.begin : self.end]

    @functools.cached_property
    def spans(self) -> tuple[dict[str, Spans], dict[str, Spans], dict[str, Spans]]:
        """Spans of every tensor along n, h and w."""
        cut, limits = self.tiling, (self.graph, self.begin, self.end)
        by_axis = (
            transfer(*limits, 0, cut.n),
            transfer(*limits, 1, cut.h, cut.bands if cut.retain else 0),
            transfer(*limits, 2, cut.w),
        )
        if self.is_single and cut.tiles == 1:  # an unfused layer reads all of its operands
            for axis, spans in enumerate(by_axis):
                for name in self.layers[0].inputs:
                    full_span = ((0, self.graph.shapes[name][axis]),)
                    spans[name] = Spans(held=full_span, fresh=full_span)
        return by_axis

    @property
    def input_names(self) -> tuple[str, ...]:
        """Tensors that the group reads and does not compute."""
        layer_names = {layer.name for layer in self.layers}
        names = dict.fromkeys(name for layer in self.layers for name in layer.inputs)
        return tuple(name for name in names if name not in layer_names)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Tensors of the group that are read outside or are outputs of the network."""
        members = range(self.begin, self.end)
        return tuple(layer.name for layer in self.layers if self.graph.is_stored(layer.name, members))

    def elements_over_tiles(self, tensor: str) -> int:
        """Number of elements that are loaded or computed over all tiles."""
        return math.prod(axis[tensor].total for axis in self.spans) * self.graph.shapes[tensor][3]

    @property
    def is_single(self) -> bool:
        """Whether the group is one layer, which is counted as an unfused one."""
        return self.end - self.begin == 1

    @functools.cached_property
    def traffic_elements(self) -> int:
        """Elements that move to and from DRAM; `LayerGraph.traffic_elements` for a single layer."""
        if self.is_single:
            return self.graph.traffic_elements(self.layers[0])
        total = sum(map(self.elements_over_tiles, self.input_names)) + sum(
            map(self.graph.elements, self.output_names)
        )
        for layer in self.layers:
            times = 1 if layer.name in self.resident else self.tiling.tiles
            total += layer.weight_elements * times + layer.extra_output_elements
        return total

    def _work(self, quantity: str) -> int:
        total = 0
        for layer in self.layers:
            full = self.graph.elements(layer.name)
            computed = full if self.is_single else self.elements_over_tiles(layer.name)
            total += -(-getattr(layer, quantity) * computed // full)
        return total

    @property
    def macs(self) -> int:
        """Multiply-accumulates, including those of recomputed halos."""
        return self._work("macs")

    @property
    def operations(self) -> int:
        """Arithmetic operations, including those of recomputed halos."""
        return self._work("operations")

    @functools.cached_property
    def channels_on_chip(self) -> dict[str, int]:
        """Number of channels on chip at a time, by tensor that is not on chip with all channels."""
        return channels_on_chip(self.layers, self.channel_runs)

    def channel_run(self, step: int) -> ChannelRun | None:
        """The channel run that a step is part of; None if it is in no run."""
        return next((run for run in self.channel_runs if step in run), None)

    def tile(self, tensor: str) -> Shape:
        """The largest part of a tensor that is on chip at once."""
        channels = self.channels_on_chip.get(tensor, self.graph.shapes[tensor][3])
        n, h, w = (axis[tensor].longest for axis in self.spans)
        return n, h, w, pad_channels(channels, self.lanes)

    @property
    def sum_tensors(self) -> frozenset[str]:
        """Tensors that are on chip as fp32 sums over the channels so far."""
        return frozenset(self.layers[run.end - 1].name for run in self.channel_runs if run.sums)

    def uses_tensor_cores(self, layer: Layer) -> bool:
        """Whether the products of a layer run on tensor cores."""
        return self.tensor_cores and is_product(layer) and bool(self.product_tile(layer).is_profitable)

    def product_tile(self, layer: Layer) -> ProductTile:
        """The fragments of a layer's product in the largest tile."""
        channels = self.channels_on_chip.get(layer.inputs[0], self.graph.shapes[layer.inputs[0]][3])
        filters = self.channels_on_chip.get(layer.name, self.graph.shapes[layer.name][3])
        return ProductTile.from_layer(layer, self.fresh_pixels(layer.name), channels, filters)

    def fresh_pixels(self, tensor: str) -> int:
        """The largest number of pixels of a tensor that one tile loads or computes."""
        return math.prod(axis[tensor].longest_fresh for axis in self.spans)

    @property
    def staging_bytes(self) -> int:
        """Bytes of shared memory that warps stage operands in."""
        return STAGING_BYTES if any(map(self.uses_tensor_cores, self.layers)) else 0

    def lifetimes(self, element_bytes: int) -> tuple[Lifetime, ...]:
        """Lifetimes of tiles and weights over the steps of one tile; a step is a layer."""
        layers = self.layers
        steps = [(layer.inputs, (layer.name,)) for layer in layers]
        size_bytes = {
            name: math.prod(self.tile(name))
            * (max(element_bytes, SUM_BYTES) if name in self.sum_tensors else element_bytes)
            for name in self.spans[0]
        }
        live = Liveness.from_steps(steps, size_bytes, inputs=self.input_names)
        first = {name: step for step in reversed(range(len(layers))) for name in layers[step].inputs}
        lifetimes = []
        for life in live.lifetimes:
            if life.name in self.sum_tensors and self.uses_tensor_cores(layers[-1]):
                continue  # in registers
            if self.reuse == "none" or self.spans[1][life.name].is_retained:
                life = replace(life, begin=0, end=len(layers))
            elif life.name in self.input_names:
                life = replace(life, begin=first[life.name])
            lifetimes.append(self._extend_over_runs(replace(life, pinned=False)))
        for step, layer in enumerate(layers):
            if not layer.weight_elements or not self.weights_placed:
                continue
            is_resident = layer.name in self.resident or self.reuse == "none"
            run = self.channel_run(step)
            size = layer.weight_elements if is_resident else layer.filter_elements
            if run:
                size = run_weights(layer, run.sums and step == run.end - 1)
            life = Lifetime(
                name=f"{layer.name}.weights",
                begin=0 if is_resident else step,
                end=len(layers) if is_resident else step + 1,
                size_bytes=size * element_bytes,
            )
            lifetimes.append(self._extend_over_runs(life))
        return tuple(lifetimes)

    def _extend_over_runs(self, life: Lifetime) -> Lifetime:
        """Extend a lifetime over whole channel runs, since their steps repeat for every channel."""
        for run in self.channel_runs:
            if life.begin < run.end and life.end > run.begin:
                life = replace(life, begin=min(life.begin, run.begin), end=max(life.end, run.end))
        return life

    def operand_overlays(self, element_bytes: int) -> dict[int, tuple[str, int]]:
        """By step, the operand that its result may overwrite, and its offset above the result in bytes."""
        if self.reuse != "deep":
            return {}
        lives = {life.name: life for life in self.lifetimes(element_bytes)}
        overlays = {}
        for step, layer in enumerate(self.layers):
            if self.channel_run(step):
                continue
            dying = [
                name for name in layer.inputs if lives[name].end == step + 1 and not self._is_retained(name)
            ]
            if not dying or self._is_retained(layer.name) or len(set(layer.inputs)) < len(layer.inputs):
                continue
            name = dying[0]
            if layer.is_in_place and self.tile(name) == self.tile(layer.name):
                overlays[step] = (name, 0)
            elif overlappable(layer) and (not layer.weight_elements or layer.name in self.resident):
                (n, h, w, c), (_, oh, ow, oc) = self.tile(name), self.tile(layer.name)
                operand, result = [*map(np.asarray, (h, w, c))], [*map(np.asarray, (oh, ow, oc))]
                lead = row_lead(layer.maps[0][1], operand, result, np.asarray(n))
                overlays[step] = (name, int(lead) * element_bytes)
        return overlays

    def _is_retained(self, tensor: str) -> bool:
        return self.spans[1][tensor].is_retained


def pad_channels(channels: int, lanes: tuple[int, ...]) -> int:
    """`channels`, padded to a multiple of the vector length that costs least."""
    sizes = [(-(-channels // n) * n * (1 + 2 / n), -(-channels // n) * n) for n in lanes]
    return min(sizes)[1] if sizes else channels


def tile_group(
    graph: LayerGraph,
    begin: int,
    end: int,
    tiling: GroupTiling,
    lanes: tuple[int, ...] = (),
    tensor_cores: bool = False,
) -> Group:
    """Make the group of the layers as one kernel, which reads weights through a cache.

    Raises
    ------
    ValueError
        If the layers cannot be done in the chunks of channels of `tiling`.
    """
    if tiling.chunk and tiling.retain:
        raise ValueError(
            "rows of a chunk of channels are overwritten by the next chunk: none can be retained"
        )
    run = single_run(graph.layers[begin:end], tiling.chunk) if tiling.chunk else None
    if tiling.chunk and run is None:
        raise ValueError(f"they cannot be done {tiling.chunk} channels at a time")
    group = Group(
        graph=graph, begin=begin, end=end, tiling=tiling, reuse="lifetime",
        channel_runs=(run,) if run else (), weights_placed=False, lanes=lanes, tensor_cores=tensor_cores,
    )  # fmt: skip
    last = group.layers[-1]
    if run and any(map(group.uses_tensor_cores, group.layers)) and tiling.chunk % FRAGMENT:
        raise ValueError(f"tensor cores take multiples of {FRAGMENT} channels, not {tiling.chunk}")
    if run and run.sums and group.uses_tensor_cores(last) and group.product_tile(last).sums > MAX_SUMS:
        raise ValueError(f"the sums of '{last.name}' do not fit in the registers of a block")
    return group


def overlappable(layer: Layer) -> bool:
    """Whether a layer consumes its only operand row by row."""
    rows, columns = layer.maps[0][1], layer.maps[0][2]
    return layer.kind in ("convolution", "pooling", "lrn") and rows.repeat == columns.repeat == 1


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Offsets of a group's tiles on chip.

    Attributes
    ----------
    offsets_bytes : mapping of str to int
        Offsets of tensors' tiles, and of weights as ``NAME.weights``.
    lifetimes : tuple of Lifetime
        Results that overwrite operands share an alias class with them.
    """

    on_chip_bytes: int
    offsets_bytes: Mapping[str, int]
    lifetimes: tuple[Lifetime, ...]

    def with_gaps(self) -> Placement:
        """The tiles each in bytes of its own, behind each a gap as long as the longest tile.

        Raises `ValueError` if results overwrite operands.
        """
        if any(life.alias for life in self.lifetimes):
            raise ValueError("results overwrite operands, which therefore lie in one place")
        pitch = 2 * max(-(-life.size_bytes // STAGE_BYTES) * STAGE_BYTES for life in self.lifetimes)
        offsets_bytes = {life.name: index * pitch for index, life in enumerate(self.lifetimes)}
        return replace(self, on_chip_bytes=pitch * len(self.lifetimes), offsets_bytes=offsets_bytes)

    def regions_bytes(self) -> tuple[tuple[int, int], ...]:
        """Begin and end of each tile."""
        return tuple(
            (self.offsets_bytes[life.name], self.offsets_bytes[life.name] + life.size_bytes)
            for life in self.lifetimes
        )


def place(group: Group, element_bytes: int, capacity_bytes: int) -> Placement:
    """Plan the offsets of all tiles of a group by pimflow's memory planner.

    Elementwise results overwrite their operands. Other results do so only at the steps with the most live
    bytes, since both tensors then occupy memory from the first step of the operand to the last of the
    result.

    Raises
    ------
    InfeasibleError
        If no placement that fits is found.
    """
    lives = {life.name: life for life in group.lifetimes(element_bytes)}
    overlays = group.operand_overlays(element_bytes)
    classes = _AliasClasses(lives)
    for step, (operand, lead) in overlays.items():
        if lead == 0 and group.layers[step].is_in_place:
            classes.join(group.layers[step].name, operand, 0)
    remaining = {step: join for step, join in overlays.items() if join[1]}
    while True:
        live = Liveness(steps=len(group.layers), lifetimes=classes.blocks())
        bytes_by_step = [live.live_bytes(step) for step in range(live.steps)]
        joined_step = max(remaining, key=bytes_by_step.__getitem__, default=None)
        if max(bytes_by_step) <= capacity_bytes or joined_step is None:
            break
        trial = _AliasClasses(classes.lives)
        trial.join(group.layers[joined_step].name, *remaining.pop(joined_step))
        if Liveness(steps=live.steps, lifetimes=trial.blocks()).peak_bytes <= max(bytes_by_step):
            classes = trial
    lifetimes = tuple(classes.lives.values())
    plan = memory.plan(lifetimes, "best", capacity_bytes=capacity_bytes - group.staging_bytes)
    return Placement(on_chip_bytes=plan.pool_bytes, offsets_bytes=plan.offsets_bytes, lifetimes=lifetimes)


class _AliasClasses:
    """Alias classes, which can be joined: tiles at fixed distances from one another."""

    def __init__(self, lives: Mapping[str, Lifetime]) -> None:
        self.lives = dict(lives)

    def members(self, name: str) -> list[Lifetime]:
        """Lifetimes in the class of a tile."""
        key = self.lives[name].alias or name
        return [life for life in self.lives.values() if (life.alias or life.name) == key]

    def join(self, result: str, operand: str, lead_bytes: int) -> None:
        """Place `operand` `lead_bytes` above `result`."""
        below, above = self.members(result), self.members(operand)
        if below[0].alias and below[0].alias == above[0].alias:
            return
        shift = self.lives[result].within_bytes + lead_bytes - self.lives[operand].within_bytes
        shifted = below + [replace(life, within_bytes=life.within_bytes + shift) for life in above]
        low = min(life.within_bytes for life in shifted)
        key = shifted[0].alias or shifted[0].name
        for life in shifted:
            self.lives[life.name] = replace(life, alias=key, within_bytes=life.within_bytes - low)

    def blocks(self) -> tuple[Lifetime, ...]:
        """One lifetime a class: its size, from its first step to its last."""
        blocks: dict[str, Lifetime] = {}
        for life in self.lives.values():
            key = life.alias or life.name
            size = life.within_bytes + life.size_bytes
            block = blocks.get(key, Lifetime(name=key, begin=life.begin, end=life.end, size_bytes=size))
            blocks[key] = replace(
                block,
                begin=min(block.begin, life.begin),
                end=max(block.end, life.end),
                size_bytes=max(block.size_bytes, size),
            )
        return tuple(blocks.values())
