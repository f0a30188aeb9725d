"""A fused group as one TIR function: its tiles one after the other, each loaded, computed and stored.

The function is Figure 7 of Deep Fusion: for every piece, load what is new of the operands, compute layer by
layer between tiles in one on-chip pool, store the piece of the results. What each piece is, a table says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from pimflow.errors import UnsupportedOpError
from pimflow.fusion import Group, Layer, Placement
from pimflow.fusion.kernels import channel_runs
from pimflow.fusion.kernels.emitter import LANES, Emitter
from pimflow.fusion.kernels.formula import At, Computation
from pimflow.fusion.kernels.parameters import FULL, Target, bounds


def generate(
    name: str,
    group: Group,
    placement: Placement,
    computations: Mapping[str, Computation],
    target: Target | None = None,
) -> tirx.PrimFunc:
    """The function of a group.

    Its parameters are flat arrays: those of `streams`, the table of `bounds`, then, as `Target` says, int64
    counters (for each thread one of each stream) and the pool. In a network they are what it loads, the
    weights of each layer that has some, neighbouring filters side by side, the table, and what it stores.

    Parameters
    ----------
    placement : Placement
        Where tiles and weights lie in the pool, in bytes of the target's storage type.
    computations : mapping of str to Computation
        By layer.

    Raises
    ------
    UnsupportedOpError
        On a GPU, where results lie over what other threads still read.
    """
    return Generator(group, placement, computations, target or Target()).function(name)


class Generator(Emitter):
    """Writes the function of one group."""

    def __init__(
        self, group: Group, placement: Placement, computations: Mapping[str, Computation], target: Target
    ) -> None:
        super().__init__(group, placement, computations, target)
        if target.threads:
            self._check_threads(placement)

    def _check_threads(self, placement: Placement) -> None:
        lives = {life.name: life for life in placement.lifetimes}
        for step, (operand, _) in self.group.joins(self.element_bytes).items():
            layer = self.group.layers[step]
            alias = lives[layer.name].alias
            if alias and alias == lives[operand].alias and not layer.in_place:
                raise UnsupportedOpError(
                    f"layer '{layer.name}' lies over operands that other threads read; give --reuse lifetime"
                )

    def function(self, name: str) -> tirx.PrimFunc:
        with IRBuilder() as builder, T.prim_func():
            T.func_name(name)
            T.func_attr({"tirx.noalias": True})
            self._network_parameters() if self.target.network else self._parameters()
            with contextlib.ExitStack() as stack:
                self.thread, self.tile = 0, None
                if self.target.threads:
                    blocks = self.group.tiling.tiles if self.target.network else 1
                    self.tile = stack.enter_context(T.launch_thread("blockIdx.x", blocks))
                    self.thread = stack.enter_context(T.launch_thread("threadIdx.x", self.target.threads))
                    self.pool = T.alloc_buffer((self.pool_elements,), self.stored_type, scope="shared.dyn")
                elif self.target.network:
                    self.pool = T.alloc_buffer((self.pool_elements,), self.stored_type)
                self._body()
        return builder.get().with_attr("global_symbol", name)

    def _parameters(self) -> None:
        sizes = {layer.name: layer.weight_elements for layer in self.group.layers}
        self.dram = {}
        for index, (what, name) in enumerate(self.streams):
            size = sizes[name] if what == "weights" else self.graph.elements(name)
            self.dram[what, name] = T.arg(f"{what}_{index}", T.Buffer((size,), self.stored_type))
        self._table()
        if self.target.counted:
            slots = len(self.streams) * max(1, self.target.threads)
            self.counters = T.arg("counters", T.Buffer((slots,), "int64"))
        if not self.target.threads:
            self.pool = T.arg("pool", T.Buffer((self.pool_elements,), self.stored_type))

    def _network_parameters(self) -> None:
        self.dram, self.filters = {}, {}

        def tensor(what: str, index: int, name: str) -> None:
            buffer = T.Buffer(self.graph.shapes[name], self.target.types.get(name, FULL))
            self.dram[what, name] = T.arg(f"{what}_{index}", buffer)

        for index, name in enumerate(self.group.loaded):
            tensor("load", index, name)
        for index, layer in enumerate(self.group.layers):
            size = self.computations[layer.name].weights.size
            if size:
                buffer = T.Buffer((size,), self.stored_type)
                self.filters[layer.name] = T.arg(f"weights_{index}", buffer)
        self._table()
        for index, name in enumerate(self.group.stored):
            tensor("store", index, name)

    def _table(self) -> None:
        table = 2 * len(self.columns) * sum(self.parts)
        self.table = T.arg("bounds", T.Buffer((table,), "int32"))

    def _body(self) -> None:
        most = max(len(f.reductions) for layer in self.group.layers
                   for f in self.computations[layer.name].formulas)  # fmt: skip
        lanes = 1 if self.target.threads else LANES
        self.sums = [T.alloc_buffer((lanes,), "float32", scope="local") for _ in range(most)]
        for layer in self.group.layers:
            if layer.weight_elements and layer.name in self.group.resident:
                self.load_weights(layer, 0, layer.weight_elements)
        n, h, w = self.parts
        if self.target.network and self.target.threads:  # a block has one tile
            down = tirx.floordiv(self.tile, h)
            self._bind((tirx.floordiv(down, w), tirx.floormod(self.tile, h), tirx.floormod(down, w)))
            for step, layer in enumerate(self.group.layers):
                self._step(step, layer)
            return
        with T.serial(0, n) as i, T.serial(0, w) as k, T.serial(0, h) as j:  # down the rows first
            self._bind((i, j, k))
            for step, layer in enumerate(self.group.layers):
                run = self.group.channel_run(step)
                if run is None:
                    self._step(step, layer)
                elif step == run.begin:
                    channel_runs.emit(self, run)

    def _bind(self, tile: At) -> None:
        """Bounds of every tensor in this tile; numbers along axes that are not cut."""
        values = bounds(self.group)
        self.spans, base = {}, 0
        for axis, parts in enumerate(self.parts):
            for column, index in self.columns.items():
                ends = []
                for end in range(2):
                    place = base + 2 * index + end
                    if parts == 1:
                        ends.append(int(values[place]))
                    else:
                        ends.append(T.bind(self.table[place + tile[axis] * 2 * len(self.columns)]))
                self.spans[(*column, axis)] = tuple(ends)
            base += 2 * parts * len(self.columns)

    def _step(self, step: int, layer: Layer) -> None:
        self.load(layer, lambda name: self.first[name] == step)
        self.sync()
        streamed = layer.weight_elements and layer.name not in self.group.resident
        if streamed and not self.target.network:
            self._compute_streamed(layer)
        else:
            for formula in self.computations[layer.name].formulas:
                self.compute(layer, formula)
        self.sync()
        if layer.name in self.group.stored:
            self.store(layer)
        self.sync()

    def _compute_streamed(self, layer: Layer) -> None:
        """Load a filter, form its channel of the whole tile, load the next."""
        size = layer.filter_elements
        (formula, *others) = self.computations[layer.name].formulas
        if others or size * layer.filters != layer.weight_elements:
            raise UnsupportedOpError(f"layer '{layer.name}': its weights cannot be loaded filter by filter")
        with T.serial(0, layer.filters) as index:
            self.load_weights(layer, index * size, size)
            self.sync()
            self.compute(layer, formula, index if layer.filters > 1 else None)
            self.sync()
