"""Does ``pimflow trace`` write all or nothing, and end every mistake with one line? And ``--profiler``?"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import run

from pimflow import hardware
from pimflow.commands.command_line import output
from pimflow.commands.simulate import trace
from pimflow.compiler.artifact import PlacedRegions
from pimflow.compiler.interface import Interface
from pimflow.core.layer_text import parse_layer
from pimflow.core.plan import Choice, Plan
from pimflow.core.program import PimProgram
from pimflow.core.region import Region
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import PimRewrite, SplitRewrite
from pimflow.hardware import PimSpec
from pimflow.hardware.systems import SCHEDULINGS
from pimflow.host.files import file_sha256
from pimflow.pim_backend.programs.lowering import ProgramRequest
from pimflow.placement.costs.pim_runs import PimTarget
from pimflow.simulators.pim.timing import time_program
from pimflow.simulators.profiler import BuiltIn

NEWTON = PimSpec.load("newton-gddr6")
SIDE = PimTarget(pim=NEWTON, channels=4, dtype="fp16", profiler=BuiltIn())
# Counts what the Ramulator fork counts; its clock is 7 cycles a line and 1. tests/timing has the rest.
RAMULATOR = """#!/bin/sh
for name in GWRITE G_ACT COMP READRES PREA PRE REF; do echo "$name $(grep -c $name "$5")"; done
echo "Cycle $(( $(wc -l < "$5") * 7 + 1 ))"
"""


@pytest.fixture
def directory(tmp_path):
    """A compiled directory, as far as its programs go: one split, one that AiM has no form for."""
    path = tmp_path / "net"
    (path / "programs").mkdir(parents=True)
    geometry = parse_layer("conv:1x8x6x6,20,3x3,p1")
    schedule = next(s for s in SIDE.schedules(geometry) if s.buffers == NEWTON.global_buffers)
    for name, pixel_begin in (("first", 0), ("second", 2 * geometry.ow)):
        program = SIDE.program(ProgramRequest(name, geometry, schedule, pixel_begin=pixel_begin))
        (path / "programs" / f"{name}.pimprog").write_text(program.to_json())
    _place(path, geometry, Choice(regions=("second",), rewrite=SplitRewrite(gpu_share=2 / 6)))
    return path


def _place(path, geometry, split: Choice):
    """Regions and plan of two layers that are alike, the second one split."""
    regions = tuple(
        Region(
            name=name,
            operator="conv2d",
            operators=("nn.conv2d",),
            geometry=geometry,
            inputs=("%x",),
            input_shapes=((1, 6, 6, 8),),
            output_shape=(1, 6, 6, 20),
        )
        for name in ("first", "second")
    )
    graph = RegionGraph(name="net", regions=regions, outputs=("second",))
    placed = PlacedRegions(graph=graph, gpu="rtx-2060", dtype="fp16")
    choices = (Choice(regions=("first",), rewrite=PimRewrite()), split)
    plan = Plan(model="", system="", gpu_channels=16, choices=choices, latency_ns=0.0, lower_bound_ns=0.0)
    (path / "plan.json").write_text(plan.to_json())
    (path / "regions.json").write_text(placed.to_json())
    (path / "pim.json").write_text(NEWTON.to_json())
    hashes = {name: file_sha256(path / name) for name in ("plan.json", "regions.json", "pim.json")}
    (path / "interface.json").write_text(Interface(inputs={}, targets=("llvm+pim",), sha256=hashes).to_json())


@pytest.fixture
def ramulator(tmp_path):
    path = tmp_path / "ramulator"
    path.write_text(RAMULATOR)
    path.chmod(0o755)
    return path


def test_the_fastest_loop_order_is_written(capsys, tmp_path):
    text = "conv:1x24x10x10,40,3x3,s1,p1"
    geometry = parse_layer(text)
    orders = SIDE.schedules(geometry)
    runs = {str(s): SIDE.run(ProgramRequest("x", geometry, s)).timing.cycles for s in orders}
    arguments = ["--format", "pimprog", "--pim-channels", "4", "--json", "-o", tmp_path / "out"]
    code, out, err = run(capsys, "trace", text, *arguments)
    (layer,) = json.loads(out)["layers"]
    assert (code, err) == (0, "")
    assert layer["cycles"] == min(runs.values()) == runs[layer["schedule"]]
    program = tmp_path / "out" / next(iter(layer["files_bytes"]))
    code, out, _ = run(capsys, "simulate", program, "--json")
    assert code == 0 and json.loads(out)["cycles"] == layer["cycles"]
    assert json.loads(out)["timing_violations"] == 0


def test_timing_and_channels_and_dtype_count(capsys, tmp_path):
    rows = []
    for options in ([], ["--timing", "ramulator-pimflow"], ["--pim-channels", "2"], ["--dtype", "fp32"]):
        arguments = ["--format", "pim", "-o", tmp_path / "out", "--json", *options]
        code, out, _ = run(capsys, "trace fc:2x700,100", *arguments)
        assert code == 0
        rows.append(json.loads(out)["layers"][0])
    assert len({row["cycles"] for row in rows}) == 4
    assert [row["pim_channels"] for row in rows] == [16, 16, 2, 16]
    assert rows[3]["dtype"] == "fp32"


def test_a_directory_is_traced_program_by_program(capsys, tmp_path, directory):
    for format, names in (
        ("pim", {f"{name}/channel{c}.pim" for name in ("first", "second") for c in range(4)}),
        ("perfetto", {"first.perfetto.json", "second.perfetto.json"}),
        ("ramulator2", {"second.ldst"}),
    ):
        code, out, _ = run(capsys, "trace", directory, "--format", format, "-o", tmp_path / "out")
        there = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
        assert code == 0 and there == names | {"trace.json"}
        assert "second" in out


@pytest.mark.long
@pytest.mark.parametrize("layer", ["fc:600,48", "fc:3000,32", "conv:1x8x6x6,20,3x3,p1"])
def test_a_pim_trace_of_a_layer_is_legal(capsys, tmp_path, layer):
    """Even where the fastest loop order computes in some of the gangs, which .pim cannot say."""
    assert run(capsys, "trace", layer, "--format", "pim", "-o", tmp_path / "out")[0] == 0
    for path in (tmp_path / "out").glob("*/*.pim"):
        code, out, _ = run(capsys, "simulate", path, "--json")
        assert (code, json.loads(out)["timing_violations"]) == (0, 0)


def program_layout(pim: str | Path, dtype: str) -> str:
    """One name for all devices with the same programs, which differ in timing or in narrow weights."""
    name = str(pim).removesuffix("-narrow")
    alike = {"newton-hbm2": "newton-gddr6", "hbm4-pim": "hbm-pim", "lpddr5x-pim": "aim-gddr6"}
    return alike.get(name, name) if dtype == "fp16" else name


@pytest.mark.parametrize("name", hardware.spec_names("pim"))
def test_every_device_from_trace_to_simulate(capsys, tmp_path, name):
    """In each of its storage types; on any other device the program is refused, but for a file of its own."""
    text = (Path(hardware.__file__).parent / f"specs/pim/{name}.toml").read_text()
    same, other_spec = tmp_path / "same.toml", tmp_path / "other.toml"
    same.write_text(re.sub(r"nRC = .*", "nRC = 100", re.sub(r"nRAS = .*", "nRAS = 60", text)))
    other_text, changes = re.subn(r"(?m)^banks_per_gang = .*", "banks_per_gang = 2", text)
    if not changes:  # the file begins as another one
        other_text = re.sub(r"(?m)^(as = .*)", r"\1\nbanks_per_gang = 2", text, count=1)
    other_spec.write_text(other_text)
    out_path = tmp_path / "out"
    for dtype in PimSpec.load(name).dtypes:
        options = ["--pim", name, "--dtype", dtype, "-o", out_path, "--json"]
        for format in ("perfetto", "pim", "pimprog"):
            code, out, err = run(capsys, "trace conv:1x8x6x6,20,3x3,p1 --format", format, *options)
            assert (code, err) == (0, "")
            assert json.loads(out)["layers"][0]["dtype"] == dtype
        (path,) = out_path.glob("*.pimprog")
        for pim in (name, same):
            code, out, _ = run(capsys, "simulate", path, "--pim", pim, "--json")
            assert (code, json.loads(out)["timing_violations"]) == (0, 0)
        for pim in (*hardware.spec_names("pim"), other_spec):
            if program_layout(pim, dtype) != program_layout(name, dtype):
                code, out, err = run(capsys, "simulate", path, "--pim", pim)
                assert (code, out, err.count("\n")) == (3, "", 1) and "pim '" in err


def test_gpu_parts_are_those_that_pim_leaves(directory):
    geometry = parse_layer("conv:1x8x6x6,20,3x3,p1")
    assert trace.gpu_parts(directory) == {"second": geometry.first_rows(2)}
    assert geometry.first_rows(2).h == 3  # two rows of output, and the padding above
    split = SplitRewrite(gpu_share=0.2, axis="channels")
    _place(directory, geometry, Choice(regions=("second",), rewrite=split))
    assert trace.gpu_parts(directory) == {"second": replace(geometry, oc=4)}


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--format", "aim"], 2, "'first' (weight-stationary, 4 buffers of 1 pixel) has no AiM form"),
        (["--format", "pim", "--dtype", "fp16"], 2, "--dtype: "),
        (["--format", "pim", "--pim-channels", "4"], 2, "--pim-channels: "),
        (["--format", "pim", "--scheduling", "newton+"], 2, "loop orders of its own; leave that out"),
        (["--format", "pim", "--pim", "newton-gddr6"], 2, "has a device, a dtype"),
        (["--format", "perfetto", "--timing", "ramulator-pimflow"], 2, "shows the clocks of timing 'strict'"),
    ],
)
def test_what_a_directory_cannot_be(capsys, tmp_path, directory, options, code, says):
    exit_code, out, err = run(capsys, "trace", directory, "-o", tmp_path / "out", *options)
    assert (exit_code, out, err.count("\n")) == (code, "", 1) and says in err
    assert not (tmp_path / "out").exists()


def test_a_level_of_scheduling(capsys, tmp_path):
    """The level restricts the loop orders, and without all of them GWRITEs are hidden by nothing."""
    cycles = {}
    for level in SCHEDULINGS:
        options = ["--format", "pimprog", "-o", tmp_path / level, "--timing", "ramulator-pimflow", "--json"]
        code, out, _ = run(capsys, "trace fc:8x600,64 --scheduling", level, *options)
        (layer,) = json.loads(out)["layers"]
        assert code == 0 and ("1 buffer," in layer["schedule"]) == (level == "newton+")
        program = PimProgram.load(next((tmp_path / level).glob("*.pimprog")))
        hidden, shown = (time_program(program, NEWTON, "ramulator-pimflow", h).cycles for h in (True, False))
        assert hidden < shown and layer["cycles"] == (shown if level == "newton+" else hidden)
        cycles[level] = layer["cycles"]
    assert cycles["newton+"] > cycles["newton++"] >= cycles["pimflow"]


def test_a_directory_for_another_device(capsys, tmp_path, directory):
    for path in (directory / "programs").iterdir():
        path.write_text(path.read_text().replace("newton-gddr6", "mine"))
    code, _, err = run(capsys, "trace", directory, "--format", "pim", "-o", tmp_path / "out")
    assert code == 3 and err.count("\n") == 1 and "was lowered for another pim 'mine'" in err


def test_a_directory_with_nothing_on_pim(capsys, tmp_path, directory):
    for path in (directory / "programs").iterdir():
        path.unlink()
    code, _, err = run(capsys, "trace", directory, "--format", "pim", "-o", tmp_path / "out")
    assert code == 2 and "no region runs on PIM" in err
    (directory / "interface.json").unlink()
    code, _, err = run(capsys, "trace", directory, "--format", "pim", "-o", tmp_path / "out")
    assert code == 3 and "is no compiled network" in err


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["fc:1280", "--format", "pim"], 2, "fc:[Nx]IN,OUT"),
        (["conf:1", "--format", "pim"], 2, "did you mean conv?"),
        (["nowhere", "--format", "pim"], 3, "no compiled directory, and no layer"),
        (["fc:12,12", "--format", "perfeto"], 2, "did you mean perfetto"),
        (["fc:12,12", "--format", "pim", "--pim-channels", "0"], 2, "--pim-channels is 0"),
        (["fc:12,12", "--format", "pim", "--pim-channels", "99"], 2, "0..32"),
        (["fc:12,12", "--format", "pim", "--pim", "newton"], 2, "newton-gddr6"),
        (["fc:12,12", "--format", "pim", "--dtype", "int4"], 2, "none of fp16, fp32 of newton-gddr6"),
        (["fc:12,12", "--format", "aim", "--dtype", "fp32"], 2, "16 elements of fp16 or bf16"),
        (["fc:1280,100000000", "--format", "pim"], 4, "rows a bank"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(capsys, tmp_path, argv, code, says):
    exit_code, out, err = run(capsys, "trace", *argv, "-o", tmp_path / "out", "--quiet")
    assert (exit_code, out, err.count("\n")) == (code, "", 1)
    assert says in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_failure_while_writing_leaves_the_old_trace(capsys, tmp_path, monkeypatch):
    arguments = ["trace", "fc:12,12", "-o", tmp_path / "out", "--format"]
    assert run(capsys, *arguments, "aim")[0] == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}

    def full(program, pim):
        yield b"{", 0
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pimflow.simulators.exports.perfetto.export", full)
    code, _, err = run(capsys, *arguments, "perfetto")
    assert code == 3
    assert err == f"pimflow: error: {tmp_path / 'out'}: cannot be written: No space left on device\n"
    monkeypatch.setattr(
        "pimflow.simulators.exports.perfetto.export", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    assert run(capsys, *arguments, "perfetto")[0] == 130
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_progress_is_told_late_and_on_stderr(capsys, tmp_path, monkeypatch):
    arguments = ["trace", "conv:1x24x14x14,96,1x1", "--format", "perfetto", "-o", tmp_path / "out"]
    assert run(capsys, *arguments)[2] == ""
    monkeypatch.setattr(output, "BAR_DELAY_SECONDS", -1.0)
    assert run(capsys, *arguments)[2] == "pimflow: writing …\n"
    assert run(capsys, *arguments, "--quiet")[2] == ""


def test_shares_grow_to_one(tmp_path):
    shares = []
    trace.trace("conv:1x24x14x14,96,1x1", tmp_path / "out", "pim", advance=shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0 and len(shares) > 10


def test_simulate_takes_the_profilers_cycles(capsys, tmp_path, ramulator):
    assert run(capsys, "trace fc:600,400 --format pim -o", tmp_path / "out")[0] == 0
    path = tmp_path / "out/fc_600_400/channel0.pim"
    code, out, _ = run(capsys, "simulate", path, "--profiler", f"pim=ramulator:{ramulator}", "--json")
    row = json.loads(out)
    assert code == 0 and row["cycles"] == 7 * path.read_bytes().count(b"\n") + 1
    assert (row["timing"], row["timing_violations"]) == ("ramulator:ramulator", None)


@pytest.mark.long
def test_search_takes_the_profilers_times(capsys, ramulator):
    shown = {}
    for options in ([], ["--profiler", f"pim=ramulator:{ramulator}"]):
        arguments = ["compile", "toy", "--explain", "down.conv", "--json", "--quiet", *options]
        code, out, _ = run(capsys, *arguments)
        assert code == 0
        shown[len(options)] = {c["name"]: c["cost"]["latency_ns"] for c in json.loads(out)["candidates"]}
    assert shown[0]["GPU"] == shown[2]["GPU"] and shown[0]["PIM"] != shown[2]["PIM"]


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["simulate", "x.pim", "--profiler", "pim=ramulator:absent/ramulator"], 3, "there is no such file"),
        (["simulate", "x.pim", "--profiler", "ramulator"], 2, "pim=ramulator:PATH"),
        (["simulate", "x.pim", "--profiler", "pim=ramulator:x", "--timing", "strict"], 2, "out --timing"),
        (["compile", "toy", "--profiler", "pim=ramulator:absent/ramulator"], 3, "there is no such file"),
        (["compile", "toy", "--profiler", "pim=dramsim:x"], 2, "unknown profiler of the pim 'dramsim'"),
    ],
)
def test_profilers_that_fail(capsys, argv, code, says):
    exit_code, out, err = run(capsys, *argv, "--quiet")
    assert (exit_code, out, err.count("\n")) == (code, "", 1) and says in err
