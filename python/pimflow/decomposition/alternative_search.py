"""Choose which layers to decompose, and to which ranks: a cost table with all alternatives of each layer."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pimflow.core.candidate import Candidate, Cost, CostTable, EdgeCost, LayerAlternative
from pimflow.core.region import Region
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import FusedGroupRewrite, Mode
from pimflow.decomposition.alternatives import DecompositionAlternatives
from pimflow.fusion.tilings import TiledGroup
from pimflow.hardware import System
from pimflow.placement.best_plan import profile
from pimflow.placement.candidates import channel_modes, fused_groups, pipelines
from pimflow.placement.candidates.candidates import CandidateGenerator
from pimflow.placement.costs.costs import Costs
from pimflow.placement.solvers.infeasible import infeasible_error
from pimflow.placement.solvers.objectives import EvaluatedPlan, Goal
from pimflow.placement.solvers.plan_search import PlanSearch
from pimflow.placement.solvers.plan_state import candidate_inputs, check_covers

# Longest pipeline. Mixtures in which so many neighbours have all combinations of two alternatives contain,
# together, every pipeline of every mixture of these two.
MAX_NEIGHBOURS = max(pipelines.RUN_LENGTHS)


@dataclass(frozen=True, kw_only=True)
class DecompositionChoice:
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
    standalone_ns : dict of str to (float, float)
        By layer that was chosen freely, its time by itself: of the original, and of its fastest chain.
    """

    layers: dict[str, int]
    best: EvaluatedPlan
    on_gpu: EvaluatedPlan | None
    standalone_ns: dict[str, tuple[float, float]]


def choose(
    alternatives: DecompositionAlternatives, system: System, costs: Costs, goal: Goal
) -> DecompositionChoice:
    """The alternatives of all layers with the best plan; layers that are not free are all or none chains.

    For free layers the choice is exact, with these exceptions: L2 rereads of partial sums
    (`DecompositionChoice.best`) and, on a time-shared system, tensors that pass through the L2, which are no
    candidates here, and copies of results inside a chain, which have the cost of the first rule.

    Raises
    ------
    InfeasibleError
        If no plan keeps to the bounds of `goal`.
    """
    first_rule = dict.fromkeys(alternatives.independent_layers, 0)
    dependent_rules: list[dict[str, int]] = [
        {**first_rule, **dict.fromkeys(alternatives.dependent_layers, rule)}
        for rule in range(len(alternatives.decomposed))
    ]
    tables = [
        AlternativeCandidates(alternatives, chosen, system, costs, goal)
        for chosen in (
            [first_rule, *dependent_rules] if alternatives.dependent_layers else dependent_rules[:1]
        )
    ]
    results = [result for table in tables if (result := table.best())]
    if not results:
        raise tables[0].infeasible_error()
    best = min(results, key=lambda chosen: goal.rank(chosen.best))
    on_gpu = [choice.on_gpu for choice in results if choice.on_gpu]
    return replace(best, on_gpu=min(on_gpu, key=goal.rank, default=None))


@dataclass(frozen=True, kw_only=True)
class _Mixture:
    """A network with some layers decomposed.

    Attributes
    ----------
    rules : dict of str to int
        By decomposed layer, the number of its rule.
    """

    generator: CandidateGenerator
    rules: Mapping[str, int]


# A group of regions in tiles, and the mixture that it belongs to.
_Group = tuple[_Mixture, TiledGroup]


class AlternativeCandidates:
    """The candidates of all alternatives of the free layers, with the other layers as `rules` says."""

    def __init__(
        self,
        alternatives: DecompositionAlternatives,
        rules: Mapping[str, int],
        system: System,
        costs: Costs,
        goal: Goal,
    ):
        self.alternatives, self.rules = alternatives, rules
        self.system, self.costs, self.goal = system, costs, goal
        self.graph = alternatives.mixture(rules)
        self.layer_by_region = {
            name: layer for layer in alternatives.independent_layers for name in alternatives.chains[layer]
        }
        self.rules_by_candidate: dict[tuple[str, str], dict[str, int | None]] = {}
        generator = CandidateGenerator(self.graph, system, costs, goal.modes, goal.primitives)
        self.min_l2_rereads: dict[str, float] = {}
        self.min_l2_rereads = self._max_l2_rereads(_Mixture(generator=generator, rules=rules))
        self.base = _Mixture(generator=generator.with_graph(self.graph, self.min_l2_rereads), rules=rules)
        self.uniform_mixtures = [
            self.base,
            *(
                self._with_rules(self.base, dict.fromkeys(alternatives.independent_layers, rule))
                for rule in range(1, len(alternatives.decomposed))
            ),
        ]
        self.original = self._with_rules(self.base, dict.fromkeys(alternatives.independent_layers))

    @functools.cached_property
    def base_table(self) -> CostTable:
        """The cost table of the network with all free layers decomposed by the first rule."""
        return profile(self.graph, self.base.generator)

    @functools.cached_property
    def groups(self) -> list[_Group]:
        """Groups in tiles that mix rules or have original layers."""
        return list(self._groups(self.base))

    @functools.cached_property
    def table(self) -> CostTable:
        """The cost table with the candidates of all alternatives."""
        table = self.base_table
        self.original.generator.prepare()
        by_region: dict[str, list[Candidate]] = {region.name: [] for region in self.graph.regions}
        self._add(by_region, self.base, itertools.chain(*table.candidates.values()))
        epilogue_costs, fused_epilogue_costs = dict(table.epilogue_cost), dict(table.fused_epilogue_cost)
        for mixture in self.uniform_mixtures[1:]:
            rule_table = profile(mixture.generator.graph, mixture.generator)
            self._add(by_region, mixture, itertools.chain(*rule_table.candidates.values()))
            epilogue_costs |= self._link_costs(mixture, rule_table.epilogue_cost)
            fused_epilogue_costs |= self._link_costs(mixture, rule_table.fused_epilogue_cost)
        original = self.original.generator
        layer_candidates = self._original_candidates(
            lambda layer: channel_modes.channel_variants(original, original.candidates(layer))
        )
        self._add(by_region, self.original, layer_candidates)
        for mixture, pipeline_candidates in self._pipelines(self.base):
            self._add(by_region, mixture, pipeline_candidates)
        self._fuse(by_region, self.groups, 0)
        table = replace(table, epilogue_cost=epilogue_costs, fused_epilogue_cost=fused_epilogue_costs)
        table = _with_candidates(table, by_region)
        check_covers(self.graph, table)
        return table

    @functools.cached_property
    def plans(self) -> PlanSearch:
        """The search of plans of any alternatives."""
        return PlanSearch(self.graph, self.table, self.system, self.goal)

    @functools.cached_property
    def gpu_only_plans(self) -> PlanSearch:
        """The search of plans of any alternatives on the GPU alone."""
        table = _with_candidates(self.base_table, self._gpu_only_candidates())
        return PlanSearch(self.graph, table, self.system, self.goal)

    def _with_rules(self, base: _Mixture, changes: Mapping[str, int | None]) -> _Mixture:
        """The mixture `base` with other rules for some of the free layers; None for the original layer."""
        rules = {layer: changes.get(layer, rule) for layer, rule in base.rules.items()}
        distinct_rules = {
            layer: self.alternatives.distinct_rules[layer][rule]
            if layer in self.alternatives.distinct_rules
            else rule
            for layer, rule in rules.items()
            if rule is not None
        }
        return _Mixture(
            generator=base.generator.with_graph(
                self.alternatives.mixture(distinct_rules), self.min_l2_rereads
            ),
            rules=distinct_rules,
        )

    def _max_l2_rereads(self, base: _Mixture) -> dict[str, float]:
        """By region, the maximum of `CandidateGenerator.l2_rereads` over the alternatives of its consumer."""
        l2_rereads: dict[str, float] = {}
        for rule in (None, *range(len(self.alternatives.decomposed))):
            generator = self._with_rules(
                base, dict.fromkeys(self.alternatives.independent_layers, rule)
            ).generator
            for region in generator.graph.regions:
                l2_rereads[region.name] = max(l2_rereads.get(region.name, 0.0), generator.l2_rereads(region))
        return l2_rereads

    def _link_costs(self, mixture: _Mixture, edges: Mapping[str, EdgeCost]) -> dict[str, EdgeCost]:
        """Costs of deferred epilogues between two links of a chain, which differ by rule."""
        return {
            f"{name} {self._rule_name(layer, mixture)}": edges[name]
            for name, layer in self.layer_by_region.items()
            if name in edges and name != self.alternatives.chains[layer][-1]
        }

    def _rule_name(self, layer: str, mixture: _Mixture) -> str:
        return self.alternatives.rules[mixture.rules[layer]]

    def _original_candidates(self, generate: Callable[[Region], Sequence[Candidate]]) -> Iterator[Candidate]:
        """Candidates of the original free layers, one by one."""
        for layer in self.alternatives.independent_layers:
            region = self.original.generator.graph.region(layer)
            for candidate in generate(region):
                expanded = replace(candidate, covers=self.alternatives.chains[layer])
                inputs = candidate_inputs(self.graph, expanded)
                original_region = replace(region, inputs=inputs)
                yield replace(candidate, alternative=LayerAlternative(original=original_region))

    def _add(
        self, by_region: dict[str, list[Candidate]], mixture: _Mixture, candidates: Iterable[Candidate]
    ) -> None:
        """Add the candidates of a mixture as candidates of `graph`, without duplicates."""
        for candidate in candidates:
            if (
                candidate.leaves_open or candidate.requires_open
            ):  # through the L2; here rules use these fields
                continue
            graph_candidate, rules = self._to_graph_candidate(mixture, candidate)
            key = (graph_candidate.covers[0], graph_candidate.name)
            if all(
                graph_candidate.name != existing.name for existing in by_region[graph_candidate.covers[0]]
            ):
                self.rules_by_candidate[key] = rules
                by_region[graph_candidate.covers[0]].append(graph_candidate)

    def _to_graph_candidate(
        self, mixture: _Mixture, candidate: Candidate
    ) -> tuple[Candidate, dict[str, int | None]]:
        """A candidate of a mixture as one of `graph`, and the rules of the free layers that it does."""
        rules: dict[str, int | None] = {}
        covers: list[str] = []
        for name in candidate.covers:
            layer = self.layer_by_region.get(name, name)
            if layer in self.alternatives.independent_layers:
                rules[layer] = mixture.rules.get(layer)
            covers += (
                self.alternatives.chains[name] if name in self.alternatives.independent_layers else (name,)
            )
        first_layer, last_layer = (self.layer_by_region.get(covers[end], "") for end in (0, -1))
        has_several_rules = len(self.alternatives.rules) > 1
        leaves_chain_open = (
            has_several_rules and last_layer and covers[-1] != self.alternatives.chains[last_layer][-1]
        )
        continues_chain = (
            has_several_rules and first_layer and covers[0] != self.alternatives.chains[first_layer][0]
        )
        labels = [
            f"{layer} as it came" if rule is None else f"{layer} {self.alternatives.rules[rule]}"
            for layer, rule in rules.items()
            if rule is None or has_several_rules
        ]
        begun_layers = [
            (layer, rule)
            for layer, rule in {**mixture.rules, **rules}.items()
            if rule is not None and self.alternatives.chains[layer][0] in candidate.covers
        ]
        is_changed = any(rule not in (None, self.rules[layer]) for layer, rule in rules.items())
        graph_candidate = replace(
            candidate,
            name=f"{candidate.name} ({', '.join(labels)})" if labels else candidate.name,
            covers=tuple(covers),
            requires_open=self._rule_name(first_layer, mixture) if continues_chain else "",
            leaves_open=self._rule_name(last_layer, mixture) if leaves_chain_open else "",
            alternative=replace(
                candidate.alternative,
                regions=tuple(map(mixture.generator.graph.region, candidate.covers)) if is_changed else (),
                error=sum(
                    self.alternatives.errors[layer][rule]
                    for layer, rule in begun_layers
                    if layer in self.alternatives.errors
                ),
            ),
        )
        return graph_candidate, rules

    def _mixtures(self, base: _Mixture) -> Iterator[_Mixture]:
        """Mixtures that contain, together, all runs of regions that are considered.

        For each rule, all combinations of decomposed and original layers among `MAX_NEIGHBOURS` layers; and
        any two rules in alternation. Further layers repeat these patterns.
        """
        layers, rules = self.alternatives.independent_layers, range(len(self.alternatives.rules))
        for rule in rules:
            for pattern in range(1, 2 ** min(MAX_NEIGHBOURS, len(layers))):
                original_layers = {
                    layer: None
                    for position, layer in enumerate(layers)
                    if pattern >> position % MAX_NEIGHBOURS & 1
                }
                yield self._with_rules(base, {**dict.fromkeys(layers, rule), **original_layers})
        for pair in itertools.permutations(rules, 2):
            yield self._with_rules(base, {layer: pair[position % 2] for position, layer in enumerate(layers)})

    def _new_run_filter(self, mixture: _Mixture, seen: set[object]) -> Callable[[tuple[str, ...]], bool]:
        """A predicate of region names: whether they mix rules or have original layers, and were not seen."""

        def is_new_run(names: tuple[str, ...]) -> bool:
            """Whether to consider these regions; they are not new the next time."""
            layers = [self.layer_by_region.get(name, name) for name in names]
            rules = [
                mixture.rules.get(layer) for layer in layers if layer in self.alternatives.distinct_rules
            ]
            key = (names, *rules)
            is_new = (None in rules or len(set(rules)) > 1) and key not in seen
            seen.update([key] if is_new else [])
            return is_new

        return is_new_run

    def _pipelines(self, base: _Mixture) -> Iterator[tuple[_Mixture, list[Candidate]]]:
        """Pipelines that mix rules or have original layers.

        Their regions were timed for all alternatives. A run is the same in all mixtures that contain it.
        """
        if Mode.PIPELINE not in self.goal.modes or not self.system.uses_views:
            return
        seen = set[object]()
        for mixture in self._mixtures(base):
            candidates = pipelines.candidates(mixture.generator, self._new_run_filter(mixture, seen))
            yield mixture, channel_modes.channel_variants(mixture.generator, candidates)

    def _groups(self, base: _Mixture) -> Iterator[_Group]:
        """Groups in tiles that mix rules or have original layers."""
        if not self.graph.fusible:
            return
        seen = {channels: set[object]() for channels in fused_groups.channel_counts(base.generator)}
        for mixture in self._mixtures(base):
            groups: dict[TiledGroup, None] = {}
            for channels, seen_runs in seen.items():
                tilings = mixture.generator.tilings
                groups |= dict.fromkeys(tilings.search(channels, self._new_run_filter(mixture, seen_runs)))
            for tiled_group in groups:
                yield mixture, tiled_group

    def _fuse(self, by_region: dict[str, list[Candidate]], groups: Sequence[_Group], channels: int) -> None:
        """Add the candidates of `groups` with `channels` memory channels; 0: those of a mixed plan."""

        def generate() -> list[tuple[_Mixture, Candidate]]:
            """Generate the candidates of the groups, each with its mixture."""
            kernel_channels = channels or self.base.generator.task_builder.kernel_channels
            group_candidates = [
                (
                    mixture,
                    fused_groups.make(
                        mixture.generator,
                        tiled.covers,
                        kernel_channels,
                        FusedGroupRewrite(tiling=str(tiled.tiling)),
                    ),
                )
                for mixture, tiled in groups
            ]
            if channels:
                return group_candidates
            return [
                (mixture, variant)
                for mixture, group_candidate in group_candidates
                for variant in channel_modes.channel_variants(mixture.generator, [group_candidate])
            ]

        for mixture, candidate in self.costs.batch_kernels(generate):
            self._add(by_region, mixture, [candidate])

    def _gpu_only_candidates(self) -> Mapping[str, list[Candidate]]:
        """By region, the GPU candidates with all memory channels."""
        channels = self.system.gpu.memory_channels
        by_region: dict[str, list[Candidate]] = {region.name: [] for region in self.graph.regions}
        for mixture in self.uniform_mixtures:
            candidates = fused_groups.gpu_candidates(mixture.generator, channels)
            self._add(by_region, mixture, itertools.chain(*candidates.values()))
        self._fuse(by_region, self.groups, channels)
        original = self.original.generator
        layer_candidates = self._original_candidates(lambda layer: original.gpu_candidates(layer, channels))
        self._add(by_region, self.original, layer_candidates)
        return by_region

    def best(self) -> DecompositionChoice | None:
        """The best choice; None if no plan keeps to the bounds."""
        mixed_plan, gpu_only_plan = self.plans.best(), self.gpu_only_plans.best()
        if mixed_plan and not mixed_plan.uses_pim:
            mixed_plan = None  # with all channels such a plan is faster
        plans = [plan for plan in (gpu_only_plan, mixed_plan) if plan]
        if not plans:
            return None
        best = min(plans, key=self.goal.rank)
        rules: dict[str, int | None] = dict(self.rules)
        for candidate in best.candidates:
            rules |= self.rules_by_candidate[candidate.covers[0], candidate.name]
        layers = {layer: rule for layer in self.alternatives.chains if (rule := rules.get(layer)) is not None}
        return DecompositionChoice(
            layers=layers, best=best, on_gpu=gpu_only_plan, standalone_ns=self._standalone_ns()
        )

    def infeasible_error(self) -> Exception:
        """The error if no plan keeps to the bounds."""
        return infeasible_error([self.plans, self.gpu_only_plans])

    def _standalone_ns(self) -> dict[str, tuple[float, float]]:
        times_ns, table = {}, self.table
        chain_candidates = {
            name: [c for c in candidates if None not in self.rules_by_candidate[name, c.name].values()]
            for name, candidates in table.candidates.items()
        }
        chain_table = _with_candidates(table, chain_candidates)
        for layer in self.alternatives.independent_layers:
            covers = self.alternatives.chains[layer]
            chain_search = PlanSearch(*_subnetwork(self.graph, chain_table, covers), self.system, Goal())
            original_candidates = [
                c for c in table.candidates[covers[0]] if c.alternative.original and c.covers == covers
            ]
            times_ns[layer] = (
                min(Cost.from_candidate(c).latency_ns for c in original_candidates),
                chain_search.latency_bound_ns,
            )
        return times_ns


def _subnetwork(
    graph: RegionGraph, table: CostTable, covers: tuple[str, ...]
) -> tuple[RegionGraph, CostTable]:
    """Some regions as a network of their own, with the candidates that cover only these."""

    def input_name(name: str) -> str:
        return name if name in covers else f"%{name}"

    regions = tuple(
        replace(graph.region(name), inputs=tuple(map(input_name, graph.region(name).inputs)))
        for name in covers
    )
    covered = set(covers)
    candidates = {
        name: [c for c in table.candidates[name] if covered.issuperset(c.covers)] for name in covers
    }
    return RegionGraph(name=graph.name, regions=regions, outputs=covers[-1:]), _with_candidates(
        table, candidates
    )


def _with_candidates(table: CostTable, candidates: Mapping[str, Sequence[Candidate]]) -> CostTable:
    """`table` with other candidates."""
    return replace(table, candidates={name: tuple(c) for name, c in candidates.items()})
