"""PIM programs in the Ramulator fork of PIMFlow's authors, and load/store traces in Ramulator 2.

    python scripts/compare_ramulator.py EXECUTABLE [--model NAME …] [--update FILE]
        [--layer TEXT …] [--record FILE]
    python scripts/compare_ramulator.py EXECUTABLE --load-store [--layer TEXT …] [--update FILE]

EXECUTABLE is that of github.com/akothen/PIMFlow_ramulator. The programs are those of the networks' plans
under accounting `paper` and timing `ramulator-pimflow`; with ``--layer``, such as ``conv:1x24x14x14,96,1x1``,
that layer instead, in all of its loop orders, on four channels.

``--update FILE`` writes the table between the marks of a Markdown page, docs/validation.md. ``--record FILE``
writes the programs, and what the executable printed for each channel, to a .tar.xz, which
tests/timing/test_ramulator_adapter.py reads.

With ``--load-store``, EXECUTABLE is that of github.com/CMU-SAFARI/ramulator2, branch legacy/v2.0a; it reads
the traces of `LAYERS`, or of those that are named.
"""

from __future__ import annotations

import argparse
import io
import itertools
import shlex
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from calibration.ramulator2 import Ramulator2Run, simulate, traffic_table
from calibration.ramulator_comparison import compare, table
from update_readme import fill

import pimflow
from pimflow.commands.simulate.comparison import TIMING, ProgramTimes, layer_programs
from pimflow.core.layer_text import parse_layer
from pimflow.core.program import PimProgram
from pimflow.errors import PimflowError
from pimflow.host.files import replace_file
from pimflow.simulators.ramulator import load_store_trace

LAYERS = (
    "conv:1x32x28x28,192,1x1",
    "conv:1x64x14x14,64,3x3,p1",
    "conv:1x96x28x28,96,3x3,s2,p1",
    "conv:2x3x33x31,24,5x5,s2x1,p2",
    "fc:8x1280,1000",
    "fc:2048,512",
)
NETWORKS = ("toy", "squeezenet-1.1", "mobilenet-v2")
# Keeps what the executable prints under the digest of the trace.
RECORDER = """#!/bin/sh
for trace; do :; done
kept=$(sha256sum < "$trace" | cut -c1-64)${{RAMULATOR_DISABLE_GWRITE_LATENCY_HIDING:+.not-hidden}}
{executable} "$@" | tee {folder}/"$kept"
"""


def network_programs(models: list[str]) -> Iterator[tuple[str, str, PimProgram]]:
    """The programs of the networks' plans."""
    for model in models:
        search_result = pimflow.search(model, pimflow.system(timing=TIMING, accounting="paper"))
        for name, program in search_result.programs().items():
            yield model, name, program


def load_store_traffic(executable: Path, texts: list[str]) -> list[Ramulator2Run]:
    """Simulate load/store traces of layers in fp16 in Ramulator 2."""
    traffic = []
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "layer.ldst")
        for text in texts:
            parts = load_store_trace.export(parse_layer(text), "fp16")
            trace.write_bytes(b"".join(part for part, _ in parts))
            traffic.append(simulate(executable, text, trace))
            print(traffic[-1], file=sys.stderr)
    return traffic


def record(path: Path, programs: Mapping[str, PimProgram], printed: Path) -> None:
    """Write programs by name, and the files in the folder `from_printed_text`, to an archive."""
    with tarfile.open(path, "w:xz") as archive:
        contents = {name: program.to_json() for name, program in programs.items()}
        contents |= {file.name: file.read_text(encoding="ascii") for file in sorted(printed.iterdir())}
        for name, text in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))


def main() -> int:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("executable", type=Path)
    parser.add_argument("--model", action="append", metavar="NAME", help=f"default: {', '.join(NETWORKS)}")
    parser.add_argument("--layer", action="append", metavar="TEXT", help="instead of networks")
    parser.add_argument("--load-store", action="store_true", help="traces for Ramulator 2")
    parser.add_argument("--update", type=Path, metavar="FILE")
    parser.add_argument("--record", type=Path, metavar="FILE")
    arguments = parser.parse_args()

    if arguments.load_store:
        try:
            traffic = load_store_traffic(arguments.executable, arguments.layer or list(LAYERS))
        except PimflowError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        return show("ramulator2", traffic_table(traffic), arguments.update, [t.agrees for t in traffic])

    def progress(comparison: ProgramTimes) -> None:
        """Print a comparison."""
        same = comparison.cycles_agree and comparison.counts_agree
        print(f"{comparison.source} {comparison.name}: {'the same' if same else comparison}", file=sys.stderr)

    pim = pimflow.system(timing=TIMING).pim
    all_programs = (
        itertools.chain.from_iterable(layer_programs(text, pim, "fp16", 4) for text in arguments.layer)
        if arguments.layer
        else network_programs(arguments.model or list(NETWORKS))
    )
    with tempfile.TemporaryDirectory() as scratch:
        printed, recorder = Path(scratch, "printed"), Path(scratch, "ramulator")
        printed.mkdir()
        executable = shlex.quote(str(arguments.executable.resolve()))
        recorder.write_text(RECORDER.format(executable=executable, folder=shlex.quote(str(printed))))
        recorder.chmod(0o755)
        try:
            programs = list(all_programs)
            comparisons = compare(str(recorder), programs, pim, progress)
        except PimflowError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        if arguments.record:
            named = {f"{number}.pimprog": program for number, (*_, program) in enumerate(programs)}
            record(arguments.record, named, printed)
    agree = [comparison.cycles_agree and comparison.counts_agree for comparison in comparisons]
    return show("ramulator", table(comparisons), arguments.update, agree)


def show(mark: str, text: str, path: Path | None, agree: list[bool]) -> int:
    """Print a table, and put it into the page `path`; the exit code says whether all rows agree."""
    print(text)
    if path:
        replace_file(path, fill(path.read_text(encoding="utf-8"), mark, text).encode())
    return 0 if all(agree) else 5


if __name__ == "__main__":
    sys.exit(main())
