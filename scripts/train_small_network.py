"""Train a small network of the zoo, and write its weights: ``train_small_network.py [NAME] [--out FILE]``.

It is trained on pictures that `pimflow.zoo.glyphs` draws; nothing is downloaded. Needs PyTorch (``pip install
'pimflow[torch]'``). Takes some minutes of one core; the same version of PyTorch on the same machine gives the
same weights again.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper
from papers.trained_networks import TASKS, scores, train

from pimflow import zoo
from pimflow.zoo import glyphs, weights

SEED = 0
STEPS, LEARNING_RATE = 4000, 3e-3
HELD_OUT = 4000  # pictures on which scores are counted


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "name", nargs="?", metavar="NAME", choices=TASKS, default="glyphs", help=f"of {', '.join(TASKS)}"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="of 64 pictures (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: the zoo")
    arguments = parser.parse_args()
    task, path = TASKS[arguments.name], arguments.out or weights.TRAINED / f"{arguments.name}.npz"
    model = onnx.load(zoo.GRAPHS / f"{arguments.name}.onnx")
    for value in model.graph.input:  # weights are drawn, not read
        marks = {entry.key: entry.value for entry in value.metadata_props if entry.key != "trained"}
        helper.set_model_props(value, marks)
    weights.fill(model, SEED)
    model = train(model, task, arguments.steps, learning_rate=LEARNING_RATE, seed=glyphs.TRAINING)
    stored = {t.name: numpy_helper.to_array(t).astype(np.float16) for t in model.graph.initializer}
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(stored[tensor.name].astype(np.float32), tensor.name))
    partial = path.with_suffix(".partial.npz")
    np.savez_compressed(partial, **stored)
    os.replace(partial, path)
    held_out = scores(zoo.load_model(model, batch=100), task, HELD_OUT)
    shares = ", ".join(f"{name} {score:.1%}" for name, score in held_out.items())
    print(f"{path}: {path.stat().st_size} bytes; {shares} of {HELD_OUT} held-out pictures")


if __name__ == "__main__":
    main()
