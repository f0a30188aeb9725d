"""Internal tensors of a network as it came, decomposed, and compiled (TeMCO, sections 2.2 and 4.2)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
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
    """Pools of internal tensors: what the network computes, neither its inputs nor its weights.

    Attributes
    ----------
    internal_peak_bytes : int
        Of the compiled network.
    internal_peak_bytes_original : int
        Of the network as it came, each layer with a result of its own: activations are out of place.
    internal_peak_bytes_original_coalesced : int, optional
        The same compiled, so that activations belong to the layers before; None if nothing was decomposed.
    internal_peak_bytes_decomposed : int, optional
        Of the decomposed network, again each layer with a result of its own.
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

    def summary(self) -> dict[str, int | None]:
        return asdict(self)


def before(
    original: Network, decomposed: Network | None, on: tvm.target.Target, system: System, pools: PoolPlanning
) -> dict[str, Any]:
    """What `InternalMemory` says of a network before it is compiled, and of what a decomposition made of it.

    `on` and `system` say what is stored. Of `pools` the planner is taken: all tensors are aligned alike, and
    no weights are among them.
    """
    planning = PoolPlanning(policy=pools.policy, seconds=pools.seconds)
    element_bytes = ELEMENT_BYTES[system.dtype if "gpu" in list(on.keys) else "fp32"]
    forms = {"internal_peak_bytes_original": original, "internal_peak_bytes_decomposed": decomposed}
    layers = {
        name: form and planning.plan(operator_liveness(form.module, element_bytes)).pool_bytes
        for name, form in forms.items()
    }
    return layers | {
        "internal_peak_bytes_original_coalesced": decomposed
        and planning.pool_bytes(original.module, on, system),
        "weight_bytes_original": relax_module.weight_bytes(original.module),
        "flops_original": flops(original.module),
    }
