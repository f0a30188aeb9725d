"""Groups of neighbouring regions that one GPU kernel can do in tiles in shared memory (Deep Fusion).

A block of threads does one tile: it loads the tile's part of the operands, halos included, computes region by
region in shared memory, all channels at once or in chunks, and stores its part of the result. Or it does a
band of tiles, one after the other down the rows, and keeps the rows that the next tile reads. Runs of a
decomposed network (TeMCO) are such groups. Deep Fusion counts the elements that move; the GPU model prices
them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pimflow import fusion
from pimflow.core.blocks import WARP_THREADS
from pimflow.core.kernel import ELEMENT_BYTES, Kernel
from pimflow.core.region import Region
from pimflow.core.region_graph import RegionGraph
from pimflow.errors import InfeasibleError
from pimflow.fusion import Group, GroupTiling, GrowingGroup, Layer
from pimflow.fusion.channels import SUM_BYTES, channels_on_chip, single_run
from pimflow.fusion.fragments import WARPS
from pimflow.fusion.group import GPU_LANES
from pimflow.fusion.growing import MAX_LAYERS
from pimflow.fusion.narrow_parts import narrow_parts
from pimflow.fusion.tiled_kernels import Count, Tiles, group_kernel, products, wait_count
from pimflow.hardware import System
from pimflow.simulators.gpu.model import kernel_cost, kernels_ns
from pimflow.simulators.gpu.region_kernels import gpu_kernels

MAX_TRIES = 16  # how many tilings of a group are tried, the fastest first, until one fits
CHUNKS = (0, 16, 32, 64, 128)  # numbers of channels at a time that are tried; 0 for all
# By launch time, memory channels and run of regions: the fastest tiling, or None if none is faster.
TilingCache = dict[tuple[object, ...], GroupTiling | None]
REUSE = "lifetime"  # deep reuse would overwrite what other threads still read


@dataclass(frozen=True, kw_only=True)
class TiledGroup:
    """A group with its tiling."""

    covers: tuple[str, ...]
    tiling: GroupTiling


class TilingSearch:
    """Finds the groups of a network on a system, each with its fastest tiling.

    Parameters
    ----------
    graph : RegionGraph
        `RegionGraph.fusible` says which regions may be in groups.
    tiling_cache : dict, optional
        Earlier results for runs that differ only in names, shared with other networks, on systems that differ
        only in launch times.
    """

    def __init__(self, graph: RegionGraph, system: System, tiling_cache: TilingCache | None = None):
        self.graph, self.system = graph, system
        self._tiling_cache: TilingCache = {} if tiling_cache is None else tiling_cache
        self._best: dict[int, tuple[TiledGroup, ...]] = {}
        self._region_ns: dict[tuple[str, int], float] = {}

    @functools.cached_property
    def layers(self) -> fusion.LayerGraph:
        """The regions as layers of Deep Fusion, with the ranges of operands that each reads."""
        return fusion.layers_from_regions(self.graph)

    @property
    def capacity_bytes(self) -> int:
        """Shared memory of a block; none if a block has fewer threads than these kernels."""
        limits = self.system.gpu.kernel_limits(self.system.dtype)
        return limits.shared_bytes if limits.threads >= WARP_THREADS * WARPS else 0

    def best(self, channels: int) -> tuple[TiledGroup, ...]:
        """Groups that are faster as one kernel than region by region, with `channels` memory channels.

        Times are those of the analytic model, also if another profiler times the groups later.
        """
        if channels not in self._best:
            self._best[channels] = tuple(self.search(channels))
        return self._best[channels]

    def unsupported_reason(self, covers: Sequence[str], tiling: GroupTiling) -> str:
        """Why regions cannot be one kernel in these tiles; empty if they can."""
        order = [region.name for region in self.graph.regions]
        begin = order.index(covers[0])
        end = begin + len(covers)
        is_allowed = set(covers) <= set(self.graph.fusible) or tuple(covers) in self.graph.runs
        if tuple(order[begin:end]) != tuple(covers) or not is_allowed:
            return "not all of them may be part of such a kernel"
        if not self._is_closed(begin, end):
            return "others read what is between"
        shape = self.layers.shapes[covers[-1]]
        if any(parts > size for parts, size in zip((tiling.n, tiling.h, tiling.w), shape)):
            return f"{tiling} is no cut of {'x'.join(map(str, shape))}"
        try:
            fits = self._fits(self.group(covers, tiling))
        except ValueError as error:
            return str(error)
        return (
            ""
            if fits
            else f"its tiles do not fit the {self.capacity_bytes} bytes of shared memory that a block has"
        )

    def group(self, covers: Sequence[str], tiling: GroupTiling) -> Group:
        """The group of Deep Fusion, in which every tile loads its weights, as from a cache."""
        begin = self.layers.index[covers[0]]
        end = begin + len(covers)
        return fusion.tile_group(self.layers, begin, end, tiling, GPU_LANES, self.tensor_cores)

    @property
    def tensor_cores(self) -> bool:
        """Whether kernels multiply on tensor cores: in fp16, if the GPU has such cores."""
        return self.system.dtype == "fp16" and self.system.gpu.has_tensor_cores("fp16")

    def kernel(self, covers: Sequence[str], tiling: GroupTiling) -> Kernel:
        """The group as a kernel for the GPU model."""
        group = self.group(covers, tiling)
        touched = {name: group.elements_over_tiles(name) for name in group.spans[0]}
        pixels = {name: group.fresh_pixels(name) for name in group.spans[0]}
        blocks = tiling.blocks, tiling.tiles_per_block
        return self.kernel_in_tiles(group.layers, blocks, touched, pixels, tiling.chunk)

    def kernel_in_tiles(
        self,
        layers: Sequence[Layer],
        blocks: tuple[Count, Count],
        touched: Mapping[str, Count],
        pixels: Mapping[str, Count],
        chunk: int,
    ) -> Kernel:
        """A group as a kernel; its fields are arrays if counts are.

        Parameters
        ----------
        blocks : tuple
            Number of blocks, and of the tiles that each does one after the other.
        touched, pixels : mapping of str to int
            By tensor, elements that all tiles load or compute, and the largest number of pixels of one tile.
        chunk : int
            Channels that are done at a time; 0 for all.
        """
        regions = [self.graph.region(layer.name) for layer in layers]
        channels = {name: self.layers.shapes[name][3] for name in pixels}
        run = single_run(layers, chunk) if chunk else None
        chunk_channels = channels_on_chip(layers, (run,)) if run else {}
        work = products(layers, pixels, channels, chunk_channels) if self.tensor_cores else {}
        count, tiles_per_block = blocks
        waits = wait_count(layers, chunk)
        tiles = Tiles(blocks=count, touched=touched, waits=waits, products=work, tiles=tiles_per_block)
        return group_kernel(regions, tiles, self.system.dtype)

    def search(
        self, channels: int, is_requested: Callable[[tuple[str, ...]], bool] = lambda _: True
    ) -> Iterator[TiledGroup]:
        """Groups among the runs that `is_requested` accepts: faster ones, and all of `RegionGraph.runs`."""
        if not self.graph.fusible and not self.graph.runs:
            return
        for begin, end, growing in itertools.chain(self._graph_runs(), self.candidate_runs()):
            covers = tuple(region.name for region in self.graph.regions[begin:end])
            if is_requested(covers):
                tiling = self._run_tiling(begin, end, growing, channels)
                if tiling:
                    yield TiledGroup(covers=covers, tiling=tiling)

    def _run_tiling(self, begin: int, end: int, growing: GrowingGroup, channels: int) -> GroupTiling | None:
        """The fastest tiling of a run, if it pays; `growing` has some of the run's last regions so far."""
        regions = self.graph.regions[begin:end]
        is_required = tuple(region.name for region in regions) in self.graph.runs
        cuts = tuple(int(axis.parts.max()) for axis in growing.candidates.axes)
        launch_ns = self.system.gpu.launch_ns
        key = (launch_ns, channels, is_required, cuts, _unnamed_run(regions, self.layers.layers[begin:end]))
        if key not in self._tiling_cache:
            for position in reversed(range(begin, end - len(growing.positions))):
                growing.grow(position)
            # A run of a decomposed network saves memory, so it need not be faster.
            separate_ns = (
                math.inf if is_required else sum(self._time_ns(region, channels) for region in regions)
            )
            self._tiling_cache[key] = self._fastest(regions, growing, channels, separate_ns - launch_ns)
        return self._tiling_cache[key]

    def _time_ns(self, region: Region, channels: int) -> float:
        """Time of a region by itself."""
        key = (region.name, channels)
        if key not in self._region_ns:
            gpu, dtype = self.system.gpu, self.system.dtype
            self._region_ns[key] = (
                0.0
                if region.is_view
                else sum(
                    kernel_cost(kernel, gpu, dtype=dtype, channels=channels).total_ns
                    for kernel in gpu_kernels(region, dtype)
                )
            )
        return self._region_ns[key]

    def _graph_runs(self) -> Iterator[tuple[int, int, GrowingGroup]]:
        """`RegionGraph.runs`, in the form of `candidate_runs`."""
        candidates = fusion.TilingCandidates.for_blocks(self.layers)
        for covers in self.graph.runs:
            begin = self.layers.index[covers[0]]
            yield begin, begin + len(covers), GrowingGroup(self.layers, candidates, REUSE)

    def candidate_runs(self) -> Iterator[tuple[int, int, GrowingGroup]]:
        """Begin and end of every run of regions that may be a group, and the tilings that grow to it.

        Runs with the same end share these; the shortest comes first.
        """
        fusible = set(self.graph.fusible)
        candidates = fusion.TilingCandidates.for_blocks(self.layers)
        inside, ends = self._part_bounds()
        for end in range(2, len(self.graph.regions) + 1):
            growing = GrowingGroup(self.layers, candidates, REUSE)
            min_begin = inside[end - 1] if end not in ends else 0
            for begin in reversed(range(max(min_begin, end - MAX_LAYERS), end)):
                if self.graph.regions[begin].name not in fusible or not self.has_space(growing):
                    break
                covers_parts = begin in ends and end in ends
                if tuple(region.name for region in self.graph.regions[begin:end]) in self.graph.runs:
                    continue
                if (
                    end - begin > 1
                    and (covers_parts or begin >= inside[end - 1])
                    and self._is_closed(begin, end)
                ):
                    yield begin, end, growing

    def has_space(self, growing: GrowingGroup) -> bool:
        """Whether any tiles of a group fit into a block's memory; those of longer groups are larger."""
        return not growing.positions or any(
            fits is not None and fits.any() for fits in map(functools.partial(self._fitting, growing), CHUNKS)
        )

    def _fitting(self, growing: GrowingGroup, chunk: int) -> np.ndarray | None:
        """By tiling, whether its tiles fit by a lower bound; None if the group cannot go by such chunks."""
        run = single_run(growing.layers, chunk) if chunk else None
        if chunk and run is None:
            return None
        element = ELEMENT_BYTES[self.system.dtype]
        waiting_elements = 0 if self.tensor_cores else max(1, SUM_BYTES // element)
        tile_bytes = growing.tile_elements(run, waiting_elements) * element
        is_possible = (growing.candidates.tiles_per_block == 1) | (not chunk)
        fits: np.ndarray = growing.allowed & is_possible & (tile_bytes <= self.capacity_bytes)
        return fits

    def _part_bounds(self) -> tuple[list[int], set[int]]:
        """By region, where its part of the network begins; and all positions where parts begin or end.

        A group lies inside one part, or covers several completely: it crosses no branch.
        """
        parts = narrow_parts(self.graph)
        inside = [begin for begin, end in parts for _ in range(begin, end)]
        return inside, {0, *(end for _, end in parts)}

    def _is_closed(self, begin: int, end: int) -> bool:
        """Whether only these regions read the results between them."""
        names = {region.name for region in self.graph.regions[begin:end]}
        return all(
            names.issuperset(self.graph.readers[region.name])
            and self.graph.readers[region.name]
            and region.name not in self.graph.outputs
            for region in self.graph.regions[begin : end - 1]
        )

    def _fastest(
        self, regions: Sequence[Region], growing: GrowingGroup, channels: int, bound_ns: float
    ) -> GroupTiling | None:
        """The fastest tiling that fits, over all tiles and chunks of channels, if it is below the bound."""
        count = len(growing.candidates.tiles)
        covers, layers = tuple(region.name for region in regions), growing.layers
        times_ns, tilings = np.zeros(0), list[tuple[int, int]]()
        tiles_per_block = growing.candidates.tiles_per_block
        blocks = growing.candidates.tiles // tiles_per_block
        touched, pixels = ({name: np.broadcast_to(values, count) for name, values in entry} for entry in (
            [(name, tile.touched) for name, tile in growing.tiles.items()],
            [(name, tile.fresh_pixels) for name, tile in growing.tiles.items()],
        ))  # fmt: skip
        for chunk in CHUNKS:
            fits = self._fitting(growing, chunk)
            if fits is None or not fits.any():
                continue
            tile_number = np.flatnonzero(fits)
            loaded_elements, tile_pixels = (
                {n: values[tile_number] for n, values in entry.items()} for entry in (touched, pixels)
            )
            counts = blocks[tile_number], tiles_per_block[tile_number]
            kernels = self.kernel_in_tiles(layers, counts, loaded_elements, tile_pixels, chunk)
            kernel_times_ns = kernels_ns(kernels, self.system.gpu, dtype=self.system.dtype, channels=channels)
            times_ns = np.append(times_ns, kernel_times_ns)
            tilings += [(int(entry), chunk) for entry in tile_number]
        # For runs that need not be faster all tilings are tried; for others that does not pay.
        max_tries = None if math.isinf(bound_ns) else MAX_TRIES
        for number in np.argsort(times_ns, kind="stable")[:max_tries]:
            if times_ns[number] >= bound_ns:
                return None
            tile_number, chunk = tilings[number]
            tiling = replace(growing.candidates.tiling(tile_number), chunk=chunk)
            with contextlib.suppress(ValueError):  # its sums fit no registers
                if self._fits(self.group(covers, tiling)):
                    return tiling
        return None

    def _fits(self, group: Group) -> bool:
        try:
            fusion.place(group, ELEMENT_BYTES[self.system.dtype], self.capacity_bytes)
        except InfeasibleError:
            return False
        return True


def _unnamed_run(regions: Sequence[Region], layers: Sequence[Layer]) -> tuple[object, ...]:
    """A run with numbers for the names of its tensors: what its tilings depend on."""
    numbers: dict[str, str] = {}

    def number(name: str) -> str:
        """The number of a tensor, in the order of first use; none for no tensor."""
        return numbers.setdefault(name, str(len(numbers))) if name else name

    return (
        *(replace(r, inputs=tuple(map(number, r.inputs)), name=number(r.name)) for r in regions),
        *(
            replace(
                layer,
                inputs=tuple(map(number, layer.inputs)),
                name=number(layer.name),
                extra_output=number(layer.extra_output),
            )
            for layer in layers
        ),
    )
