"""The zoo's GPU kernels timed on the CUDA device here, beside the models: ``measure_gpu.py --gpu h200``."""

from __future__ import annotations

import argparse
import json
import sys

from pimflow import frontend, zoo
from pimflow.compiler.measurement.cuda_profiler import Cuda, kernel_rows
from pimflow.errors import PimflowError
from pimflow.hardware import GpuSpec
from pimflow.placement.candidates.tasks import gpu_kernels
from pimflow.relay_passes.regions.extract_regions import extract_regions
from pimflow.simulators.gpu.learned_model import Learned, residual_path
from pimflow.simulators.profiler import Analytic


def main() -> int:
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
        profiler = Cuda(arguments.l2, progress=say)
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
    found = {"device": profiler.device, "gpu": gpu.name, "l2": arguments.l2, **profiler.clocks()}
    print(json.dumps({**found, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
