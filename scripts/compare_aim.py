"""AiM traces in the public AiM simulator: ``compare_aim.py EXECUTABLE [--model NAME …] [--update FILE]``.

EXECUTABLE is that of github.com/arkhadem/aim_simulator. Each distinct layer of the networks that PIM can run,
in its fastest loop order, and each PIM region of their plans becomes an AiM ISR trace. The simulator and our
timing without refresh both time it. ``--layer TEXT``, such as ``conv:1x24x14x14,96,1x1``, takes that layer in
all of its loop orders instead: with ``--initial bias`` its latches start from values, with ``--activation
relu`` its sums are activated.

``--update FILE`` writes the table between the marks of a Markdown page, docs/validation.md. ``--record FILE``
writes the programs and the cycles to a .tar.xz, which tests/timing/test_aim_simulator.py reads.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from calibration.aim_simulator import AimComparison, compare, replace_table, table

import pimflow
from pimflow.core.layer_text import parse_layer
from pimflow.core.program import ACTIVATIONS, INITIAL, PimProgram
from pimflow.errors import PimflowError
from pimflow.pim_backend.programs.capability import unsupported_reason
from pimflow.pim_backend.programs.lowering import ProgramRequest, lower
from pimflow.pim_backend.programs.schedule import schedules
from pimflow.simulators.pim.expansion import command_counts

NETWORKS = ("toy", "squeezenet-1.1", "mobilenet-v2", "resnet-50")
DEVICE = "aim-gddr6"

NamedProgram = tuple[str, str, PimProgram]  # kind, name


def network_programs(models: list[str], channels: int) -> Iterator[NamedProgram]:
    """Programs of the distinct layers of networks, and of the PIM regions of their plans."""
    seen = set()
    for model in models:
        target = pimflow.system(pim=DEVICE, pim_channels=channels)
        search_result = pimflow.search(model, target)
        pim_costs = search_result.costs.pim_target
        for region in search_result.graph.regions:
            if unsupported_reason(region) or region.geometry in seen:
                continue
            seen.add(region.geometry)
            name = f"{model} {region.name}"
            order = pim_costs.rank_schedules(region.geometry, name)[0]
            request = ProgramRequest(name, region.geometry, order)
            yield "layer", name, pim_costs.program(request)
        for name, program in search_result.programs().items():
            yield "region", f"{model} {name}", program


def layer_programs(
    texts: list[str], channels: int, initials: list[str], activations: list[str]
) -> Iterator[NamedProgram]:
    """Programs of layers in every loop order, with latches that start from `initials`, and `activations`."""
    pim = pimflow.system(pim=DEVICE).pim
    for text in texts:
        geometry = parse_layer(text)
        orders = schedules(geometry, pim, "fp16")
        for order, initial, activation in itertools.product(orders, initials, activations):
            program = lower(
                ProgramRequest(
                    text, geometry, order, row_begin=pim.row_base, initial=initial, activation=activation
                ),
                pim,
                dtype="fp16",
                channels=channels,
            )
            yield "order", " ".join(filter(None, (text, initial, activation))), program


def record(path: Path, programs: list[NamedProgram], comparisons: list[AimComparison]) -> None:
    """Write the programs to an archive, with their cycles in ``cycles.csv``."""
    with tarfile.open(path, "w:xz") as archive:

        def add(name: str, text: str) -> None:
            """Append a text file to the archive."""
            data = text.encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))

        rows = io.StringIO()
        writer = csv.writer(rows, lineterminator="\n")
        writer.writerow(("program", "name", "digest", "simulated_cycles"))
        for number, ((*_, program), comparison) in enumerate(zip(programs, comparisons)):
            add(f"{number}.pimprog", program.to_json())
            writer.writerow(
                (f"{number}.pimprog", comparison.name, comparison.digest, comparison.simulated_cycles)
            )
        add("cycles.csv", rows.getvalue())


def main() -> int:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("executable")
    parser.add_argument("--model", action="append", metavar="NAME", help=f"default: {', '.join(NETWORKS)}")
    parser.add_argument("--layer", action="append", metavar="TEXT", help="instead of networks")
    parser.add_argument(
        "--initial", action="append", choices=INITIAL[1:], help="of layers: what latches start from"
    )
    parser.add_argument(
        "--activation", action="append", choices=ACTIVATIONS[1:], help="of layers: what is made of sums"
    )
    parser.add_argument("--pim-channels", type=int, default=16)
    parser.add_argument("--commands", type=int, default=5_000_000, help="most commands of a trace")
    parser.add_argument("--update", type=Path, metavar="FILE")
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    def progress(entry: AimComparison) -> None:
        """Print a comparison."""
        cycles = f"{entry.cycles} here, {entry.simulated_cycles} there"
        print(f"{entry.kind} {entry.name}: {cycles}, {entry.error:+.2%}", file=sys.stderr)

    try:
        channels, initial = arguments.pim_channels, arguments.initial or [""]
        all_programs = (
            layer_programs(arguments.layer, channels, initial, arguments.activation or [""])
            if arguments.layer
            else network_programs(arguments.model or list(NETWORKS), channels)
        )
        limit = arguments.commands
        programs = [entry for entry in all_programs if sum(command_counts(entry[2]).values()) <= limit]
        comparisons = compare(arguments.executable, programs, pimflow.system(pim=DEVICE).pim, progress)
        if arguments.update:
            page = arguments.update.read_text(encoding="utf-8")
            arguments.update.write_text(replace_table(page, comparisons), encoding="utf-8")
        if arguments.record:
            record(arguments.record, programs, comparisons)
    except PimflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(
        json.dumps([asdict(entry) for entry in comparisons], indent=1)
        if arguments.json
        else table(comparisons)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
