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
from pimflow.compiler.timing import calls_ns
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


def in_turns(
    ways: dict[str, Callable[[], object]], rounds: int, between: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Median milliseconds of each run; they take turns of `TURN` inferences after `WARM_SECONDS` of warm-up.

    `between` is called when each had its turn, while the threads of the last one are still awake.
    """
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(-(-rounds // TURN)):
        for name, way in ways.items():
            until = time.perf_counter() + WARM_SECONDS
            while time.perf_counter() < until:
                way()
            spent[name] += [ns / 1e6 for ns in calls_ns(way, min(TURN, rounds))]
        between()
    return {name: statistics.median(times) for name, times in spent.items()}


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
    built = compiled.builds[-1]
    calls = {call.key: call for call in built.calls}
    timer, alone = KernelTimer(list(calls.values())), []
    ms = in_turns(
        {
            "onnxruntime": lambda: reference.run(None, dict(inputs)),
            "pimflow": runner(built.executable, list(inputs.values())),
        },
        rounds,
        lambda: alone.extend(timer.round_ns() for _ in range(KERNEL_ROUNDS)),
    )
    predicted = network_time(
        built.calls, known_ns=dict(zip(calls, map(float, np.median(alone, axis=0)), strict=True))
    )
    tvm_own = tvm.compile(plain, targets.this_cpu())
    ms |= in_turns({"tvm": runner(tvm_own, list(inputs.values()))}, max(1, rounds // 25))
    return {
        "network": model,
        **{f"{name}_ms": value for name, value in ms.items()},
        "threads": int(tvm.get_global_func("runtime.NumThreads")()),
        "predicted_ms": predicted.time_ns / 1e6,
        "kernels": [vars(kernel) for kernel in predicted.summary().kernels],
        "pool_bytes": built.memory.pool_bytes,
        "max_relative_error": compiled.verification.max_relative_error,
    }


def main() -> None:
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
