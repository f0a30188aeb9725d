"""Why a layer is done as it is: every candidate with its costs, and how these are known."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pimflow.core.candidate import Candidate, Cost
from pimflow.core.region import Region
from pimflow.placement import Searched


def known_parts(cost: Cost) -> dict[str, str]:
    """By resource, how a cost is known."""
    return {resource: known.value for resource, known in cost.known.items()}


def _known_text(parts: dict[str, str]) -> str:
    return ", ".join(f"{resource} {known}" for resource, known in parts.items())


def schedule_text(candidate: Candidate) -> str:
    """Loop orders of a candidate; of a pipeline, one a region on PIM."""
    return candidate.rewrite.schedule or "; ".join(filter(None, candidate.rewrite.schedules))


def explanation(searched: Searched, region: Region) -> dict[str, Any]:
    """Every candidate of a region with its tasks and costs, and which one was chosen why."""
    chosen = searched.doing[region.name]
    candidates = list(searched.table.candidates[region.name])
    if chosen not in candidates:
        candidates.append(chosen)
    return {
        "region": region.name,
        "operators": list(region.operators),
        "output_shape": list(region.output_shape),
        "refused": searched.table.refused.get(region.name, ""),
        "reason": searched.plan.choice(region.name).reason,
        "candidates": [
            {
                "name": candidate.name,
                "covers": list(candidate.covers),
                "chosen": candidate == chosen,
                "gpu_share": candidate.gpu_share,
                "schedule": schedule_text(candidate),
                "pending": list(candidate.output.pending),
                "cost": {**asdict(Cost.of(candidate)), "known": known_parts(Cost.of(candidate))},
                "tasks": [
                    {**asdict(task), "energy_pj": task.energy_pj, "known": task.known.value}
                    for task in candidate.tasks
                ],
            }
            for candidate in candidates
        ],
    }


def explain(searched: Searched, region: Region) -> str:
    """`explanation` as text; the chosen candidate is starred."""
    found = explanation(searched, region)
    lines = [f"region    {region.name}: {' + '.join(found['operators'])}, {found['output_shape']}"]
    if found["refused"]:
        lines.append(f"          not on PIM: {found['refused']}")
    for candidate in found["candidates"]:
        cost = candidate["cost"]
        mark = "*" if candidate["chosen"] else " "
        pending = f", leaves {', '.join(candidate['pending'])}" if candidate["pending"] else ""
        known = _known_text(cost["known"])
        lines.append(
            f"{mark} {candidate['name']:<24} {cost['latency_ns'] / 1e3:>8.2f} us  "
            f"{cost['energy_pj'] / 1e6:>8.2f} uJ  {known}  {candidate['schedule']}{pending}"
        )
        lines += [f"      {_task(task)}" for task in candidate["tasks"]]
    if found["reason"]:
        lines.append(f"reason    {found['reason']}")
    return "\n".join(lines)


def _task(task: dict[str, Any]) -> str:
    launch = f"launch {task['launch_ns'] / 1e3:.2f} + " if task["launch_ns"] else ""
    return (
        f"{task['resource']:<8} {launch}{task['execution_ns'] / 1e3:.2f} us, {task['moved_bytes']} bytes, "
        f"{task['energy_pj'] / 1e6:.3f} uJ ({task['known']})  {task['label']}"
    )
