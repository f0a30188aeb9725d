"""Options of `compile` beside those of its search."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from pimflow.commands.shared.inputs import InputOptions
from pimflow.commands.shared.options import CalibrationOptions
from pimflow.core.options import option, require_type, type_check
from pimflow.errors import UsageError

ALL, NONE = "all", "none"  # values of `conventions`
MIN_POINTS = 2  # points of a front
MAX_POINTS = 1000


def check_points(_: str, points: Any) -> int | None:
    """Check a number of points of a front, or None."""
    if points is None:
        return None
    if not isinstance(points, int) or isinstance(points, bool):
        raise UsageError(f"pareto is a number of points, not {points!r}")
    if points < MIN_POINTS:
        raise UsageError(f"--pareto {points}: a front has at least {MIN_POINTS} points")
    if points > MAX_POINTS:
        raise UsageError(f"--pareto {points}: each point is a search; give at most {MAX_POINTS}")
    return points


def _check_tolerance(name: str, value: Any) -> Any:
    require_type(name, value, (Real, type(None)), "a number between 0 and 1 or None")
    if value is not None and not 0 < value < 1:
        raise UsageError(f"{name} {value:g} is not between 0 and 1")
    return value


@dataclass(frozen=True, kw_only=True)
class CompileOptions(CalibrationOptions, InputOptions, group="output"):
    """What is compiled, verified and written; see `pimflow.compile`."""

    pim_channels: str | None = None
    copy_ahead: str | None = None
    tolerance: float | None = option(
        None,
        "--tolerance X",
        "largest error of the outputs, as a fraction of their largest value (default: 2e-3 in fp16, "
        "1e-5 in fp32, or twice what roundings alone do to the reference)",
        check=_check_tolerance,
    )
    pareto: int | None = option(
        None,
        "--pareto N",
        "find a front too: at most N plans, none as good as another in latency, energy and memory; with "
        "-o, DIR/front has their files",
        group="search",
        check=check_points,
    )
    conventions: str | Sequence[str] = option(
        ALL,
        "--conventions none|all|NAME,…",
        "other conventions than the system's to search under once the network is verified and written, "
        "such as pim-launch=0,accounting=paper (default: %(default)s)",
        group="search",
    )
    dump_ir: str | os.PathLike[str] | None = option(
        None,
        "--dump-ir FOLDER",
        "write the module after every pass to a directory, numbered, as TVMScript",
        check=type_check("a directory to write, or None", str, os.PathLike, type(None)),
    )
    check_kernels: bool = option(
        False,
        "--check-kernels",
        "run every CUDA kernel thread by thread on this CPU, and refuse races, accesses out of bounds, "
        "divergent barriers and wrong values; with --target cuda+pim",
    )
    cuda_graphs: bool = option(
        False,
        "--cuda-graphs",
        "capture runs of CUDA kernels at the first inference, and replay them as one launch each; with "
        "--target cuda+pim",
    )
    emit_traces: bool = option(False, "--emit-traces", "write .pim traces, a file a channel (large)")
