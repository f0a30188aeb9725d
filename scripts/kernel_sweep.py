"""One case of the sweep of ``prove_kernels.py``; worker processes find it here, not in a script that runs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import tvm_ffi
from kernel_cases import KernelCase, cases

from pimflow.compiler.kernel_checks.check import KernelCheck, check_kernels
from pimflow.compiler.kernel_checks.kernels import PlainKernels
from pimflow.errors import PimflowError, last_line

SWEEP_WORK = 1_000_000  # of each kernel of the sweep, see `check_kernel`


@dataclass
class CaseResult:
    """What the checks of a case found, and the seconds that they took."""

    part: str
    name: str
    dtype: str
    checks: list[KernelCheck] = field(default_factory=list)
    problem: str = ""
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """A line for each kernel that does not hold."""
        faulty = [f"{check.name}: {check.verdict}" for check in self.checks if not check.holds]
        return [
            f"{self.name} ({self.dtype}): {text}" for text in ([self.problem] if self.problem else faulty)
        ]


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


def check_case(case: KernelCase) -> CaseResult:
    """Check the kernels of a case that were in none before."""
    begin, result = time.perf_counter(), CaseResult(case.part, case.name, case.dtype)
    try:
        plain = case.make()
        result.checks = list(check_kernels(plain.schedule(_new_kernels(plain)), SWEEP_WORK))
    except PimflowError as error:
        result.problem = last_line(error)
    result.seconds = time.perf_counter() - begin
    return result


def check_numbered_case(number: int) -> CaseResult:
    """Check a case by its number, for a worker."""
    return check_case(list(cases())[number])
