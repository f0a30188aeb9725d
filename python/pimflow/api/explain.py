"""Why a layer is done as it is: every candidate with its costs, and how these are known."""

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
    """A way to do a region, alone or with others.

    Attributes
    ----------
    chosen : bool
        Whether the plan has it.
    channels : str
        Where tensors lie, as `core.plan.Choice` has it.
    pending : tuple of str
        What is left to the readers of its output.
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
        """Tasks with their energy, which they compute."""
        tasks: list[Json] = [fields_form(task) | {"energy_pj": task.energy_pj} for task in self.tasks]
        return fields_form(self) | {"tasks": tasks}


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Every candidate of a region, and which one was chosen why.

    Attributes
    ----------
    refused : str
        Why PIM cannot do it; empty if it can.
    unfinished : str
        Why what follows a product on PIM is left to the GPU; empty if PIM may do it, or nothing follows.
    activation_ns : float
        What the device's activation unit would add at least, if it has one for what follows; else 0.
    settle_ns : float
        What a kernel of the GPU takes that does nothing but what follows.
    at_best : tuple of Way
        Of a grouped convolution, lower bounds of ways to compute it on PIM that are no candidates.
    gpu_ns : float
        What the region takes on the GPU, with the memory channels that the plan leaves it.
    rank : str
        Of the chain that it is a link of, where a search chose that; else empty.
    estimate : Estimate
        How the plan was found.
    latency_ns : float
        Of the whole plan.
    baselines : Baselines
        What that is compared with.
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
        """The same for people; the chosen candidate is starred."""
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
        """Of candidates that differ only in where tensors lie: the first, the chosen, the quickest other."""
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
    """Every candidate of a region with its tasks and costs, and which one was chosen why."""
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
