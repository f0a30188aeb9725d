"""The part of a report about memory: the pool of tensors, and the weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pimflow.commands.shared.streaming_report import StreamingReport
from pimflow.core.json_form import named, report_from
from pimflow.hardware import System
from pimflow.memory import MemoryPlan
from pimflow.placement import SearchResult
from pimflow.placement.solvers.capacity import loaded_weight_bytes
from pimflow.placement.solvers.plan_memory import PlanMemory

if TYPE_CHECKING:
    from pimflow.compiler.build import Build
    from pimflow.compiler.plan_pools import PoolChoice
    from pimflow.relay_passes.regions.kernel_groups import TensorCopy


@dataclass(frozen=True, kw_only=True)
class PlacedTensor:
    """A tensor in the pool, live in the steps ``[begin, end)``; a step is a kernel or a PIM program.

    `name` consists of its number and the layer that computes it.
    """

    name: str
    begin: int
    end: int
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class PoolRegion:
    """A range of the pool, for tensors in one set of memory channels.

    `channels` is ``left`` (those that serve the GPU while PIM works), ``all``, or ``pim`` (those with PIM).
    """

    channels: str
    begin_bytes: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class PoolReport:
    """The memory pool of the executable for `target`: places of tensors, and parts of them that are copied.

    Sizes are those of the type that the target stores; a stand-in CPU stores fp32. Weights (`weight_bytes`,
    in fp32) are not in the pool, unless they are streamed. `regions` is empty unless tensors lie in several
    sets of memory channels; then each set has a range of the pool. If the goal is about memory, `choice` says
    how the plan was found, and `switched_on` lists options that were switched on for it.
    """

    target: str
    pool_bytes: int
    lower_bound_bytes: int
    optimal: bool
    tensors: int
    weight_bytes: int
    copies: tuple[TensorCopy, ...]
    choice: PoolChoice | None = None
    switched_on: tuple[str, ...] = ()
    regions: tuple[PoolRegion, ...] = ()
    placed: tuple[PlacedTensor, ...] = ()

    @classmethod
    def from_build(
        cls, build: Build, choice: PoolChoice | None = None, switched_on: tuple[str, ...] = ()
    ) -> PoolReport:
        """From the build of a target."""
        return report_from(
            cls,
            build.memory,
            target=build.target,
            tensors=len(build.memory.offsets_bytes),
            weight_bytes=build.weight_bytes,
            copies=build.copies,
            choice=choice,
            switched_on=switched_on,
            regions=_regions(build.memory),
            placed=tuple(
                report_from(PlacedTensor, life, offset_bytes=build.memory.offsets_bytes[life.name])
                for life in build.memory.lifetimes
            ),
        )


def _regions(memory: MemoryPlan) -> tuple[PoolRegion, ...]:
    """Ranges of the pool by set of channels, if there are several."""
    if len(memory.pools) < 2:
        return ()
    return tuple(
        PoolRegion(channels=pool.memory, begin_bytes=pool.begin_bytes, size_bytes=pool.pool_bytes)
        for pool in memory.pools
    )


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """The memory of a plan.

    Attributes
    ----------
    weight_load_ns, weight_bytes
        Time to load the weights of the PIM channels, and their size.
    peak_activation_bytes : int
        Largest size of the tensors that live at once, in the system's storage type.
    streaming : StreamingReport, optional
        Latencies with copies of weights, if they are streamed.
    """

    weight_load_ns: float
    weight_bytes: int
    peak_activation_bytes: int
    pool: PoolReport = field(metadata=named("memory"))
    streaming: StreamingReport | None = None

    @classmethod
    def from_search(cls, search_result: SearchResult, pool: PoolReport) -> MemoryReport:
        """From a search result, and the pool that is built for it."""
        system = search_result.system
        placed_bytes = loaded_weight_bytes(system, search_result.candidates)
        plan_memory = PlanMemory(search_result.graph, system.dtype)
        return cls(
            weight_load_ns=weight_load_ns(system, placed_bytes),
            weight_bytes=placed_bytes,
            peak_activation_bytes=plan_memory.pool_bytes(search_result.candidates),
            pool=pool,
            streaming=StreamingReport.from_search(search_result),
        )


def weight_load_ns(system: System, placed_bytes: int) -> float:
    """Time to write weights into all PIM channels in parallel, each at the rate of its bus."""
    if not placed_bytes:
        return 0.0
    bytes_per_ns = system.pim.column_bytes / (system.pim.timing["nBL"] * system.pim.tCK_ns)
    return placed_bytes / (bytes_per_ns * system.pim_channels)
