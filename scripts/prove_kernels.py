"""Check GPU kernels on this CPU: ``prove_kernels.py [NETWORK…] [--context N] [--mutations N]``.

Every kernel runs thread by thread (`pimflow.compiler.kernel_checks`): no two blocks and no two threads race,
all accesses lie within their buffers, all threads of a block reach each barrier, every element of a result is
written, and has the value that the kernel's plain loops give. The exit code is 1 if one fails, or if a mutant
is not found.
"""

import argparse
import sys
from collections.abc import Iterator

import numpy as np
from kernel_mutations import mutants

import pimflow
from pimflow.commands.shared import prepare
from pimflow.commands.shared.options import NetworkOptions
from pimflow.compiler.kernel_checks.check import KernelCheck, check_kernel
from pimflow.compiler.kernel_checks.kernels import ScheduledKernel, scheduled_kernels
from pimflow.errors import UnsupportedOpError

NETWORKS = ("toy", "mobilenet-v2", "squeezenet-1.1", "tiny-lm")


def kernels_of_network(network: str, context: int | None, dtype: str) -> list[ScheduledKernel]:
    """The kernels of a network of which the GPU does everything."""
    system, options = pimflow.system(dtype=dtype), NetworkOptions(context=context)
    prepared = prepare.prepare(prepare.load(network, options), options, system)
    return scheduled_kernels(prepared.network.module, system)


def checks(kernels: list[ScheduledKernel]) -> Iterator[KernelCheck]:
    """The checks of `kernels`; one that cannot run says why."""
    for kernel in kernels:
        try:
            yield check_kernel(kernel)
        except UnsupportedOpError as error:
            yield KernelCheck(
                name=kernel.name, blocks=0, all_blocks=0, compared=0, findings=(), unsupported=str(error)
            )


def prove_network(network: str, context: int | None, dtype: str) -> bool:
    """Print a line for a network, and one for each kernel that does not hold; returns whether all hold."""
    results = list(checks(kernels_of_network(network, context, dtype)))
    faulty = [result for result in results if result.findings or result.unsupported]
    blocks, all_blocks = sum(r.blocks for r in results), sum(r.all_blocks for r in results)
    compared = sum(result.compared for result in results)
    print(
        f"{network} ({dtype}): {len(results) - len(faulty)} of {len(results)} kernels hold; "
        f"{blocks:,} of {all_blocks:,} blocks ran, {compared:,} values compared",
        flush=True,
    )
    for result in faulty:
        print(f"  {result.name}: {'; '.join(map(str, result.findings)) or result.unsupported}", flush=True)
    return not faulty


def prove_mutants(networks: list[str], count: int, seed: int) -> bool:
    """Print how many of `count` mutants are found; returns whether all are."""
    rng, kernels = np.random.default_rng(seed), dict[str, ScheduledKernel]()
    for network in networks:
        for kernel in kernels_of_network(network, None, "fp16"):
            kernels[f"{network} {kernel.name}"] = kernel
    by_fault: dict[str, list[str]] = {}
    tried = 0
    while tried < count:
        name = str(rng.choice(list(kernels)))
        for mutant in mutants(kernels[name], rng):
            tried += 1
            missed = not check_kernel(mutant.kernel).findings
            by_fault.setdefault(mutant.fault, []).append(name if missed else "")
    for fault, names in sorted(by_fault.items()):
        missed_names = [name for name in names if name]
        print(f"{fault}: {len(names) - len(missed_names)} of {len(names)} found", *missed_names, sep="\n  ")
    return not any(any(names) for names in by_fault.values())


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "networks", nargs="*", metavar="NETWORK", default=NETWORKS, help="default: %(default)s"
    )
    parser.add_argument("--context", type=int, metavar="N", help="tokens of a decoder's cache")
    parser.add_argument("--dtype", default="fp16", choices=("fp16", "fp32"), help="default: %(default)s")
    parser.add_argument(
        "--mutations", type=int, metavar="N", help="break N kernels, and see whether it is found"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.mutations:
        sys.exit(not prove_mutants(args.networks, args.mutations, args.seed))
    held = [prove_network(network, args.context, args.dtype) for network in args.networks]
    sys.exit(not all(held))


if __name__ == "__main__":
    main()
