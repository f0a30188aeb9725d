"""Select convolution primitives for a network (TASO)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pimflow.commands.shared.arguments import public
from pimflow.commands.shared.options import NetworkOptions
from pimflow.core.options import split_keywords
from pimflow.core.region_graph import RegionGraph
from pimflow.errors import UsageError
from pimflow.hardware import system
from pimflow.primitive_selection.options import SelectionOptions, selection_options
from pimflow.primitive_selection.selection import Selection, select_for, with_network

if TYPE_CHECKING:
    from pimflow.frontend import Model, Network
    from pimflow.host.result_cache import ResultCache


@public(NetworkOptions, SelectionOptions)
def select(
    model: Model,
    *,
    network: NetworkOptions | None = None,
    options: SelectionOptions | None = None,
    cache: ResultCache | None = None,
    time_network: bool = True,
    progress: Callable[[float], None] = lambda _: None,
    **keywords: Any,
) -> Selection:
    """Choose a convolution primitive and a layout for every convolution of a network (Wen et al., *TASO*).

    Parameters
    ----------
    model
        See `frontend.load`.
    network : NetworkOptions, optional
        Rewrites of the network before: decomposition, reduced skip connections, another order.
    options : SelectionOptions, optional
        By default the shortest time, measured on this machine.
    cache : ResultCache, optional
        Stores measured times.
    time_network : bool
        Whether to time the whole network too, if primitives are measured or the profile has the times of its
        kernels. The network is loaded, and kernels without a time are compiled.
    progress : callable
        Called with the share of the measurements that is done, in [0, 1].
    **keywords
        Fields that replace those of `network` and `options`.

    Raises
    ------
    UsageError
        For an unknown keyword or a value of another type.
    PimflowError
        See `primitive_selection.selection.select_for`.
    """
    from pimflow.commands.profile.profile import region_graph

    network, options = _merge_keywords(keywords, network, options)
    if network.rewrites:
        rewritten, graph = _rewrite_network(model, network)
    else:
        rewritten, graph = None, region_graph(model, network, cache)
    selection = select_for(graph, options, cache=cache, progress=progress)
    is_measured = options.profile in ("measured", "mixed")
    if not time_network or not (is_measured or selection.profile.kernels_ns):
        return selection
    from pimflow.commands.shared import prepare
    from pimflow.compiler import build, kernel_calls
    from pimflow.primitive_selection import network_time

    source = rewritten or prepare.load(model, network)
    primitives = build.LayerPrimitives(selection.choices, selection.layouts)
    applied = build.with_primitives(source.module, primitives)
    calls = kernel_calls.kernel_calls(applied, system())
    known_ns = None if is_measured else selection.profile.kernels_ns
    return with_network(selection, network_time.network_time(calls, cache, known_ns, progress))


def _merge_keywords(
    keywords: Mapping[str, object], network: NetworkOptions | None, options: SelectionOptions | None
) -> tuple[NetworkOptions, SelectionOptions]:
    """Return both with fields replaced by `keywords`; raises `UsageError` for an option without effect."""
    network_values, selection_values = split_keywords(keywords, NetworkOptions, SelectionOptions)
    network = NetworkOptions.from_keywords(network_values, network)
    options = selection_options(selection_values, options)
    for name in ("fuse", "fuse_activations"):
        if getattr(network, name):
            raise UsageError(f"{name} has no effect: primitives are selected layer by layer; leave it out")
    return network, options


def _rewrite_network(model: Model, options: NetworkOptions) -> tuple[Network, RegionGraph]:
    """Rewrite a network by `options`; returns it with its regions."""
    from pimflow.commands.shared import prepare
    from pimflow.decomposition.network import require_all

    require_all(options.decomposition_request, "a selection of primitives")
    network = prepare.prepare(prepare.load(model, options), options, system()).network
    return network, prepare.regions(network)
