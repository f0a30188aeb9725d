"""Random legal programs: legal as issued, complete, as early as possible, and the same however written."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from refreshes import when_due
from timing_programs import GANGS, act, comp, loop, program, read, store, with_timing, write

from pimflow.core.commands import KINDS, Affine, Comp, GAct, Loop, Node, Write
from pimflow.core.program import PimProgram
from pimflow.hardware.pim import COMMANDS, PimSpec
from pimflow.simulators.pim.checker import violations
from pimflow.simulators.pim.streams import timing_streams
from pimflow.simulators.pim.timing import TimingResult, issue_program, time_program, time_trace
from pimflow.simulators.pim.trace import expand_to_pim

NEWTON = when_due(PimSpec.load("newton-gddr6"))
SPECS = (
    NEWTON,
    with_timing(NEWTON, nREFI=400, nRFC=60),
    with_timing(NEWTON, nREFI=700, nRFC=300, nFAW=3, nRAS=60, nTURN=20),
    with_timing(NEWTON, nCCDS=5, nTREE=9, nRTP=14, nRC=70, nBL=3, nREFI=1000),
)
PRE, REF = COMMANDS.index("PRE"), COMMANDS.index("REF")


@st.composite
def bodies(draw, depth: int = 0, kinds: tuple[str, ...] = ()) -> tuple[Node, ...]:
    """Commands of one loop body; a COMP comes only once this body opened its row in every gang.

    `kinds` are what is drawn besides: ``store`` for WRITEs.
    """
    nodes: list[Node] = []
    rows: dict[int, Affine] = {}
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(("write", "act", "comp", "comp", "read", "loop", *kinds)))
        buffer = draw(st.integers(0, 3))
        if kind == "write":
            nodes.append(write(buffer, draw(st.integers(1, 32))))
        elif kind == "read":
            nodes.append(read(buffer))
        elif kind == "loop":
            if depth < 3:
                nodes.append(loop(draw(st.integers(1, 5)), *draw(bodies(depth + 1, kinds))))
                rows.clear()
        else:
            coefficients = tuple(draw(st.integers(-2, 2)) for _ in range(depth))
            min_row = 700 if min(coefficients, default=0) < 0 else 0  # no loop falls by more
            row = Affine(min_row + draw(st.integers(0, 3)), coefficients)
            if kind == "act":
                gang = draw(st.sampled_from(GANGS))
                nodes.append(act(gang, row))
                rows[gang] = row
            elif kind == "store":
                gang = draw(st.sampled_from(GANGS))
                if gang not in rows:
                    nodes.append(act(gang, row))
                nodes.append(store(gang, rows.setdefault(gang, row), draw(st.integers(1, 8))))
            else:
                if len(rows) == len(GANGS) and len(set(rows.values())) == 1:
                    row = rows[0]
                for gang in draw(st.permutations(GANGS)):
                    if rows.get(gang) != row:
                        nodes.append(act(gang, row))
                        rows[gang] = row
                count = draw(st.integers(1, 32))
                nodes.append(comp(count, buffer, row, draw(st.integers(0, 32 - count))))
    return tuple(nodes)


programs = bodies().map(lambda body: program((loop(9, *_deeper(body)),)))
writing_programs = bodies(kinds=("store",)).map(lambda body: program((loop(9, *_deeper(body)),)))


def _deeper(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The same nodes inside one more loop, whose counter they ignore."""

    def shift(affine: Affine) -> Affine:
        return Affine(affine.base, (0, *affine.coefficients))

    out = []
    for node in nodes:
        if isinstance(node, Loop):
            node = replace(node, body=_deeper(node.body))
        elif isinstance(node, GAct | Comp | Write):
            node = replace(node, row=shift(node.row))
        out.append(node)
    return tuple(out)


def unroll(source: PimProgram) -> PimProgram:
    """Loop-free and COMP by COMP."""
    nodes = []
    for command in source.commands(0):
        if command.name == "GWRITE":
            nodes.append(write(command.buffer, command.bursts))
        elif command.name == "G_ACT":
            nodes.append(act(command.gang, command.row))
        elif command.name == "COMP":
            nodes.append(comp(1, command.buffer, command.row, command.column))
        elif command.name == "WRITE":
            nodes.append(store(command.gang, command.row, command.bursts))
        else:
            nodes.append(read(command.buffer))
    return program(tuple(nodes))


@pytest.mark.long
@settings(max_examples=examples(600), deadline=None)
@given(programs | writing_programs, st.sampled_from(SPECS))
def test_issued_stream(source, spec):
    stream = issue_program(source, spec, 0)
    assert violations(stream, spec, source) == []

    result = time_program(source, spec)
    expanded = Counter(command.name for command in source.commands(0))
    assert all(result.commands.get(n, 0) == expanded[n] for n in ("GWRITE", "COMP", "READRES", "WRITE"))
    assert result.commands["G_ACT"] >= expanded["G_ACT"]
    counts = [result.commands.get(name, 0) for name in COMMANDS]
    assert counts == np.bincount(stream["command"], minlength=len(COMMANDS)).tolist()
    written = stream["bursts"][stream["command"] == COMMANDS.index("WRITE")]
    assert result.channel_write_bursts == (written.sum(),)
    assert result.cycles > stream["clock"].max(initial=-1)


@pytest.mark.long
@settings(max_examples=examples(200), deadline=None)
@given(programs | writing_programs)
def test_the_table_of_commands_is_the_commands(source):
    rows = [(c.name, c.gang, c.buffer, c.row, c.column, c.bursts) for c in source.commands(0)]
    assert [(KINDS[kind], *fields) for kind, *fields in source.table(0).tolist()] == rows


@settings(max_examples=examples(100), deadline=None)
@given(programs | writing_programs)
def test_time_is_asked_without_pixels_elements_banks_and_the_least_row(source):
    """The stream is that of the program with zeros there, rows counted from the least of all commands."""
    min_row = min((c.row for c in source.commands(0) if c.row >= 0), default=0)
    nothing = dict.fromkeys(("pixel", "k", "channel"), Affine(0)) | {"bank": 0, "element": 0}

    def clear_operands(node: Node) -> Node:
        if isinstance(node, Loop):
            return replace(node, body=tuple(map(clear_operands, node.body)))
        row = {"row": shift_affine(node.row, -min_row)} if hasattr(node, "row") else {}
        return replace(node, **row, **{name: zero for name, zero in nothing.items() if hasattr(node, name)})

    expected = replace(source, channels=(tuple(map(clear_operands, source.channels[0])),)).channel_words(0)
    given_words = source.channel_words(0).copy()
    (words,) = timing_streams(source, NEWTON)
    assert np.array_equal(words, expected)
    assert np.array_equal(source.channel_words(0), given_words)


def shift_affine(affine: Affine, offset: int) -> Affine:
    return Affine(affine.base + offset, affine.coefficients)


@settings(max_examples=examples(60), deadline=None)
@given(programs | writing_programs, st.sampled_from(SPECS), st.data())
def test_no_command_could_issue_sooner(source, spec, data):
    stream = issue_program(source, spec, 0)
    accesses = np.flatnonzero(~np.isin(stream["command"], (PRE, REF)))
    for index in data.draw(st.lists(st.sampled_from(accesses.tolist()), min_size=1, max_size=8)):
        early = stream.copy()
        early["clock"][index] -= 1
        assert violations(early, spec)


@settings(max_examples=examples(80), deadline=None)
@given(programs, st.sampled_from(SPECS), st.sampled_from(("strict", "ramulator-pimflow")))
def test_loops_and_runs_change_nothing(source, spec, timing):
    assert time_program(source, spec, timing) == time_program(unroll(source), spec, timing)


def test_rows_may_fall():
    def time_rows(row: Affine) -> TimingResult:
        acts = (act(gang, row) for gang in GANGS)
        return time_program(program((loop(6, *acts, comp(4, row=row)),)), NEWTON)

    assert time_rows(Affine(5, (-1,))) == time_rows(Affine(0, (1,)))


@settings(max_examples=examples(80), deadline=None)
@given(programs)
def test_text_has_the_same_ramulator_cycles(source):
    text = expand_to_pim(source, 0)
    timed = time_program(source, NEWTON, "ramulator-pimflow")
    assert time_trace(text, NEWTON, "ramulator-pimflow").cycles == timed.cycles


@settings(max_examples=examples(80), deadline=None)
@given(programs, st.integers(0, 900))
def test_channels_that_differ_in_place_only(source, rows):
    def move_rows(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(
            replace(node, body=move_rows(node.body))
            if isinstance(node, Loop)
            else replace(node, row=Affine(node.row.base + rows, node.row.coefficients))
            if isinstance(node, GAct | Comp)
            else node
            for node in nodes
        )

    two_channels = time_program(program(*source.channels, move_rows(source.channels[0])), NEWTON)
    one_channel = time_program(source, NEWTON)
    assert two_channels.channel_cycles == 2 * one_channel.channel_cycles
    assert two_channels.utilisation == one_channel.utilisation
    assert two_channels.commands == {name: 2 * count for name, count in one_channel.commands.items()}
