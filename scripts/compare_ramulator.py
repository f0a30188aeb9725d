"""PIM programs in the Ramulator fork of PIMFlow's authors.

    python scripts/compare_ramulator.py EXECUTABLE [--model NAME …] [--update FILE]
        [--layer TEXT …] [--record FILE]

EXECUTABLE is that of github.com/akothen/PIMFlow_ramulator. The programs are those of the networks' plans
under accounting `paper` and timing `ramulator-pimflow`; with ``--layer``, such as ``conv:1x24x14x14,96,1x1``,
that layer instead, in all of its loop orders, on four channels.

``--update FILE`` writes the table between the marks of a Markdown page, docs/validation.md. ``--record FILE``
writes the programs, and what the executable printed for each channel, to a .tar.xz, which
tests/timing/test_ramulator_adapter.py reads.
"""

from __future__ import annotations

import argparse
import io
import shlex
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from update_readme import fill

import pimflow
from pimflow.core.layer_text import parse_layer
from pimflow.core.program import PimProgram
from pimflow.errors import PimflowError
from pimflow.host.files import replace_file
from pimflow.pim_backend.programs.lowering import lower
from pimflow.pim_backend.programs.schedule import schedules
from pimflow.simulators.ramulator.comparison import TIMING, Comparison, compare, table

NETWORKS = ("toy", "squeezenet-1.1", "mobilenet-v2")
# Keeps what the executable prints under the digest of the trace.
RECORDER = """#!/bin/sh
for trace; do :; done
kept=$(sha256sum < "$trace" | cut -c1-64)${{RAMULATOR_DISABLE_GWRITE_LATENCY_HIDING:+.not-hidden}}
{executable} "$@" | tee {folder}/"$kept"
"""


def of_networks(models: list[str]) -> Iterator[tuple[str, str, PimProgram]]:
    """The programs of their plans."""
    for model in models:
        searched = pimflow.search(model, pimflow.system(timing=TIMING, accounting="paper"))
        for name, program in searched.programs().items():
            yield model, name, program


def of_layers(texts: list[str]) -> Iterator[tuple[str, str, PimProgram]]:
    """Layers in each of their loop orders."""
    pim = pimflow.system(timing=TIMING).pim
    for text in texts:
        for order in schedules(parse_layer(text), pim, "fp16"):
            program = lower(parse_layer(text), pim, region=text, dtype="fp16", channels=4, schedule=order)
            yield text, str(order), program


def record(path: Path, programs: Mapping[str, PimProgram], printed: Path) -> None:
    """Write programs by name, and the files of `printed`, to an archive."""
    with tarfile.open(path, "w:xz") as archive:
        contents = {name: program.to_json() for name, program in programs.items()}
        contents |= {file.name: file.read_text(encoding="ascii") for file in sorted(printed.iterdir())}
        for name, text in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("executable", type=Path)
    parser.add_argument("--model", action="append", metavar="NAME", help=f"default: {', '.join(NETWORKS)}")
    parser.add_argument("--layer", action="append", metavar="TEXT", help="instead of networks")
    parser.add_argument("--update", type=Path, metavar="FILE")
    parser.add_argument("--record", type=Path, metavar="FILE")
    arguments = parser.parse_args()

    def progress(each: Comparison) -> None:
        same = each.cycles_agree and each.counts_agree
        print(f"{each.source} {each.name}: {'the same' if same else each}", file=sys.stderr)

    made = of_layers(arguments.layer) if arguments.layer else of_networks(arguments.model or list(NETWORKS))
    with tempfile.TemporaryDirectory() as scratch:
        printed, recorder = Path(scratch, "printed"), Path(scratch, "ramulator")
        printed.mkdir()
        executable = shlex.quote(str(arguments.executable.resolve()))
        recorder.write_text(RECORDER.format(executable=executable, folder=shlex.quote(str(printed))))
        recorder.chmod(0o755)
        try:
            programs = list(made)
            found = compare(str(recorder), programs, pimflow.system(timing=TIMING).pim, progress)
        except PimflowError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        if arguments.record:
            named = {f"{number}.pimprog": program for number, (*_, program) in enumerate(programs)}
            record(arguments.record, named, printed)
    text = table(found)
    print(text)
    if arguments.update:
        page = fill(arguments.update.read_text(encoding="utf-8"), "ramulator", text)
        replace_file(arguments.update, page.encode())
    return 0 if all(each.cycles_agree and each.counts_agree for each in found) else 5


if __name__ == "__main__":
    sys.exit(main())
