"""Candidates that do attention over a cache in PIM: both products on PIM, the softmax on the GPU.

Such a candidate covers three regions: the append to the keys, the append to the values, and attention. PIM
writes the new key, multiplies the queries with all keys and writes the new value. The GPU computes the
softmax of the scores, and PIM multiplies its result with all values. Keys and values stay in the banks from
step to step, in the layout of the schedule, so neither is ever copied.

With several parts, heads or requests are divided into groups: PIM computes products of one group while the
GPU computes the softmax of another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pimflow.core.attention import Attention
from pimflow.core.candidate import Candidate, Cost, Port, Rewrite, Task
from pimflow.core.region import APPEND, ELEMENT_BYTES, RESULT_BYTES, Kernel, Region, RegionGraph
from pimflow.errors import InfeasibleError, PlanError, UnsupportedOpError
from pimflow.hardware import System
from pimflow.pim_backend.programs.cache_schedule import CacheSchedule
from pimflow.placement.candidates.candidates import Candidates
from pimflow.placement.costs.attention_runs import KEYS, VALUES, CacheWork, ProductCost
from pimflow.placement.costs.costs import CacheCosts
from pimflow.placement.costs.pim_runs import PimCost

PARTS = (1, 2, 4, 8)  # that are tried


@dataclass(frozen=True, kw_only=True)
class CachedRun:
    """The regions that append to keys and to values, and the attention that reads both."""

    keys: Region
    values: Region
    attention: Region

    @property
    def covers(self) -> tuple[str, ...]:
        return (self.keys.name, self.values.name, self.attention.name)

    @property
    def queries(self) -> int:
        """Elements of Q."""
        return math.prod(self.attention.attends.query_shape)

    @property
    def beside(self) -> int:
        """Elements of the mask and the positions, unless they are constants."""
        return sum(self._others[: self._first_source])

    @property
    def sources(self) -> int:
        """Elements of the tensors that the operators before attention compute Q from."""
        return sum(self._others[self._first_source :])

    @property
    def _others(self) -> list[int]:
        """Elements of each operand other than Q, K and V."""
        region, of_query = self.attention, 0 if self.attention.prologue else 1
        operands = list(zip(region.inputs, region.input_elements))[of_query : region.operands]
        return [elements for name, elements in operands if name not in self.covers]

    @property
    def _first_source(self) -> int:
        """How many of `_others` come before the sources of Q: a mask and positions that are no constants."""
        attention, others = self.attention.attends, len(self._others)
        return min(attention.masked + attention.positioned, others - bool(self.attention.prologue))


def run_of(maker: Candidates, region: Region) -> CachedRun | None:
    """The run that ends with an attention region, if the appends come right before it, at one position."""
    graph = maker.graph
    if region.attention is None:
        return None
    position = [each.name for each in graph.regions].index(region.name)
    before = {each.name: each for each in graph.regions[max(position - 2, 0) : position]}
    # Queries are operands before keys and values, or after them if operators before attention compute them.
    appends = [before[name] for name in region.inputs if name in before and before[name].operator == APPEND]
    if len(appends) != 2:
        return None
    keys, values = appends
    if [keys.name, values.name] != list(before) or any(
        set(graph.readers[each.name]) != {region.name} for each in (keys, values)
    ):
        return None
    if keys.append_position != values.append_position:
        return None
    return CachedRun(keys=keys, values=values, attention=region)


def writes_caches(system: System) -> bool:
    """Whether the system's timing has the command that writes to a cache."""
    return system.timing == "strict"


def refusal(maker: Candidates, region: Region) -> str:
    """Why PIM cannot do an attention region; empty if it can. Capacity is not checked."""
    attention, system = region.attention, maker.system
    assert attention is not None
    if not system.pim_channels:
        return "the system has no PIM channels"
    if attention.queries != 1:
        return f"attention of {attention.queries} tokens at once: PIM reads the keys again for each of them"
    if not attention.positioned:
        return "attention: no cache of one length that stays where it is (--context)"
    if run_of(maker, region) is None:
        return (
            "attention: PIM appends to keys and values right before it, at one position, and nothing else "
            "may read them"
        )
    if not system.gpu_channels:
        return "attention: PIM in all channels leaves the GPU none for the softmax between its products"
    if not writes_caches(system):
        return f"attention: the timing '{system.timing}' has no command that writes to a cache"
    return ""


@dataclass(frozen=True, kw_only=True)
class CachedCandidates:
    """The candidates of a network that do attention in PIM.

    Attributes
    ----------
    candidates : dict of str to tuple of Candidate
        By first region.
    capable : frozenset of str
        Regions that PIM can do so, whether or not PIM is among the requested modes.
    refused : dict of str to str
        By region of other attention, why PIM cannot do it.
    """

    candidates: dict[str, tuple[Candidate, ...]]
    capable: frozenset[str]
    refused: dict[str, str]


def make(maker: Candidates, covers: Sequence[str], schedule: str) -> Candidate:
    """The candidate that does `covers` by the schedule of a plan.

    Raises
    ------
    PlanError
        If `covers` are not the regions of attention over a cache, or the schedule is impossible.
    """
    where = f"regions {', '.join(covers)} cannot be PIM together"
    region = maker.graph.region(covers[-1])
    run = run_of(maker, region)
    if run is None or run.covers != tuple(covers):
        raise PlanError(f"{where}: they are not what appends to a cache and the attention that reads it")
    if problem := refusal(maker, region):
        raise PlanError(f"{where}: {problem}")
    try:
        parsed = CacheSchedule.parse(schedule)
        group = parsed.group(region.attends)
        costs = []
        for product, own in ((KEYS, parsed.keys), (VALUES, parsed.values)):
            work = CacheWork.like(maker.costs.side, group.of_all_places(), product, group.read)
            known = work.schedules()
            if own not in known:
                names = "; ".join(f"'{product} {each}'" for each in known)
                raise PlanError(f"{where}: no schedule '{schedule}'; there are {names}")
            costs.append(maker.costs.product(work, own))
    except (ValueError, UnsupportedOpError, InfeasibleError) as error:
        raise PlanError(f"{where}: {error}") from None
    keys, values = costs
    return _candidate(maker, run, parsed, keys, values)


@dataclass(frozen=True, kw_only=True)
class PlacedCache:
    """Attention over a cache in PIM, with its place in the banks.

    Attributes
    ----------
    keys, values, region : str
        The regions that append, and the attention region.
    attention : Attention
    schedule : CacheSchedule
    row_begin : int
        First row of its caches in every bank, counted from the first row for weights.
    """

    keys: str
    values: str
    region: str
    attention: Attention
    schedule: CacheSchedule
    row_begin: int


def is_cached(candidate: Candidate) -> bool:
    """Whether a candidate does attention in PIM."""
    return candidate.rewrite.mode == "PIM" and len(candidate.covers) > 1


def placed(graph: RegionGraph, candidate: Candidate, row_begin: int) -> PlacedCache:
    """The attention of a candidate of `found`, with its caches from row `row_begin` on."""
    keys, values, region = candidate.covers
    attention = graph.region(region).attention
    assert attention is not None
    schedule = CacheSchedule.parse(candidate.rewrite.schedule)
    return PlacedCache(
        keys=keys,
        values=values,
        region=region,
        attention=attention,
        schedule=schedule,
        row_begin=row_begin,
    )


def found(maker: Candidates) -> CachedCandidates:
    """All candidates that do attention in PIM, and the reasons why other attention has none."""
    made: dict[str, tuple[Candidate, ...]] = {}
    refused: dict[str, str] = {}
    capable: set[str] = set()
    for region in maker.graph.regions:
        if region.attention is None:
            continue
        run, problem = run_of(maker, region), refusal(maker, region)
        covers = run.covers if run else (region.name,)
        capable.update(covers)
        try:
            if run and not problem and "PIM" in maker.modes:
                made[covers[0]] = of_run(maker, run)
        except (UnsupportedOpError, InfeasibleError) as error:
            problem = str(error)
        if problem:
            refused |= dict.fromkeys(covers, problem)
    return CachedCandidates(candidates=made, capable=frozenset(capable - refused.keys()), refused=refused)


def of_run(maker: Candidates, run: CachedRun) -> tuple[Candidate, ...]:
    """The Pareto-optimal candidates of one run, the fastest first.

    Raises
    ------
    UnsupportedOpError, InfeasibleError
        If its caches cannot lie in PIM.
    """
    return _front(list(_every(maker, run)))


def _every(maker: Candidates, run: CachedRun) -> Iterator[Candidate]:
    """Candidates by the fastest schedule for keys and by that with the fewest rows, and by all for values.

    More parts are tried as long as the softmax time that they hide exceeds the launches that they add.
    """
    attention, sub_ns = run.attention.attends, maker.tasks.submission_ns
    for parts in PARTS:
        try:
            group = replace(_ANY, parts=parts).group(attention)
            found = _costs(maker, group)
        except (UnsupportedOpError, InfeasibleError):
            if parts == 1:
                raise
            continue
        softmax_ns = maker.tasks.gpu("", _softmax(maker, run, found.keys[0], parts)).execution_ns * parts
        if parts > 1 and softmax_ns * (1 - 1 / parts) < 2 * sub_ns:
            continue
        for keys in {each.schedule: each for each in (found.keys[0], min(found.keys, key=_rows))}.values():
            for values in found.values:
                schedule = CacheSchedule(keys=keys.schedule, values=values.schedule, parts=parts)
                yield _candidate(maker, run, schedule, keys, values)


def _costs(maker: Candidates, group: Attention) -> CacheCosts:
    """Costs of a group's products over the part of the cache that it reads; raises as `Costs.caches`."""
    return maker.costs.caches([(group.of_all_places(), group.read)])[0]


_ANY = CacheSchedule.parse("keys vector-stationary, spread 1; values vector-stationary, spread 1")


def _rows(cost: ProductCost) -> int:
    return cost.rows


def _front(every: list[Candidate]) -> tuple[Candidate, ...]:
    """The candidates that are Pareto-optimal in time, energy and rows, the fastest first."""

    def figures(candidate: Candidate) -> tuple[float, float, int]:
        """Latency, energy and rows."""
        cost = Cost.of(candidate)
        return cost.latency_ns, cost.energy_pj, candidate.placed_rows

    kept: list[tuple[tuple[float, float, int], Candidate]] = []
    for own, candidate in sorted(((figures(each), each) for each in every), key=lambda pair: pair[0]):
        if not any(all(a <= b for a, b in zip(other, own)) for other, _ in kept):
            kept.append((own, candidate))
    return tuple(candidate for _, candidate in kept)


def _candidate(
    maker: Candidates, run: CachedRun, schedule: CacheSchedule, keys: ProductCost, values: ProductCost
) -> Candidate:
    region, system = run.attention, maker.system
    sums = _sums_bytes(maker, run, values)
    scores = keys.product.results * keys.sums * schedule.parts
    port = Port(dtype=system.dtype)
    return Candidate(
        name=f"PIM {schedule}",
        covers=run.covers,
        gpu_share=0.0,
        input=port,
        output=port,
        tasks=_tasks(maker, run, schedule, keys, values),
        rewrite=Rewrite(mode="PIM", gpu_rows=0, schedule=str(schedule)),
        placed_rows=(keys.rows + values.rows) * schedule.parts,
        workspace_bytes=scores * RESULT_BYTES[system.dtype]
        + math.prod(region.attends.score_shape) * ELEMENT_BYTES[system.dtype]
        + sums,
    )


def _tasks(
    maker: Candidates, run: CachedRun, schedule: CacheSchedule, keys: ProductCost, values: ProductCost
) -> tuple[Task, ...]:
    """Scores of each group, then products of the group before with its values; see the module docstring."""
    name, parts = run.attention.name, schedule.parts
    tasks: list[Task] = []
    if run.attention.made_before:
        tasks.append(_made_queries(maker, run))
    first = tuple(range(len(tasks)))
    queries, shares = run.queries, math.prod(run.attention.attends.score_shape)

    def on_pim(
        label: str,
        cost: PimCost,
        read: int,
        after: tuple[int, ...],
        sums: int = 1,
        submitted: bool = True,
    ) -> tuple[int, ...]:
        """Append the tasks of a program, `submitted` by itself or as part of the previous submission."""
        begun = len(tasks)
        made = maker.tasks.pim(label, cost, read // parts, sums)
        if not submitted:
            made = [replace(task, launch_ns=0.0, launched=False) for task in made]
        tasks.extend(task.waiting_for(after) for task in made)
        return tuple(range(begun, len(tasks)))

    softmaxes: list[tuple[int, ...]] = []
    for turn in range(parts + 1):
        which = f", {turn + 1} of {parts}" if parts > 1 else ""
        if turn < parts:
            appended = on_pim(f"{run.keys.name}{which}", keys.append, run.keys.appended_elements, first)
            begun = appended[:1]
            scored = on_pim(
                f"{name} scores{which}", keys.product, queries, begun, sums=keys.sums, submitted=False
            )
            read = run.values.appended_elements
            on_pim(f"{run.values.name}{which}", values.append, read, begun, submitted=False)
            count, label, kernel = len(tasks), f"{name} (softmax{which})", _softmax(maker, run, keys, parts)
            softmax = [maker.tasks.gpu(label, kernel)]
            if parts > 1:
                softmax = maker.tasks.gpu_beside_pim(label, name, kernel)
            tasks.extend(task.waiting_for(scored) for task in softmax)
            softmaxes.append(tuple(range(count, len(tasks))))
        if turn:
            which = f", {turn} of {parts}" if parts > 1 else ""
            on_pim(f"{name} values{which}", values.product, shares, softmaxes[turn - 1], sums=values.sums)
    done = tuple(range(len(tasks)))
    tasks += [task.waiting_for(done) for task in _last(maker, run, values)]
    return tuple(tasks)


def _softmax(maker: Candidates, run: CachedRun, keys: ProductCost, parts: int) -> Kernel:
    """The kernel that computes the softmax of the scores of one of `parts` groups."""
    region, dtype = run.attention, maker.system.dtype
    scores = keys.product.results * keys.sums
    return Kernel(
        kind="stream",
        macs=scores + run.beside,
        input_bytes=scores * RESULT_BYTES[dtype] + run.beside * ELEMENT_BYTES[dtype],
        output_bytes=math.prod(region.attends.score_shape) // parts * ELEMENT_BYTES[dtype],
    )


def _sums_bytes(maker: Candidates, run: CachedRun, values: ProductCost) -> int:
    """Bytes of the partial sums to add up; 0 if there is one for each element."""
    elements = math.prod(run.attention.attends.output_shape)
    return elements * values.sums * RESULT_BYTES[maker.system.dtype] if values.sums > 1 else 0


def _last(maker: Candidates, run: CachedRun, values: ProductCost) -> list[Task]:
    """The kernel that adds up partial sums and does the epilogue; none if there is nothing to do."""
    read = _sums_bytes(maker, run, values)
    if not (read or run.attention.made_behind) or not maker.system.charges("epilogue"):
        return []
    result = math.prod(run.attention.attends.output_shape)
    read += 0 if read else result * RESULT_BYTES[maker.system.dtype]
    read += sum(run.attention.input_elements[run.attention.operands :]) * ELEMENT_BYTES[maker.system.dtype]
    kernel = Kernel(
        kind="stream",
        macs=(values.sums - 1) * result,
        input_bytes=read,
        output_bytes=run.attention.output_elements * ELEMENT_BYTES[maker.system.dtype],
    )
    return [maker.tasks.gpu(f"{run.attention.name} (sums)", kernel)]


def _made_queries(maker: Candidates, run: CachedRun) -> Task:
    """The kernel of the operators before attention, which compute the queries."""
    element, what = ELEMENT_BYTES[maker.system.dtype], ", ".join(run.attention.prologue)
    kernel = Kernel(kind="stream", input_bytes=run.sources * element, output_bytes=run.queries * element)
    return maker.tasks.gpu(f"{run.attention.name} ({what})", kernel)
