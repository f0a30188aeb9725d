"""Training of ONNX models by PyTorch on pictures of `zoo.glyphs`, and their accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import onnx
from onnx import numpy_helper

from papers import onnx_torch
from pimflow.frontend import onnx_runtime
from pimflow.frontend.reference import Run
from pimflow.zoo import glyphs

BATCH = 64  # pictures a step
TOPS = (1, 5)


def train(model: onnx.ModelProto, steps: int, *, learning_rate: float, seed: int) -> onnx.ModelProto:
    """Train a copy of `model` by Adam for so many steps on new pictures, with one thread.

    Parameters
    ----------
    model : ModelProto
        A classifier of `zoo.glyphs.pictures`, of any batch; it is left as it is.
    steps : int
        Of `BATCH` pictures each.
    learning_rate : float
        At the beginning; it falls to nothing along a cosine.
    seed : int
        Of the pictures.

    Raises
    ------
    UsageError
        If PyTorch is not installed.
    """
    torch = onnx_torch.import_torch()
    threads = torch.get_num_threads()
    weights = onnx_torch.weight_tensors(model)
    free = [weight.requires_grad_() for weight in weights.values() if weight.is_floating_point()]
    optimiser = torch.optim.Adam(free, learning_rate)
    pace = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda n: (1 + math.cos(math.pi * n / steps)) / 2)
    (name,) = (value.name for value in model.graph.input)
    torch.set_num_threads(1)
    try:
        for images, labels in _batches(steps, seed):
            optimiser.zero_grad()
            (scores,) = onnx_torch.outputs(model.graph, weights, {name: torch.from_numpy(images)})
            torch.nn.functional.cross_entropy(scores, torch.from_numpy(labels)).backward()
            optimiser.step()
            pace.step()
    finally:
        torch.set_num_threads(threads)
    tuned = onnx.ModelProto()
    tuned.CopyFrom(model)
    for tensor in tuned.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name].detach().numpy(), tensor.name))
    return tuned


def _batches(steps: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A batch of pictures of all classes, with labels, for each step."""
    for step in range(steps):
        yield glyphs.pictures(BATCH, seed + (step << 32))


def accuracy(model: onnx.ModelProto, samples: int) -> dict[int, float]:
    """Top-n accuracy of a model on held-out pictures, by n.

    `samples` must be a multiple of the batch size of `model`.
    """
    (value,) = model.graph.input
    batch = value.type.tensor_type.shape.dim[0].dim_value
    return shares(onnx_runtime.reference(model).prepared(), value.name, samples, batch)


def shares(run: Run, name: str, samples: int, batch: int) -> dict[int, float]:
    """Top-n accuracy by n of the scores that `run` gives for its input `name`, a batch at a time."""
    images, labels = glyphs.pictures(samples)
    scores = np.concatenate([run({name: part})[0] for part in np.split(images, samples // batch)])
    order = np.argsort(-scores, axis=1, kind="stable")
    return {top: float((order[:, :top] == labels[:, None]).any(axis=1).mean()) for top in TOPS}
