"""Parameters of a fused group's function: its streams, the table of its pieces, its weights."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pimflow.core.region import ELEMENT_BYTES
from pimflow.fusion import Group, Layer
from pimflow.fusion.tiling import pieces

# Storage types that groups run in, by TVM's names; arithmetic is fp32.
STORED = {"fp32": "float32", "fp16": "float16"}
FULL = STORED["fp32"]
BOUNDS = ("held", "fresh")


@dataclass(frozen=True, kw_only=True)
class Target:
    """How the function runs: threads, storage type, counters.

    Attributes
    ----------
    threads : int
        Threads of the one GPU block, whose pool is in shared memory; 0 on a CPU, where the pool is a
        parameter.
    counted : bool
        Whether a further parameter counts the bytes that every copy moves.
    dtype : str
        One of `STORED`: storage type of the pool and the weights, and of DRAM unless `network` is set.
    network : bool
        Whether it is a kernel of a compiled network: tensors are NHWC, weights are read where they lie, the
        pool is the kernel's own, and a GPU does each tile in a block of its own.
    types : mapping of str to str
        In a network: TVM's name of what a tensor stores in DRAM where that is not fp32.
    """

    threads: int = 0
    counted: bool = False
    dtype: str = "fp32"
    network: bool = False
    types: Mapping[str, str] = field(default_factory=dict)

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]


def streams(group: Group) -> list[tuple[str, str]]:
    """What the function copies, in the order of its parameters and counters.

    Pairs of ``load``, ``weights`` or ``store`` with a tensor or layer.
    """
    weighted = [layer.name for layer in group.layers if layer.weight_elements and group.weights_placed]
    parts = (("load", group.loaded), ("weights", weighted), ("store", group.stored))
    return [(what, name) for what, names in parts for name in names]


def bounds(group: Group) -> np.ndarray:
    """Table of all pieces: along n, h, w, by part and `columns`, a begin and an end."""
    rows = []
    for axis, parts in enumerate((group.tiling.n, group.tiling.h, group.tiling.w)):
        spans = group.spans[axis]
        for part in range(parts):
            for name, which in columns(group):
                if which == "stored":
                    rows.append(pieces(group.graph.shapes[name][axis], parts)[part])
                else:
                    rows.append(getattr(spans[name], which)[part])
    return np.array(rows, np.int32).ravel()


def columns(group: Group) -> list[tuple[str, str]]:
    """Columns of the table of pieces: what is held, new and stored of each tensor."""
    both = list(itertools.product(group.spans[0], BOUNDS))
    return both + [(name, "stored") for name in group.stored]


def weight_layout(group: Group, layer: Layer, weights: np.ndarray) -> np.ndarray:
    """Weights of shape (weights of a filter, filters) in the order in which they are loaded.

    All of them at once, neighbouring filters side by side; or a filter at a time.
    """
    whole = layer.name in group.resident or layer.filters == 1
    return np.ascontiguousarray(weights if whole else weights.T).ravel()
