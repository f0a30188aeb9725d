"""Whole networks by the models, and with simulated cycles: ``compare_simulated.py CSV [MODEL …]``.

CSV has Accel-Sim's cycles of kernels, as scripts/record_accel_sim.py stores them. Networks run on the GPU
alone with all memory channels, and by the plan that the models choose under accounting `paper`. The second
columns use the simulated cycles of every kernel in CSV. A kernel that CSV lacks, such as a part of a split
layer, takes the model's time, scaled as `simulators/accel_sim/scaling.py` says. PIM programs have the timing
`ramulator-pimflow`, which counts the cycles of the authors' Ramulator.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from calibration.samples import Sample, read_samples
from update_readme import fill

import pimflow
from pimflow.commands.simulate.kernel_traces import trace_request
from pimflow.core.candidate import Provenance
from pimflow.errors import PimflowError
from pimflow.hardware import GpuSpec
from pimflow.placement.costs.costs import Profiling
from pimflow.simulators.accel_sim.kernels import kernel_name, parse_kernel_name
from pimflow.simulators.accel_sim.scaling import SimulatedKernel, scale_cost
from pimflow.simulators.gpu.model import KernelCost, KernelRequest, kernel_cost

NETWORKS = ("mobilenet-v2", "squeezenet-1.1")
GPU, DTYPE = "rtx-2060-pim32", "fp16"


class StoredProfiler:
    """A `GpuProfiler` of stored cycles; the times of other kernels are scaled from the model."""

    name, computes, primitives = "stored", False, False

    def __init__(self, samples: Sequence[Sample], gpu: GpuSpec):
        self.simulated_kernels: dict[tuple[str, int], SimulatedKernel] = {}
        for sample in samples:
            kernel, channels = parse_kernel_name(sample.shape, DTYPE) or sample.kernel, sample.channels
            modelled = kernel_cost(kernel, gpu, dtype=DTYPE, channels=channels)
            execution_ns = max(0.0, sample.measured_ns - gpu.launch_ns)
            cost = dataclasses.replace(modelled, execution_ns=execution_ns, provenance=Provenance.SIMULATED)
            about = {"name": sample.shape, "kernel": kernel, "channels": channels}
            simulated_kernel = SimulatedKernel(**about, modelled=modelled, simulated=cost)
            self.simulated_kernels[sample.shape, channels] = simulated_kernel

    def costs(self, requests: Sequence[KernelRequest], gpu: GpuSpec, dtype: str) -> list[KernelCost]:
        """Costs of kernels, in their order."""
        return [self.cost(request, gpu, dtype) for request in requests]

    def cost(self, request: KernelRequest, gpu: GpuSpec, dtype: str) -> KernelCost:
        """Cost of one kernel."""
        name = kernel_name(request.kernel, dtype)
        if simulated_kernel := self.simulated_kernels.get((name, request.channels)):
            return simulated_kernel.simulated
        modelled = kernel_cost(request.kernel, gpu, dtype=dtype, channels=request.channels)
        return scale_cost(
            name, request.kernel, request.channels, modelled, list(self.simulated_kernels.values())
        )


def table(models: Sequence[str], samples: Sequence[Sample]) -> str:
    """Markdown: a row for each network, on the GPU alone and by its plan."""
    system = pimflow.system(gpu=GPU, timing="ramulator-pimflow", accounting="paper")
    head = "network | GPU alone: models, µs | simulated | plan: models, µs | simulated"
    lines = [f"| {head} | speed-up: models | simulated | whole kernels simulated |", "|---|" + "---:|" * 7]
    for model in models:
        modelled = pimflow.search(model, system)
        stored = StoredProfiler(samples, system.gpu)
        simulated = pimflow.search(model, system, plan=modelled.plan, profiling=Profiling(gpu=stored))
        results = (modelled, simulated)
        cells = [model]
        for name in ("gpu_only", "evaluation"):
            cells += [f"{getattr(entry, name).latency_ns / 1e3:.1f}" for entry in results]
        cells += [f"{entry.gpu_only.latency_ns / entry.evaluation.latency_ns:.3f}" for entry in results]
        traced_kernels = [
            (kernel_name(r.kernel, DTYPE), r.channels) for r in trace_request(model, system).layers
        ]
        count = sum(entry in stored.simulated_kernels for entry in traced_kernels)
        lines.append(f"| {' | '.join(cells)} | {count} of {len(traced_kernels)} |")
    return "\n".join(lines)


def main() -> int:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("csv")
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--update", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    try:
        text = table(arguments.models or NETWORKS, read_samples(arguments.csv, GpuSpec.load(GPU)))
    except PimflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(text)
    if arguments.update:
        page = fill(arguments.update.read_text(encoding="utf-8"), "simulated networks", text)
        arguments.update.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
