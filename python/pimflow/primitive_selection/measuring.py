"""Measures convolution primitives, layout transforms and pools on a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import numpy as np
import tvm
from tvm import te, tirx, topi

from pimflow.compiler.measurement import single_kernels
from pimflow.compiler.timing import kernel_times_ns
from pimflow.core.kernel import ConvGeometry, convolution_kernel
from pimflow.errors import last_line
from pimflow.host.result_cache import ResultCache, sources_digest
from pimflow.primitive_selection.machines import Machine
from pimflow.primitive_selection.profile import Device, Move, Pooling, Profile, duration, measuring_order
from pimflow.primitives import PRIMITIVES
from pimflow.primitives.families import tensor_shape
from pimflow.primitives.kernels.prim_func import kernel
from pimflow.primitives.layer import BLOCK

# Modules on which the code of a primitive's kernel depends, besides its parameters and TVM.
MEASURED = (
    *("primitives.families", "primitives.filters", "primitives.layer", "primitives.marks"),
    "primitives.primitive",
    "primitives.kernels",
    "relay_passes.schedules.keep_registers",
    "relay_passes.schedules.loops",
    "relay_passes.schedules.keep_barriers",
    "relay_passes.schedules.drop_checks",
    "relay_passes.schedules.schedule_cpu",
    "relay_passes.schedules.schedule_primitives",
    "relay_passes.schedules.widen_half",
    "relay_passes.schedules.wrap_narrow",
    "relay_passes.structure_cache",
)
IN_C = (
    "compiler.c_code.kernels",
    "compiler.c_code.vectors",
    "relay_passes.c_kernels.plain_c",
    "relay_passes.c_kernels.vector_calls",
)
# Before each call, all operands but the input are flushed from the caches: in a network, other layers have
# run since they were last used.
COLD = "cache_flush_cpu_non_first_arg"
CALLS = (3, 9)  # minimum and maximum number of calls, of which the median counts
MIN_TOTAL_NS = 3e7  # of all calls together: short calls are noisier and need more of them
MOVES_AT_ONCE = 40  # transforms, or pools, compiled as one module
TVM_LAYOUTS = {"HWC": "NHWC", "CHW": "NCHW", "CHWc16": f"NCHW{BLOCK}c"}

Progress = Callable[[float], None]


def code_digest(*, has_c_kernels: bool = False) -> str:
    """Digest of the code that determines how fast a primitive of given parameters is on a device."""
    parts = (*MEASURED, *IN_C) if has_c_kernels else MEASURED
    return f"{sources_digest(parts)[:16]} {COLD} {compiler()}"


def compiler() -> str:
    """Name and version of the compiler of kernels."""
    llvm = tvm.get_global_func("target.llvm_version_major")()
    return f"TVM {tvm.__version__}, LLVM {llvm}"


class Measurer:
    """Measures primitives, layout transforms and pools on a machine.

    Parameters
    ----------
    cache : ResultCache, optional
        Stores times, by the machine's names, its threads and the code.
    machine : Machine, optional
        The machine to measure on; by default this one.
    """

    def __init__(
        self,
        cache: ResultCache | None = None,
        progress: Progress = lambda _: None,
        machine: Machine | None = None,
    ):
        self._machine, self._progress = machine or Machine(), progress
        self._code = code_digest(has_c_kernels=self._machine.has_c_kernels)
        self._measurements = Measurements(cache, self._code, self._machine.device)

    def measure(
        self,
        layers: Iterable[ConvGeometry],
        moves: Iterable[Move],
        max_primitives: int | None = None,
        extra_keys: Iterable[tuple[str, ConvGeometry]] = (),
        pools: Iterable[tuple[Pooling, str]] = (),
    ) -> Profile:
        """Measure primitives for `layers`, layout transforms, and pools in layouts.

        Parameters
        ----------
        max_primitives : int, optional
            How many primitives of a layer to measure, the most promising first; all by default. Times of
            other primitives that the cache has are returned too.
        extra_keys : iterable of (str, ConvGeometry)
            Further primitives to measure, each with its layer.

        Raises
        ------
        ProfilerError
            If the machine is gone; times measured until then are stored.
        """
        device = self._machine.device
        small_keys = [*sorted(set(moves)), *dict.fromkeys(pools)]
        keys_by_layer = {
            layer: [(primitive.name, layer) for primitive in measuring_order(layer, device.target)]
            for layer in dict.fromkeys(layers)
        }
        all_keys = [key for keys in keys_by_layer.values() for key in keys]
        known_ns = self._measurements.get([*all_keys, *small_keys])
        times = {key: known_ns[key] for key in all_keys if key in known_ns}
        requested = [key for keys in keys_by_layer.values() for key in keys[:max_primitives]]
        missing = [key for key in dict.fromkeys([*requested, *extra_keys]) if key not in times]
        untimed = [key for key in small_keys if key not in known_ns]
        total = len(missing) + len(untimed)
        failed = self._measure_primitives(missing, times, total)
        for begin in range(0, len(untimed), MOVES_AT_ONCE):
            part = untimed[begin : begin + MOVES_AT_ONCE]
            known_ns |= self._small_times_ns(part)
            self._progress((len(missing) + begin + len(part)) / total)
        small_times_ns = {key: known_ns[key] for key in small_keys}
        return Profile(
            device=device,
            code=self._code,
            times_ns=times,
            moves_ns={key: ns for key, ns in small_times_ns.items() if not isinstance(key[0], Pooling)},
            pools_ns={key: ns for key, ns in small_times_ns.items() if isinstance(key[0], Pooling)},
            failed=failed,
        )

    def _measure_primitives(
        self,
        keys: Sequence[tuple[str, ConvGeometry]],
        times: dict[tuple[str, ConvGeometry], float],
        total: int,
    ) -> dict[tuple[str, ConvGeometry], str]:
        """Measure primitives and add their times to `times`; returns why others failed."""
        failed: dict[tuple[str, ConvGeometry], str] = {}
        for done, key in enumerate(keys, start=1):
            try:
                times[key] = primitive_ns(*key, self._machine)
            except Exception as error:  # a compiler may raise anything
                self._machine.require_answer()
                failed[key] = last_line(error)
            else:
                self._measurements.put({key: times[key]})
            self._progress(done / total)
        return failed

    def _small_times_ns(self, keys: Sequence[Move | tuple[Pooling, str]]) -> dict:
        """Measure transforms and pools in one module."""
        try:
            times_ns = dict(zip(keys, small_ns(keys, self._machine)))
        except Exception:  # a broken connection may raise anything
            self._machine.require_answer()
            raise
        self._measurements.put(times_ns)
        return times_ns


class Measurements:
    """A cache of measurements on a device; keys contain all that determines a time, also the code's digest.

    Parameters
    ----------
    cache : ResultCache or None
        With None, nothing is stored.
    code : str
        Digest of what determines times, besides their keys and the device.
    """

    def __init__(self, cache: ResultCache | None, code: str, device: Device):
        self.cache, self.code, self.device = cache, code, device

    def get(self, keys: Iterable) -> dict:
        """Stored times, by those of `keys` that have one."""
        keys_by_cache_key = {self._cache_key(key): key for key in keys}
        times_ns = self.cache.get(keys_by_cache_key, self.code, read=duration) if self.cache else {}
        return {keys_by_cache_key[cache_key]: ns for cache_key, ns in times_ns.items()}

    def put(self, times_ns: dict) -> None:
        """Store times, by key."""
        if self.cache:
            self.cache.put({self._cache_key(key): ns for key, ns in times_ns.items()}, self.code)

    def _cache_key(self, key: object) -> tuple:
        """The cache's key: `key` with the primitive's parameters in place of its name, and the device."""
        if isinstance(key, tuple) and key[0] in PRIMITIVES:
            key = (replace(PRIMITIVES[key[0]], name=""), *key[1:])
        return ("cpu", self.device, key)


def primitive_ns(name: str, layer: ConvGeometry, machine: Machine | None = None) -> float:
    """Median time of a primitive's kernel; its input is in the caches, filters and output are not."""
    primitive, machine = PRIMITIVES[name], machine or Machine()
    if primitive.family == "operator":
        conv_kernel = convolution_kernel(layer, "fp32")
        function = single_kernels.primitive(conv_kernel, "fp32", machine.target, machine.device.threads)
    else:
        function = kernel(primitive, layer)
    return _medians_ns([function], machine)[0]


def small_ns(keys: Sequence[Move | tuple[Pooling, str]], machine: Machine) -> list[float]:
    """Median times of layout transforms and pools; inputs are in the caches, outputs are not."""
    functions = [
        pooling_kernel(*key) if isinstance(key[0], Pooling) else transform_kernel(key) for key in keys
    ]
    return _medians_ns(functions, machine)


def _medians_ns(functions: Sequence[tirx.PrimFunc], machine: Machine) -> list[float]:
    medians = []
    for time_ns in timers(functions, machine):
        first_ns = max(time_ns(1)[0], 1.0)
        medians.append(median(time_ns(int(np.clip(MIN_TOTAL_NS // first_ns, *CALLS)))))
    return medians


def build_kernels(functions: Mapping[str, tirx.PrimFunc], machine: Machine) -> tvm.runtime.Module:
    """Build kernels for `machine`, with the schedules and passes of a network's kernels."""
    functions_by_name = {name: f.with_attr("global_symbol", name) for name, f in functions.items()}
    with machine.target:
        scheduled = machine.schedule(tvm.IRModule(functions_by_name))
    return machine.build(scheduled)


def timers(functions: Sequence[tirx.PrimFunc], machine: Machine) -> Iterator[Callable[[int], list[float]]]:
    """For each function, a timer: it makes a number of calls and returns their times in ns."""
    functions_by_name = {f"kernel{n}": function for n, function in enumerate(functions)}
    library = build_kernels(functions_by_name, machine)
    flush = COLD if machine.cpu.dlpack_device_type() == tvm.cpu().dlpack_device_type() else ""
    for name, function in functions_by_name.items():
        shapes = ([int(extent) for extent in param.shape] for param in function.params)
        tensors = [tvm.runtime.tensor(np.full(shape, 0.5, np.float32), machine.cpu) for shape in shapes]
        yield partial(kernel_times_ns, library, name, machine.cpu, tensors, f_preproc=flush)


def pooling_kernel(pool: Pooling, layout: str) -> tirx.PrimFunc:
    """The kernel of a pool in a layout."""
    window, tvm_layout = pool.window, TVM_LAYOUTS[layout]
    shape = tensor_shape(layout, window.n, window.c, window.h, window.w)
    x = te.placeholder(shape, "float32", name="x")
    if not pool.operator.startswith("nn."):
        pixels = [tvm_layout.index("H"), tvm_layout.index("W")]
        if pool.operator == "mean":
            y = topi.divide(topi.sum(x, pixels, keepdims=True), float(window.h * window.w))
        else:
            y = getattr(topi, pool.operator)(x, pixels, keepdims=True)
    else:
        kind = "max" if "max" in pool.operator else "avg"
        size = [window.kh, window.kw]
        sides = [window.stride, window.dilation, window.padding]
        y = topi.nn.pool2d(x, size, *map(list, sides), kind, layout=tvm_layout, count_include_pad=False)
    return te.create_prim_func([x, y], index_dtype_override="int64").without_attr("global_symbol")


def transform_kernel(move: Move) -> tirx.PrimFunc:
    """The kernel that transforms a tensor from the first layout of `move` into the second."""
    (n, h, w, c), source, target = move
    x = te.placeholder(tensor_shape(source, n, c, h, w), "float32", name="x")

    def element(*index: tirx.Var) -> tirx.Expr:
        return x[_layout_index(source, *_logical_index(target, index))]

    result = te.compute(tensor_shape(target, n, c, h, w), element, name="transformed")
    return te.create_prim_func([x, result], index_dtype_override="int64").without_attr("global_symbol")


def _logical_index(layout: str, index: Sequence[tirx.Expr]) -> tuple[tirx.Expr, ...]:
    """Batch, row, column and channel of an element from its index in `layout`."""
    if layout == "HWC":
        return tuple(index)
    if layout == "CHW":
        n, c, h, w = index
        return n, h, w, c
    n, block, h, w, c = index
    return n, h, w, block * BLOCK + c


def _layout_index(
    layout: str, n: tirx.Expr, h: tirx.Expr, w: tirx.Expr, c: tirx.Expr
) -> tuple[tirx.Expr, ...]:
    if layout == "HWC":
        return n, h, w, c
    return (n, c, h, w) if layout == "CHW" else (n, c // BLOCK, h, w, c % BLOCK)
