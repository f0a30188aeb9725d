"""The layers of a network in the order that needs the least memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pimflow.compiler.smaller_pool import Rewritten
from pimflow.frontend import Network
from pimflow.hardware import System
from pimflow.memory.reorder import TIME_LIMIT_SECONDS, Order, OrderSummary, StepGraph, reorder
from pimflow.relay_passes.memory.reorder_layers import ReorderLayers, waits
from pimflow.relay_passes.regions.extract_regions import extract_regions


@dataclass(frozen=True, kw_only=True)
class LayerOrder(Rewritten):
    """A network in the order that its file has, and in another one, which a plan may demand.

    Attributes
    ----------
    order : Order
        Result of the search by live bytes in the storage type, with a step a region and without network
        inputs. `order.order` is the order that was found, whether it is taken or not.
    """

    order: Order

    def summary(self) -> OrderSummary:
        """What reports say of it: bytes live at once before and after, the bound of all orders, pools."""
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
    seconds: float = TIME_LIMIT_SECONDS,
) -> LayerOrder:
    """The order with the fewest live bytes, not yet `settled`.

    Parameters
    ----------
    system : System
        Says the storage type, and which parts of tensors lie inside them.
    names : sequence of str, optional
        Regions in the order to take; the search says how good it is.
    seconds : float
        Time limit of the search.

    Raises
    ------
    UsageError
        If in `names` a region comes before one that it reads.
    """
    views = system.views
    graph = extract_regions(network.module, network.name, views=views)
    place = {region.name: step for step, region in enumerate(graph.regions)}
    steps = StepGraph.of_regions(graph, system.dtype, waits=_waits(network, place, views), inputs_count=False)
    best = reorder(steps, seconds=seconds)
    demanded = names is not None and sorted(names) == sorted(place)
    order = tuple(place[name] for name in names) if demanded else best.order
    same = LayerOrder(given=network, network=network, order=best, demanded=demanded)
    if order == tuple(range(len(order))):
        why = "no order has fewer bytes live" if best.optimal else "none with fewer bytes live was found"
        return replace(same, kept_because="the plan has it" if demanded else why)
    wanted = tuple(graph.regions[step] for step in order)
    module = ReorderLayers([region.name for region in wanted], views)(network.module)
    after = extract_regions(module, network.name, views=views)
    if after.regions != wanted:
        return replace(same, kept_because="in the other order other layers would make one kernel")
    peak_bytes = StepGraph.of_regions(after, system.dtype, inputs_count=False).peak_bytes()
    taken = replace(best, order=order, peak_bytes=peak_bytes)
    return replace(same, network=replace(network, module=module), order=taken)


def _waits(network: Network, place: Mapping[str, int], views: bool) -> dict[str, list[str]]:
    """By region, the earlier regions that have to stay before it."""
    named = waits(network.module, views=views)
    return {name: [first for first in firsts if place[first] < place[name]] for name, firsts in named.items()}
