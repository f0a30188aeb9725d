"""Errors of the GPU model on measured kernels: ``validate_gpu_model.py CSV --gpu NAME [--split hash|all]``.

Rows of the half that the constants were fitted to are left out; ``--split all`` takes every row.
"""

from __future__ import annotations

import argparse
import json
import sys

from pimflow.errors import PimflowError
from pimflow.hardware import GpuSpec
from pimflow.simulators.gpu_data import format_accuracy, read_samples, validate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("csv")
    parser.add_argument("--gpu", required=True, metavar="NAME|FILE")
    parser.add_argument("--split", choices=("hash", "all"), default="hash")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        gpu = GpuSpec.load(arguments.gpu)
        samples = read_samples(arguments.csv, gpu)
        found = validate([s for s in samples if arguments.split == "all" or not s.fit], gpu)
    except PimflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(found, indent=1) if arguments.json else format_accuracy(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
