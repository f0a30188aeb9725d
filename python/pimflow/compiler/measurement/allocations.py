"""Measurements of how the tensors of a network can be allocated (Occamy, section II)."""

from __future__ import annotations

import ctypes
import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax

from pimflow import frontend
from pimflow.compiler import phases
from pimflow.compiler.timing import call_times_ns
from pimflow.core.json_form import report_from
from pimflow.errors import ArtifactError, UsageError, VerificationError
from pimflow.hardware import System
from pimflow.hardware import system as default_system
from pimflow.host import interrupts
from pimflow.pim_backend.runtime import targets
from pimflow.pim_backend.runtime.cuda_binary import compile_kernels
from pimflow.relay_passes.memory.stream_weights import COPY_CALLS, weight_copy

NAIVE = "naive"  # TVM's allocator without a free list: each allocation is one of the device
_ALLOCATE, _BUILTIN = "vm.builtin.alloc_storage", "vm.builtin."
_EMPTY_RUNS = 20  # runs of a program without kernels; each takes microseconds


@dataclass(frozen=True, kw_only=True)
class AllocationRun:
    """A network run with one allocation scheme of its tensors, and of the weights if they are streamed.

    Resident weights are not counted, nor are inputs but in `input_bytes`.

    Attributes
    ----------
    allocation : str
        One of `compiler.phases.ALLOCATIONS`.
    groups : int
        Runs of allocations without a kernel between them (MMG in Occamy, Table I); copies are no kernels.
    peak_bytes : int or None
        Largest number of bytes that the C library had allocated at the begin of a kernel, less those before
        the inference. None on a GPU, and where the library does not report it.
    input_bytes : int
        Size of the inputs, which are allocated before.
    page_faults : float
        Median of minor page faults in an inference: pages that are touched for the first time.
    latency_ns : float
        Median time of an inference.
    allocating_ns : float
        Median time of the same program without its kernels. It touches no pages, since only kernels do.
    """

    allocation: str
    allocations: int
    groups: int
    allocated_bytes: int
    peak_bytes: int | None
    input_bytes: int
    page_faults: float
    latency_ns: float
    allocating_ns: float


def measure_allocations(  # public: what is loaded, where it runs, how often, and what is compared
    model: frontend.Model,
    system: System | None = None,
    *,
    target: str = "llvm+pim",
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    batch: int | None = None,
    runs: int = 5,
    allocations: Sequence[str] = phases.ALLOCATIONS,
) -> dict[str, AllocationRun]:
    """Run the same kernels, none of them on PIM, with each allocation scheme.

    If the system streams weights, each scheme allocates them too, and copies them before they are used.

    Parameters
    ----------
    system : System, optional
        `pimflow.system()` by default.
    target : str
        Target to build for; this machine must have its device.
    runs : int
        Timed inferences of each scheme, in turns.
    allocations : sequence of str
        The schemes, of `compiler.phases.ALLOCATIONS`.

    Raises
    ------
    UsageError
        For less than one run.
    ArtifactError
        If this machine does not have the device, or the kernels cannot be compiled.
    VerificationError
        If the outputs are not bitwise equal.
    """
    _device_target(target, runs)  # raises before the network is loaded
    network = frontend.load(model, shapes, batch).drop_reference()
    cases = {allocation: (network, allocation) for allocation in allocations}
    measured, outputs = measure(cases, system, target=target, runs=runs)
    expected = next(iter(outputs.values()))
    for allocation, arrays in outputs.items():
        if any(a.tobytes() != b.tobytes() for a, b in zip(arrays, expected, strict=True)):
            raise VerificationError(f"{network.name}: allocated {allocation}, other outputs")
    return measured


def measure(
    cases: Mapping[str, tuple[frontend.Network, str]],
    system: System | None = None,
    *,
    target: str = "llvm+pim",
    runs: int = 5,
) -> tuple[dict[str, AllocationRun], dict[str, list[np.ndarray]]]:
    """Run networks that have the same inputs, in turns.

    Parameters
    ----------
    cases : mapping of str to (Network, str)
        By name: a network, and one of `compiler.phases.ALLOCATIONS`.
    system, target, runs
        See `measure_allocations`.

    Returns
    -------
    runs, outputs : dict
        By name.

    Raises
    ------
    UsageError, ArtifactError
        As `measure_allocations`.
    """
    device_target = _device_target(target, runs)
    system = system or default_system()
    inputs = list(next(iter(cases.values()))[0].example_inputs().values())
    programs = {
        name: _InstrumentedProgram(network.module, device_target, system, allocation, inputs)
        for name, (network, allocation) in cases.items()
    }
    outputs = {name: program.outputs() for name, program in programs.items()}
    for program in programs.values():
        program.count_allocations()
    for _ in range(runs):
        for program in programs.values():
            program.time()
    return {name: program.result() for name, program in programs.items()}, outputs


def _device_target(target: str, runs: int) -> tvm.target.Target:
    """The target named `target`; raises if this machine lacks its device, or `runs` is not positive."""
    if runs < 1:
        raise UsageError(f"{runs} runs: give 1 or more")
    resolved = targets.target_by_name(target)
    if not targets.target_device(resolved).exist:
        raise ArtifactError(f"there is no device for {target}; use llvm+pim")
    return resolved


class _InstrumentedProgram:
    """A network built with one allocation scheme, and the same program without kernels."""

    def __init__(
        self,
        mod: tvm.IRModule,
        target: tvm.target.Target,
        system: System,
        allocation: str,
        inputs: list[np.ndarray],
    ):
        self.allocation = allocation
        self.device = targets.target_device(target)
        self.inputs = [tvm.runtime.tensor(np.ascontiguousarray(array), self.device) for array in inputs]
        lowered = phases.lower(mod, target, system, allocation=allocation)
        self.machine, self.instrumented_machine = self._machines(lowered, target)
        self.empty_machine, _ = self._machines(_strip_kernels(lowered), target)
        self.counter = _AllocationCounter()
        self.latencies_ns: list[int] = []
        self.faults: list[int] = []

    def _machines(self, lowered: tvm.IRModule, target: tvm.target.Target) -> list[relax.VirtualMachine]:
        """Two virtual machines of one executable: one to time, one that reports its calls, which is slow."""
        lowering = tvm.transform.Sequential([])
        executable, kernels = compile_kernels(
            lambda: tvm.compile(lowered, target, relax_pipeline=lowering), target
        )
        if kernels.problem:
            raise ArtifactError(kernels.problem)
        module = executable.jit()
        return [relax.VirtualMachine(module, self.device, memory_cfg=NAIVE) for _ in range(2)]

    def run(self, machine: relax.VirtualMachine) -> Any:
        """Run one inference, and wait until the device has finished."""
        result = machine["main"](*self.inputs)
        self.device.sync()
        return result

    def outputs(self) -> list[np.ndarray]:
        """Outputs of one inference."""
        result = self.run(self.machine)
        tensors = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
        return [tensor.numpy() for tensor in tensors]

    def count_allocations(self) -> None:
        """Run once and count allocations."""
        heap = heap_bytes if self.device.dlpack_device_type() == tvm.cpu().dlpack_device_type() else None
        gc.collect()
        gc.freeze()  # else each collection, one a kernel, visits all objects of Python
        try:
            for _ in range(2):  # the first run allocates memory of the hook itself
                gc.collect()
                self.counter = _AllocationCounter(heap)
                with interrupts.defer_interrupts() as hold:
                    self.instrumented_machine.set_instrument(
                        tvm.runtime.convert(hold.allow_interrupts(self.counter))
                    )
                    self.run(self.instrumented_machine)
        finally:
            gc.unfreeze()

    def time(self) -> None:
        """Time one inference and count its page faults."""
        faults, begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter_ns()
        self.run(self.machine)  # its result is freed before the clock is read
        self.latencies_ns.append(time.perf_counter_ns() - begin)
        self.faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)

    def result(self) -> AllocationRun:
        """All figures; times the program without kernels."""
        empty_ns = call_times_ns(lambda: self.run(self.empty_machine), _EMPTY_RUNS)
        return report_from(
            AllocationRun,
            self.counter,
            allocation=self.allocation,
            input_bytes=sum(tensor.numpy().nbytes for tensor in self.inputs),
            page_faults=statistics.median(self.faults),
            latency_ns=statistics.median(self.latencies_ns),
            allocating_ns=statistics.median(empty_ns),
        )


class _AllocationCounter:
    """Hook that a virtual machine calls before and after each of its calls; counts allocations."""

    def __init__(self, heap: Callable[[], int | None] | None = None):
        self.allocations = self.groups = self.allocated_bytes = 0
        self.peak_bytes: int | None = None
        self._heap, self._allocating = heap, False
        self._initial_bytes = heap() if heap else None

    def __call__(self, _function: object, symbol: str, before: bool, _result: object, *args: Any) -> int:
        if not before:
            return 0
        if symbol == _ALLOCATE:
            self.allocations += 1
            self.groups += not self._allocating
            self.allocated_bytes += int(args[1][0])
            self._allocating = True
        elif not symbol.startswith(_BUILTIN):
            self._allocating &= symbol in COPY_CALLS
            if self._heap is not None and self._initial_bytes is not None:
                gc.collect()
                live_bytes = (self._heap() or 0) - self._initial_bytes
                self.peak_bytes = max(live_bytes, self.peak_bytes or 0)
        return 0


class _Mallinfo2(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and later."""

    _NAMES = (
        *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
        *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
    )
    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES]


def heap_bytes() -> int | None:
    """Bytes that this process has allocated and not freed; None if the C library does not report it."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return None
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def _strip_kernels(lowered: tvm.IRModule) -> tvm.IRModule:
    """`lowered` with a ``main`` that only allocates and frees."""
    main = lowered["main"]
    kernels = [f.attrs["global_symbol"] for f in lowered.functions.values() if f is not main]

    def has_no_kernel(binding: relax.Binding) -> bool:
        """Whether a binding calls neither a kernel nor a PIM program, nor copies a weight."""
        call = binding.value
        computes = isinstance(call, relax.Call) and (
            isinstance(call.op, tvm.ir.GlobalVar)
            or (isinstance(call.op, relax.ExternFunc) and str(call.op.global_symbol) in kernels)
            or bool(weight_copy(call))
        )
        return not computes

    blocks = [
        relax.BindingBlock([b for b in block.bindings if has_no_kernel(b)]) for block in main.body.blocks
    ]
    body = relax.SeqExpr(blocks, main.body.body)
    emptied = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    return tvm.IRModule({lowered.get_global_var("main"): emptied})
