"""Parameters of a fused group's function: streams, the table of pieces, weights."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pimflow.core.kernel import ELEMENT_BYTES
from pimflow.fusion import Group, Layer
from pimflow.fusion.tiling import pieces

# TVM's names of the storage types that groups can run in; arithmetic is fp32.
STORAGE_TYPES = {"fp32": "float32", "fp16": "float16"}
ARITHMETIC_TYPE = STORAGE_TYPES["fp32"]
BOUNDS = ("held", "fresh")


@dataclass(frozen=True, kw_only=True)
class KernelTarget:
    """Properties of a group's function: threads, storage type, counters.

    Attributes
    ----------
    threads : int
        Threads of a GPU block, whose pool is in shared memory; 0 on a CPU, where the pool is a parameter.
    counts_bytes : bool
        Whether the function counts the bytes of every copy, in one more parameter.
    dtype : str
        One of `STORAGE_TYPES`: storage type of the pool and the weights, and of DRAM unless `in_network`.
    in_network : bool
        Whether it is a kernel of a compiled network: tensors are NHWC, weights are not copied to the pool,
        the kernel allocates the pool, and each tile is a block on a GPU.
    types : mapping of str to str
        In a network: TVM's name of the type that a tensor has in DRAM, if that is not fp32.
    """

    threads: int = 0
    counts_bytes: bool = False
    dtype: str = "fp32"
    in_network: bool = False
    types: Mapping[str, str] = field(default_factory=dict)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of `dtype`."""
        return ELEMENT_BYTES[self.dtype]


def streams(group: Group) -> list[tuple[str, str]]:
    """The copies of the function, in the order of its parameters and counters.

    Each is a pair: ``load``, ``weights`` or ``store``, and the name of a tensor or layer.
    """
    weighted = [layer.name for layer in group.layers if layer.weight_elements and group.weights_placed]
    parts = (("load", group.input_names), ("weights", weighted), ("store", group.output_names))
    return [(kind, name) for kind, names in parts for name in names]


def bounds(group: Group) -> np.ndarray:
    """Table of all pieces: for n, h and w, by part and `columns`, a begin and an end."""
    rows = []
    for axis, parts in enumerate((group.tiling.n, group.tiling.h, group.tiling.w)):
        spans = group.spans[axis]
        for part in range(parts):
            for name, kind in columns(group):
                if kind == "stored":
                    rows.append(pieces(group.graph.shapes[name][axis], parts)[part])
                else:
                    rows.append(getattr(spans[name], kind)[part])
    return np.array(rows, np.int32).ravel()


def columns(group: Group) -> list[tuple[str, str]]:
    """Columns of the table of pieces: the range on chip, its new part, and the stored part of each tensor."""
    tile_columns = list(itertools.product(group.spans[0], BOUNDS))
    return tile_columns + [(name, "stored") for name in group.output_names]


def weight_layout(group: Group, layer: Layer, weights: np.ndarray) -> np.ndarray:
    """Flatten weights of shape (weights of a filter, filters) in the order in which they are loaded.

    If all are loaded at once, filters are the fast axis; else filters come one after the other.
    """
    is_one_piece = layer.name in group.resident or layer.filters == 1
    return np.ascontiguousarray(weights if is_one_piece else weights.T).ravel()
