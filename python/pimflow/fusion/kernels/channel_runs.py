"""Layers of a group that go a few channels at a time: one loop over channels around all these layers."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from pimflow.errors import UnsupportedOpError
from pimflow.fusion import Layer
from pimflow.fusion.channels import ChannelRun, slice_elements
from pimflow.fusion.kernels.emitter import Emitter
from pimflow.fusion.kernels.formula import Formula
from pimflow.fusion.kernels.tensor_cores import Product


def emit(emitter: Emitter, run: ChannelRun) -> None:
    """Emit the steps of a run for a tile with bound spans; loads and stores are counted."""
    group = emitter.group
    layers, few = group.layers[run.begin : run.end], group.by_channel
    forming = [group.layers[step] for step in run.forming]
    (channels,) = {
        group.graph.shapes[name][3] for layer in layers for name in (*layer.inputs, layer.name) if name in few
    }
    placed = [layer for layer in forming if layer.weight_elements and group.weights_placed]
    streamed = [layer for layer in placed if layer.filters == channels]
    steps = list(enumerate(layers, run.begin))
    for step, layer in steps:
        emitter.load(layer, lambda name, step=step: name not in few and emitter.first[name] == step)
    for layer in placed:
        if layer not in streamed:
            emitter.load_weights(layer, 0, layer.weight_elements)
    sums = _sums(emitter, layers[-1], channels) if run.sums else None
    if sums:
        sums.begin()
    with emitter.serial(0, channels // run.channels) as turn:
        emitter.channel = turn * run.channels
        for step, layer in steps:
            emitter.load(layer, lambda name, step=step: name in few and emitter.first[name] == step)
        for layer in streamed:
            emitter.load_weights(layer, emitter.channel * layer.filter_elements, layer.filter_elements)
        if sums:
            sums.load_slice()
        emitter.sync()
        for layer in forming:
            (formula, *others) = emitter.computations[layer.name].formulas
            if others:
                raise UnsupportedOpError(f"layer '{layer.name}': it cannot be computed channel by channel")
            emitter.form(layer, formula)
            emitter.sync()
            if layer.name in group.stored:
                emitter.store(layer)
        if sums:
            sums.add()
        emitter.sync()
    emitter.channel = None
    if sums:
        sums.end()


def _sums(emitter: Emitter, layer: Layer, channels: int) -> _Sums | Product:
    (formula, *others) = emitter.computations[layer.name].formulas
    if others or len(formula.reductions) != 1:
        raise UnsupportedOpError(f"layer '{layer.name}': it cannot be summed channel by channel")
    if emitter.group.on_tensor_cores(layer):
        return Product(emitter, layer, formula, waiting=True)
    kind = _PlacedSums if emitter.group.weights_placed else _Sums
    return kind(emitter, layer, channels, formula)


class _Sums:
    """The last layer of a run, whose results are sums over the channels so far."""

    def __init__(self, emitter: Emitter, layer: Layer, channels: int, formula: Formula) -> None:
        self.emitter, self.layer, self.channels, self.formula = emitter, layer, channels, formula

    def begin(self) -> None:
        """Set all sums to their initial value."""
        g, initial = self.emitter, tirx.const(self.formula.reductions[0].initial, "float32")
        self._each_result(lambda at: g.put_sum(initial, g.place(self.layer.name, at)))

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
        g = self.emitter
        reads = g.reader(self.layer), g.weights(self.layer)

        def finish(at: tuple) -> None:
            value = self.formula.result(*reads, at, [g.sum(g.place(self.layer.name, at))])
            g.put_outside(self.layer.name, value, at)

        with g.each(g.box(self.layer.name, "stored")) as at:
            finish(at)
        g.sync()

    def _each_result(self, emit: Callable[[tuple], None]) -> None:
        g = self.emitter
        lanes, blocks = g.lanes(self.formula, self.formula.channels[1])

        def tile(pixels: list[tuple], block: tirx.Expr) -> None:
            for pixel in pixels:
                with g.vector(lanes) as lane:
                    emit((*pixel, block * lanes + lane))

        g.each_tile(self.layer, lanes, blocks, tile)


class _PlacedSums(_Sums):
    """A summing layer whose weights are loaded to the pool, those of a channel at a time."""

    def __init__(self, emitter: Emitter, layer: Layer, channels: int, formula: Formula) -> None:
        super().__init__(emitter, layer, channels, formula)
        self.slice = slice_elements(layer)
        self.size = layer.filter_elements
        # weights of a filter: for each tap those of all channels, then a bias
        self.taps = self.slice // layer.filters
        self.rest = self.size - self.taps * channels
        if self.size * layer.filters != layer.weight_elements:
            raise UnsupportedOpError(f"layer '{layer.name}': it cannot be summed channel by channel")
        self.begin_weights = emitter.at[f"{layer.name}.weights"]
        self.begin_slice = self.begin_weights + self.rest * layer.filters

    def begin(self) -> None:
        """Set all sums to their initial value, and load the bias."""
        g, filters = self.emitter, self.layer.filters
        with g.each(((0, self.rest), (0, filters))) as (k, f):
            source = f * self.size + self.taps * self.channels + k
            g.copy("weights", self.layer.name, self.begin_weights + k * filters + f, source)
        super().begin()

    def load_slice(self) -> None:
        """Load the weights of the current channel."""
        g, filters = self.emitter, self.layer.filters
        with g.each(((0, self.taps), (0, filters))) as (tap, f):
            source = f * self.size + tap * self.channels + g.channel
            g.copy("weights", self.layer.name, self.begin_slice + tap * filters + f, source)

    def weight(self) -> Callable[[tirx.Expr, tirx.Expr], tirx.Expr]:
        return lambda k, f: self.emitter.element(
            self.begin_slice + tirx.floordiv(k, self.channels) * self.layer.filters + f
        )

    def end(self) -> None:
        """Apply the epilogue to the sums, and store results that are read outside the group."""
        g = self.emitter
        read = g.reader(self.layer)

        def weight(k: tirx.Expr, f: tirx.Expr) -> tirx.Expr:
            return g.element(self.begin_weights + (k - self.taps * self.channels) * self.layer.filters + f)

        def finish(at: tuple) -> None:
            place = g.place(self.layer.name, at)
            g.put(self.formula.result(read, weight, at, [g.sum(place)]), place)

        self._each_result(finish)
        g.sync()
        if self.layer.name in g.group.stored:
            g.store(self.layer)
        g.sync()
