"""Networks by value: ``verify_networks.py [NETWORK [INPUT=SHAPE…] …]`` compiles each and prints a table.

It compiles in fp16 and in fp32, for the CPU that stands in for the GPU. Networks are ``.onnx`` files or names
of the zoo (by default all of it); a shape belongs to the network before it. A file of an installed Python
package is listed with the package and its version. The reference's own deviation is that of its runs with
random roundings (`pimflow.conditioning`), for the output with the largest ratio of our deviation to it; here
it is computed for every network.
"""

import argparse
import importlib.metadata
from pathlib import Path

from update_readme import fill

import pimflow
from pimflow import errors, frontend, zoo
from pimflow.compiler import conditioning, verification

HEADER = (
    *("package", "network", "shape", "dtype", "PIM regions", "our deviation", "the reference's own", "ratio"),
    *("bound", "verdict"),
)


def row(model: str, shapes: dict[str, tuple[int, ...]], dtype: str, accounting: str) -> tuple[str, ...]:
    """Compile a network: a row of the table."""
    shape = ", ".join(f"{name} {'x'.join(map(str, dims))}" for name, dims in shapes.items())
    begin = (package(Path(model)), model if model in zoo.names() else Path(model).stem, shape, dtype)
    try:
        system = pimflow.system(dtype=dtype, accounting=accounting)
        compiled = pimflow.compile(model, system=system, shapes=shapes, conventions="none")
        deviations = reference_deviations(model, shapes, compiled)
    except errors.PimflowError as error:
        return (*begin, *("",) * 5, f"code {error.exit_code}: {error}".replace("|", "\\|"))
    pairs = zip(compiled.verification.outputs, deviations, strict=True)
    output, deviation = max(pairs, key=lambda pair: pair[0].relative_error / pair[1] if pair[1] else 0.0)
    on_pim = sum(region.on_pim for region in compiled.report.regions)
    return (
        *begin,
        f"{compiled.report.verification.regions_verified} of {on_pim}",
        f"{output.relative_error:.1e}",
        f"{deviation:.1e}",
        f"{output.relative_error / deviation:.2f}" if deviation else "",
        f"{output.bound:.1e}",
        "verified",
    )


def reference_deviations(
    model: str, shapes: dict[str, tuple[int, ...]], compiled: pimflow.Compiled
) -> list[float]:
    """Deviation of the reference with random roundings, for each output."""
    network, search_result = frontend.load(model, shapes), compiled.search_result
    inputs = network.example_inputs()
    stored = verification.fp16_storage(
        compiled.builds[0], search_result.system, search_result.candidate_by_region
    )
    return conditioning.reference_deviations(network.perturbed(stored), inputs, network.reference(inputs))


def package(path: Path) -> str:
    """Name and version of the Python package that installed `path`; empty if there is none."""
    for folder in path.resolve().parents if path.is_file() else ():
        for distribution in importlib.metadata.distributions(path=[str(folder)]):
            if any(
                Path(distribution.locate_file(file)).resolve() == path.resolve()
                for file in distribution.files or ()
            ):
                return f"{distribution.name} {distribution.version}"
    return ""


def networks(words: list[str]) -> list[tuple[str, dict[str, tuple[int, ...]]]]:
    """Networks of the command line, with the shapes that follow each."""
    models: list[tuple[str, dict[str, tuple[int, ...]]]] = []
    for word in words:
        if models and "=" in word and not word.endswith(".onnx"):
            models[-1][1].update([zoo.parse_shape(word)])
        else:
            models.append((word, {}))
    return models


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("networks", nargs="*", metavar="NETWORK|INPUT=SHAPE", help="default: all of the zoo")
    parser.add_argument("--dtype", action="append", choices=("fp16", "fp32"), help="default: both")
    parser.add_argument("--accounting", default="full", help="paper leaves more to PIM (default: full)")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="write the table there too")
    parser.add_argument("--table", default="outputs", metavar="NAME", help="of the page (default: outputs)")
    args = parser.parse_args()
    lines = [f"| {' | '.join(HEADER)} |", f"|{'---|' * len(HEADER)}"]
    print("\n".join(lines))
    for model, shapes in networks(args.networks or list(zoo.names())):
        for dtype in args.dtype or ("fp16", "fp32"):
            lines.append(f"| {' | '.join(row(model, shapes, dtype, args.accounting))} |")
            print(lines[-1], flush=True)
    if args.update:
        text = args.update.read_text(encoding="utf-8")
        args.update.write_text(fill(text, args.table, "\n".join(lines)), encoding="utf-8")


if __name__ == "__main__":
    main()
