"""GPU kernels compiled with TVM and timed on the CUDA device of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

import tvm
from tvm import tirx

from pimflow.compiler.measurement.single_kernels import arguments, compile_primitives, primitive
from pimflow.compiler.timing import kernel_times_ns
from pimflow.core.candidate import Provenance
from pimflow.core.kernel import EMPTY_KERNEL, Kernel
from pimflow.errors import ProfilerError, UnknownNameError, UsageError, last_line
from pimflow.hardware import GpuSpec, spec_names
from pimflow.pim_backend.runtime import targets
from pimflow.pim_backend.runtime.cuda_binary import NO_COMPILER, cuda_compiler
from pimflow.primitives import PRIMITIVES
from pimflow.primitives.launches import launches
from pimflow.relay_passes.schedules.schedule_tensor_cores import PRODUCT_TILE
from pimflow.simulators.gpu.model import KernelCost, KernelRequest, kernel_cost, require_wide_weights

Tensors = list[tvm.runtime.Tensor]
L2_STATES = ("cold", "warm")
BATCH = 16  # kernels compiled together
QUERY = ("nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,driver_version", "--format=csv,noheader")


@dataclass(frozen=True, kw_only=True)
class KernelMeasurement:
    """Times of one kernel on a device, less those of an empty kernel.

    Attributes
    ----------
    cold_ns, warm_ns : float
        Median execution time if the L2 is overwritten before every call, and if it has the content that the
        previous call left.
    launch_ns : float
        Time that a launch adds: that of an empty kernel in a queue of empty kernels.
    tile : str
        `BlockTile.to_text` of a product on tensor cores, by which its schedule was made; else empty.
    """

    cold_ns: float
    warm_ns: float
    launch_ns: float
    tile: str = ""


class CudaProfiler:
    """A `GpuProfiler` that measures kernels on a card.

    Every kernel is lowered and scheduled like a network's
    (`compiler.measurement.single_kernels.primitive`), compiled for the device, called once to warm up, and
    timed call by call. Its time is the median, less that of an empty kernel. The launch time is that of an
    empty kernel in a queue, or 0 where `GpuSpec.launch_ns` is 0. DRAM and L2 traffic, which energy needs, are
    those of the analytic model, since they are not measured.

    All launches of a convolution primitive are measured together. The time, less all but one launch, is
    divided among its kernels as the model divides it; its region's epilogue adds in proportion.

    A card cannot run with a part of its memory channels. With all channels a cost is MEASURED. With fewer,
    the measured time is scaled by the ratio of the analytic model, and the cost is ANALYTIC. The cost of a
    kernel that cannot be compiled or run is ANALYTIC without a `KernelCost.device`; `failures` has the
    reason.

    Parameters
    ----------
    l2 : str
        ``cold`` (the default: the model, too, charges all operands to DRAM) or ``warm``.
    progress : callable
        Called with a message for each kernel that fails.
    target : Target, optional
        Another kind of device than CUDA: the CPU, in tests.
    for_card : bool
        Schedule kernels for the architecture of the card, not for that of ``cuda+pim``, which builds have.

    Raises
    ------
    UnknownNameError
        For an unknown state of the L2.
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
        for_card: bool = False,
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
        is_built_so = self.on_cuda and not for_card
        self._schedule_target = targets.target_by_name("cuda+pim") if is_built_so else self.target
        if self.on_cuda and not cuda_compiler():
            raise ProfilerError(f"gpu=cuda: {NO_COMPILER}")
        self._device = targets.target_device(self.target)
        self.failures: dict[Kernel, str] = {}
        self._measured: dict[tuple[Kernel, str, int], KernelMeasurement | None] = {}
        self._empty: tuple[dict[str, float], float] | None = None

    @property
    def card(self) -> str:
        """Name of the device that its driver reports."""
        return str(self._device.device_name) if self.on_cuda else "CPU"

    @property
    def device(self) -> str:
        """The device and its highest clock."""
        clock_khz = self._device.max_clock_rate if self.on_cuda else None
        return f"{self.card} at up to {clock_khz / 1000:.0f} MHz" if clock_khz else self.card

    @property
    def name(self) -> str:
        """Name of this profiler in reports: device and state of the L2."""
        return f"cuda:{self.device}, L2 {self.l2}"

    def costs(self, requests: Sequence[KernelRequest], gpu: GpuSpec, dtype: str) -> list[KernelCost]:
        """The cost of each request, in order.

        Raises
        ------
        UsageError
            If `gpu` does not describe the device: measured and modelled values would be of different cards;
            or for kernels with narrow weights.
        """
        require_wide_weights(requests, "cuda")
        times = self.measure([request.kernel for request in requests], gpu, dtype)
        return [self._cost(r, measured, gpu, dtype) for r, measured in zip(requests, times, strict=True)]

    def measure(self, kernels: Sequence[Kernel], gpu: GpuSpec, dtype: str) -> list[KernelMeasurement | None]:
        """Times of `kernels`, in order; None for a kernel that fails. Equal kernels are measured once."""
        self._require_card(gpu)
        keys = [(_timing_kernel(kernel), dtype, gpu.sms) for kernel in kernels]
        new_keys = [key for key in dict.fromkeys(keys) if key not in self._measured]
        for begin in range(0, len(new_keys), BATCH):
            batch = new_keys[begin : begin + BATCH]
            times = dict(self._batch([kernel for kernel, _, _ in batch], gpu, dtype))
            self._measured |= {key: times.get(key[0]) for key in batch}
        return [self._measured[key] for key in keys]

    def clocks(self) -> dict[str, str]:
        """Current clocks and driver version from nvidia-smi; empty without it."""
        if not self.on_cuda:
            return {}
        try:
            output = subprocess.run(QUERY, capture_output=True, text=True, timeout=30, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return {}
        values = [value.strip() for value in output.splitlines()[0].split(",")]
        return dict(zip(("sm_clock", "memory_clock", "driver"), values))

    def _require_card(self, gpu: GpuSpec) -> None:
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
        has_all_channels = request.channels == gpu.memory_channels
        execution_ns = measured.cold_ns if self.l2 == "cold" else measured.warm_ns
        parts = _kernels_of_measurement(request.kernel)
        execution_ns = max(execution_ns - (len(parts) - 1) * measured.launch_ns, 0.0)
        if not has_all_channels or parts != [request.kernel]:
            total_ns = sum(kernel_cost(part, gpu, dtype=dtype).execution_ns for part in parts)
            execution_ns *= modelled.execution_ns / total_ns
        return dataclasses.replace(
            modelled,
            launch_ns=measured.launch_ns if gpu.launch_ns else 0.0,
            execution_ns=execution_ns,
            tile=None,
            blocks=0,
            provenance=Provenance.MEASURED if has_all_channels else Provenance.ANALYTIC,
            device=self.device,
        )

    def _batch(
        self, kernels: list[Kernel], gpu: GpuSpec, dtype: str
    ) -> Iterator[tuple[Kernel, KernelMeasurement]]:
        """Measurements of the kernels that compile and run."""
        functions = {}
        for kernel in kernels:
            with self._record_failure(kernel):
                functions[kernel] = primitive(kernel, dtype, self._schedule_target, gpu.kernel_limits(dtype))
        for kernel, (module, symbol) in self._compile(functions).items():
            with self._record_failure(kernel):
                yield kernel, self._time(module, symbol, functions[kernel], gpu)

    def _compile(
        self, functions: Mapping[Kernel, tirx.PrimFunc]
    ) -> dict[Kernel, tuple[tvm.runtime.Module, str]]:
        """By kernel, a module and its name there: one module for all, or one a kernel if that fails."""
        names = {kernel: f"kernel_{number}" for number, kernel in enumerate(functions)}
        try:
            module = compile_primitives({names[k]: f for k, f in functions.items()}, self.target)
            return {kernel: (module, name) for kernel, name in names.items()}
        except Exception:  # any error of the compiler; compiling one by one shows which kernel it is
            pass
        modules = {}
        for kernel, function in functions.items():
            with self._record_failure(kernel):
                modules[kernel] = compile_primitives({names[kernel]: function}, self.target), names[kernel]
        return modules

    @contextlib.contextmanager
    def _record_failure(self, kernel: Kernel) -> Iterator[None]:
        """Context of work on one kernel: an exception becomes its entry in `failures`."""
        try:
            yield
        except Exception as error:  # any error of a compiler, a driver or a kernel
            self.failures[kernel] = last_line(error)
            description = kernel.geometry or f"{kernel.kind} kernel of {kernel.output_bytes} bytes"
            self._progress(f"not measured, so analytic: {description}: {self.failures[kernel]}")

    def _time(
        self, module: tvm.runtime.Module, symbol: str, function: tirx.PrimFunc, gpu: GpuSpec
    ) -> KernelMeasurement:
        if self._empty is None:
            empty = primitive(EMPTY_KERNEL, "fp32", self.target, gpu.kernel_limits("fp32"))
            empty_module = compile_primitives({"empty": empty}, self.target)
            tensors = arguments(empty, self._device)
            queued_ns = self._median_ns(empty_module, "empty", tensors, number=100)
            self._empty = (self._states_ns(empty_module, "empty", tensors, gpu), queued_ns)
        empty_ns, launch_ns = self._empty
        total_ns = self._states_ns(module, symbol, arguments(function, self._device), gpu)
        net_ns = {state: max(total_ns[state] - empty_ns[state], 0.0) for state in L2_STATES}
        return KernelMeasurement(
            cold_ns=net_ns["cold"],
            warm_ns=net_ns["warm"],
            launch_ns=launch_ns,
            tile=str((function.attrs or {}).get(PRODUCT_TILE, "")),
        )

    def _states_ns(
        self, module: tvm.runtime.Module, symbol: str, tensors: Tensors, gpu: GpuSpec
    ) -> dict[str, float]:
        l2_bytes = gpu.l2_bytes_per_channel * gpu.memory_channels
        flushed = self._median_ns(module, symbol, tensors, cache_flush_bytes=2 * l2_bytes)
        return {"cold": flushed, "warm": self._median_ns(module, symbol, tensors)}

    def _median_ns(
        self, module: tvm.runtime.Module, symbol: str, tensors: Tensors, number: int = 1, **options: int
    ) -> float:
        options |= {"number": number, "limit_zero_time_iterations": 1}
        return median(kernel_times_ns(module, symbol, self._device, tensors, self.repeats, **options))


def _kernels_of_measurement(kernel: Kernel) -> list[Kernel]:
    """The kernels that are measured with `kernel`: all launches of its primitive, or itself."""
    if not kernel.primitive or kernel.geometry is None:
        return [kernel]
    return launches(PRIMITIVES[kernel.primitive], kernel.geometry)


def _timing_kernel(kernel: Kernel) -> Kernel:
    """The properties of `kernel` that its time depends on: streams of equal size take equal time.

    A product without the geometry of a layer is measured as a convolution that forms the same products.
    """
    if kernel.primitive:
        return _kernels_of_measurement(kernel)[0]
    if kernel.convolution is None:
        return dataclasses.replace(kernel, macs=0, operations=0, multiplications=0)
    return dataclasses.replace(kernel, geometry=kernel.convolution)
