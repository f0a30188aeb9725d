"""Write the tables of docs/findings.md from the tables of the other pages."""

import re
from collections.abc import Iterator
from statistics import geometric_mean

from update_readme import CONVENTIONS, ROOT, fill, table_of

PAGE, RESULTS = ROOT / "docs" / "findings.md", ROOT / "docs" / "results_pimflow.md"
FULL, PAPER = ("full", "strict", "exact"), ("paper", "ramulator-pimflow", "exact")


def networks(*convention: str) -> Iterator[tuple[str, list[str]]]:
    """Networks of the PIMFlow paper, and their figures under one convention."""
    for network, *conditions, alone_ms, ms, speedup, alone_mj, mj in table_of(CONVENTIONS, "networks"):
        if tuple(conditions) == convention:
            yield network, [alone_ms, ms, speedup, alone_mj, mj]


def accounting() -> str:
    """Speed-ups in full accounting and in that of the paper, with their means."""
    full, paper = (
        {name: float(figures[2].rstrip("x")) for name, figures in networks(*convention)}
        for convention in (FULL, PAPER)
    )
    rows = ["| network | `full`, all rules | `paper`, its timing |", "|---|---|---|"]
    rows += [f"| {name} | {full[name]:.3f}x | {paper[name]:.3f}x |" for name in full]
    means = [geometric_mean(speedups.values()) for speedups in (full, paper)]
    return "\n".join([*rows, f"| geometric mean | {means[0]:.3f}x | {means[1]:.3f}x |"])


def gpu_side() -> str:
    """End-to-end speed-ups of MobileNetV2 on other GPUs."""
    rows = ["| GPU | GPU alone, ms | speed-up |", "|---|---|---|"]
    for gpu, _, _, alone_ms, speedups, *_ in table_of(RESULTS, "pimflow GPU side"):
        rows.append(f"| {gpu} | {alone_ms} | {speedups.partition(' / ')[2]}x |")
    return "\n".join(rows)


def energy() -> str:
    """Latency and energy of the fastest plans."""
    rows = ["| network | latency | energy |", "|---|---|---|"]
    for name, (alone_ms, ms, _, alone_mj, mj) in networks(*FULL):
        change = [float(after) / float(before) - 1 for before, after in ((alone_ms, ms), (alone_mj, mj))]
        rows.append(f"| {name} | {change[0]:+.1%} | {change[1]:+.1%} |")
    return "\n".join(rows)


TABLES = {"findings-accounting": accounting, "findings-gpu": gpu_side, "findings-energy": energy}


def page_with_tables(text: str) -> str:
    """The page with the current figures of the other pages."""
    for name, make in TABLES.items():
        assert re.search(rf"<!-- {name} begin", text), name
        text = fill(text, name, make())
    return text


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
