"""Do spellings of other exporters become the one form of this project, with the same values?"""

import numpy as np
import pytest
from graphs import close, inputs, operators, outputs, run, same_bits
from test_plain_activations import module
from tvm import ir, relax

from pimflow.relay_passes.canonical.evaluate_constants import EvaluateConstants
from pimflow.relay_passes.canonical.plain_powers import PlainPowers
from pimflow.relay_passes.canonical.plain_slices import PlainSlices
from pimflow.relay_passes.canonical.plain_softmax import PlainSoftmax
from pimflow.relay_passes.canonical.recognise_group_norm import RecogniseGroupNorm

INFINITE = relax.const(-np.inf, "float32")


def is_left(change, before):
    ir.assert_structural_equal(change()(before), before)


# --- one element along an axis ---


@pytest.mark.parametrize(("index", "axis"), [(1, 1), (-1, 3), (0, -2)])
def test_one_element_is_a_slice(index, axis):
    before = module(lambda emit, x: relax.op.take(x, relax.const(index, "int64"), axis, mode="wrap"))
    after = PlainSlices()(before)
    assert operators(after) == ["strided_slice", "squeeze"]
    assert same_bits(before, after)
    is_left(PlainSlices, after)


@pytest.mark.parametrize(
    ("indices", "axis", "kinds"),
    [
        ([1, 2], 1, ["strided_slice"]),
        ([2, 3, 0, 1], 2, ["strided_slice", "strided_slice", "concat"]),
        ([-1, 0, 1, 2], -1, ["strided_slice", "strided_slice", "concat"]),
    ],
    ids=["neighbours", "rolled", "rolled from the end"],
)
def test_runs_of_elements_are_slices(indices, axis, kinds):
    before = module(
        lambda emit, x: relax.op.take(x, relax.const(indices, "int64"), axis, mode="wrap"), dims=(2, 3, 4, 4)
    )
    after = PlainSlices()(before)
    assert operators(after) == kinds
    assert same_bits(before, after)
    is_left(PlainSlices, after)


def test_scattered_elements_and_those_out_of_bounds_are_left():
    is_left(PlainSlices, module(lambda emit, x: relax.op.take(x, relax.const([0, 2, 1], "int64"), 1)))
    is_left(PlainSlices, module(lambda emit, x: relax.op.take(x, relax.const(3, "int64"), 1, mode="clip")))
    is_left(PlainSlices, module(lambda emit, x: relax.op.take(x, relax.const(-1, "int64"), 1, mode="clip")))


def test_a_concatenation_of_one_is_what_it_concatenates():
    before = module(lambda emit, x: relax.op.nn.relu(emit(relax.op.concat([x], 1))))
    assert operators(PlainSlices()(before)) == ["nn.relu"]


# --- softmax that is guarded against hidden rows ---


def guard(emit, scores, axis=-1):
    """As PyTorch decomposes its attention."""
    op = relax.op
    weights = emit(op.nn.softmax(scores, axis))
    visible = emit(op.logical_not(emit(op.equal(scores, INFINITE))))
    some = emit(op.max(emit(op.astype(visible, "int8")), axis, keepdims=True))
    none = emit(op.logical_not(emit(op.astype(some, "bool"))))
    return op.where(none, relax.const(0.0, "float32"), weights)


def scores_of(emit, x, y, mask=None):
    scores = emit(relax.op.multiply(emit(relax.op.matmul(x, y)), relax.const(0.5, "float32")))
    return scores if mask is None else emit(relax.op.add(scores, mask))


def attention(mask=None):
    def build(emit, x, y):
        return guard(emit, scores_of(emit, x, y, mask))

    return module(build, dims=(2, 3, 4, 5), second=(2, 3, 5, 4))


CAUSAL = np.where(np.tri(4, dtype=bool), 0, -np.inf).astype(np.float32)


@pytest.mark.long
@pytest.mark.parametrize(
    "mask", [None, CAUSAL, np.zeros((2, 1, 1, 4), np.float32)], ids=["none", "causal", "zeros"]
)
def test_no_guard_where_no_row_is_hidden(mask):
    before = attention(None if mask is None else relax.const(mask))
    after = PlainSoftmax()(before)
    expected = ["matmul", "multiply", *(["add"] if mask is not None else []), "nn.softmax"]
    assert operators(after) == expected
    x, y = inputs(before)
    np.testing.assert_array_equal(run(after, x, y)[0], run(before, x, y)[0])
    is_left(PlainSoftmax, after)


def test_a_row_that_a_mask_hides_stays_guarded():
    mask = CAUSAL.copy()
    mask[2] = -np.inf
    is_left(PlainSoftmax, attention(relax.const(mask)))


def test_scores_of_a_computed_mask_stay_guarded():
    is_left(
        PlainSoftmax, module(lambda emit, x, y: guard(emit, emit(relax.op.add(x, y))), second=(2, 3, 4, 4))
    )


# --- group normalisation ---


def group_norm(emit, x, groups=2, scale=(6, 1, 1), shift=(6, 1, 1), flat=None):
    dims = [int(size) for size in x.ty.shape]
    op, draw = relax.op, np.random.default_rng(0)
    grouped = emit(op.reshape(x, flat or (dims[0], groups, -1)))
    ones, zeros = (relax.const(np.full(groups, value, np.float32)) for value in (1, 0))
    result = emit(op.reshape(emit(op.nn.group_norm(grouped, ones, zeros, groups, 1, [2], 1e-3)), dims))
    for operator, part in ((op.multiply, scale), (op.add, shift)):
        if part:
            result = emit(operator(result, relax.const(draw.uniform(-1, 1, part).astype(np.float32))))
    return result


@pytest.mark.long
@pytest.mark.parametrize(
    "parts", [{}, {"scale": None}, {"shift": (1, 6, 1, 1)}, {"scale": None, "shift": None}]
)
def test_normalised_groups_are_one_operator(parts):
    before = module(lambda emit, x: group_norm(emit, x, **parts), dims=(2, 6, 3, 4))
    after = RecogniseGroupNorm()(before)
    assert operators(after) == ["nn.group_norm"]
    (x,) = inputs(before)
    np.testing.assert_allclose(run(after, x)[0], run(before, x)[0], rtol=1e-5, atol=1e-6)
    is_left(RecogniseGroupNorm, after)


def test_large_means_do_not_cancel():
    """TVM's kernel subtracts squares: it is off by a per cent here."""
    norm = relax.op.nn.group_norm
    ones, zeros = (relax.const(np.full(6, value, np.float32)) for value in (1, 0))
    mod = module(lambda emit, x: norm(x, ones, zeros, 2, 1, [2, 3], 1e-5), dims=(2, 6, 8, 8))
    x = inputs(mod)[0] + 100
    groups = x.astype(np.float64).reshape(2, 2, -1)
    expected = (groups - groups.mean(2, keepdims=True)) / np.sqrt(groups.var(2, keepdims=True) + 1e-5)
    np.testing.assert_allclose(outputs(mod, [x])[0], expected.reshape(x.shape), atol=1e-4)


def test_other_normalisations_are_left():
    before = module(lambda emit, x: group_norm(emit, x, scale=(3, 4), shift=None), dims=(2, 6, 3, 4))
    after = RecogniseGroupNorm()(before)
    assert operators(after) == ["nn.group_norm", "multiply"]
    is_left(
        RecogniseGroupNorm, module(lambda emit, x: group_norm(emit, x, flat=(4, 2, -1)), dims=(2, 6, 4, 4))
    )


# --- powers, scans and slices of other exporters ---


def test_a_norm_is_made_of_a_product_and_a_root():
    def norm(emit, x):
        square = emit(relax.op.power(emit(relax.op.abs(x)), relax.const(2.0, "float32")))
        return relax.op.power(emit(relax.op.sum(square, -1, keepdims=True)), relax.const(0.5, "float32"))

    before = module(norm)
    after = PlainPowers()(before)
    assert operators(after) == ["multiply", "sum", "sqrt"]
    close(before, after)
    is_left(PlainPowers, after)


@pytest.mark.parametrize("exponent", [3.0, -0.5])
def test_other_powers_are_left(exponent):
    is_left(PlainPowers, module(lambda emit, x: relax.op.power(x, relax.const(exponent, "float32"))))


def test_equal_slices_of_a_tensor_are_one():
    def build(emit, x):
        first, same = (emit(relax.op.strided_slice(x, [2], [0], [4], [2])) for _ in range(2))
        return relax.op.add(
            emit(relax.op.add(first, same)), emit(relax.op.strided_slice(x, [2], [1], [4], [2]))
        )

    before = module(build)
    after = PlainSlices()(before)
    assert operators(after).count("strided_slice") == 2
    assert same_bits(before, after)


def test_elements_in_another_shape_are_a_reshape():
    """As PyTorch's exporter writes a tensor with other strides."""
    before = module(lambda emit, x: relax.op.take(x, relax.const([[[0]], [[1]], [[2]]], "int64"), 1))
    after = PlainSlices()(before)
    assert operators(after) == ["reshape"]
    assert same_bits(before, after)


def test_positions_counted_over_a_constant_mask_are_a_constant():
    def build(emit, x):
        mask = emit(relax.op.full((4, 4), relax.const(0.0, "float32"), "float32"))
        visible = emit(relax.op.bitwise_not(emit(relax.op.astype(mask, "bool"))))
        return relax.op.add(x, emit(relax.op.cumsum(visible, 1, "float32")))

    before = module(build)
    after = EvaluateConstants()(before)
    assert operators(after) == ["add"]
    assert same_bits(before, after)
