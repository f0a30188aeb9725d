"""Refreshes that a controller serves before a program: in place of the first that fall due while it runs."""

from dataclasses import replace

import pytest
from calibration.latency_bound import lower_bound
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from test_random_programs import REF, SPECS, programs, writing_programs
from timing_programs import act_all, comp, loop, program

from pimflow.core.kernel import ConvGeometry
from pimflow.hardware import PimSpec
from pimflow.hardware.pim import COMMANDS
from pimflow.pim_backend.programs.lowering import ProgramRequest, lower
from pimflow.pim_backend.programs.schedule import schedules
from pimflow.placement.costs.pim_runs import PimCost, PimRun
from pimflow.simulators.pim.checker import violations, violations_by_rule
from pimflow.simulators.pim.timing import issue_program, time_program


@settings(max_examples=examples(200), deadline=None)
@given(programs | writing_programs, st.sampled_from(SPECS), st.integers(1, 8))
def test_a_program_meets_the_later_refreshes_alone(source, spec, most):
    """None of the first ones is among its commands, each of them is counted, and the stream is legal."""
    ahead = replace(spec, refreshes_ahead=most)
    result, stream = time_program(source, ahead), issue_program(source, ahead, 0)
    assert violations(stream, ahead, source) == []
    clocks = stream["clock"][stream["command"] == REF]
    nREFI = spec.timing["nREFI"]
    assert all(clock >= (most + nth) * nREFI for nth, clock in enumerate(clocks, 1))
    due = stream["clock"].max(initial=0) // nREFI
    assert result.refreshes_ahead == min(most, due)
    assert result.commands["REF"] == len(clocks) + result.refreshes_ahead
    accesses = ("GWRITE", "COMP", "READRES", "WRITE")
    when_due = time_program(source, spec)
    assert all(result.commands.get(command) == when_due.commands.get(command) for command in accesses)
    if not when_due.commands["REF"]:
        assert (result.cycles, result.refreshes_ahead) == (when_due.cycles, 0)


def test_by_hand(newton):
    """COMPs over almost ten intervals: of nine refreshes, eight come before, and one when it is due."""
    nREFI, nRFC = newton.timing["nREFI"], newton.timing["nRFC"]
    source = program((*act_all(), loop((10 * nREFI - 800) // 64, comp(32))))
    without_refresh = replace(newton, timing=newton.timing | {"nREFI": 10**9})
    bare, deferring = time_program(source, without_refresh), replace(newton, refreshes_ahead=8)
    timed = time_program(source, deferring)
    assert bare.cycles < 10 * nREFI
    assert (timed.refreshes_ahead, timed.commands["REF"]) == (8, 9)
    assert nRFC < timed.cycles - bare.cycles < nRFC + 100
    assert time_program(source, newton).commands["REF"] >= 9


def test_a_stream_without_them_is_overdue_where_none_may_come_ahead(newton):
    source = program((*act_all(), loop(3 * newton.timing["nREFI"] // 64, comp(32))))
    stream = issue_program(source, replace(newton, refreshes_ahead=8), 0)
    assert not (stream["command"] == REF).any()
    assert violations_by_rule(stream, newton, source)["no refresh overdue"] > 0
    assert violations_by_rule(stream, replace(newton, refreshes_ahead=1), source)["no refresh overdue"] > 0
    assert violations(stream, replace(newton, refreshes_ahead=3), source) == []


def test_the_published_timing_has_none(newton):
    source = program((*act_all(), loop(200, comp(32))))
    ahead = replace(newton, refreshes_ahead=8)
    result = time_program(source, ahead, "ramulator-pimflow")
    assert result == time_program(source, newton, "ramulator-pimflow") and result.refreshes_ahead == 0


def test_no_more_than_jedec_lets_come(newton):
    with pytest.raises(ValueError, match="refreshes_ahead"):
        replace(newton, refreshes_ahead=9)


@pytest.mark.long
@settings(max_examples=examples(30), deadline=None)
@given(
    st.builds(
        ConvGeometry,
        n=st.just(1),
        h=st.integers(1, 20),
        w=st.integers(1, 20),
        c=st.integers(1, 600),
        oc=st.integers(1, 600),
    ),
    st.sampled_from(["newton-gddr6", "newton-hbm2", "aim-gddr6", "hbm-pim"]),
    st.data(),
)
def test_no_program_beats_the_bound(geometry, name, data):
    pim = PimSpec.load(name)
    schedule = data.draw(st.sampled_from(schedules(geometry, pim, "fp16")))
    lowered = lower(ProgramRequest("conv", geometry, schedule), pim, dtype="fp16", channels=2)
    assert time_program(lowered, pim).cycles >= lower_bound(geometry, pim, "fp16", 2).cycles


def test_a_cost_says_what_they_take(newton):
    source = program((*act_all(), loop((5 * newton.timing["nREFI"] - 200) // 64, comp(32))))
    pim = replace(newton, refreshes_ahead=8)
    timing = time_program(source, pim)
    cost = PimCost.from_run(PimRun(program=source, timing=timing), pim)
    taken_ns = timing.refreshes_ahead * pim.timing["nRFC"] * pim.tCK_ns
    assert cost.ahead_ns == pytest.approx(taken_ns) and timing.refreshes_ahead == 4
    assert cost.commands["REF"] == 4 and len(COMMANDS) > REF
    assert cost.time_ns == pytest.approx(timing.cycles * pim.tCK_ns)
