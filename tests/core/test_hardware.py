"""Is every number of a device accounted for, and does a mistake in a spec name its field?"""

import dataclasses
import re
import tomllib

import pytest

from pimflow.errors import SpecError, UnknownNameError, UsageError
from pimflow.hardware import Constraint, GpuSpec, PimSpec, System, spec_names, system
from pimflow.hardware.reader import SPECS

NAMES = {"name", "description", "sources"}
PIM_TEXT = (SPECS / "pim" / "newton-gddr6.toml").read_text(encoding="utf-8")
GPU_TEXT = (SPECS / "gpu" / "rtx-2060-pim32.toml").read_text(encoding="utf-8")
SYSTEM_TEXT = (SPECS / "system" / "pimflow.toml").read_text(encoding="utf-8")


def values(spec) -> set[str]:
    """Every number and flag of `spec`, those in tables under ``table.key``."""
    found = set()
    for item in dataclasses.fields(spec):
        value = getattr(spec, item.name)
        if item.name in NAMES or item.name == "constraints" or dataclasses.is_dataclass(value):
            continue
        found |= {f"{item.name}.{key}" for key in value} if isinstance(value, dict) else {item.name}
    return found


def defaulted(spec) -> set[str]:
    return {f.name for f in dataclasses.fields(spec) if getattr(spec, f.name) == f.default}


def unsourced(spec) -> set[str]:
    given = {key for key, source in spec.sources.items() if source.strip()}
    return {v for v in values(spec) - defaulted(spec) if v not in given and v.split(".")[0] not in given}


@pytest.mark.parametrize("name", spec_names("pim"))
def test_every_value_of_a_pim_has_a_source(name):
    spec = PimSpec.load(name)
    assert unsourced(spec) == set()
    assert [rule for rule in spec.constraints if not rule.source.strip()] == []


@pytest.mark.parametrize("name", spec_names("gpu"))
def test_every_value_of_a_gpu_has_a_source(name):
    assert unsourced(GpuSpec.load(name)) == set()


@pytest.mark.parametrize("name", spec_names("system"))
def test_every_value_of_a_system_has_a_source(name):
    assert unsourced(system(name)) <= {"dtype"}


def test_a_value_without_source_would_be_seen(tmp_path):
    bare = tmp_path / "bare.toml"
    text = re.sub(r"nFAW = \{ value = 17, .*", "nFAW = 17", PIM_TEXT)
    bare.write_text(re.sub(r"gangs = \{ value = 4, .*", "gangs = 4", text, count=1), encoding="utf-8")
    assert unsourced(PimSpec.load(bare)) == {"timing.nFAW", "gangs"}


def test_every_latency_of_newton_is_used_by_a_rule_or_the_refresh():
    spec = PimSpec.load("newton-gddr6")
    used = {rule.latency for rule in spec.constraints} | {rule.per_burst for rule in spec.constraints}
    assert set(spec.timing) - used == {"nREFI", "nCL"}


def test_assumptions_lead_back_to_values():
    assumed = system().assumptions()
    sources = [s for spec in (system(), system().gpu, system().pim) for s in spec.sources.values()]
    assert len(assumed) == sum("assumed" in source for source in sources) > 0
    assert any(row.startswith("pim newton-gddr6: energy.activate_pj = 909.0 (assumed") for row in assumed)


def test_newton_by_its_paper():
    """16 banks of 16 fp16 multipliers a channel; a row is 1 KiB, a channel 256 MiB."""
    spec = PimSpec.load("newton-gddr6")
    assert (spec.banks, spec.elements_per_column("fp16"), spec.elements_per_row("fp16")) == (16, 16, 512)
    assert (spec.elements_per_row("fp32"), spec.bytes_per_channel) == (256, 256 << 20)
    assert (spec.readres_bursts("fp16"), spec.readres_bursts("fp32")) == (1, 2)
    assert spec.tCK_ns == pytest.approx(1 / 0.875)


def load_edited(tmp_path, cls, text, old, new):
    assert re.search(old, text, re.MULTILINE), "the edit must hit"
    path = tmp_path / "mine.toml"
    path.write_text(re.sub(old, lambda _: new, text, count=1, flags=re.MULTILINE), encoding="utf-8")
    return cls.load(path) if cls is not System else system(path)


PIM_MISTAKES = [
    (r"^gangs = .*", "", "missing field gangs"),
    (r"^gangs = .*\n^banks_per_gang = .*", "", "missing fields gangs, banks_per_gang"),
    (r"^gangs = .*", "gangs = 4\nganks = 4", "unknown field 'ganks'"),
    (r"^gangs = .*", "gangs = 'four'", "field 'gangs': 'four' is not a int"),
    (r"^gangs = .*", "gangs = 4.5", "field 'gangs': 4.5 is not a int"),
    (r"^gangs = .*", "gangs = true", "field 'gangs': True is not a int"),
    (r"^gangs = .*", "gangs = -4", "'gangs': -4 is not"),
    (r"^gangs = .*", "gangs = 0", "'gangs': 0 is not"),
    (r"^gangs = .*", "gangs = { value = -4, source = 'x' }", "'gangs': -4 is not"),
    (r"^tCK_ps = .*", "tCK_ps = inf", "'tCK_ps': inf is not"),
    (r"^tCK_ps = .*", "tCK_ps = nan", "'tCK_ps': nan is not"),
    (r"^rows_per_bank = .*", "rows_per_bank = 8\nrow_base = 8", "'row_base': 8 leaves none of 8"),
    (r"^rows_per_bank = .*", "rows_per_bank = 8\nrow_base = -1", "'row_base': -1"),
    (r"^latch_initial_value = .*", "latch_initial_value = 1", "'latch_initial_value': 1 is not a bool"),
    (r"^dtypes = .*", "dtypes = ['int4']", "'int4' is none of fp16, fp32"),
    (r"^dtypes = .*", "dtypes = 'fp16'", "field 'dtypes'"),
    (r"^dtypes = .*", "dtypes = [16]", "field 'dtypes': 16 is not a str"),
    (r"^description = .*", "name = 'x'\ndescription = 'y'", "unknown field 'name'"),
    (r"^nRP = .*", "nRP = -11", "'timing.nRP': -11"),
    (r"^nRP = .*", "nRP = 'slow'", "'timing'.nRP: 'slow' is not a int"),
    (r"^nRP = .*", "nRP = { valeu = 11 }", "'timing'.nRP"),
    (r"^nRP = .*", "", "names latency 'nRP', which .timing. lacks"),
    (r"^activate_pj = .*", "activate_pj = -1.0", "'energy.activate_pj': -1.0"),
    (r'^latency = "nFAW"', 'latency = "nFOUR"', "names latency 'nFOUR'"),
    (r'^per_burst = "nBL"', 'per_burst = "nNONE"', "names latency 'nNONE'"),
    (r'^level = "gang"', 'level = "rank"', "constraint 3: level 'rank' is none of channel, gang, buffer"),
    (r'^before = \["G_ACT"\]', 'before = ["ACT"]', "constraint 1: command 'ACT' is none of"),
    (r'^before = \["G_ACT"\]', 'before = "G_ACT"', "constraint 1: field 'before'"),
    (r'^latency = "nFAW"', "", "constraint 1: missing field latency"),
    (r'^latency = "nFAW"', 'latency = "nFAW"\nwindow = 9', "constraint 1: field 'window': 9"),
    (r'^latency = "nFAW"', 'latency = "nFAW"\nrank = 1', "constraint 1: unknown field 'rank'"),
    (r"\A", "constraints = 3\n", "not a TOML file"),
    (r"\A", "[[[", "not a TOML file"),
]


@pytest.mark.parametrize(("old", "new", "named"), PIM_MISTAKES, ids=[m[2] for m in PIM_MISTAKES])
def test_a_mistake_in_a_pim_names_its_field(tmp_path, old, new, named):
    with pytest.raises(SpecError, match=named) as caught:
        load_edited(tmp_path, PimSpec, PIM_TEXT, old, new)
    assert "mine" in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("section", ["timing", "energy"])
def test_a_section_that_is_no_table(tmp_path, section):
    table = PIM_TEXT.replace(f"[{section}]", "[ignored]")
    with pytest.raises(SpecError, match=rf"mine.*'?{section}'? *is not a table"):
        load_edited(tmp_path, PimSpec, table, r"\A", f"{section} = 3\n")


@pytest.mark.parametrize("constraints", ["constraints = 3", "constraints = ['a rule']"])
def test_constraints_that_are_no_tables(tmp_path, constraints):
    text = PIM_TEXT[: PIM_TEXT.index("[timing]")] + f"{constraints}\n[timing]\n[energy]\n"
    with pytest.raises(SpecError, match="constraint"):
        load_edited(tmp_path, PimSpec, text, r"\A", "")


def test_no_constraints_at_all(tmp_path):
    text = PIM_TEXT[: PIM_TEXT.index("[[constraints]]")] + PIM_TEXT[PIM_TEXT.index("[energy]") :]
    with pytest.raises(SpecError, match="'constraints'"):
        load_edited(tmp_path, PimSpec, text, r"\A", "")


GPU_MISTAKES = [
    (r"^sms = .*", "", "missing field sms"),
    (r"^sms = .*", "sms = 30\nsmss = 30", "unknown field 'smss'"),
    (r"^sms = .*", "sms = '30'", "field 'sms': '30' is not a int"),
    (r"^sms = .*", "sms = -30", "'sms': -30"),
    (r"^launch_ns = .*", "launch_ns = -1", "'launch_ns': -1.0"),
    (r"^launch_ns = .*", "launch_ns = nan", "'launch_ns': nan"),
    (r"^fma_per_sm_cycle = .*", "fma_per_sm_cycle = 64", "'fma_per_sm_cycle'"),
    (r"^fma_per_sm_cycle = .*", "fma_per_sm_cycle = { fp16 = 0 }", "'fma_per_sm_cycle.fp16': 0.0"),
    (r"^static_w = .*", "static_w = -2.0", "'energy.static_w': -2.0"),
]


@pytest.mark.parametrize(("old", "new", "named"), GPU_MISTAKES, ids=[m[2] for m in GPU_MISTAKES])
def test_a_mistake_in_a_gpu_names_its_field(tmp_path, old, new, named):
    with pytest.raises(SpecError, match=f"gpu 'mine': .*{named}"):
        load_edited(tmp_path, GpuSpec, GPU_TEXT, old, new)


SYSTEM_MISTAKES = [
    (r"^gpu = .*", "", SpecError, "missing field 'gpu'"),
    (r"^pim_channels = .*", "", SpecError, "missing field pim_channels"),
    (r"^pim_channels = .*", "pim_channels = 32", SpecError, "32 leaves the GPU no channel of its 32; use 0..31"),
    (r"^pim_launch_ns = .*", "pim_launch_ns = -1", SpecError, "'pim_launch_ns': -1.0"),
    (r"^dtype = .*", "dtype = 'bf16'", SpecError, "dtype 'bf16' is none of fp16, fp32 of newton-gddr6"),
    (r"^dtype = .*", "type = 'fp16'", SpecError, "unknown field 'type'"),
    (r"^pim = .*", "pim = 'newton-gddr5'", UnknownNameError, "unknown pim 'newton-gddr5'; did you mean newton-gddr6"),
    (r"^gpu = .*", "gpu = 'elsewhere/x.toml'", SpecError, "x.toml: cannot be read"),
]


@pytest.mark.parametrize(("old", "new", "error", "named"), SYSTEM_MISTAKES, ids=[m[3] for m in SYSTEM_MISTAKES])
def test_a_mistake_in_a_system_names_its_field(tmp_path, old, new, error, named):
    with pytest.raises(error, match=named):
        load_edited(tmp_path, System, SYSTEM_TEXT, old, new)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pim_channels": 32}, "pim_channels 32 .* use 0..31"),
        ({"pim_channels": -1}, "pim_channels -1 .* use 0..31"),
        ({"pim_channels": "16"}, "'pim_channels': '16' is not a int"),
        ({"dtype": "int8"}, "dtype 'int8' is none of fp16, fp32"),
        ({"accounting": "fair"}, "accounting 'fair' is none of full, paper"),
        ({"timing": "ddr"}, "timing 'ddr' is none of strict, ramulator-pimflow"),
        ({"crossbar_bytes_per_ns": 0}, "'crossbar_bytes_per_ns': 0"),
        ({"channel_mode_switch_ns": -1.0}, "'channel_mode_switch_ns': -1.0"),
        ({"pim_launch_ns": float("inf")}, "'pim_launch_ns': inf"),
        ({"channels": 3}, "unknown system field 'channels'; did you mean pim_channels"),
        ({"gpu": "rtx-2060-pim23"}, "unknown gpu 'rtx-2060-pim23'; did you mean rtx-2060-pim32"),
        ({"pim": "hbm-pim"}, "unknown pim 'hbm-pim'"),
    ],
)
def test_a_wrong_request_is_the_users(change, named):
    """What was asked for on the command line is a usage error, not a broken file."""
    with pytest.raises(UsageError, match=named) as caught:
        system(**change)
    assert caught.value.exit_code == 2


def test_unknown_names_list_near_matches_or_all():
    with pytest.raises(UnknownNameError, match=r"unknown system 'pimfow'; did you mean pimflow\?"):
        system("pimfow")
    with pytest.raises(UnknownNameError, match=rf"known: {', '.join(spec_names('gpu'))}$"):
        GpuSpec.load("zzz")


def test_changes_are_applied_and_none_changes_nothing():
    changed = system(pim_channels=8, gpu="v100", dtype=None, channel_mode_switch_ns=100.0)
    assert (changed.pim_channels, changed.gpu.name, changed.dtype) == (8, "v100", "fp16")
    assert changed.gpu_channels == changed.gpu.memory_channels - 8
    assert changed.channel_mode_switch_ns == 100.0
    assert system(pim=PimSpec.load("newton-gddr6")) == system()
    free = system().with_launches(gpu_ns=0.0, pim_ns=0.0)
    assert (free.gpu.launch_ns, free.pim_launch_ns) == (0.0, 0.0)
    assert dataclasses.replace(free, gpu=system().gpu, pim_launch_ns=system().pim_launch_ns) == system()


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(SpecError, match="cannot be read"):
            PimSpec.load(f"{path}/")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="not a TOML file"):
        PimSpec.load(binary)


def test_the_embedded_file_is_the_spec():
    """Nothing between file and object scales or swaps a value."""
    table, spec = tomllib.loads(PIM_TEXT), PimSpec.load("newton-gddr6")
    assert spec.timing == {key: entry["value"] for key, entry in table["timing"].items()}
    assert spec.energy == {key: entry["value"] for key, entry in table["energy"].items()}
    assert [dataclasses.asdict(rule) for rule in spec.constraints] == [
        dataclasses.asdict(Constraint(**{k: tuple(v) if isinstance(v, list) else v for k, v in rule.items()}))
        for rule in table["constraints"]
    ]
