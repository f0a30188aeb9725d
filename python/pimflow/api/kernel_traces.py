"""Traces for Accel-Sim of the GPU kernels of a layer, a network or a compiled directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pimflow.compiler import artifact
from pimflow.core.json_form import JsonTree
from pimflow.core.layer_text import parse_layer
from pimflow.core.plan import Plan
from pimflow.core.region import RegionGraph, convolution_kernel
from pimflow.core.split import Split
from pimflow.errors import UsageError
from pimflow.hardware import GpuSpec, System
from pimflow.placement.candidates import pipelines
from pimflow.placement.candidates.tasks import gpu_kernel
from pimflow.simulators.accel_sim.kernels import write_traces
from pimflow.simulators.gpu.model import KernelRequest

FORMAT = "accel-sim"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Kernels to write.

    Attributes
    ----------
    layers : dict of KernelRequest to list of str
        By kernel, the layers that it computes; equal layers share a kernel.
    """

    layers: dict[KernelRequest, list[str]]
    gpu: GpuSpec
    dtype: str


@dataclass(frozen=True, kw_only=True)
class TracedKernel:
    """A GPU kernel that was written: the layers that it computes, its launches, and its files.

    Attributes
    ----------
    gpu_channels : int
        Memory channels that it has.
    launches : tuple of str
        Names of its grids.
    instructions : tuple of int
        By launch, of all threads.
    """

    kernel: str
    layers: tuple[str, ...]
    gpu_channels: int
    launches: tuple[str, ...]
    instructions: tuple[int, ...]
    files_bytes: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class KernelTraces(JsonTree):
    """The contents of ``trace.json`` for Accel-Sim."""

    format: str
    gpu: str
    dtype: str
    kernels: tuple[TracedKernel, ...]

    def text(self, out: str) -> str:
        """The contents as text; `out` is the directory that was written."""
        lines = [
            f"{each.kernel} on {each.gpu_channels} channels: {', '.join(each.layers)}"
            for each in self.kernels
        ]
        size_bytes = sum(sum(each.files_bytes.values()) for each in self.kernels)
        lines.append(f"{out}: {len(self.kernels)} kernels of {self.gpu}, {size_bytes} bytes")
        return "\n".join(lines)


def wanted(source: str, system: System) -> Wanted:
    """The kernels of `source`, a layer by its shape, a compiled directory, or a network.

    Raises
    ------
    UsageError
        If `source` is no layer, or was compiled for another GPU than the system's, or with primitives.
    ArtifactError, PlanError
        If it is a directory that is no compiled one, or damaged.
    UnknownNameError, ModelError
        If it is no network either.
    """
    if ":" in source and not Path(source).exists():
        kernel = convolution_kernel(parse_layer(source), system.dtype)
        channels = dict.fromkeys((system.gpu.memory_channels, system.gpu_channels))
        layers = {KernelRequest(kernel, count): [source] for count in channels}
        return Wanted(layers=layers, gpu=system.gpu, dtype=system.dtype)
    if Path(source).is_dir():
        return _of_directory(Path(source), system)
    from pimflow import frontend  # loads TVM, so only for a network
    from pimflow.relay_passes.regions.extract_regions import extract_regions

    network = frontend.load(source)
    graph = extract_regions(network.module, network.name)
    layers = _of_graph(graph, system)
    return Wanted(layers=layers, gpu=system.gpu, dtype=system.dtype)


def _of_directory(directory: Path, system: System) -> Wanted:
    placed = artifact.PlacedRegions.load(directory)
    artifact.Interface.load(directory).check(directory, artifact.PLAN)
    plan = Plan.load(directory / artifact.PLAN)
    if placed.gpu != system.gpu.name:
        raise UsageError(f"{directory} was compiled for gpu '{placed.gpu}'; name that, or its file, as --gpu")
    as_compiled = replace(system, dtype=placed.dtype, padding=placed.padding)
    layers = _of_graph(placed.graph, as_compiled, plan)
    return Wanted(layers=layers, gpu=system.gpu, dtype=placed.dtype)


def _of_graph(graph: RegionGraph, system: System, plan: Plan | None = None) -> dict[KernelRequest, list[str]]:
    """The GPU kernels of a graph, and the regions that each computes.

    Every region has its kernel with all memory channels. Parts that the plan gives to the GPU have theirs
    with the plan's GPU channels too; without a plan, all regions with those of the system.
    """
    gpu, dtype = system.gpu, system.dtype
    gpu_channels = plan.gpu_channels if plan else system.gpu_channels
    choices = {name: choice for choice in plan.choices for name in choice.regions} if plan else {}
    found: dict[KernelRequest, list[str]] = {}
    for region in graph.regions:
        wholes = [gpu_kernel(each, dtype) for each in region.parts or (region,)]
        choice = choices.get(region.name)
        if choice is not None and choice.primitive:
            raise UsageError(
                f"region '{region.name}' is computed by primitive '{choice.primitive}', which has no "
                "traces for Accel-Sim; compile without --select"
            )
        requests = [KernelRequest(whole, gpu.memory_channels) for whole in wholes]
        if choice is None or choice.mode == "GPU":
            requests += [KernelRequest(whole, gpu_channels) for whole in wholes]
        elif choice.mode == "SPLIT":
            assert region.geometry is not None and choice.gpu_share is not None
            part = Split.of(region.geometry, choice.axis, choice.gpu_share)
            requests.append(KernelRequest(gpu_kernel(region, dtype, part, system.symmetric), gpu_channels))
        elif choice.mode == "PIPELINE":
            requests += [
                KernelRequest(part, gpu_channels)
                for part in pipelines.kernels(graph, choice, dtype)[region.name]
            ]
        for request in dict.fromkeys(requests):
            found.setdefault(request, []).append(region.name)
    return found


def write(
    directory: str | os.PathLike[str], of: Wanted, advance: Callable[[float], None] = lambda _: None
) -> KernelTraces:
    """Write the traces into an existing directory; returns the contents of ``trace.json``.

    Raises
    ------
    UsageError
        If a kernel cannot be emitted.
    """
    emitted = write_traces(list(of.layers), of.gpu, of.dtype, Path(directory), advance)
    kernels = tuple(
        TracedKernel(
            kernel=each.name,
            layers=tuple(layers),
            gpu_channels=request.channels,
            launches=tuple(each.launches),
            instructions=tuple(each.instructions),
            files_bytes={f"{each.directory}/{name}": size for name, size in each.files_bytes.items()},
        )
        for each, (request, layers) in zip(emitted, of.layers.items(), strict=True)
    )
    return KernelTraces(format=FORMAT, gpu=of.gpu.name, dtype=of.dtype, kernels=kernels)
