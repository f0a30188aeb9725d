"""Execution order: the order of a program's steps that needs the fewest live bytes.

`reorder` searches for it, and gives a lower bound of all orders. The search is ``src/order_search.h``: for a
limit in bytes it finds an order within the limit, proves that there is none, or stops because it dropped
sets. Its effort is limited by a width, not by seconds, so that the same program gets the same order unless
the time runs out.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pimflow.core.kernel import ELEMENT_BYTES
from pimflow.core.liveness import Lifetime, Liveness
from pimflow.core.region_graph import RegionGraph
from pimflow.host import native
from pimflow.memory.pools import alias_class, lower_bound_bytes, merge_aliases

_bound = native.get("pimflow.memory.order_bound")
_search = native.get("pimflow.memory.order_search")
_STORAGE = native.Record("pimflow.memory.storage")
_FEASIBLE, _INFEASIBLE = range(2)  # another outcome: the search stopped without an answer
# Sets of executed steps that the search keeps at each step: in the first round, their growth, their maximum.
_FIRST_WIDTH, _WIDTH_GROWTH, _LARGEST_WIDTH = 1, 8, 1 << 17
TIME_LIMIT_SECONDS = 10.0
_BOUND_SHARE = 0.25  # of the time limit, at most, goes to the lower bound


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """A program whose steps may run in any order that its data flow allows.

    Attributes
    ----------
    steps : sequence of (iterable of str, iterable of str)
        Buffers that each step reads and writes, in a valid order of execution. A workspace is a buffer that
        one step writes and nothing reads.
    size_bytes : mapping
        Size of every buffer, rounded up where offsets have to be aligned. Buffers of another memory region
        have 0 bytes here; dependencies through them still order the steps.
    inputs : tuple of str
        Buffers that exist before the first step. Each is dead after its last reader unless it is an output
        too; one that no step reads takes no bytes.
    outputs : tuple of str
        Buffers that are live after the last step.
    aliases : mapping of str to str
        Alias class of the buffers that share their bytes with others. The class takes the bytes of its
        largest member, from its first step to its last. If a member's last step in the original order is not
        after the first write of another member, the latter overwrites it, and all its steps stay before that
        write. Members that are live together are different parts of the bytes, or views.

    Raises
    ------
    ValueError
        If a step reads what no earlier step wrote and is no input, or an output is never written.
    """

    steps: Sequence[tuple[Iterable[str], Iterable[str]]]
    size_bytes: Mapping[str, int]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        steps = tuple((tuple(reads), tuple(writes)) for reads, writes in self.steps)
        object.__setattr__(self, "steps", steps)
        touched = {name for reads, writes in steps for name in (*reads, *writes)} | set(self.outputs)
        object.__setattr__(self, "inputs", tuple(dict.fromkeys(n for n in self.inputs if n in touched)))
        self.lifetimes()

    @classmethod
    def from_regions(
        cls,
        graph: RegionGraph,
        dtype: str,
        *,
        predecessors: Mapping[str, Iterable[str]] | None = None,
        count_inputs: bool = True,
        step_regions: Sequence[Sequence[str]] | None = None,
    ) -> StepGraph:
        """The graph of a network's regions, with one step a region.

        An order of the steps is an order of the regions. Views are steps whose results take no bytes; see
        `RegionGraph.buffer_uses`.

        Parameters
        ----------
        predecessors : mapping of str to iterable of str, optional
            By region, the regions that have to run before it, besides those that it reads.
        count_inputs : bool
            If true, inputs take bytes until their last reader and workspaces take none. If false, the other
            way round, as in the pool of a build.
        step_regions : sequence of sequence of str, optional
            The regions of each step, where a step has several. Results that they pass to one another take no
            bytes: they are never stored.
        """
        predecessors = predecessors or {}
        step_regions = step_regions or [[region.name] for region in graph.regions]
        buffers = graph.buffer_uses(dtype)
        markers = {name: f"{name} done" for names in predecessors.values() for name in names}
        size_bytes = buffers.size_bytes | dict.fromkeys(markers.values(), 0)
        if not count_inputs:
            size_bytes |= dict.fromkeys(buffers.inputs, 0)
        element, workspaces = ELEMENT_BYTES[dtype], dict[str, str]()
        for region in graph.regions if not count_inputs else ():
            if region.kernel.workspace_elements:
                workspaces[region.name] = f"workspace of {region.name}"
                size_bytes[workspaces[region.name]] = region.kernel.workspace_elements * element
        steps_by_region = dict(zip((region.name for region in graph.regions), buffers.steps, strict=True))
        steps = []
        for names in step_regions:
            extra_writes = {markers[name] for name in names if name in markers}
            extra_reads = {
                markers[first] for name in names for first in predecessors.get(name, ())
            } - extra_writes
            internal_buffers = {buffer for name in names[:-1] for buffer in steps_by_region[name][1]}
            reads = dict.fromkeys(buffer for name in names for buffer in steps_by_region[name][0])
            external_reads = [buffer for buffer in reads if buffer not in internal_buffers]
            extra_writes |= {workspaces[name] for name in names if name in workspaces and len(names) == 1}
            writes = (*steps_by_region[names[-1]][1], *sorted(extra_writes))
            steps.append(((*external_reads, *sorted(extra_reads)), writes))
        return cls(
            steps=steps,
            size_bytes=size_bytes,
            inputs=buffers.inputs,
            outputs=buffers.outputs,
            aliases=buffers.aliases,
        )

    def lifetimes(self, order: Sequence[int] | None = None) -> tuple[Lifetime, ...]:
        """Lifetimes of the buffers with the steps in `order`, by default the original order."""
        steps = self.steps if order is None else [self.steps[step] for step in order]
        liveness = Liveness.from_steps(steps, dict(self.size_bytes), inputs=self.inputs, outputs=self.outputs)
        return liveness.with_aliases(self.aliases).lifetimes

    def peak_bytes(self, order: Sequence[int] | None = None) -> int:
        """The maximum of live bytes over the steps in `order`."""
        return lower_bound_bytes(merge_aliases(self.lifetimes(order)))

    @functools.cached_property
    def dependencies(self) -> tuple[tuple[int, int], ...]:
        """Pairs of a step and another step that has to run after it."""
        last_writer: dict[str, int] = {}
        readers_since_write: dict[str, list[int]] = {}  # readers since the last write
        pairs: set[tuple[int, int]] = set()
        steps_by_buffer: dict[str, list[int]] = {}
        for step, (reads, writes) in enumerate(self.steps):
            for name in dict.fromkeys(reads):
                if name in last_writer:
                    pairs.add((last_writer[name], step))
                readers_since_write.setdefault(name, []).append(step)
                steps_by_buffer.setdefault(name, []).append(step)
            for name in dict.fromkeys(writes):
                pairs |= {(reader, step) for reader in readers_since_write.pop(name, ())}
                if name in last_writer:
                    pairs.add((last_writer[name], step))
                last_writer[name] = step
                steps_by_buffer.setdefault(name, []).append(step)
        pairs |= self._overwrite_pairs(steps_by_buffer)
        return tuple(sorted((first, later) for first, later in pairs if first != later))

    def _overwrite_pairs(self, steps_by_buffer: Mapping[str, list[int]]) -> set[tuple[int, int]]:
        """Pairs of a step of a member of an alias class, and the step that overwrites that member."""
        pairs: set[tuple[int, int]] = set()
        classes: dict[str, list[str]] = {}
        for name in steps_by_buffer:
            if alias := self.aliases.get(name):
                classes.setdefault(alias, []).append(name)
        for members in classes.values():
            for new in members:
                if new in self.inputs:
                    continue
                begin = steps_by_buffer[new][0]
                for old in members:
                    if old != new and old not in self.outputs and steps_by_buffer[old][-1] <= begin:
                        pairs |= {(step, begin) for step in steps_by_buffer[old]}
        return pairs

    @functools.cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The input of the C++ search, int64: dependencies, storages, and which steps touch which storage.

        A storage is an alias class, or a buffer that is in none.
        """
        lives = {life.name: life for life in self.lifetimes()}
        numbers: dict[tuple[str, str], int] = {}
        storage_of = {
            name: numbers.setdefault(alias_class(life), len(numbers)) for name, life in lives.items()
        }
        size_bytes, at_start, at_end = ([0] * len(numbers) for _ in range(3))
        for name, storage in storage_of.items():
            size_bytes[storage] = max(size_bytes[storage], lives[name].size_bytes)
            at_start[storage] |= name in self.inputs
            at_end[storage] |= name in self.outputs
        rows = list(zip(size_bytes, at_start, at_end))
        storages = _STORAGE.table(("bytes", "at_start", "at_end"), rows)
        touches = sorted(
            {
                (step, storage_of[name])
                for step, names in enumerate(self.steps)
                for part in names
                for name in part
            }
        )
        return _pairs(self.dependencies), storages, _pairs(touches)


def _pairs(pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.array(pairs, np.int64).reshape(len(pairs), 2)


@dataclass(frozen=True, kw_only=True)
class Order:
    """An order of steps.

    Attributes
    ----------
    order : tuple of int
        Numbers of the steps; the original order if no better one was found.
    sets : int
        Sets of executed steps that the search has generated.
    """

    order: tuple[int, ...]
    peak_bytes: int
    original_peak_bytes: int
    lower_bound_bytes: int
    sets: int
    seconds: float

    @property
    def optimal(self) -> bool:
        """Whether it is proved that no order needs fewer bytes."""
        return self.peak_bytes == self.lower_bound_bytes


@dataclass(frozen=True, kw_only=True)
class OrderSummary:
    """The order of a network's layers as reports show it.

    Attributes
    ----------
    reordered : bool
        Whether the order was changed.
    kept_because : str
        Why the original order was kept; empty if it was not.
    live_given_bytes, live_bytes, lower_bound_bytes : int
        Maximum of live bytes in the original order and in the used one, and its lower bound over all orders.
    optimal : bool
        Whether it is proved that no order needs fewer bytes.
    pool_given_bytes, pool_bytes : int or None
        Pools of the network on the GPU in both orders.
    """

    reordered: bool
    kept_because: str
    live_given_bytes: int
    live_bytes: int
    lower_bound_bytes: int
    optimal: bool
    pool_given_bytes: int | None
    pool_bytes: int | None
    seconds: float


def reorder(graph: StepGraph, *, seconds: float = TIME_LIMIT_SECONDS) -> Order:
    """Search for the order of `graph`'s steps with the fewest live bytes; never worse than the original.

    The search runs in rounds of growing width: the first is greedy, the last keeps nearly all sets. Each
    round tries limits between the bound and the best peak by bisection, forwards and backwards in time.

    Parameters
    ----------
    seconds : float
        Time limit. When it is up, the result is the best order so far, with the bound.

    Raises
    ------
    InfeasibleError
        If all buffers together have more bytes than 64-bit offsets can address.
    KeyboardInterrupt
        On Ctrl-C.
    """
    start = time.monotonic()
    deadline = start + seconds
    original_peak_bytes = graph.peak_bytes()
    bound = _bound(len(graph.steps), *graph.tables, seconds * _BOUND_SHARE)
    state = _Progress(order=tuple(range(len(graph.steps))), peak_bytes=original_peak_bytes, bound_bytes=bound)
    width = _FIRST_WIDTH
    while not state.is_optimal and width <= _LARGEST_WIDTH and time.monotonic() < deadline:
        for backwards in (False, True):
            _search_round(graph, state, width, backwards, deadline)
        width *= _WIDTH_GROWTH
    return Order(
        order=state.order,
        peak_bytes=state.peak_bytes,
        original_peak_bytes=original_peak_bytes,
        lower_bound_bytes=state.bound_bytes,
        sets=state.sets,
        seconds=time.monotonic() - start,
    )


@dataclass(kw_only=True)
class _Progress:
    order: tuple[int, ...]
    peak_bytes: int
    bound_bytes: int
    sets: int = 0

    @property
    def is_optimal(self) -> bool:
        return self.peak_bytes <= self.bound_bytes


def _search_round(graph: StepGraph, state: _Progress, width: int, backwards: bool, deadline: float) -> None:
    order = np.zeros(len(graph.steps), np.int64)
    unit = max(math.gcd(*graph.tables[1][:, _STORAGE.fields.index("bytes")].tolist()), 1)
    # Below `low` there is no order, or the search of this width did not find one.
    low = limit = state.bound_bytes
    while low < state.peak_bytes and (remaining_seconds := deadline - time.monotonic()) > 0:
        answer = _search(len(graph.steps), *graph.tables, order, limit, width, backwards, remaining_seconds)
        state.sets += answer["sets"]
        if answer["outcome"] == _FEASIBLE:
            state.order, state.peak_bytes = tuple(order.tolist()), answer["bytes"]
        else:
            low = min(answer["bytes"], state.peak_bytes)  # below it, the search would make the same choices
            if answer["outcome"] == _INFEASIBLE:
                state.bound_bytes = max(state.bound_bytes, low)
        limit = low + (state.peak_bytes - low) // (2 * unit) * unit
