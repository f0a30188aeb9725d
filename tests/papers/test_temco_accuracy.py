"""Does more training bring back accuracy, and do TeMCO's passes keep it?"""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from papers.temco_accuracy import accuracies
from papers.trained_networks import accuracy, train

from pimflow import zoo
from pimflow.hardware import system

pytestmark = [pytest.mark.long, pytest.mark.torch]

pytest.importorskip("torch")


def test_training_changes_a_copy_and_is_the_same_again():
    model = zoo.load_model("glyphs", batch=10)
    before = onnx.ModelProto()
    before.CopyFrom(model)
    first, second = (train(model, 2, learning_rate=1e-3, seed=4) for _ in range(2))
    assert model == before and first == second and first != model
    for retrained_weight, original_weight in zip(
        first.graph.initializer, model.graph.initializer, strict=True
    ):
        moved = np.abs(numpy_helper.to_array(retrained_weight) - numpy_helper.to_array(original_weight)).max()
        assert 0 < moved <= 2.1e-3, retrained_weight.name  # two steps of Adam


def test_a_short_retraining_brings_accuracy_back_and_the_passes_keep_it():
    original, decomposed = accuracies(system(), ["tucker:0.25"], samples=200, steps=30)
    assert original.before == accuracy(zoo.load_model("glyphs", batch=100), 200)
    assert decomposed.before[1] + 0.1 < decomposed.after[1] < original.before[1]
    assert decomposed.optimised == pytest.approx(decomposed.after, abs=2 / 200)
    assert decomposed.weights < 0.2 and decomposed.macs < 0.2
    assert 0 < decomposed.error < decomposed.error_sum
