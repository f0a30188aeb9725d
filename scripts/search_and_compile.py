"""Profile, solve, compile, report and run a network: ``search_and_compile.py MODEL [-o DIR] [OPTION…]``.

The options are those of ``pimflow compile``, whose report is printed. The target is ``cuda+pim`` unless
``--target`` says otherwise: CUDA kernels beside the command streams of PIM. What was written with ``-o`` is
run, by the CPU that stands in for the GPU if there is no card.
"""

import argparse
import sys

from pimflow.commands.main import main as pimflow
from pimflow.pim_backend.runtime.targets import local_cuda

TARGET, TWIN = "cuda+pim", "llvm+pim"


def main(arguments: list[str]) -> int:
    """Compile and run; return the exit code."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--target")
    parser.add_argument("-o", "--output")
    given, _ = parser.parse_known_args(arguments)
    target = given.target or TARGET
    code = pimflow(["compile", *arguments, *([] if given.target else ["--target", target])])
    if code == 0 and given.output:
        device = ["--target", TWIN] if target == TARGET and local_cuda() is None else []
        return pimflow(["run", given.output, *device])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
