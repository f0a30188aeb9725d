"""Attention in PIM beside others: ``compare_attention.py [--attacc FILE] [--runs N] [--update FILE]``.

It prints tables that compare attention of 32 heads of 128 elements and products with weights with the public
AiM simulator, with NeuPIMs' formula and with AttAcc's stored runs (FILE has the columns of
tests/timing/data/attacc_bank.csv, the default; N of its runs are chosen evenly). The last table compares
every device with the lower bound by rows. ``--update FILE`` writes them between the marks of a Markdown page,
docs/validation.md.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from papers import attention_comparison as compare
from papers.pimflow_tables import markdown

from pimflow.hardware import PimSpec, spec_names

RUNS = Path(__file__).parent.parent / "tests/timing/data/attacc_bank.csv"
MARKS = ("<!-- attention: scripts/compare_attention.py -->\n", "<!-- end of attention -->\n")


def comparison_table(rows: list[compare.CycleComparison]) -> str:
    """Cycles of others and ours, as Markdown."""
    return markdown(
        ["product", "theirs, cycles", "ours, cycles", "difference"],
        [[r.what, f"{r.reference_cycles:,}", f"{r.cycles:,}", f"{r.error:+.1%}"] for r in rows],
    )


def device_table() -> str:
    """Cycles of every device over its bound by rows, as Markdown."""
    aim = PimSpec.load("aim-gddr6")
    devices = [PimSpec.load(name) for name in spec_names("pim")]
    devices.append(replace(aim, name="aim-gddr6, 32 accumulators", accumulators=32))
    rows = [
        [
            *(r.device, r.what, f"{r.cycles:,}", f"{r.fraction:.2f}", f"{r.fraction_with_bus:.2f}"),
            *(f"{r.busy:.1%}", f"{r.busy_of_layer:.1%}"),
        ]
        for r in compare.device_products(devices)
    ]
    bounds = ["of the row bound", "with vectors and results"]
    head = ["device", "product", "cycles", *bounds, "multipliers busy", "a layer of one head"]
    return markdown(head, rows)


def attacc_table(path: Path, max_runs: int) -> str:
    """Errors on AttAcc's runs by head, bytes and power limit, as Markdown."""
    runs = compare.attacc_runs(path)
    sample = runs[:: max(1, len(runs) // max_runs)][:max_runs] if max_runs else runs
    groups: dict[tuple[str, ...], list[compare.CycleComparison]] = {}
    for run in sample:
        key = (run["dhead"], run["dbyte"], "yes" if run["power_constraint"] == "True" else "no")
        groups.setdefault(key, []).append(compare.attacc(run))
    rows = [
        [*key, str(len(group)), *(f"{value:.1%}" for value in compare.error_summary(group))]
        for key, group in sorted(groups.items())
    ]
    all_runs = [value for group in groups.values() for value in group]
    rows.append(
        ["all", "", "", str(len(all_runs)), *(f"{value:.1%}" for value in compare.error_summary(all_runs))]
    )
    return markdown(["head", "bytes", "power limit", "runs", "median error", "largest"], rows)


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--attacc", type=Path, default=RUNS, metavar="FILE")
    parser.add_argument("--runs", type=int, default=100, metavar="N", help="0 for all")
    parser.add_argument("--update", type=Path, metavar="FILE")
    args = parser.parse_args()
    text = "\n\n".join(
        (
            "32 heads of 128 on 8 channels, beside the AiM simulator with CENT's mapping:",
            comparison_table(list(compare.aim_attention())),
            "Products with weights, beside the same:",
            comparison_table(list(compare.aim_weights())),
            "8 heads of 128 on 32 banks, beside NeuPIMs' formula:",
            comparison_table(list(compare.neupims())),
            "AttAcc's stored runs, beside both products on `attacc-hbm3`:",
            attacc_table(args.attacc, args.runs),
            "32 query heads of 128 over 2048 tokens, 16 channels, refresh included:",
            device_table(),
        )
    )
    print(text)
    if args.update:
        page = args.update.read_text(encoding="utf-8")
        begin, end = (page.index(mark) for mark in MARKS)
        written = page[: begin + len(MARKS[0])] + "\n" + text + "\n\n" + page[end:]
        args.update.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
