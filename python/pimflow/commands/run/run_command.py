"""``pimflow run``: run a compiled directory, time it and compare its outputs."""

from __future__ import annotations

import argparse
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pimflow.commands.command_line import output, output_options
from pimflow.commands.command_line.command_parser import CommandParser
from pimflow.commands.run.options import RunOptions
from pimflow.errors import OutputError, one_line
from pimflow.host.files import ARRAY, FORCE, check_file, replace_file

if TYPE_CHECKING:
    import numpy as np

    from pimflow.commands.run.run import Inference

# By target, the text about what runs the network.
RUNNER_TEXT = {
    "llvm+pim": ": the CPU stands in for the GPU, and PIM regions are computed by their commands",
    "cuda+pim": ": the GPU, and PIM regions computed by their commands",
}
SUMMARY = "run a compiled network, time it, and compare its outputs"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    sub.positional("directory", "DIR", "what 'pimflow compile -o' wrote")
    sub.add_fields(RunOptions, "inputs", "input_values", "target", "threads")
    output_help = "where to write the output, of several samples along a first dimension; bf16 as fp32"
    sub.option("output", "-o", "--output", metavar="FILE.npy", help=output_help)
    output_options.force_option(sub)
    sub.add_fields(RunOptions, "repeat", "compare")


def run(args: argparse.Namespace) -> None:
    """Run the directory of `args`, write its outputs if requested, and print the result."""
    from pimflow.commands.run.run import infer

    keywords = args.parser.keywords(args, RunOptions)
    RunOptions(**keywords)  # raises for a wrong value before the work
    if args.output:
        _check_output(args)
    with output.status(args) as progress:
        inference = infer(args.directory, progress=progress, **keywords)
    if args.output:
        first = Path(args.output)
        extra_indices = range(1, len(inference.outputs))
        paths = [first, *(first.with_name(f"{first.stem}.{index}{first.suffix}") for index in extra_indices)]
        for path in paths[1:]:
            check_file(path, ARRAY, force=args.force)
        for path, y in zip(paths, inference.outputs):
            _write_array(path, y)
    if args.json:
        output.print_json(inference.to_json() | {"wrote": args.output})
        return
    for name, y in zip(inference.names, inference.outputs):
        print(f"output {one_line(name)}: {_array_text(y)}")
    print(f"ran       {inference.target}{RUNNER_TEXT.get(inference.target, '')}")
    print(_text(inference), end="")


def _write_array(path: Path, array: np.ndarray) -> None:
    """Write a ``.npy`` file atomically; bf16, which the format lacks, as fp32."""
    import ml_dtypes
    import numpy as np

    content = io.BytesIO()
    np.save(content, array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array)
    replace_file(path, content.getvalue())


def _array_text(array: np.ndarray) -> str:
    """Dtype, shape and range as text."""
    values = f"{float(array.min()):.6g} .. {float(array.max()):.6g}" if array.size else "no values"
    return f"{array.dtype} {list(array.shape)}, {values}"


def _check_output(args: argparse.Namespace) -> None:
    check_file(args.output, ARRAY, force=args.force)
    for path in (args.inputs, *(content for _, content in args.input_values)):
        if path and os.path.realpath(path) == os.path.realpath(args.output) and not args.force:
            raise OutputError(f"{args.output} is an input too; name another file, or {FORCE} replaces it")


def _text(inference: Inference) -> str:
    """Lines about measured times and about differences between targets."""
    lines = []
    if inference.median_ns is not None:
        threads_text = (
            f" on {inference.threads} of its threads, by {inference.compiler}" if inference.compiler else ""
        )
        ms = inference.median_ns / 1e6
        lines.append(
            f"time      {ms:.3f} ms, the median of {inference.calls} runs of {inference.target}{threads_text}"
        )
    for target, error in inference.max_relative_error.items():
        lines.append(f"compared  with {target}: {error:.1e} of its largest value")
    return "".join(f"{line}\n" for line in lines)
