"""Select convolution primitives for a network (TASO)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pimflow.api.arguments import public
from pimflow.api.options import NetworkKeywords, NetworkOptions, names, network_options, require_known
from pimflow.core.region import RegionGraph
from pimflow.errors import UsageError
from pimflow.hardware import system
from pimflow.primitive_selection.options import SelectionKeywords, SelectionOptions, selection_options
from pimflow.primitive_selection.selection import Selection, select_for, with_network

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pimflow.frontend import Model, Network
    from pimflow.host.result_cache import ResultCache

    class NetworkSelectionKeywords(NetworkKeywords, SelectionKeywords, total=False):
        """The fields of `NetworkOptions` and `SelectionOptions` as keywords."""


@public(NetworkKeywords, SelectionKeywords)
def select(
    model: Model,
    *,
    network: NetworkOptions | None = None,
    options: SelectionOptions | None = None,
    cache: ResultCache | None = None,
    whole: bool = True,
    progress: Callable[[float], None] = lambda _: None,
    **keywords: Unpack[NetworkSelectionKeywords],
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
    whole : bool
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
    from pimflow.api.profile import region_graph

    network, options = _asked(keywords, network, options)
    if network.rewrites:
        changed, graph = _changed(model, network)
    else:
        changed, graph = None, region_graph(model, network, cache)
    found = select_for(graph, options, cache=cache, progress=progress)
    measuring = options.profile in ("measured", "mixed")
    if not whole or not (measuring or found.profile.kernels_ns):
        return found
    from pimflow.api import prepare
    from pimflow.compiler import build, kernel_calls
    from pimflow.primitive_selection import network_time

    read = changed or prepare.load(model, network)
    applied = build.with_primitives(read.module, found.choices, found.layouts)
    calls = kernel_calls.kernel_calls(applied, system())
    known_ns = None if measuring else found.profile.kernels_ns
    return with_network(found, network_time.network_time(calls, cache, known_ns, progress))


def _asked(
    keywords: Mapping[str, object], network: NetworkOptions | None, options: SelectionOptions | None
) -> tuple[NetworkOptions, SelectionOptions]:
    """Return both with fields replaced by `keywords`; raises `UsageError` for an option without effect."""
    known = names(NetworkOptions), names(SelectionOptions)
    require_known(keywords, (*known[0], *known[1]))
    of_network, of_selection = ({k: v for k, v in keywords.items() if k in own} for own in known)
    network, options = network_options(of_network, network), selection_options(of_selection, options)
    for name in ("fuse", "fuse_activations"):
        if getattr(network, name):
            raise UsageError(f"{name} has no effect: primitives are selected layer by layer; leave it out")
    return network, options


def _changed(model: Model, options: NetworkOptions) -> tuple[Network, RegionGraph]:
    """Rewrite a network by `options`; returns it with its regions."""
    from pimflow.api import prepare
    from pimflow.decomposition.network import require_all

    require_all(options.request, "a selection of primitives")
    network = prepare.prepare(prepare.load(model, options), options, system()).network
    return network, prepare.regions(network)
