"""The memory that a plan takes: the pool that is built for it, and the weights beside."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from pimflow.core.candidate import Candidate, CostTable, Task
from pimflow.core.channel_sets import IN_LEFT, channel_sets
from pimflow.core.liveness import MEMORY, Lifetime, Liveness, Moment, Span, aligned
from pimflow.core.plan import PLACES
from pimflow.core.region import ELEMENT_BYTES, RegionGraph
from pimflow.placement.solvers import steps
from pimflow.placement.solvers.steps import State

COPYING = Moment(writes=False)
Sizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class PlanMemory:
    """Bytes of the pool that plans of one network take: the most that is live at once.

    Tensors between regions while they are needed, and what each candidate holds while it runs
    (`Candidate.holds`): workspaces, copies, parts. Regions count one after the other, in their order. Those
    that are one kernel count as one: what they read and their result are live at once, and what they pass to
    one another is never made. A pipeline holds all its tensors from its first stage to its last. What a
    candidate leaves pending keeps alive what is to be added to it; the kernel that takes it over stores it if
    others need it too. Of two parts that are still to be added, each takes as much as their sum. The
    network's inputs and weights lie elsewhere, as those of an executable do.

    Where tensors lie in several sets of memory channels, each set has a region of its own in the pool, which
    takes the most that is live in each, added up. What a candidate holds lies where its result does.

    What is built takes no more; it takes less where a kernel writes over an operand, or joins parts later.

    Parameters
    ----------
    graph : RegionGraph
    dtype : str
        What tensors are stored as.
    table : CostTable, optional
        Whose transforms make copies; none are made without.
    tensors : Liveness, optional
        Lifetimes of the tensors over the regions, where they are not those of `graph` without its inputs.
    only : frozenset of str, optional
        Regions whose results count, with what their candidates hold; all if None.
    """

    graph: RegionGraph
    dtype: str
    table: CostTable | None = None
    tensors: Liveness | None = None
    only: frozenset[str] | None = None
    _spans: dict[tuple[int, int, bool, Sizes], Span] = field(default_factory=dict, repr=False, compare=False)

    @functools.cached_property
    def liveness(self) -> Liveness:
        """Lifetimes of what counts, over the regions."""
        live = self.tensors or self._of_graph()
        counted = tuple(life for life in live.lifetimes if self._counts(life.name))
        return Liveness(steps=live.steps, lifetimes=counted)

    def _of_graph(self) -> Liveness:
        live = self.graph.liveness(self.dtype)
        made = (life for life in live.lifetimes if not life.name.startswith("%"))
        stored = tuple(
            replace(life, size_bytes=aligned(max(life.size_bytes, self._returned_bytes.get(life.name, 0))))
            for life in made
        )
        return Liveness(steps=live.steps, lifetimes=stored)

    @functools.cached_property
    def _returned_bytes(self) -> dict[str, int]:
        """Bytes of results that the network returns: these are fp32, whatever is stored."""
        returned = (r for r in self.graph.regions if self.graph.returns(r.name) and not r.view)
        return {region.name: region.output_elements * ELEMENT_BYTES["fp32"] for region in returned}

    def own_bytes(self, candidate: Candidate, moment: Moment) -> int:
        """What `candidate` holds by itself at a moment.

        Of a result that the network returns, what PIM makes is stored narrower, and converted.
        """
        narrow, last = self.dtype != "fp32" and candidate.rewrite.mode != "GPU", candidate.covers[-1]
        own = aligned(moment.own_bytes) if self._counts(last) else 0
        return own + (self._sizes[last] if narrow and last in self._returned_bytes else 0)

    def _counts(self, region: str) -> bool:
        return self.only is None or region in self.only

    @functools.cached_property
    def _order(self) -> dict[str, int]:
        return {region.name: position for position, region in enumerate(self.graph.regions)}

    @functools.cached_property
    def _ends(self) -> dict[str, int]:
        return {life.name: life.end for life in self.liveness.lifetimes}

    @functools.cached_property
    def _stored(self) -> dict[str, int]:
        return self.graph.tensor_bytes(self.dtype)

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        return {name: aligned(size) if self._counts(name) else 0 for name, size in self._stored.items()}

    def size_bytes(self, tensor: str) -> int:
        return self._sizes[tensor]

    def span(self, candidate: Candidate) -> Span:
        begin, count = self._order[candidate.covers[0]], len(candidate.covers)
        key = (begin, count, candidate.fuses_regions, tuple(sorted(self.changed_bytes(candidate).items())))
        if key not in self._spans:
            inside = candidate.covers[:-1] if candidate.fuses_regions else ()
            live = self.liveness
            if self.changed_bytes(candidate):
                live = replace(live, lifetimes=self.lifetimes(candidate))
            self._spans[key] = live.span(begin, begin + count, inside)
        return self._spans[key]

    def lifetimes(self, candidate: Candidate) -> tuple[Lifetime, ...]:
        """Of all results, in the sizes that these have if `candidate` does its regions."""
        sizes, lifetimes = self.changed_bytes(candidate), self.liveness.lifetimes
        if not sizes:
            return lifetimes
        return tuple(replace(life, size_bytes=sizes.get(life.name, life.size_bytes)) for life in lifetimes)

    def changed_bytes(self, candidate: Candidate) -> dict[str, int]:
        """Bytes of results that are larger or smaller in the form of `candidate` than in the graph's."""
        grown: dict[str, int] = {}
        for own in candidate.regions:
            if own.name in self._order:  # not of a layer as it came, beside which its chain is none
                region = self.graph.region(own.name)
                grown[own.first_result] = own.input_elements[0] - region.input_elements[0]
                grown[own.name] = own.output_elements - region.output_elements
        element = ELEMENT_BYTES[self.dtype]
        return {name: aligned(self._stored[name] + more * element) for name, more in grown.items() if more}

    def running_bytes(
        self, candidate: Candidate, pending: Collection[str] = (), copied: Sequence[str] = ()
    ) -> int:
        """Bytes that are live while `candidate` runs, at most.

        Parameters
        ----------
        pending : collection of str
            Regions before it that left work pending, whether or not it takes that over.
        copied : sequence of str
            What it reads in another layout than the tensor has, in the order in which that is copied.
        """
        span, position = self.span(candidate), self._order[candidate.covers[0]]
        copies, most = 0, 0
        for tensor in copied:
            most = max(most, span.at(COPYING) + copies + self._sizes[tensor])
            copies += self.copy_bytes(tensor, position)
        held = (replace(each, own_bytes=self.own_bytes(candidate, each)) for each in candidate.holds)
        most = max(most, max(map(span.at, held)) + copies)
        return most + self.kept_bytes(position, pending) + self._finished_bytes(candidate, pending)

    def copy_bytes(self, tensor: str, position: int) -> int:
        """What the copy of a tensor adds: nothing if it takes the bytes of the tensor, done with there."""
        return self._sizes[tensor] if self._ends.get(tensor, 0) > position + 1 else 0

    def in_state(self, candidate: Candidate, state: State) -> int:
        """`running_bytes` behind what left `state`."""
        moved: dict[str, Task] = {}
        if self.table and self.table.transforms:
            changed = steps.transforms(self.graph, self.table, candidate, state)
            moved = {name: task for name, task in changed.items() if task.launched}  # else no copy is made
        return self.running_bytes(candidate, state.pending, tuple(moved))

    def _finished_bytes(self, candidate: Candidate, pending: Collection[str]) -> int:
        """Bytes of results that `candidate` finishes beside its own: those that others need too."""
        if not pending or not candidate.input.accepts_pending:
            return 0  # what was left is done in place before it
        taken = set(steps.results_read(self.graph, candidate)).intersection(pending)
        return sum(self._sizes[name] for name in taken if self.graph.shares(name))

    def kept_bytes(self, position: int, pending: Collection[str]) -> int:
        """Bytes of what `pending` regions still have to add, where it would be dead at `position`."""
        return sum(self.kept(position, pending).values())

    def kept(self, position: int, pending: Collection[str]) -> dict[str, int]:
        """The same by region whose result it is."""
        added = {
            name
            for region in pending
            for name in self.graph.region(region).inputs[self.graph.region(region).operands :]
            if name in self._order
        }
        return {name: self._sizes[name] for name in added if self._ends.get(name, 0) <= position}

    def of(self, candidates: Sequence[Candidate]) -> int:
        """The pool of a plan of `candidates`, in bytes."""
        return sum(self.by_memory(candidates).values())

    def live_bytes(self, candidates: Sequence[Candidate]) -> int:
        """The most that is live in a plan of `candidates`, wherever it lies."""
        return max(self._running(candidates))

    def by_memory(self, candidates: Sequence[Candidate]) -> dict[str, int]:
        """The most that is live, by memory region: sets of channels, if tensors lie in several."""
        sets = channel_sets(candidates)
        if not sets:
            return {MEMORY: self.live_bytes(candidates)}
        inputs = {name for region in self.graph.regions for name in region.inputs if name not in sets}
        sets |= dict.fromkeys(inputs, IN_LEFT)  # whose copies are read as all that is left to the GPU
        members = {each: frozenset(n for n, own in sets.items() if own == each) for each in PLACES}
        parts = {each: replace(self, only=names, _spans={}) for each, names in members.items() if names}
        most = {each: part.live_bytes(candidates) for each, part in parts.items()}
        return {each: size for each, size in most.items() if size}

    def _running(self, candidates: Sequence[Candidate]) -> Iterator[int]:
        state, halves = State(), set[str]()
        for candidate in candidates:
            halves &= state.pending
            yield self.in_state(candidate, state) + sum(self._sizes[name] for name in halves)
            state = steps.after(self.graph, candidate, state)
            halves |= {candidate.covers[-1]} if _leaves_a_sum(candidate) else set()


def _leaves_a_sum(candidate: Candidate) -> bool:
    return candidate.rewrite.axis == "reduction" and bool(candidate.output.pending)
