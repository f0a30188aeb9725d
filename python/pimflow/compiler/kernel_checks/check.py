"""Check GPU kernels without a card: races, barriers, bounds, and values against the kernel's plain loops."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm
from tvm import ir, tirx

from pimflow.compiler.kernel_checks.findings import Fault, Finding
from pimflow.compiler.kernel_checks.kernels import ScheduledKernel
from pimflow.compiler.kernel_checks.lanes import KernelExecution
from pimflow.compiler.kernel_checks.launch import KernelLaunch
from pimflow.relay_passes.schedules.schedule_cpu import ScheduleCpu

WORK = 20_000_000  # statements of all threads of a launch that run; of more, some blocks run
MIN_BLOCKS = 4
ROUNDING = {"float16": 2.0**-10, "float32": 2.0**-16, "bfloat16": 2.0**-7}  # of a result, per unit of itself


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
    """

    name: str
    blocks: int
    all_blocks: int
    compared: int
    findings: tuple[Finding, ...]
    unsupported: str = ""


@dataclass
class _Check:
    kernel: ScheduledKernel
    seed: int
    work: int
    findings: dict[tuple[Fault, str], Finding] = field(default_factory=dict)
    blocks: int = 0
    all_blocks: int = 0

    def report(self, fault: Fault, memory: str, element: int) -> None:
        """Keep the first finding of each kind in each memory."""
        self.findings.setdefault((fault, memory), Finding(fault=fault, memory=memory, element=element))

    def choose_blocks(self, launch: KernelLaunch, trips: int) -> npt.NDArray[np.int64]:
        """All blocks, or those at the corners of the grid and some of the others."""
        self.all_blocks += launch.blocks
        count = max(self.work // max(launch.threads * trips, 1), MIN_BLOCKS)
        if launch.blocks <= count:
            chosen = np.arange(launch.blocks)
        else:
            rng = np.random.default_rng(self.seed)
            others = rng.choice(launch.blocks, count, replace=False)
            chosen = np.union1d(launch.border_blocks()[:count], others)
        self.blocks += len(chosen)
        return chosen.astype(np.int64)


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
    arrays = _drawn_arrays(kernel.lowered, results, seed)
    expected = _plain_results(kernel.plain, arrays, results)
    slices = KernelExecution(
        kernel.lowered,
        arrays,
        lambda launch, _: np.arange(launch.blocks),
        check.report,
        addresses_only=True,
    )
    slices.run()
    for variable in results:
        written = np.any([log.written() for log in slices.logs[variable]], axis=0)
        if not written.all():
            check.report(Fault.UNWRITTEN, variable.name, int(written.argmin()))
    KernelExecution(kernel.lowered, arrays, check.choose_blocks, check.report).run()
    compared = sum(
        _compare(variable.name, arrays[variable], expected[variable], check) for variable in results
    )
    return KernelCheck(
        name=kernel.name,
        blocks=check.blocks,
        all_blocks=check.all_blocks,
        compared=compared,
        findings=tuple(check.findings.values()),
    )


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


def _drawn_arrays(func: tirx.PrimFunc, results: list[ir.Var], seed: int) -> dict[ir.Var, npt.NDArray[Any]]:
    """Values of all parameters; results are NaN."""
    rng = np.random.default_rng(seed)
    arrays: dict[ir.Var, npt.NDArray[Any]] = {}
    for parameter in func.params:
        dtype, shape = np.dtype(str(parameter.dtype)), [int(extent) for extent in parameter.shape]
        size = int(np.prod(shape))
        if parameter in results and dtype.kind == "f":
            values = np.full(size, np.nan)
        elif dtype.kind == "f":
            values = rng.uniform(-1, 1, size)
        else:
            values = np.zeros(size)
        arrays[parameter] = values.astype(dtype)
    return arrays


def _plain_results(
    func: tirx.PrimFunc, arrays: dict[ir.Var, npt.NDArray[Any]], results: list[ir.Var]
) -> dict[ir.Var, npt.NDArray[Any]]:
    """What the plain kernel writes, compiled for this CPU."""
    target = tvm.target.Target("llvm")
    with target:
        plain = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        module = tvm.transform.Sequential([ScheduleCpu()])(plain)
        library = tvm.compile(module, target)
    tensors = [tvm.runtime.tensor(array.reshape([int(e) for e in v.shape])) for v, array in arrays.items()]
    library["main"](*tensors)
    return {
        variable: tensor.numpy().reshape(-1)
        for variable, tensor in zip(arrays, tensors)
        if variable in results
    }


def _compare(name: str, values: npt.NDArray[Any], expected: npt.NDArray[Any], check: _Check) -> int:
    """Compare the elements that were computed; returns how many."""
    known = ~np.isnan(values) if values.dtype.kind == "f" else np.ones(values.shape, bool)
    if check.blocks == check.all_blocks:
        known[:] = True
    got, wanted = values[known].astype(np.float64), expected[known].astype(np.float64)
    if not got.size:
        return 0
    unit = ROUNDING.get(str(values.dtype), 0.0)
    bound = unit * (np.abs(wanted) + np.abs(wanted).mean())
    wrong = ~(np.abs(got - wanted) <= bound) & ~(np.isnan(got) & np.isnan(wanted)) & (got != wanted)
    if wrong.any():
        check.report(Fault.WRONG_VALUE, name, int(np.flatnonzero(known)[wrong.argmax()]))
    return int(got.size)
