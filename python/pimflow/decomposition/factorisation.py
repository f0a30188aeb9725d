"""Layers as chains of smaller layers, by Tucker-2, CP or tensor trains of their filters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pimflow.core.chains import LayerChain, Link, Upsampling
from pimflow.core.kernel import ConvGeometry
from pimflow.decomposition import factors
from pimflow.decomposition.factors import Chain
from pimflow.decomposition.ranks import RankRule
from pimflow.errors import DecompositionError


def decompose(
    layer: str,
    filters: np.ndarray,
    geometry: ConvGeometry,
    method: str,
    rule: RankRule,
    upsampling: Upsampling | None = None,
) -> LayerChain:
    """Decompose a convolution into a chain; a fully connected layer is the 1x1 case.

    Each group is decomposed by itself, all to the same ranks.

    Parameters
    ----------
    filters : ndarray, [OC, KH, KW, C // groups]
    method : str
        One of `factors.METHODS`.
    upsampling : Upsampling, optional
        Of a transposed convolution: its filter is decomposed with all phases together.

    Raises
    ------
    DecompositionError
        If the layer cannot have the ranks of `rule`.
    """
    check_ranks(layer, method, geometry, rule, upsampling)
    scale = upsampling.scale if upsampling else (1, 1)
    groups = [merge_phases(group.astype(np.float64), scale) for group in np.split(filters, geometry.groups)]
    ranks = factors.ranks(method, groups, rule)
    chains = [factors.factorise(method, group, ranks) for group in groups]
    squared_error = sum(_squared_error(group, chain) for group, chain in zip(groups, chains))
    squared_norm = sum(float(np.vdot(group, group)) for group in groups)
    return LayerChain(
        layer=layer,
        method=method if len(chains[0].cores) else "svd",
        ranks=ranks,
        relative_error=float(np.sqrt(squared_error / squared_norm)) if squared_norm else 0.0,
        geometry=geometry,
        links=_links(chains, geometry, upsampling),
        upsampling=upsampling,
        rule=rule.text,
    )


def merge_phases(filters: np.ndarray, scale: tuple[int, int]) -> np.ndarray:
    """Merge the phases of a group's filter: [(row, column, OC), KH, KW, C] to [OC, KH*s, KW*s, C]."""
    (sh, sw), (oc, kh, kw, c) = scale, filters.shape
    phases = filters.reshape(sh, sw, oc // (sh * sw), kh, kw, c)
    return phases.transpose(2, 0, 3, 1, 4, 5).reshape(oc // (sh * sw), sh * kh, sw * kw, c)


def _split_phases(core: np.ndarray, scale: tuple[int, int]) -> np.ndarray:
    """The inverse of `merge_phases`."""
    (sh, sw), (oc, kh, kw, c) = scale, core.shape
    phases = core.reshape(oc, sh, kh // sh, sw, kw // sw, c)
    return phases.transpose(1, 3, 0, 2, 4, 5).reshape(sh * sw * oc, kh // sh, kw // sw, c)


def _squared_error(filters: np.ndarray, chain: Chain) -> float:
    """Squared error of a chain against its filter, computed with one array as large as the filter."""
    difference = chain.filters()
    difference -= filters
    return float(np.vdot(difference, difference))


def check_ranks(
    layer: str, method: str, geometry: ConvGeometry, rule: RankRule, upsampling: Upsampling | None = None
) -> None:
    """Raise `DecompositionError` if the layer cannot have the ranks that `rule` gives."""
    g, ranks = geometry, rule.ranks
    sh, sw = upsampling.scale if upsampling else (1, 1)
    shape = (g.oc // (g.groups * sh * sw), g.kh * sh, g.kw * sw, g.c // g.groups)
    rank_limits = factors.max_ranks(method, shape)
    if ranks and len(ranks) != len(rank_limits):
        raise DecompositionError(f"layer '{layer}' takes {len(rank_limits)} ranks, not {len(ranks)}")
    for rank, bound in zip(ranks, rank_limits):
        if not 1 <= rank <= bound:
            raise DecompositionError(f"rank {rank} of layer '{layer}': its ranks are 1 to {bound}")
    if ranks and method == "tt" and len(ranks) > 1:
        mode_sizes = (shape[3], *(k for k in shape[1:3] if k > 1), shape[0])
        reachable = factors.consistent_ranks(ranks, mode_sizes)
        if reachable != tuple(ranks):
            raise DecompositionError(
                f"ranks {list(ranks)} of layer '{layer}': together they can be at most {list(reachable)} only"
            )


def _links(
    chains: list[Chain], geometry: ConvGeometry, upsampling: Upsampling | None = None
) -> tuple[Link, ...]:
    """The convolutions of a chain; each has the filters of all groups, concatenated."""
    pointwise = {"kh": 1, "kw": 1, "stride": (1, 1), "dilation": (1, 1), "padding": (0, 0, 0, 0)}
    count = len(chains[0].cores)
    first = np.concatenate([chain.first for chain in chains])[:, None, None, :]
    link_geometry = replace(geometry, oc=len(first), **({} if count == 0 else pointwise))
    links = [Link(name="fconv", role="fconv", filters=first.astype(np.float32), geometry=link_geometry)]
    h, w, channels = link_geometry.oh, link_geometry.ow, link_geometry.oc
    for position in range(count):
        vertical, horizontal = position == 0, position == count - 1
        sh, sw = upsampling.scale if upsampling else (1, 1)
        scale = (sh if vertical else 1, sw if horizontal else 1)
        arrays = [chain.cores[position] for chain in chains]
        depthwise = arrays[0].ndim == 3
        if depthwise:  # each channel is a group, with its own phases
            arrays = [filters[None, ..., None] for array in arrays for filters in array]
        core = np.concatenate([_split_phases(array, scale) for array in arrays])
        link_geometry = replace(
            geometry,
            h=h,
            w=w,
            c=channels,
            oc=len(core),
            groups=channels if depthwise else geometry.groups,
            kh=core.shape[1],
            kw=core.shape[2],
            **_core_window(geometry, vertical=vertical, horizontal=horizontal),
        )
        name = "core" if count == 1 else f"core_{position + 1}"
        links.append(
            Link(name=name, role="core", filters=core.astype(np.float32), geometry=link_geometry, scale=scale)
        )
        h = link_geometry.oh * scale[0]
        w = link_geometry.ow * scale[1]
        channels = link_geometry.oc // (scale[0] * scale[1])
    last = np.concatenate([chain.last for chain in chains])[:, None, None, :]
    h, w = upsampling.extent if upsampling else (h, w)
    link_geometry = replace(geometry, h=h, w=w, c=channels, oc=len(last), **pointwise)
    links.append(Link(name="lconv", role="lconv", filters=last.astype(np.float32), geometry=link_geometry))
    return tuple(links)


def _core_window(geometry: ConvGeometry, *, vertical: bool, horizontal: bool) -> dict[str, tuple[int, ...]]:
    """Stride, dilation and padding of `geometry` in the directions of a core.

    Of two cores, the first does rows.
    """
    pad_top, pad_left, pad_bottom, pad_right = geometry.padding
    return {
        "stride": (geometry.stride[0] if vertical else 1, geometry.stride[1] if horizontal else 1),
        "dilation": (geometry.dilation[0] if vertical else 1, geometry.dilation[1] if horizontal else 1),
        "padding": (
            pad_top if vertical else 0,
            pad_left if horizontal else 0,
            pad_bottom if vertical else 0,
            pad_right if horizontal else 0,
        ),
    }
