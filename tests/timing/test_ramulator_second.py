"""Ramulator 2 reads our load/store traces: every line is a request, and each failure ends in one line."""

import stat
from pathlib import Path

import pytest
from calibration.ramulator2 import PRINTED, Ramulator2Run, parse_output, simulate, traffic_table

from pimflow.core.layer_text import parse_layer
from pimflow.errors import ProfilerError, TraceError
from pimflow.simulators.ramulator import load_store_trace

# What Ramulator 2 (legacy/v2.0a, be93be7) printed for the trace of LAYER, by scripts/compare_ramulator.py.
LAYER = "conv:2x3x33x31,24,5x5,s2x1,p2"
STORED = (Path(__file__).parent / "data/ramulator2_output.txt").read_text()
FAKE = """#!/bin/sh
test "$1" = -f || exit 9
grep -q "path: trace.ldst" "$2" || exit 8
cat > /dev/null < trace.ldst || exit 7
printf '  memory_system_cycles: %s\\n  total_num_read_requests: %s\\n  total_num_write_requests: %s\\n' \\
    {cycles} "$(grep -c LD trace.ldst)" "$(grep -c ST trace.ldst)"
"""


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "layer.ldst"
    path.write_bytes(b"".join(part for part, _ in load_store_trace.export(parse_layer(LAYER), "fp16")))
    return path


def fake(path: Path, cycles: int) -> Path:
    path.write_text(FAKE.format(cycles=cycles))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_every_line_was_a_request(trace):
    reads, writes, cycles = parse_output(STORED)
    lines = load_store_trace.counts(trace)
    assert (reads, writes) == (lines["LD"], lines["ST"])
    assert cycles >= 4 * (reads + writes) * 0.9  # the last bursts are still on their way when it stops


def test_it_is_run_on_a_trace(tmp_path, trace):
    result = simulate(fake(tmp_path / "ramulator2", 1000), LAYER, trace)
    lines = load_store_trace.counts(trace)
    assert result.agrees and result.cycles == 1000
    assert (result.reads, result.writes) == (result.loads, result.stores) == (lines["LD"], lines["ST"])
    assert result.bus_share == 4 * (result.reads + result.writes) / 1000


@pytest.mark.parametrize("name", PRINTED)
def test_every_statistic_is_needed(name):
    with pytest.raises(ProfilerError, match=f"no line '{name}: <number>'"):
        parse_output(STORED.replace(name, f"{name}_0"))


def test_failures_are_one_line(tmp_path, trace):
    with pytest.raises(ProfilerError, match="not an executable file"):
        simulate(tmp_path / "nothing", LAYER, trace)
    with pytest.raises(ProfilerError, match="it printed 0 cycles"):
        simulate(fake(tmp_path / "ramulator2", 0), LAYER, trace)
    trace.write_text("LD 0x0\nLD\n")
    with pytest.raises(TraceError, match=":2: not 'LD <address>'"):
        simulate(tmp_path / "ramulator2", LAYER, trace)


def test_table():
    traffic = Ramulator2Run(name="x", loads=30, stores=10, reads=30, writes=10, cycles=200)
    assert traffic_table([traffic]).splitlines()[-1] == "| `x` | 30 | 10 | 30 | 10 | 200 | 80% |"
