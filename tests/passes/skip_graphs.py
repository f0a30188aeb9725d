"""Decomposed networks with skip connections, concatenations and sums, small enough for numpy."""

import numpy as np
import tvm
from hypothesis import strategies as st
from tvm import relax

from pimflow.relay_passes.flat import LAYER_NAMES, LAYER_ROLES, rebuild

ACTIVATIONS = {"relu": relax.op.nn.relu, "sigmoid": relax.op.sigmoid}


class SkipGraph:
    """Layers over maps [1, height, height, channels], each by name; chains have roles."""

    def __init__(self, channels: int, height: int = 4):
        self.builder = relax.BlockBuilder()
        self.roles: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.rng = np.random.default_rng(0)
        self.x = relax.Var("x", relax.TensorType((1, height, height, channels), "float32"))
        self.scopes = [self.builder.function("main", [self.x]), self.builder.dataflow()]
        for scope in self.scopes:
            scope.__enter__()

    def emit(self, value: relax.Expr, name: str) -> relax.Var:
        return self.builder.emit(value, name_hint=name)

    def constant(self, *dims: int) -> relax.Expr:
        return relax.const(self.rng.standard_normal(dims).astype(np.float32))

    def conv(self, x, channels: int, name: str, role: str = "", kernel: int = 1) -> relax.Var:
        filters = self.constant(channels, kernel, kernel, int(x.ty.shape[3]))
        layouts = dict(data_layout="NHWC", kernel_layout="OHWI", padding=[kernel // 2] * 4)
        var = self.emit(relax.op.nn.conv2d(x, filters, **layouts), name)
        self.names[var.name] = var.name.replace("_", ".")
        if role:
            self.roles[self.names[var.name]] = role
        return var

    def layer(self, x, channels: int, name: str, *, rank: int = 2, bias=True, activation="relu") -> relax.Var:
        """A decomposed layer."""
        y = self.conv(x, rank, f"{name}_fconv", "fconv")
        y = self.conv(y, rank, f"{name}_core", "core", kernel=3)
        y = self.conv(y, channels, f"{name}_lconv", "lconv")
        if bias:
            y = self.emit(relax.op.add(y, self.constant(1, 1, 1, channels)), f"{name}_bias")
        return self.emit(ACTIVATIONS[activation](y), f"{name}_out") if activation else y

    def add(self, x, y, name: str) -> relax.Var:
        return self.emit(relax.op.add(x, y), name)

    def concat(self, parts, name: str) -> relax.Var:
        return self.emit(relax.op.concat(parts, axis=3), name)

    def module(self, *outputs: relax.Var) -> tvm.IRModule:
        result = outputs[0] if len(outputs) == 1 else relax.Tuple(list(outputs))
        result = self.builder.emit_output(result)
        self.scopes[1].__exit__(None, None, None)
        self.builder.emit_func_output(result)
        self.scopes[0].__exit__(None, None, None)
        mod = rebuild(self.builder.get(), lambda *_: None)
        return LAYER_ROLES.attach(LAYER_NAMES.attach(mod, self.names), self.roles)


@st.composite
def networks(draw) -> tvm.IRModule:
    """A few decomposed layers, activations, sums and concatenations of whatever is there."""
    graph = SkipGraph(draw(st.integers(2, 4)))
    there = [graph.conv(graph.x, 4, "first")]
    for i in range(draw(st.integers(3, 7))):
        kind = draw(st.sampled_from(["layer", "layer", "layer", "add", "concat", "act"]))
        x = there[draw(st.integers(max(0, len(there) - 2), len(there) - 1))]
        if kind == "layer":
            style = dict(bias=draw(st.booleans()), activation=draw(st.sampled_from(["relu", "sigmoid", ""])))
            x = graph.layer(x, draw(st.sampled_from([4, 6])), f"layer{i}", **style)
        elif kind == "add":
            y = draw(st.sampled_from(there))
            if y.ty.shape[3] != x.ty.shape[3]:
                continue
            x = graph.add(x, y, f"add{i}")
        elif kind == "concat":
            x = graph.concat([x, *draw(st.lists(st.sampled_from(there), min_size=1, max_size=2))], f"c{i}")
        else:
            x = graph.emit(ACTIVATIONS[draw(st.sampled_from(["relu", "sigmoid"]))](x), f"act{i}")
        there.append(x)
    last = graph.layer(graph.concat([there[-1], there[0]], "joined"), 3, "last")
    return graph.module(graph.emit(relax.op.nn.relu(last), "result"))
