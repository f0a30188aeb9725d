"""The checker catches what a broken engine would do to a stream."""

import time

import numpy as np
import pytest
from timing_programs import act_all, comp, loop, program, read, store, write

from pimflow.core.commands import Affine
from pimflow.hardware.pim import COMMANDS
from pimflow.simulators.pim.checker import violations, violations_by_rule
from pimflow.simulators.pim.timing import issue_program

GWRITE, G_ACT, COMP, READRES, PRE, REF, WRITE, WRBIAS, AF = range(len(COMMANDS))

# Two buffers, two rows, three refreshes.
STREAM = (
    loop(
        12,
        write(0),
        write(1, bursts=8),
        *act_all(Affine(3, (2,))),
        loop(2, comp(32, buffer=0, row=Affine(3, (2,))), comp(8, buffer=1, row=Affine(3, (2,)))),
        *act_all(Affine(4, (2,))),
        loop(2, comp(32, buffer=0, row=Affine(4, (2,))), comp(8, buffer=1, row=Affine(4, (2,)))),
        read(0),
        read(1),
        store(2, Affine(4, (2,)), bursts=3),
    ),
)


@pytest.fixture
def legal(newton):
    return issue_program(program(STREAM), newton, 0)


def command_index(stream, command, nth=0):
    return int(np.flatnonzero(stream["command"] == command)[nth])


def test_legal_stream(newton, legal):
    assert violations(legal, newton, program(STREAM)) == []
    assert (legal["command"] == REF).sum() >= 3


@pytest.mark.long
@pytest.mark.parametrize("command", [GWRITE, G_ACT, COMP, READRES, WRITE])
def test_every_command_is_as_early_as_it_may_be(newton, legal, command):
    for index in np.flatnonzero(legal["command"] == command)[::7].tolist():
        early = legal.copy()
        early["clock"][index] -= 1
        assert violations(early, newton), index


@pytest.mark.parametrize("command", [GWRITE, G_ACT, COMP, READRES, PRE, REF], ids=lambda c: COMMANDS[c])
@pytest.mark.parametrize("nth", [0, 1, -1])
def test_dropped_command(newton, legal, command, nth):
    dropped = np.delete(legal, command_index(legal, command, nth))
    # A dropped PRE leaves a G_ACT or REF on an open row, a dropped REF is overdue.
    assert violations(dropped, newton, program(STREAM))
    if command in (PRE, REF):
        assert violations(dropped, newton)


@pytest.mark.parametrize("command", [GWRITE, G_ACT, COMP, READRES, WRITE], ids=lambda c: COMMANDS[c])
def test_repeated_command(newton, legal, command):
    index = command_index(legal, command, -1)
    repeated = np.insert(legal, index + 1, legal[index])
    repeated["clock"][index + 1 :] += 100
    assert violations(repeated, newton, program(STREAM))


@pytest.mark.long
def test_swapped_commands(newton, legal):
    first_row = command_index(legal, G_ACT)
    operands = [name for name in legal.dtype.names if name != "clock"]
    for index in (first_row, *range(0, len(legal) - 1, 5)):
        kinds = set(legal["command"][[index, index + 1]].tolist())
        swapped = legal.copy()
        for name in operands:
            swapped[name][[index, index + 1]] = legal[name][[index + 1, index]]
        # A PRE may come sooner or later, and reopening G_ACTs in any order.
        if PRE in kinds or (swapped == legal).all() or (kinds == {G_ACT} and index != first_row):
            continue
        assert violations(swapped, newton, program(STREAM)), index


@pytest.mark.parametrize(
    "command, field, problem",
    [
        (COMP, "row", "is not open in every bank"),
        (G_ACT, "row", "is not open in every bank"),
        (G_ACT, "gang", "a row is still open"),
        (COMP, "column", "the program goes on with COMP"),
        (COMP, "buffer", "the program goes on with COMP"),
        (GWRITE, "bursts", "the program goes on with GWRITE"),
        (READRES, "buffer", "the program goes on with READRES"),
        (WRITE, "row", "is not open in its gang"),
        (WRITE, "gang", "the program goes on with WRITE"),
        (WRITE, "column", "the program goes on with WRITE"),
        (WRITE, "bursts", "the program goes on with WRITE"),
    ],
)
def test_wrong_operand(newton, legal, command, field, problem):
    wrong_stream = legal.copy()
    index = command_index(legal, command, 50 if command in (COMP, G_ACT) else 5)
    wrong_stream[field][index] += 1 if wrong_stream[field][index] < 3 else -1
    assert any(problem in text for text in violations(wrong_stream, newton, program(STREAM), limit=10**6))


def test_refresh_too_early(newton, legal):
    ref = command_index(legal, REF)
    early = legal.copy()
    early["clock"][:ref] -= early["clock"][:ref] // 2
    early["clock"][ref] = 1899
    assert any("before it is due" in text for text in violations(early, newton, limit=10**6))


@pytest.mark.parametrize(
    "command, field, value",
    [
        (COMP, "command", WRBIAS),
        (COMP, "command", len(COMMANDS)),
        (COMP, "command", -1),
        (G_ACT, "gang", 4),
        (GWRITE, "buffer", 4),
        (COMP, "column", 32),
    ],
)
def test_commands_that_do_not_exist(newton, legal, command, field, value):
    index = command_index(legal, command)
    legal[field][index] = value
    (text,) = violations(legal, newton)
    assert text.startswith(f"command {index} (") and "no such command on 'newton-gddr6'" in text


def test_messages(newton, legal):
    rest = "end of the stream: the program goes on with GWRITE buffer 0 bursts 32"
    assert violations(legal[:0], newton, program(STREAM)) == [rest]
    # W@1, W@65, A0..A3@66, 83, 100, 117, C@128
    index = command_index(legal, COMP)
    legal["clock"][index] -= 1
    early = f"command {index} (COMP at clock 127): nRCDR of gang 3 holds until clock 128"
    assert violations(legal[: index + 1], newton) == [early]


def test_messages_are_bounded(newton, legal):
    legal["row"][legal["command"] == COMP] = 0
    texts = violations(legal, newton, limit=5)
    assert len(texts) == 6
    assert texts[-1] == f"… and {sum(violations_by_rule(legal, newton).values()) - 5} more"


def test_100k_commands_in_no_time(newton):
    long = program((loop(110, *STREAM),))
    stream = issue_program(long, newton, 0)
    assert len(stream) > 100_000
    begin_s = time.process_time()
    assert violations(stream, newton, long) == []
    # 0.3 s; of this process, since other work on the machine does not count.
    assert time.process_time() - begin_s < 3


def test_violations_are_counted_by_rule(newton, legal):
    """Every rule that is judged is named, and what one rule finds stands beside it alone."""
    clean = violations_by_rule(legal, newton, program(STREAM))
    assert not any(clean.values()) and {"nRCDR of a gang", "no refresh overdue"} <= clean.keys()
    late = legal.copy()
    late["clock"] += newton.timing["nREFI"]
    counts = violations_by_rule(late, newton, program(STREAM))
    assert counts.keys() == clean.keys()
    assert {rule for rule, count in counts.items() if count} == {"no refresh overdue"}
    assert sum(counts.values()) == len(violations(late, newton, program(STREAM), limit=1 << 20))
