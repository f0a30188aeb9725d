"""Which layers are decomposed: those for which a search finds the chain cheaper than the layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pimflow.core.plan import Plan
from pimflow.core.region_graph import RegionGraph
from pimflow.decomposition import activations
from pimflow.decomposition.alternative_search import DecompositionChoice, choose
from pimflow.decomposition.alternatives import DecompositionAlternatives
from pimflow.decomposition.calibration import Calibration
from pimflow.decomposition.layer_errors import layer_errors
from pimflow.decomposition.network import DecomposedNetwork, combine_alternatives
from pimflow.errors import PlanError
from pimflow.frontend import Network
from pimflow.fusion.kernels.relax_formulas import regions_of
from pimflow.hardware import System
from pimflow.placement import Costs, Goal
from pimflow.relay_passes.kernels.activation_chains import activation_chains


@dataclass(frozen=True, kw_only=True)
class LayerSelector:
    """Chooses which layers of a network are decomposed.

    Attributes
    ----------
    goal : Goal
        What the search over layers and their chains minimises, and its bounds.
    """

    system: System
    costs: Costs
    goal: Goal
    fuse_activations: bool = False
    fuse: bool = False
    progress: Callable[[str], None] = lambda _: None

    def choose(
        self,
        decomposed_network: DecomposedNetwork,
        plan: Plan | None = None,
        samples: Calibration | None = None,
    ) -> DecomposedNetwork:
        """Decompose the layers that the request or the plan says; with ``where=pays`` those that are cheaper.

        If errors are bounded, or there are several ranks to choose from, the result has the error of each
        layer.

        Parameters
        ----------
        plan : Plan, optional
            If given, it says which layers are decomposed, and by which rule.
        samples : Calibration, optional
            Samples on which errors of layers are measured if they are bounded. Without them, the error of a
            layer is that of its filters.

        Raises
        ------
        InfeasibleError
            If no plan is within the bounds of the goal, or the layers of `plan` are not.
        """
        request, max_error = decomposed_network.request, self.goal.max_error
        if request.where == "all" and max_error is None:
            return decomposed_network
        networks = decomposed_network.alternatives(self.progress)
        texts = [rule.text for rule in request.rules]
        samples = samples if max_error is not None else None
        needs_errors = max_error is not None or len(networks) > 1
        errors = layer_errors(networks, samples, self.progress) if needs_errors else {}
        search_choice: DecompositionChoice | None = None
        if request.where == "all":
            layers = dict.fromkeys(decomposed_network.chains, 0)
        elif plan is not None:
            planned_regions = {name for choice in plan.choices for name in choice.regions}
            layers = {
                layer: _rule_number(plan, layer, texts)
                for layer, chain in decomposed_network.chains.items()
                if planned_regions.intersection(chain)
            }
        else:
            search_choice = self._search(decomposed_network, networks, texts, errors)
            layers = search_choice.layers
        chosen_errors = {layer: errors[layer][rule] for layer, rule in layers.items() if needs_errors}
        self.goal.require_error(decomposed_network.original.name, sum(chosen_errors.values()))
        return replace(
            combine_alternatives(networks, layers),
            alone_ns=search_choice.standalone_ns if search_choice else {},
            on_gpu=search_choice.on_gpu.evaluation if search_choice and search_choice.on_gpu else None,
            errors=chosen_errors,
            errors_measured=samples is not None,
        )

    def _search(
        self,
        decomposed_network: DecomposedNetwork,
        networks: Sequence[DecomposedNetwork],
        texts: Sequence[str],
        errors: Mapping[str, tuple[float, ...]],
    ) -> DecompositionChoice:
        """Search over the layers and their chains by all rules."""
        self.progress("choosing layers to decompose")
        alternatives = DecompositionAlternatives(
            original=self._regions(decomposed_network.original),
            decomposed=tuple(self._regions(alternative.network) for alternative in networks),
            chains=decomposed_network.chains,
            rules=tuple(texts) or ("",),
            errors=errors,
        )
        return choose(alternatives, self.system, self.costs, self.goal)

    def _regions(self, network: Network) -> RegionGraph:
        if self.fuse_activations:
            network = activations.with_separate_phases(network)
        return regions_of(
            network.module,
            network.name,
            views=self.system.uses_views,
            fuse=self.fuse,
            fuse_activations=self.fuse_activations,
        )


def _rule_number(plan: Plan, layer: str, texts: Sequence[str]) -> int:
    """Index in `texts` of the rule by which `plan` decomposes `layer`."""
    if len(texts) < 2:
        return 0
    if plan.ranks.get(layer) not in texts:
        raise PlanError(
            f"the plan has layer '{layer}' decomposed by rank '{plan.ranks.get(layer, '')}', none of "
            f"{', '.join(texts)}: give the request that it was made for"
        )
    return texts.index(plan.ranks[layer])


def remaining_options(
    decomposed_network: DecomposedNetwork | None, optimize_skips: str | None, fuse_activations: bool
) -> tuple[str | None, bool]:
    """The options for chains that still apply after a search has chosen which layers become chains."""
    if decomposed_network is None or decomposed_network.request.where == "all":
        return optimize_skips, fuse_activations
    chains = fuse_activations and activation_chains(decomposed_network.network.module)
    return optimize_skips if decomposed_network.layers else None, bool(chains)
