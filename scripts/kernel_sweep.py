"""One case of the sweep of ``prove_kernels.py``; worker processes find it here, not in a script that runs."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import tvm_ffi
from kernel_cases import KernelCase, cases
from tvm import tirx

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
    kernels, holding, whole : int
        Kernels that no case had before, those of them that hold, and those of which all blocks ran.
    blocks, all_blocks, compared : int
        Sums of those of `KernelCheck`.
    lines : list of str
        One for each kernel that does not hold, or why the case has none.
    cpu_seconds, seconds : float
        Of the processor, and as they pass.
    digests : list of str
        Of the kernels: what no other case checks again.
    commit : str
        That the case was checked on.
    """

    number: int
    group: str
    name: str
    dtype: str
    kernels: int = 0
    holding: int = 0
    whole: int = 0
    blocks: int = 0
    all_blocks: int = 0
    compared: int = 0
    lines: list[str] = field(default_factory=list)
    cpu_seconds: float = 0.0
    seconds: float = 0.0
    digests: list[str] = field(default_factory=list)
    commit: str = ""

    def add(self, check: KernelCheck) -> None:
        """Count a kernel."""
        self.kernels += 1
        self.holding += check.holds
        self.whole += check.holds and check.blocks == check.all_blocks
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


def claim_kernels(folder: Path, results: Iterable[CaseResult]) -> None:
    """Let no case check the kernels that these results are of."""
    for result in results:
        for digest in result.digests:
            (folder / digest).write_text(str(result.number))


def _claims(folder: Path, digest: str, number: int) -> bool:
    """Whether a case is the first that has a kernel: it has the file then, whichever process runs it."""
    path = folder / digest
    try:
        with path.open("x") as file:
            file.write(str(number))
    except FileExistsError:
        return path.read_text() == str(number)  # a worker died, and another one does its case
    return True


def _digest(plain: PlainKernels, name: str, func: tirx.PrimFunc) -> str:
    """A digest of a kernel, and of the tables of integers that its network gives it."""
    digest = hashlib.sha256(str(tvm_ffi.structural_hash(func.without_attr("global_symbol"))).encode())
    for index, values in sorted(plain.constants.get(name, {}).items()):
        if values.dtype.kind in "iu":
            digest.update(f"{index} {values.dtype} {values.shape}".encode() + values.tobytes())
    return digest.hexdigest()[:24]


def check_case(case: KernelCase, number: int, folder: Path) -> CaseResult:
    """Check the kernels of a case that no other case has claimed in a folder."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    result = CaseResult(number=number, group=case.group, name=case.name, dtype=case.dtype)
    try:
        plain = case.make()
        names = {_digest(plain, gv.name_hint, func): gv.name_hint for gv, func in plain.functions().items()}
        new = {digest: name for digest, name in names.items() if _claims(folder, digest, number)}
        for check in check_kernels(plain.schedule(set(new.values())), SWEEP_WORK):
            result.add(check)
        result.digests += new
    except PimflowError as error:
        result.lines.append(f"{case.name} ({case.dtype}): {last_line(error)}")
    except Exception as error:  # a sweep goes on, and shows what is wrong with this case
        result.lines.append(f"{case.name} ({case.dtype}): {type(error).__name__}: {last_line(error)}")
    result.seconds, result.cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    return result


def check_numbered_case(folder: Path, number: int) -> CaseResult:
    """Check a case by its number, for a worker."""
    return check_case(list(cases())[number], number, folder)


def sweep_table(results: Iterable[CaseResult]) -> str:
    """A table of Markdown, a row for each group and type, and one for all."""
    totals = Counter((case.group, case.dtype) for case in cases())
    groups: dict[tuple[str, str], list[CaseResult]] = {key: [] for key in totals}
    for result in results:
        groups[result.group, result.dtype].append(result)
    rows = [
        _row(group, dtype, groups[group, dtype], total)
        for (group, dtype), total in sorted(totals.items())
        if groups[group, dtype]
    ]
    every = [result for members in groups.values() for result in members]
    return markdown(
        (
            *("kernels of", "type", "cases", "of", "kernels", "hold", "all blocks run", "blocks run"),
            *("of all", "values compared", "CPU s", "commits"),
        ),
        [*rows, _row("all", "both", every, totals.total())],
    )


def _row(group: str, dtype: str, members: Sequence[CaseResult], total: int) -> tuple[str | int, ...]:
    """A row of the table of the sweep: of `total` cases, those that are done."""
    return (
        *(group, dtype, len(members), total),
        *(sum(m.kernels for m in members), sum(m.holding for m in members), sum(m.whole for m in members)),
        *(sum(m.blocks for m in members), sum(m.all_blocks for m in members)),
        *(sum(m.compared for m in members), round(sum(m.cpu_seconds for m in members))),
        ", ".join(sorted({m.commit for m in members})),
    )


def summary(results: Sequence[CaseResult]) -> str:
    """What a sweep found, in a line."""
    total = CaseResult(number=-1, group="", name="", dtype="")
    for result in results:
        total.kernels += result.kernels
        total.holding += result.holding
        total.whole += result.whole
        total.cpu_seconds += result.cpu_seconds
        total.lines += result.lines
    return (
        f"{len(results)} cases, {total.kernels} kernels: {total.holding} hold, "
        f"{total.whole} of them with all blocks run and {total.holding - total.whole} with some; "
        f"{total.cpu_seconds:.0f} CPU s, {len(total.lines)} failures"
    )


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str | int]]) -> str:
    """A table, its numbers to the right."""
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [
        f"| {' | '.join(f'{cell:,}' if isinstance(cell, int) else cell for cell in row)} |" for row in rows
    ]
    return "\n".join(lines)
