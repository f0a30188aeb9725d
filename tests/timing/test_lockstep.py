"""Devices whose channels share a host: programs in lockstep, and what the host costs."""

import itertools
from dataclasses import replace

import aim_reader
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from refreshes import when_due
from timing_programs import act, comp, program, read, write

from pimflow.core.commands import Affine, Gwrite, Readres
from pimflow.core.kernel import ConvGeometry
from pimflow.core.loop_order import LoopOrder
from pimflow.core.program import PimProgram
from pimflow.errors import SpecError, TraceError
from pimflow.hardware import PimSpec
from pimflow.hardware.pim import Constraint
from pimflow.pim_backend.programs.lowering import ProgramRequest, lower
from pimflow.pim_backend.programs.schedule import lockstep_phases, schedules
from pimflow.simulators.exports import aim_isr
from pimflow.simulators.pim.checker import violations
from pimflow.simulators.pim.coverage import product_coverage
from pimflow.simulators.pim.expansion import walk
from pimflow.simulators.pim.legality import program_violations
from pimflow.simulators.pim.timing import issue_program, time_program

AIM = when_due(PimSpec.load("aim-gddr6"))
FOREVER = replace(AIM, timing=AIM.timing | {"nREFI": 1 << 40})

layers = st.builds(
    ConvGeometry,
    n=st.integers(1, 2),
    h=st.integers(1, 6),
    w=st.integers(1, 6),
    c=st.sampled_from((3, 16, 100, 700, 1100, 2300)),
    oc=st.sampled_from((1, 16, 33, 96, 320)),
)


def aim_program(*channels: tuple) -> PimProgram:
    """A program of these streams, one a channel."""
    return replace(program(*channels), pim="aim-gddr6", gangs=1, buffers=1, columns_per_row=64, rows=64)


def pixel(index: int, bursts: int = 32):
    return Gwrite(buffer=0, pixel=Affine(index), pixels=1, k=Affine(0), columns=bursts)


def block(pixel_index: int = 0, row: int = 0, bursts: int = 32) -> tuple:
    """One vector, one row, one result."""
    return pixel(pixel_index, bursts), act(0, row), comp(bursts, row=row), read()


# ---- how channels are dealt ----


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(1, 70), st.integers(1, 40), st.integers(1, 20), st.integers(1, 32))
def test_phases_hold_every_unit_once(pixels, tiles, channels, groups):
    phases = lockstep_phases(pixels, tiles, channels, groups)
    units = []
    for phase in phases:
        assert 1 <= phase.channels <= channels
        blocks = [phase.block(channel) for channel in range(phase.channels)]
        assert len({(len(p), len(t)) for p, t in blocks}) == 1
        units += [unit for p, t in blocks for unit in itertools.product(p, t)]
    assert sorted(units) == list(itertools.product(range(pixels), range(tiles)))
    assert [p.channels for p in phases] == sorted((p.channels for p in phases), reverse=True)


def test_channels_that_divide_the_work_share_it_evenly():
    parts = lockstep_phases(49, 32, 16, 1)
    assert [(len(p.pixels), len(p.tiles), p.groups, p.channels_per_group) for p in parts] == [(49, 32, 1, 16)]


@pytest.mark.long
@settings(max_examples=examples(60), deadline=None)
@given(layers, st.integers(1, 20))
def test_every_order_of_aim_is_in_lockstep_legal_and_has_an_aim_form(geometry, channels):
    for schedule in schedules(geometry, AIM, "fp16"):
        assert LoopOrder.parse(str(schedule)) == schedule and schedule.pixel_groups
        source = lower(ProgramRequest("x", geometry, schedule), AIM, dtype="fp16", channels=channels)
        source.validate()
        assert aim_isr.unsupported_reason(source) == ""
        assert product_coverage(source).exact
        assert program_violations(source, AIM) == 0
        assert time_program(source, AIM).empty_reads == 0


@settings(max_examples=examples(40), deadline=None)
@given(layers, st.integers(1, 20))
def test_instructions_of_a_step_are_all_of_a_kind(geometry, channels):
    """Results and products are one instruction for all channels; only what is written may need several."""
    for schedule in schedules(geometry, AIM, "fp16"):
        source = lower(ProgramRequest("x", geometry, schedule), AIM, dtype="fp16", channels=channels)
        for group, _ in aim_isr._steps(source):
            assert len({opcode for opcode, *_ in group}) <= 1
            assert len(group) <= 1 or next(iter(group))[0] in ("WR_GB", "WR_BIAS")


def test_a_vector_that_all_channels_hold_is_written_once():
    """36 tiles on 8 channels: four each, two at a time, and then one each in four of them."""
    for chunks, stationary, writes in ((1, "input", 8), (3, "output", 8 * (3 + 2) + 4 * 2)):
        geometry = ConvGeometry(n=1, h=1, w=1, c=1000 * chunks, oc=576)
        order = LoopOrder(stationary=stationary, buffers=1, overlap=False, accumulators=2, pixel_groups=1)
        source = lower(ProgramRequest("x", geometry, order), AIM, dtype="fp16", channels=8)
        assert time_program(source, AIM).commands["GWRITE"] == writes
        assert product_coverage(source).exact and program_violations(source, AIM) == 0


@pytest.mark.parametrize("chunks", [1, 2])
def test_accumulators_that_a_phase_leaves_take_tiles_of_the_next(chunks):
    """Seven tiles on four channels, two accumulators: one idles while the others have a second tile."""
    geometry = ConvGeometry(n=1, h=1, w=1, c=1000 * chunks, oc=16 * 7)
    stationary = "input" if chunks == 1 else "output"
    order = LoopOrder(stationary=stationary, buffers=1, overlap=False, accumulators=2, pixel_groups=1)
    source = lower(ProgramRequest("x", geometry, order), AIM, dtype="fp16", channels=4)
    assert product_coverage(source).exact and program_violations(source, AIM) == 0
    lines = b"".join(text for text, _ in aim_isr.export(source)).decode().split("\n")
    words = [line.split()[1:] for line in lines if line.startswith("AiM ") and "EOC" not in line]
    # All vectors and products before all results, and each is one instruction.
    kinds = [opcode for opcode, *_ in words]
    assert kinds == ["WR_GB", "MAC_ABK", "MAC_ABK"] * chunks + ["RD_MAC"] * 2
    masks = [int(rest[0 if opcode == "MAC_ABK" else -1], 16) for opcode, _, *rest in words]
    assert masks == ([0xF << 28, 0xF << 28, 0xE << 28] * chunks) + [0xF << 28, 0xE << 28]


def test_accumulators_form_products_of_several_tiles_before_they_are_read():
    geometry = ConvGeometry(n=1, h=1, w=3, c=2048, oc=96)  # two chunks, six tiles
    spec = replace(FOREVER, accumulators=3)
    order = LoopOrder(stationary="output", buffers=1, overlap=False, accumulators=3, pixel_groups=1)
    assert order in schedules(geometry, spec, "fp16")
    source = lower(ProgramRequest("x", geometry, order), spec, dtype="fp16", channels=1)
    counts = time_program(source, spec).commands
    # Each of the two rounds of three tiles writes both chunks of a pixel once, and opens six rows; a pixel
    # begins on the row that the one before ended on.
    assert (counts["GWRITE"], counts["READRES"]) == (2 * 3 * 2, 18)
    assert counts["G_ACT"] == 2 * (6 + 2 * 5)
    with pytest.raises(SpecError, match="3 accumulators; pim 'aim-gddr6' has 2"):
        time_program(source, AIM)
    assert violations(issue_program(source, spec, 0), spec, source) == []
    assert product_coverage(source).exact
    nodes = source.channels[0]
    first = next(place for place, node in enumerate(nodes) if isinstance(node, Readres))
    swapped = list(nodes)
    a, b = nodes[first : first + 2]
    swapped[first : first + 2] = replace(a, channel=b.channel), replace(b, channel=a.channel)
    assert not product_coverage(replace(source, channels=(tuple(swapped),))).exact
    assert PimProgram.from_json(source.to_json()) == source
    assert '"accumulators": 3' in source.to_json()
    assert '"accumulators"' not in replace(source, accumulators=1).to_json()


@settings(max_examples=examples(30), deadline=None)
@given(layers, st.integers(1, 9), st.sampled_from((1, 2, 3, 8)))
def test_more_accumulators_never_slow_the_best_order(geometry, channels, accumulators):
    def best(count: int) -> int:
        spec = replace(AIM, accumulators=count)
        requests = (ProgramRequest("x", geometry, order) for order in schedules(geometry, spec, "fp16"))
        programs = (lower(request, spec, dtype="fp16", channels=channels) for request in requests)
        return min(time_program(program, spec).cycles for program in programs)

    assert best(2 * accumulators) <= best(accumulators)


def test_an_order_of_a_layer_fits_its_rows_one_by_one():
    """As pipelines take them: with fewer pixels than the order has groups."""
    layer, row = (ConvGeometry(n=1, h=h, w=4, c=64, oc=64) for h in (8, 1))
    for order in schedules(layer, AIM, "fp16"):
        source = lower(ProgramRequest("x", row, order), AIM, dtype="fp16", channels=16)
        assert product_coverage(source).exact and program_violations(source, AIM) == 0


@pytest.mark.parametrize("level", ["newton+", "newton++", "pimflow"])
def test_every_level_has_orders(level):
    geometry = ConvGeometry(n=1, h=4, w=4, c=64, oc=64)
    assert schedules(geometry, AIM, "fp16", level)


# ---- what it takes ----


def test_a_block_by_hand():
    """The sums are those of the device file; the AiM simulator takes 286 and 4 to begin and to end."""
    changed, written = 33, 33 + 2 * 31  # TMOD; the last of 32 bursts
    opened = written + 33  # TMOD
    computed = opened + 56 + 2 * 31  # nRCDRDMAC; the last of 32 COMPs
    read_at = computed + 34  # nCCDL, TMOD
    stream = issue_program(aim_program(block()), FOREVER, 0)
    assert stream["clock"][[0, 1, 2, -1]].tolist() == [changed, opened, opened + 56, read_at]
    assert time_program(aim_program(block()), FOREVER).cycles == read_at + 2 == 282


def test_channels_with_the_same_vectors_take_no_longer():
    one_channel_cycles = time_program(aim_program(block()), FOREVER).cycles
    assert time_program(aim_program(*[block()] * 16), FOREVER).cycles == one_channel_cycles


@pytest.mark.parametrize("bursts", [1, 32, 64])
def test_other_vectors_come_a_clock_of_the_host_apart(bursts):
    """In pieces that a channel's queue takes, so that no group of channels waits for another's."""
    same = time_program(aim_program(*[block(bursts=bursts)] * 4), FOREVER).cycles
    blocks = (block(pixel_index, bursts=bursts) for pixel_index in range(4))
    different = time_program(aim_program(*blocks), FOREVER).cycles
    assert different - same == 3


def test_pieces_of_other_vectors_take_turns(tmp_path):
    path = tmp_path / "x.aim"
    source = aim_program(block(bursts=40), block(1, bursts=40))
    path.write_bytes(b"".join(text for text, _ in aim_isr.export(source)))
    writes = [i.operands for i in aim_reader.read(path) if i.opcode == "WR_GB"]
    pieces = [(w["opsize"], w["gpr"], 32 - w["mask"].bit_length()) for w in writes]
    assert pieces == [(n, 64 * c + offset, c) for offset, n in ((0, 16), (16, 16), (32, 8)) for c in (0, 1)]
    assert aim_reader.counts(path)["GWRITE"] == 2


def unroll(nodes: tuple) -> tuple:
    """The same commands without loops."""

    def plain(node, counters):
        values = {name: getattr(node, name) for name in type(node).__slots__}
        return type(node)(
            **{k: Affine(v.value(counters)) if isinstance(v, Affine) else v for k, v in values.items()}
        )

    return tuple(plain(node, counters) for node, counters in walk(nodes))


@pytest.mark.long
@settings(max_examples=examples(40), deadline=None)
@given(layers, st.integers(1, 9), st.sampled_from((700, 3333, 1 << 40)))
def test_loops_take_what_their_commands_take(geometry, channels, nREFI):
    spec = replace(AIM, timing=AIM.timing | {"nREFI": nREFI})
    for schedule in schedules(geometry, spec, "fp16"):
        source = lower(ProgramRequest("x", geometry, schedule), spec, dtype="fp16", channels=channels)
        flat = replace(source, channels=tuple(map(unroll, source.channels)))
        assert time_program(source, spec) == time_program(flat, spec)


def test_channels_out_of_step_are_refused():
    streams = block(), (*block(), *block(row=1))  # the first has less to do, and is done sooner
    timing = time_program(aim_program(*streams), AIM)
    assert timing.channel_cycles[0] < timing.cycles
    for stream in (block(row=1), block(bursts=31), (read(), *block()[:3])):
        with pytest.raises(TraceError, match="channel 1: not in lockstep with the others; one host issues"):
            time_program(aim_program(block(), stream), AIM)


def test_the_checker_sees_channels_out_of_step():
    source = aim_program(block(), block(row=1))
    without_first = replace(source, channels=source.channels[1:])
    stream = issue_program(without_first, AIM, 0)
    assert violations(stream, AIM, without_first, 0) == []
    violation_texts = violations(stream, AIM, source, 1)
    assert violation_texts and all("does something else at this step" in text for text in violation_texts)


def test_the_checker_sees_products_that_no_instruction_says():
    separated_stream = (write(), act(0), read(), comp(4, column=2))
    violation_texts = violations(issue_program(aim_program(separated_stream), AIM, 0), AIM)
    assert any("no product follows the activation" in text for text in violation_texts)


def test_a_program_begins_with_a_change_of_mode():
    stream = issue_program(aim_program(block()), AIM, 0)
    stream["clock"] -= 1
    assert any("first change to registers" in text for text in violations(stream, AIM))


def test_a_refresh_in_the_middle_of_a_product_parts_no_instruction():
    spec = replace(AIM, timing=AIM.timing | {"nREFI": 400})
    source = aim_program(tuple(itertools.chain(*(block(0, row, 64) for row in range(5)))))
    stream = issue_program(source, spec, 0)
    assert np.count_nonzero(stream["command"] == 5) > 2
    assert violations(stream, spec, source, 0) == []


# ---- device files ----


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"level": "host", "before": ("COMP",), "after": ("COMP",)}, "level 'host' has rules from"),
        ({"queue": 3}, "field 'queue' is for level 'host'"),
        ({"level": "host", "before": ("GWRITE",), "after": ("GWRITE",), "queue": -1}, "below zero"),
        ({"before": ("BEGIN", "COMP")}, "'BEGIN' is the only command of its rule"),
        ({"level": "gang", "before": ("BEGIN",)}, "'BEGIN' is the only command of its rule"),
        ({"after": ("BEGIN",)}, "command 'BEGIN' is none of"),
    ],
)
def test_a_rule_that_means_nothing_is_refused(changed, says):
    with pytest.raises(ValueError, match=says):
        Constraint(**dict(level="channel", before=("COMP",), after=("READRES",), latency="nTREE") | changed)


def test_products_at_column_0_need_whole_rows():
    with pytest.raises(ValueError, match=r"comp_starts_at_row.*leave the rest of a row unused"):
        replace(AIM, buffer_columns=32)
