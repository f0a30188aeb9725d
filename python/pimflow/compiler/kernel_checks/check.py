"""Check GPU kernels without a card: races, barriers, bounds, and values against the kernel's plain loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from tvm import ir, tirx

from pimflow.compiler.build import apply_search_result
from pimflow.compiler.kernel_checks.access_log import AccessLog, Bools, Report
from pimflow.compiler.kernel_checks.findings import Fault, Finding
from pimflow.compiler.kernel_checks.kernels import ScheduledKernel, network_kernels
from pimflow.compiler.kernel_checks.lanes import KernelExecution
from pimflow.compiler.kernel_checks.launch import KernelLaunch, Purpose, launch_statements, nodes
from pimflow.compiler.kernel_checks.parameter_values import parameter_values
from pimflow.compiler.kernel_checks.plain import plain_results
from pimflow.compiler.kernel_checks.threads import element_type, is_floating
from pimflow.errors import UnsupportedOpError, UsageError, VerificationError
from pimflow.frontend import Network
from pimflow.pim_backend.runtime.targets import target_by_name
from pimflow.placement import SearchResult

WORK = 4_000_000  # statements of all threads of a launch that run; of more, some blocks run
MIN_BLOCKS = 4
INTEGER_CHAIN = 16  # times `WORK`, since what some blocks of such a chain leave unknown is not compared
SHARED_BLOCKS = 4  # blocks at borders that run with separate buffers in shared memory
# Of a result, per unit of itself.
ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-16, "float64": 2.0**-45}


@dataclass(frozen=True, kw_only=True)
class KernelCheck:
    """What the check of a kernel ran, and what it found.

    Attributes
    ----------
    name : str
    blocks, all_blocks : int
        Blocks that ran, and those of all launches. Which elements are written was checked for all.
    compared : int
        Elements of results that were compared with the plain kernel.
    findings : tuple of Finding
    unsupported : str
        Why the kernel could not run; empty if it ran.
    unknown : tuple of str
        Results that were not compared: they depend on integers that blocks write which did not run.
    """

    name: str
    blocks: int
    all_blocks: int
    compared: int
    findings: tuple[Finding, ...]
    unsupported: str = ""
    unknown: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the kernel ran, and nothing was found."""
        return not self.findings and not self.unsupported

    @property
    def verdict(self) -> str:
        """What was found, or that nothing was."""
        return self.unsupported or "; ".join(map(str, self.findings)) or f"holds{self.omission}"

    @property
    def omission(self) -> str:
        """What the check left out; empty if nothing."""
        if not self.unknown:
            return ""
        blocks = f"{self.blocks:,} of {self.all_blocks:,} blocks ran"
        return f", but values of {', '.join(self.unknown)} are not compared: {blocks}"


@dataclass
class _Check:
    kernel: ScheduledKernel
    seed: int
    work: int
    findings: dict[tuple[Fault, str], Finding] = field(default_factory=dict)
    blocks: int = 0
    all_blocks: int = 0
    partial: set[ir.Var] = field(default_factory=set)  # memories of which some writers did not run
    unknown: set[ir.Var] = field(default_factory=set)  # memories of what comes from such integers

    def report(self, fault: Fault, memory: str, element: int) -> None:
        """Keep the first finding of each kind in each memory."""
        self.findings.setdefault((fault, memory), Finding(fault=fault, memory=memory, element=element))

    def report_outside(self, fault: Fault, memory: str, element: int) -> None:
        """Report an access out of bounds alone."""
        if fault is Fault.OUT_OF_BOUNDS:
            self.report(fault, memory, element)

    @property
    def _is_chain(self) -> bool:
        """Whether launches read what others write."""
        return len(launch_statements(self.kernel.lowered.body)) > 1

    @property
    def has_unknown_workspaces(self) -> bool:
        """Whether a launch may have read what no block wrote, as those that write it did not all run."""
        return self._is_chain and self.blocks < self.all_blocks

    @property
    def _has_integer_results(self) -> bool:
        """Whether a launch writes integers to global memory, which cannot say that they are unknown."""
        stores = nodes(self.kernel.lowered.body, tirx.BufferStore)
        return any(store.buffer.scope() == "global" and not _has_nan(store.buffer) for store in stores)

    def choose_blocks(self, launch: KernelLaunch, trips: int) -> npt.NDArray[np.int64]:
        """All blocks, or those at the corners of the grid and some of the others."""
        self.all_blocks += launch.blocks
        count = max(self.work // max(launch.threads * trips, 1), MIN_BLOCKS)
        if self._is_chain and self._has_integer_results:
            count *= INTEGER_CHAIN
        if launch.blocks <= count:
            chosen = np.arange(launch.blocks)
        else:
            rng = np.random.default_rng(self.seed)
            others = rng.choice(launch.blocks, count, replace=False)
            chosen = np.union1d(launch.borders, others)
        self.blocks += len(chosen)
        self._trace_unknown(launch, len(chosen) == launch.blocks)
        return chosen.astype(np.int64)

    def _trace_unknown(self, launch: KernelLaunch, is_whole: bool) -> None:
        """Keep which memories have values that come from what was not written.

        Floats are NaN there, and so is what is computed from them; integers look like any other.
        """
        missing = launch.memories & self.partial
        if launch.memories & self.unknown or not all(map(_has_nan, missing)):
            self.unknown |= launch.results
        elif missing:
            self.unknown |= {result for result in launch.results if not _has_nan(result)}
        if not is_whole:
            self.partial |= launch.results


def check_kernel(kernel: ScheduledKernel, seed: int = 0, work: int = WORK) -> KernelCheck:
    """Run a kernel thread by thread on drawn values; see `KernelCheck`.

    Parameters
    ----------
    work : int
        Statements of all threads that run at most, about; of larger launches, only some blocks run, always
        those at the corners of the grid.
    """
    check = _Check(kernel, seed, work)
    results = _results(kernel.lowered)
    arrays = parameter_values(kernel, results, seed)
    expected = plain_results(kernel.plain, arrays, results)
    slices = KernelExecution(
        kernel.lowered,
        arrays,
        lambda launch, _: np.arange(launch.blocks),
        check.report,
        purpose=Purpose.RESULTS,
    )
    slices.run()
    for variable in results:
        written = slices.written[variable]
        if not written.all():
            check.report(Fault.UNWRITTEN, variable.name, int(written.argmin()))
    _separate_execution(kernel, arrays, check.report_outside, Purpose.BOUNDS)
    execution = KernelExecution(kernel.lowered, arrays, check.choose_blocks, check.report)
    execution.run()
    compared = 0
    for variable in (result for result in results if result not in check.unknown):
        values, known = arrays[variable], execution.written[variable]
        if check.has_unknown_workspaces and is_floating(values.dtype):
            known &= ~np.isnan(values)
        compared += _compare(variable.name, values, expected[variable], known, check)
    return KernelCheck(
        name=kernel.name,
        blocks=check.blocks,
        all_blocks=check.all_blocks,
        compared=compared,
        findings=tuple(check.findings.values()),
        unknown=tuple(result.name for result in results if result in check.unknown),
    )


def check_kernels(kernels: Iterable[ScheduledKernel], work: int = WORK) -> Iterator[KernelCheck]:
    """Check kernels one by one; one that cannot run says why. For `work` see `check_kernel`."""
    for kernel in kernels:
        try:
            yield check_kernel(kernel, work=work)
        except UnsupportedOpError as error:
            yield KernelCheck(
                name=kernel.name, blocks=0, all_blocks=0, compared=0, findings=(), unsupported=str(error)
            )


def require_cuda(option: str, target: str) -> None:
    """Raise `UsageError` if `target` has no CUDA kernels, which `option` is about."""
    if target_by_name(target).kind.name != "cuda":
        raise UsageError(f"--{option.replace('_', '-')} is about CUDA kernels; give --target cuda+pim")


def require_kernels(network: Network, search_result: SearchResult) -> int:
    """Check the CUDA kernels of a network that is built by a plan; returns how many there are.

    Raises
    ------
    VerificationError
        If one does not hold.
    """
    planned_module = apply_search_result(network.module, search_result)
    checks = list(check_kernels(network_kernels(planned_module, search_result.system)))
    faulty = [check for check in checks if not check.holds]
    if faulty:
        others = f" ({len(faulty) - 1} more kernels do not hold)" if len(faulty) > 1 else ""
        raise VerificationError(f"GPU kernel '{faulty[0].name}': {faulty[0].verdict}{others}")
    return len(checks)


def shared_elements(kernel: ScheduledKernel, seed: int = 0) -> dict[ir.Var, int]:
    """By buffer of `ScheduledKernel.separate` in shared memory, the elements up to the last that is used."""
    arrays = parameter_values(kernel, _results(kernel.lowered), seed)
    execution = _separate_execution(kernel, arrays, lambda *_: None)
    return {} if execution is None else execution.shared_elements()


def used_regions(kernel: ScheduledKernel, seed: int = 0) -> tuple[tuple[int, int], ...]:
    """`ScheduledKernel.regions_bytes`, each up to the last byte that is written; empty ones are left out."""
    arrays = parameter_values(kernel, _results(kernel.lowered), seed)
    execution = _separate_execution(kernel, arrays, lambda *_: None)
    written = execution.written_bytes() if execution is not None else np.zeros(0, bool)
    regions = ((begin, np.flatnonzero(written[begin:end])) for begin, end in kernel.regions_bytes)
    return tuple((begin, begin + int(used[-1]) + 1) for begin, used in regions if used.size)


def run_borders(kernel: ScheduledKernel, make_log: Callable[..., AccessLog]) -> None:
    """Run blocks at borders of a kernel, with logs of accesses that another judges."""

    def choose_blocks(launch: KernelLaunch, _: int) -> npt.NDArray[np.int64]:
        """Some blocks at borders."""
        return np.array(launch.borders[:SHARED_BLOCKS], np.int64)

    arrays = parameter_values(kernel, _results(kernel.lowered), 0)
    KernelExecution(kernel.lowered, arrays, choose_blocks, lambda *_: None, make_log=make_log).run()


def _separate_execution(
    kernel: ScheduledKernel,
    arrays: Mapping[ir.Var, npt.NDArray[Any]],
    report: Report,
    purpose: Purpose = Purpose.VALUES,
) -> KernelExecution | None:
    """Run blocks at borders with each buffer in shared memory of its own; None if there are none."""
    if kernel.separate is None:
        return None
    copies = {
        parameter: arrays[variable].copy() for parameter, variable in zip(kernel.separate.params, arrays)
    }

    def choose_blocks(launch: KernelLaunch, _: int) -> npt.NDArray[np.int64]:
        """Some blocks at borders."""
        return np.array(launch.borders[:SHARED_BLOCKS], np.int64)

    execution = KernelExecution(
        kernel.separate,
        copies,
        choose_blocks,
        report,
        regions_bytes=kernel.regions_bytes,
        purpose=purpose,
    )
    execution.run()
    return execution


def _has_nan(buffer: ir.Var) -> bool:
    """Whether a buffer has floats, which say where nothing was written."""
    return is_floating(element_type(str(buffer.dtype))[0])


def _results(func: tirx.PrimFunc) -> list[ir.Var]:
    """The parameters that a function writes to."""
    import tvm_ffi

    written: list[ir.Var] = []
    aliases: dict[ir.Var, ir.Var] = {}
    tvm_ffi.structural_walk(
        func.body,
        [
            ((tirx.BufferStore,), lambda store: written.append(store.buffer)),
            ((tirx.DeclBuffer,), lambda decl: aliases.update({decl.buffer: decl.data.args[0]})),
        ],
        order="pre",
    )
    roots = {aliases.get(buffer, buffer) for buffer in written}
    return [parameter for parameter in func.params if parameter in roots]


def _compare(
    name: str, values: npt.NDArray[Any], expected: npt.NDArray[Any], known: Bools, check: _Check
) -> int:
    """Compare the elements that were computed; returns how many."""
    got, wanted = values[known], expected[known]
    wrong = got != wanted
    if is_floating(values.dtype):
        got, wanted = got.astype(np.float64), wanted.astype(np.float64)
        unit = ROUNDING.get(str(values.dtype), 0.0) * check.kernel.roundings
        magnitudes = np.abs(wanted)
        finite = magnitudes[np.isfinite(magnitudes)]
        bound = unit * (magnitudes + (finite.mean() if finite.size else 0))
        with np.errstate(invalid="ignore"):  # infinities: equal ones are right, others are wrong
            is_near = np.isfinite(magnitudes) & (np.abs(got - wanted) <= bound)
        wrong &= ~is_near & ~(np.isnan(got) & np.isnan(wanted))
    if wrong.any():
        check.report(Fault.WRONG_VALUE, name, int(np.flatnonzero(known)[wrong.argmax()]))
    return int(got.size)
