"""A decomposed layer: the chain of smaller convolutions that replaces it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pimflow.core.kernel import ConvGeometry


@dataclass(frozen=True, kw_only=True)
class Upsampling:
    """How the channels of a convolution become pixels of a larger map (depth to space).

    The canonical form of a transposed convolution of stride s is a convolution with s*s times the channels,
    in the order (group, row, column, channel); depth to space then makes a map of s times the height and
    width. The filter of the transposed convolution is [OC // (s*s), KH*s, KW*s, C].

    Attributes
    ----------
    scale : tuple of int
        (vertical, horizontal).
    begin, extent : tuple of int
        First row and column after cropping, and numbers of rows and columns, (vertical, horizontal).
    """

    scale: tuple[int, int]
    begin: tuple[int, int]
    extent: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Link:
    """One convolution of a chain.

    Attributes
    ----------
    name : str
        Unique in the layer: ``fconv``, ``core`` (``core_1``, ``core_2`` if there are two), ``lconv``.
    role : str
        One of `core.region.ROLES`.
    filters : ndarray, [OC, KH, KW, C // groups]
        fp32.
    scale : tuple of int
        Factors of depth to space after it, (vertical, horizontal).
    """

    name: str
    role: str
    filters: np.ndarray
    geometry: ConvGeometry
    scale: tuple[int, int] = (1, 1)


@dataclass(frozen=True, kw_only=True)
class LayerChain:
    """A layer as a chain of convolutions.

    Attributes
    ----------
    method : str
        ``tucker``, ``cp``, ``tt``, or ``svd``, which all of them are for a 1x1 window.
    relative_error : float
        Error of the filters: Frobenius norm of the difference over that of the layer's filters.
    geometry : ConvGeometry
        The layer before its decomposition.
    links : tuple of Link
        In order; the bias comes after the last.
    upsampling : Upsampling, optional
        For a transposed convolution; its map is cropped before the last link.
    """

    layer: str
    method: str
    ranks: tuple[int, ...]
    relative_error: float
    geometry: ConvGeometry
    links: tuple[Link, ...]
    upsampling: Upsampling | None = None
    rule: str = ""

    @property
    def weight_elements(self) -> int:
        """Elements of all filters."""
        return sum(link.filters.size for link in self.links)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of all links."""
        return sum(link.geometry.macs for link in self.links)


def is_decomposable(geometry: ConvGeometry) -> bool:
    """Whether a layer can be decomposed: not a depthwise convolution, whose groups have one channel."""
    return geometry.groups == 1 or geometry.c > geometry.groups
