"""Choose which layers to decompose, and to which ranks: a cost table with all alternatives of each layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pimflow.core.candidate import Candidate, Cost, CostTable, EdgeCost
from pimflow.core.region import Region, RegionGraph
from pimflow.hardware import System
from pimflow.placement.best_plan import profile
from pimflow.placement.candidates import channel_modes, fused_groups, pipelines
from pimflow.placement.candidates.candidates import Candidates
from pimflow.placement.candidates.tilings import Tiled
from pimflow.placement.costs.costs import Costs
from pimflow.placement.forms import Forms
from pimflow.placement.solvers.infeasible import infeasible_error
from pimflow.placement.solvers.objectives import EvaluatedPlan, Goal
from pimflow.placement.solvers.plan_search import PlanSearch
from pimflow.placement.solvers.steps import check_covers, reads

# Longest pipeline. Mixtures in which so many neighbours have all combinations of two alternatives contain,
# together, every pipeline of every mixture of these two.
NEIGHBOURS = max(pipelines.LENGTHS)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The layers to decompose, and the figures behind that choice.

    Attributes
    ----------
    layers : dict of str to int
        By layer to decompose, the number of its rule.
    best : EvaluatedPlan
        The best plan with these layers decomposed, by the table of all alternatives. It charges partial sums
        that a consumer adds up as if the consumer had the alternative that reads them most often.
    on_gpu : EvaluatedPlan, optional
        The best plan of any alternatives on the GPU alone.
    alone_ns : dict of str to (float, float)
        By layer that was chosen freely, its time by itself: of the original, and of its fastest chain.
    """

    layers: dict[str, int]
    best: EvaluatedPlan
    on_gpu: EvaluatedPlan | None
    alone_ns: dict[str, tuple[float, float]]


def choose(forms: Forms, system: System, costs: Costs, goal: Goal) -> Chosen:
    """The alternatives of all layers with the best plan; layers that are not free are all or none chains.

    For free layers the choice is exact, with these exceptions: L2 rereads of partial sums (`Chosen.best`)
    and, on a time-shared system, tensors that pass through the L2, which are no candidates here, and copies
    of results inside a chain, which have the cost of the first rule.

    Raises
    ------
    InfeasibleError
        If no plan keeps to the bounds of `goal`.
    """
    first = dict.fromkeys(forms.free, 0)
    tries: list[dict[str, int]] = [
        {**first, **dict.fromkeys(forms.bound, rule)} for rule in range(len(forms.decomposed))
    ]
    tables = [
        AllForms(forms, chosen, system, costs, goal)
        for chosen in ([first, *tries] if forms.bound else tries[:1])
    ]
    results = [result for table in tables if (result := table.best())]
    if not results:
        raise tables[0].unreachable()
    best = min(results, key=lambda chosen: goal.rank(chosen.best))
    on_gpu = [each.on_gpu for each in results if each.on_gpu]
    return replace(best, on_gpu=min(on_gpu, key=goal.rank, default=None))


@dataclass(frozen=True, kw_only=True)
class _Mixture:
    """A network with some layers decomposed.

    Attributes
    ----------
    maker : Candidates
        Of that network.
    chosen : dict of str to int
        By decomposed layer, the number of its rule.
    """

    maker: Candidates
    chosen: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class _Group:
    """A group of regions in tiles, and the mixture that it belongs to."""

    mixture: _Mixture
    tiled: Tiled


class AllForms:
    """The candidates of all alternatives of the free layers, with the other layers as `chosen` says."""

    def __init__(self, forms: Forms, chosen: Mapping[str, int], system: System, costs: Costs, goal: Goal):
        self.forms, self.chosen, self.system, self.costs, self.goal = forms, chosen, system, costs, goal
        self.graph = forms.mixture(chosen)
        self.layer_of = {name: layer for layer in forms.free for name in forms.chains[layer]}
        self.done: dict[tuple[str, str], dict[str, int | None]] = {}
        maker = Candidates(self.graph, system, costs, goal.modes, goal.primitives)
        self.again: dict[str, float] = {}
        self.again = self._most_again(_Mixture(maker=maker, chosen=chosen))
        own = _Mixture(maker=maker.of(self.graph, self.again), chosen=chosen)
        table = profile(self.graph, own.maker)
        self.uniform = [own, *(self._uniform(own, rule) for rule in range(1, len(forms.decomposed)))]
        plain = self._of(own, dict.fromkeys(forms.free))
        plain.maker.prepare()
        candidates_of: dict[str, list[Candidate]] = {region.name: [] for region in self.graph.regions}
        self._add(candidates_of, own, itertools.chain(*table.candidates.values()))
        settle, absorb = dict(table.settle), dict(table.absorb)
        for mixture in self.uniform[1:]:
            other = profile(mixture.maker.graph, mixture.maker)
            self._add(candidates_of, mixture, itertools.chain(*other.candidates.values()))
            settle |= self._between_links(mixture, other.settle)
            absorb |= self._between_links(mixture, other.absorb)
        self._add(candidates_of, plain, self._alone(plain, self._in_mixed_plan(plain.maker)))
        groups = list(self._groups(own))
        for mixture, found in self._pipelines(own):
            self._add(candidates_of, mixture, found)
        self._fuse(candidates_of, groups, 0)
        self.table = _with(replace(table, settle=settle, absorb=absorb), candidates_of)
        check_covers(self.graph, self.table)
        self.plans = PlanSearch(self.graph, self.table, system, goal)
        alone = _with(table, self._on_gpu(plain, groups))
        self.alone = PlanSearch(self.graph, alone, system, goal)

    def _of(self, own: _Mixture, changes: Mapping[str, int | None]) -> _Mixture:
        """The mixture `own` with other rules for some of the free layers; None for the original layer."""
        forms = {layer: changes.get(layer, rule) for layer, rule in own.chosen.items()}
        chosen = {
            layer: self.forms.distinct[layer][rule] if layer in self.forms.distinct else rule
            for layer, rule in forms.items()
            if rule is not None
        }
        return _Mixture(maker=own.maker.of(self.forms.mixture(chosen), self.again), chosen=chosen)

    def _most_again(self, own: _Mixture) -> dict[str, float]:
        """By region, the maximum of `Candidates.reads_again` over the alternatives of its consumer."""
        found: dict[str, float] = {}
        for rule in (None, *range(len(self.forms.decomposed))):
            maker = self._of(own, dict.fromkeys(self.forms.free, rule)).maker
            for region in maker.graph.regions:
                found[region.name] = max(found.get(region.name, 0.0), maker.reads_again(region))
        return found

    def _uniform(self, own: _Mixture, rule: int) -> _Mixture:
        return self._of(own, dict.fromkeys(self.forms.free, rule))

    def _between_links(self, mixture: _Mixture, edges: Mapping[str, EdgeCost]) -> dict[str, EdgeCost]:
        """Costs of deferred epilogues between two links of a chain, which differ by rule."""
        return {
            f"{name} {self._rule(layer, mixture)}": edges[name]
            for name, layer in self.layer_of.items()
            if name in edges and name != self.forms.chains[layer][-1]
        }

    def _rule(self, layer: str, mixture: _Mixture) -> str:
        return self.forms.rules[mixture.chosen[layer]]

    def _alone(self, plain: _Mixture, every: Callable[[Region], Sequence[Candidate]]) -> Iterator[Candidate]:
        """Candidates of the original free layers, one by one."""
        for layer in self.forms.free:
            for candidate in every(plain.maker.graph.region(layer)):
                expanded = replace(candidate, covers=self.forms.chains[layer])
                form = replace(plain.maker.graph.region(layer), inputs=reads(self.graph, expanded))
                yield replace(candidate, original=form)

    @staticmethod
    def _in_mixed_plan(maker: Candidates) -> Callable[[Region], list[Candidate]]:
        return lambda region: channel_modes.in_forms(maker, maker.all(region))

    def _add(
        self, by_region: dict[str, list[Candidate]], mixture: _Mixture, candidates: Iterable[Candidate]
    ) -> None:
        """Add the candidates of a mixture as candidates of `graph`, without duplicates."""
        for candidate in candidates:
            if candidate.leaves_open or candidate.goes_on_with:  # through the L2; here rules use these fields
                continue
            made, forms = self._placed(mixture, candidate)
            key = (made.covers[0], made.name)
            if all(made.name != other.name for other in by_region[made.covers[0]]):
                self.done[key] = forms
                by_region[made.covers[0]].append(made)

    def _placed(self, mixture: _Mixture, candidate: Candidate) -> tuple[Candidate, dict[str, int | None]]:
        """A candidate of a mixture as one of `graph`, and the rules of the free layers that it does."""
        forms: dict[str, int | None] = {}
        covers: list[str] = []
        for name in candidate.covers:
            layer = self.layer_of.get(name, name)
            if layer in self.forms.free:
                forms[layer] = mixture.chosen.get(layer)
            covers += self.forms.chains[name] if name in self.forms.free else (name,)
        first, last = (self.layer_of.get(covers[at], "") for at in (0, -1))
        several = len(self.forms.rules) > 1
        opens = several and last and covers[-1] != self.forms.chains[last][-1]
        goes_on = several and first and covers[0] != self.forms.chains[first][0]
        said = [
            f"{layer} as it came" if rule is None else f"{layer} {self.forms.rules[rule]}"
            for layer, rule in forms.items()
            if rule is None or several
        ]
        begun = [
            (layer, rule)
            for layer, rule in {**mixture.chosen, **forms}.items()
            if rule is not None and self.forms.chains[layer][0] in candidate.covers
        ]
        changed = any(rule not in (None, self.chosen[layer]) for layer, rule in forms.items())
        made = replace(
            candidate,
            name=f"{candidate.name} ({', '.join(said)})" if said else candidate.name,
            covers=tuple(covers),
            error=sum(self.forms.errors[layer][rule] for layer, rule in begun if layer in self.forms.errors),
            goes_on_with=self._rule(first, mixture) if goes_on else "",
            leaves_open=self._rule(last, mixture) if opens else "",
            regions=tuple(map(mixture.maker.graph.region, candidate.covers)) if changed else (),
        )
        return made, forms

    def _mixtures(self, own: _Mixture) -> Iterator[_Mixture]:
        """Mixtures that contain, together, all runs of regions that are considered.

        For each rule, all combinations of decomposed and original layers among `NEIGHBOURS` layers; and any
        two rules in alternation. Further layers repeat these patterns.
        """
        free, rules = self.forms.free, range(len(self.forms.rules))
        for rule in rules:
            for pattern in range(1, 2 ** min(NEIGHBOURS, len(free))):
                given = {layer: None for i, layer in enumerate(free) if pattern >> i % NEIGHBOURS & 1}
                yield self._of(own, {**dict.fromkeys(free, rule), **given})
        for pair in itertools.permutations(rules, 2):
            yield self._of(own, {layer: pair[i % 2] for i, layer in enumerate(free)})

    def _new(self, mixture: _Mixture, seen: set[object]) -> Callable[[tuple[str, ...]], bool]:
        """A predicate of region names: whether they mix rules or have original layers, and were not seen."""

        def new(names: tuple[str, ...]) -> bool:
            """Whether to consider these regions; they are not new the next time."""
            layers = [self.layer_of.get(name, name) for name in names]
            forms = [mixture.chosen.get(layer) for layer in layers if layer in self.forms.distinct]
            key = (names, *forms)
            is_new = (None in forms or len(set(forms)) > 1) and key not in seen
            seen.update([key] if is_new else [])
            return is_new

        return new

    def _pipelines(self, own: _Mixture) -> Iterator[tuple[_Mixture, list[Candidate]]]:
        """Pipelines that mix rules or have original layers.

        Their regions were timed for all alternatives. A run is the same in all mixtures that contain it.
        """
        if "PIPELINE" not in self.goal.modes or not self.system.views:
            return
        seen = set[object]()
        for mixture in self._mixtures(own):
            found = pipelines.candidates(mixture.maker, self._new(mixture, seen))
            yield mixture, channel_modes.in_forms(mixture.maker, itertools.chain(*found.values()))

    def _groups(self, own: _Mixture) -> Iterator[_Group]:
        """Groups in tiles that mix rules or have original layers."""
        if not self.graph.fusible:
            return
        seen = {channels: set[object]() for channels in fused_groups.channel_counts(own.maker)}
        for mixture in self._mixtures(own):
            groups: dict[Tiled, None] = {}
            for channels, known in seen.items():
                tilings = mixture.maker.tilings
                groups |= dict.fromkeys(tilings.search(channels, self._new(mixture, known)))
            for each in groups:
                yield _Group(mixture=mixture, tiled=each)

    def _fuse(self, by_region: dict[str, list[Candidate]], groups: Sequence[_Group], channels: int) -> None:
        """Add the candidates of `groups` with `channels` memory channels; 0: those of a mixed plan."""

        def each() -> list[tuple[_Mixture, Candidate]]:
            """Generate the candidates of the groups, each with its mixture."""
            made = [
                (m, fused_groups.make(m.maker, tiled.covers, channels or None, tiled.tiling))
                for m, tiled in ((x.mixture, x.tiled) for x in groups)
            ]
            if channels:
                return made
            return [(m, form) for m, c in made for form in channel_modes.in_forms(m.maker, [c])]

        for mixture, candidate in self.costs.together(each):
            self._add(by_region, mixture, [candidate])

    def _on_gpu(self, plain: _Mixture, groups: Sequence[_Group]) -> Mapping[str, list[Candidate]]:
        """By region, the GPU candidates with all memory channels."""
        channels = self.system.gpu.memory_channels
        by_region: dict[str, list[Candidate]] = {region.name: [] for region in self.graph.regions}
        for mixture in self.uniform:
            every = fused_groups.every_on_gpu(mixture.maker, channels)
            self._add(by_region, mixture, itertools.chain(*every.values()))
        self._fuse(by_region, groups, channels)
        self._add(by_region, plain, self._alone(plain, lambda each: plain.maker.on_gpu(each, channels)))
        return by_region

    def best(self) -> Chosen | None:
        """The best choice; None if no plan keeps to the bounds."""
        mixed, alone = self.plans.best(), self.alone.best()
        if mixed and all(c.rewrite.mode == "GPU" for c in mixed.solution.candidates):
            mixed = None  # with all channels such a plan is faster
        plans = [each for each in (alone, mixed) if each]
        if not plans:
            return None
        best = min(plans, key=self.goal.rank)
        chosen: dict[str, int | None] = dict(self.chosen)
        for candidate in best.solution.candidates:
            chosen |= self.done[candidate.covers[0], candidate.name]
        layers = {layer: chosen[layer] for layer in self.forms.chains if chosen.get(layer) is not None}
        return Chosen(layers=layers, best=best, on_gpu=alone, alone_ns=self._alone_ns())

    def unreachable(self) -> Exception:
        """The error if no plan keeps to the bounds."""
        return infeasible_error([self.plans, self.alone])

    def _alone_ns(self) -> dict[str, tuple[float, float]]:
        times_ns, table = {}, self.table
        chained = {
            name: [c for c in candidates if None not in self.done[name, c.name].values()]
            for name, candidates in table.candidates.items()
        }
        chains = _with(table, chained)
        for layer in self.forms.free:
            covers = self.forms.chains[layer]
            alone = PlanSearch(*_cut_out(self.graph, chains, covers), self.system, Goal())
            given = [c for c in table.candidates[covers[0]] if c.original and c.covers == covers]
            times_ns[layer] = (
                min(Cost.of(c).latency_ns for c in given),
                alone.latency_bound_ns,
            )
        return times_ns


def _cut_out(graph: RegionGraph, table: CostTable, covers: tuple[str, ...]) -> tuple[RegionGraph, CostTable]:
    """Some regions as a network of their own, with the candidates that cover only these."""

    def renamed(name: str) -> str:
        return name if name in covers else f"%{name}"

    regions = tuple(
        replace(graph.region(name), inputs=tuple(map(renamed, graph.region(name).inputs))) for name in covers
    )
    inside = set(covers)
    candidates = {name: [c for c in table.candidates[name] if inside.issuperset(c.covers)] for name in covers}
    return RegionGraph(name=graph.name, regions=regions, outputs=covers[-1:]), _with(table, candidates)


def _with(table: CostTable, candidates: Mapping[str, Sequence[Candidate]]) -> CostTable:
    """`table` with other candidates."""
    return replace(table, candidates={name: tuple(c) for name, c in candidates.items()})
