"""The memory of a plan: the bytes of its pool of tensors."""

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
    """Peak memory of plans of one network: an upper bound of the pool that is built for them.

    Counted are tensors between regions while they are live, and the buffers of each candidate while it runs
    (`Candidate.holds`): workspaces, copies, parts. Regions run one after another, in their order. Regions
    that are one kernel count as one: its inputs and its result are live at once, and tensors between these
    regions are never stored. A pipeline keeps all its tensors from its first stage to its last. A deferred
    epilogue keeps its operands live; the kernel that fuses it also stores the finished result if others need
    it. Two partial sums that are still to be added take as much each as their sum. The network's inputs and
    weights are not in the pool, as in an executable.

    If tensors lie in several sets of memory channels, each set has a pool of its own, and the peaks are added
    up. The buffers of a candidate lie where its result does.

    The pool that is built may be smaller: if a kernel writes over an operand, or parts are combined later.

    Parameters
    ----------
    graph : RegionGraph
    dtype : str
        Storage type of tensors.
    table : CostTable, optional
        Its transforms make copies; without it there are none.
    tensors : Liveness, optional
        Lifetimes of the tensors over the regions, by default those of `graph` without its inputs.
    only : frozenset of str, optional
        Regions whose results and candidates' buffers count; all if None.
    """

    graph: RegionGraph
    dtype: str
    table: CostTable | None = None
    tensors: Liveness | None = None
    only: frozenset[str] | None = None
    _spans: dict[tuple[int, int, bool, Sizes], Span] = field(default_factory=dict, repr=False, compare=False)

    @functools.cached_property
    def liveness(self) -> Liveness:
        """Lifetimes of the tensors that count, over the regions."""
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
        """Bytes of the network's outputs, which are fp32 whatever the storage type."""
        returned = (r for r in self.graph.regions if self.graph.returns(r.name) and not r.view)
        return {region.name: region.output_elements * ELEMENT_BYTES["fp32"] for region in returned}

    def own_bytes(self, candidate: Candidate, moment: Moment) -> int:
        """Bytes of the buffers of `candidate` at a moment.

        PIM stores a network's output in the narrower storage type first, which is then converted.
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
        """Bytes of a tensor in the pool, aligned."""
        return self._sizes[tensor]

    def span(self, candidate: Candidate) -> Span:
        """Bytes of the tensors that are live while `candidate` does its regions."""
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
        """Lifetimes of all results, in their sizes if `candidate` does its regions."""
        sizes, lifetimes = self.changed_bytes(candidate), self.liveness.lifetimes
        if not sizes:
            return lifetimes
        return tuple(replace(life, size_bytes=sizes.get(life.name, life.size_bytes)) for life in lifetimes)

    def changed_bytes(self, candidate: Candidate) -> dict[str, int]:
        """Bytes of the results whose sizes differ from the graph's if `candidate` does its regions."""
        grown: dict[str, int] = {}
        for own in candidate.regions:
            if own.name in self._order:  # else an original layer, which has no chain
                region = self.graph.region(own.name)
                grown[own.first_result] = own.input_elements[0] - region.input_elements[0]
                grown[own.name] = own.output_elements - region.output_elements
        element = ELEMENT_BYTES[self.dtype]
        return {name: aligned(self._stored[name] + more * element) for name, more in grown.items() if more}

    def running_bytes(
        self, candidate: Candidate, pending: Collection[str] = (), copied: Sequence[str] = ()
    ) -> int:
        """Peak bytes that are live while `candidate` runs.

        Parameters
        ----------
        pending : collection of str
            Regions before it with deferred epilogues, whether or not it does these.
        copied : sequence of str
            Inputs that are copied to another layout, in the order of the copies.
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
        """Bytes that the copy of a tensor adds: 0 if the tensor is dead after it, so that it reuses these."""
        return self._sizes[tensor] if self._ends.get(tensor, 0) > position + 1 else 0

    def in_state(self, candidate: Candidate, state: State) -> int:
        """`running_bytes` of `candidate` in `state`."""
        moved: dict[str, Task] = {}
        if self.table and self.table.transforms:
            changed = steps.transforms(self.graph, self.table, candidate, state)
            moved = {name: task for name, task in changed.items() if task.launched}  # others make no copy
        return self.running_bytes(candidate, state.pending, tuple(moved))

    def _finished_bytes(self, candidate: Candidate, pending: Collection[str]) -> int:
        """Bytes of earlier results that `candidate` completes and stores, since others need them too."""
        if not pending or not candidate.input.accepts_pending:
            return 0  # deferred epilogues are done in place before it
        taken = set(steps.results_read(self.graph, candidate)).intersection(pending)
        return sum(self._sizes[name] for name in taken if self.graph.shares(name))

    def kept_bytes(self, position: int, pending: Collection[str]) -> int:
        """Bytes of tensors that only deferred epilogues of `pending` regions keep live at `position`."""
        return sum(self.kept(position, pending).values())

    def kept(self, position: int, pending: Collection[str]) -> dict[str, int]:
        """`kept_bytes` by region whose result the tensor is."""
        added = {
            name
            for region in pending
            for name in self.graph.region(region).inputs[self.graph.region(region).operands :]
            if name in self._order
        }
        return {name: self._sizes[name] for name in added if self._ends.get(name, 0) <= position}

    def of(self, candidates: Sequence[Candidate]) -> int:
        """Bytes of the pool of a plan of `candidates`."""
        return sum(self.by_memory(candidates).values())

    def live_bytes(self, candidates: Sequence[Candidate]) -> int:
        """Peak bytes that are live in a plan of `candidates`, over all sets of channels."""
        return max(self._running(candidates))

    def by_memory(self, candidates: Sequence[Candidate]) -> dict[str, int]:
        """Peak bytes by memory region: a set of channels, if tensors lie in several sets."""
        sets = channel_sets(candidates)
        if not sets:
            return {MEMORY: self.live_bytes(candidates)}
        inputs = {name for region in self.graph.regions for name in region.inputs if name not in sets}
        sets |= dict.fromkeys(inputs, IN_LEFT)  # copies of inputs lie in the GPU channels
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
