"""The selection problem: a candidate for each layer, with minimal time, memory or workspace within budgets.

Wen et al., *TASO*, sections 4.4 and 4.5. `program.solve` chooses by an integer program.
`SelectionProblem.evaluate` adds up a choice, and shares no code for that with the program: copies and
workspaces are buffers, with lifetimes by `core.liveness`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pimflow.core.candidate import Candidate, CostTable, Provenance
from pimflow.core.kernel import ELEMENT_BYTES
from pimflow.core.liveness import Liveness, align_up
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import OPERATOR_KERNELS
from pimflow.core.tensor_placement import Layout, TensorPlacement

MEMORY_MODELS = ("liveness", "sum")
OBJECTIVES = ("time", "memory", "workspace")
FP32_BYTES = ELEMENT_BYTES["fp32"]
OUTPUT_PLACEMENT = TensorPlacement(layout=Layout.HWC)  # of the results of a network


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Upper bounds of a selection."""

    time_ns: float = math.inf
    memory_bytes: float = math.inf
    workspace_bytes: float = math.inf


@dataclass(frozen=True, kw_only=True)
class SelectionStep:
    """A step of execution: a region, or at the end the return of an output of the network.

    Attributes
    ----------
    name : str
        The region's name. The step that returns a tensor has the tensor's name with ``>`` appended.
    reads : tuple of str
        Tensors that it reads, each once.
    chosen : bool
        Whether it is a layer for which a primitive is chosen, and whose footprint counts in the paper.
    """

    name: str
    reads: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    chosen: bool


@dataclass(frozen=True, kw_only=True)
class Transform:
    """A transform of a tensor from the layout `given` into the layout `taken`, for one reader."""

    tensor: str
    reader: str
    given: str
    taken: str
    time_ns: float


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Time, memory and workspace of a choice of candidates.

    Attributes
    ----------
    time_ns : float
        Time of all candidates and transforms, one after the other.
    memory_bytes : int
        In the problem's memory model.
    workspace_bytes : int
        Largest footprint of a layer: the buffers of Figure 4.
    memory_layer, workspace_layer, time_layer : str
        The layers with the memory peak, the largest footprint, and the longest time.
    guessed_ns : float
        The part of the time that is predicted or modelled, not measured.
    substituted : tuple of str
        Of one kind of primitive everywhere: the layers to which it does not apply, and another computes.
    """

    time_ns: float
    memory_bytes: int
    workspace_bytes: int
    memory_layer: str
    workspace_layer: str
    time_layer: str
    transforms: tuple[Transform, ...]
    guessed_ns: float = 0.0
    substituted: tuple[str, ...] = ()

    def is_within(self, budgets: Budgets) -> bool:
        """Whether all of `budgets` are kept."""
        # The integer program bounds times only up to rounding; bytes are whole numbers.
        return (
            self.time_ns <= budgets.time_ns * (1 + 1e-9)
            and self.memory_bytes <= budgets.memory_bytes
            and self.workspace_bytes <= budgets.workspace_bytes
        )


@dataclass(frozen=True, kw_only=True)
class SelectionResult:
    """A choice of candidates with its sums, and the proved gap to the best one.

    Attributes
    ----------
    choice : dict of str to Candidate
        By region.
    value : float
        Value of the objective, in ns or bytes.
    gap : float
        How much better another choice may be, at most, as a share of the objective.
    """

    choice: dict[str, Candidate]
    sums: Sums
    value: float
    gap: float


@dataclass(frozen=True, kw_only=True)
class SelectionProblem:
    """Layers, their candidates, and how memory is counted.

    Attributes
    ----------
    table : CostTable
        Their placements give the layouts of inputs and outputs.
    memory_model : str
        ``liveness``: the maximum over all steps of the live bytes (tensors, copies in another layout, the
        workspace of the layer that runs), plus all filters and weights. ``sum``: equation 7 of the paper, the
        sum of the footprints of all layers; transforms take no memory.
    """

    graph: RegionGraph
    table: CostTable
    memory_model: str = "liveness"

    @functools.cached_property
    def steps(self) -> tuple[SelectionStep, ...]:
        """The regions in order of execution, then a step for each output of the network."""
        regions = [
            SelectionStep(
                name=region.name,
                reads=tuple(dict.fromkeys(region.inputs)),
                candidates=self.table.candidates[region.name],
                chosen=any(c.primitive for c in self.table.candidates[region.name]),
            )
            for region in self.graph.regions
        ]
        out = [_return_step(name) for name in dict.fromkeys(self.graph.outputs)]
        return (*regions, *out)

    @functools.cached_property
    def tensor_bytes(self) -> dict[str, int]:
        """Bytes of each tensor in fp32, rounded up to the alignment."""
        return {name: align_up(size) for name, size in self.graph.tensor_bytes("fp32").items()}

    @functools.cached_property
    def weight_bytes(self) -> int:
        """Bytes of constants that do not depend on the choice: biases, and weights of all other layers."""
        chosen = {step.name for step in self.steps if step.chosen}
        total = 0
        for r in self.graph.regions:
            filters = r.geometry.oc * r.geometry.reduction if r.geometry and r.name in chosen else 0
            total += align_up(FP32_BYTES * max(0, r.kernel.weight_elements - filters))
        return total

    def placements(self, tensor: str) -> tuple[TensorPlacement, ...]:
        """The possible placements of `tensor`, which differ in their layouts."""
        if tensor in self.table.inputs or tensor not in self.table.candidates:
            return (self.table.inputs.get(tensor, OUTPUT_PLACEMENT),)
        return tuple(dict.fromkeys(c.output for c in self.table.candidates[tensor]))

    def time_ns(self, candidate: Candidate) -> float:
        """Time of a candidate without transforms."""
        return sum(task.duration_ns for task in candidate.tasks)

    def footprint_bytes(self, step: SelectionStep, candidate: Candidate) -> int:
        """Footprint of a layer, the buffers of Figure 4: inputs, output, filters, workspace; else 0."""
        if not step.chosen:
            return 0
        tensors = sum(self.tensor_bytes[name] for name in (*step.reads, step.name))
        memory = candidate.footprint
        return tensors + sum(map(align_up, (memory.filter_bytes, memory.workspace_bytes)))

    def transforms(self, choice: Mapping[str, Candidate]) -> tuple[Transform, ...]:
        """The layout transforms that `choice` needs."""
        transforms = []
        for step in self.steps:
            target = choice[step.name].input if step.name in choice else OUTPUT_PLACEMENT
            for tensor in step.reads:
                source = choice[tensor].output if tensor in choice else self.placements(tensor)[0]
                edge = self.table.transform(tensor, source, target)
                if source != target and edge.task:
                    transforms.append(
                        Transform(
                            tensor=tensor,
                            reader=step.name,
                            given=source.layout.value,
                            taken=target.layout.value,
                            time_ns=edge.latency_ns,
                        )
                    )
        return tuple(transforms)

    def evaluate(self, choice: Mapping[str, Candidate]) -> Sums:
        """Time, memory and workspace of `choice`, by region."""
        transforms = self.transforms(choice)
        times = {name: self.time_ns(candidate) for name, candidate in choice.items()}
        footprints = {s.name: self.footprint_bytes(s, choice[s.name]) for s in self.steps if s.name in choice}
        largest = max(footprints, key=footprints.__getitem__)
        if self.memory_model == "sum":
            memory_bytes, memory_layer = sum(footprints.values()), largest
        else:
            live, names = self.liveness(choice)
            peaks = [live.live_bytes(step) for step in range(live.steps)]
            filters = sum(align_up(candidate.footprint.filter_bytes) for candidate in choice.values())
            memory_bytes = max(peaks) + filters + self.weight_bytes
            memory_layer = names[peaks.index(max(peaks))]
        return Sums(
            time_ns=sum(times.values()) + sum(t.time_ns for t in transforms),
            memory_bytes=memory_bytes,
            workspace_bytes=footprints[largest],
            memory_layer=memory_layer,
            workspace_layer=largest,
            time_layer=max(times, key=times.__getitem__),
            transforms=transforms,
            guessed_ns=sum(times[name] for name, candidate in choice.items() if is_guess(candidate)),
        )

    def liveness(self, choice: Mapping[str, Candidate]) -> tuple[Liveness, list[str]]:
        """Lifetimes of tensors, copies and workspaces when `choice` runs, and the region of each step."""
        sizes, names = dict(self.tensor_bytes), []
        steps: list[tuple[Sequence[str], Sequence[str]]] = []
        by_reader: dict[str, dict[str, Transform]] = {}
        for transform in self.transforms(choice):
            by_reader.setdefault(transform.reader, {})[transform.tensor] = transform
        for step in self.steps:
            copies = by_reader.get(step.name, {})
            read = []
            for tensor in step.reads:
                read.append(f"{tensor}@{step.name}" if tensor in copies else tensor)
                if tensor in copies:
                    sizes[read[-1]] = self.tensor_bytes[tensor]
                    steps.append(((tensor,), (read[-1],)))
                    names.append(step.name)
            written = []
            if step.name in choice:
                workspace = f"{step.name} workspace"
                sizes[workspace] = align_up(choice[step.name].footprint.workspace_bytes)
                written = [step.name, workspace]
            steps.append((read, written))
            names.append(step.name if step.name in choice else step.reads[0])
        inputs = [name for name in self.tensor_bytes if name.startswith("%")]
        return Liveness.from_steps(steps, sizes, inputs=inputs, outputs=self.graph.outputs), names

    def layout_choices(self, choice: Mapping[str, Candidate]) -> dict[str, Candidate]:
        """The part of `choice` for layers without primitives, of which only the layout is chosen."""
        return {
            step.name: choice[step.name] for step in self.steps if step.name in choice and not step.chosen
        }

    def restrict(self, accept: Callable[[str, Candidate], bool]) -> SelectionProblem:
        """The problem with only those candidates for which `accept` is true."""
        remaining = {
            name: tuple(c for c in candidates if accept(name, c))
            for name, candidates in self.table.candidates.items()
        }
        return replace(self, table=replace(self.table, candidates=remaining))


def is_guess(candidate: Candidate) -> bool:
    """Whether the time of a candidate is not measured."""
    return any(task.known is not Provenance.MEASURED for task in candidate.tasks)


def _return_step(tensor: str) -> SelectionStep:
    candidate = Candidate(
        name="returned",
        covers=(f"{tensor}>",),
        rewrite=OPERATOR_KERNELS,
        tasks=(),
        input=OUTPUT_PLACEMENT,
        output=OUTPUT_PLACEMENT,
    )
    return SelectionStep(name=f"{tensor}>", reads=(tensor,), candidates=(candidate,), chosen=False)
