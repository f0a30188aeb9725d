"""Layers of a group that go channel by channel: a loop over channels around all of them."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from pimflow.errors import UnsupportedOpError
from pimflow.fusion import Layer
from pimflow.fusion.channels import ChannelRun, slice_elements
from pimflow.fusion.kernels.emitter import Emitter


def emit(emitter: Emitter, run: ChannelRun) -> None:
    """The steps of a run, for a tile whose bounds are known; loads and stores are counted."""
    group = emitter.group
    layers, few = group.layers[run.begin : run.end], group.by_channel
    forming = [group.layers[step] for step in run.forming]
    (channels,) = {
        group.graph.shapes[name][3] for layer in layers for name in (*layer.inputs, layer.name) if name in few
    }
    streamed = [layer for layer in forming if layer.weight_elements and layer.filters == channels]
    steps = list(enumerate(layers, run.begin))
    for step, layer in steps:
        emitter.load(layer, lambda name, step=step: name not in few and emitter.first[name] == step)
    for layer in forming:
        if layer.weight_elements and layer not in streamed:
            emitter.load_weights(layer, 0, layer.weight_elements)
    sums = _Sums(emitter, layers[-1], channels) if run.sums else None
    if sums:
        sums.begin()
    with T.serial(0, channels) as emitter.channel:
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
            emitter.compute(layer, formula, emitter.channel)
            emitter.sync()
            if layer.name in group.stored:
                emitter.store(layer)
        if sums:
            sums.add()
        emitter.sync()
    emitter.channel = None
    if sums:
        sums.end()


class _Sums:
    """The last layer of a run, whose results are on chip as sums over the channels so far."""

    def __init__(self, emitter: Emitter, layer: Layer, channels: int) -> None:
        self.emitter, self.layer, self.channels = emitter, layer, channels
        (self.formula, *others) = emitter.computations[layer.name].formulas
        self.slice = slice_elements(layer)
        self.size = layer.filter_elements
        # of a filter: what meets the operand, the channels of a tap side by side; a bias behind it
        self.taps = self.slice // layer.filters
        self.rest = self.size - self.taps * channels
        reductions = self.formula.reductions
        if others or len(reductions) != 1 or self.size * layer.filters != layer.weight_elements:
            raise UnsupportedOpError(f"layer '{layer.name}': it cannot be summed channel by channel")
        self.begin_weights = emitter.at[f"{layer.name}.weights"]
        self.begin_slice = self.begin_weights + self.rest * layer.filters

    def begin(self) -> None:
        """Load its bias and make the sums empty."""
        g, filters = self.emitter, self.layer.filters
        with g.each(((0, self.rest), (0, filters))) as (k, f):
            source = f * self.size + self.taps * self.channels + k
            g.copy("weights", self.layer.name, self.begin_weights + k * filters + f, source)
        self._each_result(lambda lane, at, place: tirx.const(self.formula.reductions[0].initial, "float32"))

    def load_slice(self) -> None:
        """Load the weights that the current channel is multiplied with."""
        g, filters = self.emitter, self.layer.filters
        with g.each(((0, self.taps), (0, filters))) as (tap, f):
            source = f * self.size + tap * self.channels + g.channel
            g.copy("weights", self.layer.name, self.begin_slice + tap * filters + f, source)

    def add(self) -> None:
        """Add the current channel's products to the sums."""
        g, (reduction,) = self.emitter, self.formula.reductions
        read, lanes = g.reader(self.layer), g.lanes(self.formula)
        blocks = self.layer.filters // lanes

        def weight(k: tirx.Expr, f: tirx.Expr) -> tirx.Expr:
            return g.element(self.begin_slice + tirx.floordiv(k, self.channels) * self.layer.filters + f)

        with g.each((*g.box(self.layer.name, "fresh")[:3], (0, blocks))) as (*pixel, block):
            first = (*pixel, block * lanes)
            g.reduce(reduction, 0, lanes, first, read, weight, self.layer.name)
            with T.vectorized(0, lanes) as lane:
                at = (*pixel, block * lanes + lane)
                g.put(g.sums[0][lane], g.place(self.layer.name, at))

    def end(self) -> None:
        """Apply the epilogue to the sums; store the results that are read outside."""
        g = self.emitter
        read = g.reader(self.layer)

        def weight(k: tirx.Expr, f: tirx.Expr) -> tirx.Expr:
            return g.element(self.begin_weights + (k - self.taps * self.channels) * self.layer.filters + f)

        self._each_result(lambda lane, at, place: self.formula.result(read, weight, at, [g.element(place)]))
        g.sync()
        if self.layer.name in g.group.stored:
            g.store(self.layer)
        g.sync()

    def _each_result(self, value: Callable[[tirx.Expr, tuple, tirx.Expr], tirx.Expr]) -> None:
        g, lanes = self.emitter, self.emitter.lanes(self.formula)
        box = g.box(self.layer.name, "fresh")[:3]
        blocks = (0, self.layer.filters // lanes)
        with g.each((*box, blocks)) as (*pixel, block), T.vectorized(0, lanes) as lane:
            at = (*pixel, block * lanes + lane)
            place = g.place(self.layer.name, at)
            g.put(value(lane, at, place), place)
