"""Every constraint of every device file: blocked at `clk - 1`, legal at `clk`, whatever dominates it.

What dominates a constraint is relaxed: all other latencies are set to nothing, so that the constraint
alone holds the last command back.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples, long_but
from refreshes import when_due
from test_random_programs import programs, writing_programs
from timing_programs import act, act_all, apply, comp, loop, program, read, start, store, with_timing, write

from pimflow.core.commands import Comp, GAct, Gwrite, Loop, Node, Readres, Write
from pimflow.core.program import PimProgram
from pimflow.hardware import spec_names
from pimflow.hardware.pim import BEGIN, COMMANDS, Constraint, PimSpec
from pimflow.simulators.pim.checker import violations
from pimflow.simulators.pim.timing import issue_program, time_program

DEVICES = {name: when_due(PimSpec.load(name)) for name in spec_names("pim")}
BURSTS = 5
# The checker's own name for the cycles of a burst, and the rules that it knows besides.
BURST = ("nBL", "nBL")
BY_HEART = {
    ("G_ACT", "G_ACT"): {("nRRD", ""), ("nFAW", ""), ("nRC", "")},
    ("G_ACT", "COMP"): {("nRCDR", "")},
    ("G_ACT", "PRE"): {("nRAS", "")},
    ("PRE", "G_ACT"): {("nRP", "")},
    ("PRE", "REF"): {("nRP", "")},
    ("COMP", "PRE"): {("nRTP", "")},
    ("COMP", "COMP"): {("nCCDS", "")},
    ("COMP", "READRES"): {("nTREE", "")},
    ("COMP", "GWRITE"): {("nCCDS", "")},
    ("GWRITE", "COMP"): {BURST},
    ("GWRITE", "GWRITE"): {BURST},
    ("READRES", "READRES"): {BURST},
    ("READRES", "GWRITE"): {("nTURN", "nBL")},
    ("GWRITE", "READRES"): {("nTURN", "nBL")},
    ("G_ACT", "WRITE"): {("nRCDW", "")},
    ("WRITE", "PRE"): {("nWRP", "nBL")},
    ("WRITE", "COMP"): {("nWTC", "nBL")},
    ("COMP", "WRITE"): {("nCCDS", "")},
    ("WRITE", "WRITE"): {BURST},
    ("WRITE", "GWRITE"): {BURST},
    ("GWRITE", "WRITE"): {BURST},
    ("WRITE", "READRES"): {("nTURN", "nBL")},
    ("READRES", "WRITE"): {("nTURN", "nBL")},
    **{("REF", after): {("nRFC", "")} for after in COMMANDS if after not in ("WRBIAS", "AF")},
}
# Of a device whose latches can be written.
LATCHES = {
    ("COMP", "WRBIAS"): {("nTREE", "")},
    **{pair: {BURST} for pair in [("WRBIAS", "COMP"), ("WRBIAS", "WRBIAS")]},
    **{pair: {BURST} for pair in [("GWRITE", "WRBIAS"), ("WRBIAS", "GWRITE")]},
    **{pair: {BURST} for pair in [("WRITE", "WRBIAS"), ("WRBIAS", "WRITE")]},
    **{pair: {("nTURN", "nBL")} for pair in [("READRES", "WRBIAS"), ("WRBIAS", "READRES")]},
    ("REF", "WRBIAS"): {("nRFC", "")},
}
# Of a device that applies activations.
ACTIVATIONS = {
    ("G_ACT", "AF"): {("nRCDAF", "")},
    ("AF", "PRE"): {("nRTP", "")},
    ("COMP", "AF"): {("nTREE", ""), ("nCCDS", "")},
    **{pair: {("nCCDS", "")} for pair in [("AF", "AF"), ("AF", "COMP")]},
    **{("AF", after): {("nCCDS", "")} for after in ("READRES", "WRBIAS")},
    ("REF", "AF"): {("nRFC", "")},
}
# Of a device whose channels change between registers and banks, and wait for a host.
CHANGES = {
    **{(before, after): {("nMODCH", "")} for before in ("COMP", "G_ACT") for after in ("GWRITE", "READRES")},
    **{("GWRITE", after): {("nMODCH", "nBL"), BURST} for after in ("PRE", "G_ACT", "COMP")},
    **{("READRES", after): {("nHOST", "")} for after in ("G_ACT", "COMP")},
    ("READRES", "PRE"): set(),
    **{("WRITE", after): {("nMODCH", "")} for after in ("GWRITE", "READRES")},
}
CHANGES_OF_LATCHES = {
    **{(before, "WRBIAS"): {("nMODCH", "")} for before in ("COMP", "G_ACT", "WRITE")},
    **{("WRBIAS", after): {("nMODCH", "nBL"), BURST} for after in ("PRE", "G_ACT", "COMP", "WRITE")},
}
CHANGES_OF_ACTIVATIONS = {
    **{("AF", after): {("nMODCH", "")} for after in ("GWRITE", "READRES", "WRBIAS")},
    **{(before, "AF"): {("nMODCH", "nBL")} for before in ("GWRITE", "WRBIAS")},
    ("READRES", "AF"): {("nHOST", "")},
}
EVERY = (BY_HEART, CHANGES, LATCHES, CHANGES_OF_LATCHES, ACTIVATIONS, CHANGES_OF_ACTIVATIONS)


def pairs(spec: PimSpec) -> Iterator[tuple[Constraint, str, str]]:
    """The rules of one channel; test_lockstep.py has those of the host, and of the begin."""
    for rule in spec.constraints:
        if BEGIN in rule.before or (rule.level == "host" and rule.before != ("READRES",)):
            continue
        yield from ((rule, before, after) for before in rule.before for after in rule.after)


CASES = {
    f"{name}-{rule.latency}-{rule.level}-{before}-{after}": (spec, rule, before, after)
    for name, spec in DEVICES.items()
    for rule, before, after in pairs(spec)
}


def with_only_rule(spec: PimSpec, rule: Constraint, **cycles: int) -> PimSpec:
    """`spec` with nothing in force but `rule`, whose latency is long enough to be felt."""
    rule_cycles = {name: spec.timing[name] for name in (rule.latency, rule.per_burst) if name}
    min_cycles = {"nCL": 1, "nBL": 1, "nREFI": 5000}
    felt = {rule.latency: max(spec.timing[rule.latency], 6 * rule.window)}
    return replace(spec, timing=dict.fromkeys(spec.timing, 0) | min_cycles | rule_cycles | felt | cycles)


def device_program(spec: PimSpec, nodes: tuple[Node, ...]) -> PimProgram:
    """A program for that organisation."""
    return replace(
        program(nodes),
        gangs=spec.gangs,
        banks=spec.banks,
        buffers=spec.global_buffers,
        columns_per_row=spec.columns_per_row,
    )


def streams(spec: PimSpec, rule: Constraint, after: str) -> dict[str, tuple[Node, ...]]:
    """By the earlier command: a stream that ends with `after`, held back by `rule`."""
    open_all = tuple(act(gang) for gang in range(spec.gangs))
    other_buffer = 1 % spec.global_buffers if rule.level == "channel" else 0
    reopen = (act(0, 0), act(0, 1))
    last = {
        "GWRITE": (write(other_buffer),),
        "READRES": (read(other_buffer),),
        "WRBIAS": (start(other_buffer),),
        "COMP": (comp(buffer=other_buffer),),
        "AF": (apply(other_buffer),),
        "G_ACT": tuple(act(k % spec.gangs, k) for k in range(1, rule.window + 1)),
        "PRE": (act(0, 1),),
        "WRITE": (store(),),
    }
    if rule.level != "channel":
        last["G_ACT"] = (act(0, 1),) * rule.window
    before = {
        "GWRITE": (*(open_all if after != "G_ACT" else ()), *(write(0, BURSTS),) * rule.window),
        "READRES": (
            *(open_all if after in ("PRE", "COMP", "WRITE", "AF") else ()),
            *(read(0),) * rule.window,
        ),
        "WRITE": (*open_all, store(bursts=BURSTS)),
        "WRBIAS": (*(open_all if after != "G_ACT" else ()), *(start(0),) * rule.window),
        "COMP": (*open_all, *(comp(buffer=0),) * rule.window),
        "AF": (*open_all, *(apply(0),) * rule.window),
        "G_ACT": open_all if after in ("COMP", "AF") else (act(0, 0),),
        "PRE": reopen,
    }
    by_command = {name: (*nodes, *last.get(after, ())) for name, nodes in before.items()}
    nREFI = spec.timing["nREFI"]
    waiting = loop(nREFI - 1, read())  # until a refresh falls due
    by_command["PRE"] = (act(0), waiting) if after == "REF" else reopen
    # Rows are closed after a refresh, so a COMP and a PRE come to feel it once they are open again.
    by_command["REF"] = {
        "COMP": (*open_all, loop(2, comp())),
        "AF": (*open_all, loop(2, apply())),
        "WRITE": (act(0), loop(nREFI - 2, read()), store()),
        "PRE": (waiting, *reopen),
        "REF": (loop(nREFI - 4, read()), act(0), loop(4, read())),
    }.get(after, (waiting, *last.get(after, ())))
    return by_command


def free(spec: PimSpec, rule: Constraint, after: str) -> PimSpec:
    """`spec` whose engine lets a G_ACT issue during a refresh where the rule is about what follows it."""
    if rule.before != ("REF",) or after not in ("COMP", "PRE", "WRITE", "AF"):
        return spec
    lax = replace(rule, after=tuple(c for c in rule.after if c != "G_ACT"))
    return replace(spec, constraints=tuple(lax if r == rule else r for r in spec.constraints))


def clocks(stream: np.ndarray, command: str) -> np.ndarray:
    return np.flatnonzero(stream["command"] == COMMANDS.index(command))


@pytest.mark.parametrize("case", long_but([c for c in CASES if c.startswith("newton-gddr6-")], list(CASES)))
def test_blocked_before_and_legal_at(case):
    """And the engine obeys only what the table says: without the rule the checker objects."""
    spec, rule, before, after = CASES[case]
    refresh = "REF" in (before, after)
    nREFI = max(40, 2 * spec.timing[rule.latency])
    cycles = {"nREFI": nREFI} if refresh else {}
    if before == after == "REF":
        # A row opened just before the first refresh falls due keeps it waiting: the second comes too soon.
        cycles = {"nREFI": spec.timing[rule.latency] + 10, "nRAS": 30}
    elif before == "REF" and after in ("COMP", "AF"):
        cycles |= {"nCCDS": nREFI}
    tight = with_only_rule(spec, rule, **cycles)
    source = device_program(tight, streams(tight, rule, after)[before])
    stream = issue_program(source, free(tight, rule, after), 0)

    holders = clocks(stream, before)
    if before == after == "REF":
        blocked = holders[1]
    elif before == "REF":
        blocked = next(index for index in clocks(stream, after) if index > holders[0])
    else:
        blocked = clocks(stream, after)[-1 if after != "REF" else 0]
    holder = holders[holders < blocked][-rule.window]
    per_burst_cycles = tight.timing[rule.per_burst] if rule.per_burst else 0
    bursts = BURSTS if before in ("GWRITE", "WRITE") else max(1, int(stream["bursts"][holder]))
    gap_cycles = tight.timing[rule.latency] + per_burst_cycles * (bursts - 1)
    assert stream["clock"][blocked] - stream["clock"][holder] == gap_cycles

    def objections() -> list[str]:
        texts = violations(stream, tight, limit=10**6)
        return [text for text in texts if text.startswith(f"command {blocked} ")]

    assert objections() == []
    by_heart = {form for rules in EVERY for form in rules.get((before, after), ())}
    if (rule.latency, rule.per_burst) in by_heart:
        stream["clock"][blocked] -= 1
        assert objections() != []
        lax = replace(tight, constraints=tuple(r for r in tight.constraints if r != rule))
        assert free(tight, rule, after) != tight or violations(issue_program(source, lax, 0), tight) != []


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
    (objection,) = violations(stream, single, activations)
    assert objection == "command 4 (G_ACT at clock 30): more than 4 banks activated within nFAW"


@pytest.mark.parametrize("level", ["channel", "gang", "buffer"])
def test_window_at_every_level(newton, level):
    # Every second COMP of the last three: C@63, 65, then 63+50 = 113, 115, 163, 165, 213; done at 214.
    rule = Constraint(level=level, before=("COMP",), after=("COMP",), latency="nWIN", window=2)
    spec = with_timing(newton, nWIN=50)
    spec = replace(spec, constraints=(*spec.constraints, rule))
    assert time_program(program((*act_all(), comp(7))), spec).cycles == 214


@pytest.mark.parametrize("name", DEVICES)
def test_every_rule_by_heart_is_in_the_file_or_dominated(name):
    """What the checker knows and the table lacks is never felt: programs below would find it."""
    spec = DEVICES[name]
    expected_pairs = set(BY_HEART) | set(CHANGES if "nMODCH" in spec.timing else ())
    expected_pairs |= set(LATCHES if spec.can_write_latches else ())
    expected_pairs |= set(CHANGES_OF_LATCHES if spec.can_write_latches and "nMODCH" in spec.timing else ())
    expected_pairs |= set(ACTIVATIONS if spec.can_activate else ())
    expected_pairs |= set(CHANGES_OF_ACTIVATIONS if spec.can_activate and "nMODCH" in spec.timing else ())
    assert {(before, after) for _, before, after in pairs(spec)} == expected_pairs


def fit_nodes(nodes: tuple[Node, ...], spec: PimSpec) -> tuple[Node, ...]:
    """`nodes`, with the gangs and buffers that the device has."""
    out: list[Node] = []
    for node in nodes:
        if isinstance(node, Loop):
            node = replace(node, body=fit_nodes(node.body, spec))
        elif isinstance(node, GAct | Write) and node.gang >= spec.gangs:
            continue
        elif isinstance(node, Comp | Gwrite | Readres):
            node = replace(node, buffer=node.buffer % spec.global_buffers)
        out.append(node)
        if isinstance(node, Readres) and spec.can_write_latches:
            out.append(start(node.buffer))
        if isinstance(node, Comp) and spec.can_activate:
            out.append(apply(node.buffer, node.row))
    return tuple(out)


@settings(max_examples=examples(200), deadline=None)
@given(programs | writing_programs, st.sampled_from(sorted(DEVICES)), st.sampled_from((None, 600)))
def test_any_program_is_legal_on_any_device(source, name, nREFI):
    # Where COMPs start is no matter of time: tests of the lowering hold it.
    spec = replace(DEVICES[name], comp_starts_at_row=False)
    if nREFI:
        spec = replace(spec, timing=spec.timing | {"nREFI": nREFI, "nRFC": min(60, spec.timing["nRFC"])})
    source = device_program(spec, fit_nodes(source.channels[0], spec))
    assert violations(issue_program(source, spec, 0), spec, source) == []
