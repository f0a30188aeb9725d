"""Skip connections of a decomposed network: stored in reduced form, restored where they are read."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import tvm

from pimflow import memory
from pimflow.compiler.layer_order import LayerSteps
from pimflow.compiler.smaller_pool import NetworkRewrite, drop_useless_parts
from pimflow.core.json_form import report_from
from pimflow.core.kernel import ELEMENT_BYTES
from pimflow.decomposition.activations import with_contiguous_runs
from pimflow.decomposition.network import DecomposedNetwork
from pimflow.decomposition.report import ReducedSkip, SkipsReport
from pimflow.errors import UnknownNameError, UsageError
from pimflow.frontend import Network, relax_module
from pimflow.hardware import System
from pimflow.relay_passes.decomposition.fold_fconvs import FoldFconvs, fconv_sites
from pimflow.relay_passes.decomposition.fold_lconvs import FoldLconvs, fold_sites
from pimflow.relay_passes.decomposition.layer_flops import flops
from pimflow.relay_passes.decomposition.live_bound import LiveBound
from pimflow.relay_passes.decomposition.merge_lconvs import MergeLconvs, merge_sites
from pimflow.relay_passes.decomposition.optimize_skips import Skip, copy_skips, skips
from pimflow.relay_passes.decomposition.split_concat import (
    ConstantSlices,
    SplitConcat,
    split_sites,
    unsplit_elements,
)
from pimflow.relay_passes.flat import LAYER_ROLES
from pimflow.relay_passes.kernels.activation_chains import region_runs

# ``pool``: a copy stays if it shrinks the planned pool; ``paper``: if TeMCO's algorithm 1 makes it.
CRITERIA = ("pool", "paper")
# Transformations of the layers where skip connections meet: passes, and the functions that find their sites.
_MERGE, _SPLIT = (MergeLconvs, merge_sites), (SplitConcat, split_sites)
TRANSFORMATIONS = {"": (), "merge": (_MERGE,), "split": (_SPLIT,), "merge, split": (_MERGE, _SPLIT)}


@dataclass(frozen=True, kw_only=True)
class SkipOptimisation(NetworkRewrite):
    """A decomposed network before and after; with the criterion ``paper`` the changes are not optional.

    Attributes
    ----------
    criterion : str
        One of `CRITERIA`.
    copies : tuple of Skip
        Skip connections whose layers were copied.
    transformation : str
        One of `TRANSFORMATIONS`.
    sites : tuple of str
        Variables of the concatenations, sums and fconvs that the transformation changes.
    folded : tuple of str
        Variables of layers that were folded into one with the layer before them: fconvs with an lconv, and a
        core with the fconv that reads an input.
    candidates : int
        Skip connections that could have been copied.
    flops_given, flops : int
        `layer_flops.flops` of both networks.
    weight_bytes : int
        Weights of `network`; zeros in the filters of merged layers count.
    """

    criterion: str
    copies: tuple[Skip, ...]
    transformation: str
    sites: tuple[str, ...]
    folded: tuple[str, ...]
    candidates: int
    flops_given: int
    flops: int
    weight_bytes: int

    def revert(self, reason: str) -> SkipOptimisation:
        return replace(
            super().revert(reason),
            copies=(),
            transformation="",
            sites=(),
            folded=(),
            flops=self.flops_given,
            weight_bytes=relax_module.weight_bytes(self.original.module),
        )

    def summary(self) -> SkipsReport:
        """The optimisation as reports show it."""
        copies = tuple(report_from(ReducedSkip, skip, tensor=skip.name) for skip in self.copies)
        return report_from(SkipsReport, self, copies=copies)


def check_criterion(criterion: str | None) -> None:
    """Raise `UnknownNameError` if `criterion` is not in `CRITERIA`; None stands for no optimisation."""
    if criterion is not None and criterion not in CRITERIA:
        raise UnknownNameError("criterion", criterion, CRITERIA)


def original_flops(decomposed_network: DecomposedNetwork | None) -> dict[str, int]:
    """By name of an lconv, the operations of the original layer whose chain it ends."""
    layers = decomposed_network.layers if decomposed_network else ()
    return {f"{layer.layer}.{layer.links[-1].name}": 2 * layer.geometry.macs for layer in layers}


def find(
    network: Network,
    system: System,
    criterion: str = "pool",
    originals: Mapping[str, int] | None = None,
    *,
    fuse_activations: bool = False,
) -> SkipOptimisation:
    """Find the copies and the transformation by `criterion`; `keep_if_smaller` compares the pools later.

    Parameters
    ----------
    system : System
        Says which tensors can be views of parts of others.
    criterion : str
        One of `CRITERIA`.
    originals : mapping of str to int, optional
        The result of `original_flops`: the threshold of the paper.
    fuse_activations : bool
        Whether each run between chains will be one kernel, whose inner tensors are not in the pool.

    Raises
    ------
    UnknownNameError
        For another criterion.
    UsageError
        If no layer of the network was decomposed.
    """
    check_criterion(criterion)
    if "lconv" not in LAYER_ROLES.read(network.module).values():
        raise UsageError(
            f"'{network.name}': --optimize-skips works on decomposed layers, and there are none; "
            "add --decompose"
        )
    all_skips = skips(network.module, original_flops=originals)
    fold = criterion == "pool"  # the paper does not fold
    best = _SkipAlternatives(network, system, fuse_activations, fold).best(all_skips, criterion)
    changed = bool(best.copies or best.transformation or best.folded)
    return SkipOptimisation(
        original=network,
        network=replace(network, module=best.module) if changed else network,
        demanded=criterion == "paper",
        criterion=criterion,
        copies=best.copies,
        transformation=best.transformation,
        sites=best.sites,
        folded=best.folded,
        candidates=len(all_skips),
        flops_given=flops(network.module),
        flops=flops(best.module),
        weight_bytes=relax_module.weight_bytes(best.module),
        kept_because="" if changed else "no copy and no transformation makes the pool smaller",
    )


def estimate_pool_bytes(network: Network, system: System, fuse_activations: bool = False) -> int:
    """Estimate the pool of `network` with a step a kernel: lowering would be too slow for the search."""
    network = with_contiguous_runs(network, system) if fuse_activations else network
    runs = region_runs(network.module, views=system.uses_views) if fuse_activations else ()
    steps = LayerSteps.from_network(network, runs, system).graph(waits=False)
    return memory.plan(steps.lifetimes(), "best").pool_bytes


@dataclass(frozen=True)
class _SkipAlternative:
    """An alternative form of a network, and its cost: memory first, operations second."""

    copies: tuple[Skip, ...]
    transformation: str
    sites: tuple[str, ...]
    folded: tuple[str, ...]
    module: tvm.IRModule
    cost: tuple[int, int]


class _SkipAlternatives:
    """Builds alternative forms of `network`, and searches for the best."""

    def __init__(self, network: Network, system: System, fuse_activations: bool, fold: bool):
        self.network, self.system, self.fuse, self.fold = network, system, fuse_activations, fold
        self._element_bytes = ELEMENT_BYTES[system.dtype]
        self._last_copies: tuple[tuple[str, ...], tvm.IRModule] = ((), network.module)
        self._alternatives: dict[tuple, _SkipAlternative] = {}
        self._slices = ConstantSlices()

    def best(self, skips: Sequence[Skip], criterion: str) -> _SkipAlternative:
        """The best alternative by `criterion`; of equal ones, the one with fewer changes."""
        unchanged, profitable = self._best_transformed([]), [skip for skip in skips if skip.is_profitable()]
        if criterion == "paper":
            return self._best_transformed(profitable) if profitable else unchanged
        best = min(
            unchanged,
            self._best_transformed(profitable, unchanged.cost[0]) if profitable else unchanged,
            key=lambda alternative: alternative.cost,
        )
        if len(profitable) < len(skips):
            all_copied = self._rewrite(skips, best.transformation or "split", max_bytes=best.cost[0])
            best = min(best, all_copied, key=lambda alternative: alternative.cost)

        def with_sites(alternative: _SkipAlternative, sites: Sequence[str]) -> _SkipAlternative:
            """The alternative that splits at `sites` alone."""
            transformation = alternative.transformation if sites else ""
            return self._rewrite(alternative.copies, transformation, sites, alternative.cost[0])

        def with_copies(alternative: _SkipAlternative, copies: Sequence[Skip]) -> _SkipAlternative:
            """The alternative that copies `copies` alone."""
            names, sites = alternative.transformation, alternative.sites
            return self._rewrite(copies, names, sites, alternative.cost[0])

        best = drop_useless_parts(best, best.sites, with_sites)
        best = drop_useless_parts(best, best.copies, with_copies, lambda skip: -skip.flops * len(skip.uses))
        return self._with_folded_fconvs(best)

    def _with_folded_fconvs(self, alternative: _SkipAlternative) -> _SkipAlternative:
        """`alternative` with first layers folded, if that takes less memory."""
        folded = fconv_sites(alternative.module)
        if not folded:
            return alternative
        module = FoldFconvs()(alternative.module)
        pool_bytes = estimate_pool_bytes(replace(self.network, module=module), self.system, self.fuse)
        if pool_bytes >= alternative.cost[0]:
            return alternative
        return replace(
            alternative,
            module=module,
            folded=(*alternative.folded, *folded),
            cost=(pool_bytes, flops(module)),
        )

    def _best_transformed(self, copies: Sequence[Skip], max_bytes: float = math.inf) -> _SkipAlternative:
        """The alternative with `copies` and the cheapest transformation; see `_rewrite` for `max_bytes`."""
        alternatives: list[_SkipAlternative] = []
        for name in TRANSFORMATIONS:
            alternatives.append(self._rewrite(copies, name, max_bytes=max_bytes))
            max_bytes = min(max_bytes, alternatives[-1].cost[0])
        return min(alternatives, key=lambda alternative: alternative.cost)

    def _module_with_copies(self, copies: Sequence[Skip]) -> tvm.IRModule:
        """The module with `copies`; the last result is cached."""
        names = tuple(skip.name for skip in copies)
        if self._last_copies[0] != names:
            self._last_copies = names, copy_skips(self.network.module, copies)
        return self._last_copies[1]

    def _rewrite(
        self,
        copies: Sequence[Skip],
        transformation: str,
        allowed_sites: Collection[str] | None = None,
        max_bytes: float = math.inf,
    ) -> _SkipAlternative:
        """The alternative with `copies`, transformed at the sites `allowed_sites`, or at all sites.

        Its cost is a lower bound if that is above `max_bytes`: then nothing else is estimated.
        """
        module = self._module_with_copies(copies)
        applied_sites = ()
        names = tuple(skip.name for skip in copies)
        steps = TRANSFORMATIONS[transformation]
        if steps == (_SPLIT,) and allowed_sites is not None:  # the other concatenations stay
            elements = unsplit_elements(module)
            unsplit = (elements[site] for site in elements if site not in allowed_sites)
            pool_bytes = max(unsplit, default=0) * self._element_bytes
            if pool_bytes > max_bytes:
                sites, cost = tuple(allowed_sites), (pool_bytes, 0)
                return _SkipAlternative(tuple(copies), transformation, sites, (), module, cost)
        for step, sites in steps:
            selected = [site for site in sites(module) if allowed_sites is None or site in allowed_sites]
            applied_sites += tuple(selected)
            if step is steps[-1][0] and (names, applied_sites) in self._alternatives:
                return self._alternatives[names, applied_sites]
            if selected:
                change = SplitConcat(selected, self._slices) if step is SplitConcat else step(selected)
                module = change(module)
        # Folding always saves operations and memory.
        folded = fold_sites(module) if self.fold else ()
        module = FoldLconvs()(module) if folded else module
        cost = LiveBound(module).peak() * self._element_bytes, 0
        if cost[0] <= max_bytes:
            network = replace(self.network, module=module)
            cost = estimate_pool_bytes(network, self.system, self.fuse), flops(module)
        alternative = _SkipAlternative(
            tuple(copies), transformation if applied_sites else "", applied_sites, folded, module, cost
        )
        if allowed_sites is None:  # without anything to merge, two transformations give the same module
            self._alternatives[names, applied_sites] = alternative
        return alternative
