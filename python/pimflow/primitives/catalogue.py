"""The catalogue: every primitive by its name."""

from __future__ import annotations

from typing import Any

from pimflow.errors import UnknownNameError
from pimflow.primitives.families import FAMILIES
from pimflow.primitives.primitive import Primitive

BLOCKS = ((32, 32), (32, 64), (64, 64))  # tiles of a thread block: places x lanes
WIDE, SQUARE = ((7, 32), (14, 32), (14, 16), (28, 16)), ((7, 32), (14, 16))


def _tile_variants(
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


def _all_primitives() -> list[Primitive]:
    primitives = [
        Primitive(name="direct-hwc-loops", formulas=FAMILIES["loops"]),
        Primitive(name="direct-chw-loops", formulas=FAMILIES["loops"], layout="CHW"),
        *_tile_variants("direct", "direct", "HWC", ((1, 64), (6, 64), *WIDE)),
        *_tile_variants("direct", "direct", "CHW", WIDE),
        *_tile_variants("direct", "direct", "CHWc16", ((7, 16), (14, 16), (28, 16))),
        *_tile_variants("im2row", "windows", "HWC", WIDE),
        *_tile_variants("im2col", "windows", "CHW", WIDE),
        *_tile_variants("mec", "mec", "HWC", (*SQUARE, (14, 32))),
        *_tile_variants("pointwise", "pointwise", "HWC", WIDE),
        *_tile_variants("pointwise", "pointwise", "CHW", WIDE),
        *_tile_variants("depthwise", "depthwise", "HWC", ((1, 16), (4, 32), (7, 16), (2, 64))),
        *_tile_variants("depthwise", "depthwise", "CHW", ((1, 16), (1, 32))),
    ]
    for layout, title in (("HWC", "kn2col"), ("CHW", "kn2row")):
        primitives += _tile_variants(title, "shifted", layout, SQUARE)
        primitives += _tile_variants(f"{title}-accumulating", "shifted", layout, SQUARE, accumulating=True)
        for tile in (2, 4):
            for directions in (1, 2):
                name = f"winograd-{directions}d-f{tile}"
                primitives += _tile_variants(
                    name, "winograd", layout, SQUARE, tile=tile, directions=directions
                )
        primitives += _tile_variants("fft-8", "fft", layout, SQUARE, tile=8, directions=2)
    return [*primitives, *_cuda_primitives()]


def _cuda_primitives() -> list[Primitive]:
    """Primitives for GPUs, in HWC, which is the layout of all other kernels there."""

    def cuda_variants(
        title: str, family: str, shapes: tuple[tuple[int, int], ...] = BLOCKS, **options: int
    ) -> list[Primitive]:
        return _tile_variants(f"{title}-cuda", family, "HWC", shapes, target="cuda", **options)

    primitives = [
        Primitive(name="operator-cuda-hwc", formulas=FAMILIES["operator"], target="cuda"),
        *cuda_variants("direct", "direct"),
        *cuda_variants("im2row", "windows", shared=True),
        *cuda_variants("implicit-gemm", "windows", shared=True, implicit=True),
        *cuda_variants("pointwise", "pointwise", shared=True),
        *cuda_variants("depthwise", "depthwise", ((8, 32), (16, 64))),
    ]
    for tile in (2, 4):
        primitives += cuda_variants(f"winograd-2d-f{tile}", "winograd", tile=tile, directions=2, shared=True)
    return primitives


PRIMITIVES = {primitive.name: primitive for primitive in _all_primitives()}


def get_primitive(name: str) -> Primitive:
    """The primitive of that name; raises `UnknownNameError` if there is none."""
    if name not in PRIMITIVES:
        raise UnknownNameError("primitive", name, PRIMITIVES)
    return PRIMITIVES[name]
