"""Views that are read as the results that they show, so that the search does not place them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from pimflow.core.candidate import Candidate, CostTable
from pimflow.core.liveness import Moment
from pimflow.core.region import RegionGraph
from pimflow.core.tensor_placement import IN_GPU_CHANNELS, TensorPlacement
from pimflow.placement.solvers import plan_state

Choices = dict[TensorPlacement, Candidate]


@dataclass(frozen=True)
class ViewAliases:
    """Views whose candidate follows from where their sources lie, and that take no time and no bytes.

    A plan differs in nothing from one in which each reader of such a view reads its source.

    Attributes
    ----------
    sources : dict of str to str
        By view, the region that stores what it shows; no view that is in `sources` itself.
    choices : dict of str to dict
        By view, and by where its source lies, its candidate. Its source must not lie anywhere else.
    """

    graph: RegionGraph
    sources: dict[str, str]
    choices: dict[str, Choices]

    @classmethod
    def from_table(cls, graph: RegionGraph, table: CostTable) -> ViewAliases:
        """The aliases of a graph with the candidates of `table`."""
        aliases = cls(graph, {}, {})
        if any(region.is_view for region in graph.regions):
            placements: dict[str, set[TensorPlacement]] = defaultdict(lambda: {IN_GPU_CHANNELS})
            for candidate in itertools.chain(*table.candidates.values()):
                placements[candidate.covers[-1]].add(candidate.output)
            deferring = {c.covers[-1] for cs in table.candidates.values() for c in cs if c.deferred_epilogue}
            stored = _stored_views(graph, table)
            for region in graph.regions:
                source = aliases.source(region.inputs[0]) if len(set(region.inputs)) == 1 else ""
                is_placed = source not in graph.readers or source in deferring or region.name in stored
                if is_placed or not region.is_view:
                    continue
                choices = aliases._source_choices(table, region.name, placements[source])
                if choices is not None:
                    aliases.sources[region.name], aliases.choices[region.name] = source, choices
        return aliases

    def source(self, name: str) -> str:
        """The region that stores what `name` shows; `name` itself unless it is such a view."""
        return self.sources.get(name, name)

    def readers(self, name: str) -> Iterator[str]:
        """The regions that read a result, or a view of it."""
        for reader in self.graph.readers[name]:
            if reader in self.sources:
                yield from self.readers(reader)
            else:
                yield reader

    def placement(self, name: str, placement: TensorPlacement) -> TensorPlacement | None:
        """Where tensor `name` lies if its source lies at `placement`; None if this must not be."""
        if name not in self.sources:
            return placement
        choice = self.choices[name].get(placement)
        return None if choice is None else choice.output

    def begins_at(self, index: int) -> bool:
        """Whether the region of that number is such a view."""
        return index < len(self.graph.regions) and self.graph.regions[index].name in self.sources

    def reads_previous(self, index: int, names: Collection[str]) -> bool:
        """Whether the last region before number `index` that is no such view is among `names`.

        If such views are in between, each must read the region before it, and the last be among `names`.
        """
        before = self.graph.regions[index - 1]
        while before.name in names and before.name in self.sources:
            index -= 1
            before, names = self.graph.regions[index - 1], before.inputs
        return before.name in names

    def with_views(self, candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """The plan of `candidates`, which do all regions but the views, in order."""
        by_region = {candidate.covers[0]: candidate for candidate in candidates}
        outputs = {candidate.covers[-1]: candidate.output for candidate in candidates}
        by_region |= {view: self.choices[view][outputs[source]] for view, source in self.sources.items()}
        names = (region.name for region in self.graph.regions)
        return tuple(by_region[name] for name in names if name in by_region)

    def _source_choices(
        self, table: CostTable, view: str, placements: set[TensorPlacement]
    ) -> Choices | None:
        """`choices` of a view; None if there is more than one candidate, or its candidates need anything."""
        read, choices = self.graph.region(view).inputs[0], Choices()
        if not all(map(_is_free, table.candidates[view])):
            return None
        for placement in placements:
            actual = self.placement(read, placement)
            for candidate in table.candidates[view]:
                if actual is None:
                    continue
                if table.transforms and actual != candidate.input:
                    edge = table.transform(read, actual, candidate.input)
                    if not edge.possible:
                        continue
                    if edge.task:
                        return None
                if placement in choices:
                    return None
                choices[placement] = candidate
        return choices


def _stored_views(graph: RegionGraph, table: CostTable) -> set[str]:
    """Tensors that a search must know, even if they are views.

    Nothing reads them, only an epilogue does, or a candidate copies them or does them together with others.
    """
    names = {name for name, readers in graph.readers.items() if not readers}
    names |= {name for (name, *_), edge in table.transforms.items() if edge.task and edge.task.launched}
    for candidate in itertools.chain(*table.candidates.values()):
        if len(candidate.covers) > 1:
            names.update(candidate.covers)
        if candidate.deferred_epilogue:
            last = graph.region(candidate.covers[-1])
            names |= {*last.inputs[last.operands :], *plan_state.late_inputs(graph, candidate, ())}
    return names


def _is_free(candidate: Candidate) -> bool:
    """Whether a candidate takes no time and no memory, and leaves the state of a plan as it is."""
    needs = (
        candidate.tasks,
        candidate.channel_mode,
        candidate.final_channel_mode,
        candidate.alternative.error,
    )
    footprint = candidate.footprint
    is_small = not (footprint.bank_rows or footprint.filter_bytes)
    is_open = candidate.requires_open or candidate.leaves_open or candidate.keeps_submission_open
    return not any(needs) and is_small and not is_open and set(footprint.run_moments) == {Moment()}
