"""The zoo's GPU kernels timed on the CUDA device here, as CSV: ``measure_gpu.py --gpu h200 > h200.csv``.

Rows also have the times of the models. ``validate_gpu_model.py`` reads the file.
"""

from __future__ import annotations

import argparse
import csv
import sys

from pimflow import frontend, zoo
from pimflow.compiler.measurement.cuda_profiler import CudaProfiler, kernel_rows
from pimflow.errors import PimflowError
from pimflow.hardware import GpuSpec
from pimflow.placement.candidates.tasks import gpu_kernels
from pimflow.relay_passes.regions.extract_regions import extract_regions
from pimflow.simulators.gpu.learned_model import Learned, residual_path
from pimflow.simulators.profiler import Analytic


def main() -> int:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=zoo.names(), metavar="MODEL")
    parser.add_argument("--gpu", required=True, metavar="NAME|FILE")
    parser.add_argument("--dtype", default="fp16", choices=("fp16", "fp32"))
    parser.add_argument("--l2", default="cold", choices=("cold", "warm"))
    arguments = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    try:
        gpu = GpuSpec.load(arguments.gpu)
        profiler = CudaProfiler(arguments.l2, progress=say)
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
