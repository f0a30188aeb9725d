"""Costs of kernels that Accel-Sim did not run, next to kernels that it did.

The GPU model and the simulator disagree by a factor that differs from layer to layer. A search that takes
some kernels from one and some from the other chooses whatever was left to the faster of the two. So a kernel
without a log costs what the model gives, times a factor: simulated over modelled cost of the most similar
kernels. These are the same kernel with other memory channels; else other parts of the same layer; else
kernels of its kind; else all. Among them, those with as many memory channels count, if there are any.
Execution and traffic are scaled; the launch, the same for all, is not.
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
        Memory channels that it ran with.
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
    """`modelled`, of a kernel that was not simulated, times what `references` show.

    If they have energies of AccelWattch, its energy is the mean power of the most similar times its time.
    Without any reference that took longer than its launch, it is `modelled` itself.
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
    """Groups of references, the most alike first; none is empty."""
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
    """What parts of a layer have in common: all but its rows and images, its outputs, or its reduction."""
    if geometry is None:
        return set()
    fields = dataclasses.asdict(geometry)
    _, left, _, right = geometry.padding
    rows = {"n": 0, "h": 0, "padding": (0, left, 0, right)}
    return {tuple({**fields, **other}.values()) for other in (rows, {"oc": 0}, {"c": 0})}
