"""Internal tensors of the original, the decomposed and the compiled network (TeMCO, sections 2.2, 4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm

from pimflow.compiler.smaller_pool import PoolPlanning
from pimflow.core.region import ELEMENT_BYTES
from pimflow.frontend import Network, relax_module
from pimflow.hardware import System
from pimflow.relay_passes.decomposition.layer_flops import flops
from pimflow.relay_passes.memory.operator_memory import operator_liveness


@dataclass(frozen=True, kw_only=True)
class InternalMemory:
    """Pools of internal tensors: those that the network computes, without inputs and weights.

    Attributes
    ----------
    internal_peak_bytes : int
        Of the compiled network.
    internal_peak_bytes_original : int
        Of the original network, with a result for each layer: activations are not fused.
    internal_peak_bytes_original_coalesced : int, optional
        Of the original network compiled, with activations fused; None if no layer was decomposed.
    internal_peak_bytes_decomposed : int, optional
        Of the decomposed network, with a result for each layer; None if no layer was decomposed.
    weight_bytes, weight_bytes_original : int
        Of all constants, fp32.
    flops, flops_original : int
        `layer_flops.flops`.
    """

    internal_peak_bytes: int
    internal_peak_bytes_original: int
    internal_peak_bytes_original_coalesced: int | None
    internal_peak_bytes_decomposed: int | None
    weight_bytes: int
    weight_bytes_original: int
    flops: int
    flops_original: int


def uncompiled_memory(
    original: Network,
    decomposed: Network | None,
    target: tvm.target.Target,
    system: System,
    pools: PoolPlanning,
) -> dict[str, Any]:
    """The fields of `InternalMemory` that are about the original and the decomposed network.

    `target` and `system` give the storage type. From `pools` only policy and time limit are used, so that
    alignment is the same for all tensors and weights are left out.
    """
    planning = PoolPlanning(policy=pools.policy, seconds=pools.seconds)
    element_bytes = ELEMENT_BYTES[system.dtype if "gpu" in list(target.keys) else "fp32"]
    networks = {"internal_peak_bytes_original": original, "internal_peak_bytes_decomposed": decomposed}
    layers = {
        name: network and planning.plan(operator_liveness(network.module, element_bytes)).pool_bytes
        for name, network in networks.items()
    }
    return layers | {
        "internal_peak_bytes_original_coalesced": decomposed
        and planning.pool_bytes(original.module, target, system),
        "weight_bytes_original": relax_module.weight_bytes(original.module),
        "flops_original": flops(original.module),
    }
