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
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from pimflow.core.candidate import Candidate, Cost, Footprint
from pimflow.core.kernel import ELEMENT_BYTES, RESULT_BYTES
from pimflow.core.region import APPEND, Region
from pimflow.core.rewrite import AttentionRewrite, Mode
from pimflow.errors import InfeasibleError, PlanError, UnsupportedOpError
from pimflow.hardware import System
from pimflow.pim_backend.programs.cache_schedule import KEYS, VALUES, CacheSchedule
from pimflow.pim_backend.programs.cached_attention import CachedAttention
from pimflow.placement.candidates.attention_tasks import (
    CachedRun,
    attention_tasks,
    partial_sum_bytes,
    softmax_kernels,
)
from pimflow.placement.candidates.candidates import CandidateGenerator, undominated
from pimflow.placement.costs.attention_runs import CacheWork, ProductCost
from pimflow.simulators.pim.timing import STRICT

PARTS = (1, 2, 4, 8)  # that are tried


def find_run(generator: CandidateGenerator, region: Region) -> CachedRun | None:
    """The run that ends with an attention region, if the appends come right before it, at one position."""
    graph = generator.graph
    if region.attention is None:
        return None
    position = graph.regions.index(region)
    preceding = graph.regions[max(position - 2, 0) : position]
    # Queries are operands before keys and values, or after them if operators before attention compute them.
    operands = [name for name in region.inputs if name in {before.name for before in preceding}]
    is_run = len(preceding) == 2 and operands == [before.name for before in preceding]
    if not is_run or any(
        before.operator != APPEND or set(graph.readers[before.name]) != {region.name} for before in preceding
    ):
        return None
    keys, values = preceding
    if keys.append_position != values.append_position:
        return None
    return CachedRun(keys=keys, values=values, attention=region)


def can_write_caches(system: System) -> bool:
    """Whether the system's timing has the command that writes to a cache."""
    return system.timing == "strict"


def unsupported_reason(generator: CandidateGenerator, region: Region) -> str:
    """Why PIM cannot do an attention region; empty if it can. Capacity is not checked."""
    attention, system = region.attention, generator.system
    assert attention is not None
    if not system.pim_channels:
        return "the system has no PIM channels"
    if attention.queries != 1:
        return f"attention of {attention.queries} tokens at once: PIM reads the keys again for each of them"
    if not attention.positioned:
        return "attention: no cache of one length that stays where it is (--context)"
    if find_run(generator, region) is None:
        return (
            "attention: PIM appends to keys and values right before it, at one position, and nothing else "
            "may read them"
        )
    if not system.gpu_channels:
        scores = math.prod(attention.score_shape) * system.pim.result_lanes * RESULT_BYTES[system.dtype]
        if scores > system.gpu.l2_bytes_per_channel * system.gpu.memory_channels:
            return (
                "attention: PIM in all channels, and the L2 cannot hold scores until these are plain memory"
            )
    if attention.cache_type and generator.costs.pim_target.profiler.name != STRICT:
        return f"attention: the profiler of PIM knows no caches of {attention.cache_type}"
    if not can_write_caches(system):
        return f"attention: the timing '{system.timing}' has no command that writes to a cache"
    return ""


def make(generator: CandidateGenerator, covers: Sequence[str], schedule: str) -> Candidate:
    """The candidate that does `covers` by the schedule of a plan.

    Raises `PlanError` if they are not the regions of attention over a cache, or the schedule is impossible.
    """
    error_prefix = f"regions {', '.join(covers)} cannot be PIM together"
    region = generator.graph.region(covers[-1])
    run = find_run(generator, region)
    if run is None or run.covers != tuple(covers):
        raise PlanError(
            f"{error_prefix}: they are not what appends to a cache and the attention that reads it"
        )
    if reason := unsupported_reason(generator, region):
        raise PlanError(f"{error_prefix}: {reason}")
    try:
        parsed = CacheSchedule.parse(schedule)
        group = parsed.group(region.attention_layer)
        costs = []
        for product, product_schedule in ((KEYS, parsed.keys), (VALUES, parsed.values)):
            work = CacheWork.from_attention(
                generator.costs.pim_target, group.with_full_cache(), product, group.read
            )
            schedules = work.schedules()
            if product_schedule not in schedules:
                names = "; ".join(f"'{product} {supported}'" for supported in schedules)
                raise PlanError(f"{error_prefix}: no schedule '{schedule}'; there are {names}")
            costs.append(generator.costs.product_cost(work, product_schedule))
    except (ValueError, UnsupportedOpError, InfeasibleError) as error:
        raise PlanError(f"{error_prefix}: {error}") from None
    keys, values = costs
    return _candidate(generator, run, keys, values, parsed.parts)


def is_cached(candidate: Candidate) -> bool:
    """Whether a candidate does attention in PIM."""
    return isinstance(candidate.rewrite, AttentionRewrite)


def cached_attention(generator: CandidateGenerator, candidate: Candidate, row_begin: int) -> CachedAttention:
    """The attention of a candidate, with its caches from row `row_begin` of the banks on."""
    assert isinstance(candidate.rewrite, AttentionRewrite)
    region, target = candidate.covers[-1], generator.costs.pim_target
    attention = generator.graph.region(region).attention_layer
    schedule = CacheSchedule.parse(candidate.rewrite.schedule)
    layouts = schedule.layouts(attention, target.pim, target.dtype, target.channels, row_begin)
    return CachedAttention.from_layouts(region, attention, schedule, layouts)


def attention_candidates(generator: CandidateGenerator) -> tuple[list[Candidate], dict[str, str]]:
    """All candidates that do attention in PIM; by region of attention, why there is none.

    The reason is empty for regions that PIM can do so, also if PIM is not among the requested modes.
    """
    candidates: list[Candidate] = []
    reasons: dict[str, str] = {}
    for region in generator.graph.regions:
        if region.attention is None:
            continue
        run, reason = find_run(generator, region), unsupported_reason(generator, region)
        try:
            if run and not reason and Mode.PIM in generator.modes:
                candidates += run_candidates(generator, run)
        except (UnsupportedOpError, InfeasibleError) as error:
            reason = str(error)
        reasons |= dict.fromkeys(run.covers if run else (region.name,), reason)
    return candidates, reasons


def run_candidates(generator: CandidateGenerator, run: CachedRun) -> list[Candidate]:
    """The Pareto-optimal candidates of one run, the fastest first.

    They have the fastest schedule for keys or that with the fewest rows, and any for values. More parts are
    tried as long as the softmax time that they hide exceeds the launches that they add.

    Raises
    ------
    UnsupportedOpError, InfeasibleError
        If its caches cannot lie in PIM.
    """
    builder, candidates = generator.task_builder, list[Candidate]()
    for parts in PARTS if generator.system.gpu_channels else PARTS[:1]:  # else nothing is hidden
        try:
            group = replace(_DEFAULT_SCHEDULE, parts=parts).group(run.attention.attention_layer)
            costs = generator.costs.attention_costs(group.with_full_cache(), group.read)
        except (UnsupportedOpError, InfeasibleError):
            if parts == 1:
                raise
            continue
        fastest, smallest = costs[KEYS][0], min(costs[KEYS], key=attrgetter("rows"))
        kernels = softmax_kernels(generator.system.dtype, run, fastest, parts).values()
        softmax_ns = parts * sum(builder.gpu_task("", kernel).execution_ns for kernel in kernels)
        if parts > 1 and softmax_ns * (1 - 1 / parts) < 2 * builder.submission_ns:
            continue
        for keys in {cost.schedule: cost for cost in (fastest, smallest)}.values():
            candidates += [_candidate(generator, run, keys, values, parts) for values in costs[VALUES]]
    return undominated(candidates, _figures)


_DEFAULT_SCHEDULE = CacheSchedule.parse(
    "keys vector-stationary, spread 1; values vector-stationary, spread 1"
)


def _figures(candidate: Candidate) -> tuple[float, ...]:
    """Time, energy and rows."""
    cost = Cost.from_candidate(candidate)
    return cost.latency_ns, cost.energy_pj, candidate.footprint.bank_rows


def _candidate(
    generator: CandidateGenerator, run: CachedRun, keys: ProductCost, values: ProductCost, parts: int
) -> Candidate:
    schedule = CacheSchedule(keys=keys.schedule, values=values.schedule, parts=parts)
    dtype, attention = generator.system.dtype, run.attention.attention_layer
    score_bytes = keys.product.results * keys.sums * parts * RESULT_BYTES[dtype]
    probability_bytes = math.prod(attention.score_shape) * ELEMENT_BYTES[dtype]
    return Candidate(
        name=f"PIM {schedule}",
        covers=run.covers,
        rewrite=AttentionRewrite(schedule=str(schedule)),
        tasks=attention_tasks(generator, run, keys, values, parts),
        footprint=Footprint(
            bank_rows=(keys.rows + values.rows) * parts,
            workspace_bytes=score_bytes + probability_bytes + partial_sum_bytes(dtype, run, values),
        ),
    )
