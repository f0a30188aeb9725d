"""Views that are read as the results that they show, so that the search does not place them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from pimflow.core.candidate import Candidate, CostTable
from pimflow.core.region import Region
from pimflow.core.region_graph import RegionGraph
from pimflow.core.tensor_placement import IN_GPU_CHANNELS, TensorPlacement
from pimflow.placement.solvers import plan_state

Choices = dict[TensorPlacement, Candidate]


@dataclass(frozen=True)
class ViewAliases:
    """Views that lie where their sources do, and take no time and no bytes.

    A plan differs in nothing from one in which each reader of such a view reads its source.

    Attributes
    ----------
    choices : dict of str to dict
        By view, and by where its source lies, its candidate. Its source must not lie anywhere else.
    """

    graph: RegionGraph
    choices: dict[str, Choices]

    @classmethod
    def from_table(cls, graph: RegionGraph, table: CostTable) -> ViewAliases:
        """The aliases of a graph with the candidates of `table`."""
        choices: dict[str, Choices] = {}
        if not any(region.is_view for region in graph.regions):
            return cls(graph, choices)
        outputs: dict[str, set[TensorPlacement]] = defaultdict(lambda: {IN_GPU_CHANNELS})
        for candidate in itertools.chain(*table.candidates.values()):
            outputs[candidate.covers[-1]].add(candidate.output)
        stored = _stored_tensors(graph, table)
        for region in graph.regions:
            read = region.inputs[0] if len(set(region.inputs)) == 1 else ""
            if region.is_view and read in graph.readers and region.name not in stored:
                view_choices = _choices(table, region, choices.get(read, outputs[read]))
                if view_choices is not None:
                    choices[region.name] = view_choices
        return cls(graph, choices)

    def source(self, name: str) -> str:
        """The region that stores what `name` shows; `name` itself unless it is such a view."""
        while name in self.choices:
            name = self.graph.region(name).inputs[0]
        return name

    def readers(self, name: str) -> Iterator[str]:
        """The regions that read a result, or a view of it."""
        for reader in self.graph.readers[name]:
            if reader in self.choices:
                yield from self.readers(reader)
            else:
                yield reader

    def reads_previous(self, index: int, names: Collection[str]) -> bool:
        """Whether the last region before number `index` that is no such view is among `names`.

        If such views are in between, each must read the region before it, and the last be among `names`.
        """
        before = self.graph.regions[index - 1]
        while before.name in names and before.name in self.choices:
            index -= 1
            before, names = self.graph.regions[index - 1], before.inputs
        return before.name in names

    def with_views(self, candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """The plan of `candidates`, which do all regions but the views, in order."""
        by_region = {candidate.covers[0]: candidate for candidate in candidates}
        outputs = {candidate.covers[-1]: candidate.output for candidate in candidates}
        by_region |= {view: choices[outputs[self.source(view)]] for view, choices in self.choices.items()}
        names = (region.name for region in self.graph.regions)
        return tuple(by_region[name] for name in names if name in by_region)


def _choices(table: CostTable, view: Region, places: Collection[TensorPlacement]) -> Choices | None:
    """By which of `places` its source lies at, the candidate of a view, which lies there too.

    None if a candidate may lie elsewhere, takes anything, or changes the state of a plan.
    """
    choices = Choices()
    for candidate in table.candidates[view.name]:
        free_candidate = Candidate(
            name=candidate.name,
            covers=candidate.covers,
            rewrite=candidate.rewrite,
            tasks=(),
            input=candidate.input,
            output=candidate.output,
            channels=candidate.channels,
        )
        edges = {place: table.transform(view.inputs[0], place, candidate.input) for place in places}
        readable = {place for place, edge in edges.items() if edge.possible}
        has_task = any(edges[place].task for place in readable)
        if candidate != free_candidate or has_task or not readable <= {candidate.output} - choices.keys():
            return None
        choices |= dict.fromkeys(readable, candidate)
    return choices


def _stored_tensors(graph: RegionGraph, table: CostTable) -> set[str]:
    """Tensors that a search must know, even if they are views.

    Nothing reads them, only an epilogue does, or they show what one is deferred of; or a candidate copies
    them or does them together with others.
    """
    names = {name for name, readers in graph.readers.items() if not readers}
    names |= {name for (name, *_), edge in table.transforms.items() if edge.task and edge.task.launched}
    for candidate in itertools.chain(*table.candidates.values()):
        if len(candidate.covers) > 1:
            names.update(candidate.covers)
        if candidate.deferred_epilogue:
            last = graph.region(candidate.covers[-1])
            late_inputs = plan_state.late_inputs(graph, candidate, ())
            names |= {*last.inputs[last.operands :], *late_inputs, *graph.readers[last.name]}
    return names
