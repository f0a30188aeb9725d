"""Marks on the stages of a primitive's kernel: `kernels` sets them, and schedules read them.

A mark is an annotation of a block of TIR. This module imports no TVM, so that both sides can import it.
"""

from __future__ import annotations

# On a sum in register tiles: the axis of the places, places of a tile, the axis of the lanes, lanes of a
# tile, and whether lanes are channels.
TILE = "pimflow.tile"
# On a stage that moves data: how many elements of its last axis are contiguous.
SPREAD = "pimflow.spread"
# On a sum in register tiles: an axis, and the size of a slab of it, which is computed with all filters before
# the next slab; or nothing.
SLAB = "pimflow.slab"
# On a sum of tensors: 0 if all of them are stored, 1 if only one exists at a time.
ADDED = "pimflow.added"
# On a stage whose loops are unrolled: pairs of an axis and how much of it to unroll (0 for all of it), then
# the axis of the vectors (-1 for none).
UNROLLED = "pimflow.unrolled"
# On a stage that is computed inside the `UNROLLED` stage that reads it.
INSIDE = "pimflow.inside"
# On a sum whose operands go through shared memory on a GPU.
SHARED = "pimflow.shared"
