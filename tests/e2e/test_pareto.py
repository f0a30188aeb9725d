"""Is a front one: no plan beaten, each as it is said to be, in its own file?"""

import json

import pytest
from command_line import error_line, run_json

import pimflow
from pimflow.commands.main import main
from pimflow.commands.shared.front import ParetoPoint, pareto_front
from pimflow.commands.shared.search import SearchRequest
from pimflow.core.plan import Plan
from pimflow.errors import UsageError

OPTIONS = ["--fuse", "--quiet"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A compiled directory with a front, what the command printed, and the picture."""
    folder = tmp_path_factory.mktemp("front")
    out, picture = folder / "toy", folder / "front.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda text, **_: printed.append(text))
        printed = []
        files = ["-o", str(out), "--plot", str(picture), "--conventions", "none"]
        assert main(["compile", "toy", *OPTIONS, "--pareto", "5", *files]) == 0
    return out, printed[0], picture


def rows(out):
    return json.loads((out / "report.json").read_text())["front"]


@pytest.mark.long
def test_no_plan_is_beaten(compiled):
    figures = [(row["latency_ns"], row["energy_pj"], row["memory_bytes"]) for row in rows(compiled[0])]
    assert 2 <= len(figures) <= 5
    for point in figures:
        assert not any(p != point and all(a <= b for a, b in zip(p, point)) for p in figures)
    assert figures == sorted(figures)


@pytest.mark.long
def test_the_best_in_each_figure_is_on_the_front(compiled):
    front_rows = rows(compiled[0])
    for figure, objective in (("latency_ns", "latency"), ("energy_pj", "energy")):
        best = pimflow.search("toy", fuse=True, objective=objective).evaluation
        assert min(row[figure] for row in front_rows) == pytest.approx(getattr(best, figure), rel=1e-6)


def test_each_plan_applies_and_takes_what_is_said(compiled, capsys):
    """The pool is the one that is built."""
    for row in rows(compiled[0]):
        applied = run_json(capsys, "compile toy", *OPTIONS, "--plan", row["plan"], "--conventions", "none")
        assert applied["memory"]["pool_bytes"] == row["memory_bytes"]
        assert applied["latency_ns"] == pytest.approx(row["latency_ns"])
        assert applied["energy_pj"] == pytest.approx(row["energy_pj"])
        assert applied["verified"]


def test_what_is_shown_and_drawn(compiled):
    out, printed, picture = compiled
    front_rows = rows(out)
    assert f"front     {len(front_rows)} plans, none as good as another" in printed
    assert all(row["plan"] in printed for row in front_rows)
    assert '"title":"energy, mJ"' in picture.read_text()


@pytest.mark.long
def test_without_a_directory_the_plans_stand_in_the_report():
    points = pimflow.pareto("toy", points=3, fuse=True)
    assert all(isinstance(point.plan, Plan) and point.weight_bytes > 0 for point in points)
    report = pimflow.compile("toy", fuse=True, pareto=3, conventions="none").report.to_json()
    assert [Plan.from_json(json.dumps(row["plan"])) for row in report["front"]] == [p.plan for p in points]
    assert "front" not in pimflow.compile("toy", conventions="none").report.to_json()


@pytest.mark.long
def test_plans_keep_to_the_bounds():
    slowest = max(point.latency_ns for point in pimflow.pareto("toy", points=3, fuse=True))
    points = pimflow.pareto("toy", points=3, fuse=True, max_latency_ns=slowest - 1)
    assert points and all(point.latency_ns < slowest for point in points)


@pytest.mark.long
def test_a_front_has_layers_that_suit_each_figure():
    """With ``where=pays`` the fastest plan keeps other layers than the one with the smallest pool."""
    options = {"decompose": "tucker:0.1:0.5,where=pays", "modes": "gpu,pim"}
    points = pimflow.pareto("toy", points=3, **options)
    for number, objective in enumerate(("latency", "energy", "memory")):
        question = SearchRequest.from_arguments(None, objective=objective, **options).validate()
        prepared = question.prepare_network(pimflow.commands.shared.prepare.load("toy", question.options))
        search_result, choice = question.place_network(prepared)
        evaluation = search_result.evaluation
        best = (evaluation.latency_ns, evaluation.energy_pj, choice and choice.pool_bytes)[number]
        assert min(point.figures[number] for point in points) <= best * (1 + 1e-9)
    layers = {frozenset(name for c in p.plan.choices for name in c.regions) for p in points}
    assert len(layers) > 1
    for point in points:
        question = SearchRequest.from_arguments(
            None, plan=point.plan, decompose=options["decompose"]
        ).validate()
        _, search_result = question.find_plan(pimflow.commands.shared.prepare.load("toy", question.options))
        assert search_result.evaluation.latency_ns == pytest.approx(point.latency_ns)


@pytest.mark.parametrize(("points", "says"), [(1, "at least 2 points"), (True, "number of points")])
def test_what_is_no_front_is_refused(points, says):
    with pytest.raises(UsageError, match=says):
        pimflow.pareto("no-such-network", points=points)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--pareto", "1"], "a front has at least 2 points"),
        (["--plot", "x.svg"], "draws the front of --pareto"),
        (["--pareto", "3", "--target", "c"], "--pareto has no effect with --target c"),
        (["--pareto", "3", "--explain", "fc"], "--pareto: --explain prints candidates"),
    ],
)
def test_what_has_no_effect_is_refused(options, says, capsys):
    assert says in error_line(capsys, 2, "compile no-such-network --quiet", *options)


def test_the_undominated():
    def point(*figures):
        return ParetoPoint(
            **dict(zip(("latency_ns", "energy_pj", "memory_bytes"), figures)), weight_bytes=0, plan="x"
        )

    points = [point(2, 2, 2), point(1, 3, 2), point(2, 2, 3), point(1, 3, 2), point(3, 1, 1)]
    assert [front_point.figures for front_point in pareto_front(points)] == [(1, 3, 2), (2, 2, 2), (3, 1, 1)]
