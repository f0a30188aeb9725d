"""Mutated files against the commands that read them: the table of mutants of docs/validation.md.

The targets are those of tests/fuzz. Mutants are read in child processes, a batch each, so that a crash or a
hang is one mutant's. What is found is stored, to become a file of tests/fuzz/corpus.

    python scripts/fuzz.py --minutes 20 [--targets TARGET…] [--found FOLDER] [--update docs/validation.md]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import select
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from update_readme import ROOT, fill

sys.path.insert(0, str(ROOT / "tests" / "fuzz"))

import mutators
import targets

BATCH_SECONDS = 15.0  # of one target, before it is another's turn
HANG_SECONDS = 120.0  # of one mutant
FORK = multiprocessing.get_context("fork")  # what is imported and prepared is there
KINDS = ("traceback", "hang", "crash", "several lines", "other")


def mutant_of(name: str, seed: int, number: int, seeds: list[bytes]) -> bytes:
    """Mutant `number` of a target: the same bytes in every run of the same seed."""
    draw = random.Random(f"{seed} {name} {number}")
    return mutators.mutant(draw.choice(seeds), draw, targets.TARGETS[name].suffix)


def fault_of(name: str, path: Path) -> str:
    try:
        return targets.TARGETS[name].check(path)
    except (Exception, SystemExit):
        return traceback.format_exc()


def batch(name: str, seed: int, first: int, seeds: list[bytes], folder: Path, say: int) -> None:
    """Read mutants from `first` on, and write to `say` that each begins, and what is wrong with it."""
    quiet = os.open(os.devnull, os.O_WRONLY)  # what C++ code prints
    os.dup2(quiet, 2)
    end = time.monotonic() + BATCH_SECONDS
    number = first
    while number == first or time.monotonic() < end:
        path = folder / f"mutant{targets.TARGETS[name].suffix}"
        path.write_bytes(mutant_of(name, seed, number, seeds))
        os.write(say, f"{number}\n".encode())
        fault = fault_of(name, path)
        if fault:
            os.write(say, f"{number} {fault!r}\n".encode())
        number += 1
    os.write(say, b"done\n")


def run_batch(
    name: str, seed: int, first: int, seeds: list[bytes], folder: Path
) -> tuple[int, list[tuple[int, str]]]:
    """How many mutants were read from `first` on, and the faults."""
    hear, say = os.pipe()
    child = FORK.Process(target=batch, args=(name, seed, first, seeds, folder, say))
    child.start()
    os.close(say)
    text, fate = "", ""
    with os.fdopen(hear, "rb", buffering=0) as pipe:
        while True:
            if not select.select([pipe], [], [], HANG_SECONDS)[0]:
                fate = "hang"
                child.kill()
            more = pipe.read(1 << 16)
            if not more:
                break
            text += more.decode(errors="replace")
    child.join()
    lines = text.splitlines()
    faults = [(int(number), fault) for number, _, fault in (line.partition(" ") for line in lines) if fault]
    last = max((int(line.split(" ")[0]) for line in lines if line != "done"), default=first)
    if "done" not in lines:
        faults.append((last, fate or "crash"))
    return last + 1 - first, faults


def kind_of(fault: str) -> str:
    if fault in ("hang", "crash"):
        return fault
    return "traceback" if "Traceback" in fault else "several lines" if "not one line" in fault else "other"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--targets", nargs="+", choices=targets.TARGETS, default=list(targets.TARGETS))
    parser.add_argument("--found", type=Path, metavar="FOLDER", help="where mutants with a fault go")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the table there too")
    args = parser.parse_args()
    read: Counter[str] = Counter()
    faults: dict[str, Counter[str]] = {name: Counter() for name in args.targets}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["PIMFLOW_CACHE"] = str(Path(scratch) / "cache.sqlite")
        seeds = {}
        for name in args.targets:
            folder = Path(scratch) / targets.slug(name)
            folder.mkdir()
            seeds[name] = targets.TARGETS[name].seeds(folder)
            right = folder / f"right{targets.TARGETS[name].suffix}"
            right.write_bytes(seeds[name][0])
            if fault := fault_of(name, right):
                raise SystemExit(f"{name}: a right file is refused: {fault}")
        end = time.monotonic() + 60 * args.minutes
        while time.monotonic() < end:
            for name in args.targets:
                folder = Path(scratch) / targets.slug(name)
                count, found = run_batch(name, args.seed, read[name], seeds[name], folder)
                read[name] += count
                for number, fault in found:
                    faults[name][kind_of(fault)] += 1
                    print(f"{name} {number}: {fault[-600:]}", file=sys.stderr, flush=True)
                    if args.found:
                        args.found.mkdir(parents=True, exist_ok=True)
                        place = args.found / f"{targets.slug(name)}.{number}{targets.TARGETS[name].suffix}"
                        place.write_bytes(mutant_of(name, args.seed, number, seeds[name]))
    header = ("target", "mutants", *KINDS)
    rows = [(name, read[name], *(faults[name][kind] for kind in KINDS)) for name in args.targets]
    rows.append(("all", *(sum(row[column] for row in rows) for column in range(1, len(header)))))
    table = [f"| {' | '.join(map(str, row))} |" for row in (header, *rows)]
    table.insert(1, f"|{'---|' * len(header)}")
    print("\n".join(table))
    if args.update:
        text = args.update.read_text(encoding="utf-8")
        args.update.write_text(fill(text, "mutants", "\n".join(table)), encoding="utf-8")
    return 1 if any(map(sum, (count.values() for count in faults.values()))) else 0


if __name__ == "__main__":
    sys.exit(main())
