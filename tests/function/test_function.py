"""Do the commands that the lowering emits compute the convolution, in the order that the device sums?"""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from calibration.pim_device import PimDevice
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layers import NEWTON, SHORT, UNEVEN, PimLayer, expand_program, flat, layers, small_buffer_program, sums
from length import examples
from reference import STORAGE, Window, sum_in_hardware_order

from pimflow.core.commands import GAct
from pimflow.core.program import MemoryImage
from pimflow.errors import TraceError, UsageError
from pimflow.simulators.pim.checker import violations
from pimflow.simulators.pim.timing import issue_program

POINTWISE = PimLayer(x_shape=(1, 5, 6, 120), oc=40, channels=3)
# Pads shift the window to the upper left of the map, and the strides differ.
UNALIKE = PimLayer(
    x_shape=(2, 6, 5, 7),
    oc=20,
    window=Window(kernel=(3, 2), stride=(1, 2), dilation=(2, 1), padding=(3, 1, 0, 2)),
    channels=5,
)
LONG = PimLayer(x_shape=(1, 3, 4, 70), oc=33, window=Window(kernel=(3, 3), padding=(1, 1, 1, 1)), channels=4)


def run(layer: PimLayer, schedule, x, w, **options) -> np.ndarray:
    program = layer.lower(schedule)
    return PimDevice(program, layer.image(program, w)).run(x, **options)


def unread(result: np.ndarray) -> np.ndarray:
    """Where no READRES delivered; no layer here sums to the least integer."""
    return result == np.iinfo(np.int32).min if result.dtype == np.int32 else np.isnan(result)


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint32)


@settings(max_examples=examples(300))
@given(layers())
def test_computes_the_convolution(layer):
    x, w = layer.operands()
    exact, limit = sums(layer)
    for schedule in layer.schedules:
        result = run(layer, schedule, x, w)
        assert result.shape == exact.shape
        assert not unread(result).any(), f"{schedule}: an output was never read"
        assert (abs(result - exact) <= limit).all(), str(schedule)


def sums_in_hardware_orders(layer: PimLayer, x: np.ndarray, w: np.ndarray) -> list[np.ndarray]:
    """What the device may say: which way it goes over several rows is the schedule's choice, sum by sum."""
    return [
        sum_in_hardware_order(x, w, layer.window, layer.dtype, layer.lanes, back)[layer.pixels]
        for back in {0, layer.chunk_columns}
    ]


@pytest.mark.long
@settings(max_examples=examples(100))
@given(layers())
def test_sums_in_the_order_of_the_adder_tree(layer):
    x, w = layer.operands()
    possible_sums = sums_in_hardware_orders(layer, x, w)
    for schedule in layer.schedules:
        result = bits(run(layer, schedule, x, w))
        assert np.logical_or.reduce([result == bits(possible_sum) for possible_sum in possible_sums]).all(), (
            str(schedule)
        )


@pytest.mark.parametrize("pim", [NEWTON, UNEVEN], ids=["newton", "uneven"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_order_matters(pim, dtype):
    """The comparison above would notice sums in another order."""
    layer = replace(LONG, dtype=dtype, pim=pim)
    x, w = layer.operands()
    expected = sum_in_hardware_order(x, w, layer.window, "fp32", layer.lanes)
    for lanes in (2 * layer.lanes, 1):
        assert (sum_in_hardware_order(x, w, layer.window, "fp32", lanes) != expected).any()


@settings(max_examples=examples(40))
@given(layers())
def test_loops_mean_what_they_expand_to(layer):
    x, w = layer.operands()
    for schedule in layer.schedules[::3]:
        program = layer.lower(schedule)
        image = layer.image(program, w)
        results = [bits(PimDevice(item, image).run(x)) for item in (program, expand_program(program))]
        assert np.array_equal(*results)


@settings(max_examples=examples(60))
@given(layers(), st.sampled_from((1, 3, 4, 8)))
def test_buffers_smaller_than_a_row(layer, buffer_columns):
    """The very bits of the program whose buffers hold a row."""
    full_buffers = replace(layer.pim, buffer_columns=layer.pim.columns_per_row)
    layer = replace(layer, pim=full_buffers, pixel_end=min(layer.geometry.pixels, layer.pixel_begin + 9))
    x, w = layer.operands()
    program = small_buffer_program(layer, buffer_columns)
    expected = sum_in_hardware_order(x, w, layer.window, layer.dtype, layer.lanes)[layer.pixels]
    image = layer.image(replace(program, buffer_columns=full_buffers.buffer_columns), w)  # where the rows lie
    assert (bits(PimDevice(program, image).run(x)) == bits(expected)).all()


def test_largest_integers():
    """Every product 2^14: the sums are exact where fp32 would round them."""
    layer = replace(LONG, dtype="int8", x_shape=(1, 3, 4, 1200), window=Window(kernel=(3, 3)))
    x, w = (np.full_like(operand, -128) for operand in layer.operands())
    x[0, 0, 0, 0] = 127
    result = run(layer, layer.schedules[0], x, w)
    assert (result[0] == 2**14 * (9 * 1200 - 1) - 127 * 128).all()
    assert (result[1] == 2**14 * 9 * 1200).all()


def test_integers_are_not_made_of_floats():
    layer = replace(POINTWISE, dtype="int8")
    x, w = layer.operands()
    program = layer.lower(layer.schedules[0])
    with pytest.raises(UsageError, match="input of int8, got float32"):
        PimDevice(program, layer.image(program, w)).run(x.astype(np.float32))
    with pytest.raises(UsageError, match="weights of int8, got float64"):
        layer.image(program, w.astype(np.float64))


@settings(max_examples=examples(80))
@given(layers(), st.data())
def test_parts_are_the_whole(layer, data):
    """Two programs over a cut pixel range give the very bits of the one over all of it."""
    x, w = layer.operands()
    begin, end = layer.pixel_begin, layer.pixel_end or layer.geometry.pixels
    cut = data.draw(st.integers(begin, end))
    schedule = data.draw(st.sampled_from(layer.schedules))
    assume(not layer.chunk_columns)  # else the parts may read the rows in the other order
    parts = [
        run(replace(layer, pixel_begin=low, pixel_end=high), schedule, x, w)
        for low, high in ((begin, cut), (cut, end))
        if low < high
    ]
    assert (bits(np.concatenate(parts)) == bits(run(layer, schedule, x, w))).all()


# ---- numbers that are not plain ----

SPECIAL = np.array(
    [
        *(0.0, -0.0, 1.0, -1.0, 255.9),
        *(2**-24, 2**-25, 2**-25 * 1.001, 3 * 2**-25, 2**-14, 2**-14 - 2**-25, 6e-5),
        *(65504.0, 65519.9, 65520.0, -65520.0, 1e30, np.inf, -np.inf, np.nan),
    ],
    np.float32,
)


@settings(max_examples=examples(80))
@given(
    st.sampled_from((POINTWISE, UNALIKE, replace(LONG, x_shape=(1, 3, 4, 60)))),
    st.sampled_from(("fp16", "bf16", "fp32")),
    st.integers(0, 10**6),
    st.sampled_from((1, 4, len(SPECIAL))),
)
def test_special_values(layer, dtype, seed, kinds):
    layer = replace(layer, dtype=dtype)
    rng = np.random.default_rng(seed)
    x, w = layer.operands()
    chosen = rng.choice(SPECIAL, kinds)
    for operand in (x, w):
        some = rng.random(operand.shape) < rng.choice((0.002, 0.05, 0.9))
        operand[some] = rng.choice(chosen, some.sum())
    possible_sums = sums_in_hardware_orders(layer, x, w)
    for schedule in layer.schedules[::2]:
        result = run(layer, schedule, x, w)
        # Zeros have a sign, too.
        same = [
            np.isnan(possible_sum) & np.isnan(result)
            | (possible_sum == result) & (np.signbit(possible_sum) == np.signbit(result))
            for possible_sum in possible_sums
        ]
        assert np.logical_or.reduce(same).all(), str(schedule)


def test_every_half_and_every_tie_is_rounded_like_numpy():
    """Inputs: all finite halves, the fp32 values around each midpoint, and what overflows."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (halves[:-1] + halves[1:]) / 2
    around = [np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))]
    values = np.concatenate([halves, ties, *around, SPECIAL])
    values = np.concatenate([values, -values])
    layer = PimLayer(x_shape=(1, 1, len(values), 1), oc=1)
    result = run(layer, layer.schedules[0], values.reshape(layer.x_shape), np.ones((1, 1, 1, 1), np.float32))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(result[:, 0], values.astype(np.float16))


@settings(max_examples=examples(30))
@given(st.integers(0, 10**6))
def test_products_are_rounded_once(seed):
    """One tap and one channel: the result is fp16(x * w), subnormal, infinite or NaN as numpy has it."""
    rng = np.random.default_rng(seed)
    x, w = (rng.integers(0, 1 << 16, n, np.uint16).view(np.float16).astype(np.float32) for n in (200, 17))
    layer = PimLayer(x_shape=(1, 1, len(x), 1), oc=len(w), channels=2)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.outer(x, w).astype(np.float16)
    for schedule in layer.schedules:
        result = run(layer, schedule, x.reshape(layer.x_shape), w.reshape(-1, 1, 1, 1))
        np.testing.assert_array_equal(result, expected)


# ---- where work and weights go ----


@pytest.mark.long
@settings(max_examples=examples(60))
@given(layers())
def test_work_is_balanced(layer):
    columns = math.ceil(layer.reduction / layer.lanes)
    chunks = math.ceil(columns / layer.pim.buffer_columns)
    unit = math.ceil(columns / chunks) * chunks
    begin, end = layer.pixel_begin, layer.pixel_end or layer.geometry.pixels
    for schedule in layer.schedules:
        program = layer.lower(schedule)
        banks = (schedule.gangs or layer.pim.gangs) * layer.pim.banks_per_gang
        units = (end - begin) * math.ceil(layer.oc / banks)
        comps = [Counter(c.name for c in program.commands(n))["COMP"] for n in range(layer.channels)]
        assert sum(comps) == units * unit
        assert max(comps) - min(comps) <= unit


@settings(max_examples=examples(80))
@given(layers())
def test_weights_lie_at_their_own_addresses(layer):
    _, w = layer.operands()
    for schedule in layer.schedules:
        program = layer.lower(schedule)
        image = layer.image(program, w)
        assert image.row_begin == program.row_begin == layer.row_begin
        assert image.table.shape == (layer.channels, program.rows)
        for channel, (table, nodes) in enumerate(zip(image.table, program.channels)):
            placed = table[table >= 0]
            assert len(set(placed.tolist())) == len(placed), "the same weights twice"
            assert (table[: len(placed)] >= 0).all(), "a hole in the rows of a channel"
            opened = {node.row.base - layer.row_begin for node in flat(nodes) if isinstance(node, GAct)}
            assert all(0 <= row < program.rows and table[row] >= 0 for row in opened), channel
        assert len(np.unique(image.table[image.table >= 0])) == len(image.pages), "weights placed nowhere"
        assert image.weight_bytes == (image.table >= 0).sum() * image.pages[0].nbytes


@settings(max_examples=examples(60))
@given(layers())
def test_pages_hold_every_weight(layer):
    """As a multiset, up to the copies for the slots of a buffer: no weight is lost or changed."""
    _, w = layer.operands()
    program = layer.lower(layer.schedules[0])
    pages = layer.image(program, w).pages
    weights = np.sort(w.astype(pages.dtype).ravel())
    assert pages.dtype == STORAGE[layer.dtype]
    values, copies = np.unique(pages[pages != 0], return_counts=True)
    expected, times = np.unique(weights[weights != 0], return_counts=True)
    np.testing.assert_array_equal(values, expected)
    assert len(set((copies / times).tolist())) == 1


@pytest.mark.parametrize("layer", [POINTWISE, UNALIKE, LONG], ids=["pointwise", "unalike", "long"])
def test_rows_without_weights_are_zero(layer):
    x, w = layer.operands()
    for schedule in layer.schedules:
        program = layer.lower(schedule)
        image = layer.image(program, w)
        empty = replace(image, table=np.full_like(image.table, -1))
        assert (PimDevice(program, empty).run(x) == 0).all()


@pytest.mark.long
@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_tiles_that_share_a_row(buffers):
    """Four tiles a row, and enough of them for loops: a row is opened every fourth tile."""
    layer = PimLayer(x_shape=(1, 3, 3, 50), oc=427, pim=replace(SHORT, global_buffers=buffers))
    assert any(schedule.staggered for schedule in layer.schedules) == (buffers > 1)
    x, w = layer.operands()
    expected = bits(sum_in_hardware_order(x, w, layer.window, layer.dtype, layer.lanes))
    for schedule in layer.schedules:
        program = layer.lower(schedule)
        assert (bits(PimDevice(program, layer.image(program, w)).run(x)) == expected).all(), str(schedule)
        assert violations(issue_program(program, layer.pim, 0), layer.pim, program, 0) == []


def test_programs_do_not_grow_with_the_map():
    """Loops, not lists: a hundred times the pixels take no more nodes, but for the first and last rounds."""
    for layer in (POINTWISE, LONG):
        _, height, width, c = layer.x_shape
        large, huge = (replace(layer, x_shape=(1, n * height, n * width, c)) for n in (10, 100))
        for schedule in large.schedules:
            words, huge_words = (len(scaled.lower(schedule).program_words()[0]) for scaled in (large, huge))
            assert huge_words < 1.5 * words, str(schedule)


# ---- legality and sanity of what is handed over ----


def test_refreshed_streams_are_legal():
    """Long enough for refreshes to close rows under the program."""
    layer = replace(POINTWISE, x_shape=(1, 12, 12, 120), channels=1)
    for schedule in layer.schedules:
        program = layer.lower(schedule)
        stream = issue_program(program, NEWTON, 0)
        assert stream["clock"][-1] > 2 * NEWTON.timing["nREFI"]
        assert violations(stream, NEWTON, program, 0) == []


def test_wrong_shapes_are_refused():
    x, w = POINTWISE.operands()
    program = POINTWISE.lower(POINTWISE.schedules[0])
    image = POINTWISE.image(program, w)
    with pytest.raises(UsageError, match=r"takes an input of shape \(1, 5, 6, 120\)"):
        PimDevice(program, image).run(x[:, :4])
    with pytest.raises(UsageError, match="memory image"):
        PimDevice(program, replace(image, table=image.table[:2])).run(x)
    with pytest.raises(UsageError, match="memory image"):
        PimDevice(program, MemoryImage(row_begin=0, pages=image.pages[:1], table=image.table)).run(x)
    with pytest.raises(UsageError, match="memory image"):
        PimDevice(program, replace(image, pages=image.pages[:, :, :-16])).run(x)
    with pytest.raises(UsageError, match="memory image"):
        PimDevice(replace(program, dtype="bf16"), image).run(x)
    with pytest.raises(TraceError, match=r"row 0\.\.\d of GAct is not in"):
        PimDevice(replace(program, row_begin=1), image).run(x)
