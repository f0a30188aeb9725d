"""Fit the GPU model: ``fit_gpu_model.py CSV --gpu NAME [--launch | --learned] [--split hash|all]``.

Prints the errors on the held-out half (with ``--split all``: on every row, which are then all fitted to) and
rewrites the table ``efficiency`` of the preset, or of the TOML file that ``--gpu`` names. ``--launch`` fits
``launch_ns`` alone, to fp32 rows, where the constants are another GPU's; ``--learned`` fits the learned model
of an embedded GPU, on top of its constants as they are. ``--also CSV`` adds products with known tiles to the
fit. The rows that a GPU was fitted to are recorded, so that ``validate_gpu_model.py`` leaves them out: of an
embedded one in the package, of ``mine.toml`` in ``mine.fitted.txt``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from calibration.fit_record import record_path, record_samples
from calibration.gpu_fit import (
    efficiency_sources,
    fit,
    fit_launch,
    launch_source,
    write_efficiency,
    write_launch,
)
from calibration.learned_fit import learn_dtypes
from calibration.samples import read_samples, validate

from pimflow.errors import PimflowError
from pimflow.hardware import GpuSpec
from pimflow.hardware.reader import SPECS


def main() -> int:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("csv")
    parser.add_argument("--gpu", required=True, metavar="NAME|FILE")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--launch", action="store_true", help="fit the launch, not the constants")
    only.add_argument("--learned", action="store_true", help="fit the learned model, not the constants")
    parser.add_argument("--also", metavar="CSV", help="fit to this file's GEMMs too")
    parser.add_argument("--split", choices=("hash", "all"), default="hash")
    parser.add_argument("--dry-run", action="store_true", help="print, but leave the file as it is")
    arguments = parser.parse_args()
    try:
        gpu = GpuSpec.load(arguments.gpu)
        embedded = SPECS / "gpu" / f"{arguments.gpu}.toml"
        data, use_all = Path(arguments.csv).name, arguments.split == "all"
        samples = read_samples(arguments.csv, gpu)
        fitted = [
            s for s in samples if (use_all or s.is_fit_sample) and (s.dtype == "fp32" or not arguments.launch)
        ]
        if arguments.learned:
            for residual in learn_dtypes(gpu, fitted, data, write=not arguments.dry_run):
                print(json.dumps(residual.about, indent=1))
        else:
            also_samples = read_samples(arguments.also, gpu) if arguments.also else []
            fitted += [sample for sample in also_samples if sample.tile]
            used = [sample for sample in fitted if not sample.is_fused]
            gpu = fit_launch(gpu, used) if arguments.launch else fit(gpu, used)
            judged = [s for s in samples if not s.is_fused and (use_all or not s.is_fit_sample)]
            print(json.dumps(validate(judged, gpu), indent=1))
            if not arguments.dry_run:
                path = embedded if embedded.exists() else Path(arguments.gpu)
                if arguments.launch:
                    write_launch(path, gpu, launch_source(used, data, arguments.split))
                else:
                    also = Path(arguments.also).name if arguments.also else ""
                    sources = efficiency_sources(gpu, used, data, arguments.split, also)
                    write_efficiency(path, gpu, sources)
        if not arguments.dry_run:
            record_samples(record_path(arguments.gpu), fitted)
    except PimflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
