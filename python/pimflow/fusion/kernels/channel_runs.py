"""Layers of a group that go a few channels at a time: one loop over channels around all these layers."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from pimflow.errors import UnsupportedOpError
from pimflow.fusion import Layer
from pimflow.fusion.channels import ChannelRun, slice_elements
from pimflow.fusion.kernels.emitter import TileEmitter
from pimflow.fusion.kernels.formula import Formula
from pimflow.fusion.kernels.tensor_cores import TensorCoreProduct


def emit(emitter: TileEmitter, run: ChannelRun) -> None:
    """Emit the steps of a run for a tile with bound spans; loads and stores are counted."""
    group = emitter.group
    layers, channel_counts = group.layers[run.begin : run.end], group.channels_on_chip
    forming = [group.layers[step] for step in run.forming_steps]
    (channels,) = {
        group.graph.shapes[name][3]
        for layer in layers
        for name in (*layer.inputs, layer.name)
        if name in channel_counts
    }
    placed_layers = [layer for layer in forming if layer.weight_elements and group.weights_placed]
    streamed = [layer for layer in placed_layers if layer.filters == channels]
    steps = list(enumerate(layers, run.begin))
    for step, layer in steps:
        emitter.load(
            layer, lambda name, step=step: name not in channel_counts and emitter.first_step[name] == step
        )
    for layer in placed_layers:
        if layer not in streamed:
            emitter.load_weights(layer, 0, layer.weight_elements)
    sums = _channel_sums(emitter, layers[-1], channels) if run.sums else None
    if sums:
        sums.begin()
    with emitter.serial(0, channels // run.channels) as turn:
        emitter.channel = turn * run.channels
        for step, layer in steps:
            emitter.load(
                layer, lambda name, step=step: name in channel_counts and emitter.first_step[name] == step
            )
        for layer in streamed:
            emitter.load_weights(layer, emitter.channel * layer.filter_elements, layer.filter_elements)
        if sums:
            sums.load_slice()
        emitter.sync()
        for layer in forming:
            (formula, *other_formulas) = emitter.computations[layer.name].formulas
            if other_formulas:
                raise UnsupportedOpError(f"layer '{layer.name}': it cannot be computed channel by channel")
            emitter.compute_formula(layer, formula)
            emitter.sync()
            if layer.name in group.output_names:
                emitter.store(layer)
        if sums:
            sums.add()
        emitter.sync()
    emitter.channel = None
    if sums:
        sums.end()


def _channel_sums(emitter: TileEmitter, layer: Layer, channels: int) -> _ChannelSums | TensorCoreProduct:
    (formula, *other_formulas) = emitter.computations[layer.name].formulas
    if other_formulas or len(formula.reductions) != 1:
        raise UnsupportedOpError(f"layer '{layer.name}': it cannot be summed channel by channel")
    if emitter.group.uses_tensor_cores(layer):
        return TensorCoreProduct(emitter, layer, formula, keeps_sums=True)
    kind = _PlacedChannelSums if emitter.group.weights_placed else _ChannelSums
    return kind(emitter, layer, channels, formula)


class _ChannelSums:
    """The last layer of a run, whose results are sums over the channels so far."""

    def __init__(self, emitter: TileEmitter, layer: Layer, channels: int, formula: Formula) -> None:
        self.emitter, self.layer, self.channels, self.formula = emitter, layer, channels, formula

    def begin(self) -> None:
        """Set all sums to their initial value."""
        emitter, initial = self.emitter, tirx.const(self.formula.reductions[0].initial, "float32")
        self._for_each_result(lambda index: emitter.put_sum(initial, emitter.address(self.layer.name, index)))

    def load_slice(self) -> None:
        """Load the weights of the current channels."""

    def add(self) -> None:
        """Add the current channels' products to the sums."""
        self.emitter.compute(self.layer, self.formula, self.weight())

    def weight(self) -> Callable[[tirx.Expr, tirx.Expr], tirx.Expr]:
        """A function of `k` and `f` that gives weight `k` of filter `f` in the loop over channels."""
        return self.emitter.weights(self.layer)

    def end(self) -> None:
        """Apply the epilogue to the sums, and store them."""
        emitter = self.emitter
        reads = emitter.reader(self.layer), emitter.weights(self.layer)

        def finish(index: tuple) -> None:
            """Make the result at an index of its sum."""
            value = self.formula.result(*reads, index, [emitter.sum(emitter.address(self.layer.name, index))])
            emitter.store_output(self.layer.name, value, index)

        with emitter.loops(emitter.box(self.layer.name, "stored")) as index:
            finish(index)
        emitter.sync()

    def _for_each_result(self, emit: Callable[[tuple], None]) -> None:
        emitter = self.emitter
        lanes, blocks = emitter.lanes(self.formula, self.formula.channels[1])

        def tile(pixels: list[tuple], block: tirx.Expr) -> None:
            for pixel in pixels:
                with emitter.vector(lanes) as lane:
                    emit((*pixel, block * lanes + lane))

        emitter.for_each_tile(self.layer, lanes, blocks, tile)


class _PlacedChannelSums(_ChannelSums):
    """A summing layer whose weights are loaded to the pool, those of a channel at a time."""

    def __init__(self, emitter: TileEmitter, layer: Layer, channels: int, formula: Formula) -> None:
        super().__init__(emitter, layer, channels, formula)
        self.slice = slice_elements(layer)
        self.size = layer.filter_elements
        # weights of a filter: for each tap those of all channels, then a bias
        self.taps = self.slice // layer.filters
        self.rest = self.size - self.taps * channels
        if self.size * layer.filters != layer.weight_elements:
            raise UnsupportedOpError(f"layer '{layer.name}': it cannot be summed channel by channel")
        self.begin_weights = emitter.offsets[f"{layer.name}.weights"]
        self.begin_slice = self.begin_weights + self.rest * layer.filters

    def begin(self) -> None:
        """Set all sums to their initial value, and load the bias."""
        emitter, filters = self.emitter, self.layer.filters
        with emitter.loops(((0, self.rest), (0, filters))) as (k, f):
            source = f * self.size + self.taps * self.channels + k
            emitter.copy("weights", self.layer.name, self.begin_weights + k * filters + f, source)
        super().begin()

    def load_slice(self) -> None:
        """Load the weights of the current channel."""
        emitter, filters = self.emitter, self.layer.filters
        with emitter.loops(((0, self.taps), (0, filters))) as (tap, f):
            source = f * self.size + tap * self.channels + emitter.channel
            emitter.copy("weights", self.layer.name, self.begin_slice + tap * filters + f, source)

    def weight(self) -> Callable[[tirx.Expr, tirx.Expr], tirx.Expr]:
        return lambda k, f: self.emitter.element(
            self.begin_slice + tirx.floordiv(k, self.channels) * self.layer.filters + f
        )

    def end(self) -> None:
        """Apply the epilogue to the sums, and store results that are read outside the group."""
        emitter = self.emitter
        read = emitter.reader(self.layer)

        def weight(k: tirx.Expr, f: tirx.Expr) -> tirx.Expr:
            return emitter.element(
                self.begin_weights + (k - self.taps * self.channels) * self.layer.filters + f
            )

        def finish(index: tuple) -> None:
            """Make the result at an index of its sum."""
            address = emitter.address(self.layer.name, index)
            emitter.put(self.formula.result(read, weight, index, [emitter.sum(address)]), address)

        self._for_each_result(finish)
        emitter.sync()
        if self.layer.name in emitter.group.output_names:
            emitter.store(self.layer)
        emitter.sync()
