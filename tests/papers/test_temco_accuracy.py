"""Does more training bring back accuracy, and do TeMCO's passes keep it?"""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from papers.temco_accuracy import accuracies, pass_effect
from papers.trained_networks import CLASSES, TASKS, dice, scores, train

from pimflow import zoo
from pimflow.core.output_error import OUTPUT_BOUND
from pimflow.hardware import system

pytestmark = [pytest.mark.long, pytest.mark.torch]

pytest.importorskip("torch")


def test_training_changes_a_copy_and_is_the_same_again():
    model = zoo.load_model("glyphs", batch=10)
    before = onnx.ModelProto()
    before.CopyFrom(model)
    first, second = (train(model, CLASSES, 2, learning_rate=1e-3, seed=4) for _ in range(2))
    assert model == before and first == second and first != model
    for retrained, original_weight in zip(first.graph.initializer, model.graph.initializer, strict=True):
        moved = np.abs(numpy_helper.to_array(retrained) - numpy_helper.to_array(original_weight)).max()
        assert 0 < moved <= 2.1e-3, retrained.name  # two steps of Adam


def test_a_short_retraining_brings_accuracy_back_and_the_passes_keep_it():
    original, decomposed = accuracies(system(), ["tucker:0.25"], samples=200, steps=30)
    assert original.before == scores(zoo.load_model("glyphs", batch=100), CLASSES, 200)
    assert decomposed.before["top-1"] + 0.1 < decomposed.after["top-1"] < original.before["top-1"]
    assert decomposed.optimised == pytest.approx(decomposed.after, abs=2 / 200)
    assert decomposed.weights < 0.2 and decomposed.macs < 0.2
    assert 0 < decomposed.error < decomposed.error_sum


@pytest.mark.parametrize("name", [name for name in TASKS if name != "glyphs"])
def test_the_passes_keep_the_scores_of_other_networks(name):
    effect = pass_effect(name, system(), samples=100, steps=1, request="tucker:0.5")
    assert effect.optimised == pytest.approx(effect.after, abs=2e-2)
    assert 0 <= effect.difference <= OUTPUT_BOUND["fp32"]
    assert effect.pool_bytes["skip-opt+fusion"] < effect.pool_bytes["original"]


def test_dice_by_hand():
    """One picture with one of two pixels found and one too many, and one without any."""
    masks = np.array([[[1, 1], [0, 0]], [[0, 0], [0, 0]]])
    foreground = np.array([[[1.0, -1.0], [1.0, -1.0]], [[-1.0, -1.0], [-1.0, -1.0]]])
    assert dice(np.stack([np.zeros_like(foreground), foreground], axis=1), masks) == {"Dice": (0.5 + 1) / 2}
