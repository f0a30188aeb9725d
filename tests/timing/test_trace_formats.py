"""Does every trace format keep what it says it keeps, and is a file that breaks its grammar refused?"""

import itertools
import json
from collections import Counter, defaultdict
from dataclasses import replace

import aim_reader
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_texts import NEWTON, is_layer, layer_programs, layer_texts
from length import examples
from test_random_programs import programs
from timing_programs import act, act_all, comp, program, read, store, write

from pimflow.commands.simulate import trace
from pimflow.core.attention import Attention
from pimflow.core.commands import Comp, Gwrite, Loop, Write
from pimflow.core.layer_text import parse_layer
from pimflow.core.program import PimProgram
from pimflow.errors import TraceError, UsageError
from pimflow.hardware import PimSpec, system
from pimflow.hardware.pim import COMMANDS
from pimflow.pim_backend.programs.cache_schedule import CacheSchedule
from pimflow.pim_backend.programs.cached_attention import CachedAttention
from pimflow.placement.costs.pim_runs import PimRun
from pimflow.simulators.exports import aim_isr, perfetto
from pimflow.simulators.pim.expansion import command_counts, pieces, pim_unsupported_reason
from pimflow.simulators.pim.legality import program_violations
from pimflow.simulators.pim.timing import issue_program, time_program
from pimflow.simulators.pim.trace import Trace, expand_to_pim
from pimflow.simulators.ramulator import load_store_trace

COLUMN_ADDRESS, ROW_ADDRESS, GANG_ADDRESS = 6, 11, 27


def write_chunks(path, chunks):
    """The file that `chunks` make, and what they say they stand for."""
    chunks = list(chunks)
    path.write_bytes(b"".join(text for text, _ in chunks))
    return path, sum(share for _, share in chunks)


def count_commands(source: PimProgram) -> Counter:
    return Counter(c.name for channel in range(len(source.channels)) for c in source.commands(channel))


def pim_line(command) -> str:
    """One command by the address layout of docs/traces.md."""
    if command.name == "READRES":
        return "READRES\n"
    if command.name == "GWRITE":
        return "0x00000000 GWRITE\n"
    address = command.row << ROW_ADDRESS
    if command.name == "COMP":
        return f"{address | command.column << COLUMN_ADDRESS:#010x} COMP\n"
    return f"{address | command.gang << GANG_ADDRESS:#010x} G_ACT{command.gang}\n"


@settings(max_examples=examples(60), deadline=None)
@given(layer_programs() | programs, st.integers(1, 400))
def test_pieces_are_the_program(source, most):
    for channel in range(len(source.channels)):
        parts = list(pieces(source, channel, most))
        commands = [list(piece.commands(0)) for piece in parts]
        assert [c for piece in commands for c in piece] == list(source.commands(channel))
        for piece, expansion in zip(parts, commands):
            single = len(piece.channels[0]) == 1 and isinstance(piece.channels[0][0], Comp)
            assert len(expansion) <= most or single


@settings(max_examples=examples(60), deadline=None)
@given(layer_programs() | programs)
def test_commands_are_counted_without_expansion(source):
    counts = command_counts(source)
    commands = (c for n in range(len(source.channels)) for c in source.commands(n))
    bursts = sum(c.bursts for c in commands if c.name == "GWRITE")
    assert counts.pop("gwrite_bursts", 0) == bursts
    assert counts == count_commands(source)


@settings(max_examples=examples(60), deadline=None)
@given(layer_programs(), st.integers(1, 300))
def test_pim_text_has_every_command_at_its_address(source, most):
    for channel in range(len(source.channels)):
        text = b"".join(expand_to_pim(piece, 0) for piece in pieces(source, channel, most))
        assert text.decode() == "".join(pim_line(command) for command in source.commands(channel))
        assert len(Trace.read(text)) == sum(1 for _ in source.commands(channel))


def channel_operations(nodes, counters=()):
    """Gathers, products and readings of one channel in order, by a walk of its own."""
    for node in nodes:
        if isinstance(node, Loop):
            for i in range(node.extent):
                yield from channel_operations(node.body, (*counters, i))
        elif isinstance(node, Gwrite):
            yield "WR_GB", node.bursts, (node.pixel.value(counters), node.pixels, node.k.value(counters))
        elif isinstance(node, Comp):
            yield "MAC_ABK", node.count, (-1, node.row.value(counters))
        elif isinstance(node, Write) and node.elements == 1:
            yield (
                "WR_ABK",
                1,
                (-1, node.row.value(counters), node.pixel.value(counters), node.k.value(counters)),
            )
        elif isinstance(node, Write):
            for bank, _ in itertools.product(range(node.banks), range(node.count)):
                address = (node.bank + bank, node.row.value(counters), node.pixel.value(counters))
                yield "WR_SBK", 1, address
        elif not hasattr(node, "gang"):
            yield "RD_MAC", 1, None


def whole_writes(instructions):
    """Pieces of the vectors of several groups of channels, which take turns, as one WR_GB of each group."""
    written = {}
    for instruction in [*instructions, aim_reader.AimInstruction("EOC", {})]:
        if instruction.opcode == "WR_GB":
            size = (
                instruction.operands["opsize"]
                + written.get(instruction.operands["mask"], {"opsize": 0})["opsize"]
            )
            written[instruction.operands["mask"]] = instruction.operands | {"opsize": size}
            continue
        yield from (aim_reader.AimInstruction("WR_GB", operands) for operands in written.values())
        written.clear()
        if instruction.operands:
            yield instruction


def check_aim_trace(source, path):
    """Whether the trace of `source`, read back, is what each channel does, in its order."""
    _, share = write_chunks(path, aim_isr.export(source))
    expected = count_commands(source)
    assert share == expected.total()
    expected["WRITE"] = sum(
        command.bursts
        for channel in range(len(source.channels))
        for command in source.commands(channel)
        if command.name == "WRITE"
    )
    counted = ("GWRITE", "COMP", "READRES", "WRBIAS", "WRITE", "AF")
    assert aim_reader.counts(path) == {name: expected[name] for name in counted}
    first, *instructions, last = aim_reader.read(path)
    assert (first.opcode, first.operands) == ("W CFR", {"CFR id": 0, "data": 1})
    assert last.opcode == "EOC"
    streams = {channel: channel_operations(nodes) for channel, nodes in enumerate(source.channels)}
    for instruction in whole_writes(instructions):
        operands = instruction.operands
        members = [c for c in streams if operands["mask"] >> 31 - c & 1]
        assert len(members) == operands["mask"].bit_count()
        steps = {next(streams[channel]) for channel in members}
        assert len(steps) == 1, "one instruction for channels that do different things"
        opcode, size, address = steps.pop()
        assert instruction.opcode == opcode
        assert operands.get("opsize", 1) == size
        if opcode in ("MAC_ABK", "WR_SBK", "WR_ABK"):
            assert (operands.get("bank", -1), operands["row"]) == address[:2]
    assert all(next(stream, None) is None for stream in streams.values())


def test_aim_says_what_every_channel_does(tmp_path_factory):
    path = tmp_path_factory.mktemp("aim") / "layer.aim"
    said = Counter()

    @settings(max_examples=examples(150), deadline=None)
    @given(layer_programs())
    def check(source):
        if aim_isr.unsupported_reason(source):
            said["refused"] += 1
            with pytest.raises(UsageError, match="has no AiM form: AiM"):
                list(aim_isr.export(source))
            return
        said["written"] += 1
        check_aim_trace(source, path)

    check()
    assert min(said["written"], said["refused"]) >= 3


@pytest.mark.parametrize("heads", [16, 4])
def test_aim_says_attention_over_a_cache(tmp_path, heads):
    """Appends, and products of vectors that share rows; all legal, and `pimflow.trace` writes the same."""
    aim = PimSpec.load("aim-gddr6")
    attention = Attention(
        batch=1, heads=16, kv_heads=heads, head_size=40, value_size=24, queries=1, keys=70, scale=1.0,
        positioned=True,
    )  # fmt: skip
    order = CacheSchedule.parse("keys vector-stationary, spread 4; values row-stationary, spread 2")
    layouts = order.layouts(attention, aim, "fp16", channels=4)
    cached = CachedAttention.from_layouts("mixed", attention, order, layouts)
    assert {part.partition("__")[2] for part in cached.programs} == {
        *("new_keys", "scores", "new_values", "values")
    }
    for source in cached.programs.values():
        check_aim_trace(source, tmp_path / f"{source.region}.aim")
        assert program_violations(source, aim) == 0
    target = replace(system(pim="aim-gddr6"), pim_channels=4)
    runs = [PimRun(program=p, timing=time_program(p, aim)) for p in cached.programs.values()]
    summary = trace.write(tmp_path / "out", runs, target, "aim", lambda _: None)
    for layer in summary.layers:
        (name,) = layer.files_bytes
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / name).read_bytes()
        assert ("WRITE" in layer.commands) == ("new" in layer.layer)
    assert "WRITEs on 4 channels" in summary.text("out")


def test_aim_channels_that_do_the_same_share_an_instruction(tmp_path):
    stream = (write(), *act_all(3), comp(32, row=3), read())
    path, _ = write_chunks(tmp_path / "x.aim", aim_isr.export(program(*[stream] * 16)))
    assert path.read_text() == (
        "W CFR 0 1\nAiM WR_GB 32 0 0xffff0000\nAiM MAC_ABK 32 0xffff0000 3\n"
        "AiM RD_MAC 512 0xffff0000\nAiM EOC\n"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "fp32"}, "16 elements of fp16 or bf16"),
        ({"elements_per_column": 8}, "16 elements of fp16 or bf16"),
        ({"tile_gangs": 1}, "in all banks"),
        ({"banks": 8}, "16 banks"),
        ({"channels": ((read(),),) * 33}, "32 channels"),
        ({"columns_per_row": 65}, "64 columns"),
        ({"row_begin": 16000}, "16384 rows"),
        ({"channels": ((comp(buffer=0), comp(buffer=1)),)}, "one global buffer"),
        ({"channels": ((act(0), replace(store(), elements=1)),)}, "whole columns of a bank, or an element"),
    ],
)
def test_what_aim_lacks_is_said(change, says):
    assert says in aim_isr.unsupported_reason(replace(program((read(),)), **change))


def test_what_writes_is_no_pim_trace():
    source = program((act(0), store()))
    assert "writes into banks" in pim_unsupported_reason(source)
    with pytest.raises(UsageError, match="WRITE has no place"):
        expand_to_pim(source, 0)


def convolution_accesses(geometry, element):
    """Transactions of a convolution, element by element, in the order that docs/traces.md states."""
    align = lambda size: -(-size // 256) * 256  # noqa: E731
    filters = align(geometry.n * geometry.h * geometry.w * geometry.c * element)
    results = filters + align(geometry.oc * geometry.reduction * element)
    seen, lines = set(), []

    def touch(word, addresses):
        for line in sorted({a // 64 * 64 for a in addresses} - {a for w, a in seen if w == word}):
            seen.add((word, line))
            lines.append(f"{word} {line:#x}")

    for p0 in range(0, geometry.pixels, 128):
        pixels = range(p0, min(p0 + 128, geometry.pixels))
        for c0 in range(0, geometry.oc, 128):
            channels = range(c0, min(c0 + 128, geometry.oc))
            inputs = []
            for pixel in pixels:
                n, y = divmod(pixel, geometry.oh * geometry.ow)
                y, x = divmod(y, geometry.ow)
                for dy in range(geometry.kh):
                    for dx in range(geometry.kw):
                        iy = y * geometry.stride[0] + dy * geometry.dilation[0] - geometry.padding[0]
                        ix = x * geometry.stride[1] + dx * geometry.dilation[1] - geometry.padding[1]
                        if 0 <= iy < geometry.h and 0 <= ix < geometry.w:
                            base = ((n * geometry.h + iy) * geometry.w + ix) * geometry.c
                            inputs += [(base + c) * element for c in range(geometry.c)]
            touch("LD", inputs)
            k = geometry.reduction
            touch("LD", [filters + (c * k + i) * element for c in channels for i in range(k)])
            touch("ST", [results + (p * geometry.oc + c) * element for p in pixels for c in channels])
    return lines


@settings(max_examples=examples(25), deadline=None)
@given(layer_texts().filter(is_layer), st.sampled_from(("fp16", "fp32")))
def test_gpu_traffic_is_that_of_every_element(text, dtype):
    geometry = parse_layer(text)
    if geometry.macs > 400_000:
        geometry = replace(geometry, oc=min(geometry.oc, 3))
    chunks = list(load_store_trace.export(geometry, dtype))
    assert sum(share for _, share in chunks) == geometry.pixels
    accesses = b"".join(chunk for chunk, _ in chunks).decode().splitlines()
    assert accesses == convolution_accesses(geometry, {"fp16": 2, "fp32": 4}[dtype])


def test_gpu_traffic_over_several_tiles(tmp_path):
    geometry = parse_layer("conv:1x3x13x12,140,3x3,s1,p1")
    path, _ = write_chunks(tmp_path / "x.ldst", load_store_trace.export(geometry, "fp16"))
    lines = path.read_text().splitlines()
    assert lines == convolution_accesses(geometry, 2)
    assert load_store_trace.counts(path) == Counter(line[:2] for line in lines)


@pytest.mark.parametrize("line", ["LD", "LD 0xg", "RD 0x0", "LD 0x0 1", " LD 0x0", "", "LD -1"])
def test_malformed_gpu_traffic(tmp_path, line):
    path = tmp_path / "x.ldst"
    path.write_text(f"LD 0x40\n{line}\nST 64\n")
    with pytest.raises(TraceError, match=r"x\.ldst:2: not 'LD <address>'"):
        load_store_trace.counts(path)


def perfetto_events(source, spec=NEWTON):
    table = json.loads(b"".join(text for text, _ in perfetto.export(source, spec)))
    return [event for event in table["traceEvents"] if event["ph"] == "X"], table


@pytest.mark.long
@settings(max_examples=examples(60), deadline=None)
@given(layer_programs() | programs, st.sampled_from((NEWTON, replace(NEWTON, tCK_ps=333.3))))
def test_perfetto_shows_every_command_once_and_none_over_another(source, spec):
    events, _ = perfetto_events(source, spec)
    threads = defaultdict(list)
    for event in events:
        start, duration = round(event["ts"] * 1e6), round(event["dur"] * 1e6)
        assert start == round(event["args"]["clock"] * spec.tCK_ps) and duration > 0
        threads[event["pid"], event["tid"]].append((start, start + duration))
    for spans in threads.values():
        spans.sort()
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    for channel in range(len(source.channels)):
        stream = issue_program(source, spec, channel)
        expected = Counter()
        for row in stream:
            name = COMMANDS[row["command"]]
            for gang in range(4) if name == "REF" else [row["gang"]]:
                expected[name, row["clock"], gang if name in ("G_ACT", "PRE", "REF") else row["column"]] += 1
        shown_counts = Counter(
            (e["name"], e["args"]["clock"], e["args"].get("gang", e["args"].get("column", -1)))
            for e in events
            if e["pid"] == channel
        )
        assert shown_counts == expected


def test_perfetto_by_hand():
    # GWRITE of 2 bursts at 1 takes 4 cycles; rows open at 2, 19, 36, 53; COMPs at 64 and 66 (53 + nRCDR 11);
    # READRES at 67 (nTREE 1) takes 2, so the rows stay open until 69. A cycle is 8/7 ns.
    events, table = perfetto_events(program((write(bursts=2), *act_all(7), comp(2, row=7), read())))
    cycle_us = 8 / 7 / 1e3
    spans = [(e["name"], e["tid"], e["ts"] / cycle_us, (e["ts"] + e["dur"]) / cycle_us) for e in events]
    expected = [
        ("COMP", 6, 64, 66),
        ("COMP", 6, 66, 68),
        ("GWRITE", 1, 1, 5),
        ("READRES", 1, 67, 69),
        *(("G_ACT", 2 + gang, 2 + 17 * gang, 69) for gang in range(4)),
    ]
    assert [span[:2] for span in spans] == [span[:2] for span in expected]
    assert np.allclose([span[2:] for span in spans], [span[2:] for span in expected], atol=1e-2)
    names = {(e["tid"], e["args"]["name"]) for e in table["traceEvents"] if e["name"] == "thread_name"}
    assert names == {(1, "bus"), *((2 + g, f"gang {g}") for g in range(4)), (6, "multipliers")}
    assert table["displayTimeUnit"] == "ns" and table["otherData"]["tCK_ps"] == NEWTON.tCK_ps
