"""Records of what GPUs were fitted to: rows that a constant has seen are not scored, all others are."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from calibration import fit_record
from calibration.fit_record import record_path, record_samples, shape_digest, unseen_samples
from calibration.gpu_fit import fit
from calibration.samples import analytic_ns, read_samples
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from test_gpu_data import DATA, DEEPBENCH, P100, ROOT, TENSORRT, V100, rows_of, text_of

from pimflow.core.table_files import tomllib
from pimflow.errors import SpecError
from pimflow.hardware import GpuSpec
from pimflow.hardware.reader import SPECS, spec_names

ACCELSIM = DATA / "accelsim_rtx2060.csv"
EMITTED = DATA / "accelsim_emitted.csv"
T4, PIM32 = (GpuSpec.load(name) for name in ("t4", "rtx-2060-pim32"))


def write(path: Path, table: list[dict]) -> Path:
    path.write_text(text_of(table, table[0]), encoding="utf-8")
    return path


def script(name: str, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "scripts" / f"{name}.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


# --- embedded GPUs ---


@pytest.mark.parametrize("name", spec_names("gpu"))
def test_every_preset_has_a_record_that_names_what_it_begins_as(name):
    text = record_path(name).read_text(encoding="utf-8")
    table = tomllib.loads((SPECS / "gpu" / f"{name}.toml").read_text(encoding="utf-8"))
    if begins_as := table["efficiency"].get("as"):
        assert f"as {begins_as}" in text.splitlines()
    digests = re.findall(r"^[0-9a-f]{8}$", text, re.M)
    own_sources = [s for s in GpuSpec.load(name).sources.values() if not s.startswith("assumed: as ")]
    fitted = [source for source in own_sources if "fit_gpu_model.py" in source]
    assert bool(digests) == bool(fitted)
    assert unseen_samples([], GpuSpec.load(name)) == []


def test_what_a_preset_was_fitted_to_is_never_scored():
    """The preset of Accel-Sim was fitted to all of the file; a hash had 12 of its rows scored, at 1.5 %."""
    samples = read_samples(ACCELSIM, PIM32)
    assert len(samples) == 30 and unseen_samples(samples, PIM32) == []


@pytest.mark.long
def test_the_record_is_of_the_rows_that_the_constants_come_from():
    samples = [*read_samples(EMITTED, PIM32), *read_samples(ACCELSIM, PIM32)]
    refitted = fit(PIM32, [sample for sample in samples if sample not in unseen_samples(samples, PIM32)])
    assert analytic_ns(samples, refitted) == pytest.approx(analytic_ns(samples, PIM32), rel=1e-2)


@given(sizes=st.lists(st.tuples(*[st.integers(1, 4096)] * 3), min_size=1, max_size=18, unique=True))
@settings(max_examples=examples(20), deadline=None, derandomize=True)
def test_kernels_that_a_preset_has_not_seen_are_all_scored(sizes, tmp_path_factory):
    seen_sizes = {tuple(int(row[key]) for key in "MNK") for row in rows_of(ACCELSIM) if row["M"]}
    (row,) = [row for row in rows_of(ACCELSIM) if (row["kernel"], row["n_mem"]) == ("pw_784x192x32", "16")]
    table = [{**row, "M": m, "N": n, "K": k, "kernel": f"k{i}"} for i, (m, n, k) in enumerate(sizes)]
    samples = read_samples(write(tmp_path_factory.mktemp("rows") / "unseen.csv", table), PIM32)
    assert unseen_samples(samples, PIM32) == [s for s, size in zip(samples, sizes) if size not in seen_sizes]


def test_a_simulated_kernel_is_known_by_what_it_computes(tmp_path):
    table = [{**row, "kernel": f"k{i}"} for i, row in enumerate(rows_of(ACCELSIM)) if row["M"]]
    samples = read_samples(write(tmp_path / "renamed.csv", table), PIM32)
    assert samples and unseen_samples(samples, PIM32) == []


@pytest.mark.parametrize(("label", "seen"), [("T4", False), ("V100", True), ("v100", True)])
def test_rows_of_a_gpu_whose_constants_are_anothers(label, seen, tmp_path):
    """No row of the T4 was fitted to; rows of the V100 were, to which its DRAM's constants go back."""
    table = [{**row, "gpu": label} for row in rows_of(TENSORRT)]
    samples = read_samples(write(tmp_path / "rows.csv", table), V100)
    fitted = [dataclasses.replace(s, shape=shape_in_record()) for s in samples[:5]]
    scored = unseen_samples([*samples, *fitted], T4)
    assert scored == (samples if seen else [*samples, *fitted])
    assert unseen_samples([*samples, *fitted], V100) == samples


def shape_in_record() -> str:
    """A shape of the V100's record: that of the row which its launch was read off."""
    return "1,1792,14,14,1792,1,1"


def test_the_row_that_a_launch_was_read_off_is_on_record():
    """Its shape is in the half that the fit leaves alone; the launch has seen it all the same."""
    sample = dataclasses.replace(read_samples(TENSORRT, V100)[0], shape=shape_in_record())
    assert not sample.is_fit_sample
    assert unseen_samples([sample], V100) == []


def test_simulated_rows_of_the_card_that_the_preset_stands_for():
    samples = [s for s in read_samples(ACCELSIM, PIM32) if s.channels == 12]
    assert samples and unseen_samples(samples, GpuSpec.load("rtx-2060")) == []
    measured = [dataclasses.replace(s, gpu="RTX 2060") for s in samples]
    assert unseen_samples(measured, GpuSpec.load("rtx-2060")) == measured


# --- records ---


@given(chosen=st.sets(st.integers(0, 59)))
@settings(max_examples=examples(50), deadline=None, derandomize=True)
def test_what_is_on_record_is_left_out_and_nothing_else(chosen, tmp_path_factory):
    """In whichever half the hash puts a shape, and in however many steps it was recorded."""
    record = tmp_path_factory.mktemp("record") / "p100.fitted.txt"
    samples = read_samples(DEEPBENCH, P100)
    fitted = [sample for i, sample in enumerate(samples) if i in chosen]
    record_samples(record, [])
    record.write_text(f"# why\nas v100\n{record.read_text()}")
    record_samples(record, fitted[: len(fitted) // 2])
    record_samples(record, fitted[len(fitted) // 2 :])
    digests = {shape_digest(sample) for sample in fitted}
    assert unseen_samples(samples, P100, record) == [s for s in samples if shape_digest(s) not in digests]
    assert record.read_text().splitlines()[:2] == ["# why", "as v100"]
    assert [path.name for path in record.parent.iterdir()] == [record.name]


def test_without_a_record_nothing_is_known_to_be_unseen(tmp_path, monkeypatch):
    monkeypatch.setattr(fit_record, "FITTED", tmp_path)
    with pytest.raises(SpecError, match=r"p100\.txt: there is no record .*--split all"):
        unseen_samples(read_samples(DEEPBENCH, P100), P100)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0328d0b6\nnonsense\n", r"mine\.fitted\.txt:2: neither a digest .*'nonsense'"),
        ("as nothing\n", "'as nothing': there is no embedded gpu of that name"),
    ],
)
def test_records_that_cannot_be_read(text, said, tmp_path):
    (tmp_path / "mine.fitted.txt").write_text(text)
    with pytest.raises(SpecError, match=said):
        unseen_samples([], P100, tmp_path / "mine.fitted.txt")


# --- the scripts ---


@pytest.mark.long
def test_a_gpu_of_ones_own_is_judged_on_what_it_was_not_fitted_to(tmp_path):
    spec_path = tmp_path / "mine.toml"
    spec_path.write_text((SPECS / "gpu" / "p100.toml").read_text())
    table = [row for row in rows_of(DEEPBENCH) if row["gpu"] == "P100" and row["dtype"] == "fp32"]
    data = write(tmp_path / "rows.csv", table)
    refused = script("validate_gpu_model", data, "--gpu", spec_path)
    assert (refused.returncode, refused.stdout) == (3, "")
    assert re.fullmatch(r"error: .*mine\.fitted\.txt: there is no record .*\n", refused.stderr)
    assert script("validate_gpu_model", data, "--gpu", spec_path, "--split", "all").returncode == 0
    part = write(tmp_path / "part.csv", table[: len(table) // 2])
    fitted = script("fit_gpu_model", part, "--gpu", spec_path, "--launch", "--split", "all")
    assert fitted.returncode == 0, fitted.stderr
    judged = script("validate_gpu_model", data, "--gpu", spec_path)
    assert f"{len(table) // 2} rows of shapes that were fitted to are left out" in judged.stderr
    assert judged.returncode == 0
    nothing = script("validate_gpu_model", part, "--gpu", spec_path)
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert "'mine' was fitted to every one of its" in nothing.stderr
