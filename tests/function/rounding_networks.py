"""Networks that amplify rounding, and that damp it: layers on PIM between layers on the GPU."""

from dataclasses import replace

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx_models import onnx_model

from pimflow import frontend
from pimflow.commands.shared import search
from pimflow.compiler import build
from pimflow.core.plan import Choice
from pimflow.core.rewrite import PimRewrite
from pimflow.hardware import system
from pimflow.pim_backend.runtime import targets
from pimflow.placement import SearchResult

SYSTEMS = {dtype: system(dtype=dtype) for dtype in ("fp16", "fp32")}
ON_PIM = ("left", "right")
# How far the two layers on PIM are from equal.
CANCELLED = {"amplifies": 0.1, "amplifies more": 0.005, "damps": 1.0}
CHANNELS = 64


def model(kind: str) -> onnx.ModelProto:
    """``last(relu(left(b) - right(b)))`` of ``b = relu(first(x))``; its mean over the map, if it damps.

    The nearer `left` and `right` are to each other, the more of their difference is rounding.
    """
    draw = np.random.default_rng(0)

    def normal(*dims):
        return draw.standard_normal(dims).astype(np.float32) / np.sqrt(np.prod(dims[1:]), dtype=np.float32)

    left = normal(CHANNELS, CHANNELS, 1, 1)
    weights = {
        "first.w": normal(CHANNELS, 16, 3, 3),
        "first.b": draw.standard_normal(CHANNELS).astype(np.float32),
        "left.w": left,
        "left.b": draw.standard_normal(CHANNELS).astype(np.float32),
        "right.w": left + np.float32(CANCELLED[kind]) * normal(CHANNELS, CHANNELS, 1, 1),
        "last.w": normal(32, CHANNELS, 3, 3),
    }
    weights["right.b"] = weights["left.b"]
    same = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Conv", ["x", "first.w", "first.b"], ["a"], "first", **same),
        helper.make_node("Relu", ["a"], ["b"], "b"),
        helper.make_node("Conv", ["b", "left.w", "left.b"], ["c"], "left"),
        helper.make_node("Conv", ["b", "right.w", "right.b"], ["d"], "right"),
        helper.make_node("Sub", ["c", "d"], ["e"], "e"),
        helper.make_node("Relu", ["e"], ["f"], "f"),
        helper.make_node("Conv", ["f", "last.w"], ["g"], "last", **same),
    ]
    if kind == "damps":
        nodes.append(helper.make_node("ReduceMean", ["g"], ["y"], "y", axes=[2, 3]))
    else:
        nodes.append(helper.make_node("Relu", ["g"], ["y"], "y"))
    tensors = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    return onnx_model(nodes, {"x": (1, 16, 12, 12)}, {"y": None}, tensors, name=kind.replace(" ", "-"))


def with_weight(original: onnx.ModelProto, name: str, change) -> onnx.ModelProto:
    """A copy in which `change` was made to the array of a weight."""
    changed = onnx.ModelProto()
    changed.CopyFrom(original)
    tensor = next(t for t in changed.graph.initializer if t.name == name)
    array = numpy_helper.to_array(tensor).copy()
    change(array)
    tensor.CopyFrom(numpy_helper.from_array(array, name))
    return changed


def plan_on_pim(network: frontend.Network, dtype: str = "fp16") -> SearchResult:
    """`ON_PIM` on PIM and everything else on the GPU."""
    target = SYSTEMS[dtype]
    _, search_result = search.search_network(network, target)
    rewrites = {name: {"rewrite": PimRewrite()} for name in ON_PIM}
    names = [region.name for region in search_result.graph.regions]
    choices = tuple(Choice(regions=(name,), **rewrites.get(name, {})) for name in names)
    return search.search_network(network, target, replace(search_result.plan, choices=choices))[1]


def build_on_stand_in(network: frontend.Network, dtype: str = "fp16") -> build.Build:
    """As `plan_on_pim`, with a CPU in place of the GPU."""
    return build.build(network, plan_on_pim(network, dtype), targets.target_by_name("llvm+pim"))
