"""What a search is asked for: an objective, a solver and bounds; `placement.Goal` judges plans by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pimflow.core.options import OptionSet, check_above_zero, option
from pimflow.core.quantities import parse_bytes, parse_energy, parse_latency
from pimflow.core.rewrite import MODES, Mode
from pimflow.errors import UnknownNameError, UsageError

OBJECTIVES = ("latency", "energy", "edp", "memory")
LABEL, EXHAUSTIVE = SOLVERS = ("label", "exhaustive")
SEARCH_SECONDS = 30.0


def _check_error(name: str, value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 <= value < math.inf):
        raise UsageError(f"{name} {value!r} is no number of at least zero")
    return value


def _check_modes(_: str, value: Any) -> tuple[Mode, ...]:
    """The modes in the spelling of plans, in the order of `MODES`."""
    modes = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(modes, Sequence) or not all(isinstance(name, str) for name in modes):
        raise UsageError(f"modes are names, such as 'gpu,pim', not {modes!r}")
    for name in modes:
        if name.upper() not in MODES:
            raise UnknownNameError("mode", name, [mode.lower() for mode in MODES])
    allowed = tuple(mode for mode in MODES if mode in {name.upper() for name in modes})
    if Mode.GPU not in allowed:
        raise UsageError(
            f"modes {','.join(modes)} leave out gpu, which what PIM cannot run needs: gpu,{','.join(modes)}"
        )
    return allowed


@dataclass(frozen=True, kw_only=True)
class GoalOptions(OptionSet, group="search"):
    """The options of a goal; see `placement.Goal` for each."""

    objective: str = option(
        "latency",
        "--objective WHAT",
        "what is minimised: latency, energy, edp (latency times energy) or memory (the pool that is built) "
        "(default: %(default)s)",
        choices=OBJECTIVES,
    )
    solver: str = option(
        LABEL,
        "--solver NAME",
        "label: label-setting search over partial plans; exhaustive: every plan, of at most 8 regions "
        "(default: %(default)s)",
        choices=SOLVERS,
    )
    search_seconds: float = option(
        SEARCH_SECONDS,
        "--search-seconds S",
        "how long a search is exact; what it finds after that is reported with its gap (default: "
        "%(default)g)",
        check=check_above_zero,
    )
    max_latency_ns: float | None = option(
        None,
        "--max-latency X[ns|us|ms]",
        "upper bound on the latency of the plan",
        parse=parse_latency,
        check=check_above_zero,
    )
    max_energy_pj: float | None = option(
        None,
        "--max-energy X[pJ|nJ|uJ|mJ]",
        "upper bound on the energy of the plan",
        parse=parse_energy,
        check=check_above_zero,
    )
    max_memory_bytes: float | None = option(
        None,
        "--memory-budget BYTES",
        "upper bound on the memory of the plan, such as 50MiB",
        group="memory",
        parse=parse_bytes,
        check=check_above_zero,
    )
    max_error: float | None = option(
        None,
        "--max-error X",
        "with --decompose: upper bound on the sum of the errors of layers, each a share of the "
        "largest output (with --calibration) or of the norm of the filters",
        check=_check_error,
    )
    modes: Sequence[str] = option(
        MODES,
        "--modes MODE,…",
        f"modes that a layer may have; gpu is always one of them (default: {','.join(MODES).lower()})",
        check=_check_modes,
    )
    primitives: bool = option(False)
