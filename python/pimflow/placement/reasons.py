"""Why regions stayed on the GPU."""

from __future__ import annotations

from pimflow.core.candidate import Candidate, Cost, CostTable
from pimflow.placement.solvers.evaluate import Evaluation


def reason(table: CostTable, chosen: Candidate, gpu_only: Evaluation, mixed: bool, which: str) -> str:
    """Why a region stayed on the GPU; empty if it did not.

    Parameters
    ----------
    chosen : Candidate
        What does it.
    gpu_only : Evaluation
        Of the same regions on the GPU with all memory channels.
    mixed : bool
        Whether the plan has anything on PIM.
    which : str
        What the plans are called that were searched for: of a network that was changed, of that.
    """
    name = chosen.covers[0]
    if chosen.rewrite.mode != "GPU":
        return ""
    if name in table.refused:
        return table.refused[name]
    if not mixed:
        return f"{which} beats the GPU with all channels ({gpu_only.latency_ns / 1e3:.1f} us)"
    if len(chosen.covers) > 1:
        return f"one candidate, {chosen.name}, does {', '.join(chosen.covers)}"
    alone = [c for c in table.candidates[name] if len(c.covers) == 1]
    others = [c for c in alone if c.rewrite.mode != "GPU"]
    if not others:
        return "none of the modes that were asked for does it alone in another way"
    best = min(others, key=lambda c: table.cost(name, c).latency_ns)
    here, there = Cost.of(chosen).latency_ns, table.cost(name, best).latency_ns  # an edited plan's may be new
    times = f"{best.name} takes {there / 1e3:.1f} us, the GPU {here / 1e3:.1f} us"
    return times if there >= here else f"{times}, but transitions around it cost more than that saves"
