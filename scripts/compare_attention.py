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


def beside(rows: list[compare.Compared]) -> str:
    """Cycles of others and ours, as Markdown."""
    return markdown(
        ["product", "theirs, cycles", "ours, cycles", "difference"],
        [[r.what, f"{r.reference_cycles:,}", f"{r.cycles:,}", f"{r.error:+.1%}"] for r in rows],
    )


def on_devices() -> str:
    """Cycles of every device over its bound by rows, as Markdown."""
    aim = PimSpec.load("aim-gddr6")
    devices = [PimSpec.load(name) for name in spec_names("pim")]
    devices.append(replace(aim, name="aim-gddr6, 32 accumulators", accumulators=32))
    rows = [
        [
            *(r.device, r.what, f"{r.cycles:,}", f"{r.fraction:.2f}", f"{r.fraction_with_bus:.2f}"),
            *(f"{r.busy:.1%}", f"{r.busy_of_layer:.1%}"),
        ]
        for r in compare.on_devices(devices)
    ]
    bounds = ["of the row bound", "with vectors and results"]
    head = ["device", "product", "cycles", *bounds, "multipliers busy", "a layer of one head"]
    return markdown(head, rows)


def attacc(path: Path, most: int) -> str:
    """Errors on AttAcc's runs by head, bytes and power limit, as Markdown."""
    runs = compare.attacc_runs(path)
    chosen = runs[:: max(1, len(runs) // most)][:most] if most else runs
    groups: dict[tuple[str, ...], list[compare.Compared]] = {}
    for run in chosen:
        key = (run["dhead"], run["dbyte"], "yes" if run["power_constraint"] == "True" else "no")
        groups.setdefault(key, []).append(compare.attacc(run))
    rows = [
        [*key, str(len(found)), *(f"{each:.1%}" for each in compare.summary(found))]
        for key, found in sorted(groups.items())
    ]
    every = [each for found in groups.values() for each in found]
    rows.append(["all", "", "", str(len(every)), *(f"{each:.1%}" for each in compare.summary(every))])
    return markdown(["head", "bytes", "power limit", "runs", "median error", "largest"], rows)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--attacc", type=Path, default=RUNS, metavar="FILE")
    parser.add_argument("--runs", type=int, default=100, metavar="N", help="0 for all")
    parser.add_argument("--update", type=Path, metavar="FILE")
    args = parser.parse_args()
    text = "\n\n".join(
        (
            "32 heads of 128 on 8 channels, beside the AiM simulator with CENT's mapping:",
            beside(list(compare.aim_attention())),
            "Products with weights, beside the same:",
            beside(list(compare.aim_weights())),
            "8 heads of 128 on 32 banks, beside NeuPIMs' formula:",
            beside(list(compare.neupims())),
            "AttAcc's stored runs, beside both products on `attacc-hbm3`:",
            attacc(args.attacc, args.runs),
            "32 query heads of 128 over 2048 tokens, 16 channels, refresh included:",
            on_devices(),
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
