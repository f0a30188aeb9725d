"""Explain the choice for a layer: every candidate with its costs, and how these are known."""

from __future__ import annotations

from dataclasses import dataclass

from pimflow.api.layer_details import every_candidate, known_parts, schedule_text
from pimflow.api.report import Baselines, Estimate
from pimflow.core.candidate import Candidate, Cost, Task
from pimflow.core.json_form import Json, fields_form
from pimflow.core.region import Region
from pimflow.placement import Searched
from pimflow.placement.candidates import finished, grouped
from pimflow.placement.candidates.grouped import Way


@dataclass(frozen=True, kw_only=True)
class ExplainedCandidate:
    """A candidate of a region, which may cover further regions.

    Attributes
    ----------
    chosen : bool
        Whether it is in the plan.
    channels : str
        Memory channels of its tensors, as in `core.plan.Choice`.
    pending : tuple of str
        Deferred epilogue: operators that the readers of its output compute.
    cost : Cost
    tasks : tuple of Task
    """

    name: str
    covers: tuple[str, ...]
    chosen: bool
    gpu_share: float | None
    schedule: str
    channels: str
    pending: tuple[str, ...]
    cost: Cost
    tasks: tuple[Task, ...]

    @classmethod
    def of(cls, candidate: Candidate, chosen: Candidate) -> ExplainedCandidate:
        """From a candidate, and the one that the plan has."""
        return cls(
            name=candidate.name,
            covers=candidate.covers,
            chosen=candidate == chosen,
            gpu_share=candidate.gpu_share,
            schedule=schedule_text(candidate),
            channels=candidate.rewrite.channels,
            pending=tuple(candidate.output.pending),
            cost=Cost.of(candidate),
            tasks=tuple(candidate.tasks),
        )

    def to_json(self) -> dict[str, Json]:
        """The fields as JSON, with the energy of each task."""
        tasks: list[Json] = [fields_form(task) | {"energy_pj": task.energy_pj} for task in self.tasks]
        return fields_form(self) | {"tasks": tasks}


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Every candidate of a region, and the reason of the choice.

    Attributes
    ----------
    refused : str
        Why PIM cannot compute the region; empty if it can.
    unfinished : str
        Why the GPU computes the epilogue of a product on PIM; empty if PIM may, or there is no epilogue.
    activation_ns : float
        Lower bound of the time that the device's activation unit adds; 0 if it has none for the epilogue.
    settle_ns : float
        Time of a GPU kernel that computes only the epilogue.
    at_best : tuple of Way
        Lower bounds for a grouped convolution on PIM, by methods that are no candidates.
    gpu_ns : float
        Time of the region on the GPU, with the memory channels that the plan gives to the GPU.
    rank : str
        Rank of the decomposed layer that it is a part of, if a search chose it; else empty.
    estimate : Estimate
        How the plan was found.
    latency_ns : float
        Latency of the whole plan.
    baselines : Baselines
        Latencies that it is compared with.
    """

    region: str
    operators: tuple[str, ...]
    output_shape: tuple[int, ...]
    refused: str
    unfinished: str
    activation_ns: float
    settle_ns: float
    at_best: tuple[Way, ...]
    gpu_ns: float
    reason: str
    rank: str
    candidates: tuple[ExplainedCandidate, ...]
    estimate: Estimate
    latency_ns: float
    baselines: Baselines

    def to_json(self) -> dict[str, Json]:
        """What ``pimflow compile --explain --json`` prints."""
        return fields_form(self) | {"candidates": [each.to_json() for each in self.candidates]}

    def text(self) -> str:
        """The explanation as text; a star marks the chosen candidate."""
        shape = list(self.output_shape)
        lines = [f"region    {self.region}: {' + '.join(self.operators)}, {shape}"]
        if self.rank:
            lines.append(f"rank      {self.rank}")
        if self.refused:
            lines.append(f"          not on PIM: {self.refused}")
        for way in self.at_best:
            times = f"{way.least_ns / 1e3:.2f} us at least, the GPU {self.gpu_ns / 1e3:.2f} us"
            lines.append(f"          {way.how}: {times}")
        if self.unfinished:
            lines.append(f"          not finished on PIM: {self.unfinished}")
        if self.activation_ns:
            times = f"{self.activation_ns / 1e3:.2f} us at least, a kernel {self.settle_ns / 1e3:.2f} us"
            lines.append(f"          its activation unit changes rows for every result: {times}")
        shown = self._shown()
        for candidate in shown:
            cost, mark = candidate.cost, "*" if candidate.chosen else " "
            pending = f", leaves {', '.join(candidate.pending)}" if candidate.pending else ""
            known = ", ".join(f"{resource} {how}" for resource, how in known_parts(cost).items())
            schedule = candidate.schedule if candidate.schedule not in candidate.name else ""
            lines.append(
                f"{mark} {candidate.name:<24} {cost.latency_ns / 1e3:>8.2f} us  "
                f"{cost.energy_pj / 1e6:>8.2f} uJ  {known}  {schedule}{pending}".rstrip()
            )
            lines += [f"      {_task_text(task)}" for task in candidate.tasks]
        if more := len(self.candidates) - len(shown):
            lines.append(f"          {more} more at other channels: --json lists them")
        if self.reason:
            lines.append(f"reason    {self.reason}")
        found = f"least {self.estimate.objective} by {self.estimate.solver}"
        lines.append(f"plan      {self.latency_ns / 1e6:.4f} ms, {found}; {self.baselines.text()}")
        return "\n".join(lines)

    def _shown(self) -> list[ExplainedCandidate]:
        """Candidates to print.

        Of candidates that differ only in memory channels: the first, the chosen, and the fastest of the rest.
        """
        alike: dict[tuple[object, ...], list[ExplainedCandidate]] = {}
        for each in self.candidates:
            way = each.name.removesuffix(each.channels).removesuffix(" at ").removesuffix(", ")
            alike.setdefault((each.covers, way), []).append(each)
        kept = set()
        for first, *others in alike.values():
            kept.add(first.name)
            kept.update(each.name for each in sorted(others, key=lambda each: each.cost.latency_ns)[:1])
        return [each for each in self.candidates if each.chosen or each.name in kept]


def explain(searched: Searched, region: Region) -> Explanation:
    """Explain the choice for a region: all candidates with tasks and costs, and the reason."""
    chosen = searched.doing[region.name]
    refused = searched.table.refused.get(region.name, "")
    follows = region.epilogue and region.geometry and not refused
    maker = searched.maker
    priced = grouped.ways(region, searched.system, maker.tasks.submission_ns)
    gpu_ns = min(Cost.of(each).latency_ns for each in maker.on_gpu(region, searched.plan.gpu_channels))
    return Explanation(
        region=region.name,
        operators=tuple(region.operators),
        output_shape=tuple(region.output_shape),
        refused=refused,
        unfinished=maker.unfinished(region) if follows else "",
        activation_ns=finished.activation_ns(region, searched.system) if follows else 0.0,
        settle_ns=searched.table.settle[region.name].latency_ns if follows else 0.0,
        at_best=tuple(priced),
        gpu_ns=gpu_ns,
        reason=searched.plan.choice(region.name).reason,
        rank=searched.plan.ranks.get(region.name.rpartition(".")[0], ""),
        candidates=tuple(ExplainedCandidate.of(each, chosen) for each in every_candidate(searched, region)),
        estimate=Estimate.of(searched),
        latency_ns=searched.evaluation.latency_ns,
        baselines=Baselines.of(searched),
    )


def _task_text(task: Task) -> str:
    launch = f"launch {task.launch_ns / 1e3:.2f} + " if task.launch_ns else ""
    return (
        f"{task.resource:<8} {launch}{task.execution_ns / 1e3:.2f} us, {task.moved_bytes} bytes, "
        f"{task.energy_pj / 1e6:.3f} uJ ({task.known.value})  {task.label}"
    )
