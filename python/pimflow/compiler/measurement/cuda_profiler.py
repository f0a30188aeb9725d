"""GPU kernels compiled with TVM and timed on the CUDA device that is there."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

import tvm

from pimflow.compiler.measurement.single_kernels import arguments, compile_primitives, primitive
from pimflow.compiler.timing import kernel_times_ns
from pimflow.core.candidate import Known
from pimflow.core.region import EMPTY_KERNEL, Kernel
from pimflow.errors import ProfilerError, UnknownNameError, UsageError, last_line
from pimflow.hardware import GpuSpec, spec_names
from pimflow.pim_backend.runtime import targets
from pimflow.pim_backend.runtime.cuda_binary import NO_COMPILER, cuda_compiler
from pimflow.primitives import PRIMITIVES
from pimflow.primitives.launches import launches
from pimflow.simulators.gpu.model import KernelCost, KernelRequest, kernel_cost
from pimflow.simulators.gpu.samples import SIZES

L2_STATES = ("cold", "warm")
BATCH = 16  # kernels that are compiled at once
QUERY = ("nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,driver_version", "--format=csv,noheader")


@dataclass(frozen=True, kw_only=True)
class KernelMeasurement:
    """One kernel on a device, less what measuring an empty kernel the same way takes.

    Attributes
    ----------
    cold_ns, warm_ns : float
        Median execution with the L2 overwritten before every call, and with what the call before left
        in it.
    launch_ns : float
        Time of an empty kernel in a queue of empty kernels: what a launch adds.
    """

    cold_ns: float
    warm_ns: float
    launch_ns: float


class Cuda:
    """A `GpuProfiler` that measures.

    Every kernel is lowered and scheduled as a network's are
    (`compiler.measurement.single_kernels.primitive`), compiled for the device, called once to warm up, and
    timed call by call; the median counts, less that of an empty kernel. The launch is that of an empty kernel
    in a queue; it is free where `GpuSpec.launch_ns` is. DRAM and L2 traffic, which energy needs, stay those
    of the analytic model: nothing here measures them.

    All launches of a convolution primitive are measured together. The time, less all but one launch, is
    divided among its kernels as the model divides it; its region's epilogue adds in proportion.

    A card cannot lend half of its memory channels. With all channels a cost is MEASURED; with fewer, the
    measured time is scaled by what the analytic model says of so many, and the cost is ANALYTIC. ANALYTIC
    without a `KernelCost.device` is what could not be compiled or run; `failures` says why.

    Parameters
    ----------
    l2 : str
        ``cold`` (the default: the model, too, charges all operands to DRAM) or ``warm``.
    progress : callable
        Told of kernels that fail.
    target : Target, optional
        Build for another kind of device than CUDA: the CPU, in tests.

    Raises
    ------
    UnknownNameError
        For another state of the L2.
    ProfilerError
        If there is no CUDA device, or no compiler for it.
    """

    computes: ClassVar[bool] = False
    primitives: ClassVar[bool] = True

    def __init__(
        self,
        l2: str = "cold",
        *,
        progress: Callable[[str], None] = lambda _: None,
        repeats: int = 30,
        target: tvm.target.Target | None = None,
    ):
        if (l2 or "cold") not in L2_STATES:
            raise UnknownNameError("state of the L2", l2, L2_STATES)
        self.l2, self.repeats = l2 or "cold", repeats
        self._progress = progress
        self.target = target or targets.local_cuda()
        if self.target is None:
            raise ProfilerError(
                "gpu=cuda: there is no CUDA device here; use gpu=analytic, gpu=learned, gpu=accel-sim:PATH "
                "or gpu=accel-sim-logs:DIR"
            )
        self.on_cuda = self.target.kind.name == "cuda"
        if self.on_cuda and not cuda_compiler():
            raise ProfilerError(f"gpu=cuda: {NO_COMPILER}")
        self._device = targets.device(self.target)
        self.failures: dict[Kernel, str] = {}
        self._measured: dict[tuple[Kernel, str, int], KernelMeasurement | None] = {}
        self._empty: tuple[dict[str, float], float] | None = None

    @property
    def card(self) -> str:
        """Name of the device, as its driver says it."""
        return str(self._device.device_name) if self.on_cuda else "CPU"

    @property
    def device(self) -> str:
        """The device with its highest clock."""
        clock_khz = self._device.max_clock_rate if self.on_cuda else None
        return f"{self.card} at up to {clock_khz / 1000:.0f} MHz" if clock_khz else self.card

    @property
    def name(self) -> str:
        return f"cuda:{self.device}, L2 {self.l2}"

    def costs(self, requests: Sequence[KernelRequest], gpu: GpuSpec, dtype: str) -> list[KernelCost]:
        """One cost a request, in order.

        Raises
        ------
        UsageError
            If the device is not one that `gpu` describes: measured and modelled values would be mixed.
        """
        times = self.measure([request.kernel for request in requests], gpu, dtype)
        return [self._cost(r, measured, gpu, dtype) for r, measured in zip(requests, times, strict=True)]

    def measure(self, kernels: Sequence[Kernel], gpu: GpuSpec, dtype: str) -> list[KernelMeasurement | None]:
        """Times of `kernels`, in order; None for one that fails. Equal kernels are measured once."""
        self._require(gpu)
        keys = [(_work(kernel), dtype, gpu.sms) for kernel in kernels]
        new = [key for key in dict.fromkeys(keys) if key not in self._measured]
        for begin in range(0, len(new), BATCH):
            batch = new[begin : begin + BATCH]
            times = dict(self._batch([kernel for kernel, _, _ in batch], gpu, dtype))
            self._measured |= {key: times.get(key[0]) for key in batch}
        return [self._measured[key] for key in keys]

    def clocks(self) -> dict[str, str]:
        """Current clocks and driver as nvidia-smi prints them; empty without it."""
        if not self.on_cuda:
            return {}
        try:
            told = subprocess.run(QUERY, capture_output=True, text=True, timeout=30, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return {}
        values = [value.strip() for value in told.splitlines()[0].split(",")]
        return dict(zip(("sm_clock", "memory_clock", "driver"), values))

    def _require(self, gpu: GpuSpec) -> None:
        if not self.on_cuda or self.card in gpu.cuda_names:
            return
        fitting = [name for name in spec_names("gpu") if self.card in GpuSpec.load(name).cuda_names]
        preset = f"--gpu {' or '.join(fitting)}, or " if fitting else ""
        raise UsageError(
            f"gpu=cuda measures the card that is here, '{self.card}', and gpu '{gpu.name}' is another; use "
            f"{preset}a GPU file whose 'cuda_names' has '{self.card}'"
        )

    def _cost(
        self, request: KernelRequest, measured: KernelMeasurement | None, gpu: GpuSpec, dtype: str
    ) -> KernelCost:
        modelled = kernel_cost(request.kernel, gpu, dtype=dtype, channels=request.channels)
        if measured is None:
            return modelled
        whole = request.channels == gpu.memory_channels
        execution_ns = measured.cold_ns if self.l2 == "cold" else measured.warm_ns
        parts = _measured_together(request.kernel)
        execution_ns = max(execution_ns - (len(parts) - 1) * measured.launch_ns, 0.0)
        if not whole or parts != [request.kernel]:
            together_ns = sum(kernel_cost(part, gpu, dtype=dtype).execution_ns for part in parts)
            execution_ns *= modelled.execution_ns / together_ns
        return dataclasses.replace(
            modelled,
            launch_ns=measured.launch_ns if gpu.launch_ns else 0.0,
            execution_ns=execution_ns,
            tile=None,
            blocks=0,
            known=Known.MEASURED if whole else Known.ANALYTIC,
            device=self.device,
        )

    def _batch(
        self, kernels: list[Kernel], gpu: GpuSpec, dtype: str
    ) -> Iterator[tuple[Kernel, KernelMeasurement]]:
        """Measurements of those that compile and run."""
        functions = {}
        for kernel in kernels:
            with self._failing(kernel):
                functions[kernel] = primitive(kernel, dtype, self.target, gpu.sms)
        for kernel, (module, symbol) in self._compiled(functions).items():
            with self._failing(kernel):
                yield kernel, self._timed(module, symbol, functions[kernel], gpu)

    def _compiled(self, functions: dict) -> dict[Kernel, tuple[tvm.runtime.Module, str]]:
        """Modules with the kernels' names in them: one for all, or one each where that fails."""
        names = {kernel: f"kernel_{number}" for number, kernel in enumerate(functions)}
        try:
            module = compile_primitives({names[k]: f for k, f in functions.items()}, self.target)
            return {kernel: (module, name) for kernel, name in names.items()}
        except Exception:  # whatever the compiler's parts raise; which kernel it was shows one by one
            pass
        modules = {}
        for kernel, function in functions.items():
            with self._failing(kernel):
                modules[kernel] = compile_primitives({names[kernel]: function}, self.target), names[kernel]
        return modules

    @contextlib.contextmanager
    def _failing(self, kernel: Kernel) -> Iterator[None]:
        """Work on one kernel: an exception becomes the kernel's entry in `failures`."""
        try:
            yield
        except Exception as error:  # whatever a compiler, a driver or a kernel raises
            self.failures[kernel] = last_line(error)
            what = kernel.geometry or f"{kernel.kind} kernel of {kernel.output_bytes} bytes"
            self._progress(f"not measured, so analytic: {what}: {self.failures[kernel]}")

    def _timed(self, module: tvm.runtime.Module, symbol: str, function, gpu: GpuSpec) -> KernelMeasurement:
        if self._empty is None:
            empty = primitive(EMPTY_KERNEL, "fp32", self.target, gpu.sms)
            alone = compile_primitives({"empty": empty}, self.target)
            tensors = arguments(empty, self._device)
            queued_ns = self._median_ns(alone, "empty", tensors, number=100)
            self._empty = (self._states_ns(alone, "empty", tensors, gpu), queued_ns)
        empty_ns, launch_ns = self._empty
        taken_ns = self._states_ns(module, symbol, arguments(function, self._device), gpu)
        less = {state: max(taken_ns[state] - empty_ns[state], 0.0) for state in L2_STATES}
        return KernelMeasurement(cold_ns=less["cold"], warm_ns=less["warm"], launch_ns=launch_ns)

    def _states_ns(self, module, symbol: str, tensors: list, gpu: GpuSpec) -> dict[str, float]:
        l2_bytes = gpu.l2_bytes_per_channel * gpu.memory_channels
        flushed = self._median_ns(module, symbol, tensors, cache_flush_bytes=2 * l2_bytes)
        return {"cold": flushed, "warm": self._median_ns(module, symbol, tensors)}

    def _median_ns(self, module, symbol: str, tensors: list, number: int = 1, **options: int) -> float:
        options |= {"number": number, "limit_zero_time_iterations": 1}
        return median(kernel_times_ns(module, symbol, self._device, tensors, self.repeats, **options))


def _measured_together(kernel: Kernel) -> list[Kernel]:
    """The kernels measured together for `kernel`: for a launch of a primitive, all of its launches."""
    return launches(PRIMITIVES[kernel.primitive], kernel.geometry) if kernel.primitive else [kernel]


def _work(kernel: Kernel) -> Kernel:
    """The part of `kernel` that decides its time: streams of equally many bytes take equally long.

    A product that is no layer with a geometry is measured as a convolution that forms the same products.
    """
    if kernel.primitive:
        return _measured_together(kernel)[0]
    if kernel.convolution is None:
        return dataclasses.replace(kernel, macs=0, operations=0, multiplications=0)
    return dataclasses.replace(kernel, geometry=kernel.convolution)


def kernel_rows(
    kernels: Sequence[tuple[str, Kernel]], profiler: Cuda, gpu: GpuSpec, dtype: str, models: Sequence
) -> list[dict[str, object]]:
    """Measured times of named kernels beside what models say, all memory channels, times in ns.

    Returns
    -------
    list of dict
        ``device``, ``kernel``, ``dtype``, ``kind`` and sizes as `simulators.gpu.samples` reads them,
        ``cold_ns``, ``warm_ns``, ``launch_ns``; for every model ``NAME_ns``, its execution, and
        ``NAME_ratio``, that over the measured time in the profiler's state of the L2. Times are None for a
        kernel that fails.
    """
    requests = [KernelRequest(kernel, gpu.memory_channels) for _, kernel in kernels]
    measured = profiler.measure([kernel for _, kernel in kernels], gpu, dtype)
    told = {model.name: model.costs(requests, gpu, dtype) for model in models}
    rows = []
    for at, ((name, kernel), times) in enumerate(zip(kernels, measured, strict=True)):
        row: dict[str, object] = {"device": profiler.device, "kernel": name, "dtype": dtype}
        row |= {key: getattr(kernel, key) for key in ("kind", *SIZES)}
        taken = dataclasses.asdict(times) if times else dict.fromkeys(("cold_ns", "warm_ns", "launch_ns"))
        row |= taken
        for model, costs in told.items():
            modelled_ns = costs[at].execution_ns
            row[f"{model}_ns"] = modelled_ns
            real_ns = taken[f"{profiler.l2}_ns"]
            row[f"{model}_ratio"] = modelled_ns / real_ns if real_ns else None
        rows.append(row)
    return rows
