"""Write the figures of README.md, compiled and measured anew: ``update_readme.py [NAME…]``."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pimflow
from pimflow.api import report_text

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def fill(text: str, name: str, body: str) -> str:
    """`text` with what stands between the two marks called `name` replaced."""
    pattern = rf"(<!-- {name} begin[^>]*-->\n).*?(<!-- {name} end -->)"
    return re.sub(pattern, lambda marks: f"{marks[1]}{body}\n{marks[2]}", text, flags=re.DOTALL)


def conventions(model: str) -> str:
    """Speed-ups of `model` by accounting, as a table."""
    rows = [
        "| accounting, timing | GPU only | plan | speed-up | launches set to zero | energy |",
        "|---|---|---|---|---|---|",
    ]
    for accounting, timing in (("full", "strict"), ("paper", "ramulator-pimflow")):
        target = pimflow.system(accounting=accounting, timing=timing)
        found = pimflow.compile(model, target_system=target).report
        ratio = found.energy_pj / found.energy_gpu_only_pj
        rows.append(
            f"| {accounting}, {timing} | {found.latency_gpu_only_ns / 1e6:.4f} ms "
            f"| {found.latency_ns / 1e6:.4f} ms | {found.speedup:.3f}x "
            f"| {found.speedup_without_launch:.3f}x | {ratio:.2f}x |"
        )
    return "\n".join(rows)


def output(script: str, *arguments: str) -> str:
    """What a script of this folder prints, run in the repository's; its progress goes on to stderr."""
    command = [sys.executable, ROOT / "scripts" / script, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout.rstrip()


def compiled(model: str) -> str:
    """What compiling `model` prints."""
    table = report_text.table(pimflow.compile(model).report, f"build/{model}")
    return f"```\n{table}\n```"


def benches() -> str:
    """What the machine of this run takes."""
    lines = "\n".join(output(name) for name in ("bench_pim.py", "bench_compile.py"))
    return f"```\n{lines}\n```"


FIGURES = {
    "compile": lambda: compiled("mobilenet-v2"),
    "conventions": lambda: conventions("mobilenet-v2"),
    "launches": lambda: output("compare_networks.py", "--launches"),
    "networks": lambda: output("compare_networks.py"),
    "bench": benches,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)} (default: all)")
    names = parser.parse_args().names
    if unknown := set(names) - set(FIGURES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(FIGURES)}")
    for name in names or FIGURES:
        body = FIGURES[name]()  # before reading the page, which may change meanwhile
        README.write_text(fill(README.read_text(encoding="utf-8"), name, body), encoding="utf-8")


if __name__ == "__main__":
    main()
