"""Options of `infer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pimflow.commands.shared.inputs import InputOptions
from pimflow.core.options import option, type_check
from pimflow.errors import UsageError


def _check_repeat(_: str, repeat: Any) -> Any:
    if repeat < 0:
        raise UsageError(f"--repeat {repeat}: give a number of runs")
    return repeat


@dataclass(frozen=True, kw_only=True)
class RunOptions(InputOptions, group="system"):
    """How a compiled directory is run; see `infer`."""

    target: str | None = option(
        None,
        "--target TARGET",
        "llvm+pim, or what it was compiled for (default); c is built by this machine's compiler",
        check=type_check("the name of a target, such as 'llvm+pim'", str, type(None)),
    )
    threads: int | None = option(
        None, "--threads N", "threads of the C library (default: 1); other targets read TVM_NUM_THREADS"
    )
    repeat: int = option(
        0, "--repeat N", "time N further runs, and print their median", group="output", check=_check_repeat
    )
    compare: bool = option(
        False,
        "--compare",
        "run the other targets that it was built for too; exit code 5 if outputs are further apart than "
        "allowed",
        group="output",
    )
