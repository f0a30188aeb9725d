"""One case of the sweep of ``prove_kernels.py``; worker processes find it here, not in a script that runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import tvm_ffi
from kernel_cases import KernelCase, cases

from pimflow.compiler.kernel_checks.check import KernelCheck, check_kernels
from pimflow.compiler.kernel_checks.kernels import PlainKernels
from pimflow.errors import PimflowError, last_line

Row = TypeVar("Row")
SWEEP_WORK = 1_000_000  # of each kernel of the sweep, see `check_kernel`


@dataclass(kw_only=True)
class CaseResult:
    """What the checks of a case found, and the seconds that they took.

    Attributes
    ----------
    number : int
        Of `cases`.
    kernels, holding : int
        Kernels that no case of this process had before, and those of them that hold.
    blocks, all_blocks, compared : int
        Sums of those of `KernelCheck`.
    lines : list of str
        One for each kernel that does not hold, or why the case has none.
    """

    number: int
    part: str
    name: str
    dtype: str
    kernels: int = 0
    holding: int = 0
    blocks: int = 0
    all_blocks: int = 0
    compared: int = 0
    lines: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, check: KernelCheck) -> None:
        """Count a kernel."""
        self.kernels += 1
        self.holding += check.holds
        self.blocks += check.blocks
        self.all_blocks += check.all_blocks
        self.compared += check.compared
        if not check.holds:
            self.lines.append(f"{self.name} ({self.dtype}): {check.name}: {check.verdict}")


def stored_rows(path: Path | None, kind: type[Row]) -> list[Row]:
    """The rows that a file has; none if it does not exist."""
    if path is None or not path.exists():
        return []
    return [kind(**json.loads(line)) for line in path.read_text().splitlines()]


def store_row(path: Path | None, row: Row) -> None:
    """Add a row to a file, as a line of JSON."""
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(vars(row)) + "\n")


_known: set[int] = set()  # hashes of kernels that this process has checked


def _new_kernels(plain: PlainKernels) -> set[str]:
    """Names of kernels that this process has not checked yet."""
    names = set()
    for gv, func in plain.functions().items():
        key = tvm_ffi.structural_hash(func.without_attr("global_symbol"))
        if key not in _known:
            _known.add(key)
            names.add(gv.name_hint)
    return names


def check_case(case: KernelCase, number: int) -> CaseResult:
    """Check the kernels of a case that were in none before."""
    begin = time.perf_counter()
    result = CaseResult(number=number, part=case.part, name=case.name, dtype=case.dtype)
    try:
        plain = case.make()
        for check in check_kernels(plain.schedule(_new_kernels(plain)), SWEEP_WORK):
            result.add(check)
    except PimflowError as error:
        result.lines.append(f"{case.name} ({case.dtype}): {last_line(error)}")
    result.seconds = time.perf_counter() - begin
    return result


def check_numbered_case(number: int) -> CaseResult:
    """Check a case by its number, for a worker."""
    return check_case(list(cases())[number], number)


def sweep_table(results: Iterable[CaseResult]) -> str:
    """A table of Markdown, a row for each part and one for all."""
    parts: dict[str, list[CaseResult]] = {}
    for result in results:
        parts.setdefault(result.part, []).append(result)
    parts["all"] = [result for members in parts.values() for result in members]
    return markdown(
        ("part", "cases", "kernels", "hold", "blocks run", "of", "values compared", "s"),
        [
            (
                *(part, len(members), sum(m.kernels for m in members), sum(m.holding for m in members)),
                *(sum(m.blocks for m in members), sum(m.all_blocks for m in members)),
                *(sum(m.compared for m in members), round(sum(m.seconds for m in members))),
            )
            for part, members in parts.items()
        ],
    )


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str | int]]) -> str:
    """A table, its numbers to the right."""
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [
        f"| {' | '.join(f'{cell:,}' if isinstance(cell, int) else cell for cell in row)} |" for row in rows
    ]
    return "\n".join(lines)
