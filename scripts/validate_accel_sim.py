"""Errors of the GPU model on Accel-Sim kernels left out of the fit: ``validate_accel_sim.py CSV``.

Each kernel, with all its channel counts, is predicted by constants that were fitted to all others, and to
``--also CSV``. With ``--halves``, for files of kernels that pimflow emits, a hash chooses the half of the
kernels that constants are fitted to; the other half judges them, and so does another file. ``--update FILE``
writes the table between the markers of a Markdown page, docs/validation.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from calibration.accel_sim_accuracy import as_json, half_split_table, leave_one_out, replace_table, table
from calibration.samples import read_samples
from update_readme import fill

from pimflow.errors import PimflowError
from pimflow.hardware import GpuSpec


def main() -> int:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("csv")
    parser.add_argument("--gpu", default="rtx-2060-pim32", metavar="NAME|FILE")
    parser.add_argument("--halves", action="store_true", help="fit to half of the kernels, judge the other")
    parser.add_argument("--also", metavar="CSV", help="fit to its GEMMs too, or to what a hash chooses")
    parser.add_argument("--unseen", metavar="CSV", help="with --halves: judge by this file too")
    parser.add_argument("--update", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    arguments = parser.parse_args()

    def progress(share: float) -> None:
        if not arguments.quiet:
            print(f"\r{share:4.0%}", end="" if share < 1 else "\n", file=sys.stderr, flush=True)

    try:
        gpu = GpuSpec.load(arguments.gpu)
        samples = read_samples(arguments.csv, gpu)
        also_samples = read_samples(arguments.also, gpu) if arguments.also else []
        if arguments.halves:
            unseen = read_samples(arguments.unseen, gpu) if arguments.unseen else ()
            text, _ = half_split_table(samples, gpu, also_samples, unseen)
            print(text)
            if arguments.update:
                page = fill(arguments.update.read_text(encoding="utf-8"), "emitted", text)
                arguments.update.write_text(page, encoding="utf-8")
            return 0
        chosen = [sample for sample in also_samples if sample.is_fit_sample or not sample.emitted]
        errors = leave_one_out(samples, gpu, progress, chosen)
        if arguments.update:
            page = replace_table(arguments.update.read_text(encoding="utf-8"), errors)
            arguments.update.write_text(page, encoding="utf-8")
    except PimflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(as_json(errors), indent=1) if arguments.json else table(errors))
    return 0


if __name__ == "__main__":
    sys.exit(main())
