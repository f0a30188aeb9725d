"""The layers of a network in the order that needs the least memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import tvm

from pimflow.compiler.smaller_pool import NetworkRewrite
from pimflow.core.region_graph import RegionGraph
from pimflow.frontend import Network
from pimflow.hardware import System
from pimflow.memory.reorder import TIME_LIMIT_SECONDS, Order, OrderSummary, StepGraph, reorder
from pimflow.relay_passes.kernels.activation_chains import chain_regions, region_runs
from pimflow.relay_passes.memory.reorder_layers import ReorderLayers, order_constraints
from pimflow.relay_passes.regions.extract_regions import extract_regions, region_groups


@dataclass(frozen=True, kw_only=True)
class LayerOrder(NetworkRewrite):
    """A network in the layer order of its file, and in another order, which a plan may require.

    Attributes
    ----------
    order : Order
        Result of the search for few live bytes, counted in the storage type without network inputs; a step is
        a region. `order.order` is the order of the search, also if the network keeps its own.
    """

    order: Order

    def summary(self) -> OrderSummary:
        """Figures for reports: peak live bytes before and after, the lower bound of all orders, pools."""
        live_bytes = self.order.peak_bytes if self.changed else self.order.original_peak_bytes
        return OrderSummary(
            reordered=self.changed,
            kept_because=self.kept_because,
            live_given_bytes=self.order.original_peak_bytes,
            live_bytes=live_bytes,
            lower_bound_bytes=self.order.lower_bound_bytes,
            optimal=self.order.lower_bound_bytes == live_bytes,
            pool_given_bytes=self.pool_given_bytes,
            pool_bytes=self.pool_bytes,
            seconds=self.order.seconds,
        )


def find_order(
    network: Network,
    system: System,
    *,
    names: Sequence[str] | None = None,
    runs: Sequence[Sequence[str]] = (),
    seconds: float = TIME_LIMIT_SECONDS,
) -> LayerOrder:
    """Search the order with the fewest live bytes; its pools are not yet compared (`keep_if_smaller`).

    Parameters
    ----------
    system : System
        Gives the storage type, and whether parts of tensors are views.
    names : sequence of str, optional
        A required order of the regions; the search then only gives the bound.
    runs : sequence of sequence of str
        Runs of regions that will be one kernel each. A run is one step; tensors inside it are never stored.

    Raises
    ------
    UsageError
        If a region comes before one that it reads in `names`.
    """
    region_names = sorted(region_groups(network.module, views=system.uses_views))
    demanded_names = names if names is not None and sorted(names) == region_names else None
    # The order of a plan lists regions, not runs.
    steps = LayerSteps.from_network(network, runs if demanded_names is None else [], system)
    best_order = reorder(steps.graph(), seconds=seconds)
    order = best_order.order
    if demanded_names is not None:
        order = tuple(steps.step_by_region[name] for name in demanded_names)
    unchanged = LayerOrder(
        original=network, network=network, order=best_order, demanded=demanded_names is not None
    )
    if order == tuple(range(len(order))):
        reason = (
            "no order has fewer bytes live" if best_order.optimal else "none with fewer bytes live was found"
        )
        return replace(unchanged, kept_because=reason if demanded_names is None else "the plan has it")
    reordered = steps.with_order(order)
    if reordered is None:
        return replace(unchanged, kept_because="in the other order other layers would make one kernel")
    taken_order = replace(best_order, order=order, peak_bytes=reordered.graph(waits=False).peak_bytes())
    return replace(unchanged, network=reordered.network, order=taken_order)


def with_runs_together(network: Network, system: System) -> Network:
    """`network` with the regions of each run, which may be one kernel, in consecutive order.

    They stand where that kernel would run, after all layers that it reads. The order stays as it is if in the
    new one other layers would form a kernel.
    """
    runs = chain_regions(network.module, views=system.uses_views)
    if len(region_runs(network.module, views=system.uses_views)) == len(runs):
        return network
    steps = LayerSteps.from_network(network, runs, system)
    reordered = steps.with_order(range(len(steps.steps)))
    return reordered.network if reordered else network


@dataclass(frozen=True, kw_only=True)
class LayerSteps:
    """The steps of a network: regions, and runs of regions that will be one kernel each.

    Attributes
    ----------
    steps : tuple of tuple of str
        The regions of each step. A run stands at the position of its last region.
    """

    network: Network
    regions: RegionGraph
    steps: tuple[tuple[str, ...], ...]
    system: System

    @classmethod
    def from_network(cls, network: Network, runs: Sequence[Sequence[str]], system: System) -> LayerSteps:
        """Steps of `network` with `runs` of its regions."""
        regions = extract_regions(network.module, network.name, views=system.uses_views)
        names = [region.name for region in regions.regions]
        run_by_last = {run[-1]: tuple(run) for run in runs}
        early = {name for run in run_by_last.values() for name in run[:-1]}
        steps = tuple(run_by_last.get(name, (name,)) for name in names if name not in early)
        return cls(network=network, regions=regions, steps=steps, system=system)

    @functools.cached_property
    def step_by_region(self) -> dict[str, int]:
        """By region, the number of its step."""
        return {name: number for number, names in enumerate(self.steps) for name in names}

    def graph(self, *, waits: bool = True) -> StepGraph:
        """The steps and the tensors that they read and write; with `waits`, orders do not change regions."""
        waits_by_region = self._waits() if waits else None
        return StepGraph.from_regions(
            self.regions,
            self.system.dtype,
            predecessors=waits_by_region,
            count_inputs=False,
            step_regions=self.steps,
        )

    def with_order(self, order: Sequence[int]) -> LayerSteps | None:
        """The same steps in another order; None if other layers would form a kernel in that order."""
        views, steps = self.system.uses_views, tuple(self.steps[number] for number in order)
        names = [name for step in steps for name in step]
        reorder_layers = tvm.transform.Sequential([ReorderLayers(names, views)])
        network = replace(self.network, module=reorder_layers(self.network.module))
        regions = extract_regions(network.module, network.name, views=views)
        expected_regions = tuple(self.regions.region(name) for name in names)
        reordered = LayerSteps(network=network, regions=regions, steps=steps, system=self.system)
        return reordered if regions.regions == expected_regions else None

    def _waits(self) -> dict[str, list[str]]:
        """By region, earlier regions that must stay before it."""
        waits_by_region, step_by_region = (
            order_constraints(self.network.module, views=self.system.uses_views),
            self.step_by_region,
        )
        return {
            name: [first for first in firsts if step_by_region[first] < step_by_region[name]]
            for name, firsts in waits_by_region.items()
        }
