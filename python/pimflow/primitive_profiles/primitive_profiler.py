"""Measures convolution primitives and layout transforms on a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import tvm
from tvm import te, tirx

from pimflow import kernel_builds
from pimflow.core.region import ConvGeometry, convolution_kernel
from pimflow.placement.cache import ResultCache, sources_digest
from pimflow.primitive_kernels import kernel
from pimflow.primitive_profiles.primitive_machines import Machine
from pimflow.primitive_profiles.primitive_profile import Device, Move, Profile, is_duration, promising
from pimflow.primitives import PRIMITIVES
from pimflow.primitives.families import BLOCK, tensor_shape

# All that the code of a primitive's kernel depends on, besides its parameters and TVM.
MEASURED = (
    *("primitives.families", "primitives.filters", "primitives.layer", "primitives.primitive"),
    "primitive_kernels",
    *("relay_passes.fused_chain", "relay_passes.keep_registers", "relay_passes.loops"),
    "relay_passes.own_barriers",
    *("relay_passes.schedule_cpu", "relay_passes.schedule_fused_cpu", "relay_passes.schedule_primitives"),
    "relay_passes.task_workspaces",
)
IN_C = ("c_code.c_kernels", "c_code.c_vectors", "relay_passes.plain_c", "relay_passes.vector_calls")
# Before each call all but the input leaves the caches: in a network other layers' filters come between.
COLD = "cache_flush_cpu_non_first_arg"
CALLS = (3, 9)  # the least and the most of which the median counts
ENOUGH_NS = 3e7  # of calls: noise of short ones takes more of them
MOVES_AT_ONCE = 40  # transforms compiled as one module

Progress = Callable[[float], None]


def code_digest(*, in_c: bool = False) -> str:
    """Of what decides how fast a primitive of given parameters is on a device."""
    parts = (*MEASURED, *IN_C) if in_c else MEASURED
    return f"{sources_digest(parts)[:16]} {COLD} {compiler()}"


def compiler() -> str:
    """What makes machine code of kernels."""
    llvm = tvm.get_global_func("target.llvm_version_major")()
    return f"TVM {tvm.__version__}, LLVM {llvm}"


def measure(
    layers: Iterable[ConvGeometry],
    moves: Iterable[Move],
    most: int | None = None,
    cache: ResultCache | None = None,
    progress: Progress = lambda _: None,
    named: Iterable[tuple[str, ConvGeometry]] = (),
    machine: Machine | None = None,
) -> Profile:
    """Times of primitives for `layers`, and of layout transforms.

    Parameters
    ----------
    most : int, optional
        How many primitives of a layer to measure, the promising ones first; all by default. What `cache`
        holds besides is taken too.
    cache : ResultCache, optional
        Where times are kept, by the machine's names, its threads and the code.
    named : iterable of (str, ConvGeometry)
        Primitives to measure for layers besides.
    machine : Machine, optional
        Where to measure; here by default.

    Raises
    ------
    ProfilerError
        If the machine is gone; what it has measured by then is kept.
    """
    machine = machine or Machine()
    device, code = machine.device, code_digest(in_c=machine.in_c)
    times_kept = Measurements(cache, code, device)
    layers, moves = list(dict.fromkeys(layers)), sorted(set(moves))
    every = {layer: promising(layer, device.target) for layer in layers}
    asked = [(p.name, layer) for layer, found in every.items() for p in found]
    known = times_kept.get([*asked, *moves])
    times = {key: known[key] for key in asked if key in known}
    moved = {move: known[move] for move in moves if move in known}
    wanted = [(p.name, layer) for layer, found in every.items() for p in found[:most]]
    missing = [key for key in dict.fromkeys([*wanted, *named]) if key not in times]
    unmoved = [move for move in moves if move not in moved]
    total = len(missing) + len(unmoved)
    failed: dict[tuple[str, ConvGeometry], str] = {}
    for done, key in enumerate(missing, start=1):
        try:
            times[key] = primitive_ns(*key, machine)
        except Exception as error:  # whatever a compiler has to say
            machine.require()
            failed[key] = str(error).strip().splitlines()[-1]
        else:
            times_kept.put({key: times[key]})
        progress(done / total)
    for begin in range(0, len(unmoved), MOVES_AT_ONCE):
        part = unmoved[begin : begin + MOVES_AT_ONCE]
        try:
            found = dict(zip(part, moves_ns(part, machine)))
        except Exception:  # whatever a broken connection raises
            machine.require()
            raise
        moved |= found
        times_kept.put(found)
        progress((len(missing) + begin + len(part)) / total)
    return Profile(device=device, code=code, times_ns=times, moves_ns=moved, failed=failed)


class Measurements:
    """What was measured on a device, in a cache: by what decides it, and by no other code.

    Parameters
    ----------
    cache : ResultCache or None
        None keeps nothing.
    code : str
        Of what decides times besides their keys and the device.
    device : Device
    """

    def __init__(self, cache: ResultCache | None, code: str, device: Device):
        self.cache, self.code, self.device = cache, code, device

    def get(self, keys: Iterable) -> dict:
        """Times by those keys that have one; what is no time was not kept by this."""
        by_cause = {self._cause(key): key for key in keys}
        found = self.cache.get(by_cause, self.code) if self.cache else {}
        return {by_cause[cause]: ns for cause, ns in found.items() if is_duration(ns)}

    def put(self, times_ns: dict) -> None:
        if self.cache:
            self.cache.put({self._cause(key): ns for key, ns in times_ns.items()}, self.code)

    def _cause(self, key: object) -> tuple:
        """A primitive's parameters stand for its name."""
        if isinstance(key, tuple) and key[0] in PRIMITIVES:
            key = (replace(PRIMITIVES[key[0]], name=""), *key[1:])
        return ("cpu", self.device, key)


def primitive_ns(name: str, layer: ConvGeometry, machine: Machine | None = None) -> float:
    """Median of calls of a primitive's kernel, its input in the caches, its filters and output not."""
    primitive, machine = PRIMITIVES[name], machine or Machine()
    if primitive.family == "operator":
        whole = convolution_kernel(layer, "fp32")
        function = kernel_builds.primitive(whole, "fp32", machine.target, machine.device.threads)
    else:
        function = kernel(primitive, layer)
    shapes = [[int(extent) for extent in param.shape] for param in function.params]
    built = _built({"main": function}, machine)
    return _median_ns(built, "main", shapes, machine.cpu)


def moves_ns(moves: Sequence[Move], machine: Machine | None = None) -> list[float]:
    """Median of calls of every transform."""
    machine = machine or Machine()
    built = _built({f"move{n}": transform(move) for n, move in enumerate(moves)}, machine)
    found = []
    for number, (shape, given, taken) in enumerate(moves):
        n, h, w, c = shape
        shapes = [tensor_shape(layout, n, c, h, w) for layout in (given, taken)]
        found.append(_median_ns(built, f"move{number}", shapes, machine.cpu))
    return found


def transform(move: Move) -> tirx.PrimFunc:
    """A tensor in the first layout made into the second."""
    (n, h, w, c), given, taken = move
    x = te.placeholder(tensor_shape(given, n, c, h, w), "float32", name="x")

    def element(*index: tirx.Var) -> tirx.Expr:
        return x[_into(given, *_from(taken, index))]

    made = te.compute(tensor_shape(taken, n, c, h, w), element, name="transformed")
    return te.create_prim_func([x, made], index_dtype_override="int64").without_attr("global_symbol")


def _from(layout: str, index: Sequence[tirx.Expr]) -> tuple[tirx.Expr, ...]:
    """Batch, row, column and channel of an element."""
    if layout == "HWC":
        return tuple(index)
    if layout == "CHW":
        n, c, h, w = index
        return n, h, w, c
    n, block, h, w, c = index
    return n, h, w, block * BLOCK + c


def _into(layout: str, n, h, w, c) -> tuple[tirx.Expr, ...]:
    if layout == "HWC":
        return n, h, w, c
    return (n, c, h, w) if layout == "CHW" else (n, c // BLOCK, h, w, c % BLOCK)


def _built(functions: dict[str, tirx.PrimFunc], machine: Machine) -> tvm.runtime.Module:
    """Compiled for `machine`, by the schedules and passes that a network's kernels take."""
    named = {name: f.with_attr("global_symbol", name) for name, f in functions.items()}
    with machine.target:
        scheduled = machine.schedule(tvm.IRModule(named))
    return machine.build(scheduled)


def _median_ns(
    built: tvm.runtime.Module, name: str, shapes: Sequence[Sequence[int]], device: tvm.runtime.Device
) -> float:
    given = [tvm.runtime.tensor(np.full(shape, 0.5, np.float32), device) for shape in shapes]

    def median_ns(repeat: int) -> float:
        flush = COLD if device.dlpack_device_type() == tvm.cpu().dlpack_device_type() else ""
        timed = built.time_evaluator(name, device, number=1, repeat=repeat, f_preproc=flush)
        return float(timed(*given).median * 1e9)

    return median_ns(int(np.clip(ENOUGH_NS // max(median_ns(1), 1.0), *CALLS)))
