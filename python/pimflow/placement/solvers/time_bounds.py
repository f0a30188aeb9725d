"""What the times of a `SegmentProblem` are at least, and how long what waits for them takes at least."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from pimflow.placement.solvers.variants import END, NEVER, START, SegmentProblem, Variant


class TimeBounds:
    """Bounds of when resources are free and results are there, in ns from the begin of the segment.

    Of every region, the variant counts that is best for the bound.

    Parameters
    ----------
    problem : SegmentProblem

    Attributes
    ----------
    free_ns, free_tail_ns : dict of (str, int) to float
        By resource and position, when it is free behind that at least, and how much later the segment ends.
    ready_ns, ready_tail_ns : dict of int to float
        By position, the same of when its result is there.
    """

    def __init__(self, problem: SegmentProblem):
        self.problem = problem
        self._beginning: dict[int, list[Variant]] = defaultdict(list)
        self._inside: set[int] = set()  # positions that a variant does which begins before them
        self._passed: set[int] = set()  # positions that a variant does and whose result it does not give
        for v in problem.variants:
            self._beginning[v.begin].append(v)
            self._inside.update(range(v.begin + 1, v.last + 1))
            self._passed.update(set(range(v.begin, v.last + 1)) - set(v.ends_at))
        self.free_ns: dict[tuple[str, int], float] = defaultdict(float)
        self.ready_ns: dict[int, float] = defaultdict(float)
        self.free_tail_ns: dict[tuple[str, int], float] = defaultdict(float)
        self.ready_tail_ns: dict[int, float] = defaultdict(float)
        ends: dict[int, list[float]] = defaultdict(list)
        for position in range(*problem.segment):
            self._forwards(position, ends)
        for position in reversed(range(*problem.segment)):
            self._backwards(position)

    def _forwards(self, position: int, ends: dict[int, list[float]]) -> None:
        left: dict[str, list[float]] = {each: [] for each in self.problem.resources}
        for v in self._beginning[position]:
            sources = {each: self.free_ns[each, position - 1] for each in left}
            sources[START] = max((self.ready_ns[self._at(name)] for name in v.reads), default=0.0)
            for sink, every in left.items():
                every.append(_latest(v, sources, sink))
            for last in v.ends_at:
                ends[last].append(_latest(v, sources, END))
        for sink, every in left.items():
            before = self.free_ns[sink, position - 1]
            within = [before] if position in self._inside else every
            self.free_ns[sink, position] = max(before, min(within, default=before))
        if position not in self._passed:
            self.ready_ns[position] = max(0.0, min(ends[position], default=0.0))

    def _backwards(self, position: int) -> None:
        """Of what is free or there before what begins at `position`."""
        behind = {each: self.free_tail_ns[each, position] for each in self.problem.resources}
        before: dict[str, list[float]] = {each: [] for each in (*behind, START)}
        for v in self._beginning[position]:
            sinks = {**behind, END: max(self.ready_tail_ns[last] for last in v.ends_at)}
            for source, every in before.items():
                delays = ((v.delays_ns.get((source, sink)), ns) for sink, ns in sinks.items())
                every.append(max((delay + ns for delay, ns in delays if delay is not None), default=0.0))
        names = {name for v in self._beginning[position] for name in (*v.reads, *v.late)}
        for source, kept in behind.items():
            every = [] if position in self._inside else before[source]
            self.free_tail_ns[source, position - 1] = max(kept, min(every, default=0.0))
        for name in () if position in self._inside else names:
            waiting = zip(self._beginning[position], before[START])
            tail_ns = min(ns if name in v.reads else 0.0 for v, ns in waiting)
            at = self._at(name)
            self.ready_tail_ns[at] = max(self.ready_tail_ns[at], tail_ns)

    def _at(self, name: str) -> int:
        """The position of a result of the segment; one that nothing takes before it."""
        position = self.problem.order.get(name, -1)
        return position if position >= self.problem.segment[0] else -1


def _latest(variant: Variant, sources: Mapping[str, float], sink: str) -> float:
    return max(ns + variant.delays_ns.get((each, sink), NEVER) for each, ns in sources.items())
