"""Write the GPU tables of docs/validation.md: ``update_validation.py TENSORRT_CSV DEEPBENCH_CSV``.

The files are those that the page names; they are no part of the repository.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from pimflow.errors import PimflowError
from pimflow.hardware import GpuSpec
from pimflow.simulators.gpu.fit_record import held_out
from pimflow.simulators.gpu.learned_model import learned_ns, residual_of
from pimflow.simulators.gpu.samples import read_samples, validate

PAGE = Path(__file__).parent.parent / "docs" / "validation.md"
DTYPES = ("fp32", "fp16")
PASCALS = ("p100", "titan-xp", "gtx-1080-ti")


def fill(text: str, name: str, rows: list[str]) -> str:
    """`text` with `rows` between the two marks called `name`."""
    pattern = rf"(<!-- {name} begin[^>]*-->\n).*?(<!-- {name} end -->)"
    body = "\n".join(rows)
    return re.sub(pattern, lambda marks: f"{marks[1]}{body}\n{marks[2]}", text, flags=re.DOTALL)


def errors(found: dict) -> str:
    """Errors of a class, as cells of a table."""
    tau = "" if found["kendall_tau"] is None else f"{found['kendall_tau']:.3f}"
    return f"{found['median_ape']:.1%} | {found['mape']:.1%} | {tau}"


def tensorrt(path: str) -> list[str]:
    """Errors of both models on the rows that neither was fitted to."""
    gpu = GpuSpec.load("v100")
    samples = held_out(read_samples(path, gpu), gpu)
    analytic, learned = validate(samples, gpu), validate(samples, gpu, learned_ns)
    lines = [
        "| dtype | class | rows | analytic: median | mean | τ | learned: median | mean | τ |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for dtype in DTYPES:
        for name, found in analytic[dtype].items():
            both = f"{errors(found)} | {errors(learned[dtype][name])}"
            lines.append(f"| {dtype} | {name} | {found['count']} | {both} |")
    return lines


def cross_validated() -> list[str]:
    """Cross-validation errors, which decide for which classes the learned model is used."""
    gpu = GpuSpec.load("v100")
    lines = ["| dtype | class | rows | analytic | learned |", "|---|---|---|---|---|"]
    for dtype in DTYPES:
        for name, found in sorted(residual_of(gpu, dtype).about["classes"].items()):
            medians = f"{found['analytic']:.1%} | {found['learned']:.1%}"
            lines.append(f"| {dtype} | {name} | {found['rows']} | {medians} |")
    return lines


def deepbench(path: str) -> list[str]:
    """Errors of the analytic model on GPUs of which only the launch was fitted, and on the V100."""
    lines = ["| GPU | dtype | launch, µs | rows | median | mean | τ |", "|---|---|---|---|---|---|---|"]
    for name in (*PASCALS, "v100"):
        gpu = GpuSpec.load(name)
        for dtype, found in reversed(validate(held_out(read_samples(path, gpu), gpu), gpu).items()):
            launch = f"{gpu.launch_ns / 1e3:.1f}"
            every = found["all"]
            lines.append(f"| {name} | {dtype} | {launch} | {every['count']} | {errors(every)} |")
    return lines


def main() -> int:
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
