"""AiM traces in the public AiM simulator: ``compare_aim.py EXECUTABLE [--model NAME …] [--update FILE]``.

EXECUTABLE is that of github.com/arkhadem/aim_simulator. Every distinct layer of the networks that PIM can
run, in its fastest loop order, and every region on PIM of their plans becomes an AiM ISR trace, which the
simulator and our timing without refresh both time. ``--update FILE`` writes the table between the marks of a
Markdown page, docs/validation.md; ``--record FILE`` writes one line of CSV for each trace.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pimflow
from pimflow.core.program import PimProgram
from pimflow.errors import PimflowError
from pimflow.pim_backend.programs.capability import refusal
from pimflow.simulators.exports.aim_simulator import AimComparison, compare, table, updated
from pimflow.simulators.pim.expansion import command_counts

NETWORKS = ("toy", "squeezenet-1.1", "mobilenet-v2", "resnet-50")
DEVICE = "aim-gddr6"


def programs(models: list[str], channels: int, most: int) -> Iterator[tuple[str, str, PimProgram]]:
    """Kind, name and program of every trace of at most so many commands."""
    seen = set()
    for model in models:
        target = pimflow.system(pim=DEVICE, pim_channels=channels)
        searched = pimflow.search(model, target)
        side = searched.maker.costs.side
        for region in searched.graph.regions:
            if refusal(region, target.pim) or region.geometry in seen:
                continue
            seen.add(region.geometry)
            name = f"{model} {region.name}"
            yield "layer", name, side.program(region.geometry, side.ranked(region.geometry, name)[0], name)
        for name, program in searched.programs().items():
            yield "region", f"{model} {name}", program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("executable")
    parser.add_argument("--model", action="append", metavar="NAME", help=f"default: {', '.join(NETWORKS)}")
    parser.add_argument("--pim-channels", type=int, default=16)
    parser.add_argument("--commands", type=int, default=20_000_000, help="most commands of a trace")
    parser.add_argument("--update", type=Path, metavar="FILE")
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    def progress(each: AimComparison) -> None:
        cycles = f"{each.cycles} here, {each.simulated_cycles} there"
        print(f"{each.kind} {each.name}: {cycles}, {each.error:+.2%}", file=sys.stderr)

    try:
        made = programs(arguments.model or list(NETWORKS), arguments.pim_channels, arguments.commands)
        small = (each for each in made if sum(command_counts(each[2]).values()) <= arguments.commands)
        pim = pimflow.system(pim=DEVICE).pim
        found = compare(arguments.executable, small, pim, progress)
        if arguments.update:
            page = arguments.update.read_text(encoding="utf-8")
            arguments.update.write_text(updated(page, found), encoding="utf-8")
        if arguments.record:
            with arguments.record.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, asdict(found[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(asdict(each) for each in found)
    except PimflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps([asdict(each) for each in found], indent=1) if arguments.json else table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
