"""Latches that start from a bias or a residual: by value, legal, and what goes wrong without."""

from dataclasses import replace

import aim_reader
import numpy as np
import pytest
import tvm_ffi
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
    with_latches,
)
from length import examples
from reference import bound, convolve, storage_values

from pimflow.compiler.verification import check_region
from pimflow.core.commands import Affine, Comp, Node, Readres, Wrbias
from pimflow.core.program import PimProgram
from pimflow.errors import SpecError, TraceError, UnsupportedOpError, UsageError
from pimflow.hardware import PimSpec
from pimflow.pim_backend.runtime import codegen
from pimflow.simulators.exports import aim_isr
from pimflow.simulators.pim.coverage import product_coverage
from pimflow.simulators.pim.expansion import command_counts, pim_unsupported_reason
from pimflow.simulators.pim.streams import timing_streams
from pimflow.simulators.pim.timing import check_device, time_program

AIM = PimSpec.load("aim-gddr6")


@st.composite
def latch_cases(draw) -> tuple[PimLayer, str]:
    """A layer on a device that can write latches, and what they start from."""
    layer = draw(layers(most_channels=6))
    if draw(st.booleans()):
        layer = replace(layer, pim=AIM, dtype="fp16")
    else:
        layer = replace(layer, pim=with_latches(layer.pim))
    return layer, draw(st.sampled_from(("bias", "add")))


@pytest.mark.long
@settings(max_examples=examples(100), deadline=None)
@given(latch_cases())
def test_sums_start_from_the_values(case):
    layer, initial = case
    x, w = layer.operands()
    start = start_of(layer, initial)
    exact, limit = sums(layer, start)
    for schedule in layer.schedules:
        program = layer.lower(schedule, initial)
        result = PimDevice(program, layer.image(program, w)).run(x, initial=start)
        assert (abs(result - exact) <= limit).all(), str(schedule)


@pytest.mark.long
@settings(max_examples=examples(60), deadline=None)
@given(latch_cases(), st.data())
def test_programs_are_legal_and_exact_and_come_back(case, data):
    layer, initial = case
    for schedule in data.draw(st.lists(st.sampled_from(layer.schedules), min_size=1, max_size=3)):
        program, plain = layer.lower(schedule, initial), layer.lower(schedule)
        require_legal_and_exact(program, layer)
        counts, without = command_counts(program), command_counts(plain)
        assert counts["WRBIAS"] == counts["READRES"]
        # All other commands are the same as without, also those that resume sums.
        assert counts - without == {"WRBIAS": counts["WRBIAS"] - without["WRBIAS"]}
        # Without refreshes: one may come at a change of rows and cost nothing.
        calm = replace(layer.pim, timing=layer.pim.timing | {"nREFI": 1 << 30})
        assert time_program(program, calm).cycles >= time_program(plain, calm).cycles


@st.composite
def resumable(draw) -> tuple[PimLayer, str]:
    """A layer of several chunks, of more tiles than a bank of AiM has accumulators."""
    accumulators = draw(st.integers(1, 3))
    layer = PimLayer(
        x_shape=(1, 1, draw(st.integers(1, 4)), draw(st.integers(1025, 4200))),
        oc=16 * accumulators + draw(st.integers(1, 100)),
        pim=replace(AIM, accumulators=accumulators),
        dtype=draw(st.sampled_from(("fp16", "bf16"))),
        channels=draw(st.integers(1, 6)),
        seed=draw(st.integers(0, 999)),
    )
    return layer, draw(st.sampled_from(("", "bias", "add")))


@settings(max_examples=examples(40), deadline=None)
@given(resumable(), st.data())
def test_sums_are_read_and_resumed(case, data):
    """Each is rounded once a chunk, and each vector is written once a pixel and phase."""
    layer, initial = case
    schedule = data.draw(st.sampled_from([order for order in layer.schedules if order.resumed]))
    program = layer.lower(schedule, initial)
    require_legal_and_exact(program, layer)
    x, w = layer.operands()
    start = start_of(layer, initial)
    starts = np.zeros(1) if start is None else storage_values(start, layer.dtype)
    result = np.broadcast_to(starts.reshape(-1, starts.shape[-1]), (layer.geometry.pixels, layer.oc)).copy()
    magnitude, limit = abs(result), 0.0
    step = layer.chunk_columns * layer.lanes
    for begin in range(0, layer.reduction, step):
        part = slice(begin, begin + step)
        exact, part_magnitude = convolve(x[..., part], w[..., part], layer.window, layer.dtype)
        result, magnitude = result + exact, magnitude + part_magnitude
        # The error of a resumed sum may add half a unit to its next rounding.
        limit = limit + 1.01 * bound(result, magnitude, begin + step + 1, layer.dtype)
    got = PimDevice(program, layer.image(program, w)).run(x, initial=start)
    assert (abs(got - result) <= limit).all()


LAYER = PimLayer(x_shape=(1, 2, 3, 40), oc=20, pim=with_latches(NEWTON), channels=2)


def change_streams(initial: str, change) -> PimProgram:
    return expand_program(LAYER.lower(LAYER.schedules[0], initial), change)


def drop(nodes: list[Node]) -> list[Node]:
    index = first(nodes, Wrbias)
    return [*nodes[:index], *nodes[index + 1 :]]


def late(nodes: list[Node]) -> list[Node]:
    """The first WRBIAS behind the first COMP on its latch, whose products it loses."""
    index = first(nodes, Wrbias)
    comp = first(nodes, Comp, buffer=nodes[index].buffer)
    return [*nodes[:index], *nodes[index + 1 : comp + 1], nodes[index], *nodes[comp + 1 :]]


def early(nodes: list[Node]) -> list[Node]:
    """The WRBIAS behind the first READRES before it, whose result it replaces."""
    index = first(nodes, Readres)
    following = index + first(nodes[index:], Wrbias, buffer=nodes[index].buffer)
    rest = [node for i, node in enumerate(nodes) if i != following]
    return [*rest[:index], nodes[following], *rest[index:]]


def elsewhere(field: str):
    def change(nodes: list[Node]) -> list[Node]:
        index = first(nodes, Wrbias)
        value = getattr(nodes[index], field).base
        return [*nodes[:index], replace(nodes[index], **{field: Affine(value ^ 1)}), *nodes[index + 1 :]]

    return change


@pytest.mark.parametrize(
    ("initial", "change"),
    [
        ("bias", drop),
        ("bias", late),
        ("bias", early),
        ("bias", elsewhere("channel")),
        ("add", drop),
        ("add", elsewhere("pixel")),
    ],
    ids=["dropped", "late", "early", "channel", "dropped residual", "pixel"],
)
def test_values_and_coverage_find_what_goes_wrong(initial, change):
    x, w = LAYER.operands()
    start = start_of(LAYER, initial)
    right, wrong = change_streams(initial, list), change_streams(initial, change)
    assert product_coverage(right).exact and not product_coverage(wrong).exact
    assert "start from a wrong value" in str(product_coverage(wrong))
    results = [PimDevice(p, LAYER.image(p, w)).run(x, initial=start) for p in (right, wrong)]
    assert not np.array_equal(*results)


RESUMED = replace(LAYER, x_shape=(1, 1, 2, 2100), oc=160, pim=AIM)


def first_resumed(nodes: list[Node]) -> int:
    return next(i for i, node in enumerate(nodes) if isinstance(node, Wrbias) and node.resumed)


def never_resumed(nodes: list[Node]) -> list[Node]:
    index = first_resumed(nodes)
    return [*nodes[:index], *nodes[index + 1 :]]


def restart_sum(nodes: list[Node]) -> list[Node]:
    index = first_resumed(nodes)
    return [*nodes[:index], replace(nodes[index], resumed=0), *nodes[index + 1 :]]


def resume_elsewhere(nodes: list[Node]) -> list[Node]:
    index = first_resumed(nodes)
    channel = Affine((nodes[index].channel.base + 16) % 64)
    return [*nodes[:index], replace(nodes[index], channel=channel), *nodes[index + 1 :]]


def resume_unread(nodes: list[Node]) -> list[Node]:
    """The READRES of the sum that is resumed first is of nothing."""
    resumed = nodes[first_resumed(nodes)]
    index = first(nodes, Readres, channel=resumed.channel)
    return [*nodes[:index], *nodes[index + 1 :]]


@pytest.mark.parametrize("change", [never_resumed, restart_sum, resume_elsewhere, resume_unread])
def test_sums_that_are_resumed_wrongly_are_found(change):
    x, w = RESUMED.operands()
    order = next(order for order in RESUMED.schedules if order.resumed)
    start = start_of(RESUMED, "bias")
    right = RESUMED.lower(order, "bias")
    wrong = expand_program(right, change)
    assert product_coverage(right).exact and not product_coverage(wrong).exact
    results = [PimDevice(p, RESUMED.image(p, w)).run(x, initial=start) for p in (right, wrong)]
    assert not np.array_equal(*results, equal_nan=True)
    filters = w.reshape(RESUMED.oc, -1)
    checks = [check_region(right, filters, x, y, start).matches for y in results]
    assert checks == [True, False]


def test_a_sum_of_wrong_filters_exceeds_the_bound_of_a_resumed_one():
    """A single product of 2100 that is missing is found, however often the sum was rounded."""
    x, w = RESUMED.operands()
    order = next(order for order in RESUMED.schedules if order.resumed)
    program = RESUMED.lower(order)
    lacking = w.copy()
    lacking[..., 1500] = 0
    y = PimDevice(program, RESUMED.image(program, lacking)).run(x)
    assert not check_region(program, w.reshape(RESUMED.oc, -1), x, y).matches


def test_a_sum_that_is_resumed_has_an_aim_register_of_its_own():
    """A WR_BIAS for each channel names the register that an RD_MAC of all of them wrote for it."""
    order = next(o for o in RESUMED.schedules if o.resumed and o.pixel_groups == 1)
    program = RESUMED.lower(order)
    text = b"".join(chunk for chunk, _ in aim_isr.export(program)).decode()
    read: list[int] = []
    resumed = 0
    for opcode, register, mask in (line.split()[1:4] for line in text.splitlines()[:-1]):
        channels = int(mask, 16).bit_count()
        if opcode == "RD_MAC":
            read += range(int(register), int(register) + channels)
        elif opcode == "WR_BIAS":
            assert channels == 1 and int(register) in read
            resumed += 1
    counts = command_counts(program)
    assert (resumed, len(read)) == (counts["WRBIAS"], counts["READRES"])
    assert len(set(read)) == 2 * 10  # sums of two pixels and ten tiles


def test_a_bias_is_of_any_pixel_but_a_residual_is_not():
    moved = change_streams("bias", elsewhere("pixel"))
    assert product_coverage(moved).exact


def test_a_program_says_what_its_latches_start_from():
    program = LAYER.lower(LAYER.schedules[0], "bias")
    with pytest.raises(ValueError, match="does not say what latches start from"):
        replace(program, initial="").validate()
    with pytest.raises(TraceError, match="field 'initial' is 'scale', not one of"):
        PimProgram.from_json(replace(program, initial="scale").to_json())
    x, w = LAYER.operands()
    with pytest.raises(UsageError, match=r"from values of shape \(20,\), got \(0,\)"):
        PimDevice(program, LAYER.image(program, w)).run(x)
    assert "initial" not in LAYER.lower(LAYER.schedules[0]).to_json().partition("\n")[0]


def test_a_module_without_the_values_is_refused():
    program = LAYER.lower(LAYER.schedules[0], "bias")
    x, w = LAYER.operands()
    module = codegen._create_module()
    codegen.add_region(module, "layer", program, LAYER.image(program, w))
    y = np.empty((LAYER.geometry.pixels, LAYER.oc), np.float32)
    with pytest.raises(RuntimeError, match="nothing says to what"):
        module["layer"](*map(tvm_ffi.from_dlpack, (x, y)))
    start = start_of(LAYER, "bias")
    codegen.add_region(module, "layer", program, LAYER.image(program, w), start)
    module["layer"](*map(tvm_ffi.from_dlpack, (x, y)))
    assert (y == PimDevice(program, LAYER.image(program, w)).run(x, initial=start)).all()


def test_devices_without_such_latches_refuse():
    with pytest.raises(UnsupportedOpError, match="the latches of newton-gddr6 always start from zero"):
        replace(LAYER, pim=NEWTON).lower(LAYER.schedules[0], "bias")
    program = LAYER.lower(LAYER.schedules[0], "bias")
    with pytest.raises(SpecError, match="the latches of pim 'newton-gddr6' start from zero"):
        check_device(replace(program, pim_digest=""), NEWTON)
    with pytest.raises(TraceError, match="the published timing has no WRBIAS"):
        time_program(program, LAYER.pim, "ramulator-pimflow")
    assert "sets latches" in pim_unsupported_reason(program)


def test_a_device_says_when_latches_may_be_written():
    (fault,) = replace(NEWTON, latch_initial_value=True).faults()
    assert fault == "field 'latch_initial_value': no constraint says when a WRBIAS may come"
    (fault,) = replace(with_latches(NEWTON), energy=NEWTON.energy).faults()
    assert fault == "missing field 'energy.latch_write_pj': per WRBIAS"
    assert not list(with_latches(NEWTON).faults())
    # Lanes are added on the GPU, whose kernel adds the bias too.
    assert not PimSpec.load("hbm-pim").can_write_latches


def test_the_aim_trace_of_a_bias(tmp_path):
    """One channel: pixels by tiles; a WR_BIAS before each product that begins a sum."""
    layer = PimLayer(x_shape=(1, 1, 2, 32), oc=16, pim=AIM, channels=1)
    order = next(s for s in layer.schedules if s.accumulators == 1)
    text = b"".join(chunk for chunk, _ in aim_isr.export(layer.lower(order, "bias"))).decode()
    path = tmp_path / "layer.aim"
    path.write_text(text)
    opcodes = [instruction.opcode for instruction in aim_reader.read(path)]
    assert opcodes.count("WR_BIAS") == opcodes.count("RD_MAC") == 2
    begin = opcodes.index("WR_BIAS")
    assert "MAC_ABK" not in opcodes[:begin] and opcodes.index("RD_MAC") > begin


@pytest.mark.parametrize("initial", ["bias", "add"])
def test_the_host_writes_each_group_of_latches_apart(initial):
    """16 channels with a tile each, of one pixel: 16 values, which the host writes one after the other."""
    layer = PimLayer(x_shape=(1, 1, 1, 32), oc=256, pim=AIM, channels=16)
    order = next(s for s in layer.schedules if s.accumulators == 1 and s.pixel_groups == 1)
    cycles = [time_program(layer.lower(order, start), AIM).cycles for start in ("", initial)]
    # One channel's WRBIAS takes the bus for 2 clocks; 15 others come before the last one's.
    assert cycles[1] >= cycles[0] + 15


def test_channels_with_the_same_tile_share_a_bias():
    layer = PimLayer(x_shape=(1, 1, 16, 32), oc=16, pim=AIM, channels=16)
    order = next(s for s in layer.schedules if s.accumulators == 1 and s.pixel_groups == 16)
    groups = {}
    for initial in ("bias", "add"):
        words = timing_streams(layer.lower(order, initial), AIM)[0].tolist()
        groups[initial] = words[words.index(6) + 3]  # opcode, size, latch, then the groups before
    assert groups == {"bias": 0, "add": 15}
