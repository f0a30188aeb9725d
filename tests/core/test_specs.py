"""Does a wrong hardware file say what is wrong and where, and a right one where its numbers come from?"""

import dataclasses
import re
from pathlib import Path

import pytest

from pimflow.errors import SpecError, UnknownNameError, UsageError
from pimflow.hardware import Constraint, GpuSpec, PimSpec, spec_names, system
from pimflow.hardware.reader import SPECS, read_toml

LOADERS = {"pim": PimSpec.load, "gpu": GpuSpec.load, "system": system}
EMBEDDED = [(kind, name) for kind in LOADERS for name in spec_names(kind)]
MODELS = {"pim": "newton-gddr6", "gpu": "rtx-2060-pim32", "system": "pimflow"}


def edit_spec(tmp_path: Path, kind: str, old: str, new: str) -> Path:
    """The embedded file of that kind with the one line that matches `old` replaced."""
    text = (SPECS / kind / f"{MODELS[kind]}.toml").read_text(encoding="utf-8")
    text, count = re.subn(f"^{old}.*$", new, text, count=1, flags=re.M)
    assert count == 1, f"no line begins with {old}"
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


# Kind, line to replace, its replacement, and what the message must name.
WRONG_FIELDS = [
    ("pim", "gangs", "gang = 4", "unknown field 'gang'; did you mean gangs"),
    ("pim", "gangs", "gangs = 4.5", "field 'gangs': 4.5 is not a int"),
    ("pim", "gangs", "gangs = 0", "field 'gangs': 0 is not a finite number above zero"),
    ("pim", "gangs", "name = 'x'", "unknown field 'name'"),
    ("pim", "tCK_ps", "tCK_ps = 1e308", "field 'tCK_ps': 1e.308 is not below 1e.18"),
    ("pim", "latch_initial_value", "latch_initial_value = 0", "field 'latch_initial_value': 0 is not a bool"),
    ("pim", "dtypes", "dtypes = ['fp16', 'int3']", "dtype 'int3' is none of fp16, bf16, fp32, int8"),
    ("pim", "dtypes", "dtypes = [1]", "field 'dtypes': 1 is not a str"),
    ("pim", "rows_per_bank", "rows_per_bank = 10\nrow_base = -1", "field 'row_base': -1 is not"),
    ("pim", "nRFC", "nRFC = 3.5", "field 'timing'.nRFC: 3.5 is not a int"),
    ("pim", "nRFC", "nRFC = { source = 'x' }", "field 'timing'.nRFC: {'source': 'x'} is not a int"),
    ("pim", "level", "level = 'bank'", "constraint 1: level 'bank' is none of channel, gang, buffer"),
    ("pim", "before", "before = 'G_ACT'", "constraint 1: field 'before': 'G_ACT' is not a"),
    ("pim", "latency", "latency = 'nFAW'\nper_burst = 'nX'", "constraint 1 names latency 'nX'"),
    ("pim", "latency", "latency = 'nFAW'\nwindow = 9", "constraint 1: field 'window': 9 is not in 1..8"),
    ("pim", "latency", "", "constraint 1: missing field latency"),
    ("pim", "latency", "latency = ''", "constraint 1: field 'latency' names none"),
    ("gpu", "dram = ", "dram = nan", "field 'efficiency.dram': nan is not"),
    ("system", "gpu", "gpu = 'rtx-2061'", "unknown gpu 'rtx-2061'; did you mean rtx-2060"),
    ("gpu", "sms", "", "missing field sms"),
    ("gpu", "sms", "sms = -30", "field 'sms': -30 is not a finite number above zero"),
    ("gpu", "sms", "sm = 30", "unknown field 'sm'"),
    ("gpu", "launch_ns", "launch_ns = -1", "field 'launch_ns': -1.0 is not"),
    ("gpu", "launch_ns", "launch_ns = nan", "field 'launch_ns': nan is not"),
    ("gpu", "registers_bytes", "registers_bytes = 0", "field 'registers_bytes': 0 is not"),
    ("gpu", "fma_per_sm_cycle", "fma_per_sm_cycle = { fp16 = 0 }", "field 'fma_per_sm_cycle.fp16': 0.0"),
    ("gpu", "fma_per_sm_cycle", "fma_per_sm_cycle = { fp16 = 'x' }", "field 'fma_per_sm_cycle'.fp16: 'x' is"),
    ("gpu", "static_w", "static_w = -1", "field 'energy.static_w': -1.0 is not"),
    ("gpu", "static_w", "", "missing field 'energy.static_w'"),
    ("gpu", "fma_fp32_pj", "", "missing field 'energy.fma_fp32_pj'"),
    ("gpu", "static_w", "static_w = 1\nl3_pj_per_byte = 2", "unknown field 'energy.l3_pj_per_byte'"),
    ("gpu", "static_w", "static_w = { value = 'x', source = 'me' }", "field 'energy'.static_w: 'x' is not"),
    ("system", "gpu", "", "missing field 'gpu'"),
    ("system", "gpu", "gpu = 5", "field 'gpu': 5 is no name or file"),
    ("system", "pim ", "pim = ['newton-gddr6']", "field 'pim': .* is no name or file"),
    ("system", "pim_launch_ns", "", "missing field pim_launch_ns"),
    ("system", "pim_launch_ns", "pim_launch_ns = -1", "field 'pim_launch_ns': -1.0 is not"),
    ("system", "pim_channels", "pim_channels = 33", "33 is none of the GPU's 0..32 channels"),
    ("system", "dtype", "dtype = 'int8'", "dtype 'int8' is none of fp16, fp32 of newton-gddr6"),
    ("system", "dtype", "accounting = 'free'", "accounting 'free' is none of full, paper"),
    ("system", "dtype", "timing = 'lax'", "timing 'lax' is none of strict, ramulator-pimflow"),
]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "old", "new", "message"), WRONG_FIELDS)
def test_a_wrong_field_is_named(tmp_path, kind, old, new, message):
    with pytest.raises(SpecError, match=f"^{kind} 'mine': .*{message}"):
        LOADERS[kind](edit_spec(tmp_path, kind, old, new))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "missing|constraints"),
        ("constraints = 3", "field 'constraints' is not a list of tables"),
        ("constraints = [3]", "constraint 1: 3 is not a table"),
        ("constraints = []\ntiming = 3", "field 'timing' is not a table"),
        ("constraints = []\nenergy = [1]", "field 'energy' is not a table"),
    ],
)
def test_sections_of_another_kind(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=f"^pim 'mine': .*({message})"):
        PimSpec.load(path)


@pytest.mark.parametrize("kind", LOADERS)
def test_files_that_are_no_files(tmp_path, kind):
    broken = tmp_path / "broken.toml"
    broken.write_text("description = 'x'\ngangs = = 4\n")
    with pytest.raises(SpecError, match=r"broken\.toml: not a TOML file: .*line 2"):
        LOADERS[kind](broken)
    broken.write_bytes(b"description = '\xff'")
    with pytest.raises(SpecError, match=r"broken\.toml: not a text file"):
        LOADERS[kind](broken)
    with pytest.raises(SpecError, match=r"absent\.toml: cannot be read: No such file"):
        LOADERS[kind](str(tmp_path / "absent.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(SpecError, match=r"folder\.toml: cannot be read: Is a directory"):
        LOADERS[kind](tmp_path / "folder.toml")


@pytest.mark.parametrize(
    ("kind", "wrong", "near"),
    [
        ("pim", "newton-gddr5", "did you mean newton-gddr6"),
        ("gpu", "rtx2060", "did you mean .*rtx-2060"),
        ("system", "pimfow", "did you mean pimflow"),
        ("pim", "zzz", "known: .*newton-gddr6"),
    ],
)
def test_an_unknown_name_lists_what_comes_near(kind, wrong, near):
    with pytest.raises(UnknownNameError, match=f"^unknown {kind} '{wrong}'; {near}"):
        LOADERS[kind](wrong)


def test_a_files_name_is_the_devices(tmp_path):
    spec = PimSpec.load(edit_spec(tmp_path, "pim", "gangs", "gangs = 2"))
    assert (spec.name, spec.gangs, spec.banks) == ("mine", 2, 8)


# ---- systems ----


@pytest.mark.parametrize("channels", [-1, 33, 100])
def test_pim_channels_out_of_range(channels):
    with pytest.raises(UsageError, match=rf"pim_channels {channels} is none of the GPU's 0\.\.32 channels"):
        system(pim_channels=channels)


def test_all_pim_channels_leave_a_partitioned_gpu_none():
    with pytest.raises(UsageError, match=r"pim_channels 32 leaves .*; use 0\.\.31, or channel_sharing time"):
        system(pim_channels=32, channel_sharing="partitioned")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is none of fp16, fp32 of newton-gddr6"),
        ({"pim_channels": 1.5}, "field 'pim_channels': 1.5 is not a int"),
        ({"pim_channels": True}, "field 'pim_channels': True is not a int"),
        ({"pim_launch_ns": -1}, "field 'pim_launch_ns'"),
        ({"crossbar_bytes_per_ns": 0}, "field 'crossbar_bytes_per_ns'"),
        ({"timing": "lax"}, "timing 'lax' is none of"),
        ({"scheduling": "newton"}, r"scheduling 'newton' is none of newton\+, newton\+\+, pimflow"),
        ({"pim_chanels": 4}, "unknown system field 'pim_chanels'; did you mean pim_channels"),
        ({"gpu": "rtx"}, "unknown gpu 'rtx'"),
    ],
)
def test_a_change_that_makes_no_sense_is_a_usage_error(change, message):
    with pytest.raises(UsageError, match=message) as caught:
        system(**change)
    assert caught.value.exit_code == 2


def test_networks_are_compiled_in_some_of_what_devices_take():
    """A device may take bf16 and int8; networks do not."""
    assert system(pim="aim-gddr6").dtype == "fp16"
    system(dtype="fp32").require_network_dtype()
    bf16 = system(pim="aim-gddr6", dtype="bf16")
    with pytest.raises(UsageError, match="networks are compiled in fp16 or fp32, not bf16; use fp16"):
        bf16.require_network_dtype()
    only = dataclasses.replace(PimSpec.load("aim-gddr6"), dtypes=("bf16", "int8"))
    with pytest.raises(UsageError, match="dtype 'fp16' is none of bf16, int8 of aim-gddr6"):
        system(pim=only)
    with pytest.raises(UsageError, match="not int8; aim-gddr6 takes neither"):
        system(pim=only, dtype="int8").require_network_dtype()


def test_changes_reach_the_system():
    pim = dataclasses.replace(PimSpec.load("newton-gddr6"), global_buffers=1)
    changed = system(pim=pim, gpu="v100", pim_channels=0, dtype=None)
    assert (changed.pim, changed.gpu.name) == (pim, "v100")
    assert (changed.pim_channels, changed.gpu_channels) == (0, 32)
    assert changed.dtype == system().dtype
    relaunched = changed.with_launches(gpu_ns=1.0, pim_ns=2.0)
    assert (relaunched.gpu.launch_ns, relaunched.pim_launch_ns) == (1.0, 2.0)
    assert dataclasses.replace(relaunched, gpu=changed.gpu, pim_launch_ns=changed.pim_launch_ns) == changed


# ---- sources ----

PLAIN = ("description", "constraints", "operands", "not_modelled", "timing", "energy", "gpu", "pim", "dtype")


def numbers(table: dict) -> dict[str, object]:
    """Every field of a file, one level into its sections."""
    fields = {}
    for key, value in table.items():
        if isinstance(value, dict) and "value" not in value:
            fields |= {f"{key}.{name}": item for name, item in value.items()}
        elif key not in PLAIN or key in ("timing", "energy"):
            fields[key] = value
    return fields


@pytest.mark.parametrize(("kind", "name"), EMBEDDED)
def test_every_number_has_a_source(kind, name):
    """Or says that it is assumed."""
    _, table = read_toml(kind, name)
    spec = LOADERS[kind](name)
    assert spec.name == name and spec.description
    for field, value in numbers(table).items():
        assert set(value) == {"value", "source"}, f"{name}: {field}"
        assert len(value["source"]) > 3, f"{name}: {field}"
        assert spec.sources[field] == value["source"]
    for rule in (*table.get("constraints", ()), *table.get("operands", ())):
        assert len(rule["source"]) > 3, rule


def test_every_field_of_newton_is_in_its_file():
    _, table = read_toml("pim", "newton-gddr6")
    fields = {f.name for f in dataclasses.fields(PimSpec)} - {"name", "sources", "row_base"}
    assert set(table) == fields - {
        *("comp_starts_at_row", "accumulators", "lane_elements", "elementwise_multiply"),
        *("operands", "weights", "activations"),
    }
    assert {"timing.nBL", "energy.activate_pj", "tCK_ps"} <= set(numbers(table))


def test_nothing_between_file_and_device_changes_a_value():
    _, table = read_toml("pim", "newton-gddr6")
    spec = PimSpec.load("newton-gddr6")
    assert spec.timing == {key: entry["value"] for key, entry in table["timing"].items()}
    assert spec.energy == {key: entry["value"] for key, entry in table["energy"].items()}
    rules = [{k: tuple(v) if isinstance(v, list) else v for k, v in r.items()} for r in table["constraints"]]
    assert spec.constraints == tuple(Constraint(**rule) for rule in rules)


def test_assumptions_show_their_values():
    shown = system().assumptions()
    assert any(row.startswith("system: pim_launch_ns = 1000.0 (assumed") for row in shown)
    assert any(row.startswith("pim newton-gddr6: energy.activate_pj = 909.0 (assumed") for row in shown)
    assert any(row.startswith("gpu rtx-2060-pim32: energy.static_w = 32.3 (assumed") for row in shown)
    assert not any("energy.dram_pj_per_bit" in row for row in shown if row.startswith("gpu"))
    assert all("assumed" in row for row in shown)
    assert not any("tCK_ps" in row for row in shown)


# --- values that begin as another device's ---


def test_a_table_begins_as_another_devices(tmp_path):
    text = (SPECS / "gpu" / "v100.toml").read_text()
    head, energy = text.partition("[efficiency]")[0], text.partition("[energy]")[2]
    path = tmp_path / "mine.toml"
    efficiency = '[efficiency]\nas = "v100"\nsource = "assumed: a test"\n[efficiency.value]\ndram = 0.5\n'
    path.write_text(f"{head}{efficiency}\n[energy]{energy}")
    child, base = GpuSpec.load(path), GpuSpec.load("v100")
    assert child.efficiency == {**base.efficiency, "dram": 0.5}
    assert base.efficiency["dram"] != 0.5
    assert child.sources["efficiency.dram"] == "assumed: a test"
    for key in base.efficiency.keys() - {"dram"}:
        assert child.sources[f"efficiency.{key}"] == f"assumed: a test ({base.sources[f'efficiency.{key}']})"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('efficiency = { as = "v1000" }', "field 'efficiency': no other embedded device 'v1000'.*v100"),
        ('efficiency = { as = "v100", value = 3 }', "field 'efficiency': only a table"),
        (
            'efficiency = { as = "v100", dram = 1 }',
            "unknown 'dram' next to 'as'; values of its own belong in 'value'",
        ),
        ('sms = { as = "v100" }', "field 'sms': only a table"),
    ],
)
def test_a_device_to_begin_as_that_there_is_not(tmp_path, line, message):
    path = tmp_path / "mine.toml"
    path.write_text(line)
    with pytest.raises(SpecError, match=message):
        GpuSpec.load(path)


# Kind, line, value: sizes that would be allocated, and latencies behind which no command ever comes.
ABSURD_FIELDS = [
    ("columns_per_row", "1000000000", "a row of all 16 banks has .* bytes, more than"),
    ("column_bytes", "1000000000", "a row of all 16 banks has .* bytes, more than"),
    ("banks_per_gang", "1000000000", "a row of all 4000000000 banks has .* bytes, more than"),
    ("nCCDS", "1000000", "field 'timing.nCCDS': 1000000 leaves no time to compute"),
]
ABSURD_EXPONENTS = ["1e17", "1e-17", "0.5", "65"]


@pytest.mark.parametrize(("field", "value", "message"), ABSURD_FIELDS)
def test_absurd_devices_are_refused(tmp_path, field, value, message):
    path = edit_spec(tmp_path, "pim", field, f"{field} = {value}")
    with pytest.raises(SpecError, match=message):
        PimSpec.load(path)


@pytest.mark.parametrize("value", ABSURD_EXPONENTS)
def test_absurd_exponents_are_refused(tmp_path, value):
    path = edit_spec(tmp_path, "gpu", "overlap", f"overlap = {value}")
    with pytest.raises(SpecError, match=r"field 'efficiency.overlap': .* is not in 1\.\.64"):
        GpuSpec.load(path)
