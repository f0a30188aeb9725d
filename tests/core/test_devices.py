"""Is every device file whole, is a broken one refused by name, and do the devices do what is said of them?"""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from refreshes import when_due

from pimflow.core.commands import Affine, Comp, GAct, Gwrite, Loop, Readres
from pimflow.core.kernel import ConvGeometry
from pimflow.core.program import PimProgram
from pimflow.errors import SpecError
from pimflow.hardware import PimSpec, spec_names
from pimflow.hardware.pim import (
    ACTIVATION_ENERGY,
    BEGIN,
    COMMANDS,
    ENERGY,
    LATCH_ENERGY,
    TIMING,
    WRITE_ENERGY,
)
from pimflow.hardware.reader import SPECS, read_toml
from pimflow.simulators.pim.checker import violations
from pimflow.simulators.pim.timing import issue_program

NAMES = spec_names("pim")
DEVICES = {name: when_due(PimSpec.load(name)) for name in NAMES}


def program(pim: PimSpec, nodes: tuple, rows: int = 64) -> PimProgram:
    """`nodes` on one channel of `pim`."""
    dtype = pim.dtypes[0]
    return PimProgram(
        region="test",
        pim=pim.name,
        dtype=dtype,
        geometry=ConvGeometry(n=1, h=1, w=1, c=pim.elements_per_row(dtype), oc=pim.banks),
        pixel_begin=0,
        pixel_end=1,
        banks=pim.banks,
        gangs=pim.gangs,
        columns_per_row=pim.columns_per_row,
        elements_per_column=pim.elements_per_column(dtype),
        buffers=pim.global_buffers,
        readres_bursts=pim.readres_bursts(dtype),
        row_begin=0,
        rows=rows,
        channels=(nodes,),
    )


def row_activations(pim: PimSpec, row: Affine) -> list[GAct]:
    return [GAct(gang=gang, row=row) for gang in range(pim.gangs)]


# ---- files ----


def test_the_embedded_devices():
    sold = ["aim-gddr6", "attacc-hbm3", "hbm-pim", "newton-gddr6", "newton-hbm2"]
    what_if = ["hbm-pim-narrow", "hbm4-pim", "lpddr6-pim", "newton-gddr6-narrow"]
    assert sorted([*sold, "lpddr5x-pim", *what_if]) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_file_has_all_times_and_energies_and_no_others(name):
    _, table = read_toml("pim", name)
    named = {rule[key] for rule in table["constraints"] for key in ("latency", "per_burst") if key in rule}
    assert set(table["timing"]) == set(TIMING) | named
    latches = LATCH_ENERGY if DEVICES[name].can_write_latches else {}
    activations = ACTIVATION_ENERGY if DEVICES[name].can_activate else {}
    assert set(table["energy"]) == set(ENERGY | WRITE_ENERGY | latches | activations)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_assumed_and_not_modelled_is_in_sentences(name):
    sources = DEVICES[name].sources.values()
    assert all("assumed" not in source or re.search("assumed[:,] .{9}", source) for source in sources)
    assert len(DEVICES[name].not_modelled) >= 3
    for sentence in DEVICES[name].not_modelled:
        assert re.fullmatch(r"[A-Za-z][^\n]{20,}\.", sentence)


@pytest.mark.parametrize("name", NAMES)
def test_constraints_cover_every_command(name):
    """Each delays something and is delayed by something."""
    rules = DEVICES[name].constraints
    commands = set(COMMANDS) - ({"WRBIAS"} if not DEVICES[name].can_write_latches else set())
    commands -= {"AF"} if not DEVICES[name].can_activate else set()
    assert {command for rule in rules for command in rule.before} - {BEGIN} == commands
    assert {command for rule in rules for command in rule.after} == commands


# ---- what is published of them ----


def test_peaks_are_the_published_ones():
    """1 TFLOPS of an AiM chip with two channels; 1.2 TFLOPS of an HBM-PIM at 300 MHz, here 250."""
    assert 2 * 2 * DEVICES["aim-gddr6"].macs_per_s("bf16") == pytest.approx(1e12, rel=0.03)
    assert 2 * 16 * DEVICES["hbm-pim"].macs_per_s("fp16") * 300 / 250 == pytest.approx(1.2e12, rel=0.03)
    assert DEVICES["newton-gddr6"].macs_per_s("fp16") == pytest.approx(16 * 16 * 875e6 / 2)
    lpddr = DEVICES["lpddr5x-pim"]  # 2.4 TOPS of int4, 1.2 TFLOPS of fp8, 614 GB/s, 16 GB a package
    assert 2 * 4 * lpddr.with_weights("int4", "int8").macs_per_s("int8") == pytest.approx(2.4e12, rel=0.03)
    assert 2 * 4 * lpddr.with_weights("fp8", "fp8").macs_per_s("fp16") == pytest.approx(1.2e12, rel=0.03)
    assert 4 * lpddr.macs_per_s("int8") == pytest.approx(614e9, rel=0.01)
    assert 4 * lpddr.bytes_per_channel == 16 * 2**30


def test_sizes_are_the_published_ones():
    aim, hbm, newton = DEVICES["aim-gddr6"], DEVICES["hbm-pim"], DEVICES["newton-hbm2"]
    assert aim.elements_per_row("bf16") == 1024  # 2 KiB
    # 4 Gbit a channel, 8 Gbit a chip, of which tables have 8 rows of 16 banks.
    assert aim.bytes_per_channel == 2**29 - 8 * 16 * 2**11
    assert hbm.bytes_per_channel == newton.bytes_per_channel == 2**28
    assert [pim.readres_bursts("fp16") for pim in (aim, newton, hbm)] == [1, 1, 8]
    assert (hbm.buffer_columns, hbm.result_lanes) == (8, 16)
    for name, pim in DEVICES.items():
        assert (pim.buffer_columns == pim.columns_per_row) == (
            not name.startswith("hbm-pim") and name != "hbm4-pim"
        )


def test_results_of_int8_are_wide():
    pim = replace(DEVICES["newton-gddr6"], dtypes=("int8",))
    assert (pim.elements_per_column("int8"), pim.readres_bursts("int8")) == (32, 2)


# ---- what they do ----


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_is_legal(name):
    """Rows, refreshes and full buffers, judged by the checker, which does not read the constraints."""
    pim = DEVICES[name]
    row = Affine(0, (1,))
    body = (
        Gwrite(buffer=0, pixel=Affine(0), pixels=1, k=Affine(0), columns=pim.buffer_columns),
        *row_activations(pim, row),
        Comp(buffer=0, row=row, column=Affine(0), count=pim.columns_per_row),
        Readres(buffer=0, pixel=Affine(0), channel=Affine(0)),
    )
    stream = program(pim, (Loop(extent=60, body=body),))
    commands = issue_program(stream, pim, 0)
    assert violations(commands, pim, stream) == []
    assert (commands["command"] == COMMANDS.index("REF")).sum() >= 2


@st.composite
def organisations(draw: st.DrawFn) -> PimSpec:
    """A device cut up otherwise, with other row latencies."""
    pim = DEVICES[draw(st.sampled_from(NAMES))]
    names = ("nRCDR", "nRP", "nRTP", "nRRD", "nFAW")
    timing = {name: draw(st.integers(1, 60)) for name in names}
    windows = st.integers(1, 4)
    rules = tuple(replace(r, window=draw(windows)) if r.latency == "nFAW" else r for r in pim.constraints)
    timing |= {"nRC": 1, "nREFI": 100_000}
    gangs = draw(st.sampled_from((1, 2, 4, 8)))
    return replace(pim, gangs=gangs, timing=pim.timing | timing, constraints=rules)


@settings(max_examples=examples(60), deadline=None)
@given(organisations())
def test_a_row_switch_takes_what_is_derived(pim):
    """The formula against the engine, COMP to COMP."""
    comps = [Comp(buffer=0, row=Affine(row), column=Affine(0), count=100) for row in (0, 1)]
    nodes = (*row_activations(pim, Affine(0)), comps[0], *row_activations(pim, Affine(1)), comps[1])
    wide = replace(pim, columns_per_row=100, buffer_columns=100)
    commands = issue_program(program(wide, nodes), wide, 0)
    clocks = commands["clock"][commands["command"] == COMMANDS.index("COMP")]
    assert clocks[100] - clocks[99] == pim.row_switch_cycles


@settings(max_examples=examples(30), deadline=None)
@given(organisations())
def test_a_stream_gets_on_between_refreshes_that_leave_it_time(pim):
    """With the shortest interval that a file may have, the engine comes to an end."""
    tight = replace(pim, timing=pim.timing | {"nREFI": pim.reopen_cycles + 1})
    comp = Comp(buffer=0, row=Affine(0), column=Affine(0), count=1)
    nodes = (*row_activations(tight, Affine(0)), Loop(extent=2000, body=(comp,)))
    commands = issue_program(program(tight, nodes), tight, 0)
    assert np.count_nonzero(commands["command"] == COMMANDS.index("COMP")) == 2000
    assert np.count_nonzero(commands["command"] == COMMANDS.index("REF")) > 1


@pytest.mark.parametrize("name", NAMES)
def test_refreshes_take_their_share(name):
    """Of a long run of COMPs on one row: at least nRFC / nREFI, and no more than reopening adds."""
    pim = DEVICES[name]
    count = 40 * pim.timing["nREFI"] // pim.timing["nCCDS"]
    comp = Comp(buffer=0, row=Affine(0), column=Affine(0), count=1)
    nodes = (*row_activations(pim, Affine(0)), Loop(extent=count, body=(comp,)))
    commands = issue_program(program(pim, nodes), pim, 0)
    is_comp = commands["command"] == COMMANDS.index("COMP")
    clocks = commands["clock"][is_comp]
    refreshes = np.count_nonzero(commands["command"][: np.flatnonzero(is_comp)[-1]] == COMMANDS.index("REF"))
    cycles = clocks[-1] - clocks[0]
    idle_share = 1 - count * pim.timing["nCCDS"] / cycles
    assert pim.refresh_share - 1 / refreshes < idle_share < pim.reopen_cycles / pim.timing["nREFI"]


# ---- broken files ----

NEWTON = (SPECS / "pim" / "newton-gddr6.toml").read_text(encoding="utf-8")
NUMBERS = [*re.findall(r"^(\w+) = \{ value = [\d.]+,", NEWTON, flags=re.M)]
FIELDS = [*re.findall(r"^(\w+) = \{ value = ", NEWTON, flags=re.M)]
OPTIONAL = ("refreshes_ahead", "faw_banks")  # 0 and 4 where they are left out
NEEDED = [field_name for field_name in FIELDS if field_name not in OPTIONAL]


def with_line(field: str, line: str) -> str:
    text, count = re.subn(rf"^{field} = .*$", lambda _: line, NEWTON, count=1, flags=re.M)
    assert count == 1
    return text


def refusal(tmp_path, text: str) -> str:
    """What is said of a file with this text; it must be one line that names the file."""
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        PimSpec.load(path)
    assert caught.value.exit_code == 3
    message = str(caught.value)
    assert "\n" not in message and "mine" in message
    return message


BROKEN = [
    ("nFAW", "nFAV = 17", "constraint 1 names latency 'nFAW', which [timing] lacks; did you mean nFAV"),
    ("nREFI", "", "missing field 'timing.nREFI': interval of refreshes"),
    ("nREFI", "nREFI = 1900\nnFOO = 3", "unknown field 'timing.nFOO'; "),
    ("nREFI", "nREFI = 1900\nnREFi = 3", "unknown field 'timing.nREFi'; did you mean nREFI"),
    ("nREFI", "nREFI = 300", "field 'timing.nREFI': 300 leaves no time to compute"),
    ("nREFI", "nREFI = 0", "field 'timing.nREFI': 0 is not above zero"),
    ("nBL", "nBL = 0", "field 'timing.nBL': 0 is not above zero"),
    (
        "nBL",
        "nBL = { value = 2, origin = 'me' }",
        "field 'timing'.nBL: {'value': 2, 'origin': 'me'} is not a int",
    ),
    ("add_pj", "", "missing field 'energy.add_pj': per addition"),
    ("add_pj", "add_pj = 0.4\nad_pj = 1", "unknown field 'energy.ad_pj'; did you mean add_pj"),
    ("add_pj", "add_pj = nan", "field 'energy.add_pj': nan is not a finite number"),
    ("dtypes", "dtypes = []", "field 'dtypes' is empty"),
    ("dtypes", "dtypes = 'fp16'", "field 'dtypes': 'fp16' is not a"),
    ("column_bytes", "column_bytes = 30", "field 'column_bytes': 30 holds no whole number of fp32"),
    ("result_lanes", "result_lanes = 3", "field 'result_lanes': 3 does not divide the 16 fp16 of a column"),
    ("buffer_columns", "buffer_columns = 0", "field 'buffer_columns': 0 is not"),
    ("buffer_columns", "buffer_columns = 64", "field 'buffer_columns': 64 is more than the 32 columns"),
    ("buffer_columns", "buffer_columns = 12", "field 'buffer_columns': 12 does not divide the 32 columns"),
    (
        "columns_per_row",
        "columns_per_row = 10000\nrow_base = 0",
        "field 'buffer_columns': 32 does not divide the 10000 columns",
    ),
    ("buffer_columns", "buffer_column = 8", "unknown field 'buffer_column'; did you mean buffer_columns"),
    ("buffer_columns", "", "missing field buffer_columns"),
    ("gangs", "gangs = 257", "field 'gangs': 257 is more than 256"),
    ("gangs", f"gangs = {10**400}", "is not below 2147483648"),
    ("tCK_ps", f"tCK_ps = {10**400}", "is not below 2147483648"),
    ("tCK_ps", f"tCK_ps = {'9' * 5000}", "not a TOML file"),
    ("rows_per_bank", "rows_per_bank = 8\nrow_base = 8", "field 'row_base': 8 leaves none of 8 rows"),
    ("not_modelled", "not_modelled = 3\nother = [", "field"),
    ("before", "before = []", "constraint 1: field 'before' names no command"),
    ("after", "after = ['GACT']", "constraint 1: command 'GACT' is none of GWRITE, G_ACT"),
]


@pytest.mark.parametrize(("field", "line", "message"), BROKEN)
def test_a_broken_file_says_what_is_wrong(tmp_path, field, line, message):
    assert message in refusal(tmp_path, with_line(field, line))


def test_short_buffers_are_bounded():
    """By what a program takes; as long as a row they may be longer."""
    newton = DEVICES["newton-gddr6"]
    assert replace(newton, columns_per_row=8192, buffer_columns=8192).elements_per_row("fp16") == 2**17
    with pytest.raises(ValueError, match=r"buffer_columns': 5000; .* at most 4096 columns"):
        replace(newton, columns_per_row=10000, buffer_columns=5000)


def test_a_repeated_constraint(tmp_path):
    twice = '\n[[constraints]]\nlevel = "channel"\nbefore = ["COMP"]\nafter = ["COMP"]\nlatency = "nCCDS"\n'
    text = NEWTON.replace("\n[energy]", twice + "\n[energy]")
    assert "constraint 25 repeats constraint 8" in refusal(tmp_path, text)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from(NUMBERS),
    st.one_of(
        st.sampled_from(("-1", "nan", "inf", "-inf", "true", "''", "[]", "{}", "[1]", "1979-05-27", "1e400")),
        st.integers(max_value=-1).map(str),
        st.integers(min_value=2**31).map(str),
        st.text("abcxyz _-", max_size=9).map(lambda text: f'"{text}"'),
    ),
)
def test_a_number_that_is_none_is_refused_by_name(tmp_path_factory, field, value):
    """Wherever it stands, bare or with a source."""
    for line in (f"{field} = {value}", f"{field} = {{ value = {value}, source = 'me' }}"):
        assert field in refusal(tmp_path_factory.mktemp("spec"), with_line(field, line))


toml_values = st.recursive(
    st.sampled_from(("1", "-7", "0", "2.5", "nan", "true", "'x'", "'fp16'", "'COMP'", "1979-05-27T07:32:00")),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.dictionaries(st.sampled_from(("value", "source", "level", "x")), inner, max_size=3).map(
            lambda table: "{" + ", ".join(f"{key} = {item}" for key, item in table.items()) + "}"
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=examples(80), deadline=None)
@given(st.sampled_from([*FIELDS, "description", "level", "before", "latency"]), toml_values)
def test_whatever_stands_for_a_value_loads_or_is_refused(tmp_path_factory, field, value):
    """In one line, never with another error."""
    path = tmp_path_factory.mktemp("spec") / "mine.toml"
    path.write_text(with_line(field, f"{field} = {value}"), encoding="utf-8")
    try:
        assert PimSpec.load(path).name == "mine"
    except SpecError as error:
        assert "mine" in str(error) and "\n" not in str(error)


def test_deep_nesting_is_refused(tmp_path):
    assert "not a TOML file" in refusal(tmp_path, "a = " + "[" * 100_000)


@pytest.mark.parametrize("field", NEEDED)
def test_a_field_left_out_is_named(tmp_path, field):
    assert field in refusal(tmp_path, with_line(field, ""))


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_a_file_cut_short_never_loads_and_never_crashes(tmp_path_factory, data):
    """Up to the last energy, which a shorter file lacks."""
    end = data.draw(st.integers(0, NEWTON.rindex("io_pj_per_bit") - 1))
    refusal(tmp_path_factory.mktemp("spec"), NEWTON[:end])
