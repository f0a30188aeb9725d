"""Write the figures of README.md and of three pages: ``update_readme.py [NAME…]``.

All are compiled and measured again but ``results``, which come from the table ``networks``.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from configurations import fill

import pimflow
from pimflow.commands.shared import report_text
from pimflow.commands.shared.report import Report

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/architecture.md", "docs/conventions.md", "docs/speed.md")
README, ARCHITECTURE, CONVENTIONS, SPEED = (ROOT / name for name in PAGES)


def table_of(page: Path, name: str) -> list[list[str]]:
    """Cells of the table between the two marks called `name`, without its heads."""
    marks = rf"<!-- {name} begin[^>]*-->\n(.*?)<!-- {name} end -->"
    (body,) = re.findall(marks, page.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for line in body.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def results() -> str:
    """A row for each network of the PIMFlow paper, in full accounting and in that of the paper."""
    claim, published = {}, {}
    for network, accounting, timing, splits, *figures in table_of(CONVENTIONS, "networks"):
        if (accounting, timing, splits) == ("full", "strict", "exact"):
            claim[network] = figures
        if (accounting, timing, splits) == ("paper", "ramulator-pimflow", "exact"):
            published[network] = figures
    rows = [
        "| network | GPU alone | plan, `full` | speed-up | plan, `paper` | speed-up |",
        "|---|---|---|---|---|---|",
    ]
    for network, (alone_ms, ms, speedup, alone_mj, mj) in claim.items():
        _, paper_ms, paper_speedup, _, paper_mj = published[network]
        cells = [f"{a} ms, {b} mJ" for a, b in ((alone_ms, alone_mj), (ms, mj), (paper_ms, paper_mj))]
        rows.append(f"| {network} | {cells[0]} | {cells[1]} | {speedup} | {cells[2]} | {paper_speedup} |")
    return "\n".join(rows)


def side_by_side() -> str:
    """A CNN and a language model, by the figures that README.md shows of them below."""
    page = README.read_text(encoding="utf-8")
    ((gpu_ms, plan_ms, speedup),) = re.findall(r"^latency +(\S+) → (\S+) ms \((\S+)x\)", page, re.M)
    ((token_ms, token_gpu_ms),) = re.findall(r"^ +token +(\S+) ms, on the GPU alone (\S+) ms", page, re.M)
    token_speedup = float(token_gpu_ms) / float(token_ms)
    rows = [
        "| | GPU alone | GPU and PIM | speed-up | by |",
        "|---|---|---|---|---|",
        f"| mobilenet-v2, a CNN | {gpu_ms} ms | {plan_ms} ms | {speedup}x | `pimflow compile mobilenet-v2` |",
        f"| tiny-lm, a language model, a token | {token_gpu_ms} ms | {token_ms} ms | {token_speedup:.3f}x | "
        '`pimflow generate tiny-lm --prompt "The statement is"` |',
    ]
    return "\n".join(rows)


def output(script: str, *arguments: str) -> str:
    """What a script of this folder prints, run in the repository; its stderr stays stderr."""
    command = [sys.executable, ROOT / "scripts" / script, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout.rstrip()


def compile_text(model: str, text: Callable[[Report, str], str]) -> str:
    """The report of compiling `model`, as text."""
    return f"```\n{text(pimflow.compile(model).report, f'build/{model}')}\n```"


def time_picture() -> str:
    """The phases of one compilation as bars."""
    return f"```\n{output('bench_compile.py', '--picture')}\n```"


def benches() -> str:
    """Benchmarks of this machine."""
    lines = "\n".join(output(name) for name in ("bench_pim.py", "bench_compile.py"))
    return f"```\n{lines}\n```"


FIGURES = {
    "install": (README, lambda: output("measure_install.py")),
    "compile": (README, lambda: compile_text("mobilenet-v2", report_text.summary)),
    "first": (README, side_by_side),  # of what `compile` and scripts/bench_generate.py wrote
    "networks": (CONVENTIONS, lambda: output("compare_networks.py")),
    "results": (README, results),
    "launches": (CONVENTIONS, lambda: output("compare_networks.py", "--launches")),
    "layers": (CONVENTIONS, lambda: compile_text("mobilenet-v2", report_text.table)),
    "bench": (SPEED, benches),
    "time": (ARCHITECTURE, time_picture),
}


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)} (default: all)")
    names = parser.parse_args().names
    if unknown := set(names) - set(FIGURES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(FIGURES)}")
    for name in names or FIGURES:
        page, make = FIGURES[name]
        body = make()  # before reading the page, which may change meanwhile
        page.write_text(fill(page.read_text(encoding="utf-8"), name, body), encoding="utf-8")


if __name__ == "__main__":
    main()
