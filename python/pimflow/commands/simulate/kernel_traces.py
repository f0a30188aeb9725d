"""Traces for Accel-Sim of the GPU kernels of a layer, a network or a compiled directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pimflow.compiler import artifact
from pimflow.compiler.interface import Interface
from pimflow.core.json_form import JsonTree
from pimflow.core.kernel import convolution_kernel
from pimflow.core.layer_text import parse_layer
from pimflow.core.plan import Plan
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import PipelineRewrite, SplitRewrite
from pimflow.errors import UsageError
from pimflow.hardware import GpuSpec, System
from pimflow.placement.candidates import pipelines
from pimflow.simulators.accel_sim.kernels import write_traces
from pimflow.simulators.gpu.model import KernelRequest
from pimflow.simulators.gpu.region_kernels import gpu_kernel

FORMAT = "accel-sim"


@dataclass(frozen=True, kw_only=True)
class KernelTraceRequest:
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
            f"{kernel.kernel} on {kernel.gpu_channels} channels: {', '.join(kernel.layers)}"
            for kernel in self.kernels
        ]
        size_bytes = sum(sum(kernel.files_bytes.values()) for kernel in self.kernels)
        lines.append(f"{out}: {len(self.kernels)} kernels of {self.gpu}, {size_bytes} bytes")
        return "\n".join(lines)


def trace_request(source: str, system: System) -> KernelTraceRequest:
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
        return KernelTraceRequest(layers=layers, gpu=system.gpu, dtype=system.dtype)
    if Path(source).is_dir():
        return _directory_request(Path(source), system)
    from pimflow import frontend  # loads TVM, so only for a network
    from pimflow.relay_passes.regions.extract_regions import extract_regions

    network = frontend.load(source)
    graph = extract_regions(network.module, network.name)
    layers = _graph_layers(graph, system)
    return KernelTraceRequest(layers=layers, gpu=system.gpu, dtype=system.dtype)


def _directory_request(directory: Path, system: System) -> KernelTraceRequest:
    placed = artifact.PlacedRegions.load(directory)
    Interface.load(directory).check(directory, artifact.PLAN)
    plan = Plan.load(directory / artifact.PLAN)
    if placed.gpu != system.gpu.name:
        raise UsageError(f"{directory} was compiled for gpu '{placed.gpu}'; name that, or its file, as --gpu")
    as_compiled = replace(system, dtype=placed.dtype, padding=placed.padding)
    layers = _graph_layers(placed.graph, as_compiled, plan)
    return KernelTraceRequest(layers=layers, gpu=system.gpu, dtype=placed.dtype)


def _graph_layers(
    graph: RegionGraph, system: System, plan: Plan | None = None
) -> dict[KernelRequest, list[str]]:
    """The GPU kernels of a graph, and the regions that each computes.

    Every region has its kernel with all memory channels. Parts that the plan gives to the GPU have theirs
    with the plan's GPU channels too; without a plan, all regions with those of the system.
    """
    gpu, dtype = system.gpu, system.dtype
    gpu_channels = plan.gpu_channels if plan else system.gpu_channels
    choices = {name: choice for choice in plan.choices for name in choice.regions} if plan else {}
    layers: dict[KernelRequest, list[str]] = {}
    for region in graph.regions:
        kernels = [gpu_kernel(kernel_region, dtype) for kernel_region in region.kernel.parts or (region,)]
        choice = choices.get(region.name)
        if choice is not None and choice.primitive:
            raise UsageError(
                f"region '{region.name}' is computed by primitive '{choice.primitive}', which has no "
                "traces for Accel-Sim; compile without --select"
            )
        requests = [KernelRequest(kernel, gpu.memory_channels) for kernel in kernels]
        if choice is None or not choice.uses_pim:
            requests += [KernelRequest(kernel, gpu_channels) for kernel in kernels]
        elif isinstance(choice.rewrite, SplitRewrite):
            part = choice.rewrite.split(region.layer)
            requests.append(
                KernelRequest(gpu_kernel(region, dtype, part, system.has_symmetric_padding), gpu_channels)
            )
        elif isinstance(choice.rewrite, PipelineRewrite):
            pipeline = pipelines.to_pipeline(choice.regions, choice.rewrite)
            requests += [
                KernelRequest(part, gpu_channels)
                for part in pipelines.kernels(graph, pipeline, dtype)[region.name]
            ]
        for request in dict.fromkeys(requests):
            layers.setdefault(request, []).append(region.name)
    return layers


def write(
    directory: str | os.PathLike[str],
    traced: KernelTraceRequest,
    advance: Callable[[float], None] = lambda _: None,
) -> KernelTraces:
    """Write the traces into an existing directory; returns the contents of ``trace.json``.

    Raises
    ------
    UsageError
        If a kernel cannot be emitted.
    """
    emitted = write_traces(list(traced.layers), traced.gpu, traced.dtype, Path(directory), advance)
    kernels = tuple(
        TracedKernel(
            kernel=kernel_files.name,
            layers=tuple(layers),
            gpu_channels=request.channels,
            launches=tuple(kernel_files.launches),
            instructions=tuple(kernel_files.instructions),
            files_bytes={
                f"{kernel_files.directory}/{name}": size for name, size in kernel_files.files_bytes.items()
            },
        )
        for kernel_files, (request, layers) in zip(emitted, traced.layers.items(), strict=True)
    )
    return KernelTraces(format=FORMAT, gpu=traced.gpu.name, dtype=traced.dtype, kernels=kernels)
