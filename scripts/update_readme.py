"""Write the figures of README.md: ``update_readme.py``, which compiles and measures what they claim."""

import re
import subprocess
import sys
from pathlib import Path

import pimflow
from pimflow.api import report

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
        ratio = found["energy_pj"] / found["energy_gpu_only_pj"]
        rows.append(
            f"| {accounting}, {timing} | {found['latency_gpu_only_ns'] / 1e6:.4f} ms "
            f"| {found['latency_ns'] / 1e6:.4f} ms | {found['speedup']:.3f}x "
            f"| {found['speedup_without_launch']:.3f}x | {ratio:.2f}x |"
        )
    return "\n".join(rows)


def output(script: str, *arguments: str) -> str:
    """What a script of this folder prints; its progress goes on to stderr."""
    command = [sys.executable, ROOT / "scripts" / script, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.rstrip()


def main() -> None:
    compiled = pimflow.compile("mobilenet-v2")
    table = report.table(compiled.report, "build/mobilenet-v2")
    benches = "\n".join(output(name) for name in ("bench_pim.py", "bench_compile.py"))
    text = README.read_text(encoding="utf-8")
    text = fill(text, "compile", f"```\n{table}\n```")
    text = fill(text, "conventions", conventions("mobilenet-v2"))
    text = fill(text, "networks", output("compare_networks.py"))
    text = fill(text, "bench", f"```\n{benches}\n```")
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
