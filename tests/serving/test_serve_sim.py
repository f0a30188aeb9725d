"""What `pimflow serve-sim` prints and refuses, and whether its step costs are those of plans."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import error_line, run, run_json
from hypothesis import given
from hypothesis import strategies as st

import pimflow as package
from pimflow import zoo
from pimflow.commands.generate.decoding import Lengths, StepRequest
from pimflow.commands.serve.options import ServeOptions
from pimflow.commands.serve.report import Percentiles
from pimflow.commands.serve.request_traces import COLUMNS, read_trace, requests_from_options
from pimflow.commands.serve.step_grid import StepGrid
from pimflow.commands.serve.step_table import StepTable
from pimflow.commands.shared.search import SearchRequest
from pimflow.errors import ProfileError, TraceError, UsageError
from pimflow.zoo.language import graph as decoder_graph

HEAD = ",".join(COLUMNS)
ROWS = (
    "2023-11-16 18:15:46.6805900,374,44",
    "2023-11-16 18:15:50.9951690,96,109",
    "2023-11-16 18:15:48,179,5",
    "2023-11-16 18:15:51.39,91,1",
)
SMALL = ("--max-batch", "3", "--chunk-tokens", "16", "--context", "64")
DRAWN = ("serve-sim --quiet", "tiny-lm", "--rate", "2000", "--requests", "300", "--lengths", "20,12", *SMALL)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "azure.csv"
    path.write_text("\n".join([HEAD, *ROWS, ""]))
    return path


@pytest.fixture(scope="module")
def searched():
    """A server whose steps are searched, with the report of it."""
    options = {"rate": 2000.0, "requests": 300, "lengths": (20, 12)}
    return package.serve_sim("tiny-lm", max_batch=3, chunk_tokens=16, context=64, random_points=3, **options)


@pytest.fixture(scope="module")
def steps(searched, tmp_path_factory):
    """The file of its table of steps: all other servers here search nothing."""
    path = tmp_path_factory.mktemp("steps") / "steps.json"
    searched.steps.save(path)
    return str(path)


@pytest.mark.long
def test_a_stored_table_serves_the_same_bytes_as_the_searched_one(capsys, searched, steps):
    first, second = (run(capsys, *DRAWN, "--steps", steps, "--json") for _ in range(2))
    assert first == second and first[0] == 0
    assert json.loads(first[1]) == searched.to_json()
    assert run(capsys, *DRAWN, "--steps", steps, "--json", "--seed", "1") != first


def test_each_figure_stands_beside_that_of_the_gpu_alone(searched):
    report = searched.to_json()
    for name in ("ttft_ns", "tpot_ns", "itl_ns"):
        for key in (name, f"{name}_gpu_only"):
            figures = report[key]
            assert list(figures) == ["p50", "p90", "p99"]
            assert 0 < figures["p50"] <= figures["p90"] <= figures["p99"]
    assert report["tpot_ns"]["p50"] < report["tpot_ns_gpu_only"]["p50"]
    for name in ("tokens_per_s", "goodput_per_s", "energy_per_token_pj", "mean_cache_share"):
        assert report[name] > 0 and report[f"{name}_gpu_only"] > 0
    assert report["requests"] + report["refused"] == 300
    assert report["step_table"]["max_relative_error"] <= 0.03
    assert report["step_table"]["held_out_points"] > 0
    for word in ("first token, p99", "goodput", "energy a new token", "caches in use, most", "held-out"):
        assert word in searched.text()


def test_a_model_with_a_published_baseline_has_a_third_server(searched):
    """Its decoding is that of bytes alone; a small model has none."""
    assert searched.gpu_published is None and "tpot_ns_gpu_published" not in searched.to_json()
    with_baseline = replace(searched, gpu_published=searched.gpu_only, gpu_published_source="half (a page)")
    report = with_baseline.to_json()
    assert report["goodput_per_s_gpu_published"] == report["goodput_per_s_gpu_only"]
    assert "energy_per_token_pj_gpu_published" not in report
    assert "best GPU   GPU alone" in with_baseline.text() and "half (a page)" in with_baseline.text()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("gpt-2",), "is of another model, 'tiny-lm'"),
        (("tiny-lm", "--pim", "aim-gddr6"), "is of another system or goal"),
        (("tiny-lm", "--objective", "energy"), "is of another system or goal"),
        (("tiny-lm", "--context", "128"), "has --context 64, not 128"),
        (("tiny-lm", "--max-batch", "5"), "has --max-batch 3, not 5"),
        (("tiny-lm", "--chunk-tokens", "32"), "has --chunk-tokens 16, not 32"),
    ],
)
def test_a_table_of_something_else_is_one_line(capsys, steps, arguments, message):
    model, *others = arguments
    limits = {"--max-batch": "3", "--chunk-tokens": "16", **dict(zip(others[0::2], others[1::2]))}
    options = [text for pair in limits.items() for text in pair]
    drawn = ("--rate", "9", "--requests", "9", "--lengths", "9,9")
    assert message in error_line(capsys, 3, "serve-sim", model, *drawn, *options, "--steps", steps)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.pop("decode"),
        lambda table: table.update(version="pimflow-step-table/0"),
        lambda table: table["decode"].update(sizes=[1, 1, 3]),
        lambda table: table["decode"]["figures"].pop(),
        lambda table: table["chunks"]["figures"][0][0].pop(),
        lambda table: table["chunks"]["figures"][0].__setitem__(0, [1.0, 2.0, float("nan"), 1.0]),
        lambda table: table["chunks"]["figures"][0].__setitem__(0, [1.0, 2.0, 0.0, 1.0]),
        lambda table: table.update(context="64"),
        lambda table: table.update(max_batch=2),
    ],
)
def test_a_damaged_table_is_refused(steps, tmp_path, change):
    table = json.loads(Path(steps).read_text())
    change(table)
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(table))
    with pytest.raises(ProfileError, match="is no table of steps") as caught:
        StepTable.from_file(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"[" * 100_000, b"\xff\x00", b"3", b'{"version": 1}'])
def test_what_is_no_table_is_refused(tmp_path, data):
    path = tmp_path / "steps.json"
    path.write_bytes(data)
    with pytest.raises(ProfileError, match="is no table of steps"):
        StepTable.from_file(path)


@pytest.mark.long
def test_matrices_of_zeros_place_as_drawn_ones():
    decoder = replace(zoo.decoder("tiny-lm"), trained=False, layers=1, vocabulary=64)
    request = SearchRequest.from_arguments(package.system()).validate()
    placed = []
    for blank in (zoo.blank_matrices, lambda graph: graph):
        graph = blank(decoder_graph.block_graph(decoder, 32))
        result = StepRequest(graph, request, Lengths(attended=32, places=32)).place()[2]
        placed.append((result.plan.choices, result.evaluation.latency_ns, result.evaluation.energy_pj))
    assert placed[0] == placed[1]


@pytest.mark.long
def test_a_lone_request_takes_the_time_of_the_plans_that_serve_it(tmp_path):
    """Oracle: `generate` times the same steps by itself."""
    path = tmp_path / "one.csv"
    path.write_text(f"{HEAD}\n2023-11-16 18:15:46,64,40\n")
    serving = package.serve_sim("tiny-lm", trace=path, max_batch=2, chunk_tokens=64, context=104)
    generation = package.generate("tiny-lm", tokens=range(64), n=40, context=104)
    assert serving.planned.ttft_ns.p99 == pytest.approx(generation.ttft_ns, rel=0.03)
    assert serving.gpu_only.ttft_ns.p99 == pytest.approx(generation.ttft_ns_gpu_only, rel=0.03)
    assert serving.planned.tpot_ns.p50 == pytest.approx(generation.tpot_ns, rel=0.03)
    assert serving.gpu_only.tpot_ns.p50 == pytest.approx(generation.tpot_ns_gpu_only, rel=0.03)


def test_the_columns_are_read_as_they_are_published(trace):
    requests = read_trace(trace)
    assert requests.arrival_ps.tolist() == [0, 1_319_410_000_000, 4_314_579_000_000, 4_709_410_000_000]
    assert requests.prompt_tokens.tolist() == [374, 179, 96, 91]
    assert requests.new_tokens.tolist() == [44, 5, 109, 1]
    assert len(read_trace(trace, 2)) == 2


def test_files_are_read_as_they_are_published(tmp_path):
    """Those of 2023 have no line end behind the last line and CRLF before, those of 2024 a time zone."""
    path = tmp_path / "code.csv"
    first = "2023-11-16 18:17:03.9799600,4808,10"
    path.write_bytes(f"{HEAD}\r\n{first}\r\n2023-11-16 19:14:19.9280160,549,173".encode())
    requests = read_trace(path)
    assert requests.arrival_ps.tolist() == [0, 3_435_948_056_000_000]
    assert requests.prompt_tokens.tolist() == [4808, 549] and requests.new_tokens.tolist() == [10, 173]
    path.write_text(f"{HEAD}\n2024-05-18 23:59:59.925224+00:00,9,2\n2024-05-18 23:59:59.995460+00:00,8,1\n")
    assert read_trace(path).arrival_ps.tolist() == [0, 70_236_000_000]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "has no request"),
        (HEAD, "has no request"),
        ("a,b\n1,2", ":1: the header is not TIMESTAMP"),
        (f"{HEAD}\n2023-11-16 18:15:46,374", ":2: has 2 fields"),
        (f"{HEAD}\n2023-11-16 18:15:46,374,0", "GeneratedTokens is '0'"),
        (f"{HEAD}\n2023-11-16 18:15:46,-1,4", "ContextTokens is '-1'"),
        (f"{HEAD}\n2023-11-16 18:15:46,1e9,4", "ContextTokens is '1e9'"),
        (f"{HEAD}\n2023-11-16 18:15:46,{'9' * 3000},4", "ContextTokens is '9999"),
        (f"{HEAD}\n2023-11-16 18:15:46,{'9' * 5000},4", "longer than 4096"),
        (f"{HEAD}\nyesterday,3,4", ":2: TIMESTAMP is 'yesterday'"),
        (f"{HEAD}\n2023-11-16 18:15:46+01:00,3,4", "TIMESTAMP is"),
        (f"{HEAD}\n2023-11-16 18:15:46.12345678,3,4", "TIMESTAMP is"),
        (f"{HEAD}\n\x1b[31m,3,4", r"TIMESTAMP is '\\x1b\[31m'"),
        ("\0\0\0", ":1: the header is not"),
        (f"{HEAD}\n\0,1,1", "TIMESTAMP is"),
    ],
)
def test_a_wrong_trace_is_one_line(capsys, tmp_path, text, message):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)
    error_line(capsys, 3, "serve-sim tiny-lm --trace", path)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xff\xfe\x00" * 50)
    with pytest.raises(TraceError, match="UTF-8"):
        read_trace(path)
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.csv")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "give requests"),
        (("--rate", "3", "--requests", "4"), "give requests"),
        (("--rate", "0", "--requests", "4", "--lengths", "3,4"), "--rate 0"),
        (("--rate", "nan", "--requests", "4", "--lengths", "3,4"), "--rate nan"),
        (("--rate", "1", "--requests", "-4", "--lengths", "3,4"), "--requests -4"),
        (("--rate", "1", "--requests", "4", "--lengths", "3"), "--lengths 3"),
        (("--rate", "1", "--requests", "4", "--lengths", "0,4"), "--lengths"),
        (("--rate", "1", "--requests", "4", "--lengths", "3,4", "--seed", "-1"), "--seed -1"),
        (("--rate", "1", "--requests", "99999999", "--lengths", "3,4"), "--requests 99999999"),
        (("--rate", "1", "--requests", "9", "--lengths", "3,4", "--context", "9999"), "made for 1024"),
        (("--rate", "1", "--requests", "9", "--lengths", "900,900", "--context", "2"), "no request has"),
        (("--rate", "1", "--requests", "9", "--lengths", "3,4", "--max-batch", "10000000"), "table"),
        (("--rate", "-1", "--requests", "4", "--lengths", "3,4"), "--rate -1"),
        (("--rate", "inf", "--requests", "4", "--lengths", "3,4"), "--rate inf"),
        (("--rate", "1", "--requests", "4", "--lengths", "nan,4"), "--lengths nan,4"),
        (("--rate", "1", "--requests", "4", "--lengths", "3,4", "--tpot-limit", "nan"), "--tpot-limit nan"),
        (("--rate", "1", "--requests", "10000000", "--lengths", "3,4"), "--requests 10000000: give 4000000"),
        (("--rate", "1", "--requests", "4000000", "--lengths", "300,40"), "tokens; give at most"),
        (("--rate", "1", "--requests", "4", "--lengths", "3,4", "--random-points", "-1"), "--random-points"),
        (
            ("--rate", "1", "--requests", "4", "--lengths", "3,4", "--steps", "x", "--random-points", "1"),
            "nothing is searched with --steps",
        ),
    ],
)
def test_what_means_nothing_is_one_line(capsys, arguments, message):
    assert message in error_line(capsys, 2, "serve-sim tiny-lm", *arguments)


def test_caches_beyond_the_room_need_an_assumption(capsys, steps):
    arguments = ("--rate", "9", "--requests", "9", "--lengths", "9,9", *SMALL, "--steps", steps)
    arguments = (*arguments, "--cache-tokens", "100000000")
    error = error_line(capsys, 4, "serve-sim tiny-lm --quiet", *arguments)
    assert "--assume-room" in error
    report = run_json(capsys, "serve-sim tiny-lm", *arguments, "--assume-room")
    assert report["assumes_room"] and report["held_bytes"] > report["room_bytes"]


def test_a_request_that_never_fits_is_refused_by_its_number(capsys, steps, tmp_path):
    path = tmp_path / "mixed.csv"
    rows = ("2023-11-16 18:15:46,374,44", "2023-11-16 18:15:47,40,9", "2023-11-16 18:15:48,50,5")
    path.write_text("\n".join([HEAD, *rows, ""]))
    report = run_json(capsys, "serve-sim tiny-lm --quiet --trace", path, *SMALL, "--steps", steps)
    assert report["requests"] == 2 and report["refused"] == 1
    assert report["refusals"][0]["request"] == 1 and "374 tokens" in report["refusals"][0]["reason"]
    assert report["goodput_share"] <= 2 / 3


def test_a_trace_can_have_another_rate(trace):
    requests = requests_from_options(ServeOptions(trace=trace, rate=5.0, seed=3).validate())
    assert requests.prompt_tokens.tolist() == [374, 179, 96, 91]
    assert requests.arrival_ps.tolist() != read_trace(trace).arrival_ps.tolist()


def test_drawn_requests_have_their_rate_and_lengths():
    options = ServeOptions(rate=4.0, requests=20_000, lengths=(300, 50)).validate()
    requests = requests_from_options(options)
    assert 20_000 / (requests.arrival_ps[-1] / 1e12) == pytest.approx(4, rel=0.03)
    assert requests.prompt_tokens.mean() == pytest.approx(300, rel=0.03)
    assert requests.new_tokens.mean() == pytest.approx(50, rel=0.03)
    with pytest.raises(UsageError, match="tokens; give at most"):
        requests_from_options(ServeOptions(rate=1.0, requests=10**6, lengths=(10_000, 5)))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=30))
def test_percentiles_are_values_of_the_nearest_rank(pairs):
    values = np.repeat(*map(np.array, zip(*pairs))) * 1000
    expected = np.percentile(values, [50, 90, 99], method="inverted_cdf") / 1000
    sorted_values, counts = np.unique(values, return_counts=True)
    for percentiles in (Percentiles.from_ps(sorted_values, counts), Percentiles.from_ps(np.sort(values))):
        assert [percentiles.p50, percentiles.p90, percentiles.p99] == expected.tolist()
    assert Percentiles.from_ps(np.array([])) is None


def curve(size, length):
    """Costs with a knee at 12 and steps of 3 %, as tiles of kernels have."""
    return np.array([100 + 9 * min(size, 12) + (0.3 + size / 40) * length, 50 + 0.01 * length**1.3 + size])


def curve_with_jumps(size, length):
    """Costs that jump after each tile of 32, as of a GPU's kernels."""
    return np.array([100.0 * -(-size // 32) + 0.4 * size + 0.01 * size * length, 50.0 + size])


def test_a_grid_finds_jumps_after_tiles_without_halving_its_way_to_them():
    grid = StepGrid(cost=curve_with_jumps, sizes=[16, 256], lengths=[0, 8], tile=32)
    grid.refine()
    assert {32, 33, 224, 225} <= set(grid.sizes) and len(grid.sizes) <= 2 + 2 * 7
    assert max(grid.error(size, 3) for size in range(16, 257)) <= 0.03


def test_a_grid_learns_from_a_random_point_that_it_misses():
    grid = StepGrid(cost=lambda size, n: curve(size, n) + (n == 700) * 50, sizes=[1], lengths=[2, 2048])
    grid.refine()
    assert 700 not in grid.lengths
    grid.hold_out([(1, 1900), (1, 700)])
    assert 700 in grid.lengths and (1, 700) not in grid.held_out and (1, 1900) in grid.held_out


def test_a_grid_is_refined_until_points_between_are_within_the_tolerance():
    grid = StepGrid(cost=curve, sizes=[1, 32], lengths=[2, 2048])
    coarse = max(grid.error(size, length) for size in range(1, 33) for length in range(2, 2049, 93))
    grid.refine(0.03)
    fine = max(grid.error(size, length) for size in range(1, 33) for length in range(2, 2049, 93))
    assert coarse > 0.1 and fine <= 0.045 and 0 < max(grid.held_out.values()) <= 0.03
    assert not any(size in grid.sizes and length in grid.lengths for size, length in grid.held_out)
    exact = [curve(size, length) for size in grid.sizes for length in grid.lengths]
    pairs = [(size, length) for size in grid.sizes for length in grid.lengths]
    assert np.allclose(grid.table().values(*zip(*pairs)), exact)
