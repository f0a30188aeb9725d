"""A fused group as one TIR function: tiles one after the other are loaded, computed and stored.

The function is Figure 7 of Deep Fusion: for every piece, load the new part of the operands, compute layer by
layer between tiles in one on-chip pool, and store the piece of the results. A table has the bounds of pieces.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from pimflow.errors import UnsupportedOpError
from pimflow.fusion import Group, Layer, Placement
from pimflow.fusion.channels import SUM_BYTES
from pimflow.fusion.kernels import channel_runs
from pimflow.fusion.kernels.emitter import LANES, MAX_PIXELS, TileEmitter
from pimflow.fusion.kernels.formula import Computation, Formula, Index
from pimflow.fusion.kernels.parameters import ARITHMETIC_TYPE, KernelTarget, bounds
from pimflow.fusion.kernels.tensor_cores import TensorCoreProduct
from pimflow.fusion.tiling import pieces
from pimflow.relay_passes.memory.overwriting import OVERWRITABLE

ON_STACK_BYTES = 96 * 1024  # largest pool on a stack: threads have at least 512 KiB (macOS)
TASKS = 16  # parallel tasks on a CPU that share the tiles (assumed: one for each core)
MIN_PARALLEL_OPERATIONS = 1 << 18  # that pay for waking threads (assumed)


def generate(
    name: str,
    group: Group,
    placement: Placement,
    computations: Mapping[str, Computation],
    target: KernelTarget | None = None,
) -> tirx.PrimFunc:
    """Write the function of a group.

    Its parameters are flat arrays: the `streams`, the table of `bounds`, and if `KernelTarget` says so int64
    counters (one for each thread and stream) and the pool. In a network the parameters are the tensors that
    it loads, the weights of each layer with weights, in the order (weights, filters), the table, and the
    tensors that it stores.

    Parameters
    ----------
    placement : Placement
        Offsets of tiles and weights in the pool, in bytes of the target's storage type.

    Raises
    ------
    UnsupportedOpError
        On a GPU, if results overwrite elements that other threads still read.
    """
    generator = Generator(group, placement, computations, target or KernelTarget())
    if generator.target.threads:
        generator.require_threads(placement)
    return generator.function(name)


class Generator(TileEmitter):
    """Writes the function of one group."""

    def require_threads(self, placement: Placement) -> None:
        """Raise `UnsupportedOpError` if results overwrite elements that other threads still read."""
        lives = {life.name: life for life in placement.lifetimes}
        for step, (operand, _) in self.group.operand_overlays(self.element_bytes).items():
            layer = self.group.layers[step]
            alias = lives[layer.name].alias
            if alias and alias == lives[operand].alias and not layer.is_in_place:
                raise UnsupportedOpError(
                    f"layer '{layer.name}' overwrites operands that other threads read; give --reuse lifetime"
                )

    def function(self, name: str) -> tirx.PrimFunc:
        """The function of the group, with all of its tiles."""
        with IRBuilder() as builder, T.prim_func():
            T.func_name(name)
            T.func_attr({"tirx.noalias": True})
            self._network_parameters() if self.target.in_network else self._parameters()
            with contextlib.ExitStack() as stack:
                self.thread = 0
                if self.target.threads:
                    blocks = self.group.tiling.blocks if self.target.in_network else 1
                    block = stack.enter_context(T.launch_thread("blockIdx.x", blocks))
                    self.thread = stack.enter_context(T.launch_thread("threadIdx.x", self.target.threads))
                    self.pool = T.alloc_buffer((self.pool_elements,), self.stored_type, scope="shared.dyn")
                    self._registers()
                    self._block(block) if self.target.in_network else self._all_tiles()
                elif self.target.in_network:
                    self._tasks()
                else:
                    self._registers()
                    self._all_tiles()
        kernel = builder.get().with_attr("global_symbol", name)
        return kernel.with_attr(OVERWRITABLE, self._overwritable()) if self.target.in_network else kernel

    def _overwritable(self) -> list[int]:
        """Positions of operands of which a tile loads, once and before, the elements that it stores."""
        group = self.group
        result, *further_results = group.output_names
        stored = [pieces(extent, parts) for extent, parts in zip(group.graph.shapes[result], self.parts)]

        def is_loaded_as_stored(name: str) -> bool:
            """Whether each tile loads the part of an operand, once, that it stores of the result."""
            loaded = [list(group.spans[axis][name].fresh) for axis in range(len(stored))]
            return name not in group.channels_on_chip and loaded == [list(parts) for parts in stored]

        if further_results or self.computations[result].stored:
            return []
        return [
            position
            for position, name in enumerate(group.input_names)
            if group.graph.shapes[name] == group.graph.shapes[result] and is_loaded_as_stored(name)
        ]

    def _parameters(self) -> None:
        sizes = {layer.name: layer.weight_elements for layer in self.group.layers}
        self.dram = {}
        for index, (kind, name) in enumerate(self.streams):
            size = sizes[name] if kind == "weights" else self.graph.elements(name)
            self.dram[kind, name] = T.arg(f"{kind}_{index}", T.Buffer((size,), self.stored_type))
        self._table()
        if self.target.counts_bytes:
            slots = len(self.streams) * max(1, self.target.threads)
            self.counters = T.arg("counters", T.Buffer((slots,), "int64"))
        if not self.target.threads:
            self.pool = T.arg("pool", T.Buffer((self.pool_elements,), self.stored_type))

    def _network_parameters(self) -> None:
        self.dram, self.filters = {}, {}

        def tensor(kind: str, index: int, name: str) -> None:
            """Declare a tensor in DRAM as the next argument."""
            stored = self.computations[name].stored if kind == "store" else None
            dims = stored.shape if stored else self.graph.shapes[name]
            buffer = T.Buffer(dims, self.target.types.get(name, ARITHMETIC_TYPE))
            self.dram[kind, name] = T.arg(f"{kind}_{index}", buffer)

        for index, name in enumerate(self.group.input_names):
            tensor("load", index, name)
        for index, layer in enumerate(self.group.layers):
            size = self.computations[layer.name].weights.size
            if size:
                buffer = T.Buffer((size,), self.stored_type)
                self.filters[layer.name] = T.arg(f"weights_{index}", buffer)
        self._table()
        for index, name in enumerate(self.group.output_names):
            tensor("store", index, name)

    def _table(self) -> None:
        table = 2 * len(self.columns) * sum(self.parts)
        self.table = T.arg("bounds", T.Buffer((table,), "int32"))

    def _registers(self) -> None:
        """Allocate the registers of a thread or core, and declare the pool as fp32 sums."""
        reduction_count = max(len(f.reductions) for layer in self.group.layers
                   for f in self.computations[layer.name].formulas)  # fmt: skip
        elements = 1 if self.target.threads else LANES * MAX_PIXELS
        self.sums = [
            T.alloc_buffer((elements,), ARITHMETIC_TYPE, scope="local") for _ in range(reduction_count)
        ]
        self.waiting = self.pool
        if (self.group.sum_tensors or self.group.staging_bytes) and self.stored_type != ARITHMETIC_TYPE:
            size = self.pool_elements * self.element_bytes // SUM_BYTES
            self.waiting = T.decl_buffer(
                (size,), ARITHMETIC_TYPE, data=self.pool.data, scope=self.pool.scope()
            )

    def _tasks(self) -> None:
        """Share the blocks among cores of a CPU, each with its own pool: on the stack, if that is small."""
        blocks = self.group.tiling.blocks
        is_on_stack = self.pool_elements * self.element_bytes <= ON_STACK_BYTES
        tasks = min(blocks, TASKS) if self._operations() >= MIN_PARALLEL_OPERATIONS else 1
        if not is_on_stack:
            self.pool = T.alloc_buffer((tasks * self.pool_elements,), self.stored_type)
        with contextlib.ExitStack() as stack:
            task = stack.enter_context(T.parallel(self.index(0), self.index(tasks))) if tasks > 1 else 0
            if is_on_stack:
                self.pool = T.alloc_buffer((self.pool_elements,), self.stored_type, scope="local")
            else:
                self.base = task * self.pool_elements
            self._registers()
            begin = tirx.floordiv(task * blocks, tasks) if tasks > 1 else 0
            end = tirx.floordiv((task + 1) * blocks, tasks) if tasks > 1 else blocks
            with self.serial(0, end - begin) as turn:
                self._block(begin + turn)

    def _operations(self) -> int:
        """Number of terms of all results."""
        touched = self.group.elements_over_tiles
        return sum(touched(layer.name) * self.computations[layer.name].terms for layer in self.group.layers)

    def _block(self, number: tirx.Expr) -> None:
        """Emit the tiles of the block with this number; tiles of a band follow one another down the rows."""
        count = self.group.tiling.tiles_per_block
        if count == 1:
            self._tile(number)
            return
        with self.serial(0, count) as turn:
            self._tile(T.bind(number * count + turn))

    def _tile(self, number: tirx.Expr) -> None:
        """Emit the tile with this number, in the order of `GroupTiling.indices`."""
        _, h, w = self.parts
        down = tirx.floordiv(number, h)
        self._bind((tirx.floordiv(down, w), tirx.floormod(number, h), tirx.floormod(down, w)))
        self._steps()

    def _all_tiles(self) -> None:
        for layer in self.group.layers:
            if layer.weight_elements and layer.name in self.group.resident:
                self.load_weights(layer, 0, layer.weight_elements)
        n, h, w = self.parts
        with self.serial(0, n) as i, self.serial(0, w) as k, self.serial(0, h) as j:  # down the rows first
            self._bind((i, j, k))
            self._steps()

    def _steps(self) -> None:
        for step, layer in enumerate(self.group.layers):
            run = self.group.channel_run(step)
            if run is None:
                self._step(step, layer)
            elif step == run.begin:
                channel_runs.emit(self, run)

    def _bind(self, tile: Index) -> None:
        """Bind the spans of every tensor in this tile; along axes that are not cut they are constants."""
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
                        row = place + tile[axis] * 2 * len(self.columns)
                        ends.append(T.bind(self.index(self.table[row])))
                self.spans[(*column, axis)] = tuple(ends)
            base += 2 * parts * len(self.columns)

    def compute_formula(self, layer: Layer, formula: Formula) -> None:
        """Compute the channels of a formula, on tensor cores where the layer uses them."""
        if self.group.uses_tensor_cores(layer):
            TensorCoreProduct(self, layer, formula).compute()
        else:
            self.compute(layer, formula)

    def _step(self, step: int, layer: Layer) -> None:
        self.load(layer, lambda name: self.first_step[name] == step)
        self.sync()
        streamed = layer.weight_elements and layer.name not in self.group.resident
        if streamed and not self.target.in_network:
            self._compute_streamed(layer)
        else:
            for formula in self.computations[layer.name].formulas:
                self.compute_formula(layer, formula)
        self.sync()
        if layer.name in self.group.output_names:
            self.store(layer)
        self.sync()

    def _compute_streamed(self, layer: Layer) -> None:
        """For each filter: load it, then compute its channel of the whole tile."""
        size = layer.filter_elements
        (formula, *other_formulas) = self.computations[layer.name].formulas
        if other_formulas or size * layer.filters != layer.weight_elements:
            raise UnsupportedOpError(f"layer '{layer.name}': its weights cannot be loaded filter by filter")
        with self.serial(0, layer.filters) as index:
            self.load_weights(layer, index * size, size)
            self.sync()
            self.compute(layer, formula, filter_=index if layer.filters > 1 else None)
            self.sync()
