"""Variants of candidates on a time-shared system: where tensors lie, and which memory channels kernels use.

On such a system kernels may use the channels that have PIM as plain memory. A kernel runs either

- at the GPU channels, those without PIM. It may run while PIM works; all its tensors lie there.
- or at all channels, never while PIM works. Then each input and the result may lie in the GPU channels, over
  all channels, or in those that have PIM. Its weights lie where that suits these best.

Results of PIM, and tensors of kernels that run while PIM works, lie in the GPU channels. So does the input of
a PIM program, or it lies over all channels: then the part in PIM's channels is brought to the L2 before these
begin to work as PIM. If all channels have PIM, the whole input is, and results are written to memory after
the channels were switched back.

The time of a kernel at all channels follows from how evenly its tensors load these
(`simulators.gpu.traffic`). If it reads a tensor from another place than it was made for, the largest possible
delay is added.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pimflow.core.candidate import AS_MEMORY, AS_PIM, LEFT, OVER_ALL, Candidate, EdgeCost, Task
from pimflow.core.plan import STAGED
from pimflow.core.region import ELEMENT_BYTES
from pimflow.fusion import GroupTiling
from pimflow.placement.candidates import fused_groups
from pimflow.placement.candidates.cached import is_cached
from pimflow.placement.candidates.candidates import Candidates
from pimflow.placement.candidates.channel_layouts import (
    LAYOUTS,
    Layouts,
    cut_tensors,
    from_row,
    lying,
    rows_read,
    taken,
)
from pimflow.placement.candidates.tasks import gpu_kernels
from pimflow.placement.candidates.through_l2 import ThroughL2
from pimflow.simulators.gpu.traffic import Traffic

Transforms = dict[tuple[str, str, str], EdgeCost]
IMPOSSIBLE = EdgeCost(possible=False)


@dataclass(frozen=True, kw_only=True)
class SharedCandidates:
    """All variants of the candidates by region, and the costs of reading tensors in other layouts."""

    candidates: dict[str, tuple[Candidate, ...]]
    transforms: Transforms


def shared(maker: Candidates, candidates: Mapping[str, Iterable[Candidate]]) -> SharedCandidates:
    """All variants of the `candidates` of a mixed plan on this system.

    Candidates are unchanged on a system with partitioned channels. So they are if all are GPU candidates: no
    plan of them is mixed, and one without PIM has all channels anyway.
    """
    found = {name: tuple(each) for name, each in candidates.items()}
    on_gpu = all(c.rewrite.mode == "GPU" for c in itertools.chain(*found.values()))
    if not maker.system.time_shared or (on_gpu and maker.system.gpu_channels):
        return SharedCandidates(candidates=found, transforms={})
    channels = SharedChannels(maker, cut_tensors(maker, itertools.chain(*found.values())))
    made = {name: tuple(itertools.chain(*map(channels.forms, each))) for name, each in found.items()}
    return SharedCandidates(candidates=made, transforms=channels.transforms(itertools.chain(*made.values())))


def in_forms(maker: Candidates, candidates: Iterable[Candidate]) -> list[Candidate]:
    """All variants of some candidates, without splits of tensors by rows."""
    return [form for each in candidates for form in SharedChannels(maker, {}).forms(each)]


def in_form(maker: Candidates, candidate: Candidate, channels: str) -> Candidate | None:
    """The variant of a candidate at `channels`, as `core.plan.Choice` names them; None if there is none."""
    if not maker.system.time_shared:
        return None if channels else candidate
    cut = cut_tensors(maker, [candidate])
    if rows := re.search(r"from(\d+)", channels):
        cut[candidate.covers[-1]] = {int(rows[1])}
    forms = SharedChannels(maker, cut).forms(candidate)
    return next((each for each in forms if each.rewrite.channels == channels), None)


def transforms(maker: Candidates, candidates: Iterable[Candidate]) -> Transforms:
    """The costs of reading tensors in other layouts than those for which `candidates` were made."""
    chosen = list(candidates)
    return SharedChannels(maker, cut_tensors(maker, chosen)).transforms(chosen)


def at_channels_left(maker: Candidates, candidate: Candidate) -> Candidate:
    """The variant of a candidate whose tensors lie in the GPU channels, if the system has any."""
    rewrite, channels = candidate.rewrite, maker.system.gpu_channels or maker.system.gpu.memory_channels
    if rewrite.mode == "GPU":
        candidate = fused_groups.on_channels(maker, candidate, channels)
    elif rewrite.channels:
        region = maker.graph.region(candidate.covers[0])
        candidate = maker.make(
            region,
            rewrite.mode,
            rewrite.gpu_rows,
            rewrite.schedule,
            axis=rewrite.axis,
            finishes=rewrite.finishes,
            joins=rewrite.joins,
        )
    return in_form(maker, candidate, "") or candidate


@dataclass(frozen=True)
class SharedChannels(Layouts):
    """Makes the variants of the candidates of one network on a time-shared system."""

    @functools.cached_property
    def through_l2(self) -> ThroughL2:
        return ThroughL2(self)

    def forms(self, candidate: Candidate) -> list[Candidate]:
        """All variants of a candidate of a mixed plan."""
        if not self.system.time_shared or not self.system.pim_channels:
            return [candidate]
        if candidate.rewrite.mode != "GPU" and not self.system.gpu_channels:
            return self.through_l2.between(candidate)
        if candidate.rewrite.mode != "GPU":
            use = AS_PIM if self.maker.tasks.switch_ns else ""
            used = replace(candidate, channels_as=use, leaves_channels_as=use)
            if is_cached(candidate):
                return [used]
            forms = [used, *self.through_l2.staged(used)]
            return [*forms, *itertools.chain(*map(self.through_l2.kept, forms))]
        if not candidate.tasks:  # a view lies where its operands do
            places = self.gives(candidate.covers[-1]).values() if self.spread else ()
            elsewhere = [name for name, each in LAYOUTS.items() if each in places and each != LEFT]
            return [candidate, *(lying(candidate, f"{n}-{n}", LAYOUTS[n], LAYOUTS[n]) for n in elsewhere)]
        wide = self._wide(candidate)
        if not self.system.gpu_channels:
            return [wide, *self.through_l2.behind_kept(wide)]
        if not self.spread:
            return [candidate, lying(wide, "all-all", LEFT, LEFT)]
        forms = self._at_all_channels(candidate, wide)
        reading = [form for form in forms if form.rewrite.channels.startswith("all-")]
        return [candidate, *forms, *itertools.chain(*map(self.through_l2.behind_kept, reading))]

    def _wide(self, candidate: Candidate) -> Candidate:
        """A GPU candidate at all channels, with all its tensors over all channels."""
        wide = fused_groups.on_channels(self.maker, candidate, self.system.gpu.memory_channels)
        held = tuple(replace(task, also=("pim",)) for task in wide.tasks)
        use = AS_MEMORY if self.maker.tasks.switch_ns else ""
        return replace(wide, tasks=held, channels_as=use, leaves_channels_as=use)

    def _at_all_channels(self, candidate: Candidate, wide: Candidate) -> list[Candidate]:
        """The variants of `candidate` at all channels that are no slower than at the GPU channels."""
        traffic, more_ns = self._traffic(candidate), _more_ns(candidate, wide)
        name, forms = candidate.covers[-1], []
        for (place, reads), (given, gives) in itertools.product(LAYOUTS.items(), self.gives(name).items()):
            if traffic is None:
                share = 0.0 if reads == gives == OVER_ALL else 1.0
            else:
                balance = traffic.balance(self.sets, self.parts("", reads), self.parts(name, gives))
                share = (balance - 1) / self._most
            if share <= 1:
                *first, last = wide.tasks
                last = replace(last, execution_ns=last.execution_ns + share * more_ns)
                slower = replace(wide, tasks=(*first, last))
                forms.append(lying(slower, f"{place}-{given}", taken(candidate, reads), gives))
        return forms

    @property
    def _most(self) -> float:
        """By how much the balance of a kernel at the GPU channels exceeds 1."""
        return 1 / self.sets[LEFT] - 1

    def _traffic(self, candidate: Candidate) -> Traffic | None:
        """Traffic of a candidate's kernel; None if it has several kernels, or multiplies two activations."""
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

    # Reading tensors that lie in another layout.

    def transforms(self, forms: Iterable[Candidate]) -> Transforms:
        """By tensor, its layout and the layout that a candidate reads: whether it can, and at what cost."""
        graph = self.maker.graph
        edges: Transforms = {}
        if not self.spread:
            return edges
        for form in forms:
            inside = set(form.covers)
            names = dict.fromkeys(n for each in form.covers for n in graph.region(each).inputs)
            for name in names:
                given = self.gives(name).values() if name in graph.readers else [LEFT]
                if name not in inside:
                    known = {(name, each, form.input.layout) for each in given} & edges.keys()
                    edges |= {} if known else self._reading(form, name, [*given])
        return edges

    def _reading(self, form: Candidate, name: str, given: list[str]) -> Transforms:
        """The costs for `form` of reading a tensor, by the layout of `given` that the tensor has."""
        taken = form.input.layout
        region = self.maker.graph.region(form.covers[0])
        needs = next((each for each in LAYOUTS.values() if taken.startswith(f"{each} by ")), None)
        wanted = taken  # of a kernel beside PIM, or a view
        staged_form = form.rewrite.channels.startswith(STAGED)
        if staged_form:
            rows = rows_read(region, form)
            staged = from_row(rows) if rows else OVER_ALL
            wanted = staged if name == region.inputs[0] else LEFT
        if needs is None or staged_form or not form.tasks:
            return {(name, each, taken): IMPOSSIBLE for each in given if each != wanted}
        edges: Transforms = {}
        slower_ns = self._slower_ns(form, name)
        for layout in given:
            has, expected = self.parts(name, layout), self.parts("", needs)
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
        """How much longer a kernel takes to read a tensor at the GPU channels than at all channels."""
        kernel = (form.covers, form.rewrite.primitive, form.rewrite.schedule, name)
        if kernel not in self._slower:
            self._slower[kernel] = self._slower_in_all_forms_ns(form, name)
        return self._slower[kernel]

    @functools.cached_property
    def _slower(self) -> dict[tuple[object, ...], float]:
        """Results of `_slower_ns`, which are the same for all variants of a kernel."""
        return {}

    def _slower_in_all_forms_ns(self, form: Candidate, name: str) -> float:
        narrow = fused_groups.on_channels(self.maker, form, self.system.gpu_channels)
        traffic, more_ns = self._traffic(form), _more_ns(narrow, self._wide(narrow))
        read_bytes = sum(
            elements * ELEMENT_BYTES[self.system.dtype]
            for each in map(self.maker.graph.region, form.covers)
            for other, elements in zip(each.inputs, each.input_elements)
            if other == name
        )
        return (traffic.share(read_bytes) if traffic else 1.0) * more_ns


def _more_ns(candidate: Candidate, wide: Candidate) -> float:
    """How much longer a candidate executes at the GPU channels than at all channels."""
    left_ns, wide_ns = (sum(task.execution_ns for task in each.tasks) for each in (candidate, wide))
    return max(left_ns - wide_ns, 0.0)
