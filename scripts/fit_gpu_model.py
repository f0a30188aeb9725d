"""Fit a GPU preset's efficiency constants: ``fit_gpu_model.py CSV --gpu NAME [--split hash|all]``.

Prints the errors on the held-out half (with ``--split all``: on every row, all of them fitted to) and
rewrites the table ``efficiency`` of the preset, or of the TOML file that ``--gpu`` names.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pimflow.errors import PimflowError
from pimflow.hardware import GpuSpec
from pimflow.hardware.reader import SPECS
from pimflow.simulators.gpu_data import read_samples, validate
from pimflow.simulators.gpu_fit import fit, provenance, write_efficiency


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("csv")
    parser.add_argument("--gpu", required=True, metavar="NAME|FILE")
    parser.add_argument("--split", choices=("hash", "all"), default="hash")
    parser.add_argument("--dry-run", action="store_true", help="print, but leave the file as it is")
    arguments = parser.parse_args()
    try:
        gpu = GpuSpec.load(arguments.gpu)
        samples = [sample for sample in read_samples(arguments.csv, gpu) if not sample.fused]
        every = arguments.split == "all"
        used = [sample for sample in samples if every or sample.fit]
        gpu = fit(gpu, used)
        print(json.dumps(validate(samples if every else [s for s in samples if not s.fit], gpu), indent=1))
        if not arguments.dry_run:
            embedded = SPECS / "gpu" / f"{arguments.gpu}.toml"
            path = embedded if embedded.exists() else Path(arguments.gpu)
            write_efficiency(path, gpu, provenance(gpu, used, Path(arguments.csv).name, arguments.split))
    except PimflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
