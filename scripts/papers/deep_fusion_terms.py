"""Fused groups of `pimflow compile` on a GPU alone, term by term: what each part of their price costs.

The search is repeated with one term of the price left out at a time. What it then gives is an upper bound on
what a better kernel could gain by that term.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

import pimflow
from pimflow import frontend
from pimflow.commands.shared import prepare
from pimflow.core.kernel import ELEMENT_BYTES, Kernel
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import FusedGroupRewrite
from pimflow.fusion import Accelerator, GroupTiling, LayerGraph
from pimflow.fusion.region_layers import input_tensors
from pimflow.fusion.run_costs import Objective, RunCosts
from pimflow.fusion.tiled_kernels import operands
from pimflow.fusion.tilings import TilingSearch
from pimflow.hardware import System
from pimflow.placement import Goal, search
from pimflow.placement.best_plan import SearchResult
from pimflow.simulators.gpu import roofline
from pimflow.simulators.gpu.machine import Demand, RooflineMachine
from pimflow.simulators.gpu.model import KernelCost, kernel_cost
from pimflow.simulators.gpu.region_kernels import gpu_kernels
from pimflow.simulators.gpu.roofline import execution_cycles

DTYPES = ("fp16", "fp32")
GPU_ALONE = Goal(modes=("gpu",))
Counts = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Parts of the price of a fused group that are left out.

    Attributes
    ----------
    halos : bool
        Work and loads for pixels that several tiles compute or load.
    filters : bool
        Filters that tiles after the first read from the L2.
    waits : bool
        Barriers after each layer of each tile.
    steps : bool
        Steps of a warp on tensor cores, and fragments that it moves on chip.
    reads : bool
        The limit that shared memory sets on products that read both operands from it.
    """

    halos: bool = False
    filters: bool = False
    waits: bool = False
    steps: bool = False
    reads: bool = False

    def kernel(self, kernel: Kernel) -> Kernel:
        """`kernel` without these terms; halos are left out before it is made."""
        zero = np.zeros_like(np.asarray(kernel.blocks))
        changes: dict[str, Any] = {"again_bytes": zero} if self.filters else {}
        changes |= {"layers": zero + 1} if self.waits else {}
        changes |= {"steps": zero, "moved_fragments": zero} if self.steps else {}
        changes = {name: value if np.ndim(kernel.blocks) else int(value) for name, value in changes.items()}
        return dataclasses.replace(kernel, **changes)

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Context in which fused groups are priced without these terms."""
        priced = TilingSearch.kernel_in_tiles

        def cheaper(
            tilings: TilingSearch, layers: Any, blocks: Any, touched: Counts, pixels: Counts, chunk: int
        ) -> Kernel:
            """The kernel of `TilingSearch.kernel_in_tiles` without these terms."""
            if self.halos:
                tiles = np.asarray(blocks[0]) * blocks[1]
                sizes = {name: tilings.layers.elements(name) for name in touched}
                touched = {name: np.minimum(count, sizes[name]) for name, count in touched.items()}
                shapes = tilings.layers.shapes
                pixels = {name: -(-(sizes[name] // shapes[name][3]) // tiles) for name in pixels}
            return self.kernel(priced(tilings, layers, blocks, touched, pixels, chunk))

        rate = roofline.PRODUCTS_READ * (1e9 if self.reads else 1)
        with (
            mock.patch.object(TilingSearch, "kernel_in_tiles", cheaper),
            mock.patch.object(roofline, "PRODUCTS_READ", rate),
        ):
            yield


# By column of the table, what is left out.
COLUMNS = {
    "as built": Terms(),
    "halos": Terms(halos=True),
    "filters again": Terms(filters=True),
    "waits": Terms(waits=True),
    "steps": Terms(steps=True),
    "reads": Terms(reads=True),
    "all five": Terms(halos=True, filters=True, waits=True, steps=True, reads=True),
}


def gpu_alone(name: str, dtype: str) -> tuple[RegionGraph, System]:
    """The regions of a network, and a system whose GPU has all memory channels."""
    system = pimflow.system(pim_channels=0, dtype=dtype)
    return prepare.regions(frontend.load(name), system, fuse=True), system


def fastest_plan(graph: RegionGraph, system: System, terms: Terms) -> SearchResult:
    """The fastest plan on the GPU alone, where fused groups cost nothing for `terms`."""
    with terms.left_out():
        return search(graph, system, goal=GPU_ALONE)


def separate_ns(graph: RegionGraph, system: System) -> float:
    """Time of the network layer by layer."""
    return search(dataclasses.replace(graph, fusible=()), system, goal=GPU_ALONE).evaluation.latency_ns


def region_costs(graph: RegionGraph, system: System) -> list[list[KernelCost]]:
    """By region, the costs of its kernels."""
    return [
        []
        if region.is_view
        else [
            kernel_cost(kernel, system.gpu, dtype=system.dtype)
            for kernel in gpu_kernels(region, system.dtype)
        ]
        for region in graph.regions
    ]


def separate_rates_ns(graph: RegionGraph, system: System) -> float:
    """Time with the best cut into groups that compute as fast as their layers by themselves.

    Such a group has one launch, and moves its operands, filters and result once, over the L2 and DRAM. Its
    length and what lies on chip have no limit. This is no kernel that is known, but what fusion could save.
    Where small layers leave tensor cores idle, a fused kernel may be faster.
    """
    gpu, dtype = system.gpu, system.dtype
    machine, element = RooflineMachine(gpu, dtype), ELEMENT_BYTES[dtype]
    costs = region_costs(graph, system)
    times_ns = [sum(cost.total_ns for cost in region) for region in costs]
    best_ns = [0.0]
    groups_by_end: dict[int, list[int]] = {}
    with mock.patch.object(TilingSearch, "has_space", lambda *_: True):
        for begin, end, _ in TilingSearch(graph, system).candidate_runs():
            groups_by_end.setdefault(end, []).append(begin)
    for end in range(1, len(costs) + 1):
        best_ns.append(best_ns[-1] + times_ns[end - 1])
        for begin in groups_by_end.get(end, []):
            regions = graph.regions[begin:end]
            sizes = {n: size for r in regions for n, size in zip(input_tensors(r), r.input_elements)}
            reads = sum(sizes[name] for name in operands(regions)) * element
            filters = sum(region.weight_bytes(dtype) for region in regions)
            writes = regions[-1].output_elements * element
            dram_bytes, dram = machine.dram_traffic(reads, filters, writes)
            compute_ns = sum(cost.compute_ns for region in costs[begin:end] for cost in region)
            l2_bytes = reads + filters + writes
            compute, l2, moved, fixed = map(
                np.atleast_2d,
                (
                    compute_ns * machine.cycles_per_ns,
                    l2_bytes / machine.l2_rate,
                    dram,
                    machine["kernel_cycles"],
                ),
            )
            demand = Demand(compute, l2, moved, fixed, np.atleast_2d(dram_bytes), np.atleast_2d(l2_bytes))
            cycles = float(execution_cycles(demand, machine)[0, 0])
            best_ns[end] = min(best_ns[end], best_ns[begin] + gpu.launch_ns + cycles / machine.cycles_per_ns)
    return best_ns[-1]


@dataclass(frozen=True, kw_only=True)
class GroupTraffic:
    """DRAM traffic of a fused group, by the GPU model and by Deep Fusion's analysis; its L2 traffic."""

    covers: tuple[str, ...]
    modelled_bytes: float
    analysed_bytes: float
    l2_bytes: float


def group_traffic(result: SearchResult) -> list[GroupTraffic]:
    """Traffic of each fused group of a plan.

    The analysis takes the same layers as one group, with the shared memory of all multiprocessors as on-chip
    memory, the weights where they fit, and rows retained. The GPU's L2 fetches a line before it is written
    (`GpuSpec.write_factor`); that is not counted here, since the analysis has no L2.
    """
    system, tilings = result.system, result.generator.tilings
    accelerator = Accelerator(on_chip_bytes=system.gpu.sms * tilings.capacity_bytes, dtype=system.dtype)
    rows = []
    for candidate in result.candidates:
        if not isinstance(candidate.rewrite, FusedGroupRewrite):
            continue
        kernel = tilings.kernel(candidate.covers, GroupTiling.parse(candidate.rewrite.tiling))
        cost = kernel_cost(kernel, system.gpu, dtype=system.dtype)
        fetched = kernel.output_bytes * (system.gpu.write_factor - 1)
        begin = tilings.layers.index[candidate.covers[0]]
        rows.append(
            GroupTraffic(
                covers=candidate.covers,
                modelled_bytes=cost.dram_bytes - fetched,
                analysed_bytes=_analysed_bytes(tilings.layers, begin, len(candidate.covers), accelerator),
                l2_bytes=cost.l2_bytes,
            )
        )
    return rows


def _analysed_bytes(graph: LayerGraph, begin: int, count: int, accelerator: Accelerator) -> float:
    costs = RunCosts(graph, Objective(accelerator, "traffic"), "lifetime", "retain", lambda _: None)
    group = costs.run(begin, begin + count)
    assert group is not None, "a group of a plan fits into the memory of all multiprocessors"
    return group.objective


def term_rows(
    names: Sequence[str], other_names: Sequence[str], note: Callable[[str], None] = print
) -> tuple[list[str], list[str]]:
    """The table of terms, and that of the traffic of groups; means are over `names` alone."""
    columns = (*COLUMNS, "products as apart")
    terms = [
        f"| network | type | layer by layer | {' | '.join(columns)} |",
        "|---" * (len(columns) + 3) + "|",
    ]
    traffic = [
        "| network | type | groups | layers in them | DRAM, modelled | DRAM, analysis | largest difference "
        "| through the L2 |",
        "|---" * 8 + "|",
    ]
    gains: dict[str, list[list[float]]] = {dtype: [] for dtype in DTYPES}
    groups: list[GroupTraffic] = []
    for name in (*names, *other_names):
        for dtype in DTYPES:
            note(f"{name}, {dtype}")
            graph, system = gpu_alone(name, dtype)
            separate = separate_ns(graph, system)
            results = [fastest_plan(graph, system, left_out) for left_out in COLUMNS.values()]
            times_ns = [
                *(result.evaluation.latency_ns for result in results),
                separate_rates_ns(graph, system),
            ]
            speedups = [separate / time_ns for time_ns in times_ns]
            gains[dtype] += [speedups] if name in names else []
            terms.append(f"| {name} | {dtype} | {separate / 1e6:.3f} ms | {_cells(speedups)} |")
            groups += group_traffic(results[0]) if name in names else []
            traffic.append(f"| {name} | {dtype} | {_traffic_cells(group_traffic(results[0]))} |")
    traffic.append(f"| the paper's five, all groups | | {_traffic_cells(groups)} |")
    means = {dtype: np.exp(np.log(rows).mean(axis=0)).tolist() for dtype, rows in gains.items()}
    terms += [
        f"| the paper's five, geometric mean | {dtype} | | {_cells(means[dtype])} |" for dtype in DTYPES
    ]
    return terms, traffic


def _cells(speedups: Sequence[float]) -> str:
    return " | ".join(f"{speedup:.3f} x" for speedup in speedups)


def _traffic_cells(groups: Sequence[GroupTraffic]) -> str:
    if not groups:
        return "0 | 0 | | | |"
    totals = [
        sum(getattr(group, f"{kind}_bytes") for group in groups) / 2**20
        for kind in ("modelled", "analysed", "l2")
    ]
    modelled, analysed, l2 = (f"{total:.2f} MiB" for total in totals)
    modelled += f" ({totals[0] / totals[1] - 1:+.1%})"
    largest = max(abs(group.modelled_bytes / group.analysed_bytes - 1) for group in groups)
    layers = sum(len(group.covers) for group in groups)
    return f"{len(groups)} | {layers} | {modelled} | {analysed} | {largest:.1%} | {l2}"
