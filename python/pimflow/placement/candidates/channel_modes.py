"""Candidates of a time-shared system, whose kernels may use the channels that have PIM as plain memory.

A kernel on the GPU either uses the channels left to it and may run beside PIM; all that it touches lies
there. Or it uses all channels, and never runs beside PIM. Then what it reads, and its result, may each lie in
the channels left, over all of them, or in those that have PIM; where its weights lie suits these. What PIM
returns, and what kernels beside it touch, lies in the channels left. So does what PIM reads, or it lies over
all channels: then the part in PIM's own is brought to the L2 before they begin to work as PIM. If all
channels have PIM, that is all of it, and results are written to memory when they have been switched back.

How long a kernel at all channels takes follows from how evenly its tensors load them
(`simulators.gpu.traffic`). If it reads a tensor from another place than it was made for, it takes longer by
the most that can add.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pimflow.core.candidate import AS_MEMORY, AS_PIM, IN_PIM, LEFT, OVER_ALL, Candidate, EdgeCost, Task
from pimflow.core.plan import PLACES, STAGED
from pimflow.core.region import ELEMENT_BYTES, Region
from pimflow.fusion import GroupTiling
from pimflow.hardware import System
from pimflow.placement.candidates import fused_groups
from pimflow.placement.candidates.cached import is_cached
from pimflow.placement.candidates.candidates import Candidates
from pimflow.placement.candidates.tasks import gpu_kernels
from pimflow.placement.solvers.steps import late_operands
from pimflow.simulators.gpu.roofline import RooflineMachine
from pimflow.simulators.gpu.traffic import Traffic

LAYOUTS = dict(zip(PLACES, (LEFT, OVER_ALL, IN_PIM), strict=True))
Transforms = dict[tuple[str, str, str], EdgeCost]
IMPOSSIBLE = EdgeCost(possible=False)


@dataclass(frozen=True, kw_only=True)
class SharedCandidates:
    """Candidates in all forms by region, and what it takes to read tensors from elsewhere (`CostTable`)."""

    candidates: dict[str, tuple[Candidate, ...]]
    transforms: Transforms


def shared(maker: Candidates, candidates: Mapping[str, Iterable[Candidate]]) -> SharedCandidates:
    """`candidates` of a mixed plan in all forms that the system's sharing of channels has for them.

    In a system whose channels are partitioned these are just the candidates.
    """
    found = {name: tuple(each) for name, each in candidates.items()}
    if not maker.system.time_shared:
        return SharedCandidates(candidates=found, transforms={})
    channels = SharedChannels(maker, _cut_tensors(maker, itertools.chain(*found.values())))
    made = {name: tuple(itertools.chain(*map(channels.forms, each))) for name, each in found.items()}
    return SharedCandidates(candidates=made, transforms=channels.transforms(itertools.chain(*made.values())))


def in_forms(maker: Candidates, candidates: Iterable[Candidate]) -> list[Candidate]:
    """The same of some candidates, where it does not matter how tensors lie."""
    return [form for each in candidates for form in SharedChannels(maker, {}).forms(each)]


def in_form(maker: Candidates, candidate: Candidate, channels: str) -> Candidate | None:
    """The form of a candidate that uses `channels`, as `core.plan.Choice` names it; None if it has none."""
    if not maker.system.time_shared:
        return None if channels else candidate
    rows = re.search(r"from(\d+)", channels)
    cut = {candidate.covers[-1]: {int(rows[1])}} if rows else {}
    forms = SharedChannels(maker, cut).forms(candidate)
    return next((each for each in forms if each.rewrite.channels == channels), None)


def transforms(maker: Candidates, candidates: Iterable[Candidate]) -> Transforms:
    """What it takes `candidates`, in their forms, to read tensors from elsewhere than they were made for."""
    chosen = list(candidates)
    return SharedChannels(maker, _cut_tensors(maker, chosen)).transforms(chosen)


def at_channels_left(maker: Candidates, candidate: Candidate) -> Candidate:
    """A candidate of a mixed plan where nothing lies in the channels that have PIM, if others are left."""
    rewrite, channels = candidate.rewrite, maker.system.gpu_channels or maker.system.gpu.memory_channels
    if rewrite.mode == "GPU":
        candidate = fused_groups.on_channels(maker, candidate, channels)
    elif rewrite.channels:
        region = maker.graph.region(candidate.covers[0])
        candidate = maker.make(region, rewrite.mode, rewrite.gpu_rows, rewrite.schedule, axis=rewrite.axis)
    return in_form(maker, candidate, "") or candidate


def switch(maker: Candidates) -> EdgeCost:
    """The price of another use of the channels that have PIM."""
    switch_ns = maker.tasks.switch_ns
    if not switch_ns or not maker.system.pim_channels:
        return EdgeCost()
    task = Task(label="channels switched", resource="pim", execution_ns=switch_ns, readies_channels=True)
    return EdgeCost(task=task)


KEPT, BEHIND_KEPT = "result kept", "behind kept"


def _cut_tensors(maker: Candidates, candidates: Iterable[Candidate]) -> dict[str, set[int]]:
    """By tensor that a split reads, from which rows on it may lie over all channels."""
    cut: dict[str, set[int]] = defaultdict(set)
    for candidate in candidates:
        if candidate.rewrite.mode == "SPLIT" and candidate.rewrite.axis == "rows":
            region = maker.graph.region(candidate.covers[0])
            cut[region.inputs[0]].add(_rows_read(region, candidate))
            cut[region.name].add(candidate.rewrite.gpu_rows)
    return cut


def _rows_read(region: Region, candidate: Candidate) -> int:
    """Rows of its input, from the first on, that the GPU's part of a split reads; none of a layer on PIM."""
    rows = candidate.rewrite.gpu_rows
    return region.geometry.rows.inputs(0, rows).end if rows else 0


@dataclass(frozen=True)
class SharedChannels:
    """Forms of the candidates of one network on a time-shared system.

    Parameters
    ----------
    maker : Candidates
    cut : mapping
        See `_cut_tensors`.
    """

    maker: Candidates
    cut: Mapping[str, set[int]] = field(default_factory=dict)

    @property
    def system(self) -> System:
        return self.maker.system

    @functools.cached_property
    def spread(self) -> bool:
        """Whether tensors may lie in several places, and that is charged."""
        both = self.system.time_shared and self.system.gpu_channels and self.system.pim_channels
        return bool(both) and self.system.charges("channel-modes")

    @functools.cached_property
    def sets(self) -> dict[str, float]:
        """The channels left to the GPU and those with PIM, each as a share of all."""
        every = self.system.gpu.memory_channels
        return {LEFT: self.system.gpu_channels / every, IN_PIM: self.system.pim_channels / every}

    def _gives(self, name: str) -> dict[str, str]:
        """How the result of a region may lie, by its name in a plan."""
        if not self.maker.graph.readers[name]:
            return {"all": OVER_ALL}
        return LAYOUTS | {f"from{row}": _from_row(row) for row in sorted(self.cut.get(name, ()))}

    def _parts(self, name: str, layout: str) -> dict[str, float]:
        """By set of channels, which part of a tensor in that layout lies there."""
        if layout in (LEFT, IN_PIM):
            return {each: float(each == layout) for each in self.sets}
        row = next((row for row in self.cut.get(name, ()) if layout == _from_row(row)), 0)
        graph = self.maker.graph
        rows = graph.region(name).output_shape[1] if row else 1  # of a feature map, NHWC
        above = min(row / rows, 1.0)
        return {each: above * (each == LEFT) + (1 - above) * share for each, share in self.sets.items()}

    # Forms.

    def forms(self, candidate: Candidate) -> list[Candidate]:
        """All forms of a candidate of a mixed plan."""
        if not self.system.time_shared or not self.system.pim_channels:
            return [candidate]
        if candidate.rewrite.mode != "GPU" and not self.system.gpu_channels:
            return self._between(candidate)
        if candidate.rewrite.mode != "GPU":
            use = AS_PIM if self.maker.tasks.switch_ns else ""
            used = replace(candidate, channels_as=use, leaves_channels_as=use)
            if is_cached(candidate):
                return [used]
            forms = [used, *self._staged(used)]
            return [*forms, *itertools.chain(*map(self._kept, forms))]
        if not candidate.tasks:  # a view lies where its operands do
            elsewhere = {"all": OVER_ALL, "pim": IN_PIM} if self.spread else {}
            return [candidate, *(_lying(candidate, f"{n}-{n}", each, each) for n, each in elsewhere.items())]
        wide = self._wide(candidate)
        if not self.system.gpu_channels:
            return [wide, *self._behind_kept(wide)]
        if not self.spread:
            return [candidate, _lying(wide, "all-all", LEFT, LEFT)]
        forms = self._at_all_channels(candidate, wide)
        reading = [form for form in forms if form.rewrite.channels.startswith("all-")]
        return [candidate, *forms, *itertools.chain(*map(self._behind_kept, reading))]

    def _wide(self, candidate: Candidate) -> Candidate:
        """A candidate on the GPU with all channels, over which all that it touches lies."""
        wide = fused_groups.on_channels(self.maker, candidate, self.system.gpu.memory_channels)
        held = tuple(replace(task, also=("pim",)) for task in wide.tasks)
        use = AS_MEMORY if self.maker.tasks.switch_ns else ""
        return replace(wide, tasks=held, channels_as=use, leaves_channels_as=use)

    def _at_all_channels(self, candidate: Candidate, wide: Candidate) -> list[Candidate]:
        """`candidate` at all channels: those forms that are no slower than at the channels left."""
        traffic, more_ns = self._traffic(candidate), _more_ns(candidate, wide)
        name, forms = candidate.covers[-1], []
        for (place, reads), (given, gives) in itertools.product(LAYOUTS.items(), self._gives(name).items()):
            if traffic is None:
                share = 0.0 if reads == gives == OVER_ALL else 1.0
            else:
                balance = traffic.balance(self.sets, self._parts("", reads), self._parts(name, gives))
                share = (balance - 1) / self._most
            if share <= 1:
                *first, last = wide.tasks
                last = replace(last, execution_ns=last.execution_ns + share * more_ns)
                slower = replace(wide, tasks=(*first, last))
                forms.append(_lying(slower, f"{place}-{given}", _taken(candidate, reads), gives))
        return forms

    @property
    def _most(self) -> float:
        """How much the balance of a kernel at the channels left is above 1."""
        return 1 / self.sets[LEFT] - 1

    def _traffic(self, candidate: Candidate) -> Traffic | None:
        """Of the one kernel of a candidate; None where it has several, or multiplies computed tensors."""
        region = self.maker.graph.region(candidate.covers[0])
        if candidate.rewrite.primitive or region.product:
            return None
        if candidate.rewrite.schedule:
            tiling = GroupTiling.parse(candidate.rewrite.schedule)
            kernels = [self.maker.tilings.kernel(candidate.covers, tiling)]
        else:
            kernels = gpu_kernels(region, self.system.dtype)
        if len(kernels) != 1:
            return None
        (kernel,) = kernels
        cost = self.maker.costs.kernel(kernel, self.system.gpu.memory_channels)
        return Traffic.of(kernel, cost, self.system.gpu, self.system.dtype)

    def _staged(self, candidate: Candidate) -> list[Candidate]:
        """A candidate with PIM whose input lies over all channels, but for rows that the GPU reads meanwhile.

        What of it lies in PIM's channels, these read as plain memory, at their bandwidth, into the L2 that
        belongs to them; then they are switched. None where the L2 does not hold it.
        """
        system, rewrite = self.system, candidate.rewrite
        region = self.maker.graph.region(candidate.covers[0])
        by_rows = rewrite.mode == "PIM" or (rewrite.mode == "SPLIT" and rewrite.axis == "rows")
        others = region.inputs[1:]
        if not (self.spread and by_rows) or region.prologue or region.inputs[0] in others:
            return []
        if others != late_operands(region) or region.inputs[0] not in self.maker.graph.readers:
            return []
        rows = _rows_read(region, candidate)
        read_bytes = region.input_elements[0] * ELEMENT_BYTES[system.dtype]
        read_bytes *= (1 - rows / region.geometry.h) * self.sets[IN_PIM]
        if not 0 < read_bytes <= system.gpu.l2_bytes_per_channel * system.pim_channels:
            return []
        staging = self._moved(f"{region.name} (operands to the L2)", read_bytes)
        switched = switch(self.maker).task
        before = [staging, *([replace(switched, after=(0,))] if switched else [])]
        own = []
        for task in candidate.tasks:
            waits = tuple(i + len(before) for i in task.after) or (() if task.resource == "gpu" else (0,))
            own.append(replace(task, after=waits))
        made = replace(candidate, tasks=(*before, *own), channels_as=AS_MEMORY if switched else "")
        return [_lying(made, STAGED, _taken(candidate, STAGED), LEFT)]

    def _moved(self, label: str, moved_bytes: float, taking: float = 1.0) -> Task:
        """What PIM's channels move as plain memory: a byte takes as long as `taking` that are read."""
        system = self.system
        machine = RooflineMachine(system.gpu, system.dtype, system.pim_channels)
        dram_pj = moved_bytes * 8 * system.gpu.energy["dram_pj_per_bit"]
        return Task(
            label=label,
            resource="pim",
            readies_channels=True,
            execution_ns=moved_bytes * taking / machine.dram_rate / machine.cycles_per_ns,
            moved_bytes=round(moved_bytes),
            # Where the crossbar is charged, the program has the energy of what it reads and returns.
            energies_pj={} if system.charges("crossbar") else {"gpu_dram": dram_pj},
        )

    def _between(self, candidate: Candidate) -> list[Candidate]:
        """A candidate on PIM where all channels have it: between the kernels before and behind the program.

        As plain memory, all channels read its operands into the L2 before, and write its results behind. None
        where the L2 does not hold both.
        """
        system, region = self.system, self.maker.graph.region(candidate.covers[0])
        element, layer = ELEMENT_BYTES[system.dtype], region.geometry
        read_bytes = layer.n * layer.h * layer.w * layer.c * element
        result_bytes = layer.pixels * layer.oc * system.pim.result_lanes * element
        if read_bytes + result_bytes > system.gpu.l2_bytes_per_channel * system.gpu.memory_channels:
            return []
        operands = self._moved(f"{region.name} (operands to the L2)", read_bytes)
        results = self._written(region)
        switched = switch(self.maker).task
        change = [switched] if switched else []
        kinds = [task.resource == "gpu" for task in candidate.tasks]
        first, last = kinds.index(False), len(kinds) - kinds[::-1].index(False)
        tasks = list(candidate.tasks[:first])

        def one_by_one(more: Iterable[Task]) -> None:
            for task in more:
                tasks.append(replace(task, after=(len(tasks) - 1,) if tasks else ()))

        one_by_one([operands, *change])
        begun = len(tasks)
        tasks += [replace(task, after=(begun - 1,)) for task in candidate.tasks[first:last]]
        together = tuple(range(begun, len(tasks)))
        kept = replace(candidate, tasks=tuple(tasks), channels_as=AS_MEMORY if switched else "")
        kept = self._kept(replace(kept, leaves_channels_as=AS_PIM if switched else ""))
        one_by_one([*change, results, *candidate.tasks[last:]])
        tasks[together[-1] + 1] = replace(tasks[together[-1] + 1], after=together)
        use = AS_MEMORY if switched else ""
        written = replace(candidate, tasks=tuple(tasks), channels_as=use, leaves_channels_as=use)
        return [written, *(kept if last == len(candidate.tasks) else ())]

    # Results that PIM leaves in the L2.

    def _written(self, region: Region) -> Task:
        """What of the result of PIM belongs to its channels, written there from the L2, as plain memory."""
        system, layer = self.system, region.geometry
        result_bytes = layer.pixels * layer.oc * system.pim.result_lanes * ELEMENT_BYTES[system.dtype]
        machine = RooflineMachine(system.gpu, system.dtype)
        written_bytes = result_bytes * self.sets[IN_PIM] * system.gpu.write_factor
        return self._moved(f"{region.name} (results)", written_bytes, taking=1 / machine["dram_write"])

    def _kept(self, candidate: Candidate) -> list[Candidate]:
        """A candidate with PIM whose result lies over all channels, but PIM's part of it is still in the L2.

        The next candidate is a kernel at all channels: while that is launched, they are switched back, and
        the part is written (`_behind_kept`). None where nobody comes next, where a kernel of its own finishes
        the result, or the L2 does not hold it beside the operands.
        """
        system, region = self.system, self.maker.graph.region(candidate.covers[0])
        position = self._order[region.name]
        behind = self.maker.graph.regions[position + 1 : position + 2]
        parallel = all(task.resource != "gpu" or not task.after for task in candidate.tasks)
        by_rows = candidate.rewrite.mode == "PIM" or candidate.rewrite.axis == "rows"
        if not (behind and parallel and by_rows) or candidate.rewrite.mode == "PIPELINE":
            return []
        layer = region.geometry
        held = layer.n * layer.h * layer.w * layer.c + layer.pixels * layer.oc * system.pim.result_lanes
        held *= ELEMENT_BYTES[system.dtype]
        if held * self.sets[IN_PIM] > system.gpu.l2_bytes_per_channel * system.pim_channels:
            return []
        rows = candidate.rewrite.gpu_rows
        layout = LEFT if not system.gpu_channels else _from_row(rows) if rows else OVER_ALL
        return [
            replace(
                candidate,
                name=f"{candidate.name}, {KEPT}",
                output=replace(candidate.output, layout=layout),
                rewrite=replace(candidate.rewrite, channels=_and(candidate.rewrite.channels, KEPT)),
                leaves_open=f"{KEPT} of {region.name}",
            )
        ]

    def _behind_kept(self, wide: Candidate) -> list[Candidate]:
        """A kernel at all channels behind a result that is `_kept`: it executes once that is written."""
        position = self._order[wide.covers[0]]
        before = self.maker.graph.regions[position - 1] if position else None
        if before is None or wide.goes_on_with or not wide.tasks or self.maker.refusal(before):
            return []
        switched = switch(self.maker).task
        made = wide.behind(self._written(before))
        return [
            replace(
                made.behind(switched) if switched else made,
                name=f"{wide.name}, {BEHIND_KEPT}",
                rewrite=replace(wide.rewrite, channels=_and(wide.rewrite.channels, BEHIND_KEPT)),
                goes_on_with=f"{KEPT} of {before.name}",
                channels_as=AS_PIM if switched else "",
            )
        ]

    @functools.cached_property
    def _order(self) -> dict[str, int]:
        return {region.name: position for position, region in enumerate(self.maker.graph.regions)}

    # How tensors are read from elsewhere.

    def transforms(self, forms: Iterable[Candidate]) -> Transforms:
        """By tensor, how it lies, and how some candidate takes it: whether that can be, and what it takes."""
        graph = self.maker.graph
        edges: Transforms = {}
        if not self.spread:
            return edges
        for form in forms:
            inside = set(form.covers)
            names = dict.fromkeys(n for each in form.covers for n in graph.region(each).inputs)
            for name in names:
                given = self._gives(name).values() if name in graph.readers else [LEFT]
                if name not in inside:
                    known = {(name, each, form.input.layout) for each in given} & edges.keys()
                    edges |= {} if known else self._reading(form, name, [*given])
        return edges

    def _reading(self, form: Candidate, name: str, given: list[str]) -> Transforms:
        """What it takes `form` to read a tensor that lies in each layout of `given`."""
        taken = form.input.layout
        region = self.maker.graph.region(form.covers[0])
        needs = next((each for each in LAYOUTS.values() if taken.startswith(f"{each} by ")), None)
        wanted = taken  # of a kernel beside PIM, or a view
        staged_form = form.rewrite.channels.startswith(STAGED)
        if staged_form:
            rows = _rows_read(region, form)
            staged = _from_row(rows) if rows else OVER_ALL
            wanted = staged if name == region.inputs[0] else LEFT
        if needs is None or staged_form or not form.tasks:
            return {(name, each, taken): IMPOSSIBLE for each in given if each != wanted}
        edges: Transforms = {}
        slower_ns = self._slower_ns(form, name)
        for layout in given:
            has, expected = self._parts(name, layout), self._parts("", needs)
            added = max((has[each] - expected[each]) / share for each, share in self.sets.items())
            if layout != needs and added * slower_ns > 0:
                task = Task(
                    label=f"{name} (read from elsewhere)",
                    resource="gpu",
                    execution_ns=slower_ns * added / self._most,
                    launched=False,
                )
                edges[name, layout, taken] = EdgeCost(task=task)
        return edges

    def _slower_ns(self, form: Candidate, name: str) -> float:
        """How much longer a kernel takes to read a tensor at the channels left than at all."""
        narrow = fused_groups.on_channels(self.maker, form, self.system.gpu_channels)
        traffic, more_ns = self._traffic(form), _more_ns(narrow, self._wide(narrow))
        read_bytes = sum(
            elements * ELEMENT_BYTES[self.system.dtype]
            for each in map(self.maker.graph.region, form.covers)
            for other, elements in zip(each.inputs, each.input_elements)
            if other == name
        )
        return (traffic.share(read_bytes) if traffic else 1.0) * more_ns


def _from_row(row: int) -> str:
    """The layout of a feature map that lies over all channels from a row on, above it in those left."""
    return f"{OVER_ALL} from row {row}"


def _taken(candidate: Candidate, layout: str) -> str:
    """How a candidate takes a tensor that it is made for in that layout: others may take it faster."""
    return f"{layout} by {candidate.covers[0]} {candidate.name}"


def _and(channels: str, more: str) -> str:
    return f"{channels}, {more}" if channels else more


def _lying(candidate: Candidate, channels: str, reads: str, gives: str) -> Candidate:
    """`candidate` at `channels`, its operands and its result in those layouts."""
    return replace(
        candidate,
        name=f"{candidate.name} at {channels}",
        input=replace(candidate.input, layout=reads),
        output=replace(candidate.output, layout=gives),
        rewrite=replace(candidate.rewrite, channels=channels),
    )


def _more_ns(candidate: Candidate, wide: Candidate) -> float:
    """How much longer a candidate executes at the channels left than at all."""
    left_ns, wide_ns = (sum(task.execution_ns for task in each.tasks) for each in (candidate, wide))
    return max(left_ns - wide_ns, 0.0)
