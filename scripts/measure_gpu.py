"""The zoo's GPU kernels timed on the CUDA device here, as CSV: ``measure_gpu.py --gpu h200 > h200.csv``.

Rows also have the times of the models, and the tiles of products. ``validate_gpu_model.py`` reads the file,
and ``validate_product_tiles.py`` fits the model of tiles to it.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import sys
from collections.abc import Sequence

from pimflow import frontend, zoo
from pimflow.compiler.measurement.cuda_profiler import CudaProfiler, KernelMeasurement
from pimflow.core.kernel import Kernel
from pimflow.errors import PimflowError
from pimflow.hardware import GpuSpec
from pimflow.relay_passes.regions.extract_regions import extract_regions
from pimflow.simulators.gpu.learned_model import Learned, residual_path
from pimflow.simulators.gpu.model import SIZES, KernelRequest
from pimflow.simulators.gpu.region_kernels import gpu_kernels
from pimflow.simulators.profiler import Analytic, GpuProfiler

TIMES = [field.name for field in dataclasses.fields(KernelMeasurement)]


def kernel_rows(
    kernels: Sequence[tuple[str, Kernel]],
    profiler: CudaProfiler,
    gpu: GpuSpec,
    dtype: str,
    models: Sequence[GpuProfiler],
) -> list[dict[str, object]]:
    """Measured times of named kernels beside those of models, with all memory channels, in ns.

    Returns
    -------
    list of dict
        ``device``, ``kernel``, ``dtype``, ``kind`` and sizes as `calibration.samples` reads them,
        ``cold_ns``, ``warm_ns``, ``launch_ns``, ``tile`` of a product on tensor cores; for every model its
        execution time ``NAME_ns``, and ``NAME_ratio``, its quotient with the measured time in the profiler's
        state of the L2. Times are None for a kernel that fails.
    """
    requests = [KernelRequest(kernel, gpu.memory_channels) for _, kernel in kernels]
    measured = profiler.measure([kernel for _, kernel in kernels], gpu, dtype)
    model_costs = {model.name: model.costs(requests, gpu, dtype) for model in models}
    rows = []
    for index, ((name, kernel), times) in enumerate(zip(kernels, measured, strict=True)):
        row: dict[str, object] = {"device": profiler.device, "kernel": name, "dtype": dtype}
        row |= {key: getattr(kernel, key) for key in ("kind", *SIZES)}
        times_ns = dataclasses.asdict(times) if times else dict.fromkeys(TIMES)
        row |= times_ns
        for model, costs in model_costs.items():
            modelled_ns = costs[index].execution_ns
            row[f"{model}_ns"] = modelled_ns
            real_ns = times_ns[f"{profiler.l2}_ns"]
            row[f"{model}_ratio"] = modelled_ns / real_ns if real_ns else None
        rows.append(row)
    return rows


def main() -> int:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=zoo.names(), metavar="MODEL")
    parser.add_argument("--gpu", required=True, metavar="NAME|FILE")
    parser.add_argument("--dtype", default="fp16", choices=("fp16", "fp32"))
    parser.add_argument("--l2", default="cold", choices=("cold", "warm"))
    parser.add_argument(
        "--for-card", action="store_true", help="schedule for the card's architecture, not for that of builds"
    )
    arguments = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    try:
        gpu = GpuSpec.load(arguments.gpu)
        profiler = CudaProfiler(arguments.l2, progress=say, for_card=arguments.for_card)
        kernels = {}
        for model in arguments.models:
            for region in extract_regions(frontend.load(model).module, model).regions:
                for kernel in gpu_kernels(region, arguments.dtype):
                    kernels.setdefault(kernel, f"{model}/{region.name}")
        named = [(name, kernel) for kernel, name in kernels.items()]
        say(f"{len(named)} different kernels on {profiler.device}")
        models = [Analytic()]
        if residual_path(gpu.name, arguments.dtype).exists():
            models.append(Learned())
        else:
            say(f"no learned model of {gpu.name} at {arguments.dtype}: the analytic one alone")
        rows = kernel_rows(named, profiler, gpu, arguments.dtype, models)
    except PimflowError as error:
        say(f"error: {error}")
        return error.exit_code
    now = {"gpu": gpu.name, **profiler.clocks()}
    table = csv.DictWriter(sys.stdout, [*rows[0], *now], lineterminator="\n")
    table.writeheader()
    table.writerows(row | now for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
