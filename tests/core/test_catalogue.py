"""Does ``pimflow devices`` show what the files hold, and does docs/devices.md?"""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from calibration.gpu_fit import EMITTED_CONSTANTS
from command_line import run
from update_devices import page_with_devices

from pimflow.commands.main import main
from pimflow.core.kernel import ConvGeometry
from pimflow.hardware import PimSpec, description, spec_names, system
from pimflow.hardware.reader import SPECS, read_toml
from pimflow.pim_backend.programs.lowering import ProgramRequest, lower
from pimflow.pim_backend.programs.schedule import schedules
from pimflow.simulators.pim.checker import violations
from pimflow.simulators.pim.timing import issue_program, time_program

PAGE = (Path(__file__).parents[2] / "docs" / "devices.md").read_text(encoding="utf-8")
EVERY = [(kind, name) for kind in ("pim", "gpu", "system") for name in spec_names(kind)]


def run_devices(capsys, *argv: str) -> tuple[int, str, str]:
    return run(capsys, "devices", *argv)


def test_the_list(capsys):
    code, out, err = run_devices(capsys)
    assert (code, err) == (0, "")
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [list(pair) for pair in EVERY]
    code, out, err = run_devices(capsys, "--json", "--quiet")
    rows = json.loads(out)
    assert [(row["kind"], row["name"]) for row in rows] == EVERY
    assert all(row["description"] for row in rows)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_every_value_of_a_file_is_shown(capsys, kind, name):
    """Against the file itself, not the class that read it."""
    code, out, err = run_devices(capsys, name, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert (report["kind"], report["name"]) == (kind, name)
    shown = {row["field"]: row for row in report["values"]}
    _, table = read_toml(kind, name)
    for section in ("timing", "energy") if kind == "pim" else ():
        table |= {f"{section}.{key}": value for key, value in table.pop(section).items()}
    assert report.get("operands", []) == table.pop("operands", [])
    for key in ("description", "constraints", "not_modelled"):
        table.pop(key, None)
    for field, entry in table.items():
        entry = entry if isinstance(entry, dict) and "value" in entry else {"value": entry}
        if isinstance(entry["value"], dict):
            assert {f"{field}.{key}" for key in entry["value"]} <= shown.keys()
            continue
        assert shown[field]["value"] == entry["value"]
        assert shown[field]["source"] == entry.get("source", "")
    code, text, _ = run_devices(capsys, name)
    assert code == 0
    for row in report["values"]:
        assert row["field"] in text and row["source"] in text


def test_each_constant_of_the_gpu_model_is_judged_by_its_own_source(capsys):
    """Fitted to Accel-Sim runs, or assumed: what is not fitted does not stand for the rest."""
    code, out, _ = run_devices(capsys, "rtx-2060-pim32", "--json")
    report = json.loads(out)
    rows = {row["field"]: row for row in report["values"] if row["field"].startswith("efficiency.")}
    assumed = {f"efficiency.{key}" for key in ("dram", "l2", "l2_resident", "split_limit", "stream")}
    assumed |= {f"efficiency.{key}" for key in ("iteration_cycles", "l2_reuse", "mma", "reread")}
    assert code == 0 and rows.keys() == assumed | {f"efficiency.{key}" for key in EMITTED_CONSTANTS}
    assert {field for field in report["assumed"] if field in rows} == assumed
    for field, row in rows.items():
        assert row["source"].startswith("assumed: " if field in assumed else "fitted to Accel-Sim runs: ")
    told = [row for row in system().assumptions() if ": efficiency" in row]
    assert {re.search(r"efficiency\.\w+", row)[0] for row in told} == assumed and len(told) == len(assumed)
    assert "simd_fma_per_sm_cycle.fp32" not in report["assumed"]


@pytest.mark.parametrize("name", spec_names("pim"))
def test_a_pim_device_shows_its_rules_and_its_limits(capsys, name):
    pim = PimSpec.load(name)
    _, text, _ = run_devices(capsys, name)
    report = description.describe(pim)
    assert len(report["constraints"]) == len(pim.constraints)
    for rule in report["constraints"]:
        assert rule["queue"] == 0 or f"a queue of {rule['queue']}" in text
        assert rule["cycles"] == pim.timing[rule["latency"]]
        assert rule["source"] in text
    for sentence in pim.not_modelled:
        assert f"- {sentence}" in text
    for field, source in pim.sources.items():
        assert ("assumed" in source) == (field in report["assumed"])
    assert all(row["unit"] for row in report["values"] if row["field"].startswith(("timing.", "energy.")))
    assert all(row["meaning"] for row in report["values"])


@pytest.mark.parametrize("name", spec_names("pim"))
def test_a_pim_device_says_what_plans_do_with_it(capsys, name):
    """Everything that it has, and nothing that it lacks."""
    pim = PimSpec.load(name)
    used = {row["what"]: row["how"] for row in description.describe(pim)["used"]}
    _, text, _ = run_devices(capsys, name)
    assert all(use in text for use in used.values())
    for field in ("latch_initial_value", "activation_unit", "elementwise_multiply", "comp_starts_at_row"):
        assert (field in used) == getattr(pim, field), field
    for field in ("global_buffers", "accumulators", "result_lanes"):
        assert (field in used) == (getattr(pim, field) > 1), field
    assert ("not used" in used.get("latch_initial_value", "not used")) != pim.can_write_latches
    for field, explained in (("activation_unit", pim.result_lanes == 1), ("elementwise_multiply", True)):
        assert ("`--explain` has its price" in used.get(field, "")) == (getattr(pim, field) and explained)
    assert ("WRITE" in used, "host" in used) == (pim.can_write, pim.has_single_host)


def test_what_is_derived_by_hand():
    """newton-gddr6: 875 MHz, 16 banks x 16 products every 2 cycles, 2 + 11 + 3 x 17 + 11 to switch rows."""
    rows = {r["what"]: r["value"] for r in description.describe(PimSpec.load("newton-gddr6"))["derived"]}
    assert rows["command clock"] == pytest.approx(875)
    assert rows["peak of a channel, fp16"] == pytest.approx(112)
    assert rows["the same, less refresh"] == pytest.approx(112 * (1 - 350 / 1900))
    assert rows["bandwidth at the multipliers of a channel"] == pytest.approx(224)
    assert rows["bandwidth of a channel's bus"] == pytest.approx(14)
    assert rows["share of time in refresh"] == pytest.approx(18.42, abs=0.01)
    assert rows["row switch, last COMP to next"] == 75
    assert rows["COMPs on a row"] == 64
    assert rows["weights of a channel"] == 256
    # 14.8 pJ in the fork, of which 11 are reads of the global buffer
    assert rows["energy of a multiply-accumulate, fp16"] == pytest.approx(14.77, abs=0.01)
    assert rows["energy of opening a row in every bank"] == pytest.approx(16 * (909 + 31.83) / 1000)


# ---- names and files ----


def test_files_of_every_kind(capsys, tmp_path):
    for kind, name in EVERY[::2]:
        path = tmp_path / f"my-{name}.toml"
        path.write_text((SPECS / kind / f"{name}.toml").read_text(encoding="utf-8"), encoding="utf-8")
        code, out, _ = run_devices(capsys, str(path), "--json")
        assert code == 0
        assert (json.loads(out)["kind"], json.loads(out)["name"]) == (kind, f"my-{name}")


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("newton", 2, "unknown device 'newton'; did you mean newton-"),
        ("AIM-GDDR6", 2, "unknown device 'AIM-GDDR6'; did you mean aim-gddr6"),
        ("v10", 2, "did you mean v100"),
        ("absent.toml", 3, "absent.toml: cannot be read: No such file"),
        ("folder.toml", 3, "folder.toml: cannot be read: Is a directory"),
        ("empty.toml", 3, "pim 'empty': "),
        ("odd.toml", 3, "odd.toml: not a TOML file"),
        ("wrong.toml", 3, "pim 'wrong': field 'gangs': -4 is not a finite number above zero"),
    ],
)
def test_what_cannot_be_shown(capsys, tmp_path, monkeypatch, name, code, message):
    monkeypatch.chdir(tmp_path)
    Path("folder.toml").mkdir()
    Path("empty.toml").touch()
    Path("odd.toml").write_text("a = = 1")
    newton = (SPECS / "pim" / "newton-gddr6.toml").read_text(encoding="utf-8")
    Path("wrong.toml").write_text(re.sub("^gangs = .*$", "gangs = -4", newton, flags=re.M), encoding="utf-8")
    for options in ((), ("--json",)):
        got, out, err = run_devices(capsys, name, *options)
        assert (got, out) == (code, "")
        assert err.startswith("pimflow: error: ") and message in err
        assert len(err.splitlines()) == 1


def test_showing_devices_does_not_load_tvm():
    code = (
        "import sys, pimflow.commands.main as cli; "
        "cli.main(['devices', 'hbm-pim']); sys.exit('tvm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# ---- documentation ----


def test_the_page_is_what_the_files_say():
    """If not: scripts/update_devices.py."""
    assert page_with_devices(PAGE) == PAGE
    for name in spec_names("pim"):
        assert description.description_markdown(description.describe(PimSpec.load(name))) in PAGE


def test_a_changed_value_changes_the_page():
    pim = PimSpec.load("aim-gddr6")
    changed = replace(pim, timing=pim.timing | {"nRP": 33})
    assert description.description_markdown(description.describe(changed)) not in PAGE
    stale = PAGE.replace("| timing.nRP | 32 cycles |", "| timing.nRP | 31 cycles |")
    assert stale != PAGE
    assert page_with_devices(stale) == PAGE


@pytest.fixture
def example(tmp_path) -> Path:
    """The device that the page tells how to write."""
    (toml,) = re.findall(r"<!-- example begin[^>]*-->\n```toml\n(.*?)```\n<!-- example end -->", PAGE, re.S)
    path = tmp_path / "my_device.toml"
    path.write_text(toml, encoding="utf-8")
    return path


def test_the_example_of_the_page(capsys, example):
    code, out, err = run_devices(capsys, str(example))
    assert (code, err) == (0, "")
    assert "nFAW, 2 back" in out
    assert "assumed: tCK_ps" in out
    pim = PimSpec.load(example)
    geometry = ConvGeometry(n=1, h=6, w=6, c=40, oc=40, kh=3, kw=3, padding=(1, 1, 1, 1))
    for schedule in schedules(geometry, pim, "fp16"):
        program = lower(ProgramRequest("layer", geometry, schedule), pim, dtype="fp16", channels=2)
        assert violations(issue_program(program, pim, 0), pim, program, 0) == []


def test_a_rule_left_out_of_the_example_shows(example):
    """What the page says of the checker."""
    pim = PimSpec.load(example)
    geometry = ConvGeometry(n=1, h=6, w=6, c=700, oc=40)
    schedule = schedules(geometry, pim, "fp16")[0]
    for index in (0, 2, 5, 7):
        lax = replace(pim, constraints=pim.constraints[:index] + pim.constraints[index + 1 :])
        program = lower(ProgramRequest("layer", geometry, schedule), lax, dtype="fp16", channels=1)
        assert violations(issue_program(program, lax, 0), lax, program, 0), pim.constraints[index]


def test_the_block_of_aim_that_the_page_counts():
    pim = PimSpec.load("aim-gddr6")
    geometry = ConvGeometry(n=1, h=1, w=1, c=512, oc=16)
    (schedule, *_) = schedules(geometry, pim, "bf16")
    program = lower(ProgramRequest("block", geometry, schedule), pim, dtype="bf16", channels=1)
    result = time_program(program, pim)
    assert [result.commands[name] for name in ("GWRITE", "G_ACT", "COMP", "READRES")] == [1, 1, 32, 1]
    assert f"{result.cycles} here" in PAGE


@pytest.mark.long
@pytest.mark.parametrize("kind", description.LOADERS)
def test_the_file_of_a_device_is_one_to_start_from(kind, tmp_path, capsys):
    """Printed, stored under another name and loaded, it is the device."""
    for name in spec_names(kind):
        assert main(["devices", name, "--toml"]) == 0
        copy = tmp_path / f"{name}.toml"
        copy.write_text(capsys.readouterr().out)
        assert description.load(str(copy)) == description.load(name)
    assert main(["devices", str(copy), "--toml"]) == 0 and capsys.readouterr().out == copy.read_text()
    assert main(["devices", "--toml"]) == 2 and "name it" in capsys.readouterr().err
