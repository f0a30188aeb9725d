"""Networks on this CPU beside ONNX Runtime and TVM's own build: ``bench_cpu.py [MODEL…] [--json]``.

Times are medians, measured in fp32 at batch 1 on all cores; the systems take turns in one run. pimflow
compiles with ``--select mixed --modes gpu``: all on the CPU, primitives by measured and predicted times
(docs/primitives.md). *Predicted* is the sum of the medians of the compiled kernels, each timed by itself, in
turns with the whole network.
"""

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import onnxruntime
import tvm
from tvm import relax

import pimflow
from pimflow import frontend, zoo
from pimflow.compiler.timing import call_times_ns
from pimflow.host.result_cache import ResultCache, default_path
from pimflow.pim_backend.runtime import targets
from pimflow.placement import Profiling
from pimflow.primitive_selection.network_time import KernelTimer, network_time

NETWORKS = ("alexnet", "vgg-16", "googlenet", "resnet-50", "squeezenet-1.1", "mobilenet-v2")
TURN = 8  # timed inferences of one system before it is the next one's turn
KERNEL_ROUNDS = 2  # of all kernels, after each turn
WARM_SECONDS = 0.3  # after it, the threads of the other system no longer wait actively for work
HEADER = (
    "network",
    "pimflow, ms",
    "predicted, ms",
    "predicted to measured",
    "ONNX Runtime, ms",
    "TVM, ms",
    "to ONNX Runtime",
    "TVM to pimflow",
    "pool, MB",
)


def runner(executable: relax.VMExecutable, inputs: list) -> Callable[[], object]:
    """A call that runs an executable on `inputs`, which are copied once."""
    machine = relax.VirtualMachine(executable, tvm.cpu())
    operands = [tvm.runtime.tensor(x) for x in inputs]
    return lambda: machine["main"](*operands)


def median_ms(
    runs: dict[str, Callable[[], object]], rounds: int, after_turn: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Median milliseconds of each run; they take turns of `TURN` inferences after `WARM_SECONDS` of warm-up.

    `after_turn` is called when each had its turn, while the threads of the last one are still awake.
    """
    times_ms: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(-(-rounds // TURN)):
        for name, run in runs.items():
            warm_until = time.perf_counter() + WARM_SECONDS
            while time.perf_counter() < warm_until:
                run()
            times_ms[name] += [ns / 1e6 for ns in call_times_ns(run, min(TURN, rounds))]
        after_turn()
    return {name: statistics.median(times) for name, times in times_ms.items()}


def figures(model: str, rounds: int, measure: int) -> dict[str, object]:
    """Compile a model, and time it against ONNX Runtime and TVM."""
    profiling = Profiling(cache=ResultCache(default_path()))
    select = {"profile": "mixed", "measure": measure}
    compiled = pimflow.compile(model, select=select, modes="gpu", profiling=profiling)
    network = frontend.load(model)
    inputs = network.example_inputs()
    plain = relax.transform.DecomposeOpsForInference()(network.module)
    session = onnxruntime.SessionOptions()
    session.intra_op_num_threads = os.cpu_count() or 1
    reference = onnxruntime.InferenceSession(zoo.load_model(model).SerializeToString(), session)
    build = compiled.builds[-1]
    calls = {call.key: call for call in build.calls}
    timer, kernel_rounds_ns = KernelTimer(list(calls.values())), []
    ms = median_ms(
        {
            "onnxruntime": lambda: reference.run(None, dict(inputs)),
            "pimflow": runner(build.executable, list(inputs.values())),
        },
        rounds,
        lambda: kernel_rounds_ns.extend(timer.round_ns() for _ in range(KERNEL_ROUNDS)),
    )
    predicted = network_time(
        build.calls, known_ns=dict(zip(calls, map(float, np.median(kernel_rounds_ns, axis=0)), strict=True))
    )
    tvm_build = tvm.compile(plain, targets.this_cpu_target())
    ms |= median_ms({"tvm": runner(tvm_build, list(inputs.values()))}, max(1, rounds // 25))
    return {
        "network": model,
        **{f"{name}_ms": value for name, value in ms.items()},
        "threads": int(tvm.get_global_func("runtime.NumThreads")()),
        "predicted_ms": predicted.time_ns / 1e6,
        "kernels": [vars(kernel) for kernel in predicted.summary().kernels],
        "pool_bytes": build.memory.pool_bytes,
        "max_relative_error": compiled.verification.max_relative_error,
    }


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: {', '.join(NETWORKS)}")
    parser.add_argument("--rounds", type=int, default=100, help="inferences of each (default: %(default)s)")
    parser.add_argument("--measure", type=int, default=6, help="primitives of a layer (default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    if not args.json:
        print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for model in args.models or NETWORKS:
        row = figures(model, args.rounds, args.measure)
        rows.append(row)
        if not args.json:
            ratios = row["pimflow_ms"] / row["onnxruntime_ms"], row["tvm_ms"] / row["pimflow_ms"]
            print(
                f"| {model} | {row['pimflow_ms']:.2f} | {row['predicted_ms']:.2f} "
                f"| {row['predicted_ms'] / row['pimflow_ms'] - 1:+.1%} "
                f"| {row['onnxruntime_ms']:.2f} | {row['tvm_ms']:.1f} "
                f"| {ratios[0]:.2f} | {ratios[1]:.1f} | {row['pool_bytes'] / 1e6:.2f} |",
                flush=True,
            )
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        ratios = [row["pimflow_ms"] / row["onnxruntime_ms"] for row in rows]
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        print(f"\nTime over ONNX Runtime's, geometric mean: {mean:.2f}")


if __name__ == "__main__":
    main()
