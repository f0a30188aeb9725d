"""Costs of kernels that Accel-Sim did not run, scaled to be comparable with kernels that it ran.

The GPU model and the simulator disagree by a factor that differs from layer to layer. A search that takes
some kernels from one and some from the other would prefer the kernels of the source that gives shorter times.
So a kernel without a log costs what the model gives, times a factor: simulated over modelled cost of the most
similar kernels. These are the same kernel with other memory channels; else other parts of the same layer;
else kernels of its kind; else all. Among them only those with the same number of memory channels count, if
there are any. Execution and traffic are scaled; the launch is not, because it is the same for all kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from pimflow.core.candidate import Provenance
from pimflow.core.kernel import ConvGeometry, Kernel
from pimflow.simulators.gpu.model import KernelCost


@dataclass(frozen=True, kw_only=True)
class SimulatedKernel:
    """A simulated kernel, with its cost by the GPU model."""

    name: str
    kernel: Kernel
    channels: int
    modelled: KernelCost
    simulated: KernelCost

    @property
    def energies_pj(self) -> dict[str, float]:
        """Simulated energy by part; empty without a power report."""
        return self.simulated.energies_pj or {}


def scale_cost(
    name: str, kernel: Kernel, channels: int, modelled: KernelCost, references: Sequence[SimulatedKernel]
) -> KernelCost:
    """`modelled`, the cost of a kernel that was not simulated, scaled by the most similar `references`.

    If references have energies of AccelWattch, its energy is the mean power of the most similar ones times
    its time. If no reference took longer than its launch, the result is `modelled` itself.
    """
    similar = next(
        _similarity_groups(
            name,
            kernel,
            channels,
            [candidate for candidate in references if candidate.simulated.execution_ns],
        ),
        None,
    )
    if similar is None:
        return modelled

    def ratio(value: Callable[[KernelCost], float]) -> float:
        """By how much the similar kernels exceed the model."""
        expected = sum(value(reference.modelled) for reference in similar)
        return sum(value(reference.simulated) for reference in similar) / expected if expected else 1.0

    cost = dataclasses.replace(
        modelled,
        execution_ns=modelled.execution_ns * ratio(lambda cost: cost.execution_ns),
        dram_bytes=modelled.dram_bytes * ratio(lambda cost: cost.dram_bytes),
        l2_bytes=modelled.l2_bytes * ratio(lambda cost: cost.l2_bytes),
        provenance=Provenance.SCALED,
    )
    energy_candidates = [reference for reference in references if reference.energies_pj]
    energy_references = next(_similarity_groups(name, kernel, channels, energy_candidates), None)
    if energy_references is None:
        return cost
    over_ns = sum(reference.simulated.total_ns for reference in energy_references)
    energies_pj = {
        part: sum(reference.energies_pj[part] for reference in energy_references) / over_ns * cost.total_ns
        for part in energy_references[0].energies_pj
    }
    return dataclasses.replace(cost, energies_pj=energies_pj)


def _similarity_groups(
    name: str, kernel: Kernel, channels: int, references: Sequence[SimulatedKernel]
) -> Iterator[list[SimulatedKernel]]:
    """Groups of references, the most similar first; none is empty."""
    layer_keys = _layer_keys(kernel.geometry)
    for is_similar in (
        lambda reference: reference.name == name,
        lambda reference: layer_keys & _layer_keys(reference.kernel.geometry),
        lambda reference: reference.kernel.kind == kernel.kind,
        lambda reference: True,
    ):
        group = [reference for reference in references if is_similar(reference)]
        yield from filter(None, ([reference for reference in group if reference.channels == channels], group))


def _layer_keys(geometry: ConvGeometry | None) -> set[Hashable]:
    """Keys that parts of one layer share: its geometry without rows and images, outputs, or reduction."""
    if geometry is None:
        return set()
    fields = dataclasses.asdict(geometry)
    _, pad_left, _, pad_right = geometry.padding
    rows = {"n": 0, "h": 0, "padding": (0, pad_left, 0, pad_right)}
    return {tuple({**fields, **changes}.values()) for changes in (rows, {"oc": 0}, {"c": 0})}
