"""The layers of a network in the order that needs the least memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pimflow.compiler.smaller_pool import Rewritten
from pimflow.core.region import RegionGraph
from pimflow.frontend import Network
from pimflow.hardware import System
from pimflow.memory.reorder import TIME_LIMIT_SECONDS, Order, OrderSummary, StepGraph, reorder
from pimflow.relay_passes.kernels.fuse_groups import chain_regions, region_runs
from pimflow.relay_passes.memory.reorder_layers import ReorderLayers, waits
from pimflow.relay_passes.regions.extract_regions import extract_regions, region_groups


@dataclass(frozen=True, kw_only=True)
class LayerOrder(Rewritten):
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
        live_bytes = self.order.peak_bytes if self.changed else self.order.given_peak_bytes
        return OrderSummary(
            reordered=self.changed,
            kept_because=self.kept_because,
            live_given_bytes=self.order.given_peak_bytes,
            live_bytes=live_bytes,
            lower_bound_bytes=self.order.lower_bound_bytes,
            optimal=self.order.lower_bound_bytes == live_bytes,
            pool_given_bytes=self.pool_given_bytes,
            pool_bytes=self.pool_bytes,
            seconds=self.order.seconds,
        )


def find(
    network: Network,
    system: System,
    *,
    names: Sequence[str] | None = None,
    runs: Sequence[Sequence[str]] = (),
    seconds: float = TIME_LIMIT_SECONDS,
) -> LayerOrder:
    """Search the order with the fewest live bytes; its pools are not yet compared (`settled`).

    Parameters
    ----------
    system : System
        Gives the storage type, and whether parts of tensors are views.
    names : sequence of str, optional
        A required order of the regions; the search then only gives the bound.
    runs : sequence of sequence of str
        Runs of regions that will be one kernel each. A run is one step; tensors inside it are never stored.
    seconds : float
        Time limit of the search.

    Raises
    ------
    UsageError
        If a region comes before one that it reads in `names`.
    """
    known = sorted(region_groups(network.module, views=system.views))
    demanded = names is not None and sorted(names) == known
    # The order of a plan lists regions, not runs.
    whole = Steps.of(network, [] if demanded else runs, system)
    best = reorder(whole.graph(), seconds=seconds)
    order = tuple(whole.place[name] for name in names) if demanded else best.order
    same = LayerOrder(given=network, network=network, order=best, demanded=demanded)
    if order == tuple(range(len(order))):
        why = "no order has fewer bytes live" if best.optimal else "none with fewer bytes live was found"
        return replace(same, kept_because="the plan has it" if demanded else why)
    after = whole.ordered(order)
    if after is None:
        return replace(same, kept_because="in the other order other layers would make one kernel")
    taken = replace(best, order=order, peak_bytes=after.graph(waits=False).peak_bytes())
    return replace(same, network=after.network, order=taken)


def with_runs_together(network: Network, system: System) -> Network:
    """`network` with the regions of each run, which may be one kernel, in consecutive order.

    They stand where that kernel would run, after all layers that it reads. The order stays as it is if in the
    new one other layers would form a kernel.
    """
    runs = chain_regions(network.module, views=system.views)
    if len(region_runs(network.module, views=system.views)) == len(runs):
        return network
    steps = Steps.of(network, runs, system)
    together = steps.ordered(range(len(steps.steps)))
    return together.network if together else network


@dataclass(frozen=True, kw_only=True)
class Steps:
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
    def of(cls, network: Network, runs: Sequence[Sequence[str]], system: System) -> Steps:
        """Steps of `network` with `runs` of its regions."""
        regions = extract_regions(network.module, network.name, views=system.views)
        names = [region.name for region in regions.regions]
        inside = {run[-1]: tuple(run) for run in runs}
        early = {name for run in inside.values() for name in run[:-1]}
        steps = tuple(inside.get(name, (name,)) for name in names if name not in early)
        return cls(network=network, regions=regions, steps=steps, system=system)

    @functools.cached_property
    def place(self) -> dict[str, int]:
        """By region, the number of its step."""
        return {name: number for number, names in enumerate(self.steps) for name in names}

    def graph(self, *, waits: bool = True) -> StepGraph:
        """The steps and the tensors that they read and write; with `waits`, orders do not change regions."""
        named = self._waits() if waits else None
        return StepGraph.of_regions(
            self.regions, self.system.dtype, waits=named, inputs_count=False, together=self.steps
        )

    def ordered(self, order: Sequence[int]) -> Steps | None:
        """The same steps in another order; None if other layers would form a kernel in that order."""
        views, steps = self.system.views, tuple(self.steps[number] for number in order)
        names = [name for step in steps for name in step]
        network = replace(self.network, module=ReorderLayers(names, views)(self.network.module))
        regions = extract_regions(network.module, network.name, views=views)
        wanted = tuple(self.regions.region(name) for name in names)
        after = Steps(network=network, regions=regions, steps=steps, system=self.system)
        return after if regions.regions == wanted else None

    def _waits(self) -> dict[str, list[str]]:
        """By region, earlier regions that must stay before it."""
        named, place = waits(self.network.module, views=self.system.views), self.place
        return {
            name: [first for first in firsts if place[first] < place[name]] for name, firsts in named.items()
        }
