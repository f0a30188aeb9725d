"""Runs of regions cut into stages along rows: what a stage computes, and when stages are impossible."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pimflow.core.kernel import ELEMENT_BYTES, STORED_BYTES, ConvGeometry, Kernel, convolution_kernel
from pimflow.core.liveness import view_obstacle
from pimflow.core.region import GATHERS, MOVES, Region
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import Mode
from pimflow.core.stages import Pipeline, StageRows, stage_rows
from pimflow.errors import PlanError

CONVOLUTIONS = ("conv2d", "depthwise", "grouped")


@dataclass(frozen=True, kw_only=True)
class StagedRun:
    """A pipeline with its regions, and the output rows ``[begin, end)`` by region and stage.

    `dtype` is the storage type of the network.
    """

    pipeline: Pipeline
    regions: tuple[Region, ...]
    rows: StageRows
    dtype: str

    @classmethod
    def from_pipeline(cls, graph: RegionGraph, pipeline: Pipeline, dtype: str) -> StagedRun:
        """The run of a pipeline; raises `PlanError` with the reason if it is impossible."""
        regions = tuple(graph.region(name) for name in pipeline.regions)
        if len(pipeline.modes) != len(regions) or set(pipeline.modes) != {Mode.GPU, Mode.PIM}:
            raise PlanError(
                f"region '{regions[0].name}': a PIPELINE has a mode for each of its {len(regions)} regions, "
                f"GPU and PIM both, not {list(map(str, pipeline.modes))}"
            )
        try:
            if reason := _pipeline_obstacle(graph, regions, pipeline.modes):
                raise ValueError(reason)
            rows = stage_rows([region.layer.rows for region in regions], pipeline.cuts)
            for region, mode, region_rows in zip(regions, pipeline.modes, rows):
                if reason := _copy_obstacle(region.layer, region_rows, mode is Mode.PIM):
                    raise ValueError(f"'{region.name}': {reason}")
        except ValueError as error:
            raise PlanError(f"region '{regions[0].name}' cannot begin a PIPELINE: {error}") from None
        return cls(pipeline=pipeline, regions=regions, rows=rows, dtype=dtype)

    def geometry(self, position: int, stage: int) -> ConvGeometry:
        """The part of a region's convolution that a stage computes."""
        return self.regions[position].layer.row_range(*self.rows[position][stage])

    def products(self, position: int, stage: int) -> ConvGeometry:
        """A layer of as many products with a matrix of the same size: its PIM program takes the same time."""
        begin, end = self.rows[position][stage]
        return _products(self.regions[position].layer, end - begin)

    def largest(self, position: int) -> ConvGeometry:
        """`products` of the stage with the most rows of a region."""
        return _products(self.regions[position].layer, max(end - begin for begin, end in self.rows[position]))

    def kernel(self, position: int, stage: int) -> Kernel:
        """The GPU kernel of a stage, with the deferred epilogue of the previous region."""
        region, rows = self.regions[position], self.rows[position][stage]
        read = _operand_elements(region, rows)
        previous = self.regions[position - 1] if position else None
        if previous and self.pipeline.modes[position - 1] is Mode.PIM and len(previous.inputs) > 1:
            input_rows = region.layer.rows.inputs(*rows)
            read += _operand_elements(previous, (input_rows.begin, input_rows.end))
        return _kernel(region.layer, rows, self.dtype, read * ELEMENT_BYTES[self.dtype])

    @functools.cached_property  # for all searches that share the run
    def work(self) -> dict[tuple[int, int], Kernel | ConvGeometry]:
        """By region and stage, the GPU kernel of the part, or the `products` of PIM."""
        return {
            (position, stage): self.kernel(position, stage)
            if self.pipeline.modes[position] is Mode.GPU
            else self.products(position, stage)
            for position, stage in self.pipeline.steps
        }


@functools.lru_cache(maxsize=1 << 16)
def _copy_obstacle(geometry: ConvGeometry, rows: tuple[tuple[int, int], ...], on_pim: bool) -> str:
    """Why parts of a layer's result, or of the input that PIM reads, cannot be views; empty if they can."""
    g = geometry
    borders = [((1, g.oh, g.ow, g.oc), begin) for begin, _ in rows[1:]]
    borders += [((1, g.h, g.w, g.c), g.rows.inputs(*part).begin) for part in rows if on_pim]
    problems = (view_obstacle(shape, 1, begin, STORED_BYTES) for shape, begin in borders)
    return next(filter(None, problems), "")


def _operand_elements(region: Region, rows: tuple[int, int]) -> int:
    """Elements of other tensors that the epilogue reads for some rows."""
    height, total = region.layer.oh, 0
    for shape in region.input_shapes[1:]:
        by_rows = len(shape) == 4 and shape[1] == height
        total += math.prod(shape) * (rows[1] - rows[0]) // height if by_rows else math.prod(shape)
    return total


# Cached: overlapping runs, and searches of the same network, have parts in common.
@functools.lru_cache(maxsize=1 << 16)
def _kernel(geometry: ConvGeometry, rows: tuple[int, int], dtype: str, read_bytes: int) -> Kernel:
    return convolution_kernel(geometry.row_range(*rows), dtype, read_bytes)


@functools.lru_cache(maxsize=1 << 16)
def _products(geometry: ConvGeometry, rows: int) -> ConvGeometry:
    g, elements = geometry, geometry.groups * geometry.reduction
    return ConvGeometry(n=1, h=rows, w=g.ow, c=elements, oc=g.oc, groups=g.groups)


def _pipeline_obstacle(graph: RegionGraph, regions: Sequence[Region], modes: Sequence[Mode]) -> str:
    """Why `regions` cannot be done in stages; empty if they can. Rows are not checked."""
    for region, mode in zip(regions, modes):
        if problem := staging_obstacle(region):
            return f"'{region.name}': {problem}"
        if mode is Mode.PIM and region.prologue:
            return f"'{region.name}' begins with more than PIM computes"
    for producer, consumer in itertools.pairwise(regions):
        if not is_chained(graph, producer, consumer):
            return (
                f"'{consumer.name}' is not the only one that reads '{producer.name}', or reads it otherwise"
            )
    for (producer, _), pair in zip(itertools.pairwise(regions), itertools.pairwise(modes)):
        if pair == (Mode.PIM, Mode.PIM) and producer.epilogue.operators:
            return f"what PIM leaves undone of '{producer.name}' needs the GPU before PIM can go on"
    return ""


def staging_obstacle(region: Region) -> str:
    """Why a region cannot be computed in parts along rows; empty if it can."""
    g = region.geometry
    if g is None or region.operator not in CONVOLUTIONS or g.n != 1:
        return "it is no convolution of one image"
    moves = {*MOVES, *GATHERS}.intersection((*region.prologue, *region.epilogue.operators))
    reads_several = region.prologue and len(region.inputs) > 1
    is_whole = region.output_shape == (1, g.oh, g.ow, g.oc) and not region.kernel.extra_output_elements
    if reads_several or moves or not is_whole:
        return "its kernel does more than a convolution and what is elementwise around it"
    return ""


def is_chained(graph: RegionGraph, producer: Region, consumer: Region) -> bool:
    """Whether only `consumer` reads the result of `producer`, as its first operand."""
    is_only_reader = graph.readers[producer.name] == (consumer.name,) and producer.name not in graph.outputs
    return is_only_reader and consumer.first_result_input == producer.name
