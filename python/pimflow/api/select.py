"""Convolution primitives chosen for a network (TASO)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pimflow.api.options import NetworkOptions
from pimflow.primitive_selection.options import SelectionOptions, selection_options
from pimflow.primitive_selection.selection import Selection, select_for, with_network

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pimflow.api.options import Shapes
    from pimflow.frontend import Model
    from pimflow.host.result_cache import ResultCache
    from pimflow.primitive_selection.options import SelectionKeywords


def select(
    model: Model,
    *,
    shapes: Shapes | None = None,
    batch: int | None = None,
    options: SelectionOptions | None = None,
    cache: ResultCache | None = None,
    whole: bool = True,
    progress: Callable[[float], None] = lambda _: None,
    **keywords: Unpack[SelectionKeywords],
) -> Selection:
    """Choose a convolution primitive and a layout for every convolution of a network (Wen et al., *TASO*).

    Parameters
    ----------
    model, shapes, batch
        See `frontend.load`.
    options : SelectionOptions, optional
        The least time, measured on this machine, by default.
    cache : ResultCache, optional
        Where measured times are kept.
    whole : bool
        Whether to say how long the whole network takes as well, where primitives are measured or the profile
        has the times of its kernels: the network is loaded, and what was not timed before is compiled.
    progress : callable
        Told which share of the measuring is done.
    **keywords
        Fields of `options`, in place of what these say.

    Raises
    ------
    UsageError
        For an unknown keyword or a value of another type.
    PimflowError
        See `primitive_selection.selection.select_for`.
    """
    from pimflow.api.profile import region_graph

    options = selection_options(keywords, options)
    read = NetworkOptions(shapes=shapes, batch=batch)
    graph = region_graph(model, read.shapes or {}, cache, batch=batch)
    found = select_for(graph, options, cache=cache, progress=progress)
    measuring = options.profile in ("measured", "mixed")
    if not whole or not (measuring or found.profile.kernels_ns):
        return found
    from pimflow.api import prepare
    from pimflow.compiler import build, kernel_calls
    from pimflow.hardware import system
    from pimflow.primitive_selection import network_time

    network = prepare.load(model, read)
    applied = build.with_primitives(network.module, found.choices, found.layouts)
    calls = kernel_calls.kernel_calls(applied, system())
    known_ns = None if measuring else found.profile.kernels_ns
    return with_network(found, network_time.network_time(calls, cache, known_ns, progress))
