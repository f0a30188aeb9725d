"""Are plans, programs and reports of six networks what they were before a change of the code?

    compare_outputs.py write FOLDER            compiles the networks, a directory each
    compare_outputs.py compare BEFORE AFTER    prints what differs; exit code 1 if anything does

What differs from run to run is left out: seconds of this machine, pages and the shared library. So are the
order of a report's keys, and the version of its form.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pimflow

# By network: what it is compiled with, beside the defaults. Each option here ends long before its limits of
# time.
NETWORKS: dict[str, dict[str, object]] = {
    "toy": {},
    "mobilenet-v2": {"conventions": "none"},
    "squeezenet-1.1": {"conventions": "none", "fuse": True},
    "resnet-18": {"conventions": "none", "decompose": "tucker:0.5", "optimize_skips": "pool"},
    "googlenet": {"conventions": "none", "objective": "energy"},
    "tiny-lm": {"conventions": "none"},
}
IGNORED = ("schema_version", "search_seconds", "wall_seconds")  # keys of reports
COMPARED = ("plan.json", "regions.json", "timeline.json", "pim.json")  # beside programs and the report


def write(folder: Path) -> None:
    for name, options in NETWORKS.items():
        print(name, flush=True)
        pimflow.compile(name, folder / name, **options)


def contents(directory: Path) -> dict[str, bytes]:
    """By name, the files of a compiled directory, without what was measured."""
    files = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.suffix == ".pimprog" or path.name in COMPARED:
            files[name] = path.read_bytes()
        elif path.name == "report.json":
            report = json.loads(path.read_text())
            files[name] = json.dumps({key: report[key] for key in sorted({*report} - {*IGNORED})}).encode()
    return files


def differences(before: Path, after: Path) -> Iterator[str]:
    for network in NETWORKS:
        old, new = contents(before / network), contents(after / network)
        if "report.json" not in old or "report.json" not in new:
            yield f"{network}: not compiled in both folders"
            continue
        for name in sorted({*old, *new}):
            if old.get(name) != new.get(name):
                yield f"{network}/{name}"


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("write").add_argument("folder", type=Path)
    comparison = commands.add_parser("compare")
    comparison.add_argument("before", type=Path)
    comparison.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "write":
        write(arguments.folder)
        return
    lines = list(differences(arguments.before, arguments.after))
    print("\n".join(lines) or f"{len(NETWORKS)} networks are the same")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
