"""Mutated files against the commands that read them: the table of mutants of docs/validation.md.

The targets are those of tests/fuzz. Child processes read the mutants, a batch each, so that a crash or a hang
belongs to one mutant. Mutants with a fault are stored, to become files of tests/fuzz/corpus. With
``--counts``, a run continues where the last one stopped, even if it was killed, and the table has the counts
of all runs.

    python scripts/fuzz.py --minutes 20 [--mutants N] [--targets TARGET…] [--counts FILE] [--found FOLDER]
        [--update docs/validation.md]
"""

from __future__ import annotations

import argparse
import json
import math
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

import numpy as np
from update_readme import ROOT, fill

from pimflow.host.files import replace_file

os.environ["TVM_NUM_THREADS"] = "1"  # forked processes lack TVM's threads: kernels would wait for them
sys.path.extend((str(ROOT / "tests" / "fuzz"), str(ROOT / "tests")))

import targets

BATCH_SECONDS = 15.0  # of one target, before the next target
MAX_BATCH_MUTANTS = 1000
HANG_SECONDS = 120.0  # of one mutant
FORK = multiprocessing.get_context("fork")  # children have what is imported and prepared
KINDS = ("traceback", "hang", "crash", "several lines", "wrong value", "other")


def mutant_of(name: str, seed: int, number: int, seeds: list[bytes]) -> bytes:
    """Mutant `number` of a target: the same bytes in every run of the same seed."""
    draw = random.Random(f"{seed} {name} {number}")
    return targets.TARGETS[name].mutant(draw.choice(seeds), draw)


def fault_of(name: str, path: Path) -> str:
    """What is wrong when a target reads a file; empty if nothing."""
    try:
        return targets.TARGETS[name].check(path)
    except (Exception, SystemExit):
        return traceback.format_exc()


def batch(name: str, seed: int, numbers: range, seeds: list[bytes], folder: Path, say: int) -> None:
    """Read the mutants of `numbers` until the time is over; write their numbers and faults to `say`."""
    quiet = os.open(os.devnull, os.O_WRONLY)  # what C++ code prints
    os.dup2(quiet, 2)
    end = time.monotonic() + BATCH_SECONDS
    for number in numbers:
        path = folder / f"mutant{targets.TARGETS[name].suffix}"
        path.write_bytes(mutant_of(name, seed, number, seeds))
        os.write(say, f"{number}\n".encode())
        fault = fault_of(name, path)
        if fault:
            os.write(say, f"{number} {fault!r}\n".encode())
        if time.monotonic() > end:
            break
    os.write(say, b"done\n")


def run_batch(
    name: str, seed: int, numbers: range, seeds: list[bytes], folder: Path
) -> tuple[int, list[tuple[int, str]]]:
    """Read mutants in a child process: how many of `numbers`, from the first on, and the faults."""
    hear, say = os.pipe()
    child = FORK.Process(target=batch, args=(name, seed, numbers, seeds, folder, say))
    child.start()
    os.close(say)
    text, fate = "", ""
    with os.fdopen(hear, "rb", buffering=0) as pipe:
        while True:
            if not select.select([pipe], [], [], HANG_SECONDS)[0]:
                fate = "hang"
                child.kill()
            chunk = pipe.read(1 << 16)
            if not chunk:
                break
            text += chunk.decode(errors="replace")
    child.join()
    lines = text.splitlines()
    faults = [(int(number), fault) for number, _, fault in (line.partition(" ") for line in lines) if fault]
    last = max((int(line.split(" ")[0]) for line in lines if line != "done"), default=numbers[0])
    if "done" not in lines:
        faults.append((last, fate or "crash"))
    return last + 1 - numbers[0], faults


def kind_of(fault: str) -> str:
    """Which of `KINDS` a fault is."""
    if fault in ("hang", "crash"):
        return fault
    said = {"Traceback": "traceback", "not one line": "several lines", "wrong value": "wrong value"}
    return next((kind for text, kind in said.items() if text in fault), "other")


class MutantCounts:
    """Counts of mutants and of their faults by target, stored in a file if `path` is given."""

    def __init__(self, path: Path | None, seed: int) -> None:
        self.path = path
        stored = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else {}
        if stored.get("seed", seed) != seed:
            raise SystemExit(f"{path} has the counts of seed {stored['seed']}; give that, or another file")
        self.seed = seed
        self.read = Counter[str](stored.get("read", {}))
        self.faults = {name: Counter[str](stored.get("faults", {}).get(name, {})) for name in targets.TARGETS}

    def add(self, name: str, read: int, kinds: list[str]) -> None:
        """Add a batch, and store the counts."""
        self.read[name] += read
        self.faults[name].update(kinds)
        if self.path:
            table = {"seed": self.seed, "read": self.read, "faults": self.faults}
            replace_file(self.path, json.dumps(table, indent=1).encode())

    def table(self) -> str:
        """The counts as Markdown."""
        header = ("target", "mutants", *KINDS)
        read = [name for name in targets.TARGETS if self.read[name]]
        rows = [(name, self.read[name], *(self.faults[name][kind] for kind in KINDS)) for name in read]
        rows.append(("all", *(sum(row[column] for row in rows) for column in range(1, len(header)))))
        lines = [f"| {' | '.join(map(str, row))} |" for row in (header, *rows)]
        lines.insert(1, f"|{'---|' * len(header)}")
        return "\n".join(lines)


def attack(shares: dict[str, float], counts: MutantCounts, end: float, fault_folder: Path | None) -> int:
    """Read mutants of the targets in turn, up to their shares or until `end`: how many have a fault."""
    faults = 0
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["PIMFLOW_CACHE"] = str(Path(scratch) / "cache.sqlite")
        seeds = {}
        for name in shares:
            folder = Path(scratch) / targets.slug(name)
            folder.mkdir()
            seeds[name] = targets.TARGETS[name].seeds(folder)
            right = folder / f"right{targets.TARGETS[name].suffix}"
            right.write_bytes(seeds[name][0])
            if fault := fault_of(name, right):
                raise SystemExit(f"{name}: a right file is refused: {fault}")
        while time.monotonic() < end and any(counts.read[name] < share for name, share in shares.items()):
            for name in (name for name, share in shares.items() if counts.read[name] < share):
                first = counts.read[name]
                numbers = range(first, int(min(shares[name], first + MAX_BATCH_MUTANTS)))
                folder = Path(scratch) / targets.slug(name)
                read, wrong = run_batch(name, counts.seed, numbers, seeds[name], folder)
                counts.add(name, read, [kind_of(fault) for _, fault in wrong])
                faults += len(wrong)
                for number, fault in wrong:
                    print(f"{name} {number}: {fault[-600:]}", file=sys.stderr, flush=True)
                    if fault_folder:
                        fault_folder.mkdir(parents=True, exist_ok=True)
                        place = fault_folder / f"{targets.slug(name)}.{number}{targets.TARGETS[name].suffix}"
                        place.write_bytes(mutant_of(name, counts.seed, number, seeds[name]))
    return faults


def main() -> int:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0, metavar="N")
    parser.add_argument("--mutants", type=int, metavar="N", help="stop at so many, in shares of targets")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--targets", nargs="+", choices=targets.TARGETS, default=list(targets.TARGETS))
    parser.add_argument("--counts", type=Path, metavar="FILE", help="go on from these counts, and store them")
    parser.add_argument("--found", type=Path, metavar="FOLDER", help="where mutants with a fault go")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the table there too")
    args = parser.parse_args()
    counts = MutantCounts(args.counts, args.seed)
    weights = {name: targets.TARGETS[name].weight for name in args.targets}
    mutants_per_weight = args.mutants / sum(weights.values()) if args.mutants else math.inf
    shares = {name: np.ceil(weight * mutants_per_weight) for name, weight in weights.items()}
    faults = attack(shares, counts, time.monotonic() + 60 * args.minutes, args.found)
    print(counts.table())
    if args.update:
        text = args.update.read_text(encoding="utf-8")
        args.update.write_text(fill(text, "mutants", counts.table()), encoding="utf-8")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
