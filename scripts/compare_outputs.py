"""Are plans, programs and reports of six networks what they were before a change of the code?

    compare_outputs.py write FOLDER            compiles the networks, a directory each
    compare_outputs.py compare BEFORE AFTER    prints what differs; exit code 1 if anything does
    compare_outputs.py commits BEFORE AFTER    both, of two commits: each is checked out and built

What differs from run to run is left out: seconds of this machine, pages and the shared library. So are the
order of a report's keys, and the version of its form. ``--renamed OLD=NEW`` tells of a renamed key.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
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
ROOT = Path(__file__).resolve().parents[1]
OUTER_FOLDERS = ("relay_passes", "pim_backend", "simulators")  # of the package, beside `python/pimflow`
CORE = ("*.cc", "*.h", "setup.py")  # what the library is built from
LIBRARY = "python/pimflow/libpimflow_core.so"


def write(folder: Path, networks: Sequence[str]) -> None:
    for name in networks:
        print(name, flush=True)
        pimflow.compile(name, folder / name, **NETWORKS[name])


def with_renamed_keys(value: object, renamed: Mapping[str, str]) -> object:
    """A tree of JSON whose keys are renamed."""
    if isinstance(value, dict):
        return {renamed.get(key, key): with_renamed_keys(item, renamed) for key, item in value.items()}
    return [with_renamed_keys(item, renamed) for item in value] if isinstance(value, list) else value


def contents(directory: Path, renamed: Mapping[str, str]) -> dict[str, bytes]:
    """By name, the files of a compiled directory and the entries of its report, without what is measured."""
    files = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.name == "report.json":
            report = with_renamed_keys(json.loads(path.read_text()), renamed)
            files |= {
                f"{name} {key}": json.dumps(value).encode()
                for key, value in report.items()
                if key not in IGNORED
            }
        elif path.suffix == ".pimprog" or path.name in COMPARED:
            data = path.read_bytes()
            files[name] = (
                json.dumps(with_renamed_keys(json.loads(data), renamed)).encode() if renamed else data
            )
    return files


def differences(
    before: Path, after: Path, networks: Sequence[str], renamed: Mapping[str, str]
) -> Iterator[str]:
    for network in networks:
        old, new = contents(before / network, renamed), contents(after / network, renamed)
        if not old or not new:
            yield f"{network}: not compiled in both folders"
            continue
        for name in sorted({*old, *new}):
            if old.get(name) != new.get(name):
                yield f"{network}/{name}"


def write_commit(commit: str, folder: Path, networks: Sequence[str]) -> Path:
    """Compile the networks by the code of a commit; returns the folder of their directories.

    The library is built anew unless the C++ of the commit is that of this checkout.
    """
    tree, outputs = folder / "tree", folder / "outputs"
    git = ["git", "-C", str(ROOT)]
    subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(tree), commit], check=True)
    try:
        for name in OUTER_FOLDERS:
            (tree / "python/pimflow" / name).symlink_to(tree / name)
        if subprocess.run([*git, "diff", "--quiet", commit, "--", *CORE]).returncode:
            build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
            subprocess.run(build, cwd=tree, check=True)
        else:
            (tree / LIBRARY).write_bytes((ROOT / LIBRARY).read_bytes())
        command = [sys.executable, __file__, "--networks", ",".join(networks), "write", str(outputs)]
        # Modules of this path are found before those of an editable install.
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(tree / "python")})
    finally:
        subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)
    return outputs


def network_names(text: str) -> list[str]:
    """Some of `NETWORKS`, from their names with commas between."""
    names = text.split(",")
    if unknown := {*names} - {*NETWORKS}:
        raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))} among {', '.join(NETWORKS)}")
    return names


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", type=network_names, default=list(NETWORKS), help="some of the six")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("write").add_argument("folder", type=Path)
    for name, kind in (("compare", Path), ("commits", str)):
        command = commands.add_parser(name)
        command.add_argument("before", type=kind)
        command.add_argument("after", type=kind)
        command.add_argument(
            "--renamed", action="append", default=[], metavar="OLD=NEW", help="a key of JSON"
        )
    args = parser.parse_args()
    if args.command == "write":
        write(args.folder, args.networks)
        return
    renamed = dict(pair.split("=", 1) for pair in args.renamed)
    with tempfile.TemporaryDirectory() as temporary:
        folders = [args.before, args.after]
        if args.command == "commits":
            places = [Path(temporary, name) for name in ("before", "after")]
            folders = [write_commit(commit, place, args.networks) for commit, place in zip(folders, places)]
        lines = list(differences(*folders, args.networks, renamed))
    print("\n".join(lines) or f"{len(args.networks)} networks are the same")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
