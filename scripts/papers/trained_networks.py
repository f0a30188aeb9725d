"""Training of the zoo's small networks by PyTorch on pictures of `zoo.glyphs`, and their scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper

from papers import onnx_torch
from pimflow.frontend import onnx_runtime
from pimflow.frontend.reference import Run
from pimflow.zoo import glyphs

BATCH = 64  # pictures a step
TOPS = (1, 5)


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """What a network is trained for; its loss is the cross entropy of its outputs' second axis.

    Attributes
    ----------
    pictures : callable
        Of a number of pictures and a seed: images, [n, 3, SIZE, SIZE], and the right classes, [n, …].
    scores : callable
        Of outputs, [n, classes, …], and the right classes: scores in [0, 1] by name.
    """

    pictures: Callable[[int, int], tuple[np.ndarray, np.ndarray]]
    scores: Callable[[np.ndarray, np.ndarray], dict[str, float]]


def accuracies(outputs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Top-n accuracies of the scores [n, classes] of pictures, by name."""
    order = np.argsort(-outputs, axis=1, kind="stable")
    return {f"top-{top}": float((order[:, :top] == labels[:, None]).any(axis=1).mean()) for top in TOPS}


def dice(outputs: np.ndarray, masks: np.ndarray) -> dict[str, float]:
    """Mean over pictures of twice the common pixels over the pixels of both, for class 1 (TeMCO, Figure 12).

    A picture in which neither has such a pixel counts as 1.
    """
    predicted, expected = outputs.argmax(axis=1) == 1, masks == 1
    common = (predicted & expected).sum(axis=(1, 2))
    total = predicted.sum(axis=(1, 2)) + expected.sum(axis=(1, 2))
    return {"Dice": float(np.where(total, 2 * common / np.maximum(total, 1), 1.0).mean())}


CLASSES = TrainingTask(pictures=glyphs.pictures, scores=accuracies)
TASKS = {
    "glyphs": CLASSES,
    "glyphs-densenet": CLASSES,
    "glyphs-unet": TrainingTask(pictures=glyphs.masks, scores=dice),
}


def train(
    model: onnx.ModelProto, task: TrainingTask, steps: int, *, learning_rate: float, seed: int
) -> onnx.ModelProto:
    """Train a copy of `model` by Adam for so many steps on new pictures, with one thread.

    Parameters
    ----------
    model : ModelProto
        A network for `task`, of any batch; it is left as it is.
    steps : int
        Of `BATCH` pictures each.
    learning_rate : float
        At the beginning; it falls to nothing along a cosine.

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
        for images, classes in _batches(task, steps, seed):
            optimiser.zero_grad()
            (outputs,) = onnx_torch.outputs(model.graph, weights, {name: torch.from_numpy(images)})
            torch.nn.functional.cross_entropy(outputs, torch.from_numpy(classes)).backward()
            optimiser.step()
            pace.step()
    finally:
        torch.set_num_threads(threads)
    tuned = onnx.ModelProto()
    tuned.CopyFrom(model)
    for tensor in tuned.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name].detach().numpy(), tensor.name))
    return tuned


def _batches(task: TrainingTask, steps: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A batch of pictures of all classes, with what is right, for each step."""
    for step in range(steps):
        yield task.pictures(BATCH, seed + (step << 32))


def scores(model: onnx.ModelProto, task: TrainingTask, samples: int) -> dict[str, float]:
    """Scores of a model on held-out pictures, by name.

    `samples` must be a multiple of the batch size of `model`.
    """
    (value,) = model.graph.input
    batch = value.type.tensor_type.shape.dim[0].dim_value
    return task_scores(onnx_runtime.reference(model).prepared(), value.name, task, samples, batch)


def task_scores(run: Run, name: str, task: TrainingTask, samples: int, batch: int) -> dict[str, float]:
    """Scores by name of what `run` gives for its input `name`, a batch of held-out pictures at a time."""
    images, classes = task.pictures(samples, glyphs.HELD_OUT)
    outputs = np.concatenate([run({name: part})[0] for part in np.split(images, samples // batch)])
    return task.scores(outputs, classes)
