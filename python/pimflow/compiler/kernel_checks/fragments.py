"""What the operations of tensor cores compute: those of a warp on fragments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm import ir

from pimflow.compiler.kernel_checks.findings import Fault
from pimflow.compiler.kernel_checks.operators import Array
from pimflow.compiler.kernel_checks.threads import WARP, View
from pimflow.compiler.kernel_checks.values import LaneValues

WARPS = 1 << 62  # numbers of warps begin here, where they access memory as a whole
FRAGMENT = 16  # rows, columns and depth of a fragment
Statement = Callable[[], None]


class FragmentCalls(LaneValues):
    """Calls of intrinsics for fragments, each a statement."""

    def _call_tvm_fill_fragment(self, target: ir.Expr, *arguments: ir.Expr) -> Statement:
        index, value = (self._expression(argument) for argument in arguments[3:])

        def _run() -> None:
            data, warps = self._fragments(target), self._active_warps()
            data[warps, int(index()[0, 0])] = value()[0, 0]

        return _run

    def _call_tvm_load_matrix_sync(self, target: ir.Expr, *arguments: ir.Expr) -> Statement:
        index, elements = self._expression(arguments[3]), self._tile(*arguments[4:])

        def _run() -> None:
            data, warps = self._fragments(target), self._active_warps()
            view, positions = elements(warps)
            data[warps, int(index()[0, 0])] = self._warp_access(view, positions, warps, None)

        return _run

    def _call_tvm_store_matrix_sync(self, source: ir.Expr, *arguments: ir.Expr) -> Statement:
        index, elements = self._expression(arguments[3]), self._tile(*arguments[4:])

        def _run() -> None:
            data, warps = self._fragments(source), self._active_warps()
            view, positions = elements(warps)
            self._warp_access(view, positions, warps, data[warps, int(index()[0, 0])])

        return _run

    def _call_tvm_mma_sync(self, *arguments: ir.Expr) -> Statement:
        indices = [self._expression(argument) for argument in arguments[1::2]]

        def _run() -> None:
            warps = self._active_warps()
            d, a, b, c = (
                (self._fragments(argument), int(index()[0, 0]))
                for argument, index in zip(arguments[::2], indices)
            )
            product = np.matmul(a[0][warps, a[1]].astype(np.float32), b[0][warps, b[1]].astype(np.float32))
            d[0][warps, d[1]] = c[0][warps, c[1]] + product

        return _run

    def _fragments(self, data: ir.Expr) -> Array:
        return self._memories[data.args[0]].data

    def _active_warps(self) -> npt.NDArray[np.int64]:
        """The warps whose threads all run; a warp of which only some do is a fault."""
        lanes = self._running
        if lanes.mask is None:
            return np.arange(lanes.count // WARP)
        active = lanes.mask.reshape(-1, WARP)
        mixed = active.any(1) & ~active.all(1)
        if mixed.any():
            self.report(Fault.DIVERGENT_BARRIER, "warp", int(mixed.argmax()))
        return np.flatnonzero(active.all(1))

    def _tile(self, address: ir.Expr, stride: ir.Expr, order: ir.Expr) -> Callable[..., tuple[View, Array]]:
        """By warp, the elements of a tile in memory, in the rows and columns of the fragment."""
        load = address.args[0]
        view = self._views[load.source]
        position, pitch = self._position(view, load.indices), self._expression(stride)

        def _elements(warps: npt.NDArray[np.int64]) -> tuple[View, Array]:
            first = np.broadcast_to(position()[:, :1], (self._running.count, 1)).reshape(-1, WARP)
            row, column = np.indices((FRAGMENT, FRAGMENT))
            if order.value == "col_major":
                row, column = column, row
            inside = row * int(pitch()[0, 0]) + column
            return view, first[warps, :1, None] + inside[None]

        return _elements

    def _warp_access(
        self, view: View, positions: Array, warps: npt.NDArray[np.int64], values: Array | None
    ) -> Array:
        """Read or write a tile of shared or global memory for each warp."""
        lanes, data = self._running, self._elements(view)
        first = warps * WARP
        # A warp is a thread of its own: what its threads wrote before, a barrier has to order.
        threads = lanes.threads(first, WARPS + lanes.number[first])
        tiles = self._replace_outside(view, positions.reshape(len(warps), -1), None)
        self._record(view, threads, tiles, values is not None)
        place: Any = (threads.block_index, tiles) if self._memories[view.memory].scope == "shared" else tiles
        if values is not None:
            data[place] = values.reshape(tiles.shape)
        result: Array = data[place].reshape(positions.shape)
        return result
