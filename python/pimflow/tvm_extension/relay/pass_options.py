"""Arguments of `pimflow.compile` as options in TVM's ``PassContext(config={"pimflow.system": …})``.

TVM is imported inside functions, because its import calls `register`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tvm_ffi

from pimflow import placement
from pimflow.core.plan import Plan
from pimflow.decomposition.request import DecompositionRequest
from pimflow.errors import UsageError
from pimflow.hardware import System, system
from pimflow.host import native


def _parse_system(value: object) -> System:
    if isinstance(value, System):
        return value
    if isinstance(value, str | os.PathLike):
        return system(str(value))
    raise UsageError(f"pimflow.system is a System, a name or a file, not {type(value).__name__}")


def _parse_plan(value: object) -> Plan:
    if isinstance(value, placement.SearchResult):
        return value.plan
    if isinstance(value, Plan):
        return value
    if isinstance(value, str | os.PathLike):
        return Plan.load(str(value))
    raise UsageError(f"pimflow.plan is a Plan, what search returned or a file, not {type(value).__name__}")


def _parse_decompose(value: object) -> DecompositionRequest:
    if isinstance(value, DecompositionRequest):
        return value
    if isinstance(value, str):
        return DecompositionRequest.parse(str(value))
    raise UsageError(f"pimflow.decompose is a Request or its text, not {type(value).__name__}")


def _parse_folder(value: object) -> str:
    if isinstance(value, str | os.PathLike):
        return str(value)
    raise UsageError(f"pimflow.dump_ir is a directory, not {type(value).__name__}")


def _check_criterion(value: object) -> str:
    from pimflow.decomposition.skips import check_criterion

    check_criterion(str(value))
    return str(value)


def _goal_check(name: str) -> Callable[[object], object]:
    """The check of a field of `placement.Goal`; TVM passes texts and numbers of its own types.

    The checked value must be valid too: passes create copies of the current context.
    """

    def check(value: object) -> object:
        """The value as a text or number; raises `UsageError` if it is invalid."""
        is_number = name not in ("objective", "solver", "modes") and isinstance(value, int | float)
        plain = value if is_number else str(value)
        placement.Goal(**{name: plain})
        return plain

    return check


def _flag_check(name: str) -> Callable[[object], bool]:
    def check(value: object) -> bool:
        """The value as a bool; raises `UsageError` if it is none."""
        if isinstance(value, bool) or value in (0, 1):
            return bool(value)
        raise UsageError(f"pimflow.{name} is True or False, not {value}")

    return check


_CHECKS = {
    "pimflow.system": _parse_system,
    "pimflow.plan": _parse_plan,
    "pimflow.decompose": _parse_decompose,
    "pimflow.optimize_skips": _check_criterion,
    "pimflow.fuse_activations": _flag_check("fuse_activations"),
    "pimflow.fuse": _flag_check("fuse"),
    "pimflow.reorder": _flag_check("reorder"),
    "pimflow.objective": _goal_check("objective"),
    "pimflow.solver": _goal_check("solver"),
    "pimflow.search_seconds": _goal_check("search_seconds"),
    "pimflow.modes": _goal_check("modes"),
    "pimflow.primitives": _flag_check("primitives"),
    "pimflow.max_latency_ns": _goal_check("max_latency_ns"),
    "pimflow.max_energy_pj": _goal_check("max_energy_pj"),
    "pimflow.max_memory_bytes": _goal_check("max_memory_bytes"),
    "pimflow.max_error": _goal_check("max_error"),
    "pimflow.dump_ir": _parse_folder,
}


def register() -> None:
    """Register the options with ``PassContext``, with checks of their values."""
    import tvm

    add = native.get("pimflow.register_pass_option")
    compiler = next(iter(Path(tvm.__file__).parent.glob("lib*/libtvm_compiler.*")), None)
    for key, check in _CHECKS.items():
        if compiler is None or not add(str(compiler), key, tvm_ffi.convert(check)):
            raise ImportError(f"TVM {tvm.__version__} takes no option '{key}'; install apache-tvm 0.27")


def current() -> dict[str, Any]:
    """The options of the current context, by name without ``pimflow.``."""
    import tvm

    config = tvm.transform.PassContext.current().config
    return {key.removeprefix("pimflow."): config[key] for key in _CHECKS if key in config}
