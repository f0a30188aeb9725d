"""Networks by value: ``verify_networks.py NET.onnx [INPUT=SHAPE…] …`` compiles files and prints a table.

Each is compiled in fp16 and in fp32, for the CPU that stands in for the GPU. Shapes are of the file before
them. A file of an installed Python package is listed with the package and its version.
"""

import argparse
import importlib.metadata
from pathlib import Path

import pimflow
from pimflow import errors, zoo

HEADER = (
    *("package", "network", "shape", "dtype", "PIM regions", "our deviation", "the reference's own", "bound"),
    "verdict",
)


def row(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str) -> tuple[str, ...]:
    shape = ", ".join(f"{name} {'x'.join(map(str, dims))}" for name, dims in shapes.items()) or "the file's"
    begin = (package(path), path.stem, shape, dtype)
    try:
        system = pimflow.system(dtype=dtype)
        report = pimflow.compile(str(path), target_system=system, shapes=shapes).report
    except errors.PimflowError as error:
        return (*begin, *("",) * 4, f"code {error.exit_code}: {error}".replace("|", "\\|"))
    own = report["reference_deviation"]
    return (
        *begin,
        f"{report['regions_verified']} of {sum(region['on_pim'] for region in report['regions'])}",
        f"{report['max_relative_error']:.1e}",
        "not needed" if own is None else f"{own:.1e}",
        f"{report['tolerance']:.1e}",
        "verified",
    )


def package(path: Path) -> str:
    """Name and version of what installed `path`; empty if nothing says so."""
    for folder in path.resolve().parents:
        for found in importlib.metadata.distributions(path=[str(folder)]):
            if any(Path(found.locate_file(file)).resolve() == path.resolve() for file in found.files or ()):
                return f"{found.name} {found.version}"
    return ""


def networks(words: list[str]) -> list[tuple[Path, dict[str, tuple[int, ...]]]]:
    found: list[tuple[Path, dict[str, tuple[int, ...]]]] = []
    for word in words:
        if word.endswith(".onnx"):
            found.append((Path(word), {}))
        elif found:
            found[-1][1].update([zoo.parse_shape(word)])
        else:
            raise errors.UsageError(f"'{word}' is no .onnx file, and there is none before it")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("networks", nargs="+", metavar="NET.onnx|INPUT=SHAPE")
    parser.add_argument("--dtype", action="append", choices=("fp16", "fp32"), help="default: both")
    args = parser.parse_args()
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for path, shapes in networks(args.networks):
        for dtype in args.dtype or ("fp16", "fp32"):
            print(f"| {' | '.join(row(path, shapes, dtype))} |", flush=True)


if __name__ == "__main__":
    main()
