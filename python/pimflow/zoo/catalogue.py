"""The embedded networks by name.

``scripts/build_zoo.py`` writes the files in ``graphs/``, without weights; :mod:`.weights` adds these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import shape_inference

from pimflow.errors import UnknownNameError
from pimflow.zoo import weights
from pimflow.zoo.language import graph as language_graph
from pimflow.zoo.language import shapes as language_shapes
from pimflow.zoo.language.decoder import Decoder
from pimflow.zoo.shapes import Shape, dims_of

GRAPHS = Path(__file__).parent / "graphs"


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Sizes of a network of the zoo.

    Parameters
    ----------
    parameters : int
        Trainable values; the running means and variances of batch norms do not count.
    macs : int
        Multiply-accumulates of all Conv, ConvTranspose, Gemm and MatMul for one inference.
    inputs : dict of str to tuple of int
        Shape of each data input, in ONNX layout (NCHW).
    trained : bool
        Whether its weights are trained; else they are drawn.
    """

    name: str
    parameters: int
    macs: int
    inputs: dict[str, Shape]
    nodes: int
    trained: bool


def names() -> list[str]:
    """List the networks of the zoo, sorted; its language models are `language.shapes.names`."""
    return sorted(path.stem for path in GRAPHS.glob("*.onnx"))


def all_names() -> list[str]:
    """List the networks and the language models of the zoo, sorted."""
    return sorted([*names(), *language_shapes.names()])


def decoder_weights(decoder: Decoder, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights of a language model of the zoo, trained or drawn, by name; see `Decoder.weights`."""
    graph = language_graph.step_graph(decoder, 1).graph
    values = {value.name: value for value in graph.input if weights.is_weight(value)}
    return {
        name: np.concatenate(list(weights.weight_chunks(values[name], seed))).reshape(shape)
        for name, shape in decoder.weights().items()
    }


def load(name: str, seed: int = 0) -> onnx.ModelProto:
    """Load a network of the zoo, with its weights.

    Parameters
    ----------
    name : str
        One of :func:`names`.
    seed : int, optional
        0 to 2**64 - 1. The same seed gives the same bytes on every machine.

    Returns
    -------
    onnx.ModelProto
        Its graph inputs are data; weights are initializers.

    Raises
    ------
    UnknownNameError, UsageError
        If there is no such network; if the seed is out of range.
    """
    model = read_graph(name)
    weights.fill(model, seed)
    return model


def describe(name: str) -> ModelInfo:
    """Sizes of a network of the zoo, computed from its graph.

    Parameters
    ----------
    name : str
        One of :func:`names`.

    Raises
    ------
    UnknownNameError
        If there is no such network.
    """
    model = read_graph(name)
    graph = shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
    values = (*graph.input, *graph.value_info, *graph.output)
    shapes = {value.name: dims_of(value) for value in values}
    drawn = {value.name: rule[0] for value in graph.input if (rule := weights.rule_of(value))}
    trained = [weight for weight, rule in drawn.items() if rule not in weights.STATISTICS]
    macs = 0
    for node in graph.node:
        result = math.prod(shapes[node.output[0]])
        if node.op_type == "Conv":
            macs += result * math.prod(shapes[node.input[1]][1:])
        elif node.op_type == "ConvTranspose":
            macs += math.prod(shapes[node.input[0]]) * math.prod(shapes[node.input[1]][1:])
        elif node.op_type == "Gemm":
            macs += result * math.prod(shapes[node.input[1]]) // shapes[node.output[0]][-1]
        elif node.op_type == "MatMul":
            macs += result * shapes[node.input[0]][-1]
    return ModelInfo(
        name=name,
        parameters=sum(math.prod(shapes[weight]) for weight in trained),
        macs=macs,
        inputs={value.name: shapes[value.name] for value in graph.input if value.name not in drawn},
        nodes=len(graph.node),
        trained=any(map(weights.is_trained, graph.input)),
    )


def read_graph(name: str, context: int | None = None) -> onnx.ModelProto:
    """The graph of a network without weights; that of a language model is built for `context`."""
    if name in language_shapes.names():
        return language_graph.zoo_graph(language_shapes.decoder(name), context)
    if name not in names():
        raise UnknownNameError("model", name, all_names())
    return onnx.load(GRAPHS / f"{name}.onnx")
