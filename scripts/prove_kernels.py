"""Check GPU kernels on this CPU: ``prove_kernels.py [NETWORK…] [--context N] [--sweep] [--mutations N]``.

Every kernel runs thread by thread (`pimflow.compiler.kernel_checks`): no two blocks and no two threads race,
all accesses lie within their buffers, all threads of a block reach each barrier, every element of a result is
written, and has the value that the kernel's plain loops give. The exit code is 1 if one fails, or if a mutant
is not found.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from configurations import fill, git
from integer_cases import qlinear_residual
from kernel_cases import cases, integer_kernels, network_kernels, planned_kernels
from kernel_mutations import FAULTS, mutant
from kernel_resources import ResourceRow, resource_rows, resource_table
from kernel_sweep import (
    CaseResult,
    check_numbered_case,
    claim_kernels,
    store_row,
    stored_rows,
    summary,
    sweep_table,
)

from pimflow.compiler.kernel_checks.check import check_kernel, check_kernels
from pimflow.host import workers
from pimflow.pim_backend.runtime.cuda_binary import NO_COMPILER, cuda_compiler

NETWORKS = ("toy", "mobilenet-v2", "tiny-lm")
ATTEMPTS = 1000  # kernels that are drawn for a mutant


def run_sweep(parts: Sequence[str], jobs: int, path: Path | None, page: Path | None) -> bool:
    """Check all cases that the file of results lacks, and print a table; returns whether all kernels hold."""
    stored = stored_rows(path, CaseResult)
    results, known = list(stored), {result.number for result in stored}
    chosen = [
        number
        for number, case in enumerate(cases())
        if number not in known and (not parts or case.part in parts)
    ]
    begin, commit = time.perf_counter(), git("rev-parse", "--short=8", "HEAD")
    with tempfile.TemporaryDirectory() as folder:
        claim_kernels(Path(folder), stored)
        for _, result in workers.map_items(partial(check_numbered_case, Path(folder)), chosen, jobs):
            result.commit = commit
            results.append(result)
            store_row(path, result)
            print(*result.lines, sep="\n", end="\n" if result.lines else "", flush=True)
    show_table("kernel-sweep", sweep_table(results), page)
    print(summary(results))
    print(f"{len(chosen)} cases in {time.perf_counter() - begin:.0f} s in {jobs} processes")
    return not any(result.lines for result in results)


def show_table(name: str, table: str, page: Path | None) -> None:
    """Print a table, and write it between the marks called `name` of a page."""
    print(table)
    if page is not None:
        page.write_text(fill(page.read_text(), name, table))


def prove_network(network: str, context: int | None, dtype: str) -> bool:
    """Print a line for a network, and one for each kernel that does not hold or is not compared wholly.

    Returns whether all hold.
    """
    checks = list(check_kernels(network_kernels(network, dtype, context).schedule()))
    faulty = [check for check in checks if not check.holds]
    blocks, all_blocks = sum(c.blocks for c in checks), sum(c.all_blocks for c in checks)
    print(
        f"{network} ({dtype}): {len(checks) - len(faulty)} of {len(checks)} kernels hold; "
        f"{blocks:,} of {all_blocks:,} blocks ran, {sum(c.compared for c in checks):,} values compared",
        flush=True,
    )
    for check in checks:
        if not check.holds or check.unknown:
            print(f"  {check.name}: {check.verdict}", flush=True)
    return not faulty


def show_resources(args: argparse.Namespace) -> bool:
    """Print what the launches of networks need; returns whether all limits are kept."""
    rows = stored_rows(args.results, ResourceRow)
    known = {(row.network, row.dtype) for row in rows}
    for network in args.networks:
        if (network, args.dtype) not in known:
            for row in resource_rows(network, args.dtype, args.context):
                rows.append(row)
                store_row(args.results, row)
    show_table("kernel-resources", resource_table(rows), args.update)
    for row in rows:
        for text in (*row.local, *row.problems):
            print(f"{row.network} ({row.dtype}, {row.architecture}): {text}")
    return not any(row.problems for row in rows)


def prove_mutants(networks: Sequence[str], count: int, seed: int) -> bool:
    """Print how many of `count` mutants are found; returns whether all are.

    They are of networks, of fused groups, and of integers.
    """
    rng = np.random.default_rng(seed)
    plains = {network: network_kernels(network, "fp16") for network in networks}
    plains["toy, fused"] = planned_kernels("toy", "fp16", fuse=True, modes="gpu")
    plains["integers"] = integer_kernels(qlinear_residual, "fp16")
    kernels = {name: plain.schedule() for name, plain in plains.items()}
    tried: dict[str, list[str]] = {fault: [] for fault in FAULTS}
    for number in range(count):
        fault, name = FAULTS[number % len(FAULTS)], list(kernels)[number // len(FAULTS) % len(kernels)]
        for _ in range(ATTEMPTS):
            kernel = kernels[name][int(rng.integers(len(kernels[name])))]
            broken = mutant(kernel, fault, rng)
            if broken is not None:
                is_found = bool(check_kernel(broken).findings)
                tried[fault].append("" if is_found else f"{name}: {kernel.name}")
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
        help="networks, decoders, odd extents, fused groups, plans, primitives and integers, or these parts",
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="add results of the sweep or of --resources to this file, and compute none that it has",
    )
    parser.add_argument(
        "--update", type=Path, metavar="PAGE", help="write the table of the sweep or of --resources to a page"
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
        sys.exit(not show_resources(args))
    if args.sweep is not None:
        sys.exit(not run_sweep(args.sweep, args.jobs, args.results, args.update))
    verdicts = [prove_network(network, args.context, args.dtype) for network in args.networks]
    sys.exit(not all(verdicts))


if __name__ == "__main__":
    main()
