"""Do products of rows take the place of products with leading axes, and does the result stay the same?"""

import numpy as np
import pytest
import tvm
from graphs import as_module, main_module, names, operators, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from tvm import relax
from tvm.relax import op
from tvm.script import relax as R

from pimflow.relay_passes.canonical.flatten_products import FlattenProducts
from pimflow.relay_passes.flat import main_bindings, operator, rebuild, shape

MATRIX = np.arange(6, dtype=np.float32).reshape(3, 2)
BIAS = np.array([1, -2], np.float32)


@as_module
def FlatProductBefore(x: R.Tensor((2, 4, 3), "float32")) -> R.Tensor((2, 2, 4), "float32"):
    product = R.matmul(x, R.const(MATRIX))
    sum = R.add(product, R.const(BIAS.reshape(1, 1, 2)))
    turned = R.permute_dims(sum, axes=[0, 2, 1])
    return turned


@as_module
def FlatProductExpected(x: R.Tensor((2, 4, 3), "float32")) -> R.Tensor((2, 2, 4), "float32"):
    x_rows = R.reshape(x, R.shape([8, 3]))
    product = R.matmul(x_rows, R.const(MATRIX))
    sum = R.add(product, R.const(BIAS))
    sum_whole = R.reshape(sum, R.shape([2, 4, 2]))
    turned = R.permute_dims(sum_whole, axes=[0, 2, 1])
    return turned


def test_a_product_and_its_bias_become_a_matrix():
    before = rebuild(FlatProductBefore, lambda *_: None)  # bindings in the form that passes leave them in
    after = FlattenProducts()(before)
    tvm.ir.assert_structural_equal(after, rebuild(FlatProductExpected, lambda *_: None))
    assert names(after, "matmul") == ["product"] and names(after, "add") == ["sum"]
    assert same_bits(FlatProductBefore, after)


def module(dims, body) -> tvm.IRModule:
    x = relax.Var("x", relax.TensorType(dims, "float32"))
    return rebuild(main_module([x], lambda builder: body(builder.emit, x)), lambda *_: None)


def constant(*dims: int, seed: int = 0) -> relax.Expr:
    return relax.const(np.random.default_rng(seed).standard_normal(dims).astype(np.float32))


def encoder(emit, x):
    """Two layers with norms and residuals after products, as transformers have."""
    for seed in (1, 2):
        wide = emit(op.matmul(x, constant(4, 6, seed=seed)))
        wide = emit(op.nn.gelu(emit(op.add(wide, constant(6, seed=seed + 2)))))
        narrow = emit(op.matmul(wide, constant(6, 4, seed=seed + 4)))
        x = emit(op.nn.layer_norm(emit(op.add(narrow, x)), constant(4), constant(4, seed=3), [2]))
        x = emit(op.nn.rms_norm(x, constant(4), [2]))
    return x


@pytest.mark.long
def test_residuals_and_norms_between_products_follow_them():
    before = module((1, 5, 4), encoder)
    after = FlattenProducts()(before)
    assert operators(after).count("reshape") == 2  # where the layers begin, and where they end
    assert same_bits(before, after)


UNTOUCHED = {
    "two tensors": lambda emit, x: emit(op.matmul(x, emit(op.permute_dims(x, [0, 2, 1])))),
    "a matrix each": lambda emit, x: emit(op.matmul(x, constant(2, 4, 3))),
    "rows already": lambda emit, x: emit(op.matmul(emit(op.reshape(x, (6, 4))), constant(4, 3))),
    "no product": lambda emit, x: emit(op.nn.relu(emit(op.reshape(emit(op.add(x, x)), (4, 6))))),
}


@pytest.mark.parametrize("body", UNTOUCHED.values(), ids=UNTOUCHED)
def test_anything_else_is_left_alone(body):
    before = module((2, 3, 4), body)
    tvm.ir.assert_structural_equal(FlattenProducts()(before), before)


# Constants and tensors that do not add the same to each row.
OFFSETS = {
    "by row": lambda emit, x: constant(1, 3, 1),
    "by element": lambda emit, x: constant(3, 4),
    "by batch": lambda emit, x: constant(2, 1, 4),
    "another tensor": lambda emit, x: emit(op.permute_dims(emit(op.reshape(x, (2, 4, 3))), [0, 2, 1])),
    "wider": lambda emit, x: emit(op.reshape(x, (1, 2, 3, 4))),
}


@pytest.mark.long
@pytest.mark.parametrize("offset", OFFSETS.values(), ids=OFFSETS)
def test_what_is_not_the_same_for_each_row_is_added_to_the_whole(offset):
    before = module((2, 3, 4), lambda emit, x: op.add(emit(op.matmul(x, constant(4, 4))), offset(emit, x)))
    after = FlattenProducts()(before)
    (total,) = (b.value for b in main_bindings(after) if operator(b.value) == "add")
    assert len(shape(total.args[0])) == 3
    assert same_bits(before, after)


@st.composite
def programs(draw):
    """Shape of the input, and steps from it: (operator, its choice)."""
    dims = draw(st.sampled_from([(2, 3, 4), (1, 2, 3, 4), (1, 1, 4), (3, 4)]))
    kinds = ["product", "bias", "row", "relu", "gelu", "norm", "add", "turn", "reshape", "clip"]
    return dims, draw(st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 7)), max_size=8))


def step(kind: str, choice: int, seed: int, x: relax.Var, values: list[relax.Var]) -> relax.Call:
    width, rank = shape(x)[-1], len(shape(x))
    builders = {
        "product": lambda: op.matmul(x, constant(width, 3 + choice % 2, seed=seed)),
        "bias": lambda: op.add(constant(width, seed=seed), x),
        "row": lambda: op.multiply(x, constant(shape(x)[-2], 1, seed=seed)),
        "relu": lambda: op.nn.relu(x),
        "gelu": lambda: op.nn.gelu(x),
        "norm": lambda: op.nn.layer_norm(x, constant(width), constant(width, seed=9), [-1]),
        "add": lambda: op.add(x, [v for v in values if shape(v) == shape(x)][0 if choice < 4 else -1]),
        "turn": lambda: op.permute_dims(x, [*range(rank - 2), rank - 1, rank - 2]),
        "reshape": lambda: op.reshape(x, (1, *shape(x)) if rank < 4 else (-1, width)),
        "clip": lambda: op.clip(x, -1, 1),
    }
    return builders[kind]()


def program_module(program) -> tvm.IRModule:
    dims, steps = program

    def body(emit, x):
        values = [x]
        for seed, (kind, choice) in enumerate(steps):
            source = values[-1] if choice < 6 else values[choice % len(values)]
            values.append(emit(step(kind, choice, seed, source, values)))
        return op.add(values[-1], relax.const(1.0))

    return module(dims, body)


@pytest.mark.long
@settings(max_examples=examples(12))
@given(programs())
def test_no_product_keeps_leading_axes_and_no_value_changes(program):
    before = program_module(program)
    after = FlattenProducts()(before)
    for binding in main_bindings(after):
        if operator(binding.value) == "matmul":
            assert len(shape(binding.value.args[0])) == 2
    tvm.ir.assert_structural_equal(FlattenProducts()(after), after)
    assert same_bits(before, after)
