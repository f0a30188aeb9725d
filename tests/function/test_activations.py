"""Sums that PIM activates: by value, legal, and what goes wrong without."""

from dataclasses import replace

import aim_reader
import numpy as np
import pytest
from calibration.pim_device import PimDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import (
    NEWTON,
    PimLayer,
    expand_program,
    first,
    layers,
    require_legal_and_exact,
    start_of,
    sums,
    with_activations,
    with_latches,
)
from length import examples

from pimflow.compiler.verification import check_region
from pimflow.core.commands import Af, Affine, Comp, GAct, Node, Readres
from pimflow.core.program import ACTIVATIONS, PimProgram
from pimflow.errors import SpecError, TraceError, UnsupportedOpError, UsageError
from pimflow.hardware import PimSpec
from pimflow.simulators.exports import aim_isr
from pimflow.simulators.pim.coverage import product_coverage
from pimflow.simulators.pim.expansion import command_counts, pim_unsupported_reason
from pimflow.simulators.pim.timing import check_device, time_program

AIM = PimSpec.load("aim-gddr6")
MOST = {"relu": None, "relu6": 6}


@st.composite
def activation_cases(draw) -> tuple[PimLayer, str, str]:
    """A layer on a device with an activation unit, what its latches start from, and what is applied."""
    layer = draw(layers(most_channels=6))
    if draw(st.booleans()):
        layer = replace(layer, pim=AIM, dtype=draw(st.sampled_from(("fp16", "bf16"))))
    else:
        layer = replace(layer, pim=with_activations(with_latches(layer.pim)))
    layer = replace(layer, row_begin=max(layer.row_begin, layer.pim.row_base))
    return layer, draw(st.sampled_from(("", "bias", "add"))), draw(st.sampled_from(ACTIVATIONS[1:]))


@pytest.mark.long
@settings(max_examples=examples(80), deadline=None)
@given(activation_cases())
def test_sums_are_activated(case):
    """In every order: no rectifier brings a result further from the exact one than its sum is."""
    layer, initial, activation = case
    x, w = layer.operands()
    start = start_of(layer, initial)
    exact, limit = sums(layer, start)
    expected = np.clip(exact, 0, MOST[activation])
    for schedule in layer.schedules:
        if schedule.resumed:
            continue  # rounded more than once: tested below
        program = layer.lower(schedule, initial, activation)
        result = PimDevice(program, layer.image(program, w)).run(x, initial=start)
        assert (abs(result - expected) <= limit).all(), str(schedule)
        plain = layer.lower(schedule, initial)
        bare = PimDevice(plain, layer.image(plain, w)).run(x, initial=start)
        assert np.array_equal(result, np.clip(bare, 0, MOST[activation])), str(schedule)


@pytest.mark.long
@settings(max_examples=examples(60), deadline=None)
@given(activation_cases(), st.data())
def test_programs_are_legal_and_exact_and_come_back(case, data):
    layer, initial, activation = case
    for schedule in data.draw(st.lists(st.sampled_from(layer.schedules), min_size=1, max_size=3)):
        program, plain = (layer.lower(schedule, initial, applied) for applied in (activation, ""))
        program.validate()
        require_legal_and_exact(program, layer)
        counts, without = command_counts(program), command_counts(plain)
        # One AF for each sum, but none for partial sums that are read to be resumed.
        assert counts["AF"] == counts["READRES"] - (counts["WRBIAS"] - (counts["AF"] if initial else 0))
        for same in ("COMP", "READRES", "WRBIAS"):
            assert counts[same] == without[same]
        calm = replace(layer.pim, timing=layer.pim.timing | {"nREFI": 1 << 30})
        assert time_program(program, calm).cycles > time_program(plain, calm).cycles


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(1, 3), st.integers(1025, 4200), st.integers(1, 6), st.sampled_from(("", "bias", "add")))
def test_a_sum_that_is_resumed_is_activated_once(accumulators, elements, channels, initial):
    """When it is complete: partial sums below zero stay what they are."""
    layer = PimLayer(
        x_shape=(1, 1, 2, elements),
        oc=16 * accumulators + 40,
        pim=replace(AIM, accumulators=accumulators),
        channels=channels,
        row_begin=AIM.row_base,
    )
    schedule = next(order for order in layer.schedules if order.resumed)
    x, w = layer.operands()
    start = start_of(layer, initial)
    program, plain = (layer.lower(schedule, initial, item) for item in ("relu6", ""))
    assert product_coverage(program).exact
    result, bare = (PimDevice(item, layer.image(item, w)).run(x, initial=start) for item in (program, plain))
    assert np.array_equal(result, np.clip(bare, 0, 6))


def test_what_is_rectified_at_the_edges():
    """A sum just below zero, zero itself, six, just above it, an infinity and NaN."""
    layer = PimLayer(
        x_shape=(1, 1, 7, 1), oc=1, pim=with_activations(NEWTON), row_begin=2, dtype="fp32", channels=1
    )
    values = np.array([-1e-30, 0.0, 6.0, np.nextafter(np.float32(6), np.float32(7)), np.inf, -np.inf, np.nan])
    x, w = values.reshape(1, 1, 7, 1).astype(np.float32), np.ones((1, 1, 1, 1), np.float32)
    for activation, expected in (
        ("relu", [0, 0, 6, values[3], np.inf, 0, np.nan]),
        ("relu6", [0, 0, 6, 6, 6, 0, np.nan]),
    ):
        program = layer.lower(layer.schedules[0], activation=activation)
        result = PimDevice(program, layer.image(program, w)).run(x)
        assert np.array_equal(result[:, 0], np.array(expected, np.float32), equal_nan=True)


LAYER = PimLayer(
    x_shape=(1, 2, 3, 40), oc=20, pim=with_activations(with_latches(NEWTON)), channels=2, row_begin=2
)


def drop(nodes: list[Node]) -> list[Node]:
    index = first(nodes, Af)
    return [*nodes[:index], *nodes[index + 1 :]]


def early(nodes: list[Node]) -> list[Node]:
    """An AF before the last COMPs of its sum: the table's row is not even open."""
    end = first(nodes, Af)
    comp = max(i for i in range(end) if isinstance(nodes[i], Comp) and nodes[i].buffer == nodes[end].buffer)
    rest = [*nodes[:end], *nodes[end + 1 :]]
    return [*rest[:comp], nodes[end], *rest[comp:]]


def late(nodes: list[Node]) -> list[Node]:
    """An AF behind the READRES that it is for."""
    index = first(nodes, Af)
    read = first(nodes, Readres, buffer=nodes[index].buffer)
    return [*nodes[:index], *nodes[index + 1 : read + 1], nodes[index], *nodes[read + 1 :]]


def use_other_latch(nodes: list[Node]) -> list[Node]:
    index = first(nodes, Af)
    return [*nodes[:index], replace(nodes[index], buffer=nodes[index].buffer ^ 1), *nodes[index + 1 :]]


def with_weights_open(nodes: list[Node]) -> list[Node]:
    """Its G_ACTs open the row of weights again: an AF finds no table."""
    index = first(nodes, Af)
    row = nodes[first(nodes, Comp)].row
    return [replace(n, row=row) if i < index and isinstance(n, GAct) else n for i, n in enumerate(nodes)]


@pytest.mark.parametrize("change", [drop, early, late, use_other_latch, with_weights_open])
@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_values_and_coverage_find_what_goes_wrong(activation, change):
    x, w = LAYER.operands()
    right = LAYER.lower(LAYER.schedules[0], activation=activation)
    wrong = expand_program(right, change)
    assert product_coverage(right).exact and not product_coverage(wrong).exact
    assert "sums are wrongly activated" in str(product_coverage(wrong))
    results = [PimDevice(program, LAYER.image(program, w)).run(x) for program in (right, wrong)]
    assert not np.array_equal(*results)
    checks = [check_region(right, w.reshape(LAYER.oc, -1), x, y).matches for y in results]
    assert checks == [True, False]


def test_twice_is_as_once_by_value_but_not_what_the_program_says():
    right = LAYER.lower(LAYER.schedules[0], activation="relu")
    twice = expand_program(right, lambda nodes: [*nodes[: first(nodes, Af) + 1], *nodes[first(nodes, Af) :]])
    assert not product_coverage(twice).exact


def test_what_is_activated_is_none_of_a_program_without():
    """Nor is one that applies another function."""
    x, w = LAYER.operands()
    x *= 4
    relu, relu6 = (LAYER.lower(LAYER.schedules[0], activation=name) for name in ACTIVATIONS[1:])
    for activation in ("", "relu6"):
        with pytest.raises(ValueError, match=r"row 0\.\.0 of GAct is not in"):
            replace(relu, activation=activation).validate()
    alone = replace(relu, activation="", channels=((Af(buffer=0, row=Affine(0)),),))
    with pytest.raises(ValueError, match="an AF, but field 'activation' does not say what it applies"):
        alone.validate()
    y = PimDevice(relu, LAYER.image(relu, w)).run(x)
    filters = w.reshape(LAYER.oc, -1)
    assert check_region(relu, filters, x, y).matches and not check_region(relu6, filters, x, y).matches


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "tanh"}, "field 'activation' is 'tanh', not one of 'relu' and 'relu6'"),
        ({"activation": "relu6", "row_begin": 1}, "field 'row_begin' is 1: row 1 has the table of 'relu6'"),
    ],
)
def test_programs_that_cannot_be(changes, message):
    program = replace(LAYER.lower(LAYER.schedules[0], activation="relu"), **changes)
    with pytest.raises(TraceError, match=message):
        PimProgram.from_json(program.to_json())


def test_devices_without():
    plain = replace(LAYER, pim=NEWTON)
    with pytest.raises(UnsupportedOpError, match="newton-gddr6 has no AF, which would apply 'relu'"):
        plain.lower(plain.schedules[0], activation="relu")
    program = LAYER.lower(LAYER.schedules[0], activation="relu")
    with pytest.raises(SpecError, match="applies 'relu'; pim 'newton-gddr6' has no AF"):
        check_device(program, NEWTON)
    assert "no command that applies an activation" in pim_unsupported_reason(program)
    # A sum of lanes is not what an AF would see.
    assert not replace(AIM, result_lanes=16).can_activate


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"constraints": ()}, "field 'activation_unit': no constraint says when an AF may come"),
        ({"row_base": 1}, "field 'row_base': 1 rows before weights have no room for 2 tables"),
    ],
)
def test_files_that_say_too_little(changes, fault):
    rules = tuple(r for r in AIM.constraints if "AF" not in r.after and "AF" not in r.before)
    spec = replace(AIM, **(changes | ({"constraints": rules} if "constraints" in changes else {})))
    assert fault in list(spec.faults())


def test_a_table_is_open_between_the_products_of_sums():
    """By hand: two tiles on one channel of AiM, a sum in each of two registers, all of one pixel."""
    layer = PimLayer(x_shape=(1, 1, 1, 32), oc=32, pim=AIM, row_begin=AIM.row_base)
    order = next(s for s in layer.schedules if s.accumulators == 2 and s.pixel_groups == 1)
    program, plain = (layer.lower(order, activation=item) for item in ("relu", ""))
    names = [command.name for command in program.commands(0)]
    rows = "GWRITE G_ACT COMP COMP G_ACT COMP COMP"
    assert " ".join(names) == f"{rows} G_ACT AF AF READRES READRES"
    clock = {item: time_program(item, AIM).cycles for item in (program, plain)}
    # From the last COMP: precharge after 12 clocks, 32 more to the activation, 86 to an AF and 2 to the next,
    # 33 to the first READRES; without, the READRES comes 34 clocks after that COMP.
    assert clock[program] - clock[plain] == 12 + 32 + 86 + 2 + 33 - 34
    # nRAS of the row of weights is over: it was opened 56 + 2 clocks before.
    assert AIM.timing["nRAS"] < 56 + 2 + 12


def test_an_aim_trace_has_instructions_for_it():
    layer = PimLayer(x_shape=(1, 1, 4, 40), oc=64, pim=AIM, channels=2, row_begin=AIM.row_base)
    order = layer.schedules[0]
    program = layer.lower(order, "bias", "relu6")
    text = b"".join(chunk for chunk, _ in aim_isr.export(program)).decode()
    lines = text.splitlines()
    assert lines[:2] == ["W CFR 0 1", "W CFR 2 1"]
    opcodes = [line.split()[1] for line in lines]
    assert "RD_MAC" not in opcodes and opcodes.count("AF") == opcodes.count("RD_AF") > 0
    assert all(opcodes[i + 1] in ("AF", "RD_AF") for i, opcode in enumerate(opcodes) if opcode == "AF")


def test_an_aim_trace_counts_as_its_program(tmp_path):
    layer = PimLayer(x_shape=(1, 1, 2, 2100), oc=160, pim=AIM, channels=2, row_begin=AIM.row_base)
    order = next(order for order in layer.schedules if order.resumed)
    program = layer.lower(order, activation="relu")
    path = tmp_path / "layer.aim"
    path.write_bytes(b"".join(chunk for chunk, _ in aim_isr.export(program)))
    trace_counts, counts = aim_reader.counts(path), command_counts(program)
    assert {name: trace_counts[name] for name in ("AF", "READRES", "COMP", "WRBIAS")} == {
        name: counts[name] for name in ("AF", "READRES", "COMP", "WRBIAS")
    }
    opcodes = [instruction.opcode for instruction in aim_reader.read(path)]
    assert opcodes.count("RD_MAC") > 0 and opcodes.count("RD_AF") > 0


def test_what_has_no_table_of_its_own_is_refused():
    program = LAYER.lower(LAYER.schedules[0], activation="relu")
    x, w = LAYER.operands()
    moved = expand_program(
        program, lambda nodes: [replace(n, row=Affine(5)) if isinstance(n, Af) else n for n in nodes]
    )
    with pytest.raises(TraceError, match=r"row 5\.\.5 of Af is not in"):
        PimDevice(moved, LAYER.image(program, w)).run(x)
    with pytest.raises(UsageError):
        aim_isr.export(replace(program, dtype="fp32")).__next__()
