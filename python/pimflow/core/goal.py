"""What a search is asked for: an objective, a solver and bounds; `placement.Goal` judges plans by it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pimflow.core.options import OptionSet, check_above_zero, option
from pimflow.core.quantities import parse_bytes, parse_energy, parse_latency
from pimflow.core.rewrite import MODES, Mode
from pimflow.errors import UnknownNameError, UsageError

OBJECTIVES = ("latency", "energy", "edp", "memory")
LABEL, EXHAUSTIVE = SOLVERS = ("label", "exhaustive")
SEARCH_SECONDS = 30.0
PIN_MODES = ("gpu", "pim", "split")


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


def _check_pins(_: str, value: Any) -> tuple[tuple[str, str], ...]:
    """Pairs of a layer and how it is done: ``gpu``, ``pim``, ``split``, or ``split:SHARE`` in (0, 1)."""
    pairs = value.items() if isinstance(value, Mapping) else value or ()
    pins = tuple((layer, _normal_pin(layer, how)) for layer, how in pairs)
    return tuple(sorted(dict(pins).items()))


def _normal_pin(layer: str, how: Any) -> str:
    mode, colon, share = str(how).lower().partition(":")
    if mode not in PIN_MODES:
        raise UnknownNameError(f"pin of layer '{layer}'", mode, PIN_MODES)
    if not colon:
        return mode
    try:
        number = float(share)
    except ValueError:
        number = math.nan
    if mode != "split" or not 0 < number < 1:
        raise UsageError(
            f"pin of layer '{layer}': write split:SHARE with the GPU's share in (0, 1), not '{how}'"
        )
    return f"split:{number:g}"


def _parse_pin(text: str, flag: str) -> tuple[str, str]:
    layer, equals, how = text.rpartition("=")
    if not (layer and equals):
        raise UsageError(f"{flag} {text}: write LAYER=gpu, LAYER=pim, LAYER=split or LAYER=split:0.4")
    return layer, _normal_pin(layer, how)


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
        "how long a search is exact, in CPU seconds; what it finds after that is reported with its gap; a "
        "search of every plan that takes longer is refused (default: %(default)g)",
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
    pins: Mapping[str, str] | Sequence[tuple[str, str]] = option(
        (),
        "--pin LAYER=HOW",
        "how a layer is done: gpu, pim, split, or split:0.4 with the GPU's share; all others are searched; "
        "repeat it for each",
        parse=_parse_pin,
        is_mapping=True,
        check=_check_pins,
    )
    primitives: bool = option(False)

    @property
    def how_by_layer(self) -> dict[str, str]:
        """How each pinned layer is done."""
        return dict(self.pins)
