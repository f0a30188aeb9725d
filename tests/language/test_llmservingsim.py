"""Is the line that LLMServingSim gets of a device that of our own times, and in its table's form?"""

import csv
import json

import pytest
from command_line import error_line
from hypothesis import given
from hypothesis import strategies as st

from pimflow import Profiling, system
from pimflow.commands.generate.export import llmservingsim
from pimflow.commands.main import main
from pimflow.errors import UsageError
from pimflow.host.result_cache import ResultCache
from pimflow.simulators.exports.llmservingsim import AttentionLine

MODEL = "tiny-lm"


def estimate_with_linear(base, n_head, kv_head, head_dim, tokens, channel_split):
    """What the simulator does with an entry of its table, worked out from its description."""
    slope = base["slope"] * (n_head / kv_head) / (32 / 8)
    intercept = base["intercept"] * (n_head * head_dim) / (32 * 128)
    return (slope * tokens + intercept) / channel_split


@pytest.fixture(scope="module", params=["newton-gddr6", "aim-gddr6"])
def exported(request, tmp_path_factory):
    """The file that the command writes, and the device."""
    path = tmp_path_factory.mktemp("export") / "line.json"
    command = ["export", "llmservingsim", MODEL, "--pim", request.param, "-o", str(path), "--quiet"]
    assert main([*command, "--cache", str(path.with_name("cache"))]) == 0
    return json.loads(path.read_text()), request.param, path.with_name("cache")


@pytest.mark.long
def test_the_simulator_gets_our_times_within_the_stated_error(exported):
    table, *_ = exported
    (entry,), model = table["attn_model"].values(), table["for"]
    sizes = (model["n_head"], model["kv_head"], model["head_dim"])
    errors = [
        estimate_with_linear(entry, *sizes, int(tokens), model["channel_split"]) / time_ns - 1
        for tokens, time_ns in table["points_ns"].items()
    ]
    assert max(map(abs, errors)) == pytest.approx(table["line"]["max_relative_error"])
    assert table["line"]["max_relative_error"] < 0.3 and len(errors) >= 5


@pytest.mark.long
def test_the_times_are_those_of_the_device(exported):
    """Of every channel that the request has, for other lengths too; and longer caches take longer."""
    table, pim, cache = exported
    sizes = {"n_head": 6, "kv_head": 2, "head_dim": 32, "channel_split": 2}
    assert table["for"] == {"model": MODEL, "dtype": "fp16", **sizes}
    assert list(table["attn_model"]) == [f"{pim}_pim"] and len(table["made"]) == 3
    times_ns = list(table["points_ns"].values())
    assert times_ns == sorted(times_ns)
    profiling = Profiling(cache=ResultCache(cache))
    between = llmservingsim(MODEL, system(pim=pim), lengths=(700, 2048), profiling=profiling).line.points[700]
    line, error = table["line"], table["line"]["max_relative_error"]
    assert line["slope_ns"] * 700 + line["intercept_ns"] == pytest.approx(between, rel=error + 0.05)


@given(
    slope=st.floats(0.1, 1e3),
    intercept=st.floats(1.0, 1e5),
    group=st.integers(1, 8),
    kv_heads=st.integers(1, 32),
    size=st.sampled_from([32, 64, 128]),
    split=st.integers(1, 32),
)
def test_a_line_is_found_again_through_the_scaling(slope, intercept, group, kv_heads, size, split):
    times = {tokens: slope * tokens + intercept for tokens in (128, 512, 2048)}
    line = AttentionLine.fit(times)
    assert line.residual < 1e-6
    heads = (group * kv_heads, kv_heads, size)
    entry = line.coefficients(*heads, split)
    for tokens, time_ns in times.items():
        assert estimate_with_linear(entry, *heads, tokens, split) == pytest.approx(time_ns, rel=1e-5)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["vllm", MODEL], "unknown tool 'vllm'"),
        (["llmservingsim", "toy"], "'toy' is no language model"),
        (["llmservingsim", MODEL, "--pim-channels", "0"], "no PIM channels; give --pim-channels 1 or more"),
    ],
)
def test_what_cannot_be_exported_is_refused_in_a_line(argv, says, capsys):
    assert says in error_line(capsys, 2, "export", *argv, "--quiet")


def test_a_line_needs_two_lengths():
    with pytest.raises(UsageError, match="two lengths"):
        llmservingsim(MODEL, lengths=(128, 128))


def test_the_table_has_a_source_for_each_row_and_one_with_the_line(exported):
    """Over requests, lengths and heads; more of either never takes less time."""
    table, pim, _ = exported
    rows = table["table"]
    assert {row["batch"] for row in rows} == {1, 2, 4, 8, 16} and {row["heads"] for row in rows} == {6, 3}
    assert all(pim in row["source"] and "strict" in row["source"] and row["ns"] > 0 for row in rows)
    alone = {str(row["tokens"]): row["ns"] for row in rows if (row["batch"], row["heads"]) == (1, 6)}
    assert alone == table["points_ns"]
    times = {(row["batch"], row["heads"], row["tokens"]): row["ns"] for row in rows}
    for (batch, heads, tokens), time_ns in times.items():
        longer = [value for (b, h, t), value in times.items() if (b, h) == (batch, heads) and t > tokens]
        assert all(value >= time_ns for value in longer)
        assert batch == 16 or times[2 * batch, heads, tokens] >= time_ns


@pytest.mark.long
def test_the_table_is_the_attention_csv_of_each_number_of_devices(exported, tmp_path, capsys):
    table, pim, cache = exported
    path = tmp_path / "attention.csv"
    command = ["export", "llmservingsim", MODEL, "--pim", pim, "-o", str(path), "--quiet"]
    command += ["--cache", str(cache)]
    assert main([*command, "--devices", "2"]) == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    expected = [row for row in table["table"] if row["kv_heads"] == 1]
    assert [(int(row["n_decode"]), int(row["kv_decode"])) for row in rows] == [
        (row["batch"], row["tokens"]) for row in expected
    ]
    assert [float(r["time_us"]) * 1e3 for r in rows] == pytest.approx([r["ns"] for r in expected], abs=0.06)
    assert all("simulated" in row["source"] and row["prefill_chunk"] == "0" for row in rows)
    capsys.readouterr()
    assert "shared by 1, 2" in error_line(capsys, 2, *command, "--devices", "3")
    no_csv = [*command, "-o", str(tmp_path / "x.json"), "--devices", "2"]
    assert "is of a .csv file" in error_line(capsys, 2, *no_csv)
