"""What the command optimisations of PIMFlow's paper could still save, if they were used for every layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from papers.pimflow_comparison import NETWORKS, NEWTON_PLUS_PLUS, TIMINGS, Row, Searches
from pimflow.core.commands import Loop, Node, Readres
from pimflow.core.kernel import ConvGeometry
from pimflow.core.loop_order import LoopOrder
from pimflow.hardware import PimSpec
from pimflow.pim_backend.programs.lowering import LoweringLimits, ProgramRequest
from pimflow.placement.costs.pim_runs import PimTarget

BUSIEST = LoweringLimits(only_busiest=True, timing_only=True)
# The published timing serves refreshes after READRESs alone, so that without them it gives no bound.
BOUNDED_TIMING = "strict"


class UntriedOrder(ProgramRequest):
    """A request for a program in a loop order that the compiler does not try for the layer."""

    def require_fit(self, pim: PimSpec, dtype: str) -> None:
        """Nothing: that it is not tried is the reason for asking."""


def command_bounds(searches: Searches, models: Sequence[str] = NETWORKS) -> list[Row]:
    """Time of all layers of each network on PIM at the level Newton++, and what it could be.

    ``small_ns`` is with tiles over some of the gangs for layers of any number of pixels, ``faster`` how many
    layers gain by it; ``unread_ns`` is the time of the same commands without any READRES, which no place of
    these commands can undercut.
    """
    rows = []
    for timing in TIMINGS:
        system = NEWTON_PLUS_PLUS.system("paper", timing)
        target = searches.costs(system, searches.profiling).pim_target
        for model in models:
            searches.progress(f"{model}, {timing}, commands of each layer")
            layers = Counter(
                region.geometry
                for region in searches.graph(model).regions
                if region.geometry is not None and target.schedules(region.geometry)
            )
            rows.append({"model": model, "timing": timing, **_layer_times(layers, target, timing)})
    return rows


def _layer_times(layers: Counter[ConvGeometry], target: PimTarget, timing: str) -> Row:
    """Sums over layers, each as often as it is there."""
    row: Row = {"layers": layers.total(), "faster": 0, "newton_ns": 0.0, "small_ns": 0.0}
    unread_ns = 0.0
    for geometry, count in layers.items():
        orders = target.schedules(geometry)
        newton = min(orders, key=lambda order: target.busiest_ns(geometry, order, ""))
        newton_ns = target.busiest_ns(geometry, newton, "")
        small = [
            target.run(UntriedOrder("", geometry, order), BUSIEST).timing.time_ns
            for order in small_tile_orders(orders, target.pim.gangs)
            if order not in orders
        ]
        small_ns = min([newton_ns, *small])
        row["faster"] += count * (small_ns < newton_ns)
        row["newton_ns"] += count * newton_ns
        row["small_ns"] += count * small_ns
        if timing == BOUNDED_TIMING:
            unread_ns += count * _unread_ns(geometry, newton, target)
    return row | {"unread_ns": unread_ns if timing == BOUNDED_TIMING else None}


def small_tile_orders(orders: Iterable[LoopOrder], gangs: int) -> list[LoopOrder]:
    """The orders over all gangs, with tiles over each smaller number of gangs that divides them."""
    counts = [count for count in range(1, gangs) if gangs % count == 0]
    return [
        replace(order, gangs=count)
        for order in orders
        if order.gangs == 0 and order.stationary != "input"
        for count in counts
    ]


def _unread_ns(geometry: ConvGeometry, order: LoopOrder, target: PimTarget) -> float:
    """Time of a layer's commands without its READRESs."""
    program = target.program(ProgramRequest("", geometry, order), BUSIEST)
    channels = tuple(without_reads(nodes) for nodes in program.channels)
    return target.profiler.time_program(replace(program, channels=channels), target.pim).time_ns


def without_reads(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Commands without READRESs, in loops too."""
    return tuple(
        replace(node, body=without_reads(node.body)) if isinstance(node, Loop) else node
        for node in nodes
        if not isinstance(node, Readres)
    )
