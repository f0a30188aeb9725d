"""Internal tensors of a network as it came, decomposed, and compiled (TeMCO, sections 2.2 and 4.2)."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import tvm

from pimflow.compiler.smaller_pool import PoolPlanning
from pimflow.core.region import ELEMENT_BYTES
from pimflow.frontend import Network, relax_module
from pimflow.hardware import System
from pimflow.relay_passes.decomposition.layer_flops import flops
from pimflow.relay_passes.memory.kernel_memory import operator_liveness


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


@dataclass(frozen=True, kw_only=True)
class Before:
    """What `InternalMemory` says of a network before it is compiled."""

    peak_bytes: int
    coalesced_bytes: int | None
    decomposed_bytes: int | None
    weight_bytes: int
    flops: int

    @classmethod
    def of(
        cls,
        original: Network,
        decomposed: Network | None,
        on: tvm.target.Target,
        system: System,
        pools: PoolPlanning,
    ) -> Before:
        """Of a network, and what a decomposition made of it; `on` and `system` say what is stored.

        Of `pools` the planner is taken: all tensors are aligned alike, and no weights are among them.
        """
        pools = PoolPlanning(policy=pools.policy, seconds=pools.seconds)
        dtype = system.dtype if "gpu" in list(on.keys) else "fp32"

        def layers(network: Network) -> int:
            return pools.plan(operator_liveness(network.module, ELEMENT_BYTES[dtype])).pool_bytes

        return cls(
            peak_bytes=layers(original),
            coalesced_bytes=pools.pool_bytes(original.module, on, system) if decomposed else None,
            decomposed_bytes=layers(decomposed) if decomposed else None,
            weight_bytes=relax_module.weight_bytes(original.module),
            flops=flops(original.module),
        )

    def beside(self, network: Network, peak_bytes: int) -> InternalMemory:
        """With the compiled `network`, whose pool is `peak_bytes`."""
        return InternalMemory(
            internal_peak_bytes=peak_bytes,
            internal_peak_bytes_original=self.peak_bytes,
            internal_peak_bytes_original_coalesced=self.coalesced_bytes,
            internal_peak_bytes_decomposed=self.decomposed_bytes,
            weight_bytes=relax_module.weight_bytes(network.module),
            weight_bytes_original=self.weight_bytes,
            flops=flops(network.module),
            flops_original=self.flops,
        )
