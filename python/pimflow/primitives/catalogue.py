"""The catalogue: every primitive by its name."""

from __future__ import annotations

from typing import Any

from pimflow.errors import UnknownNameError
from pimflow.primitives.families import FAMILIES
from pimflow.primitives.primitive import Primitive

BLOCKS = ((32, 32), (32, 64), (64, 64))  # tiles of a thread block: places x lanes
WIDE, SQUARE = ((7, 32), (14, 32), (14, 16), (28, 16)), ((7, 32), (14, 16))


def _tiled(
    title: str, family: str, layout: str, shapes: tuple[tuple[int, int], ...], **options: Any
) -> list[Primitive]:
    """A primitive for each shape of a register tile; `options` are further fields of `Primitive`."""
    stem = f"{title}-{layout.lower()}"
    return [
        Primitive(
            name=f"{stem}-{places}x{lanes}",
            formulas=FAMILIES[family],
            layout=layout,
            places=places,
            lanes=lanes,
            **options,
        )
        for places, lanes in shapes
    ]


def _all() -> list[Primitive]:
    primitives = [
        Primitive(name="direct-hwc-loops", formulas=FAMILIES["loops"]),
        Primitive(name="direct-chw-loops", formulas=FAMILIES["loops"], layout="CHW"),
        *_tiled("direct", "direct", "HWC", ((1, 64), (6, 64), *WIDE)),
        *_tiled("direct", "direct", "CHW", WIDE),
        *_tiled("direct", "direct", "CHWc16", ((7, 16), (14, 16), (28, 16))),
        *_tiled("im2row", "windows", "HWC", WIDE),
        *_tiled("im2col", "windows", "CHW", WIDE),
        *_tiled("mec", "mec", "HWC", (*SQUARE, (14, 32))),
        *_tiled("pointwise", "pointwise", "HWC", WIDE),
        *_tiled("pointwise", "pointwise", "CHW", WIDE),
        *_tiled("depthwise", "depthwise", "HWC", ((1, 16), (4, 32), (7, 16), (2, 64))),
        *_tiled("depthwise", "depthwise", "CHW", ((1, 16), (1, 32))),
    ]
    for layout, title in (("HWC", "kn2col"), ("CHW", "kn2row")):
        primitives += _tiled(title, "shifted", layout, SQUARE)
        primitives += _tiled(f"{title}-accumulating", "shifted", layout, SQUARE, accumulating=True)
        for tile in (2, 4):
            for directions in (1, 2):
                name = f"winograd-{directions}d-f{tile}"
                primitives += _tiled(name, "winograd", layout, SQUARE, tile=tile, directions=directions)
        primitives += _tiled("fft-8", "fft", layout, SQUARE, tile=8, directions=2)
    return [*primitives, *_cuda()]


def _cuda() -> list[Primitive]:
    """Primitives for GPUs, in HWC, which is the layout of all other kernels there."""

    def tiled(
        title: str, family: str, shapes: tuple[tuple[int, int], ...] = BLOCKS, **options: int
    ) -> list[Primitive]:
        return _tiled(f"{title}-cuda", family, "HWC", shapes, target="cuda", **options)

    primitives = [
        Primitive(name="operator-cuda-hwc", formulas=FAMILIES["operator"], target="cuda"),
        *tiled("direct", "direct"),
        *tiled("im2row", "windows", shared=True),
        *tiled("implicit-gemm", "windows", shared=True, implicit=True),
        *tiled("pointwise", "pointwise", shared=True),
        *tiled("depthwise", "depthwise", ((8, 32), (16, 64))),
    ]
    for tile in (2, 4):
        primitives += tiled(f"winograd-2d-f{tile}", "winograd", tile=tile, directions=2, shared=True)
    return primitives


PRIMITIVES = {primitive.name: primitive for primitive in _all()}


def named(name: str) -> Primitive:
    """The primitive of that name; raises `UnknownNameError` if there is none."""
    if name not in PRIMITIVES:
        raise UnknownNameError("primitive", name, PRIMITIVES)
    return PRIMITIVES[name]
