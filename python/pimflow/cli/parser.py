"""What may be typed after ``pimflow``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping

from pimflow.cli import fuse, memory, run, select
from pimflow.errors import UsageError
from pimflow.hardware.system import ACCOUNTINGS, CHARGES, COPIES, PADDINGS, SCHEDULINGS, SPLITS, TIMINGS


def parser(handlers: Mapping[str, Callable[[argparse.Namespace], None]]) -> argparse.ArgumentParser:
    """The command line; ``args.command`` is the handler of the command that was given."""
    whole = argparse.ArgumentParser(prog="pimflow", description="A TVM back end for GPUs whose DRAM computes")
    commands = whole.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=handlers[name], parser=sub)
        sub.add_argument("--json", action="store_true", help="print JSON")
        sub.add_argument("--quiet", action="store_true", help="no progress")
        return sub

    sub = command("compile", "search, compile, run and verify a network")
    sub.add_argument("model", metavar="MODEL", help="name of the zoo ('pimflow models'), .onnx or .pt2 file")
    sub.add_argument("-o", "--output", metavar="DIR", help="compiled directory to write")
    sub.add_argument("--plan", metavar="FILE", help="apply this plan instead of searching")
    sub.add_argument(
        "--explain", metavar="REGION", help="print every candidate of a region, and write nothing"
    )
    _goal_options(sub)
    sub.add_argument(
        "--emit-traces", action="store_true", help="write .pim traces, a file per channel (large)"
    )
    sub.add_argument("--reorder", action="store_true", help=memory.REORDER)
    _input_options(sub)
    _system_options(sub)
    sub.add_argument(
        "--target", default="llvm+pim", help="what to build for: llvm+pim, cuda+pim, c (default: %(default)s)"
    )
    sub.add_argument(
        "--tolerance",
        metavar="X",
        type=float,
        help="largest error of the outputs, as a fraction of their largest value (default: 2e-3 fp16, "
        "1e-5 fp32, or twice what roundings alone do to the reference)",
    )

    _decompose_option(sub)
    _fuse_option(sub)
    _calibration_option(sub)
    sub.add_argument(
        "--select",
        metavar="measured|predicted|mixed|FILE",
        nargs="?",
        const="measured",
        help="for this machine's CPU: a primitive for every convolution that PIM does not do, by times as "
        "'pimflow select --profile' takes them, with these options; with --device cuda for the GPU: "
        "primitives are candidates of the plan, by its times",
    )
    select.choice_options(sub)

    sub = command("decompose", "write a network with decomposed layers as ONNX, to be trained further")
    sub.add_argument("model", metavar="MODEL", help="name of the zoo ('pimflow models') or .onnx file")
    sub.add_argument("-o", "--output", metavar="FILE.onnx", required=True, help="model to write")
    _decompose_request(sub, required=True)
    _calibration_option(sub)
    _goal_options(sub)
    _input_options(sub)
    _system_options(sub)

    sub = command("profile", "time everything that a search needs, and keep it")
    sub.add_argument("models", metavar="MODEL", nargs="+", help="networks of the zoo, .onnx or .pt2 files")
    _fuse_option(sub)
    _input_options(sub)
    _system_options(sub)

    sub = command("sweep", "search networks on every combination of settings of the system")
    sub.add_argument("models", metavar="MODEL", nargs="+", help="networks of the zoo, .onnx or .pt2 files")
    sub.add_argument(
        "--set",
        metavar="NAME=V,V,…",
        action="append",
        required=True,
        dest="settings",
        help="values of a field of the system or its devices: pim_channels=0,4,…,28, pim.timing.nRCDR=10,20",
    )
    sub.add_argument(
        "-o", "--output", metavar="DIR", help="where to write sweep.csv, sweep.json and sweep.png"
    )
    _modes_option(sub)
    _fuse_option(sub)
    _input_options(sub)
    _system_options(sub)

    run.add_arguments(command("run", run.SUMMARY))

    sub = command("simulate", "cycles of a PIM program or command trace")
    sub.add_argument("file", metavar="FILE", help=".pimprog or .pim file")
    sub.add_argument(
        "--pim",
        metavar="NAME|FILE",
        help="device (default: what the file was compiled for; of a .pim trace elsewhere newton-gddr6)",
    )
    sub.add_argument("--timing", help=f"{', '.join(TIMINGS)} (default: strict)")
    sub.add_argument(
        "--profiler",
        metavar="pim=ramulator:PATH",
        action="append",
        default=[],
        help="time it with an installed Ramulator",
    )
    sub.add_argument(
        "--no-gwrite-hiding", action="store_true", help="ramulator-pimflow: charge 64 cycles a GWRITE"
    )

    sub = command("trace", "write the trace of a layer or a compiled network for other tools")
    sub.add_argument(
        "layer",
        metavar="LAYER|DIR|MODEL",
        help="conv:NxCxHxW,OUT,KHxKW[,sS][,pP][,dD], fc:[Nx]IN,OUT, or what 'pimflow compile -o' wrote; "
        "for accel-sim a network too",
    )
    sub.add_argument("--format", required=True, help="pimprog, pim, aim, ramulator2, perfetto, accel-sim")
    sub.add_argument("-o", "--output", metavar="DIR", required=True, help="directory to write")
    sub.add_argument("--pim", metavar="NAME|FILE", help="device (default: the system's)")
    sub.add_argument("--gpu", metavar="NAME|FILE", help="GPU of accel-sim (default: the system's)")
    sub.add_argument("--pim-channels", metavar="N", type=int, help="memory channels with PIM")
    sub.add_argument("--timing", help=f"what picks the loop order: {', '.join(TIMINGS)}")
    sub.add_argument("--scheduling", metavar="LEVEL", help=f"PIM loop orders: {', '.join(SCHEDULINGS)}")
    sub.add_argument("--dtype", help="storage type of a layer, one of the device's")

    sub = command("timeline", "when everything runs, on both devices and the crossbar")
    sub.add_argument(
        "source",
        metavar="DIR|MODEL",
        help="what 'pimflow compile -o' wrote, or a network to search a plan for",
    )
    sub.add_argument("--perfetto", metavar="FILE", help="write it for ui.perfetto.dev")
    sub.add_argument("--plot", metavar="FILE", help="draw it: .png, .svg or .html")
    sub.add_argument("--plan", metavar="FILE", help="of this plan instead of searching")
    _fuse_option(sub)
    _goal_options(sub)
    _input_options(sub)
    _system_options(sub)

    sub = command("memory", memory.SUMMARY)
    memory.add_arguments(sub)
    _fuse_option(sub)
    _input_options(sub)
    _decompose_option(sub)

    sub = command("fuse", fuse.SUMMARY)
    fuse.add_arguments(sub)
    _input_options(sub)

    sub = command("select", select.SUMMARY)
    select.add_arguments(sub)
    _input_options(sub)
    command("models", "list the networks of the zoo")

    sub = command("devices", "list PIM devices, GPUs and systems, or show one with its sources")
    sub.add_argument("device", metavar="NAME|FILE", nargs="?", help="device or system to show")
    return whole


def refuse(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Raise `UsageError` for an option that was given and would be of no account.

    Parameters
    ----------
    names : iterable of str
        Attributes of `args`.
    why : str
        Said after the option.
    """
    for name in names:
        if getattr(args, name) != args.parser.get_default(name):
            raise UsageError(f"--{name.replace('_', '-')}: {why}")


def _goal_options(sub: argparse.ArgumentParser) -> None:
    """What a search is asked for."""
    sub.add_argument(
        "--objective",
        default="latency",
        help="what is minimised: latency, energy, edp, their product (default: %(default)s)",
    )
    sub.add_argument(
        "--solver",
        default="auto",
        help="dp: regions one after the other; ilp: exact where branches overlap; exhaustive: every plan, of "
        "at most 8 regions; auto: dp where there are no branches, else ilp (default)",
    )
    _modes_option(sub)
    sub.add_argument("--max-latency", metavar="X[ns|us|ms]", help="take no plan that is slower")
    sub.add_argument("--max-energy", metavar="X[pJ|nJ|uJ|mJ]", help="take no plan that needs more energy")


def _modes_option(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--modes",
        metavar="MODE,…",
        default="gpu,pim,split,pipeline",
        help="what may be done with layers; gpu is always one of them (default: %(default)s)",
    )


def _fuse_option(sub: argparse.ArgumentParser) -> None:
    """Another kind of candidates."""
    sub.add_argument(
        "--fuse",
        action="store_true",
        help="neighbouring layers may be one GPU kernel over shared memory, in tiles, where that is faster",
    )


def _input_options(sub: argparse.ArgumentParser) -> None:
    """Shapes of what a network takes."""
    sub.add_argument(
        "--shape", metavar="NAME=1,3,224,224", action="append", default=[], help="fix a dynamic input"
    )
    sub.add_argument(
        "--batch", metavar="N", type=int, help="inferences at once, where a network is made for 1"
    )


def _calibration_option(sub: argparse.ArgumentParser) -> None:
    """What a decomposed network is judged on."""
    sub.add_argument(
        "--calibration",
        metavar="FILE.npz",
        help="with --decompose: samples by input name, and perhaps 'labels', on which the report compares "
        "the decomposed network with the original",
    )


def _decompose_request(sub: argparse.ArgumentParser, *, required: bool = False) -> None:
    """What changes the numbers that a network computes."""
    sub.add_argument(
        "--decompose",
        required=required,
        metavar="METHOD:RANK[,first=keep][,fc=decompose][,where=pays]",
        help="layers into chains of smaller ones: METHOD is tucker, cp or tt; RANK a ratio, energy=SHARE, "
        "vbmf, or a .toml file; where=pays: only layers that the search finds cheaper so",
    )


def _decompose_option(sub: argparse.ArgumentParser) -> None:
    """Decomposition, and what works on decomposed layers."""
    _decompose_request(sub)
    sub.add_argument(
        "--optimize-skips",
        action="store_true",
        help="of a decomposed network: skip connections wait in their reduced form, and are restored for "
        "their use",
    )
    sub.add_argument(
        "--skip-criterion",
        default="pool",
        help="pool: what makes the planned pool smaller; paper: what TeMCO's algorithm 1 says "
        "(default: %(default)s)",
    )
    sub.add_argument(
        "--fuse-activations",
        action="store_true",
        help="of a decomposed network: one kernel from the end of a chain over activation and pooling to the "
        "next",
    )


def _system_options(sub: argparse.ArgumentParser) -> None:
    """The system, where times come from, and where they are kept."""
    sub.add_argument("--system", metavar="NAME|FILE", default="pimflow", help="system (default: %(default)s)")
    sub.add_argument("--gpu", metavar="NAME|FILE", help="GPU of the system")
    sub.add_argument("--pim", metavar="NAME|FILE", help="PIM device of the system")
    sub.add_argument("--pim-channels", metavar="N", type=int, help="memory channels with PIM")
    sub.add_argument("--timing", help=f"PIM timing: {', '.join(TIMINGS)}")
    sub.add_argument("--scheduling", metavar="LEVEL", help=f"PIM loop orders: {', '.join(SCHEDULINGS)}")
    sub.add_argument("--copies", help=f"of parts of tensors: {', '.join(COPIES)}")
    sub.add_argument("--padding", help=f"of convolutions on the GPU: {', '.join(PADDINGS)}")
    sub.add_argument("--splits", help=f"of layers, the best or tenths of rows: {', '.join(SPLITS)}")
    sub.add_argument(
        "--accounting",
        help=f"what is charged: {', '.join(ACCOUNTINGS)}, or paper+… with some of {', '.join(CHARGES)}",
    )
    sub.add_argument("--dtype", help="storage type: fp16, fp32")
    sub.add_argument(
        "--profiler",
        metavar="gpu=…|pim=…",
        action="append",
        default=[],
        help="where times come from, e.g. gpu=analytic, pim=ramulator:PATH; may be given for each",
    )
    sub.add_argument("--jobs", metavar="N", type=int, help="worker processes (default: one a processor)")
    sub.add_argument(
        "--executor",
        metavar="processes|dask://HOST:PORT",
        default="processes",
        help="who times PIM programs (default: %(default)s)",
    )
    sub.add_argument("--cache", metavar="FILE|none", help="where times are kept (default: PIMFLOW_CACHE)")
