"""What `pimflow serve-sim` prints and refuses, and whether its step costs are those of plans."""

import numpy as np
import pytest
from command_line import error_line, run, run_json
from hypothesis import given
from hypothesis import strategies as st

import pimflow as package
from pimflow.commands.serve.options import ServeOptions
from pimflow.commands.serve.report import Percentiles
from pimflow.commands.serve.request_traces import COLUMNS, read_trace, requests_from_options
from pimflow.commands.serve.step_grid import StepGrid
from pimflow.errors import TraceError, UsageError

HEAD = ",".join(COLUMNS)
ROWS = (
    "2023-11-16 18:15:46.6805900,374,44",
    "2023-11-16 18:15:50.9951690,96,109",
    "2023-11-16 18:15:48,179,5",
    "2023-11-16 18:15:51.39,91,1",
)
SMALL = ("--max-batch", "4", "--chunk-tokens", "64", "--context", "256")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "azure.csv"
    path.write_text("\n".join([HEAD, *ROWS, ""]))
    return path


DRAWN = ("serve-sim --quiet", "tiny-lm", "--rate", "2000", "--requests", "300", "--lengths", "60,20", *SMALL)


def test_the_same_seed_gives_the_same_bytes(capsys):
    first, second = (run(capsys, *DRAWN) for _ in range(2))
    assert first == second and first[0] == 0
    assert run(capsys, *DRAWN, "--seed", "1") != first


def test_each_figure_stands_beside_that_of_the_gpu_alone(capsys):
    report = run_json(capsys, *DRAWN)
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
    assert requests.arrival_ps.tolist() == [
        0,
        1_319_410_000_000,
        4_314_579_000_000,
        4_709_410_000_000,
    ]
    assert requests.prompt_tokens.tolist() == [374, 179, 96, 91]
    assert requests.new_tokens.tolist() == [44, 5, 109, 1]
    assert len(read_trace(trace, 2)) == 2


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
    ],
)
def test_what_means_nothing_is_one_line(capsys, arguments, message):
    assert message in error_line(capsys, 2, "serve-sim tiny-lm", *arguments)


def test_caches_beyond_the_room_need_an_assumption(capsys):
    arguments = ("--rate", "9", "--requests", "9", "--lengths", "9,9", *SMALL, "--cache-tokens", "100000000")
    error = error_line(capsys, 4, "serve-sim tiny-lm --quiet", *arguments)
    assert "--assume-room" in error
    report = run_json(capsys, "serve-sim tiny-lm", *arguments, "--assume-room")
    assert report["assumes_room"] and report["held_bytes"] > report["room_bytes"]


@pytest.mark.long
def test_a_request_that_never_fits_is_refused_by_its_number(tmp_path, trace):
    serving = package.serve_sim("tiny-lm", trace=trace, max_batch=4, chunk_tokens=64, context=256)
    assert serving.requests == 3 and serving.refused == 1
    assert serving.refusals[0].request == 1 and "374 tokens" in serving.refusals[0].reason
    assert serving.planned.goodput_share <= 3 / 4


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
    for percentiles in (
        Percentiles.from_ps(sorted_values, counts),
        Percentiles.from_ps(np.sort(values)),
    ):
        assert [percentiles.p50, percentiles.p90, percentiles.p99] == expected.tolist()
    assert Percentiles.from_ps(np.array([])) is None


def curve(size, length):
    """Costs with a knee at 12 and steps of 3 %, as tiles of kernels have."""
    return np.array([100 + 9 * min(size, 12) + (0.3 + size / 40) * length, 50 + 0.01 * length**1.3 + size])


def test_a_grid_is_refined_until_points_between_are_within_the_tolerance():
    grid = StepGrid(cost=curve, sizes=[1, 32], lengths=[2, 2048])
    coarse = max(grid.error(size, length) for size in range(1, 33) for length in range(2, 2049, 93))
    grid.refine(0.03)
    fine = max(grid.error(size, length) for size in range(1, 33) for length in range(2, 2049, 93))
    assert coarse > 0.1 and fine <= 0.045 and 0 < grid.max_error <= 0.03
    assert not any(size in grid.sizes and length in grid.lengths for size, length in grid.held_out)
    exact = [curve(size, length) for size in grid.sizes for length in grid.lengths]
    pairs = [(size, length) for size in grid.sizes for length in grid.lengths]
    assert np.allclose(grid.values(*zip(*pairs)), exact)
