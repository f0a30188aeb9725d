"""Write the GPU tables of docs/validation.md: ``update_validation.py TENSORRT_CSV DEEPBENCH_CSV``.

The files are those that the page names; they are no part of the repository.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from calibration.fit_record import unseen_samples
from calibration.samples import read_samples, residual_model_ns, validate

from pimflow.errors import PimflowError
from pimflow.hardware import GpuSpec
from pimflow.simulators.gpu.learned_model import residual_model

PAGE = Path(__file__).parent.parent / "docs" / "validation.md"
DTYPES = ("fp32", "fp16")
PASCALS = ("p100", "titan-xp", "gtx-1080-ti")


def fill(text: str, name: str, rows: list[str]) -> str:
    """`text` with `rows` between the two marks called `name`."""
    pattern = rf"(<!-- {name} begin[^>]*-->\n).*?(<!-- {name} end -->)"
    body = "\n".join(rows)
    return re.sub(pattern, lambda marks: f"{marks[1]}{body}\n{marks[2]}", text, flags=re.DOTALL)


def errors(accuracy: dict) -> str:
    """Errors of a class, as cells of a table."""
    tau = "" if accuracy["kendall_tau"] is None else f"{accuracy['kendall_tau']:.3f}"
    return f"{accuracy['median_ape']:.1%} | {accuracy['mape']:.1%} | {tau}"


def tensorrt(path: str) -> list[str]:
    """Errors of both models on the rows that neither was fitted to."""
    gpu = GpuSpec.load("v100")
    samples = unseen_samples(read_samples(path, gpu), gpu)
    analytic, learned = validate(samples, gpu), validate(samples, gpu, residual_model_ns)
    lines = [
        "| dtype | class | rows | analytic: median | mean | τ | learned: median | mean | τ |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for dtype in DTYPES:
        for name, accuracy in analytic[dtype].items():
            cells = f"{errors(accuracy)} | {errors(learned[dtype][name])}"
            lines.append(f"| {dtype} | {name} | {accuracy['count']} | {cells} |")
    return lines


def cross_validated() -> list[str]:
    """Cross-validation errors, which decide for which classes the learned model is used."""
    gpu = GpuSpec.load("v100")
    lines = ["| dtype | class | rows | analytic | learned |", "|---|---|---|---|---|"]
    for dtype in DTYPES:
        for name, accuracy in sorted(residual_model(gpu, dtype).about["classes"].items()):
            medians = f"{accuracy['analytic']:.1%} | {accuracy['learned']:.1%}"
            lines.append(f"| {dtype} | {name} | {accuracy['rows']} | {medians} |")
    return lines


def deepbench(path: str) -> list[str]:
    """Errors of the analytic model on GPUs of which only the launch was fitted, and on the V100."""
    lines = ["| GPU | dtype | launch, µs | rows | median | mean | τ |", "|---|---|---|---|---|---|---|"]
    for name in (*PASCALS, "v100"):
        gpu = GpuSpec.load(name)
        for dtype, accuracies in reversed(
            validate(unseen_samples(read_samples(path, gpu), gpu), gpu).items()
        ):
            launch = f"{gpu.launch_ns / 1e3:.1f}"
            overall = accuracies["all"]
            lines.append(f"| {name} | {dtype} | {launch} | {overall['count']} | {errors(overall)} |")
    return lines


def main() -> int:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tensorrt_csv")
    parser.add_argument("deepbench_csv")
    arguments = parser.parse_args()
    try:
        text = PAGE.read_text(encoding="utf-8")
        text = fill(text, "gpu tensorrt", tensorrt(arguments.tensorrt_csv))
        text = fill(text, "gpu cross-validation", cross_validated())
        text = fill(text, "gpu deepbench", deepbench(arguments.deepbench_csv))
    except PimflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
