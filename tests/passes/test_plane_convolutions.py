"""Do convolutions of lines and of space become those of planes, with the same values and names?"""

import numpy as np
import pytest
from graphs import close, operators, same_bits
from test_plain_activations import module
from tvm import ir, relax

from pimflow.relay_passes.canonical.canonicalise import Canonicalise
from pimflow.relay_passes.canonical.merge_bias import MergeBias
from pimflow.relay_passes.canonical.plane_convolutions import PlaneConvolutions
from pimflow.relay_passes.regions.extract_regions import extract_regions

LINE, SPACE, PLANE = (2, 4, 16), (2, 4, 3, 6, 5), (2, 4, 6, 5)
RNG = np.random.default_rng(0)


def random_constant(*dims):
    return relax.const(RNG.standard_normal(dims).astype(np.float32))


def conv1d(x, **attributes):
    return relax.op.nn.conv1d(x, random_constant(8, 4 // attributes.get("groups", 1), 3), **attributes)


def chain(emit, x):
    """A convolution, a normalisation, an activation, a pool, and a sum of two convolutions."""
    op = relax.op
    y = emit(op.add(emit(conv1d(x, padding=1)), random_constant(1, 8, 1)))
    parts = (*(random_constant(8) for _ in range(3)), relax.const(np.full(8, 0.5, "float32")))
    y = emit(op.nn.batch_norm(y, *parts, 1, training=False))
    y = emit(op.nn.relu(emit(relax.TupleGetItem(y, 0))))
    y = emit(op.nn.max_pool1d(y, 2, 2))
    pair = [emit(op.nn.conv1d(y, random_constant(4, 8, 1))) for _ in range(2)]
    return op.concat([emit(op.add(*pair)), pair[0]], 1)


def padded(emit, x):
    return conv1d(emit(relax.op.nn.pad(x, [0, 0, 0, 0, 2, 1])))


LINES = {
    "plain": lambda emit, x: conv1d(x),
    "strides, dilation, uneven padding": lambda emit, x: conv1d(x, strides=2, dilation=2, padding=(1, 2)),
    "groups": lambda emit, x: conv1d(x, groups=2),
    "transposed": lambda emit, x: relax.op.nn.conv1d_transpose(
        x, random_constant(4, 2, 4), strides=2, padding=1, output_padding=1, groups=2
    ),
    "padding before it": padded,
    "a pool as of planes": lambda emit, x: relax.op.squeeze(
        emit(relax.op.nn.avg_pool2d(emit(relax.op.expand_dims(emit(conv1d(x)), 2)), (1, 2), (1, 2))), [2]
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LINES)
def test_lines_are_planes_of_height_one(name):
    before = module(LINES[name], dims=LINE)
    after = PlaneConvolutions()(before)
    assert not any("1d" in kind for kind in operators(after))
    assert same_bits(before, after)
    ir.assert_structural_equal(PlaneConvolutions()(after), after)


@pytest.mark.long
def test_what_lies_between_convolutions_moves_nothing():
    before = module(chain, dims=LINE)
    assert same_bits(before, PlaneConvolutions()(before))
    after = Canonicalise()(before)
    close(before, after)
    kinds = operators(after)
    assert kinds.count("nn.conv2d") == 3
    assert kinds.count("nn.max_pool2d") == 1
    assert kinds.count("permute_dims") == kinds.count("reshape") == 2  # of the input and the output
    assert "subtract" not in kinds  # the normalisation is folded, bias and all


WINDOWS = {  # by window, the rows and columns of the window of planes; None if it stays
    (1, 3, 3): (3, 3),
    (3, 1, 1): (3, 1),
    (1, 1, 1): (1, 1),
    (3, 3, 3): None,
    (2, 1, 2): None,
}


@pytest.mark.long
@pytest.mark.parametrize("window", WINDOWS)
def test_windows_in_space_that_are_flat_or_deep_are_of_planes(window):
    padding = [size // 2 for size in window]
    before = module(
        lambda emit, x: relax.op.nn.relu(
            emit(
                relax.op.add(
                    emit(relax.op.nn.conv3d(x, random_constant(6, 4, *window), padding=padding)),
                    random_constant(6, 1, 1, 1),
                )
            )
        ),
        dims=SPACE,
    )
    after = PlaneConvolutions()(before)
    if WINDOWS[window] is None:
        ir.assert_structural_equal(after, before)
        return
    assert "nn.conv2d" in operators(after)
    assert same_bits(before, after)
    regions = extract_regions(Canonicalise()(before)).regions
    (geometry,) = [region.geometry for region in regions if region.geometry]
    assert (geometry.kh, geometry.kw) == WINDOWS[window]


@pytest.mark.long
def test_frames_and_rows_alternate():
    """As in a network whose windows are flat, then deep: R(2+1)D."""

    def build(emit, x):
        op = relax.op
        y = emit(op.nn.relu(emit(op.nn.conv3d(x, random_constant(6, 4, 1, 3, 3), padding=(0, 1, 1)))))
        y = emit(op.nn.relu(emit(op.nn.conv3d(y, random_constant(4, 6, 3, 1, 1), padding=(1, 0, 0)))))
        return op.add(emit(op.nn.conv3d(y, random_constant(4, 4, 1, 1, 1))), x)

    before = module(build, dims=SPACE)
    assert same_bits(before, PlaneConvolutions()(before))
    close(before, Canonicalise()(before))


def test_filters_that_are_no_constants_are_left():
    before = module(lambda emit, x, y: relax.op.nn.conv1d(x, y), dims=LINE, second=(8, 4, 3))
    ir.assert_structural_equal(PlaneConvolutions()(before), before)


# --- biases in front of a normalisation ---


def normalised(emit, x, *, axes=(1, 8, 1, 1), twice=False):
    op = relax.op
    y = emit(op.add(emit(op.nn.conv2d(x, random_constant(8, 4, 3, 3))), random_constant(*axes)))
    parts = (*(random_constant(8) for _ in range(3)), relax.const(np.full(8, 0.5, "float32")))
    norm = emit(relax.TupleGetItem(emit(op.nn.batch_norm(y, *parts, 1, training=False)), 0))
    return op.add(norm, y) if twice else op.nn.relu(norm)


def test_a_bias_is_subtracted_from_the_mean():
    before = module(normalised, dims=PLANE)
    after = MergeBias()(before)
    assert "add" not in operators(after)
    close(before, after)
    ir.assert_structural_equal(MergeBias()(after), after)


@pytest.mark.parametrize("options", [{"twice": True}, {"axes": (1, 8, 4, 1)}])
def test_a_bias_with_other_readers_or_axes_is_left(options):
    before = module(lambda emit, x: normalised(emit, x, **options), dims=PLANE)
    ir.assert_structural_equal(MergeBias()(before), before)
