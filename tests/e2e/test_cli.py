"""What does the command line print, and with which exit code does it end?"""

import json
import re
import subprocess
import sys

import numpy as np
import onnx
import pytest
from command_line import ALONE, run
from onnx import helper
from onnx_models import onnx_model

from pimflow import zoo
from pimflow.commands.main import main


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cli") / "toy"
    arguments = ["compile", "toy", "-o", str(directory), "--emit-traces", "--quiet", "--json"]
    process = subprocess.run([sys.executable, "-m", "pimflow", *arguments], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    return directory, json.loads(process.stdout)


def test_compile_json_is_the_report(compiled):
    directory, report = compiled
    assert report == json.loads((directory / "report.json").read_text())


def test_what_a_compiled_directory_says_itself_is_refused(compiled, capsys):
    code, out, err = run(capsys, "timeline", str(compiled[0]), "--pim-channels", "4")
    assert (code, out) == (2, "") and "--pim-channels: " in err and err.count("\n") == 1


@pytest.mark.long
def test_a_plan_keeps_to_the_bounds_or_is_refused(compiled, capsys):
    plan = str(compiled[0] / "plan.json")
    for option, bound in (("--max-latency", "1ns"), ("--max-energy", "1nJ")):
        code, out, err = run(capsys, "compile toy --plan", plan, option, bound, "--quiet")
        assert (code, out) == (4, "") and "of the plan for 'toy'" in err and err.count("\n") == 1


def test_an_input_is_given_once(compiled, capsys, tmp_path):
    np.save(tmp_path / "x.npy", np.ones((1, 3, 16, 16), np.float32))
    repeated_option = ["--input", f"input={tmp_path / 'x.npy'}"] * 2
    code, _, err = run(capsys, "run", str(compiled[0]), *repeated_option)
    assert code == 2 and "given twice" in err


def test_simulate_a_program_and_its_trace(compiled, capsys):
    directory, _ = compiled
    program = next(directory.glob("programs/*.pimprog"))
    code, out, _ = run(capsys, "simulate", str(program), "--json")
    row = json.loads(out)
    assert code == 0 and row["timing_violations"] == 0 and row["timing"] == "strict"
    assert set(row) >= {"cycles", "time_ns", "commands", "timing", "pim", "utilisation", "timing_violations"}
    trace = directory / "traces" / program.stem / "channel0.pim"
    code, out, _ = run(capsys, "simulate", str(trace), "--timing", "ramulator-pimflow", "--json")
    assert code == 0 and json.loads(out)["cycles"] > 0


def test_simulate_tells_energy(compiled, capsys):
    """Everything for the device's file, what the authors' fork prints for its timing."""
    directory, _ = compiled
    program = next(directory.glob("programs/*.pimprog"))
    _, out, _ = run(capsys, "simulate", str(program), "--json")
    row = json.loads(out)
    energy_pj, commands = row["energy_pj"], row["commands"]
    channels = len(json.loads(program.read_text())["channels"])
    assert energy_pj["background"] == pytest.approx(channels * 50.0 * row["time_ns"])
    assert energy_pj["comp"] == pytest.approx(commands["COMP"] * 16 * (16 * 1.5 + 175.814 + 36.507))
    _, out, _ = run(capsys, "simulate", str(program))
    assert f"{sum(energy_pj.values()) / 1e6:.3f} uJ: comp " in out
    _, out, _ = run(capsys, "simulate", str(program), "--timing", "ramulator-pimflow", "--json")
    row = json.loads(out)
    assert row["energy_pj"]["gwrite"] == pytest.approx(row["commands"]["GWRITE"] * 181.995)
    assert "background" not in row["energy_pj"]


def test_a_network_compiles_for_another_device(capsys):
    """One gang, one buffer of 64 columns; the comparison stays in the timing that knows it."""
    code, out, err = run(capsys, "compile toy --pim aim-gddr6 --quiet")
    assert (code, err) == (0, "")
    assert "aim-gddr6 (strict)" in out and "outputs match" in out and "0 timing violations" in out
    assert "accounting paper, timing strict" in out


@pytest.mark.parametrize(
    "command",
    [
        ["compile", "absent.onnx"],
        ["profile", "absent.onnx"],
        ["sweep", "absent.onnx", "--set", "pim_channels=8,16"],
        ["timeline", "absent.onnx"],
    ],
)
def test_a_timing_that_does_not_know_the_device_is_refused_at_once(command, capsys, tmp_path):
    """Before the network is read, which is not there."""
    out = ["-o", str(tmp_path / "out")] if command[0] in ("compile", "sweep") else []
    options = ["--pim", "aim-gddr6", "--accounting", "paper", "--quiet", *out]
    code, out, err = run(capsys, *command, *options)
    assert (code, out) == (2, "")
    assert err == (
        "pimflow: error: pim 'aim-gddr6': timing 'ramulator-pimflow', which --accounting paper implies, "
        "knows 4 gangs, not 1; use --timing strict\n"
    )
    code, _, err = run(capsys, *command, *options, "--timing", "strict")
    assert code == 3 and "absent.onnx" in err


@pytest.mark.long
def test_a_network_on_the_gpu_alone_needs_no_timing(capsys):
    options = ["--pim", "aim-gddr6", "--accounting", "paper", "--modes", "gpu", "--quiet", *ALONE]
    code, _, err = run(capsys, "compile toy", *options)
    assert (code, err) == (0, "")


APART = ("--channel-sharing", "partitioned")  # a candidate each, at the channels left


@pytest.mark.long
def test_explain_prints_candidates_and_why(capsys):
    code, out, _ = run(capsys, "compile toy --explain block.depthwise.conv --quiet")
    assert code == 0 and "depthwise" in out and "* GPU" in out
    for splits, name in (("grid", "SPLIT 4/8"), ("exact", "SPLIT 16/32 channels")):
        options = ["--splits", splits, *APART, "--quiet", "--json"]
        code, out, _ = run(capsys, "compile toy --explain down.conv", *options)
        names = [c["name"] for c in json.loads(out)["candidates"]]
        assert code == 0 and "PIM" in names and name in names
        (pim,) = (c for c in json.loads(out)["candidates"] if c["name"] == "PIM")
        assert pim["cost"]["known"] == {"pim": "simulated", "crossbar": "analytic"}
    code, out, _ = run(capsys, "compile toy --explain down.conv", *APART, "--quiet")
    assert code == 0 and re.search(r"^\* PIM .* uJ  pim simulated, crossbar analytic  ", out, re.M)


def test_a_run_names_outputs_and_says_what_ran(capsys, compiled):
    code, out, _ = run(capsys, "run", str(compiled[0]))
    name = zoo.load("toy").graph.output[0].name
    assert code == 0 and out.startswith(f"output {name}: float32 [1, 10], ")
    assert "ran       llvm+pim: the CPU stands in for the GPU" in out
    _, out, _ = run(capsys, "run", str(compiled[0]), "--json")
    assert [output["name"] for output in json.loads(out)["outputs"]] == [name]


@pytest.mark.long
def test_modes_restrict_the_candidates(capsys):
    options = ["--explain", "down.conv", "--modes", "gpu,pim", *APART, "--quiet", "--json"]
    code, out, _ = run(capsys, "compile toy", *options)
    assert code == 0 and [c["name"] for c in json.loads(out)["candidates"]] == ["GPU", "PIM"]
    code, out, _ = run(capsys, "compile toy --modes gpu --layers --quiet")
    assert code == 0 and "label with gpu alone" in out and "all 32 channels on the GPU" in out


@pytest.mark.long
def test_models_lists_parameters(capsys):
    code, out, _ = run(capsys, "models")
    assert code == 0 and "3,504,872" in out
    code, out, _ = run(capsys, "models --json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert rows.keys() >= {"mobilenet-v2", "toy"}
    assert rows["gpt-2"]["biases"] == sorted(rows["gpt-2"]["biases"]) != []


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["compile", "mobilnet-v2"], 2, "mobilenet-v2"),
        (["compile", "toy", "--gpu", "rtx-2061"], 2, "rtx-2060"),
        (["compile", "toy", "--pim", "newton"], 2, "newton-gddr6"),
        (["compile", "toy", "--pim-channels", "32", "--channel-sharing", "partitioned"], 2, "0..31"),
        (["compile", "toy", "--accounting", "generous"], 2, "full, paper"),
        (["compile", "toy", "--accounting", "paper+tax"], 2, "pim-launch, crossbar"),
        (["compile", "toy", "--modes", "gpu,pin"], 2, "did you mean pim"),
        (["timeline", "toy", "--modes", "pim"], 2, "gpu,pim"),
        (["compile", "toy", "--splits", "grid", "--modes", "gpu,pim"], 2, "allow split"),
        (["compile", "toy", "--scheduling", "newton+", "--modes", "gpu"], 2, "allow pim or split"),
        (["compile", "toy", "--dtype", "int4"], 2, "fp16"),
        (["compile", "toy", "--pim", "aim-gddr6", "--dtype", "bf16"], 2, "compiled in fp16 or fp32"),
        (["compile", "toy", "--target", "tpu"], 2, "llvm+pim"),
        (["compile", "toy", "--explain", "conv99"], 2, "region"),
        (["compile", "toy", "--shape", "input"], 2, "NAME="),
        (["compile", "nowhere.onnx"], 3, "nowhere.onnx"),
        (["compile", "toy", "--plan", "nowhere.json"], 3, "nowhere.json"),
        (["compile", "toy", "-o", "/dev/null/x"], 3, "/dev/null/x"),
        (["compile", "toy", "--explain", "stem.conv", "-o", "x"], 2, "--output: --explain prints"),
        (["compile", "toy", "--emit-traces"], 2, "-o"),
        (["compile", "toy", "--minimize", "memory"], 2, "--select"),
        (["compile", "toy", "--memory-budget", "1KiB"], 4, "try --memory-budget"),
        (["compile", "toy", "--skip-criterion", "paper"], 2, "--optimize-skips"),
        (["memory", "x.csv", "--weights", "resident"], 2, "table of buffers"),
        (["sweep", "toy", "--set", "pim.timing.nREFI=1"], 2, "no time to compute"),
        (["sweep", "toy", "--set", "pim_channels=0,1,…,99999999999"], 2, "more than 10000 values"),
        (["sweep", "toy", "--set", "gpu.clock_mhz=1e308"], 2, "not below 1e+18"),
        (["sweep", "toy", "--set", "gpu.clock_mhz=1e-308"], 2, "nearer to zero than 1e-18"),
        (["sweep", "toy", "--set", "pim.timing.nRCD=5"], 2, "did you mean nRCDW or nRCDR"),
        (["sweep", "toy", "--set", "pim_channels=4", "-o", "/dev/null"], 3, "name a directory"),
        (["run", "nowhere"], 3, "pimflow compile"),
        (["simulate", "nowhere.pim"], 3, "nowhere.pim"),
        (["simulate", "nowhere.pimprog"], 3, "nowhere.pimprog"),
        (["simulate", "trace.txt"], 2, ".pim"),
        (["simulate", "x.pim", "--pim", "nowhere.toml"], 3, "nowhere.toml"),
    ],
)
def test_bad_input_is_one_line_and_the_right_code(capsys, argv, code, says):
    exit_code, out, err = run(capsys, *argv, "--quiet")
    assert (exit_code, out) == (code, "")
    assert says in err and err.count("\n") == 1 and "Traceback" not in err


@pytest.mark.parametrize("columns", ["1", "2", "14", "30"])
def test_help_in_a_narrow_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    for argv in (["--help"], ["compile", "--help"]):
        with pytest.raises(SystemExit) as exit_info:
            main(argv)
        assert exit_info.value.code == 0 and "--help" in capsys.readouterr().out


def test_names_of_a_stranger_take_no_line_of_their_own(tmp_path, capsys):
    """Of outputs, layers, inputs and the file itself: a line of theirs could say anything."""
    forged = "y\nlatency   0.0001 ms\x1b[2J\r\x85"
    path = tmp_path / f"net{forged}.onnx".replace("\x85", "")
    onnx.save(
        onnx_model(
            [helper.make_node("Relu", [f"x{forged}"], [forged], f"layer{forged}")],
            {f"x{forged}": [1, 64]},
            {forged: [1, 64]},
            name=f"graph{forged}",
        ),
        path,
    )
    out = tmp_path / "out"
    for argv in (["compile", path, "-o", out, *ALONE], ["run", out], ["memory", path], ["profile", path]):
        assert main(list(map(str, argv))) == 0
        printed = capsys.readouterr().out
        assert "\nlatency   0.0001" not in printed and "\x1b" not in printed
        assert not any(line.startswith("latency   0.0001") for line in printed.splitlines())
