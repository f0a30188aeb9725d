"""Skip connections of a decomposed network: stored in reduced form, restored where they are read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import tvm

from pimflow import memory
from pimflow.compiler.layer_order import Steps
from pimflow.compiler.smaller_pool import Rewritten, thinned
from pimflow.core.json_form import report_of
from pimflow.decomposition.activations import with_runs_apart
from pimflow.decomposition.network import DecomposedNetwork
from pimflow.decomposition.report import ReducedSkip, SkipsReport
from pimflow.errors import UnknownNameError, UsageError
from pimflow.frontend import Network, relax_module
from pimflow.hardware import System
from pimflow.relay_passes.decomposition.fold_lconvs import FoldLconvs, fold_sites
from pimflow.relay_passes.decomposition.layer_flops import flops
from pimflow.relay_passes.decomposition.merge_lconvs import MergeLconvs, merge_sites
from pimflow.relay_passes.decomposition.optimize_skips import Skip, copied, skips
from pimflow.relay_passes.decomposition.split_concat import SplitConcat, split_sites
from pimflow.relay_passes.flat import roles
from pimflow.relay_passes.kernels.fuse_groups import region_runs

# ``pool``: a copy stays if it shrinks the planned pool; ``paper``: if TeMCO's algorithm 1 makes it.
CRITERIA = ("pool", "paper")
# Transformations of the layers where skip connections meet: passes, and the functions that find their sites.
_MERGE, _SPLIT = (MergeLconvs, merge_sites), (SplitConcat, split_sites)
TRANSFORMATIONS = {"": (), "merge": (_MERGE,), "split": (_SPLIT,), "merge, split": (_MERGE, _SPLIT)}


@dataclass(frozen=True, kw_only=True)
class SkipOptimisation(Rewritten):
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
        Variables of the fconvs that were folded into one layer with the lconv before them.
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

    def undone(self, why: str) -> SkipOptimisation:
        return replace(
            super().undone(why),
            copies=(),
            transformation="",
            sites=(),
            folded=(),
            flops=self.flops_given,
            weight_bytes=relax_module.weight_bytes(self.given.module),
        )

    def summary(self) -> SkipsReport:
        """The optimisation as reports show it."""
        copies = tuple(report_of(ReducedSkip, skip, tensor=skip.name) for skip in self.copies)
        return report_of(SkipsReport, self, copies=copies)


def check_criterion(criterion: str | None) -> None:
    """Raise `UnknownNameError` if `criterion` is not in `CRITERIA`; None stands for no optimisation."""
    if criterion is not None and criterion not in CRITERIA:
        raise UnknownNameError("criterion", criterion, CRITERIA)


def original_flops(change: DecomposedNetwork | None) -> dict[str, int]:
    """By name of an lconv, the operations of the original layer whose chain it ends."""
    layers = change.layers if change else ()
    return {f"{layer.layer}.{layer.links[-1].name}": 2 * layer.geometry.macs for layer in layers}


def find(
    network: Network,
    system: System,
    criterion: str = "pool",
    originals: Mapping[str, int] | None = None,
    *,
    fuse_activations: bool = False,
) -> SkipOptimisation:
    """Find the copies and the transformation by `criterion`; `settled` compares the pools later.

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
    if "lconv" not in roles(network.module).values():
        raise UsageError(
            f"'{network.name}': --optimize-skips works on decomposed layers, and there are none; "
            "add --decompose"
        )
    every = skips(network.module, original_flops=originals)
    fold = criterion == "pool"  # the paper does not fold
    form = _Forms(network, system, fuse_activations, fold).best(every, criterion)
    changed = bool(form.copies or form.transformation or form.folded)
    return SkipOptimisation(
        given=network,
        network=replace(network, module=form.module) if changed else network,
        demanded=criterion == "paper",
        criterion=criterion,
        copies=form.copies,
        transformation=form.transformation,
        sites=form.sites,
        folded=form.folded,
        candidates=len(every),
        flops_given=flops(network.module),
        flops=flops(form.module),
        weight_bytes=relax_module.weight_bytes(form.module),
        kept_because="" if changed else "no copy and no transformation makes the pool smaller",
    )


def estimated_bytes(network: Network, system: System, fuse_activations: bool = False) -> int:
    """Estimate the pool of `network` with a step a kernel: lowering would be too slow for the search."""
    network = with_runs_apart(network, system) if fuse_activations else network
    runs = region_runs(network.module, views=system.views) if fuse_activations else ()
    steps = Steps.of(network, runs, system).graph(waits=False)
    return memory.plan(steps.lifetimes(), "best").pool_bytes


@dataclass(frozen=True)
class _Form:
    """An alternative form of a network, and its cost: memory first, operations second."""

    copies: tuple[Skip, ...]
    transformation: str
    sites: tuple[str, ...]
    folded: tuple[str, ...]
    module: tvm.IRModule
    cost: tuple[int, int]


class _Forms:
    """Builds alternative forms of `network`, and searches for the best."""

    def __init__(self, network: Network, system: System, fuse_activations: bool, fold: bool):
        self.network, self.system, self.fuse, self.fold = network, system, fuse_activations, fold
        self._copied: tuple[tuple[str, ...], tvm.IRModule] = ((), network.module)
        self._forms: dict[tuple, _Form] = {}

    def best(self, skips: Sequence[Skip], criterion: str) -> _Form:
        """The best alternative by `criterion`; of equal ones, the one with fewer changes."""
        plain, some = self._transformed([]), [skip for skip in skips if skip.worthwhile()]
        if criterion == "paper":
            return self._transformed(some) if some else plain
        best = min(plain, self._transformed(some) if some else plain, key=lambda form: form.cost)
        if len(some) < len(skips):
            whole = self._written(skips, best.transformation or "split")
            best = min(best, whole, key=lambda form: form.cost)

        def with_sites(form: _Form, sites: Sequence[str]) -> _Form:
            return self._written(form.copies, form.transformation if sites else "", sites)

        def with_copies(form: _Form, copies: Sequence[Skip]) -> _Form:
            return self._written(copies, form.transformation, form.sites)

        best = thinned(best, best.sites, with_sites)
        return thinned(best, best.copies, with_copies, lambda skip: -skip.flops * len(skip.uses))

    def _transformed(self, copies: Sequence[Skip]) -> _Form:
        """The alternative with `copies` and the cheapest transformation."""
        forms = [self._written(copies, name) for name in TRANSFORMATIONS]
        return min(forms, key=lambda form: form.cost)

    def _base(self, copies: Sequence[Skip]) -> tvm.IRModule:
        """The module with `copies`; the last result is cached."""
        names = tuple(skip.name for skip in copies)
        if self._copied[0] != names:
            self._copied = names, copied(self.network.module, copies)
        return self._copied[1]

    def _written(
        self, copies: Sequence[Skip], transformation: str, only: Collection[str] | None = None
    ) -> _Form:
        """The alternative with `copies`, transformed at the sites `only`, or at all sites."""
        module, done, names = self._base(copies), (), tuple(skip.name for skip in copies)
        steps = TRANSFORMATIONS[transformation]
        for step, sites in steps:
            chosen = [site for site in sites(module) if only is None or site in only]
            done += tuple(chosen)
            if step is steps[-1][0] and (names, done) in self._forms:
                return self._forms[names, done]
            module = step(chosen)(module) if chosen else module
        # Folding always saves operations and memory.
        folded = fold_sites(module) if self.fold else ()
        module = FoldLconvs()(module) if folded else module
        pool_bytes = estimated_bytes(replace(self.network, module=module), self.system, self.fuse)
        cost = (pool_bytes, flops(module))
        form = _Form(tuple(copies), transformation if done else "", done, folded, module, cost)
        if only is None:  # without anything to merge, two transformations give the same module
            self._forms[names, done] = form
        return form
