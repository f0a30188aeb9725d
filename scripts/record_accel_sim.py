"""Cycles of kernels that pimflow emits, simulated by Accel-Sim: ``record_accel_sim.py ACCEL_SIM CSV``.

ACCEL_SIM is an installed Accel-Sim, as for ``--profiler gpu=accel-sim:ACCEL_SIM``. The kernels are those of
``--model NAME``, as the cost model fuses them, and of ``--layer TEXT``, such as ``conv:1x672x14x14,112,1x1``,
each with all memory channels and with those without PIM. By default they are `LAYERS`, then the kernels of
`WHOLE` and `STREAMS`, then those of `NETWORKS` that take at most `MAX_CYCLES` by the GPU model. A row is
added to CSV when its kernel is done, and kernels in CSV are skipped, so that a stopped run can continue.
"""

from __future__ import annotations

import argparse
import csv
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import pimflow
from pimflow.commands.simulate.kernel_traces import trace_request
from pimflow.core.kernel import Kernel
from pimflow.errors import PimflowError
from pimflow.hardware import GpuSpec
from pimflow.simulators.accel_sim.kernels import kernel_name, parse_kernel_name
from pimflow.simulators.accel_sim.profiler import AccelSim
from pimflow.simulators.gpu.model import SIZES, KernelRequest, kernel_cost

GPU = "rtx-2060-pim32"
WHOLE = ("mobilenet-v2", "squeezenet-1.1")
NETWORKS = ("toy", "efficientnet-b0", "mnasnet-1.0", "resnet-18")
LAYERS = (
    *(f"conv:1x672x14x14,{channels},1x1" for channels in (112, 160)),
    *(f"conv:1x672x7x7,{channels},1x1" for channels in (96, 192)),
    *(f"conv:1x1152x7x7,{channels},1x1" for channels in (192, 320)),
    *(f"fc:{rows}x{size}" for rows in (4, 32) for size in ("1280,256", "2048,128")),
    *(f"fc:{size}" for size in ("512,1000", "768,768", "2048,512")),
    *(f"fc:{size}" for size in ("960,1000", "640,1280", "1536,300", "384,640")),
    *(f"conv:1x{channels}x7x7,128,3x3,p1" for channels in (128, 256)),
)
# Bytes read for each byte written, and bytes written.
STREAMS = tuple((share, size << 10) for size in (32, 128, 512, 1536) for share in (1, 2, 4))
MAX_CYCLES = 16_000
COLUMNS = (
    *("kernel", "kind", *SIZES, "tile_m", "tile_n", "split"),
    *("n_mem", "gpu_sim_cycle", "dram_bytes", "build"),
)


def requests(models: list[str], layers: list[str], max_cycles: int) -> list[KernelRequest]:
    """Distinct kernels of networks and layers that have a trace."""
    kernel_requests: dict[KernelRequest, None] = {}
    system = pimflow.system(gpu=GPU)
    for source in [*layers, *models]:
        source_kernels = trace_request(source, system)
        for request in source_kernels.layers:
            name = kernel_name(request.kernel, source_kernels.dtype)
            cost = kernel_cost(
                request.kernel, source_kernels.gpu, dtype=source_kernels.dtype, channels=request.channels
            )
            cycles = cost.total_ns * source_kernels.gpu.clock_mhz / 1e3
            if parse_kernel_name(name, source_kernels.dtype) == request.kernel and cycles <= max_cycles:
                kernel_requests[request] = None
    return list(kernel_requests)


def streams() -> list[KernelRequest]:
    """Elementwise kernels with one multiplication for each two bytes that they write."""
    system = pimflow.system(gpu=GPU)
    return [
        KernelRequest(
            Kernel(kind="stream", input_bytes=share * size, output_bytes=size, macs=size // 2), channels
        )
        for share, size in STREAMS
        for channels in (system.gpu.memory_channels, system.gpu_channels)
    ]


def shuffle(chosen: list[KernelRequest]) -> list[KernelRequest]:
    """The requests in a fixed pseudo-random order, in which similar kernels are apart."""
    return sorted(chosen, key=lambda request: zlib.crc32(repr(request.kernel).encode()))


def row(simulator: AccelSim, request: KernelRequest, gpu: GpuSpec) -> dict[str, object]:
    """Simulate a kernel: a row with the model's tile and the simulator's figures."""
    kernel, channels = request.kernel, request.channels
    tile = kernel_cost(kernel, gpu, dtype="fp16", channels=channels).tile or ("", "", "")
    log = simulator.log(kernel, channels, gpu, "fp16")
    sizes = (getattr(kernel, name) for name in SIZES)
    about = (kernel_name(kernel, "fp16"), kernel.kind, *sizes, *tile, channels)
    values = (*about, log.cycles, log.dram_bytes, log.build)
    return dict(zip(COLUMNS, values, strict=True))


def main() -> int:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("accel_sim")
    parser.add_argument("csv", type=Path)
    parser.add_argument("--model", action="append", metavar="NAME")
    parser.add_argument("--layer", action="append", metavar="TEXT")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    gpu = GpuSpec.load(GPU)
    models, layers = arguments.model or [], arguments.layer or []
    done = set()
    if arguments.csv.exists():
        with arguments.csv.open(encoding="utf-8", newline="") as file:
            done = {(entry["kernel"], int(entry["n_mem"])) for entry in csv.DictReader(file)}
    try:
        simulator = AccelSim(arguments.accel_sim)
        if models or layers:
            chosen = requests(models, layers, sys.maxsize)
        else:
            whole_requests = [*requests(list(WHOLE), [], sys.maxsize), *streams()]
            network_requests = requests(list(NETWORKS), [], MAX_CYCLES)
            first = requests([], list(LAYERS), sys.maxsize)
            chosen = list(dict.fromkeys([*first, *shuffle(whole_requests), *shuffle(network_requests)]))
        remaining = [r for r in chosen if (kernel_name(r.kernel, "fp16"), r.channels) not in done]
        with arguments.csv.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if not done:
                writer.writeheader()
            with ThreadPoolExecutor(arguments.jobs) as pool:
                running = [pool.submit(row, simulator, entry, gpu) for entry in remaining]
                for number, done_row in enumerate(as_completed(running), 1):
                    writer.writerow(done_row.result())
                    file.flush()
                    print(f"{number} of {len(remaining)}: {done_row.result()['kernel']}", file=sys.stderr)
    except PimflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
