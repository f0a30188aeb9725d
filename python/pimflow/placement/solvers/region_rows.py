"""Rows for memory where tensors lie in several sets of channels, each with a region of its own in the pool.

The most that is live in each region is a column, and the pool is their sum. In which region a tensor lies
depends on what makes it, so a row adds up columns of the makers of all that is live when a candidate begins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from pimflow.core.channel_sets import IN_LEFT, channel_set
from pimflow.core.integer_program import Column, Entries, IntegerProgram, summed
from pimflow.core.liveness import Lifetime, Moment
from pimflow.core.plan import PLACES
from pimflow.placement.solvers.launch_rows import Taken
from pimflow.placement.solvers.memory_rows import UNIT_BYTES
from pimflow.placement.solvers.variants import SegmentProblem, Variant

Live = dict[str, int]  # bytes of what was made before, by the region that made it, or the first part of it
Own = dict[str, int]  # bytes of what a candidate makes and holds itself, by set of channels


class RegionRows:
    """Of one `Program`, whose problem is a whole network with a limit.

    Parameters
    ----------
    problem : SegmentProblem
    program : IntegerProgram
        Where they are added.
    beginning, doing : mapping
        By position, variants that begin there, and those that do it, with their columns.
    """

    def __init__(
        self,
        problem: SegmentProblem,
        program: IntegerProgram,
        beginning: Mapping[int, Taken],
        doing: Mapping[int, Taken],
    ):
        self.problem, self.program, self.memory = problem, program, problem.limit.memory
        self.beginning, self.doing = beginning, doing
        self.peaks = {channels: program.column() for channels in PLACES}
        self._both: dict[tuple[str, str, tuple[Column, ...]], Column] = {}

    def add(self, total: Column) -> None:
        """Add the rows; `total` is the column of the pool, in `UNIT_BYTES`."""
        self.program.row([(total, -1.0), *((peak, 1.0) for peak in self.peaks.values())], high=0.0)
        for position in range(*self.problem.segment):
            beside = self._undone(position)
            for live, own, always in self._moments(position):
                self._rows(live, own, always, beside)

    def _rows(
        self, live: Live, own: list[tuple[Column, Own]], always: bool, beside: Mapping[str, Entries]
    ) -> None:
        """What is live at a moment, in each region; unless that is so `always`, if one of `own` is chosen."""
        whole = sum(live.values())
        slack = [] if always else [(column, float(whole)) for column, _ in own]
        for channels, peak in self.peaks.items():
            entries: Entries = [*beside.get(channels, ()), *slack]
            for name, size in live.items():
                entries += self._lying(name, size).get(channels, ())
            entries += [(column, float(held.get(channels, 0))) for column, held in own]
            entries = [(column, size / UNIT_BYTES) for column, size in entries if size]
            if entries:
                high = 0.0 if always else whole / UNIT_BYTES
                self.program.row(summed([(peak, -1.0), *entries]), high=high)

    def _moments(self, position: int) -> Iterator[tuple[Live, list[tuple[Column, Own]], bool]]:
        """What was made before and is live at a moment of what begins there, and who has such moments.

        With what these make and hold then; and whether all that may begin there have as much live.
        """
        alike: dict[tuple, list[tuple[Column, Own]]] = defaultdict(list)
        having: dict[Column, list[Live]] = defaultdict(list)
        for column, v in self.beginning[position]:
            for moment in v.candidate.holds:
                live, own = self._at(v, moment)
                items = tuple(sorted(live.items()))
                alike[items, having[column].count(live)].append((column, own))
                having[column].append(live)
        for (items, _), group in alike.items():
            always = all(
                any(all(live.get(name, 0) >= size for name, size in items) for live in lives)
                for lives in having.values()
            )
            yield dict(items), group, always

    def _at(self, v: Variant, moment: Moment) -> tuple[Live, Own]:
        """What was made before and is live at a moment of `v`, and what `v` makes and holds then."""
        candidate, end = v.candidate, v.last + 1
        inside = candidate.covers[:-1] if candidate.fuses_regions else ()
        classes: dict[str, list[Lifetime]] = defaultdict(list)
        for life in self.memory.lifetimes(candidate):
            if life.begin < end and v.begin < life.end:
                classes[life.alias or life.name].append(life)
        live: Live = {}
        given = channel_set(candidate.output.layout)
        own: Own = {given: self.memory.own_bytes(candidate, moment)}
        for lives in classes.values():
            size = max(life.within_bytes + life.size_bytes for life in lives)
            first = min(lives, key=lambda life: life.begin)
            behind = any(life.end > end or life.pinned for life in lives)
            if first.begin < v.begin:
                if behind or moment.reads:
                    live[first.name] = size
                continue
            alone = all(life.name in inside and life.end <= end and not life.pinned for life in lives)
            if moment.writes and not alone:
                channels = given if first.name == candidate.covers[-1] else IN_LEFT
                own[channels] = own.get(channels, 0) + size
        return {name: size for name, size in live.items() if size}, own

    def _lying(self, name: str, size: int) -> dict[str, Entries]:
        """By set of channels, columns that say that the result of region `name` lies there, times `size`."""
        found: dict[str, Entries] = defaultdict(list)
        position = self.problem.order[name]
        for column, v in self.doing[position]:
            channels = channel_set(v.candidate.output.layout) if v.last == position else IN_LEFT
            found[channels].append((column, float(size)))
        return found

    def _undone(self, position: int) -> dict[str, Entries]:
        """By set of channels, bytes that work left pending adds to what is live from `position` on.

        What is still to be added is kept, and the result is stored once more by whoever finishes it, if
        others need it too.
        """
        problem, found = self.problem, defaultdict[str, Entries](list)
        for name in sorted(problem.may_pend):
            reader = problem.first_reader(name)
            if not problem.order[name] < position <= reader:
                continue
            left = [c for c, v in self.doing[problem.order[name]] if v.leaves == "pending"]
            for added, size in self.memory.kept(position, [name]).items():
                for channels, column in self._if_one_of(left, added).items():
                    found[channels].append((column, float(size)))
            taking = [
                column
                for column, v in self.beginning[position]
                if name in v.takes and v.candidate.input.accepts_pending
            ]
            if taking and problem.graph.shares(name):
                for channels, column in self._if_one_of(taking, name).items():
                    found[channels].append((column, float(self.memory.size_bytes(name))))
        return found

    def _if_one_of(self, columns: list[Column], name: str) -> dict[str, Column]:
        """By set of channels, a column: 1 if one of `columns` is taken and `name` lies there."""
        made: dict[str, Column] = {}
        for channels, lying in self._lying(name, 1).items():
            key = (channels, name, tuple(columns))
            if key not in self._both:
                self._both[key] = both = self.program.column()
                taken = [(column, -1.0) for column in columns]
                negated = [(column, -factor) for column, factor in lying]
                self.program.row(summed([(both, 1.0), *taken, *negated]), low=-1.0)
            made[channels] = self._both[key]
        return made
