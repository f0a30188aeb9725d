"""Layers as chains of smaller layers: Tucker-2, CP and tensor train of filters. Without TVM."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pimflow.core.chains import Decomposed, Link, Upsampling
from pimflow.core.region import ConvGeometry
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
) -> Decomposed:
    """Decompose a convolution into a chain; a fully connected layer is the 1x1 case.

    Each group is decomposed by itself, all to the same ranks.

    Parameters
    ----------
    layer : str
        Name of the layer.
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
    check(layer, method, geometry, rule, upsampling)
    scale = upsampling.scale if upsampling else (1, 1)
    groups = [joined(each.astype(np.float64), scale) for each in np.split(filters, geometry.groups)]
    ranks = factors.ranks(method, groups, rule)
    chains = [factors.factorise(method, each, ranks) for each in groups]
    missing = sum(_distance(each, chain) for each, chain in zip(groups, chains))
    norm = sum(float(np.vdot(each, each)) for each in groups)
    return Decomposed(
        layer=layer,
        method=method if len(chains[0].cores) else "svd",
        ranks=ranks,
        relative_error=float(np.sqrt(missing / norm)) if norm else 0.0,
        geometry=geometry,
        links=_links(chains, geometry, upsampling),
        upsampling=upsampling,
        rule=rule.text,
    )


def joined(filters: np.ndarray, scale: tuple[int, int]) -> np.ndarray:
    """Merge the phases of a group's filter: [(row, column, OC), KH, KW, C] to [OC, KH*s, KW*s, C]."""
    (sh, sw), (oc, kh, kw, c) = scale, filters.shape
    phases = filters.reshape(sh, sw, oc // (sh * sw), kh, kw, c)
    return phases.transpose(2, 0, 3, 1, 4, 5).reshape(oc // (sh * sw), sh * kh, sw * kw, c)


def _phases(core: np.ndarray, scale: tuple[int, int]) -> np.ndarray:
    """The inverse of `joined`."""
    (sh, sw), (oc, kh, kw, c) = scale, core.shape
    phases = core.reshape(oc, sh, kh // sh, sw, kw // sw, c)
    return phases.transpose(1, 3, 0, 2, 4, 5).reshape(sh * sw * oc, kh // sh, kw // sw, c)


def _distance(filters: np.ndarray, chain: Chain) -> float:
    """Squared distance between a filter and its chain, computed with one array as large as the filter."""
    difference = chain.filters()
    difference -= filters
    return float(np.vdot(difference, difference))


def check(
    layer: str, method: str, geometry: ConvGeometry, rule: RankRule, upsampling: Upsampling | None = None
) -> None:
    """Raise `DecompositionError` if the layer cannot have the ranks that `rule` gives."""
    g, ranks = geometry, rule.ranks
    sh, sw = upsampling.scale if upsampling else (1, 1)
    shape = (g.oc // (g.groups * sh * sw), g.kh * sh, g.kw * sw, g.c // g.groups)
    most = factors.limits(method, shape)
    if ranks and len(ranks) != len(most):
        raise DecompositionError(f"layer '{layer}' takes {len(most)} ranks, not {len(ranks)}")
    for rank, bound in zip(ranks, most):
        if not 1 <= rank <= bound:
            raise DecompositionError(f"rank {rank} of layer '{layer}': its ranks are 1 to {bound}")
    if ranks and method == "tt" and len(ranks) > 1:
        size_of = (shape[3], *(k for k in shape[1:3] if k > 1), shape[0])
        reached = factors.consistent(ranks, size_of)
        if reached != tuple(ranks):
            raise DecompositionError(
                f"ranks {list(ranks)} of layer '{layer}': beside one another they reach {list(reached)} only"
            )


def _links(chains: list[Chain], g: ConvGeometry, upsampling: Upsampling | None = None) -> tuple[Link, ...]:
    """The convolutions of a chain; each has the filters of all groups, concatenated."""
    plain = {"kh": 1, "kw": 1, "stride": (1, 1), "dilation": (1, 1), "padding": (0, 0, 0, 0)}
    count = len(chains[0].cores)
    first = np.concatenate([chain.first for chain in chains])[:, None, None, :]
    now = replace(g, oc=len(first), **({} if count == 0 else plain))
    links = [Link(name="fconv", role="fconv", filters=first.astype(np.float32), geometry=now)]
    h, w, channels = now.oh, now.ow, now.oc
    for position in range(count):
        vertical, horizontal = position == 0, position == count - 1
        sh, sw = upsampling.scale if upsampling else (1, 1)
        scale = (sh if vertical else 1, sw if horizontal else 1)
        arrays = [chain.cores[position] for chain in chains]
        depthwise = arrays[0].ndim == 3
        if depthwise:  # each channel is a group, with its own phases
            arrays = [filters[None, ..., None] for array in arrays for filters in array]
        core = np.concatenate([_phases(array, scale) for array in arrays])
        now = replace(
            g,
            h=h,
            w=w,
            c=channels,
            oc=len(core),
            groups=channels if depthwise else g.groups,
            kh=core.shape[1],
            kw=core.shape[2],
            **_directions(g, vertical=vertical, horizontal=horizontal),
        )
        name = "core" if count == 1 else f"core_{position + 1}"
        links.append(Link(name=name, role="core", filters=core.astype(np.float32), geometry=now, scale=scale))
        h, w, channels = now.oh * scale[0], now.ow * scale[1], now.oc // (scale[0] * scale[1])
    last = np.concatenate([chain.last for chain in chains])[:, None, None, :]
    h, w = upsampling.extent if upsampling else (h, w)
    now = replace(g, h=h, w=w, c=channels, oc=len(last), **plain)
    links.append(Link(name="lconv", role="lconv", filters=last.astype(np.float32), geometry=now))
    return tuple(links)


def _directions(g: ConvGeometry, *, vertical: bool, horizontal: bool) -> dict[str, tuple[int, ...]]:
    """Stride, dilation and padding of `g` in the directions of a core. Of two cores, the first does rows."""
    top, left, bottom, right = g.padding
    return {
        "stride": (g.stride[0] if vertical else 1, g.stride[1] if horizontal else 1),
        "dilation": (g.dilation[0] if vertical else 1, g.dilation[1] if horizontal else 1),
        "padding": (
            top if vertical else 0,
            left if horizontal else 0,
            bottom if vertical else 0,
            right if horizontal else 0,
        ),
    }
