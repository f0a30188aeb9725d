"""Explain the choice for a layer: every candidate with its costs, and how these are known."""

from __future__ import annotations

from dataclasses import dataclass

from pimflow.commands.shared.layer_details import all_candidates, schedule_text
from pimflow.commands.shared.plan_report import Baselines, Estimate
from pimflow.core.candidate import Candidate, Cost, Task
from pimflow.core.json_form import Json, fields_form
from pimflow.core.region import Region
from pimflow.placement import SearchResult
from pimflow.placement.candidates import pim_epilogue
from pimflow.simulators.pim.elementwise_bound import ElementwiseBound, elementwise_bounds


@dataclass(frozen=True, kw_only=True)
class ExplainedCandidate:
    """A candidate of a region, which may cover further regions.

    Attributes
    ----------
    channels : str
        Memory channels of its tensors, as in `core.plan.Choice`.
    pending : tuple of str
        Deferred epilogue: operators that the readers of its output compute.
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
    def from_candidate(cls, candidate: Candidate, chosen: Candidate) -> ExplainedCandidate:
        """From a candidate, and the one that the plan has."""
        return cls(
            name=candidate.name,
            covers=candidate.covers,
            chosen=candidate == chosen,
            gpu_share=candidate.rewrite.gpu_share,
            schedule=schedule_text(candidate),
            channels=str(candidate.channels),
            pending=candidate.deferred_epilogue,
            cost=Cost.from_candidate(candidate),
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
    at_best : tuple of ElementwiseBound
        Lower bounds of a grouped convolution on PIM, by methods that are no candidates.
    gpu_ns : float
        Time of the region on the GPU, with the memory channels that the plan gives to the GPU.
    rank : str
        Rank of the decomposed layer that it is a part of, if a search chose it; else empty.
    estimate : Estimate
        How the plan was found.
    latency_ns : float
        Latency of the whole plan.
    """

    region: str
    operators: tuple[str, ...]
    output_shape: tuple[int, ...]
    refused: str
    unfinished: str
    activation_ns: float
    settle_ns: float
    at_best: tuple[ElementwiseBound, ...]
    gpu_ns: float
    reason: str
    rank: str
    candidates: tuple[ExplainedCandidate, ...]
    estimate: Estimate
    latency_ns: float
    baselines: Baselines

    def to_json(self) -> dict[str, Json]:
        """What ``pimflow compile --explain --json`` prints."""
        return fields_form(self) | {"candidates": [candidate.to_json() for candidate in self.candidates]}

    def text(self) -> str:
        """The explanation as text; a star marks the chosen candidate."""
        shape = list(self.output_shape)
        lines = [f"region    {self.region}: {' + '.join(self.operators)}, {shape}"]
        if self.rank:
            lines.append(f"rank      {self.rank}")
        if self.refused:
            lines.append(f"          not on PIM: {self.refused}")
        for alternative in self.at_best:
            times = f"{alternative.lower_bound_ns / 1e3:.2f} us at least, the GPU {self.gpu_ns / 1e3:.2f} us"
            lines.append(f"          {alternative.how}: {times}")
        if self.unfinished:
            lines.append(f"          not finished on PIM: {self.unfinished}")
        if self.activation_ns:
            times = f"{self.activation_ns / 1e3:.2f} us at least, a kernel {self.settle_ns / 1e3:.2f} us"
            lines.append(f"          its activation unit changes rows for every result: {times}")
        shown = self._visible_candidates()
        for candidate in shown:
            cost, mark = candidate.cost, "*" if candidate.chosen else " "
            pending_text = f", leaves {', '.join(candidate.pending)}" if candidate.pending else ""
            sources = ", ".join(f"{resource} {source.value}" for resource, source in cost.known.items())
            schedule = candidate.schedule if candidate.schedule not in candidate.name else ""
            lines.append(
                f"{mark} {candidate.name:<24} {cost.latency_ns / 1e3:>8.2f} us  "
                f"{cost.energy_pj / 1e6:>8.2f} uJ  {sources}  {schedule}{pending_text}".rstrip()
            )
            lines += [f"      {_task_text(task)}" for task in candidate.tasks]
        if hidden_count := len(self.candidates) - len(shown):
            lines.append(f"          {hidden_count} more at other channels: --json lists them")
        if self.reason:
            lines.append(f"reason    {self.reason}")
        search_text = f"least {self.estimate.objective} by {self.estimate.solver}"
        lines.append(f"plan      {self.latency_ns / 1e6:.4f} ms, {search_text}; {self.baselines.text()}")
        return "\n".join(lines)

    def _visible_candidates(self) -> list[ExplainedCandidate]:
        """Candidates to print.

        Of candidates that differ only in memory channels: the first, the chosen, and the fastest of the rest.
        """
        groups: dict[tuple[object, ...], list[ExplainedCandidate]] = {}
        for candidate in self.candidates:
            label = candidate.name.removesuffix(candidate.channels).removesuffix(" at ").removesuffix(", ")
            groups.setdefault((candidate.covers, label), []).append(candidate)
        names = set()
        for first, *rest in groups.values():
            names.add(first.name)
            names.update(
                candidate.name
                for candidate in sorted(rest, key=lambda candidate: candidate.cost.latency_ns)[:1]
            )
        return [candidate for candidate in self.candidates if candidate.chosen or candidate.name in names]


def explain(search_result: SearchResult, region: Region) -> Explanation:
    """Explain the choice for a region: all candidates with tasks and costs, and the reason."""
    chosen = search_result.candidate_by_region[region.name]
    unsupported_reason = search_result.table.unsupported_reasons.get(region.name, "")
    has_epilogue = region.epilogue.operators and region.geometry and not unsupported_reason
    generator, system = search_result.generator, search_result.system
    lower_bounds = elementwise_bounds(region, system, generator.task_builder.submission_ns)
    gpu_ns = min(
        Cost.from_candidate(candidate).latency_ns
        for candidate in generator.gpu_candidates(region, search_result.plan.gpu_channels)
    )
    return Explanation(
        region=region.name,
        operators=tuple(region.operators),
        output_shape=tuple(region.output_shape),
        refused=unsupported_reason,
        unfinished=pim_epilogue.unsupported_epilogue_reason(region, system) if has_epilogue else "",
        activation_ns=pim_epilogue.min_activation_ns(region, system) if has_epilogue else 0.0,
        settle_ns=search_result.table.epilogue_cost[region.name].latency_ns if has_epilogue else 0.0,
        at_best=tuple(lower_bounds),
        gpu_ns=gpu_ns,
        reason=search_result.plan.choice(region.name).reason,
        rank=search_result.plan.ranks.get(region.name.rpartition(".")[0], ""),
        candidates=tuple(
            ExplainedCandidate.from_candidate(candidate, chosen)
            for candidate in all_candidates(search_result, region)
        ),
        estimate=Estimate.from_search(search_result),
        latency_ns=search_result.evaluation.latency_ns,
        baselines=Baselines.from_search(search_result),
    )


def _task_text(task: Task) -> str:
    launch = f"launch {task.launch_ns / 1e3:.2f} + " if task.launch_ns else ""
    return (
        f"{task.resource:<8} {launch}{task.execution_ns / 1e3:.2f} us, {task.moved_bytes} bytes, "
        f"{task.energy_pj / 1e6:.3f} uJ ({task.known.value})  {task.label}"
    )
