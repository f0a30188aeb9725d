"""What the kernels of a network need of a GPU, by architecture, for ``prove_kernels.py --resources``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kernel_cases import network_kernels
from kernel_sweep import markdown

from pimflow.compiler.kernel_checks.resources import LaunchResources, launch_resources
from pimflow.hardware import GpuSpec, spec_names


@dataclass(kw_only=True)
class ResourceRow:
    """What the launches of a network need on one architecture.

    Attributes
    ----------
    launches : int
    registers, shared_bytes : int
        The most of a thread, and of a block.
    resident_blocks : int
        The fewest blocks of a launch that a multiprocessor of a GPU preset has room for.
    local : list of str
        Kernels that use local memory, with the bytes of a thread.
    problems : list of str
        Limits that launches break.
    """

    network: str
    dtype: str
    architecture: str
    launches: int
    registers: int
    shared_bytes: int
    resident_blocks: int
    local: list[str]
    problems: list[str]


def resource_rows(network: str, dtype: str, context: int | None = None) -> list[ResourceRow]:
    """The rows of a network of which the GPU does everything; raises `UsageError` without a CUDA compiler."""
    by_architecture: dict[str, list[LaunchResources]] = {}
    for resources in launch_resources(network_kernels(network, dtype, context)):
        by_architecture.setdefault(resources.architecture, []).append(resources)
    return [_row(network, dtype, launches) for launches in by_architecture.values()]


def _row(network: str, dtype: str, launches: list[LaunchResources]) -> ResourceRow:
    # A GPU with less than all that CUDA compiles for has schedules of its own.
    gpus = [gpu for gpu in map(GpuSpec.load, spec_names("gpu")) if not gpu.kernel_limits(dtype).is_tight]
    return ResourceRow(
        network=network,
        dtype=dtype,
        architecture=launches[0].architecture,
        launches=len(launches),
        registers=max(launch.kernel.registers for launch in launches),
        shared_bytes=max(launch.shared_bytes for launch in launches),
        resident_blocks=min(launch.resident_blocks(gpu) for launch in launches for gpu in gpus),
        local=[
            f"{launch.kernel.name}: {launch.kernel.local_bytes} bytes"
            for launch in launches
            if launch.kernel.local_bytes
        ],
        problems=[
            f"{launch.kernel.name}: {problem}" for launch in launches for problem in launch.problems(gpus)
        ],
    )


def resource_table(rows: Iterable[ResourceRow]) -> str:
    """A table of Markdown, a row for each type and architecture."""
    groups: dict[tuple[str, str], list[ResourceRow]] = {}
    for row in rows:
        groups.setdefault((row.dtype, row.architecture), []).append(row)
    heads = (
        *("type", "architecture", "networks", "launches", "registers of a thread", "shared bytes of a block"),
        *("blocks that fit", "launches with local memory", "broken limits"),
    )
    return markdown(
        heads,
        [
            (
                *(dtype, architecture, len(members), sum(m.launches for m in members)),
                *(max(m.registers for m in members), max(m.shared_bytes for m in members)),
                min(m.resident_blocks for m in members),
                *(sum(len(m.local) for m in members), sum(len(m.problems) for m in members)),
            )
            for (dtype, architecture), members in groups.items()
        ],
    )
