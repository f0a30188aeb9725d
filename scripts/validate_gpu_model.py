"""Errors of the GPU model on measured kernels: ``validate_gpu_model.py CSV --gpu NAME [--profiler best]``.

Scores every row that the model was not fitted to, by the GPU's record (`scripts/calibration/fit_record.py`),
without which it refuses; ``--split all`` takes every row. Of a file with rows of several GPUs, those of NAME
count. ``--update PAGE`` writes the errors into the block ``NAME`` of a Markdown page, beside those of
constants that are fitted to the half of the rows that a hash chooses, on the other half.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from calibration.fit_record import record_path, unseen_samples
from calibration.gpu_fit import fit
from calibration.samples import PREDICTIONS, Sample, format_accuracy, read_samples, validate
from update_readme import fill

from pimflow.errors import PimflowError, UsageError
from pimflow.hardware import GpuSpec


def errors(accuracy: dict | None) -> str:
    """Errors of a class, as cells of a table."""
    if accuracy is None:
        return " | | | "
    tau = "" if accuracy["kendall_tau"] is None else f"{accuracy['kendall_tau']:.3f}"
    return f"{accuracy['count']} | {accuracy['median_ape']:.1%} | {accuracy['bias']:+.1%} | {tau}"


def markdown(accuracy: dict, samples: list[Sample], gpu: GpuSpec) -> str:
    """A row for each class: errors of the preset, and of a fit to one half of `samples` on the other."""
    fitted = fit(gpu, [sample for sample in samples if sample.is_fit_sample])
    others = validate([sample for sample in samples if not sample.is_fit_sample], fitted)
    lines = [
        "| dtype | class | rows | preset: median | bias | τ | other half: rows | fitted: median | bias | τ |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for dtype, classes in accuracy.items():
        for name, row in classes.items():
            lines.append(f"| {dtype} | {name} | {errors(row)} | {errors(others[dtype].get(name))} |")
    return "\n".join(lines)


def main() -> int:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("csv")
    parser.add_argument("--gpu", required=True, metavar="NAME|FILE")
    parser.add_argument("--profiler", choices=tuple(PREDICTIONS), default="analytic")
    parser.add_argument("--split", choices=("hash", "all"), default="hash")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--update", type=Path, metavar="PAGE")
    arguments = parser.parse_args()
    try:
        gpu = GpuSpec.load(arguments.gpu)
        samples = read_samples(arguments.csv, gpu)
        all_rows = arguments.split == "all"
        scored = samples if all_rows else unseen_samples(samples, gpu, record_path(arguments.gpu))
        if samples and not scored:
            raise UsageError(
                f"{arguments.csv}: gpu '{gpu.name}' was fitted to every one of its {len(samples)} rows; "
                "--split all scores them, which says how well the model fits, not how well it predicts"
            )
        accuracy = validate(scored, gpu, PREDICTIONS[arguments.profiler])
        if arguments.update:
            page = arguments.update.read_text(encoding="utf-8")
            arguments.update.write_text(
                fill(page, gpu.name, markdown(accuracy, samples, gpu)), encoding="utf-8"
            )
    except PimflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if len(scored) < len(samples):
        print(
            f"{len(samples) - len(scored)} rows of shapes that were fitted to are left out", file=sys.stderr
        )
    for dtype, count in sorted(Counter(s.dtype for s in scored if s.dtype not in accuracy).items()):
        print(f"{count} rows of {dtype}, which the model has no rate for, are left out", file=sys.stderr)
    print(json.dumps(accuracy, indent=1) if arguments.json else format_accuracy(accuracy))
    return 0


if __name__ == "__main__":
    sys.exit(main())
