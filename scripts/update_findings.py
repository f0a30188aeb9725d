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


def speedup_tables() -> dict[str, dict[str, list[str]]]:
    """The tables of speed-ups of RESULTS by accounting and timing; by row, cells of configurations."""
    names = ("paper ramulator-pimflow", "full ramulator-pimflow", "full strict")
    return {
        name: {row: cells for row, *cells in table_of(RESULTS, f"pimflow speed-up {name}")} for name in names
    }


def end_to_end(cell: str) -> str:
    """The second of two figures."""
    return cell.partition(" / ")[2]


def configurations() -> str:
    """Mean speed-ups of the paper's configuration and of everything here, by what is charged."""
    tables = speedup_tables()
    published = end_to_end(tables["full strict"]["paper: mean"][_PIMFLOW])
    rows = [
        "| configuration | published | as the paper accounts | `full`, its timing | `full`, all rules |",
        "|---|---|---|---|---|",
    ]
    for title, place, shown in (("the paper's", _PIMFLOW, published), ("everything here", _OURS, "")):
        means = [float(end_to_end(table["geometric mean"][place])) for table in tables.values()]
        if not means[0] - 1 > 2 * (means[1] - 1):
            raise SystemExit(
                f"{title}: full accounting takes less than half of the gain; write the page anew"
            )
        cells = " | ".join(f"{mean:.3f}x" for mean in means)
        rows.append(f"| {title} | {f'{shown}x' if shown else ''} | {cells} |")
        if shown and not float(shown) > means[0]:
            raise SystemExit("as the paper accounts, its speed-up is reached; write the page anew")
    return "\n".join(rows)


_PIMFLOW, _OURS = 5, 7  # columns of the tables of speed-ups, after the network


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
        rows.append(f"| {gpu} | {alone_ms} | {end_to_end(speedups)}x |")
    published = end_to_end(speedup_tables()["full strict"]["paper: mobilenet-v2"][_PIMFLOW])
    here, _, _, slowest, _ = (float(row.split("|")[3].strip(" x")) for row in rows[2:])
    if not here < float(published) < slowest:
        raise SystemExit("the published speed-up is not between those of both GPUs; write the page anew")
    return "\n".join([*rows, f"| published | | {published}x |"])


def energy() -> str:
    """Latency and energy of the fastest plans."""
    rows = ["| network | latency | energy |", "|---|---|---|"]
    for name, (alone_ms, ms, _, alone_mj, mj) in networks(*FULL):
        change = [float(after) / float(before) - 1 for before, after in ((alone_ms, ms), (alone_mj, mj))]
        rows.append(f"| {name} | {change[0]:+.1%} | {change[1]:+.1%} |")
    return "\n".join(rows)


TABLES = {
    "findings-configurations": configurations,
    "findings-accounting": accounting,
    "findings-gpu": gpu_side,
    "findings-energy": energy,
}


def page_with_tables(text: str) -> str:
    """The page with the current figures of the other pages."""
    for name, make in TABLES.items():
        assert re.search(rf"<!-- {name} begin", text), name
        text = fill(text, name, make())
    return text


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
