"""Attention in the banks by value: appended keys and values, then both products, against NumPy."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from calibration.pim_device import PimDevice, empty_image
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import expand_program, flat
from length import examples

from pimflow.core.attention import Attention
from pimflow.core.commands import Affine, Comp, GAct
from pimflow.core.program import PimProgram
from pimflow.errors import InfeasibleError, UnsupportedOpError
from pimflow.hardware import PimSpec, spec_names
from pimflow.pim_backend.programs import attention as programs
from pimflow.pim_backend.programs.cache_appends import append_keys, append_values
from pimflow.pim_backend.programs.cache_layout import CacheLayout, KeyLayout, ValueLayout
from pimflow.pim_backend.programs.loop_rolling import roll_loops
from pimflow.simulators.pim.checker import violations
from pimflow.simulators.pim.coverage import product_coverage
from pimflow.simulators.pim.store_coverage import store_coverage
from pimflow.simulators.pim.streams import distinct_channels
from pimflow.simulators.pim.timing import check_device, issue_program, time_program

ROUNDING = 2.0**-11  # of fp16


def small(name: str, accumulators: int = 1) -> PimSpec:
    """The device with rows so short that caches of tens of tokens take several."""
    spec = PimSpec.load(name)
    short = spec.columns_per_row // 8
    return replace(
        spec,
        name="small",
        columns_per_row=short,
        buffer_columns=min(short, spec.buffer_columns),
        accumulators=max(accumulators, spec.accumulators),
        lane_elements=min(short, spec.lane_elements),
    )


DEVICES = {name: small(name) for name in spec_names("pim")} | {"aim, 8": small("aim-gddr6", 8)}


@st.composite
def cases(draw) -> dict:
    """Numbers that make two layouts, so that a failing case is printed in short."""
    device = draw(st.sampled_from(sorted(DEVICES)))
    pim = DEVICES[device]
    kv_heads = draw(st.integers(1, 3))
    shape = {
        "batch": draw(st.integers(1, 2)),
        "heads": kv_heads * draw(st.integers(1, 3)),
        "kv_heads": kv_heads,
        "head_size": draw(st.integers(1, 40) | st.integers(1, 200)),
        "value_size": draw(st.integers(1, 40)),
        "keys": draw(st.integers(1, 400)),
    }
    places = []
    for _ in "kv":
        channels = draw(st.integers(1, 6))
        spread = draw(st.sampled_from([s for s in range(1, channels + 1) if channels % s == 0]))
        if pim.has_single_host and shape["batch"] * kv_heads % (channels // spread):
            spread = channels
        places.append({"channels": channels, "spread": spread, "row_begin": draw(st.integers(0, 3))})
        if pim.lane_elements and draw(st.booleans()):
            places[-1]["lanes"] = pim.elements_per_column("fp16")
    return {"device": device, "shape": shape, "places": places}


def layouts(case: dict) -> tuple[KeyLayout, ValueLayout]:
    pim = DEVICES[case["device"]]
    attention = Attention(**case["shape"], queries=1, scale=1.0)
    fields = {"attention": attention, "pim": pim, "dtype": "fp16"}
    keys, values = case["places"]
    return KeyLayout(**fields, **keys), ValueLayout(**fields, **values)


def check_program(program: PimProgram, pim: PimSpec) -> PimProgram:
    """`program`, which is of that device, and of whose commands none comes too soon."""
    program.validate()
    check_device(program, pim)
    for channel in distinct_channels(program, pim):
        assert violations(issue_program(program, pim, channel), pim, program, channel) == []
    return program


def fill_cache(layout: CacheLayout, values: np.ndarray, cuts: list[int]):
    """An image that holds `values` [tokens, matrices, elements], appended in several runs."""
    image = empty_image(layout)
    append = append_keys if isinstance(layout, KeyLayout) else append_values
    for begin, end in itertools.pairwise(cuts):
        program = check_program(append(layout, begin, end - begin), layout.pim)
        assert store_coverage(program).exact
        PimDevice(program, image).run(values[begin:end].reshape(-1, 1, 1, values.shape[-1]))
    return image


def run(step: programs.AttentionProduct, image, pim: PimSpec, x: np.ndarray) -> np.ndarray:
    for program in step.programs:
        assert product_coverage(check_program(program, pim)).exact
    results = [PimDevice(p, image).run(o) for p, o in zip(step.programs, step.operands(x), strict=True)]
    assert not any(np.isnan(result).any() for result in results)
    return step.result(results)


@settings(max_examples=examples(60), deadline=None)
@given(cases(), st.data())
def test_appended_tokens_then_products_are_those_of_the_whole(case, data):
    keys, values = layouts(case)
    a = keys.attention
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    cuts = sorted({0, a.keys, *data.draw(st.lists(st.integers(0, a.keys), max_size=3))})
    order = data.draw(st.sampled_from(programs.ORDERS))
    accumulate = programs.can_accumulate(values) and data.draw(st.booleans())

    def random_tensor(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float16).astype(np.float32)

    matrices = a.batch * a.kv_heads
    k, v = random_tensor(a.keys, matrices, a.head_size), random_tensor(a.keys, matrices, a.value_size)
    image_k, image_v = fill_cache(keys, k, cuts), fill_cache(values, v, cuts)
    for tokens in {a.keys, data.draw(st.integers(1, a.keys))}:
        for layout, image, cache, step in (
            (keys, image_k, k, programs.scores(keys, tokens, order)),
            (values, image_v, v, programs.mix(values, tokens, order, accumulate)),
        ):
            by_head = cache[:tokens].reshape(tokens, a.batch, a.kv_heads, -1).repeat(a.group, axis=2)
            heads_first = by_head.transpose(1, 2, 0, 3)  # [batch, heads, tokens, elements]
            weights = heads_first.swapaxes(2, 3) if layout is keys else heads_first
            x = random_tensor(a.batch, a.heads, weights.shape[2])
            result = run(step, image, layout.pim, x)
            expected = np.einsum("bhk,bhkn->bhn", x, weights)
            bound = np.einsum("bhk,bhkn->bhn", abs(x), abs(weights)) + 1e-3
            assert result.shape == expected.shape
            # Each partial sum is rounded, and so is their sum.
            assert (abs(result - expected) <= 2 * ROUNDING * bound).all()


def example(pim: PimSpec, **changes) -> Attention:
    shape = {"batch": 1, "heads": 8, "kv_heads": 8, "head_size": 128, "value_size": 128} | changes
    return Attention(**{"queries": 1, "keys": 1024, "scale": 1.0} | shape)


@pytest.mark.parametrize("name", spec_names("pim"))
def test_a_cache_that_is_too_long_says_what_a_token_takes(name):
    pim = PimSpec.load(name)
    a = example(pim, keys=1 << 24)
    token_bytes = 8 * 128 * pim.column_bytes // pim.elements_per_column(pim.dtypes[0])
    for layout, kind in ((KeyLayout, "keys"), (ValueLayout, "values")):
        message = f"{token_bytes} bytes a token for its {kind} alone, on 2 channels: "
        with pytest.raises(InfeasibleError, match=message) as caught:
            layout(attention=a, pim=pim, dtype=pim.dtypes[0], channels=2, spread=2).check_fit()
        assert caught.value.demand == token_bytes * a.keys > caught.value.bound


def test_what_no_cache_lies_in_is_refused():
    newton = PimSpec.load("newton-gddr6")
    mute = replace(newton, constraints=tuple(r for r in newton.constraints if "WRITE" not in r.after))
    aim = PimSpec.load("aim-gddr6")
    fields = {"dtype": "fp16", "channels": 4, "spread": 1}
    with pytest.raises(UnsupportedOpError, match="no rules for WRITE"):
        programs.scores(KeyLayout(attention=example(mute), pim=mute, **fields), 16)
    with pytest.raises(UnsupportedOpError, match="not dealt evenly"):
        KeyLayout(attention=example(aim, heads=3, kv_heads=3), pim=aim, **fields).check_fit()


@pytest.mark.parametrize("name", spec_names("pim"))
def test_a_row_is_full_of_keys(name):
    """No bank has room left in the rows of a cache: eight heads of 128 elements."""
    pim = PimSpec.load(name)
    layout = KeyLayout(attention=example(pim), pim=pim, dtype=pim.dtypes[0], channels=1, spread=1)
    row_bytes = pim.banks * pim.columns_per_row * pim.column_bytes
    assert layout.rows * row_bytes == 1024 * 8 * 128 * (
        pim.column_bytes // pim.elements_per_column(layout.dtype)
    )


@pytest.mark.long
@pytest.mark.parametrize("name", spec_names("pim"))
def test_heads_of_a_group_share_the_open_row(name):
    """Where rows stay open, no more of them are opened for four query heads than for one."""
    pim = PimSpec.load(name)
    opened = []
    for group in (1, 4):
        a = example(pim, heads=8 * group)
        layout = KeyLayout(attention=a, pim=pim, dtype="fp16", channels=1, spread=1)
        step = programs.scores(layout, 1024, "row")
        result = time_program(step.programs[0], pim)
        opened.append(layout.rows * pim.gangs)
        assert result.commands["G_ACT"] <= opened[-1] + result.commands["REF"] * pim.gangs
    assert opened[0] == opened[1]


def change_first_comp(nodes, change):
    """`nodes` with the first COMP in place of which `change` gives another."""
    for index, node in enumerate(nodes):
        if isinstance(node, Comp) and (changed := change(node)) is not None:
            return (*nodes[:index], changed, *nodes[index + 1 :])
    raise AssertionError("no COMP to change")


def test_products_with_another_heads_matrix_are_foreign():
    """Slots of a row are of different heads: a sum of one head's vector over another's keys is none."""
    newton = DEVICES["newton-gddr6"]
    layout = KeyLayout(
        attention=example(newton, heads=4, kv_heads=4, head_size=16, value_size=16, keys=80),
        pim=newton,
        dtype="fp16",
        channels=1,
        spread=1,
    )
    assert layout.slots == 4
    (program,) = programs.scores(layout, 80).programs
    stream = flat(program.channels[0])
    assert product_coverage(expand_program(program)).exact

    def other_slot(comp):
        return replace(comp, column=Affine(1)) if comp.column.base == 0 else None

    def other_row(comp):
        return replace(comp, row=Affine(comp.row.base + 1))

    for change in (other_slot, other_row):
        coverage_report = product_coverage(replace(program, channels=(change_first_comp(stream, change),)))
        assert coverage_report.missing and coverage_report.foreign, change
    # Two query heads of a KV head read the same columns; coverage is wrong if they had different KV heads.
    shared = replace(layout, attention=replace(layout.attention, heads=8))
    (program,) = programs.scores(shared, 80).programs
    assert product_coverage(program).exact and not product_coverage(replace(program, matrices=8)).exact


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 6)), max_size=12), st.booleans()
)
def test_compact_changes_nothing(runs, rising):
    """Runs of repeated commands, some of which move on by a row each time."""
    nodes = []
    for kind, step, times in runs:
        for turn in range(times):
            row = Affine(step * turn if rising else step)
            comp = Comp(buffer=kind, row=row, column=Affine(turn % 2), count=1)
            nodes += [GAct(gang=kind, row=row), comp][: 1 + (step > 0)]
    short = roll_loops(nodes)
    assert flat(short) == nodes
    assert len(short) <= len(nodes)


def test_compact_finds_a_long_loop():
    rows = [GAct(gang=gang, row=Affine(row)) for row in range(500) for gang in (0, 1)]
    (loop,) = roll_loops(rows)
    assert loop.extent == 500 and len(loop.body) == 2
