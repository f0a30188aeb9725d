"""Every mode by value: ``verify_modes.py [MODEL…]`` compiles networks with some modes allowed.

They are compiled under the published accounting, which places more on PIM, with all constraints of the
device. A compilation that is not verified ends the script.
"""

import argparse
from collections import Counter

import pimflow

NETWORKS = (
    *("efficientnet-b0", "mnasnet-1.0", "mobilenet-v2", "resnet-50", "vgg-16"),
    *("googlenet", "inception-v3", "squeezenet-1.1"),
)
MODES = ("gpu,pim", "gpu,pim,split", "gpu,pim,pipeline", "gpu,pim,split,pipeline")
HEADER = ("network", "modes allowed", "done by", "error of the outputs", "PIM regions right", "violations")


def row(model: str, modes: str) -> tuple[str, ...]:
    """Compile a network with some modes: a row of the table."""
    compiled = pimflow.compile(
        model, system=pimflow.system(accounting="paper"), modes=modes, conventions="none"
    )
    done = Counter(candidate.rewrite.mode for candidate in compiled.search_result.candidates)
    verification = compiled.verification
    right = sum(region.matches for region in verification.regions)
    return (
        model,
        modes,
        ", ".join(f"{count} {mode}" for mode, count in sorted(done.items())),
        f"{verification.max_relative_error:.1e} (bound {verification.bound:.0e})",
        f"{right} of {len(verification.regions)}",
        str(verification.timing_violations),
    )


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: {', '.join(NETWORKS)}")
    models = parser.parse_args().models or NETWORKS
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for model in models:
        for modes in MODES:
            print(f"| {' | '.join(row(model, modes))} |", flush=True)


if __name__ == "__main__":
    main()
