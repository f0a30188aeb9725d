"""Every constraint of the spec: the engine issues at `clk`; at `clk - 1` the checker objects."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from timing_programs import act, act_all, comp, loop, program, read, store, with_timing, write

from pimflow.core.commands import Node
from pimflow.hardware.pim import COMMANDS, Constraint, PimSpec
from pimflow.simulators.pim.checker import violations
from pimflow.simulators.pim.timing import issue_program, time_program


@dataclass(frozen=True)
class Bound:
    """A stream whose last `after` is held back by this constraint and no other.

    `cycles` relaxes what dominates it; `bursts` is the length of the earlier transfer; `freed` names
    commands that a REF is made not to delay in the engine, so that another one comes to feel it.
    """

    stream: tuple[Node, ...]
    cycles: dict[str, int] = field(default_factory=dict)
    bursts: int = 1
    freed: tuple[str, ...] = ()


# READRESs at 1, 3, …, 1899: whatever follows waits for a refresh, with every row closed.
UNTIL_REFRESH = loop(950, read())

BOUNDS = {
    ("nFAW", "G_ACT", "G_ACT"): Bound((act(0), act(1))),
    ("nRRD", "G_ACT", "G_ACT"): Bound((act(0), act(1)), {"nFAW": 1}),
    ("nRCDR", "G_ACT", "COMP"): Bound((*act_all(), comp())),
    ("nRAS", "G_ACT", "PRE"): Bound((act(0, 0), act(0, 1))),
    ("nRC", "G_ACT", "G_ACT"): Bound((act(0, 0), act(0, 1)), {"nRAS": 10, "nRP": 5}),
    ("nRP", "PRE", "G_ACT"): Bound((act(0, 0), act(0, 1))),
    ("nRP", "PRE", "REF"): Bound((act(0), UNTIL_REFRESH)),
    ("nRTP", "COMP", "PRE"): Bound((*act_all(0), comp(row=0), act(0, 1))),
    ("nCCDS", "COMP", "COMP"): Bound((*act_all(), comp(buffer=0), comp(buffer=1))),
    ("nTREE", "COMP", "READRES"): Bound((*act_all(), comp(), read()), {"nTREE": 5}),
    ("nCCDS", "COMP", "GWRITE"): Bound((*act_all(), comp(), write())),
    ("nBL", "GWRITE", "COMP"): Bound((*act_all(), write(bursts=20), comp()), bursts=20),
    ("nBL", "GWRITE", "GWRITE"): Bound((write(0, bursts=7), write(1)), bursts=7),
    ("nBL", "READRES", "READRES"): Bound((read(0), read(1))),
    ("nTURN", "READRES", "GWRITE"): Bound((read(), write())),
    ("nTURN", "GWRITE", "READRES"): Bound((write(bursts=3), read()), bursts=3),
    ("nRFC", "REF", "GWRITE"): Bound((UNTIL_REFRESH, write())),
    ("nRFC", "REF", "G_ACT"): Bound((UNTIL_REFRESH, act(0))),
    ("nRFC", "REF", "READRES"): Bound((UNTIL_REFRESH, read())),
    ("nRCDW", "G_ACT", "WRITE"): Bound((act(0), store())),
    ("nWRP", "WRITE", "PRE"): Bound((act(0), store(bursts=3), act(0, 1)), bursts=3),
    ("nWTC", "WRITE", "COMP"): Bound((*act_all(), store(bursts=2), comp()), bursts=2),
    ("nCCDS", "COMP", "WRITE"): Bound((*act_all(), comp(), store())),
    ("nBL", "WRITE", "WRITE"): Bound((act(0), store(bursts=4), store()), bursts=4),
    ("nBL", "WRITE", "GWRITE"): Bound((act(0), store(bursts=4), write()), bursts=4),
    ("nBL", "GWRITE", "WRITE"): Bound((act(0), write(bursts=20), store()), bursts=20),
    ("nTURN", "WRITE", "READRES"): Bound((act(0), store(bursts=4), read()), bursts=4),
    ("nTURN", "READRES", "WRITE"): Bound((act(0), loop(5, read()), store()), {"nRCDW": 1}),
    ("nRFC", "REF", "WRITE"): Bound((act(0), loop(949, read()), store()), freed=("G_ACT",)),
    # Rows are closed after a refresh, so a COMP and a PRE feel it only if the G_ACT before did not.
    ("nRFC", "REF", "COMP"): Bound((*act_all(), loop(920, comp())), freed=("G_ACT",)),
    ("nRFC", "REF", "PRE"): Bound((UNTIL_REFRESH, act(0, 0), act(0, 1)), freed=("G_ACT",)),
    # A0@91 keeps its row open until 116, REF@127; the next one, due at 200, falls within nRFC of it.
    ("nRFC", "REF", "REF"): Bound((loop(45, read()), act(0), act(1)), {"nREFI": 100, "nRFC": 98, "nFAW": 20}),
}


def pairs(rule: Constraint) -> list[tuple[str, str, str]]:
    return [(rule.latency, before, after) for before in rule.before for after in rule.after]


def test_every_constraint_has_a_stream(newton):
    assert {pair for rule in newton.constraints for pair in pairs(rule)} == set(BOUNDS)


def free(spec: PimSpec, commands: tuple[str, ...]) -> PimSpec:
    """`spec` whose table lets these commands issue during a refresh."""
    return replace(
        spec,
        constraints=tuple(
            replace(rule, after=tuple(c for c in rule.after if c not in commands))
            if rule.before == ("REF",)
            else rule
            for rule in spec.constraints
        ),
    )


def objections(stream: np.ndarray, spec: PimSpec, index: int) -> list[str]:
    """What the checker says about one command."""
    return [text for text in violations(stream, spec, limit=10**6) if text.startswith(f"command {index} ")]


@pytest.mark.parametrize("pair", BOUNDS, ids="-".join)
def test_blocked_before_and_legal_at(newton, pair):
    latency, before, after = pair
    bound = BOUNDS[pair]
    spec = with_timing(newton, **bound.cycles)
    stream = issue_program(program(bound.stream), free(spec, bound.freed), 0)
    blocked = int(np.flatnonzero(stream["command"] == COMMANDS.index(after))[-1])
    if pair == ("nRFC", "REF", "REF"):
        blocked = int(np.flatnonzero(stream["command"] == COMMANDS.index(after))[1])
    holder = int(np.flatnonzero(stream["command"][:blocked] == COMMANDS.index(before))[-1])

    (rule,) = (rule for rule in spec.constraints if pair in pairs(rule))
    per_burst_cycles = spec.timing[rule.per_burst] if rule.per_burst else 0
    gap_cycles = spec.timing[latency] + per_burst_cycles * (bound.bursts - 1)
    assert stream["clock"][blocked] - stream["clock"][holder] == gap_cycles

    assert objections(stream, spec, blocked) == []
    stream["clock"][blocked] -= 1
    assert stream["clock"][blocked] > stream["clock"][blocked - 1]
    assert objections(stream, spec, blocked) != []


@pytest.mark.parametrize("pair", [pair for pair in BOUNDS if not BOUNDS[pair].freed], ids="-".join)
def test_engine_obeys_only_what_the_table_says(newton, pair):
    """Without the rule, the stream is over sooner or the checker objects."""
    spec = with_timing(newton, **BOUNDS[pair].cycles)
    lax = replace(spec, constraints=tuple(rule for rule in spec.constraints if pair not in pairs(rule)))
    stream = issue_program(program(BOUNDS[pair].stream), lax, 0)
    assert violations(stream, spec) != []


def test_window_counts_activations(newton):
    # One bank a gang: nRRD 5 apart, and the fifth nFAW after the first. A@1, 6, 11, 16, max(21, 31) = 31,
    # 36, 41, 46, max(51, 61) = 61; done at 62.
    rules = tuple(replace(rule, window=4) if rule.latency == "nFAW" else rule for rule in newton.constraints)
    single = replace(
        with_timing(newton, nFAW=30), gangs=16, banks_per_gang=1, constraints=rules, global_buffers=4
    )
    activations = replace(program(tuple(act(gang) for gang in range(9))), gangs=16)
    assert time_program(activations, single).cycles == 62
    stream = issue_program(activations, single, 0)
    assert violations(stream, single, activations) == []
    stream["clock"][4] -= 1
    (objection,) = objections(stream, single, 4)
    assert objection == "command 4 (G_ACT at clock 30): more than 4 banks activated within nFAW"


@pytest.mark.parametrize("level", ["channel", "gang", "buffer"])
def test_window_at_every_level(newton, level):
    # Every second COMP of the last three: C@63, 65, then 63+50 = 113, 115, 163, 165, 213; done at 214.
    rule = Constraint(level=level, before=("COMP",), after=("COMP",), latency="nWIN", window=2)
    spec = with_timing(newton, nWIN=50)
    spec = replace(spec, constraints=(*spec.constraints, rule))
    assert time_program(program((*act_all(), comp(7))), spec).cycles == 214
