"""Convolution primitives chosen for a network (TASO)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pimflow.primitive_selection.selection import Selection, select_for, with_network

if TYPE_CHECKING:
    from pimflow.frontend import Model
    from pimflow.host.result_cache import ResultCache


def select(
    model: Model,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    batch: int | None = None,
    cache: ResultCache | None = None,
    whole: bool = True,
    **options: Any,
) -> Selection:
    """Choose a convolution primitive and a layout for every convolution of a network (Wen et al., *TASO*).

    Parameters
    ----------
    model, shapes, batch
        See `frontend.load`.
    cache : ResultCache, optional
        Where measured times are kept.
    whole : bool
        Whether to say how long the whole network takes as well, where primitives are measured or `profile`
        has the times of its kernels: the network is loaded, and what was not timed before is compiled.
    **options
        Of `select_for`, which says what it raises.
    """
    from pimflow.api.profile import region_graph

    graph = region_graph(model, shapes or {}, cache, batch=batch)
    found = select_for(graph, cache=cache, **options)
    measuring = options.get("profile", "measured") in ("measured", "mixed")
    if not whole or not (measuring or found.profile.kernels_ns):
        return found
    from pimflow import frontend
    from pimflow.compiler import build, kernel_calls
    from pimflow.hardware import system
    from pimflow.primitive_selection import network_time

    network = frontend.load(model, shapes or {}, batch)
    applied = build.with_primitives(network.module, found.choices, found.layouts)
    calls = kernel_calls.kernel_calls(applied, system())
    known_ns = None if measuring else found.profile.kernels_ns
    progress = options.get("progress", lambda _: None)
    return with_network(found, network_time.network_time(calls, cache, known_ns, progress))
