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

from update_readme import fill

from pimflow.errors import PimflowError
from pimflow.hardware import GpuSpec
from pimflow.simulators.accel_sim.accuracy import as_json, halves_table, leave_one_out, table, updated
from pimflow.simulators.gpu.samples import read_samples


def main() -> int:
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
        more = read_samples(arguments.also, gpu) if arguments.also else []
        if arguments.halves:
            unseen = read_samples(arguments.unseen, gpu) if arguments.unseen else ()
            text, _ = halves_table(samples, gpu, more, unseen)
            print(text)
            if arguments.update:
                page = fill(arguments.update.read_text(encoding="utf-8"), "emitted", text)
                arguments.update.write_text(page, encoding="utf-8")
            return 0
        chosen = [sample for sample in more if sample.fit or not sample.emitted]
        found = leave_one_out(samples, gpu, progress, chosen)
        if arguments.update:
            page = updated(arguments.update.read_text(encoding="utf-8"), found)
            arguments.update.write_text(page, encoding="utf-8")
    except PimflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(as_json(found), indent=1) if arguments.json else table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
