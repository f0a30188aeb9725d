"""Loops advanced a period at a time take what their commands take one after the other."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples, long_but
from refreshes import when_due
from test_random_programs import bodies, program, with_timing
from timing_programs import act_all, comp, loop, read, write

from pimflow.core.commands import Affine
from pimflow.core.kernel import ConvGeometry
from pimflow.core.program import PimProgram
from pimflow.errors import TraceError
from pimflow.hardware.constraints import OPTIONAL_COMMANDS
from pimflow.hardware.pim import COMMANDS, PimSpec
from pimflow.pim_backend.programs.lowering import ProgramRequest, lower
from pimflow.pim_backend.programs.schedule import schedules
from pimflow.simulators.pim.streams import distinct_channels
from pimflow.simulators.pim.timing import TimingResult, issue_program, time_program, time_trace
from pimflow.simulators.pim.trace import expand_to_pim

NEWTON = when_due(PimSpec.load("newton-gddr6"))
FORK = "ramulator-pimflow"
# Refreshes from several in one iteration of the innermost loop to one in many.
SPECS = (
    NEWTON,
    with_timing(NEWTON, nREFI=263, nRFC=20),
    with_timing(NEWTON, nREFI=401, nRFC=57, nRAS=60, nTURN=20),
    with_timing(NEWTON, nREFI=5003, nRFC=11, nCCDS=3),
)
SCALED = {
    "VGG-16 conv4": ConvGeometry(n=1, h=10, w=7, c=512, oc=512, kh=3, kw=3, padding=(1, 1, 1, 1)),
    "MobileNetV2 expand": ConvGeometry(n=1, h=28, w=28, c=24, oc=144),
    "MobileNetV2 project": ConvGeometry(n=1, h=14, w=14, c=576, oc=96),
    "stem": ConvGeometry(n=1, h=32, w=32, c=3, oc=32, kh=3, kw=3, stride=(2, 2), padding=(1, 1, 1, 1)),
    "classifier": ConvGeometry(n=1, h=1, w=1, c=1280, oc=1000),
}


def step_counts(source: PimProgram, spec: PimSpec, channel: int = 0) -> dict[str, int]:
    """What `strict` issues for a channel, added up from its commands.

    `issue_program` walks without periods.
    """
    stream = issue_program(source, spec, channel)
    clock, command, bursts = stream["clock"], stream["command"], stream["bursts"]
    nBL, nCL = spec.timing["nBL"], spec.timing["nCL"]
    reads, writes = command == COMMANDS.index("READRES"), command == COMMANDS.index("GWRITE")
    moves = writes | (command == COMMANDS.index("WRITE"))
    ends = (clock + 1, clock[reads] + nCL + nBL * bursts[reads], clock[moves] + nBL * bursts[moves])
    counts = np.bincount(command, minlength=len(COMMANDS)).tolist()
    return {
        "cycles": max(int(end.max(initial=0)) for end in ends),
        "gwrite_bursts": int(bursts[writes].sum()),
        **{name: count for name, count in zip(COMMANDS, counts) if count or name not in OPTIONAL_COMMANDS},
    }


def engine_counts(source: PimProgram, spec: PimSpec, channel: int = 0) -> tuple[dict[str, int], TimingResult]:
    """The same of the engine that skips periods."""
    result = time_program(replace(source, channels=(source.channels[channel],)), spec)
    row = {"cycles": result.cycles, "gwrite_bursts": result.gwrite_bursts, **result.commands}
    return row, result


@settings(max_examples=examples(150), deadline=None)
@given(bodies(1, ("store",)), bodies(1), st.integers(2, 70), st.integers(1, 70), st.sampled_from(SPECS))
def test_long_loops(first, second, outer, inner, spec):
    source = program((loop(outer, *first), loop(inner, *second), loop(3, *first)))
    assert engine_counts(source, spec)[0] == step_counts(source, spec)


@settings(max_examples=examples(100), deadline=None)
@given(bodies(1), st.integers(2, 300), st.sampled_from(SPECS), st.booleans())
def test_long_loops_under_the_published_timing(body, extent, spec, hiding):
    source = program((loop(extent, *body), *body))
    try:
        flat = time_trace(expand_to_pim(source, 0), spec, FORK, hiding)
    except TraceError as error:  # at the same command, which has a line of its own in the trace
        line = int(str(error).split(":")[1])
        with pytest.raises(TraceError, match=f"command {line - 1}: more than 32 refreshes"):
            time_program(source, spec, FORK, hiding)
        return
    timed = time_program(source, spec, FORK, hiding)
    assert (timed.cycles, timed.commands) == (flat.cycles, flat.commands)


@pytest.mark.parametrize("layer", long_but(set(SCALED) - {"MobileNetV2 expand"}, list(SCALED)))
@pytest.mark.parametrize("spec", (NEWTON, SPECS[2]), ids=("nREFI 1900", "nREFI 401"))
def test_layers(layer, spec):
    for schedule in schedules(SCALED[layer], spec, "fp16"):
        source = lower(ProgramRequest(layer, SCALED[layer], schedule), spec, dtype="fp16", channels=3)
        for channel in distinct_channels(source, spec):
            assert engine_counts(source, spec, channel)[0] == step_counts(source, spec, channel)
        flat = time_trace(expand_to_pim(source, 2), spec, FORK)
        assert time_program(source, spec, FORK).channel_cycles[2] == flat.cycles


def test_loops_that_nobody_could_expand():
    # 2^60 blocks: the refreshes' share of the cycles is that of 2^20.
    block = (write(), *act_all(), comp(32), read())
    few = time_program(program((loop(1 << 20, *block),)), NEWTON)
    many = time_program(program((loop(1 << 20, loop(1 << 20, *block)),)), NEWTON)
    assert many.commands["COMP"] == 32 << 40
    assert many.cycles / (1 << 40) == pytest.approx(few.cycles / (1 << 20), rel=1e-6)
    assert many.commands["REF"] == (many.cycles - 1) // NEWTON.timing["nREFI"]


def test_cycles_beyond_63_bits():
    endless = loop(1 << 30, loop(1 << 30, write()))
    for timing in ("strict", FORK):
        with pytest.raises(TraceError, match=r"channel 0: command [0-9]+: the loops around it"):
            time_program(program((loop(1 << 30, loop(1 << 30, endless)),)), NEWTON, timing)


@settings(max_examples=examples(60), deadline=None)
@given(bodies(1), st.integers(1, 40))
def test_rows_and_reads_are_counted_as_unrolled(body, extent):
    """What the stream says about itself, against a count over its commands in Python."""
    source = program((loop(extent, *body),))
    _, result = engine_counts(source, NEWTON)
    live_buffers, empty, used, total = set(), 0, [set() for _ in range(NEWTON.gangs)], 0
    opened = [False] * NEWTON.gangs
    for command in source.commands(0):
        if command.name == "G_ACT":
            used[command.gang], opened[command.gang] = set(), True
        elif command.name == "COMP":
            live_buffers.add(command.buffer)
            for gang in range(NEWTON.gangs):
                total += opened[gang] and command.column not in used[gang]
                used[gang].add(command.column)
        elif command.name == "READRES":
            empty += command.buffer not in live_buffers
            live_buffers.discard(command.buffer)
    assert result.empty_reads == empty
    columns = result.commands["G_ACT"] * NEWTON.columns_per_row
    assert result.row_utilisation == (total / columns if columns else 0)
    assert 0 <= result.row_utilisation <= 1


def test_rows_of_a_loop_in_steps_of_its_own():
    # The G_ACTs climb by 2, the COMPs by 1: open at the first iteration alone.
    stream = (loop(50, *act_all(Affine(0, (2,))), comp(row=Affine(0, (1,)))),)
    with pytest.raises(TraceError, match=r"command 9: COMP on a row .*\(49 such"):
        time_program(program(stream), NEWTON)
