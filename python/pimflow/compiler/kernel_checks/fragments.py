"""What the operations of tensor cores compute: those of a warp on fragments."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from tvm import ir

from pimflow.compiler.kernel_checks.findings import Fault
from pimflow.compiler.kernel_checks.lane_memory import FRAGMENT, Place
from pimflow.compiler.kernel_checks.memo import Memo
from pimflow.compiler.kernel_checks.operators import Array
from pimflow.compiler.kernel_checks.threads import WARP, View
from pimflow.compiler.kernel_checks.values import LaneValues

WARPS = 1 << 62  # numbers of warps begin here, where they access memory as a whole
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
        index, place = self._expression(arguments[3]), self._tile(*arguments[4:])

        def _run() -> None:
            data, warps = self._fragments(target), self._active_warps()
            tiles = self._load(place(warps))
            data[warps, int(index()[0, 0])] = tiles.reshape(-1, FRAGMENT, FRAGMENT)

        return _run

    def _call_tvm_store_matrix_sync(self, source: ir.Expr, *arguments: ir.Expr) -> Statement:
        index, place = self._expression(arguments[3]), self._tile(*arguments[4:])

        def _run() -> None:
            data, warps = self._fragments(source), self._active_warps()
            target = place(warps)
            self._record(target, True)
            target.memory.version += 1
            target.data[target.active] = data[warps, int(index()[0, 0])].reshape(len(warps), -1)

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

    def _tile(self, address: ir.Expr, stride: ir.Expr, order: ir.Expr) -> Callable[..., Place]:
        """By warp, the elements of a tile in memory, in the rows and columns of the fragment."""
        load = address.args[0]
        view, memo = self._views[load.source], Memo[Place]()
        position, pitch = self._position(view, load.indices), self._expression(stride)
        row, column = np.indices((FRAGMENT, FRAGMENT)).reshape(2, 1, -1)
        if order.value == "col_major":
            row, column = column, row

        def _place(warps: npt.NDArray[np.int64]) -> Place:
            positions, lanes, memory = position(), self._running, self._memories[view.memory]

            def _new() -> Place:
                first = np.broadcast_to(positions[:, :1], (lanes.count, 1))[warps * WARP]
                return self._tile_place(view, first + row * int(pitch()[0, 0]) + column, warps)

            return memo.result((positions, lanes, lanes.mask, memory, memory.log), _new)

        return _place

    def _tile_place(self, view: View, tiles: Array, warps: npt.NDArray[np.int64]) -> Place:
        """Where warps access tiles of shared or global memory, which have a row for each of them."""
        lanes, data, memory = self._running, self._elements(view), self._memories[view.memory]
        first = warps * WARP
        # A warp is a thread of its own: what its threads wrote before, a barrier has to order.
        threads = lanes.threads(first, WARPS + lanes.number[first])
        tiles = self._replace_outside(view, tiles, None)
        logged = None if memory.log is None else self._log_entry(view, threads, tiles)
        if memory.scope == "shared":
            tiles = threads.block_index * data.shape[1] + tiles
        return Place(
            memory=memory, data=data.reshape(-1), positions=tiles, active=tiles, row=None, logged=logged
        )
