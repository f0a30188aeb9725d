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

from pimflow.core.candidate import Known
from pimflow.core.region import ConvGeometry, Kernel
from pimflow.simulators.gpu.model import KernelCost


@dataclass(frozen=True, kw_only=True)
class SimulatedKernel:
    """A simulated kernel, with its cost by the GPU model.

    Attributes
    ----------
    name : str
        Its `kernels.kernel_name`.
    kernel : Kernel
    channels : int
        Memory channels of the run.
    modelled, simulated : KernelCost
    """

    name: str
    kernel: Kernel
    channels: int
    modelled: KernelCost
    simulated: KernelCost


def scaled(
    name: str, kernel: Kernel, channels: int, modelled: KernelCost, references: Sequence[SimulatedKernel]
) -> KernelCost:
    """`modelled`, the cost of a kernel that was not simulated, scaled by the most similar `references`.

    If references have energies of AccelWattch, its energy is the mean power of the most similar ones times
    its time. If no reference took longer than its launch, the result is `modelled` itself.
    """
    alike = next(_alike(name, kernel, channels, [r for r in references if r.simulated.execution_ns]), None)
    if alike is None:
        return modelled

    def ratio(value: Callable[[KernelCost], float]) -> float:
        expected = sum(value(each.modelled) for each in alike)
        return sum(value(each.simulated) for each in alike) / expected if expected else 1.0

    cost = dataclasses.replace(
        modelled,
        execution_ns=modelled.execution_ns * ratio(lambda cost: cost.execution_ns),
        dram_bytes=modelled.dram_bytes * ratio(lambda cost: cost.dram_bytes),
        l2_bytes=modelled.l2_bytes * ratio(lambda cost: cost.l2_bytes),
        known=Known.SCALED,
    )
    powered = [each for each in references if each.simulated.energies_pj is not None]
    metered = next(_alike(name, kernel, channels, powered), None)
    if metered is None:
        return cost
    over_ns = sum(each.simulated.total_ns for each in metered)
    energies_pj = {
        part: sum(each.simulated.energies_pj[part] for each in metered) / over_ns * cost.total_ns
        for part in metered[0].simulated.energies_pj
    }
    return dataclasses.replace(cost, energies_pj=energies_pj)


def _alike(
    name: str, kernel: Kernel, channels: int, references: Sequence[SimulatedKernel]
) -> Iterator[list[SimulatedKernel]]:
    """Groups of references, the most similar first; none is empty."""
    parts = _parts(kernel.geometry)
    for same in (
        lambda each: each.name == name,
        lambda each: parts & _parts(each.kernel.geometry),
        lambda each: each.kernel.kind == kernel.kind,
        lambda each: True,
    ):
        group = [each for each in references if same(each)]
        yield from filter(None, ([each for each in group if each.channels == channels], group))


def _parts(geometry: ConvGeometry | None) -> set[Hashable]:
    """Keys that parts of one layer share: its geometry without rows and images, outputs, or reduction."""
    if geometry is None:
        return set()
    fields = dataclasses.asdict(geometry)
    _, left, _, right = geometry.padding
    rows = {"n": 0, "h": 0, "padding": (0, left, 0, right)}
    return {tuple({**fields, **other}.values()) for other in (rows, {"oc": 0}, {"c": 0})}
