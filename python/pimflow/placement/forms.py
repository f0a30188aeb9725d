"""Which layers to decompose: a cost table with both forms, the given layers and their chains."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pimflow.core.candidate import Candidate, Cost, CostTable
from pimflow.core.region import Region, RegionGraph
from pimflow.hardware import System
from pimflow.placement.best_plan import profile
from pimflow.placement.candidates import fused_groups, pipelines
from pimflow.placement.candidates.candidates import Candidates
from pimflow.placement.candidates.tilings import Tiled
from pimflow.placement.costs.costs import Costs
from pimflow.placement.solvers.dynamic_programming import LATENCY, one_by_one
from pimflow.placement.solvers.objectives import EvaluatedPlan, Goal, Minimiser
from pimflow.placement.solvers.steps import State, check_covers, reads

# Longest pipeline. Mixtures in which so many neighbours take all combinations of forms contain, together,
# every pipeline of every mixture.
NEIGHBOURS = max(pipelines.LENGTHS)


@dataclass(frozen=True, kw_only=True)
class Forms:
    """A network in both forms: as given, and with layers decomposed.

    Attributes
    ----------
    given, decomposed : RegionGraph
    chains : dict of str to tuple of str
        By layer that was decomposed, the regions of its chain, in order.
    """

    given: RegionGraph
    decomposed: RegionGraph
    chains: dict[str, tuple[str, ...]]

    @functools.cached_property
    def free(self) -> tuple[str, ...]:
        """Layers that can be exchanged for their chains without a change to any other region.

        If a layer keeps a tensor for others, such as a concatenation, its ``fconv`` keeps it instead.
        """
        return tuple(layer for layer in self.chains if self._exchangeable(layer))

    @property
    def bound(self) -> tuple[str, ...]:
        """Decomposed layers that are not `free`: all of them have the same form."""
        return tuple(layer for layer in self.chains if layer not in self.free)

    def _exchangeable(self, layer: str) -> bool:
        chain, known = self.chains[layer], {region.name for region in self.decomposed.regions}
        if layer not in {region.name for region in self.given.regions} or not known.issuperset(chain):
            return False
        links, whole = [self.decomposed.region(name) for name in chain], self.given.region(layer)
        order = [region.name for region in self.decomposed.regions]
        begin, graph = order.index(chain[0]), self.decomposed
        in_a_row = tuple(order[begin : begin + len(chain)]) == chain and all(
            after.first_result == before.name
            and graph.consumers[before.name] == (after.name,)
            and before.name not in graph.outputs
            for before, after in itertools.pairwise(links)
        )
        first, last = links[0], links[-1]
        operands = [
            (self._given_name(name), *rest)
            for link in links
            for name, *rest in _operands(link)
            if name not in chain
        ]
        return (
            in_a_row
            and operands == _operands(whole)
            and self._alike(graph.consumers[last.name], self.given.consumers[layer])
            and self._alike(_kept_readers(graph, first.name), _kept_readers(self.given, layer))
            and layer not in self.given.kept_outputs
            and (first.prologue, first.operands) == (whole.prologue, whole.operands)
            and first.kept_elements == whole.kept_elements
            and not any(link.kept_elements for link in links[1:])
            and _left_undone(last) == _left_undone(whole)
        )

    def _alike(self, decomposed: Sequence[str], given: Sequence[str]) -> bool:
        """Whether regions of both graphs do the same."""
        return [self._given_name(name) for name in decomposed] == list(given)

    def _given_name(self, name: str) -> str:
        """The region of `given` that does the same as region `name` of `decomposed`."""
        return self._layer_of.get(name, name)

    @functools.cached_property
    def _layer_of(self) -> dict[str, str]:
        return {name: layer for layer, chain in self.chains.items() for name in chain}

    def mixture(self, layers: Collection[str]) -> RegionGraph:
        """The regions of the network with `layers` decomposed, and the others as they came.

        Exactly those, if the form of every `bound` layer is that of all of them.
        """
        decomposed = {layer: layer in layers for layer in self.chains}
        if not any(decomposed.values()):
            return self.given
        if all(decomposed.values()):
            return self.decomposed
        whole = all(decomposed[layer] for layer in self.bound)
        base, other = (self.decomposed, self.given) if whole else (self.given, self.decomposed)
        # By the region that has a layer's result in the one, or what it keeps, the one in the other.
        results, kept = (
            {
                (self.chains[x][at] if whole else x): self.chains[x][at] if decomposed[x] else x
                for x in self.free
            }
            for at in (-1, 0)
        )
        regions: list[Region] = []
        for region in base.regions:
            layer = self._layer_of.get(region.name, region.name)
            if layer not in self.free or decomposed[layer] == whole:
                regions.append(region)
            elif region.name == (self.chains[layer][0] if whole else layer):
                regions += self._exchanged(layer, base, other)
        known = {region.name for region in regions}
        return RegionGraph(
            name=base.name,
            regions=tuple(
                _renamed(region, lambda name, keeps: (kept if keeps else results).get(name, name))
                for region in regions
            ),
            outputs=tuple(results.get(name, name) for name in base.outputs),
            kept_outputs=base.kept_outputs,
            runs=tuple(run for run in self.decomposed.runs if known.issuperset(run)),
            fusible=tuple(region.name for region in regions if region.name in self._fusible),
        )

    @functools.cached_property
    def _fusible(self) -> frozenset[str]:
        """Regions of both forms that may be part of groups."""
        return frozenset((*self.given.fusible, *self.decomposed.fusible))

    def _exchanged(self, layer: str, base: RegionGraph, other: RegionGraph) -> list[Region]:
        """The regions for `layer` in `other`, with the operands that it has in `base`."""
        operands, others = (
            [
                (name, keeps)
                for region in self._doing(layer, graph)
                for name, keeps, _ in _operands(region)
                if name not in self.chains[layer]
            ]
            for graph in (base, other)
        )
        names = {operand: name for operand, (name, _) in zip(others, operands, strict=True)}
        return [
            _renamed(region, lambda name, keeps: names.get((name, keeps), name))
            for region in self._doing(layer, other)
        ]

    def _doing(self, layer: str, graph: RegionGraph) -> list[Region]:
        names = self.chains[layer] if graph is self.decomposed else (layer,)
        return [graph.region(name) for name in names]


def _operands(region: Region) -> list[tuple[str, bool, tuple[int, ...]]]:
    """Of each operand: its name, whether it is kept beside a result, and its shape."""
    return [
        (name, i in region.kept_inputs, shape)
        for i, (name, shape) in enumerate(zip(region.inputs, region.input_shapes))
    ]


def _kept_readers(graph: RegionGraph, name: str) -> list[str]:
    """Regions that read what `name` keeps beside its result."""
    return [r.name for r in graph.regions for read, keeps, _ in _operands(r) if keeps and read == name]


def _renamed(region: Region, new: Callable[[str, bool], str]) -> Region:
    """`region` with other operands: `new` maps a name, and whether it is kept beside a result."""
    return replace(region, inputs=tuple(new(name, keeps) for name, keeps, _ in _operands(region)))


def _left_undone(region: Region) -> tuple[object, ...]:
    """All properties that decide the cost of the work that PIM leaves undone."""
    results = region.geometry and region.geometry.pixels * region.geometry.oc
    return region.output_shape, results, region.input_elements[region.operands :]


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The layers that are decomposed, and the figures behind that choice.

    Attributes
    ----------
    layers : frozenset of str
    best : EvaluatedPlan
        The best plan for the layers so, by the table of both forms.
    alone_ns : dict of str to (float, float)
        By layer whose form was free, what it takes by itself as it came, and as a chain.
    """

    layers: frozenset[str]
    best: EvaluatedPlan
    alone_ns: dict[str, tuple[float, float]]


def choose(forms: Forms, system: System, costs: Costs, goal: Goal) -> Chosen:
    """The forms of all layers with the best plan: exact for those that are free, of the others all or none.

    Raises
    ------
    InfeasibleError
        If no plan keeps to the bounds of `goal`.
    """
    tries = [forms.free, tuple(forms.chains)] if forms.bound else [tuple(forms.chains)]
    tables = [_Both(forms, layers, system, costs, goal) for layers in tries]
    results = [result for table in tables if (result := table.best())]
    if not results:
        raise tables[0].unreachable()
    return min(results, key=lambda chosen: goal.rank(chosen.best))


@dataclass(frozen=True, kw_only=True)
class _Group:
    """A group of a mixture, the mixture's `Candidates`, and the group's layers that are not decomposed."""

    maker: Candidates
    tiled: Tiled
    originals: tuple[str, ...]


def _new(given: frozenset[str], seen: set[tuple[str, ...]]) -> Callable[[tuple[str, ...]], bool]:
    """A predicate: whether regions include a layer of `given` and are new, after which they are `seen`."""

    def new(names: tuple[str, ...]) -> bool:
        is_new = names not in seen and not given.isdisjoint(names)
        seen.update([names] if is_new else [])
        return is_new

    return new


class _Both:
    """Candidates of both forms of the free layers; of the others the chains of those in `layers`."""

    def __init__(self, forms: Forms, layers: tuple[str, ...], system: System, costs: Costs, goal: Goal):
        self.forms, self.layers, self.system, self.costs, self.goal = forms, layers, system, costs, goal
        self.graph = forms.mixture(layers)
        self.originals: dict[tuple[str, str], tuple[str, ...]] = {}
        maker = Candidates(self.graph, system, costs, goal.modes, goal.primitives)
        table = profile(self.graph, maker)
        plain = maker.of(forms.mixture(set(layers) - set(forms.free)))
        plain.prepare()
        candidates_of = {name: list(candidates) for name, candidates in table.candidates.items()}
        for layer in forms.free:
            for candidate in plain.all(plain.graph.region(layer)):
                self._add(candidates_of, self._as_it_came(plain, layer, candidate))
        groups = list(self._groups(maker))
        for candidate, originals in self._pipelines(maker):
            self._add(candidates_of, self._expanded(candidate, originals))
        for candidate in self._fused(groups, system.gpu_channels):
            self._add(candidates_of, candidate)
        self.table = _with(table, candidates_of)
        check_covers(self.graph, self.table)
        self.minimiser = Minimiser(self.graph, self.table, system, goal, costs.profiling.cache)
        on_gpu = self._on_gpu(maker, plain, groups)
        self.alone = Minimiser(self.graph, _with(table, on_gpu), system, goal, costs.profiling.cache)

    def _add(self, by_region: dict[str, list[Candidate]], candidate: Candidate) -> None:
        by_region[candidate.covers[0]].append(candidate)

    def _as_it_came(self, plain: Candidates, layer: str, candidate: Candidate) -> Candidate:
        expanded = self._expanded(candidate, (layer,))
        form = replace(plain.graph.region(layer), inputs=reads(self.graph, expanded))
        return replace(expanded, original=form)

    def _expanded(self, candidate: Candidate, originals: Sequence[str]) -> Candidate:
        """`candidate`, which does the layers `originals` as they came, as one of `graph`."""
        chains = self.forms.chains
        covers = tuple(
            name for each in candidate.covers for name in (chains[each] if each in originals else (each,))
        )
        expanded = replace(
            candidate, name=f"{candidate.name} ({', '.join(originals)} as it came)", covers=covers
        )
        self.originals[covers[0], expanded.name] = tuple(originals)
        return expanded

    def _pipelines(self, maker: Candidates) -> Iterator[tuple[Candidate, tuple[str, ...]]]:
        """Pipelines in which some layers are as they came, and those.

        What their regions take is known, of both forms. A run is the same in all mixtures that have it.
        """
        if "PIPELINE" not in self.goal.modes or not self.system.views:
            return
        seen = set[tuple[str, ...]]()
        for mixed, given in self._mixtures(maker):
            for candidates in pipelines.candidates(mixed, _new(given, seen)).values():
                for candidate in candidates:
                    yield candidate, tuple(name for name in candidate.covers if name in given)

    def _groups(self, maker: Candidates) -> Iterator[_Group]:
        """Groups in tiles in which some layers are as they came.

        Up to `NEIGHBOURS` layers in all combinations of their forms; of more, those that repeat so.
        """
        if not self.graph.fusible:
            return
        seen = {channels: set[tuple[str, ...]]() for channels in fused_groups.channel_counts(maker)}
        for mixed, given in self._mixtures(maker):
            groups: dict[Tiled, None] = {}
            for channels, known in seen.items():
                groups |= dict.fromkeys(mixed.tilings.search(channels, _new(given, known)))
            for each in groups:
                originals = tuple(name for name in each.covers if name in given)
                yield _Group(maker=mixed, tiled=each, originals=originals)

    def _mixtures(self, maker: Candidates) -> Iterator[tuple[Candidates, frozenset[str]]]:
        """`Candidates` of networks with some free layers not decomposed, and the names of those layers."""
        free = self.forms.free
        for pattern in range(1, 2 ** min(NEIGHBOURS, len(free))):
            given = frozenset(layer for i, layer in enumerate(free) if pattern >> i % NEIGHBOURS & 1)
            yield maker.of(self.forms.mixture(set(self.layers) - given)), given

    def _fused(self, groups: Sequence[_Group], channels: int) -> list[Candidate]:
        """The candidates of `groups` while so many memory channels serve the GPU."""

        def each() -> list[Candidate]:
            return [
                self._expanded(
                    fused_groups.make(group.maker, group.tiled.covers, channels, group.tiled.tiling),
                    group.originals,
                )
                for group in groups
            ]

        return self.costs.together(each)

    def _on_gpu(
        self, maker: Candidates, plain: Candidates, groups: Sequence[_Group]
    ) -> Mapping[str, list[Candidate]]:
        """By region, the candidates of a network on the GPU alone, which has all channels."""
        channels = self.system.gpu.memory_channels
        by_region = {region.name: maker.on_gpu(region, channels) for region in self.graph.regions}
        for candidate in (*fused_groups.several(maker, channels), *self._fused(groups, channels)):
            self._add(by_region, candidate)
        for layer in self.forms.free:
            for candidate in plain.on_gpu(plain.graph.region(layer), channels):
                self._add(by_region, self._as_it_came(plain, layer, candidate))
        return by_region

    def best(self) -> Chosen | None:
        """The best choice; None if no plan keeps to the bounds."""
        mixed, alone = self.minimiser.best(), self.alone.best()
        if mixed and all(c.rewrite.mode == "GPU" for c in mixed.solution.candidates):
            mixed = None  # it is better with all channels
        plans = [each for each in (alone, mixed) if each]
        if not plans:
            return None
        best = min(plans, key=self.goal.rank)
        given = {
            layer
            for candidate in best.solution.candidates
            for layer in self.originals.get((candidate.covers[0], candidate.name), ())
        }
        return Chosen(layers=frozenset(self.layers) - given, best=best, alone_ns=self._alone_ns())

    def unreachable(self) -> Exception:
        """The error if no plan keeps to the bounds."""
        return self.minimiser.unreachable(self.alone.unbounded(LATENCY).evaluation)

    def _alone_ns(self) -> dict[str, tuple[float, float]]:
        times_ns, table = {}, self.table
        order = {region.name: position for position, region in enumerate(self.graph.regions)}
        chained = {
            name: [c for c in candidates if (c.covers[0], c.name) not in self.originals]
            for name, candidates in table.candidates.items()
        }
        chains = _with(table, chained)
        for layer in self.forms.free:
            covers = self.forms.chains[layer]
            segment = (order[covers[0]], order[covers[-1]] + 1)
            ways = one_by_one(self.graph, chains, LATENCY, segment, State())
            given = [c for c in table.candidates[covers[0]] if c.original and c.covers == covers]
            times_ns[layer] = (
                min(table.cost(covers[0], c).latency_ns for c in given),
                min(way.latency_ns for way in ways.values()),
            )
        return times_ns


def _with(table: CostTable, candidates: Mapping[str, Sequence[Candidate]]) -> CostTable:
    """`table` with other candidates."""
    costs = {(name, c.name): Cost.of(c) for name, of_region in candidates.items() for c in of_region}
    return replace(table, candidates={name: tuple(c) for name, c in candidates.items()}, costs=costs)
