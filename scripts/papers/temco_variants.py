"""Decomposed networks whose skip connections are reduced, activations fused, or both (TeMCO, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm

from pimflow import frontend
from pimflow.commands.shared import prepare
from pimflow.commands.shared.options import NetworkOptions
from pimflow.compiler.measurement import allocations
from pimflow.compiler.smaller_pool import PoolPlanning
from pimflow.core.kernel import ConvGeometry
from pimflow.core.output_error import relative_error
from pimflow.decomposition.activations import with_separate_phases
from pimflow.decomposition.network import DecomposedNetwork, DecompositionLike, decompose, require_all
from pimflow.errors import UnknownNameError, UsageError
from pimflow.frontend import Network
from pimflow.hardware import System
from pimflow.pim_backend.runtime import targets
from pimflow.relay_passes.decomposition.optimize_skips import skips
from pimflow.relay_passes.flat import layer_name, main_bindings, operator, tensor_bytes
from pimflow.relay_passes.kernels.activation_chains import chain_regions
from pimflow.relay_passes.kernels.outline_groups import OutlineGroups
from pimflow.relay_passes.memory.operator_memory import operator_liveness

VARIANTS = ("fusion", "skip-opt", "skip-opt+fusion")
FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class DecompositionVariants:
    """A network: original, decomposed, and the decomposed one after TeMCO's passes.

    Attributes
    ----------
    networks : dict of str to Network
        ``original``, ``decomposed``, and `VARIANTS`.
    """

    change: DecomposedNetwork
    networks: dict[str, Network]

    def pools(self, system: System, target: str = "llvm+pim") -> dict[str, int]:
        """Bytes of the pools of internal tensors, by variant.

        In ``original`` and ``decomposed`` every layer has a result of its own, activations too (equations 3
        and 4). All others are planned as compiled, and so are these two as ``…, coalesced``.
        """
        sizes, pools, lowered_for = {}, PoolPlanning(), targets.target_by_name(target)
        for name, network in self.networks.items():
            plain = name in ("original", "decomposed")
            if plain:
                sizes[name] = pools.plan(operator_liveness(network.module)).pool_bytes
            pool_bytes = pools.pool_bytes(network.module, lowered_for, system)
            sizes[f"{name}, coalesced" if plain else name] = pool_bytes
        return sizes

    def run(
        self, names: Sequence[str], system: System, target: str = "llvm+pim", runs: int = 3
    ) -> dict[str, dict[str, Any]]:
        """Run the variants `names` and ``decomposed`` in turns; errors are against outputs of ``decomposed``.

        Returns
        -------
        dict of str to dict
            By variant, the fields of `compiler.measurement.allocations.AllocationRun` of the pool, and
            ``error``, the `core.output_error.relative_error` of the outputs.
        """
        programs = {name: (self.networks[name], "pool") for name in dict.fromkeys(["decomposed", *names])}
        measured, outputs = allocations.measure(programs, system, target=target, runs=runs)
        expected = outputs["decomposed"]
        errors = {
            name: max(relative_error(y, x) for y, x in zip(actual, expected, strict=True))
            for name, actual in outputs.items()
        }
        return {name: {**vars(measurement), "error": errors[name]} for name, measurement in measured.items()}


def decomposition_variants(
    model: frontend.Model,
    system: System,
    *,
    decompose_as: DecompositionLike = "tucker:0.1",
    batch: int | None = None,
    target: str = "llvm+pim",
    progress: Callable[[str], None] = lambda _: None,
) -> DecompositionVariants:
    """The variants of `model`; skip connections are reduced where the planned pool shrinks."""
    options = NetworkOptions(batch=batch, decompose=decompose_as)
    if options.decomposition_request is None:
        raise UsageError("nothing says how to decompose")
    require_all(options.decomposition_request, "a comparison of its variants")
    original = prepare.load(model, options)
    change = decompose(original, options.decomposition_request, progress)
    networks = {"original": original, "decomposed": change.network}
    for name in VARIANTS:
        progress(name)
        network, fuse = change.network, "fusion" in name
        if "skip-opt" in name:
            skip_options = replace(options, optimize_skips="pool", fuse_activations=fuse)
            pools = prepare.MinimumPools(system=system, target=target)
            reduced = prepare.reduce_skips(network, change, skip_options, pools)
            network = replace(network, module=reduced.network.module) if reduced else network
        networks[name] = with_fused_runs(network) if fuse else network
    return DecompositionVariants(change=change, networks=networks)


def with_fused_runs(network: Network) -> Network:
    """`network` with each run of layers as one kernel, also where a plan would order them otherwise."""
    network = with_separate_phases(network)
    runs = dict.fromkeys(chain_regions(network.module), "")
    return replace(network, module=tvm.transform.Sequential([OutlineGroups(runs)])(network.module))


@dataclass(frozen=True, kw_only=True)
class TwoLayers:
    """Two convolutions in a row, and TeMCO's equations for them, in bytes of fp32.

    Attributes
    ----------
    equations : dict of int to int
        Right-hand sides of equations 1 to 4.
    planned : dict of int to int
        The same without the equations: sizes of constants, and live bytes while the layers run.
    """

    first: str
    second: str
    equations: dict[int, int]
    planned: dict[int, int]


def two_layers(variants: DecompositionVariants, first: str, second: str) -> TwoLayers:
    """Equations and planned bytes of layers `first` and `second`, with only an activation between.

    Raises
    ------
    UnknownNameError
        If one of them was not decomposed.
    """
    layers = {layer.layer: layer for layer in variants.change.layers}
    for name in (first, second):
        if name not in layers:
            raise UnknownNameError("decomposed layer", name, layers)
    a, b = layers[first], layers[second]
    ranks = (*a.ranks, *b.ranks)
    weights, maps = _equations(a.geometry, b.geometry, ranks)
    chains = [f"{chain.layer}.{link.name}" for chain in (a, b) for link in chain.links]
    chains_of_networks = [
        (variants.networks["original"], [first, second]),
        (variants.networks["decomposed"], chains),
    ]
    planned_weights = [_weight_bytes(network, names) for network, names in chains_of_networks]
    planned_maps = [_live_bytes(network, names) for network, names in chains_of_networks]
    return TwoLayers(
        first=first,
        second=second,
        equations=dict(zip((1, 2, 3, 4), (*weights, *maps), strict=True)),
        planned=dict(zip((1, 2, 3, 4), (*planned_weights, *planned_maps), strict=True)),
    )


def _equations(
    a: ConvGeometry, b: ConvGeometry, ranks: tuple[int, ...]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Right-hand sides of equations (1, 2) and (3, 4), for Tucker chains of `ranks`."""
    r1, r2, r3, r4 = ranks
    weights = (a.c * a.oc * a.kh * a.kw + b.c * b.oc * b.kh * b.kw) * FP32_BYTES
    chained = a.c * r1 + r1 * r2 * a.kh * a.kw + r2 * a.oc
    chained += b.c * r3 + r3 * r4 * b.kh * b.kw + r4 * b.oc
    input_pixels, middle_pixels = a.n * a.h * a.w, b.n * b.h * b.w
    output_pixels = b.n * b.rows.output_extent * b.columns.output_extent
    original_peak = max(
        a.c * input_pixels + a.oc * middle_pixels,
        2 * a.oc * middle_pixels,
        a.oc * middle_pixels + b.oc * output_pixels,
    )
    steps = [
        (a.c + r1) * input_pixels,
        r1 * input_pixels + r2 * middle_pixels,
        (r2 + a.oc) * middle_pixels,
        2 * a.oc * middle_pixels,
        (a.oc + r3) * middle_pixels,
        r3 * middle_pixels + r4 * output_pixels,
        (r4 + b.oc) * output_pixels,
    ]
    return (weights, chained * FP32_BYTES), (original_peak * FP32_BYTES, max(steps) * FP32_BYTES)


def _weight_bytes(network: Network, layers: Sequence[str]) -> int:
    """Bytes of the filters of `layers`."""
    return sum(
        tensor_bytes(b.value.args[1])
        for b in main_bindings(network.module)
        if operator(b.value) == "nn.conv2d" and layer_name(network.module, b.var) in layers
    )


def _live_bytes(network: Network, layers: Sequence[str]) -> int:
    """Maximum of live bytes from the first to the last of `layers`."""
    liveness = operator_liveness(network.module)
    begin = {life.name: life.begin for life in liveness.lifetimes}
    bindings = main_bindings(network.module)
    steps = [begin[b.var.name] for b in bindings if layer_name(network.module, b.var) in layers]
    return max(liveness.live_bytes(step) for step in range(min(steps), max(steps) + 1))


@dataclass(frozen=True, kw_only=True)
class MemoryOverTime:
    """Internal tensors of a network, each layer with a result of its own, by layer (TeMCO, Figure 4).

    Attributes
    ----------
    skip_bytes : list of int
        Those of tensors that wait for a distant use: from the layer after their producer to the last reader.
    """

    live_bytes: list[int]
    skip_bytes: list[int]

    @property
    def share_at_peak(self) -> float:
        """The largest share of skip connections in a layer at the peak."""
        peak = max(self.live_bytes)
        skip_bytes_at_peak = [
            s for s, live in zip(self.skip_bytes, self.live_bytes, strict=True) if live == peak
        ]
        return max(skip_bytes_at_peak) / peak

    @property
    def largest_share(self) -> float:
        """The largest share of skip connections at any layer."""
        return max(s / live for s, live in zip(self.skip_bytes, self.live_bytes, strict=True) if live)

    @property
    def skips_to_peak(self) -> float:
        """Maximum bytes of skip connections at any layer, over the peak."""
        return max(self.skip_bytes) / max(self.live_bytes)


def memory_over_time(network: Network) -> MemoryOverTime:
    """Live bytes of a network by layer."""
    liveness = operator_liveness(network.module)
    distant = {skip.name for skip in skips(network.module)}
    skip_lifetimes = [life for life in liveness.lifetimes if life.name in distant]
    steps = range(liveness.steps)
    return MemoryOverTime(
        live_bytes=[liveness.live_bytes(step) for step in steps],
        skip_bytes=[
            sum(life.size_bytes for life in skip_lifetimes if life.begin < step < life.end) for step in steps
        ],
    )
