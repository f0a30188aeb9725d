"""Marks on the stages of a primitive's kernel: what `kernels` says, and schedules read, of a stage.

A mark is an annotation of a block of TIR. Without TVM, so that both sides import it.
"""

from __future__ import annotations

# On a sum in register tiles: axis of the places, places of a tile, axis of the lanes, lanes of a tile, and
# whether lanes are channels.
TILE = "pimflow.tile"
# On a stage that moves data: how many elements of its last axis lie side by side.
SPREAD = "pimflow.spread"
# On a sum in register tiles: an axis and how much of it is computed with all filters before the next; or
# nothing.
SLAB = "pimflow.slab"
# On a sum of tensors: 0 if all of them lie side by side, 1 if only one at a time exists.
ADDED = "pimflow.added"
# On a stage whose loops are unrolled: pairs of an axis and how much of it to unroll (0 for all of it), then
# the axis that vectors run along (-1 for none).
UNROLLED = "pimflow.unrolled"
# On a stage that is computed inside a piece of an `UNROLLED` stage that reads it.
INSIDE = "pimflow.inside"
# On a sum that reads its operands through shared memory on a GPU.
SHARED = "pimflow.shared"
