"""Reasons why regions stay on the GPU."""

from __future__ import annotations

from pimflow.core.candidate import Candidate, Cost, CostTable
from pimflow.placement.candidates.pim_attention import is_cached
from pimflow.placement.solvers.evaluate import Evaluation


def reason(
    table: CostTable, candidate: Candidate, gpu_only: Evaluation, is_mixed: bool, subject: str, free_rows: int
) -> str:
    """Why a region stays on the GPU; empty if it does not.

    Parameters
    ----------
    candidate : Candidate
        The region's candidate in the plan.
    gpu_only : Evaluation
        The same regions on the GPU with all memory channels.
    is_mixed : bool
        Whether the plan uses PIM; `subject` is the subject of the reason if it does not.
    free_rows : int
        Rows of each PIM bank that the plan leaves free.
    """
    name = candidate.covers[0]
    if candidate.uses_pim:
        return ""
    if name in table.unsupported_reasons:
        return table.unsupported_reasons[name]
    cached_candidates = [c for c in table.multi_region_candidates.get(name, ()) if is_cached(c)]
    single_candidates = [c for c in table.candidates[name] if len(c.covers) == 1 and c.uses_pim]
    min_rows = min((c.footprint.bank_rows for c in cached_candidates or single_candidates), default=0)
    if min_rows > free_rows:
        requirement = (
            f"{', '.join(cached_candidates[0].covers)} together" if cached_candidates else "its weights"
        )
        return f"{requirement} take at least {min_rows} rows of each PIM bank; the rest leaves {free_rows}"
    if not is_mixed:
        return f"{subject} beats the GPU with all channels ({gpu_only.latency_ns / 1e3:.1f} us)"
    if len(candidate.covers) > 1:
        return f"one candidate, {candidate.name}, does {', '.join(candidate.covers)}"
    if cached_candidates:
        return _cache_reason(table, min(cached_candidates, key=_standalone_ns))
    if not single_candidates:
        return "none of the modes that were asked for does it alone in another way"
    best = min(single_candidates, key=_standalone_ns)
    candidate_ns, best_ns = _standalone_ns(candidate), _standalone_ns(best)
    times = f"{best.name} takes {best_ns / 1e3:.1f} us, the GPU {candidate_ns / 1e3:.1f} us"
    return (
        times if best_ns >= candidate_ns else f"{times}, but transitions around it cost more than that saves"
    )


def _cache_reason(table: CostTable, best: Candidate) -> str:
    """Why the regions of `best`, a candidate of attention in PIM, stay on the GPU."""
    best_ns = _standalone_ns(best)
    gpu_candidates = ([c for c in table.candidates[name] if not c.uses_pim] for name in best.covers)
    gpu_ns = sum(
        min(_standalone_ns(c) for c in candidates)
        for name, candidates in zip(best.covers, gpu_candidates)
        if candidates
    )
    names = ", ".join(best.covers)
    times = f"{names} together take {best_ns / 1e3:.1f} us on PIM, {gpu_ns / 1e3:.1f} us on the GPU"
    return times if best_ns >= gpu_ns else f"{times}, but transitions around them cost more than that saves"


def _standalone_ns(candidate: Candidate) -> float:
    return Cost.from_candidate(candidate).latency_ns
