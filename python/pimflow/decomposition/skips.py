"""Skip connections of a decomposed network that are kept in reduced form, and how they are joined."""

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

# ``pool``: a copy stays if the planned pool shrinks; ``paper``: if TeMCO's algorithm 1 makes it.
CRITERIA = ("pool", "paper")
# What layers do where skip connections meet: passes, and what finds their sites.
_MERGE, _SPLIT = (MergeLconvs, merge_sites), (SplitConcat, split_sites)
TRANSFORMATIONS = {"": (), "merge": (_MERGE,), "split": (_SPLIT,), "merge, split": (_MERGE, _SPLIT)}


@dataclass(frozen=True, kw_only=True)
class SkipOptimisation(Rewritten):
    """A decomposed network before and after; the criterion ``paper`` demands what it finds.

    Attributes
    ----------
    criterion : str
        One of `CRITERIA`.
    copies : tuple of Skip
        Skip connections whose layers were copied.
    transformation : str
        One of `TRANSFORMATIONS`.
    sites : tuple of str
        Variables of the concatenations, sums and fconvs that it changes.
    folded : tuple of str
        Variables of the fconvs that are one layer with the lconv before them.
    candidates : int
        Skip connections that could have been copied.
    flops_given, flops : int
        `layer_flops.flops` of both networks.
    weight_bytes : int
        Weights of `network`, with the zeros in filters of merged layers.
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
        """What reports say of it."""
        copies = tuple(report_of(ReducedSkip, skip, tensor=skip.name) for skip in self.copies)
        return report_of(SkipsReport, self, copies=copies)


def check_criterion(criterion: str | None) -> None:
    """Raise `UnknownNameError` if it is none of `CRITERIA`; None is no optimisation."""
    if criterion is not None and criterion not in CRITERIA:
        raise UnknownNameError("criterion", criterion, CRITERIA)


def original_flops(change: DecomposedNetwork | None) -> dict[str, int]:
    """By name of the layers that restore, the operations of the layers that were decomposed."""
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
    """The copies and the transformation that `criterion` asks for, not yet `settled`.

    Parameters
    ----------
    system : System
        Says which parts of tensors lie inside them.
    criterion : str
        One of `CRITERIA`.
    originals : mapping of str to int, optional
        What `original_flops` says: the threshold of the paper.
    fuse_activations : bool
        Whether runs between chains will be one kernel each, which keeps their tensors to itself.

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
    fold = criterion == "pool"  # which the paper does not do
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
    """Pool of `network`, a kernel a step: what the search compares, since lowering is too slow for it."""
    network = with_runs_apart(network, system) if fuse_activations else network
    runs = region_runs(network.module, views=system.views) if fuse_activations else ()
    steps = Steps.of(network, runs, system).graph(waits=False)
    return memory.plan(steps.lifetimes(), "best").pool_bytes


@dataclass(frozen=True)
class _Form:
    """A way to write a network, and what it costs: memory first, operations second."""

    copies: tuple[Skip, ...]
    transformation: str
    sites: tuple[str, ...]
    folded: tuple[str, ...]
    module: tvm.IRModule
    cost: tuple[int, int]


class _Forms:
    """Ways to write `network`."""

    def __init__(self, network: Network, system: System, fuse_activations: bool, fold: bool):
        self.network, self.system, self.fuse, self.fold = network, system, fuse_activations, fold
        self._copied: tuple[tuple[str, ...], tvm.IRModule] = ((), network.module)
        self._forms: dict[tuple, _Form] = {}

    def best(self, skips: Sequence[Skip], criterion: str) -> _Form:
        """The best form by `criterion`; of equal ones, the one with fewer changes."""
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
        """The form with `copies` and the transformation that costs least."""
        forms = [self._written(copies, name) for name in TRANSFORMATIONS]
        return min(forms, key=lambda form: form.cost)

    def _base(self, copies: Sequence[Skip]) -> tvm.IRModule:
        """The module with `copies`; what was asked for last is kept."""
        names = tuple(skip.name for skip in copies)
        if self._copied[0] != names:
            self._copied = names, copied(self.network.module, copies)
        return self._copied[1]

    def _written(
        self, copies: Sequence[Skip], transformation: str, only: Collection[str] | None = None
    ) -> _Form:
        """The module with `copies`, transformed at the sites `only`, or at all."""
        module, done, names = self._base(copies), (), tuple(skip.name for skip in copies)
        steps = TRANSFORMATIONS[transformation]
        for step, sites in steps:
            chosen = [site for site in sites(module) if only is None or site in only]
            done += tuple(chosen)
            if step is steps[-1][0] and (names, done) in self._forms:
                return self._forms[names, done]
            module = step(chosen)(module) if chosen else module
        # Folding saves operations and memory wherever it can be done.
        folded = fold_sites(module) if self.fold else ()
        module = FoldLconvs()(module) if folded else module
        pool_bytes = estimated_bytes(replace(self.network, module=module), self.system, self.fuse)
        cost = (pool_bytes, flops(module))
        form = _Form(tuple(copies), transformation if done else "", done, folded, module, cost)
        if only is None:  # transformations are alike where there is nothing to merge
            self._forms[names, done] = form
        return form
