"""Check GPU kernels on this CPU: ``prove_kernels.py [NETWORK…] [--context N] [--sweep] [--mutations N]``.

Every kernel runs thread by thread (`pimflow.compiler.kernel_checks`): no two blocks and no two threads race,
all accesses lie within their buffers, all threads of a block reach each barrier, every element of a result is
written, and has the value that the kernel's plain loops give. The exit code is 1 if one fails, or if a mutant
is not found.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from kernel_cases import cases, network_kernels
from kernel_mutations import FAULTS, mutant
from kernel_sweep import check_numbered_case, store_result, stored_results, sweep_table

from pimflow.compiler.kernel_checks.check import check_kernel, check_kernels
from pimflow.compiler.kernel_checks.resources import LaunchResources, launch_resources
from pimflow.hardware import GpuSpec, spec_names
from pimflow.host import workers
from pimflow.pim_backend.runtime.cuda_binary import NO_COMPILER, cuda_compiler

NETWORKS = ("toy", "mobilenet-v2", "squeezenet-1.1", "tiny-lm")
ATTEMPTS = 1000  # kernels that are drawn for a mutant


def run_sweep(parts: Sequence[str], jobs: int, path: Path | None) -> bool:
    """Check all cases that the file of results lacks, and print a table; returns whether all kernels hold."""
    results = [result for result in stored_results(path) if not parts or result.part in parts]
    known = {result.number for result in results}
    chosen = [
        number
        for number, case in enumerate(cases())
        if number not in known and (not parts or case.part in parts)
    ]
    begin = time.perf_counter()
    for _, result in workers.map_items(check_numbered_case, chosen, jobs):
        results.append(result)
        store_result(path, result)
        print(*result.lines, sep="\n", end="\n" if result.lines else "", flush=True)
    print(sweep_table(sorted(results, key=lambda result: result.number)))
    print(f"{len(chosen)} cases in {time.perf_counter() - begin:.0f} s in {jobs} processes")
    return not any(result.lines for result in results)


def prove_network(network: str, context: int | None, dtype: str) -> bool:
    """Print a line for a network, and one for each kernel that does not hold; returns whether all hold."""
    checks = list(check_kernels(network_kernels(network, dtype, context).schedule()))
    faulty = [check for check in checks if not check.holds]
    blocks, all_blocks = sum(c.blocks for c in checks), sum(c.all_blocks for c in checks)
    print(
        f"{network} ({dtype}): {len(checks) - len(faulty)} of {len(checks)} kernels hold; "
        f"{blocks:,} of {all_blocks:,} blocks ran, {sum(c.compared for c in checks):,} values compared",
        flush=True,
    )
    for check in faulty:
        print(f"  {check.name}: {check.verdict}", flush=True)
    return not faulty


def show_resources(network: str, context: int | None, dtype: str) -> bool:
    """Print what the launches of a network need by architecture; returns whether all limits are kept."""
    gpus = [GpuSpec.load(name) for name in spec_names("gpu")]
    by_architecture: dict[str, list[LaunchResources]] = defaultdict(list)
    for resources in launch_resources(network_kernels(network, dtype, context)):
        by_architecture[resources.architecture].append(resources)
    problems = []
    for architecture, launches in by_architecture.items():
        counts = (
            len(launches),
            max(launch.kernel.registers for launch in launches),
            max(launch.shared_bytes for launch in launches),
            sum(launch.kernel.local_bytes > 0 for launch in launches),
            min(launch.resident_blocks(gpu) for launch in launches for gpu in gpus),
        )
        print(f"{network:16} {dtype} {architecture}", *(f"{count:12,}" for count in counts), flush=True)
        for launch in launches:
            if launch.kernel.local_bytes:
                print(f"  {launch.kernel.name}: {launch.kernel.local_bytes} bytes of local memory a thread")
            problems += [f"  {launch.kernel.name}: {problem}" for problem in launch.problems(gpus)]
    print(*problems, sep="\n", end="\n" if problems else "")
    return not problems


def prove_mutants(networks: Sequence[str], count: int, seed: int) -> bool:
    """Print how many of `count` mutants are found; returns whether all are."""
    rng = np.random.default_rng(seed)
    kernels = {
        f"{network} {kernel.name}": kernel
        for network in networks
        for kernel in network_kernels(network, "fp16").schedule()
    }
    tried: dict[str, list[str]] = {fault: [] for fault in FAULTS}
    for number in range(count):
        fault = FAULTS[number % len(FAULTS)]
        for _ in range(ATTEMPTS):
            name = str(rng.choice(list(kernels)))
            broken = mutant(kernels[name], fault, rng)
            if broken is not None:
                tried[fault].append("" if check_kernel(broken).findings else name)
                break
    for fault, missed in tried.items():
        print(f"{fault}: {missed.count('')} of {len(missed)} found", *filter(None, missed), sep="\n  ")
    found = sum(missed.count("") for missed in tried.values())
    print(f"{found} of {count} mutants are found")
    return found == count


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "networks", nargs="*", metavar="NETWORK", default=NETWORKS, help="default: %(default)s"
    )
    parser.add_argument("--context", type=int, metavar="N", help="tokens of a decoder's cache")
    parser.add_argument("--dtype", default="fp16", choices=("fp16", "fp32"), help="default: %(default)s")
    parser.add_argument(
        "--sweep",
        nargs="*",
        metavar="PART",
        help="all networks, decoders, odd extents, fused groups, plans and primitives, or these parts",
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="add the results of the sweep to this file, and run no case that it has",
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes of the sweep (default: %(default)s)")
    parser.add_argument(
        "--resources",
        action="store_true",
        help="compile for sm_75, sm_86 and sm_90, and print registers, shared and local memory",
    )
    parser.add_argument(
        "--mutations", type=int, metavar="N", help="break N kernels, and see whether it is found"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.mutations:
        sys.exit(not prove_mutants(args.networks, args.mutations, args.seed))
    if args.resources:
        if not cuda_compiler():
            sys.exit(f"no resources are shown: {NO_COMPILER}")
        heads = ("launches", "registers", "shared bytes", "with local", "resident")
        print(f"{'network':16} type arch ", *(f"{head:>12}" for head in heads))
        kept = [show_resources(network, args.context, args.dtype) for network in args.networks]
        sys.exit(not all(kept))
    if args.sweep is not None:
        sys.exit(not run_sweep(args.sweep, args.jobs, args.results))
    held = [prove_network(network, args.context, args.dtype) for network in args.networks]
    sys.exit(not all(held))


if __name__ == "__main__":
    main()
