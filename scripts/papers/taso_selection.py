"""The evaluation of Wen et al., *TASO* (section 5), on our primitives: fronts, baselines, claims."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any

from papers.pbqp import select_by_pbqp
from papers.taso_instances import inception_problem
from pimflow.core.candidate import Candidate
from pimflow.primitive_selection.layers import Layers, separate_concats
from pimflow.primitive_selection.options import SelectionOptions
from pimflow.primitive_selection.prediction import predict_ns
from pimflow.primitive_selection.problem import (
    MEMORY_MODELS,
    Budgets,
    SelectionProblem,
    SelectionResult,
    Sums,
    is_guess,
)
from pimflow.primitive_selection.profile import Profile
from pimflow.primitive_selection.search import Point, fastest, front, minimise
from pimflow.primitive_selection.selection import Selection, baselines, select_for
from pimflow.primitive_selection.time_sources import MODES
from pimflow.primitives import PRIMITIVES

if TYPE_CHECKING:
    from pimflow.host.result_cache import ResultCache

# The paper's five, by the names of the zoo; its VGG-D is VGG-16.
NETWORKS = ("googlenet", "alexnet", "squeezenet-1.1", "vgg-16", "resnet-50")
# Table 1: layers (conditional variables over 57 primitives), and seconds of its solver on a Core i5.
TABLE_1 = {"alexnet": (8, 3.373), "vgg": (13, 5.259), "squeezenet": (30, 8.835), "googlenet": (70, 23.84)}
PRIMITIVES_OF_PAPER = 57
# The paper's direct convolution is "a simple optimized nested loops", and its families have no other without
# a workspace. So ours with register tiles are left out of the library that stands for the paper's.
LIBRARIES: dict[str, Callable[[str], bool]] = {
    "all": lambda _: True,
    "published": lambda family: family != "direct",
}
POINTS = 12  # of a front
MORE_TIME = 0.15  # what the paper spends to save memory (section 5.3.1)
AS_FAST = 0.05  # assumed: within which two points of Figure 6b have "almost the same latency"
AS_LARGE = 0.10  # assumed: within which two points of Figure 6b take about the same memory

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class PbqpRun:
    """A run of the independent solver `papers.pbqp`.

    Attributes
    ----------
    seconds : float
        CPU time.
    guesses : int
        Nodes that it could not reduce exactly; it found the optimum if it is 0.
    """

    time_ns: float
    seconds: float
    guesses: int

    def text(self, optimum_ns: float) -> tuple[str, str]:
        """Cells: its time over the optimum that our solver found, and its seconds."""
        guesses = f" ({self.guesses} guesses)" if self.guesses else ""
        return f"{self.time_ns / optimum_ns:.6f}{guesses}", f"{self.seconds:.2f}"


def run_pbqp(problem: SelectionProblem) -> PbqpRun:
    """Select by PBQP, and add the choice up as any other."""
    begin = time.process_time()
    choice, guesses = select_by_pbqp(problem)
    seconds = time.process_time() - begin
    return PbqpRun(time_ns=problem.evaluate(choice).time_ns, seconds=seconds, guesses=guesses)


@dataclass(frozen=True, kw_only=True)
class NetworkStudy:
    """A network in one memory model, with some of the primitives.

    Attributes
    ----------
    fastest, smallest : SelectionResult
        The selections of least time and of least memory.
    kinds : dict of str to Sums
        See `Selection.baselines`.
    memory, workspace : tuple of Point
        Fronts of time against memory and against workspace.
    solve_seconds, front_seconds : float
        CPU time to find the fastest selection, and the front of memory with the greedy's.
    pbqp : PbqpRun
        The fastest selection by PBQP.
    """

    network: str
    library: str
    problem: SelectionProblem
    fastest: SelectionResult
    smallest: SelectionResult
    kinds: dict[str, Sums]
    memory: tuple[Point, ...]
    workspace: tuple[Point, ...]
    solve_seconds: float
    front_seconds: float
    pbqp: PbqpRun

    @functools.cached_property
    def claims(self) -> dict[str, float | None]:
        """Figures of the paper's claims; see the function `claims`."""
        return claims(self)

    @property
    def layers(self) -> int:
        """Number of layers with a choice."""
        return sum(step.chosen for step in self.problem.steps)

    @property
    def layers_by_prediction(self) -> int:
        """Layers of the fastest selection whose time is predicted."""
        return sum(bool(c.primitive) and is_guess(c) for c in self.fastest.choice.values())

    @property
    def candidates(self) -> int:
        """Number of candidates of layers with a choice."""
        return sum(len(step.candidates) for step in self.problem.steps if step.chosen)


def select_networks(
    networks: Sequence[str],
    profile: Profile | str | os.PathLike[str] = "measured",
    *,
    device: str | None = None,
    measure: int | None = None,
    cache: ResultCache | None = None,
    say: Progress = lambda _: None,
) -> dict[str, Selection]:
    """Select the fastest primitives of every network; the results have all candidates with their times.

    Parameters
    ----------
    profile
        As for `select_for`. Times that a stored profile lacks are predicted from it.
    device, measure, cache
        See `select_for`.

    Raises
    ------
    ProfileError
        See `select_for`; or if a stored profile is too small to predict from.
    """
    from pimflow.commands.profile.profile import region_graph
    from pimflow.commands.shared.options import NetworkOptions

    graphs = {name: region_graph(name, NetworkOptions(), cache) for name in networks}
    if profile not in MODES:
        stored = profile if isinstance(profile, Profile) else Profile.read(profile)
        layers = {
            layer
            for graph in graphs.values()
            for layer in Layers(separate_concats(graph)).primitive_layers.values()
        }
        profile = replace(stored, predicted_ns=predict_ns(stored, sorted(layers, key=repr)))
    selections_by_network = {}
    for name, graph in graphs.items():
        say(f"{name}: times")
        progress = _twentieths(functools.partial(_say_share, say, name))
        options = SelectionOptions(profile=profile, device=device, measure=measure)
        selections_by_network[name] = select_for(graph, options, cache=cache, progress=progress)
    return selections_by_network


def _say_share(say: Progress, name: str, share: float) -> None:
    say(f"{name}: {share:.0%} of the times")


def _twentieths(say: Callable[[float], None]) -> Callable[[float], None]:
    """A callback that passes on a growing share whenever another twentieth of it is reached."""
    full = 0

    def progress(share: float) -> None:
        """Report each twentieth of the work."""
        nonlocal full
        if int(20 * share) > full:
            full = int(20 * share)
            say(share)

    return progress


def merge_profiles(selections: Mapping[str, Selection]) -> Profile:
    """One profile with the measured times of all selections."""
    profiles = [selection.profile for selection in selections.values()]
    times = {key: ns for profile in profiles for key, ns in profile.times_ns.items()}
    moves = {key: ns for profile in profiles for key, ns in profile.moves_ns.items()}
    pools = {key: ns for profile in profiles for key, ns in profile.pools_ns.items()}
    return replace(profiles[0], times_ns=times, moves_ns=moves, pools_ns=pools)


def restrict_library(problem: SelectionProblem, library: str) -> SelectionProblem:
    """`problem` with only the primitives of one of `LIBRARIES`."""
    return problem.restrict(lambda _, c: all(map(LIBRARIES[library], _family(c))))


def study_network(
    network: str, problem: SelectionProblem, library: str, points: int = POINTS
) -> NetworkStudy:
    """Compute what the paper's figures show of `network`, with the primitives of `library`."""
    problem = restrict_library(problem, library)
    begin = time.process_time()
    quick = fastest(problem)
    solved = time.process_time()
    over_memory = front(problem, points, "memory")
    drawn = time.process_time()
    return NetworkStudy(
        network=network,
        library=library,
        problem=problem,
        fastest=quick,
        smallest=minimise(problem, "memory"),
        kinds=baselines(problem),
        memory=over_memory,
        workspace=front(problem, points, "workspace"),
        solve_seconds=solved - begin,
        front_seconds=drawn - solved,
        pbqp=run_pbqp(problem),
    )


def studies(
    selections: Mapping[str, Selection], say: Progress = lambda _: None, points: int = POINTS
) -> tuple[NetworkStudy, ...]:
    """Study every network in both memory models with each of `LIBRARIES`."""
    results = []
    for network, selection in selections.items():
        for library in LIBRARIES:
            for model in MEMORY_MODELS:
                say(f"{network}, {library} primitives, {model}")
                problem = replace(selection.problem, memory_model=model)
                results.append(study_network(network, problem, library, points))
    return tuple(results)


def solve_times(say: Progress = lambda _: None) -> list[dict[str, Any]]:
    """Table 1 on synthetic instances of its sizes: CPU seconds to find the fastest selection and a front."""
    rows = []
    for name, (layers, published_s) in TABLE_1.items():
        say(f"{layers} layers, {PRIMITIVES_OF_PAPER} primitives")
        problem = inception_problem(layers, PRIMITIVES_OF_PAPER, "sum")
        begin = time.process_time()
        quick = fastest(problem)
        solved = time.process_time()
        points = front(problem, POINTS)
        row = {"as": name, "layers": layers, "variables": layers * PRIMITIVES_OF_PAPER}
        row |= {"published_s": published_s, "fastest_s": solved - begin, "gap": quick.gap}
        row |= {"front_s": time.process_time() - solved, "points": len(points)}
        row |= {"fastest_ns": quick.sums.time_ns, "pbqp": run_pbqp(problem)}
        rows.append(row)
    return rows


def sets_of_families(study: NetworkStudy) -> list[dict[str, Any]]:
    """Memory that 15 % more time saves, for every set of families with loops; the largest saving first.

    The families of a library decide how much memory its fastest selection uses, and so how much can be saved.
    """
    used = {family for step in study.problem.steps for c in step.candidates for family in _family(c)}
    others = sorted(used - {"loops"})
    rows = []
    for some in chain.from_iterable(combinations(others, count) for count in range(1, len(others) + 1)):
        families = {"loops", *some}
        problem = study.problem.restrict(functools.partial(_is_in_families, families))
        quick = fastest(problem).sums
        slower = minimise(problem, "memory", Budgets(time_ns=quick.time_ns * (1 + MORE_TIME))).sums
        row = {"families": ["loops", *some], "time_ns": quick.time_ns, "memory_bytes": quick.memory_bytes}
        rows.append(row | {"kept_bytes": slower.memory_bytes})
    return sorted(rows, key=lambda row: -row["memory_bytes"] / row["kept_bytes"])


def _family(candidate: Candidate) -> tuple[str, ...]:
    """The family of the candidate's primitive; empty if its layer has no choice."""
    name = candidate.primitive
    return (PRIMITIVES[name].family,) if name else ()


def speedups(points: Sequence[Point]) -> list[float | None]:
    """The greedy's time over ours at every point; None where the greedy exceeds the budget."""
    return [p.greedy.time_ns / p.time_ns if p.greedy else None for p in points]


def best_speedup(points: Sequence[Point]) -> tuple[float, Point]:
    """The largest of `speedups`, and its point."""
    ratios = [(ratio, number) for number, ratio in enumerate(speedups(points)) if ratio is not None]
    ratio, number = max(ratios, default=(1.0, len(points) - 1))
    return ratio, points[number]


def claims(study: NetworkStudy) -> dict[str, float | None]:
    """The claims of sections 5.2 and 5.3 as figures; None where there is no such selection.

    ``memory_for_15_percent``: how many times less memory than the fastest, for 15 % more time;
    ``memory_at_most``: for any time. ``time_at_a_third``: how many times the fastest's time, within a third
    of its memory. ``memory_as_fast_as_*``: how many times less memory than with one primitive everywhere, in
    its time. ``time_of_direct``, ``memory_of_direct``: of direct everywhere, over those of the least memory.
    ``workspace_saved_bytes``: in almost the fastest's time (Figure 6b, A and B). ``workspace_step``: the most
    that another selection of about the same workspace is faster (C and D). ``over_greedy``,
    ``workspace_over_greedy``: the largest speed-up on the front; ``greedy_fails``: budgets that it misses.
    """
    quick, small = study.fastest.sums, study.smallest.sums
    row: dict[str, float | None] = {
        "memory_for_15_percent": quick.memory_bytes
        / _min_memory_bytes(study, quick.time_ns * (1 + MORE_TIME)),
        "memory_at_most": quick.memory_bytes / small.memory_bytes,
        "time_at_a_third": None,
        "time_of_direct": study.kinds["direct"].time_ns / small.time_ns,
        "memory_of_direct": study.kinds["direct"].memory_bytes / small.memory_bytes,
    }
    if small.memory_bytes <= quick.memory_bytes // 3:
        limited = fastest(study.problem, Budgets(memory_bytes=quick.memory_bytes // 3))
        row["time_at_a_third"] = limited.sums.time_ns / quick.time_ns
    for kind in ("im2row", "im2col", "winograd"):
        sums = study.kinds[kind]
        row[f"memory_as_fast_as_{kind}"] = sums.memory_bytes / _min_memory_bytes(study, sums.time_ns)
    near = minimise(study.problem, "workspace", Budgets(time_ns=quick.time_ns * (1 + AS_FAST))).sums
    row["workspace_saved_bytes"] = quick.workspace_bytes - near.workspace_bytes
    row["workspace_step"] = _step(study.workspace)
    row["over_greedy"], _ = best_speedup(study.memory)
    row["workspace_over_greedy"], _ = best_speedup(study.workspace)
    row["greedy_fails"] = speedups(study.memory).count(None)
    return row


def _min_memory_bytes(study: NetworkStudy, time_ns: float) -> int:
    return minimise(study.problem, "memory", Budgets(time_ns=time_ns)).sums.memory_bytes


def _step(points: Sequence[Point]) -> float | None:
    """The largest speed-up between two points of about the same workspace."""
    pairs = [(a.selected.sums, b.selected.sums) for a, b in combinations(points, 2)]
    close = [(a, b) for a, b in pairs if b.workspace_bytes <= (1 + AS_LARGE) * a.workspace_bytes]
    return max((a.time_ns / b.time_ns for a, b in close), default=None)


def time_counts(selection: Selection) -> dict[str, int]:
    """How many times of applicable primitives are measured, and how many predicted."""
    layers = set(Layers(selection.graph).primitive_layers.values())
    measured = sum(layer in layers for _, layer in selection.profile.times_ns)
    predicted = sum(layer in layers for _, layer in selection.profile.predicted_ns)
    return {"measured": measured, "predicted": predicted}


def _is_in_families(families: set[str], _: str, candidate: Candidate) -> bool:
    """Whether the primitive of a candidate belongs to `families`."""
    return families.issuperset(_family(candidate))


def json_form(study: NetworkStudy) -> dict[str, Any]:
    """The study as values for JSON."""

    def sums_json(sums: Sums | None) -> dict[str, Any] | None:
        """Sums as JSON."""
        names = ("time_ns", "memory_bytes", "workspace_bytes", "guessed_ns", "substituted")
        return None if sums is None else {name: getattr(sums, name) for name in names}

    def front_json(front_points: Sequence[Point]) -> list[dict[str, Any]]:
        return [
            {
                "budget_bytes": p.budget_bytes,
                "selected": sums_json(p.selected.sums),
                "greedy": sums_json(p.greedy),
            }
            for p in front_points
        ]

    return {
        "network": study.network,
        "library": study.library,
        "memory_model": study.problem.memory_model,
        "layers": study.layers,
        "candidates": study.candidates,
        "guessed": study.layers_by_prediction,
        "fastest": sums_json(study.fastest.sums),
        "smallest": sums_json(study.smallest.sums),
        "everywhere": {kind: sums_json(sums) for kind, sums in study.kinds.items()},
        "memory_front": front_json(study.memory),
        "workspace_front": front_json(study.workspace),
        "pbqp": vars(study.pbqp),
        "solve_seconds": study.solve_seconds,
        "front_seconds": study.front_seconds,
        "claims": study.claims,
    }
