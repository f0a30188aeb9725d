"""Which inputs can lie between rows of zeros, and is the reason right where they cannot?"""

import pytest
from graphs import as_module
from tvm.script import relax as R

from pimflow.relay_passes.flat import layer_name
from pimflow.relay_passes.regions.padded_inputs import input_copy_reasons


@as_module
def Inputs(x: R.Tensor((1, 8, 8, 4), "float32"), w: R.Tensor((4, 3, 3, 4), "float32")):
    given = R.nn.conv2d(x, w, padding=1, data_layout="NHWC", kernel_layout="OHWI")
    second = R.nn.conv2d(given, w, padding=1, data_layout="NHWC", kernel_layout="OHWI")
    first = R.nn.conv2d(given, w, padding=1, data_layout="NHWC", kernel_layout="OHWI")
    inside = R.nn.conv2d(first, w, padding=[0, 1], data_layout="NHWC", kernel_layout="OHWI")
    moved = R.permute_dims(second, axes=[0, 2, 1, 3])
    after_move = R.nn.conv2d(moved, w, padding=1, data_layout="NHWC", kernel_layout="OHWI")
    both = R.concat((first, after_move), axis=1)
    part = R.nn.conv2d(first, w, padding=1, data_layout="NHWC", kernel_layout="OHWI")
    whole = R.nn.conv2d(both, w, padding=1, data_layout="NHWC", kernel_layout="OHWI")
    y = (inside, part, whole)
    return y


# A row takes 7 * 4 * 2 B in fp16.
@as_module
def Narrow(x: R.Tensor((1, 8, 7, 4), "float32"), w: R.Tensor((4, 3, 3, 4), "float32")):
    active = R.nn.relu(x)
    conv = R.nn.conv2d(active, w, padding=1, data_layout="NHWC", kernel_layout="OHWI")
    return conv


def reasons(mod, **options) -> dict[str, str]:
    return {layer_name(mod, var): why for var, why in input_copy_reasons(mod, **options).items()}


def test_reasons():
    reason_by_layer = reasons(Inputs)
    assert set(reason_by_layer) == {"given", "first", "second", "after_move", "part", "whole"}, "pad rows"
    assert reason_by_layer["first"] == reason_by_layer["whole"] == ""
    assert "input of the network" in reason_by_layer["given"]
    assert "between the zeros of 'first'" in reason_by_layer["second"]
    assert "permute_dims" in reason_by_layer["after_move"]
    assert "concatenation" in reason_by_layer["part"]
    assert "56 B into its tensor" in reasons(Narrow)["conv"]


@pytest.mark.parametrize("mod", [Inputs, Narrow])
def test_without_views_all_are_copied(mod):
    assert set(reasons(mod, views=False).values()) == {"copies are made"}
