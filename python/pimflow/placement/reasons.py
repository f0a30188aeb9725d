"""Reasons why regions stay on the GPU."""

from __future__ import annotations

from pimflow.core.candidate import Candidate, Cost, CostTable
from pimflow.placement.candidates.cached import is_cached
from pimflow.placement.solvers.evaluate import Evaluation


def reason(
    table: CostTable, chosen: Candidate, gpu_only: Evaluation, mixed: bool, which: str, rows_left: int
) -> str:
    """Why a region stays on the GPU; empty if it does not.

    Parameters
    ----------
    chosen : Candidate
        The region's candidate in the plan.
    gpu_only : Evaluation
        The same regions on the GPU with all memory channels.
    mixed : bool
        Whether the plan uses PIM.
    which : str
        Subject of the reason if the plan does not, such as "no mixed plan of the changed network".
    rows_left : int
        Rows of each PIM bank that the plan leaves free.
    """
    name = chosen.covers[0]
    if chosen.rewrite.mode != "GPU":
        return ""
    if name in table.refused:
        return table.refused[name]
    together = [c for c in table.several.get(name, ()) if is_cached(c)]
    alone = [c for c in table.candidates[name] if len(c.covers) == 1 and c.rewrite.mode != "GPU"]
    least = min((c.placed_rows for c in together or alone), default=0)
    if least > rows_left:
        what = f"{', '.join(together[0].covers)} together" if together else "its weights"
        return f"{what} take at least {least} rows of each PIM bank; the rest leaves {rows_left}"
    if not mixed:
        return f"{which} beats the GPU with all channels ({gpu_only.latency_ns / 1e3:.1f} us)"
    if len(chosen.covers) > 1:
        return f"one candidate, {chosen.name}, does {', '.join(chosen.covers)}"
    if together:
        return _of_cache(table, min(together, key=lambda c: Cost.of(c).latency_ns))
    if not alone:
        return "none of the modes that were asked for does it alone in another way"
    best = min(alone, key=lambda c: Cost.of(c).latency_ns)
    chosen_ns = Cost.of(chosen).latency_ns  # an edited plan's candidate may not be in the table
    best_ns = Cost.of(best).latency_ns
    times = f"{best.name} takes {best_ns / 1e3:.1f} us, the GPU {chosen_ns / 1e3:.1f} us"
    return times if best_ns >= chosen_ns else f"{times}, but transitions around it cost more than that saves"


def _of_cache(table: CostTable, best: Candidate) -> str:
    """Why the regions of `best`, a candidate of attention in PIM, stay on the GPU."""
    best_ns = Cost.of(best).latency_ns
    on_gpu = ([c for c in table.candidates[name] if c.rewrite.mode == "GPU"] for name in best.covers)
    gpu_ns = sum(min(Cost.of(c).latency_ns for c in each) for name, each in zip(best.covers, on_gpu) if each)
    names = ", ".join(best.covers)
    times = f"{names} together take {best_ns / 1e3:.1f} us on PIM, {gpu_ns / 1e3:.1f} us on the GPU"
    return times if best_ns >= gpu_ns else f"{times}, but transitions around them cost more than that saves"
