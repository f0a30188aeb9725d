"""Fused activations: one chain of a decomposed network feeds the next without a full-size tensor between."""

from __future__ import annotations

from dataclasses import replace

from pimflow.compiler import layer_order
from pimflow.errors import UsageError
from pimflow.frontend import Network
from pimflow.hardware import System
from pimflow.relay_passes.decomposition.separate_phases import SeparatePhases
from pimflow.relay_passes.flat import LAYER_ROLES
from pimflow.relay_passes.kernels.activation_chains import activation_chains


def require_decomposed(fuse_activations: bool, decompose: object, network: Network) -> None:
    """Raise `UsageError` if activations are to be fused, but the network has no chains and gets none."""
    if fuse_activations and not decompose and not LAYER_ROLES.read(network.module):
        raise UsageError("--fuse-activations joins the chains of decomposed layers: give --decompose too")


def with_separate_phases(network: Network) -> Network:
    """`network` with each run over transposed convolutions split into a run a phase (`SeparatePhases`)."""
    return replace(network, module=SeparatePhases()(network.module))


def with_contiguous_runs(network: Network, system: System) -> Network:
    """`with_separate_phases`, and the regions of each run ordered one directly after the other."""
    return layer_order.with_runs_together(with_separate_phases(network), system)


def require_chains(network: Network) -> list[list[str]]:
    """`activation_chains` of `network`; raises `UsageError` if there are none."""
    runs = activation_chains(network.module)
    if not runs:
        raise UsageError(
            f"'{network.name}': no activation to fuse: nowhere is all between an lconv and an fconv "
            "elementwise, or a pooling, and read by nothing else"
        )
    return runs
