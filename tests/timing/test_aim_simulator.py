"""Programs for AiM take, without refresh, what the public AiM simulator printed for their traces."""

import csv
import hashlib
import io
import itertools
import stat
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from calibration.aim_simulator import BEGIN, END, compare, disable_refresh, replace_table, summary, table

from pimflow.core.program import PimProgram
from pimflow.errors import ProfilerError, UsageError
from pimflow.hardware import PimSpec
from pimflow.simulators.exports.aim_isr import export
from pimflow.simulators.pim.timing import time_program

AIM = PimSpec.load("aim-gddr6")


def read_record(name: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Programs by name, and what the simulator printed.

    Recorded by scripts/compare_aim.py --layer … --record.
    """
    with tarfile.open(Path(__file__).parent / f"data/{name}.tar.xz") as archive:
        files = {name: archive.extractfile(name).read().decode() for name in archive.getnames()}
    return files, list(csv.DictReader(io.StringIO(files["cycles.csv"])))


FILES, RECORDED = read_record("aim_simulator")
LATCHES, STARTED = read_record("aim_latches")  # --initial bias --initial add
CHUNKS = read_record("aim_chunks")  # sums that are resumed, channels that idle
ACTIVATED = read_record("aim_activations")  # --initial bias --activation relu6


@pytest.mark.parametrize(
    ("files", "line"),
    [(FILES, line) for line in RECORDED]
    + [(LATCHES, line) for line in STARTED]
    + [(CHUNKS[0], line) for line in CHUNKS[1]]
    + [(ACTIVATED[0], line) for line in ACTIVATED[1]],
    ids=lambda case: f"{case['program']} {case['name']}" if "program" in case else "",
)
def test_recorded_programs(files, line):
    program = PimProgram.from_json(files[line["program"]])
    assert bool(program.initial) == (files is LATCHES or files is ACTIVATED[0])
    assert bool(program.activation) == (files is ACTIVATED[0])
    text = b"".join(chunk for chunk, _ in export(program))
    assert hashlib.sha256(text).hexdigest() == line["digest"], "the recorded clock is of another trace"
    assert time_program(program, disable_refresh(AIM)).cycles == pytest.approx(
        int(line["simulated_cycles"]), rel=0.05
    )


@pytest.mark.long
def test_most_recorded_programs_are_off_by_a_few_clocks():
    cycles = [
        (time_program(PimProgram.from_json(FILES[line["program"]]), disable_refresh(AIM)).cycles, line)
        for line in RECORDED
    ]
    close = [abs(ours - int(line["simulated_cycles"])) <= 3 for ours, line in cycles]
    assert sum(close) > len(close) / 2


def test_resumed_sums_and_idle_channels_take_what_they_take_there():
    files, lines = CHUNKS
    programs = {line["program"]: PimProgram.from_json(files[line["program"]]) for line in lines}
    assert any(program.resumes for program in programs.values())
    for line in lines:
        ours = time_program(programs[line["program"]], disable_refresh(AIM)).cycles
        assert abs(ours - int(line["simulated_cycles"])) <= 3, line["name"]


def test_activated_sums_take_what_they_take_there():
    """But for a clock between two AFs, which each read a column of a table: no rule there is for these."""
    files, lines = ACTIVATED
    for line in lines:
        program = PimProgram.from_json(files[line["program"]])
        assert program.activation
        names = [command.name for command in program.commands(0)]
        pairs = sum(pair == ("AF", "AF") for pair in itertools.pairwise(names))
        ours = time_program(program, disable_refresh(AIM)).cycles
        assert -4 <= ours - int(line["simulated_cycles"]) <= pairs, line["name"]


def simulator(tmp_path: Path, prints: str) -> Path:
    """Stands for the simulator: it wants a configuration and a trace that ends."""
    path = tmp_path / "ramulator2"
    path.write_text(
        '#!/bin/sh\n[ "$1" = -f ] && [ "$3" = -t ] || exit 3\n'
        f'grep -q AiMDRAM "$2" && grep -q "AiM EOC" "$4" || exit 4\n{prints}\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_comparison_and_page(tmp_path):
    program = PimProgram.from_json(FILES["0.pimprog"])
    cycles = time_program(program, disable_refresh(AIM)).cycles
    executable = simulator(tmp_path, f"echo '  memory_system_cycles: {2 * cycles}'")
    reported = []
    (comparison,) = compare(executable, [("layer", "a layer", program)], AIM, reported.append)
    assert reported == [comparison]
    assert (comparison.cycles, comparison.simulated_cycles) == (cycles, 2 * cycles)
    assert comparison.error == -0.5
    assert summary([comparison]) == {"layer": {"traces": 1, "median": 0.5, "largest": 0.5}}
    page = f"before\n{BEGIN}\nstale\n{END}\nafter\n"
    assert replace_table(page, [comparison]) == f"before\n{BEGIN}\n{table([comparison])}\n{END}\nafter\n"
    with pytest.raises(ProfilerError, match="no marks"):
        replace_table("nothing", [comparison])


def test_what_goes_wrong_is_said(tmp_path):
    program = PimProgram.from_json(FILES["0.pimprog"])
    with pytest.raises(ProfilerError, match="absent': not an executable file"):
        compare(tmp_path / "absent", [("layer", "x", program)], AIM)
    with pytest.raises(ProfilerError, match=r"prints no 'memory_system_cycles'"):
        compare(simulator(tmp_path, "echo nothing"), [("layer", "x", program)], AIM)
    with pytest.raises(ProfilerError, match="exit code 1: no memory"):
        compare(simulator(tmp_path, "echo no memory >&2; exit 1"), [("layer", "x", program)], AIM)
    with pytest.raises(UsageError, match="has no AiM form"):
        compare(simulator(tmp_path, "true"), [("layer", "x", replace(program, dtype="fp32"))], AIM)
