"""Are the files of devices that break a rule of DRAM refused, with the term of JEDEC?"""

import re
from dataclasses import replace

import numpy as np
import pytest
from command_line import run

from pimflow.errors import SpecError
from pimflow.hardware import PimSpec, spec_names
from pimflow.hardware.device_rules import device_rules, rule_faults
from pimflow.hardware.reader import SPECS
from pimflow.simulators.pim.checker import violations
from pimflow.simulators.pim.timing import ISSUED

NEWTON = (SPECS / "pim" / "newton-gddr6.toml").read_text(encoding="utf-8")
GAP = r'\[\[constraints\]\]\nlevel = "\w+"\nbefore = \["{}"\]\nafter = \["{}".*\]\nlatency = "{}"\n.*\n'


def edit_spec(tmp_path, pattern: str, text: str):
    path = tmp_path / "mine.toml"
    content, count = re.subn(pattern, text, NEWTON, flags=re.MULTILINE)
    assert count == 1
    path.write_text(content, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", spec_names("pim"))
def test_devices_that_come_with_it_keep_to_all_rules(name, capsys):
    code, out, err = run(capsys, "devices", "check", name)
    assert (code, err) == (0, "")
    rules = device_rules(PimSpec.load(name))
    assert [line.split()[:2] for line in out.splitlines()] == [["ok", rule.term] for rule in rules]
    assert {"tFAW", "tRC", "tRCD", "tRP", "tRAS", "tRRD", "tRTP", "tCCD", "tRFC", "tREFI", "tCK", "BL"} <= {
        rule.term for rule in rules
    }


FAULTS = {
    "eight banks at once": (r"^banks_per_gang = .*", "banks_per_gang = 8", "tFAW: .*8 banks, and nFAW"),
    "no window": (GAP.format("G_ACT", "G_ACT", "nFAW"), "", "tFAW: no constraint keeps a G_ACT nFAW"),
    "a period in ns": (r"^tCK_ps = .*", "tCK_ps = 1.14", "tCK: .*another unit"),
    "a refresh in ns": (r"^nRFC = .*", "nRFC = 4", "tRFC: .*nanoseconds in place of cycles"),
    "a short cycle": (r"^nRC = .*", "nRC = 20", "tRC: .*below nRAS"),
    "a short window": (r"^nFAW = .*", "nFAW = 4", "tFAW: .*below nRRD"),
    "a short turnaround": (r"^nTURN = .*", "nTURN = 1", "BL: .*two bursts"),
    "no tRCD": (GAP.format("G_ACT", "COMP", "nRCDR"), "", "tRCD: .*a COMP come 0 cycles after a G_ACT"),
    "no tRP": (GAP.format("PRE", "G_ACT", "nRP"), "", "tRP: .*a G_ACT come 0 cycles after a PRE"),
    "a burst of one": (
        r'(after = \["GWRITE"\]\nlatency = "nBL"\n)per_burst = "nBL"\n(source = "PIMFlow artifact)',
        r"\1\2",
        "BL: no constraint counts nBL for each burst of a GWRITE",
    ),
    "another name": (
        r"^nRCDW = (.*)((?:.|\n)*)latency = \"nRCDW\"",
        r'nMINE = \1\2latency = "nMINE"',
        "tRCD: .*nRCDW",
    ),
    "no tRFC": (GAP.format("REF", "GWRITE", "nRFC"), "", "tRFC: .*come 0 cycles after a REF"),
}  # fmt: skip


@pytest.mark.parametrize(("pattern", "text", "message"), FAULTS.values(), ids=FAULTS)
def test_a_file_that_breaks_a_rule_is_refused(tmp_path, capsys, pattern, text, message):
    path = edit_spec(tmp_path, pattern, text)
    with pytest.raises(SpecError, match=f"pim 'mine': {message}"):
        PimSpec.load(path)
    code, out, err = run(capsys, "devices", "check", path)
    assert code == 3 and re.search(message, err) and err.count("\n") == 1
    assert out == ""


def test_a_device_may_open_more_banks_if_it_says_so(tmp_path):
    path = edit_spec(tmp_path, r"^banks_per_gang = .*\nfaw_banks = .*", "banks_per_gang = 8\nfaw_banks = 8")
    assert list(rule_faults(PimSpec.load(path))) == []


def test_the_checker_counts_banks_not_commands():
    spec = PimSpec.load("newton-gddr6")
    activations = np.zeros(2, dtype=ISSUED)
    activations["clock"], activations["command"] = (0, 1000), 1
    activations["gang"] = (0, 1)
    for banks, limit, found in ((4, 4, 0), (8, 4, 2), (8, 8, 0)):
        device = replace(spec, banks_per_gang=banks, faw_banks=limit)
        messages = [text for text in violations(activations, device) if "within nFAW" in text]
        assert len(messages) == found and all(f"more than {limit} banks" in text for text in messages)


@pytest.mark.parametrize("argv", [["check"], ["check", "rtx-2060"], ["aim-gddr6", "newton-gddr6"]])
def test_what_cannot_be_checked(capsys, argv):
    code, out, err = run(capsys, "devices", *argv)
    assert (code, out, err.count("\n")) == (2, "", 1)
