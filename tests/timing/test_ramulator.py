"""`ramulator-pimflow` prints the cycles that the PIMFlow authors' Ramulator fork prints."""

import csv
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from fork_model import GWRITE, READRES, fork_cycles
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from timing_programs import act_all, comp, loop, program, read, with_timing, write

from pimflow.errors import TraceError, UnknownNameError, UsageError
from pimflow.hardware.pim import PimSpec
from pimflow.simulators.pim.timing import time_program, time_trace
from pimflow.simulators.pim.trace import Trace, expand_to_pim

FORK = "ramulator-pimflow"

with tarfile.open(Path(__file__).parent / "data/ramulator.tar.xz") as archive:
    FILES = {name: archive.extractfile(name).read() for name in archive.getnames()}
PRINTED = list(csv.DictReader(FILES["cycles.csv"].decode().splitlines()))

BLOCK = (
    b"0x00000000 GWRITE\n"
    + b"".join(b"0x%08x G_ACT%d\n" % (gang << 27, gang) for gang in range(4))
    + b"".join(b"0x%08x COMP\n" % (column << 6) for column in range(32))
    + b"READRES\n"
)


@pytest.mark.parametrize("line", PRINTED, ids=lambda line: line["trace"])
def test_published_traces(newton, line):
    trace = Trace.read(FILES[line["trace"]])
    assert len(trace) == int(line["commands"])
    assert time_trace(trace, newton, FORK).cycles == int(line["cycles"])
    unhidden = time_trace(trace, newton, FORK, gwrite_hiding=False)
    assert unhidden.cycles == int(line["cycles_no_gwrite_hiding"])
    assert time_trace(trace, newton).violations == 0


def test_all_published_traces_are_there():
    assert len(PRINTED) == 24


@pytest.mark.parametrize(
    ("text", "cycles", "unhidden_cycles"),
    [
        (b"", 1, 1),
        (b"0x00000000 GWRITE\n", 2, 2),
        (b"0x00000000 GWRITE_4 \n", 2, 2),
        (b"READRES\n", 14, 14),
        (BLOCK, 140, 203),
        (BLOCK * 10, 1328, 1958),
    ],
)
def test_small_streams(newton, text, cycles, unhidden_cycles):
    assert time_trace(text, newton, FORK).cycles == cycles
    assert time_trace(text, newton, FORK, gwrite_hiding=False).cycles == unhidden_cycles


def test_program_takes_what_its_trace_takes(newton):
    stream = (loop(100, write(), *act_all(), loop(3, comp(32)), read()),)
    program_ = program(stream, stream)
    text = expand_to_pim(program_, 1)
    for hiding in (True, False):
        timed = time_program(program_, newton, FORK, gwrite_hiding=hiding)
        traced = time_trace(text, newton, FORK, gwrite_hiding=hiding)
        assert timed.channel_cycles == (traced.cycles, traced.cycles)
        assert timed.commands == {name: 2 * count for name, count in traced.commands.items()}
        assert timed.commands["REF"] > 0


def test_32_refreshes_may_be_pending(newton):
    # The 33rd falls due at 33*1900 = 62700; by then the first REF must have been served, nRP after a PRE.
    # COMPs issue at 12, 14, … (G_ACT at 1): the last at 62686, PRE at 62687, REF at 62698.
    comps = (62686 - 12) // 2 + 1
    text = b"0x00000000 G_ACT0\n" + b"0x00000000 COMP\n" * comps
    assert time_trace(text, newton, FORK).commands["PRE"] == 1
    with pytest.raises(TraceError, match=f"^<bytes>:{comps + 2}: more than 32 refreshes are pending"):
        time_trace(text + b"0x00000000 COMP\n", newton, FORK)


def test_command_at_which_refreshes_overflow(newton):
    # The COMP at 62700 is number (62700 - 12)/2 of its run, after the G_ACT.
    text = b"0x00000000 G_ACT0\n" + b"0x00000000 COMP\n" * 40000
    with pytest.raises(TraceError, match=f"^<bytes>:{2 + (62700 - 12) // 2}: more than 32"):
        time_trace(text, newton, FORK)


def test_refreshes_that_never_end_are_reported(newton):
    with pytest.raises(TraceError, match="more than 32 refreshes are pending"):
        time_trace(b"READRES\n" * 4000, with_timing(newton, nRFC=100_000), FORK)


def test_only_the_forks_organisation(newton):
    with pytest.raises(UsageError, match="4 gangs, not 8"):
        time_trace(b"", replace(newton, gangs=8), FORK)


def test_unknown_timing(newton):
    with pytest.raises(UnknownNameError, match="did you mean strict"):
        time_trace(b"", newton, "strikt")


KINDS = (b"GWRITE", b"G_ACT0", b"G_ACT1", b"G_ACT2", b"G_ACT3", b"COMP", b"READRES")
PATTERNS = st.lists(
    st.tuples(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(1, 120)), max_size=9
)


@pytest.mark.long
@settings(max_examples=examples(150), deadline=None)
@given(PATTERNS, st.sampled_from((1900, 300, 77)), st.booleans())
def test_any_trace_of_the_grammar(patterns, nREFI, hiding):
    """READRES anywhere, COMP before any G_ACT, no GWRITE at all, many refresh intervals or no command."""
    spec = with_timing(PimSpec.load("newton-gddr6"), nREFI=nREFI, nRFC=min(350, nREFI // 2))
    stream = [kind for pattern, repeats in patterns for kind in pattern * repeats]
    text = b"".join(b"READRES\n" if k == READRES else b"0x00000000 %s\n" % KINDS[k] for k in stream)
    cycles = fork_cycles(stream, spec, hiding)
    if cycles is None:
        with pytest.raises(TraceError, match="more than 32 refreshes are pending"):
            time_trace(text, spec, FORK, hiding)
    else:
        assert time_trace(text, spec, FORK, hiding).cycles == cycles


@pytest.mark.parametrize("line", PRINTED[::6], ids=lambda line: line["trace"])
def test_oracle_prints_what_the_fork_prints(newton, line):
    names = {name: kind for kind, name in enumerate(KINDS)}
    stream = [
        READRES if row.startswith(b"READRES") else GWRITE if b"GWRITE" in row else names[row.split()[1]]
        for row in FILES[line["trace"]].splitlines()
    ][:60_000]
    if len(stream) == int(line["commands"]):
        assert fork_cycles(stream, newton) == int(line["cycles"])
    text = b"".join(row + b"\n" for row in FILES[line["trace"]].splitlines()[: len(stream)])
    assert time_trace(text, newton, FORK).cycles == fork_cycles(stream, newton)
