"""The GPU kernels of a network, before and after their schedule."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm
from tvm import relax, tirx

from pimflow.compiler.kernel_checks.launch import nodes
from pimflow.compiler.phases import kernel_phases
from pimflow.core.blocks import KernelLimits
from pimflow.fusion.kernels.tile_groups import REGIONS, TileGroups
from pimflow.hardware import System
from pimflow.pim_backend.runtime.targets import target_by_name
from pimflow.relay_passes.flat import main_bindings, operator, substitute
from pimflow.relay_passes.kernels.outline_groups import LAYERS
from pimflow.relay_passes.regions.kernel_groups import OPAQUE
from pimflow.relay_passes.schedules.keep_barriers import TILES
from pimflow.relay_passes.schedules.launch_limits import with_limits
from pimflow.relay_passes.schedules.lower_kernels import lower_kernels
from pimflow.relay_passes.schedules.schedule_gpu import ScheduleGpu

# What lets buffers share memory.
_SHARING = ("tirx.StorageRewrite", "s_tir.MergeSharedMemoryAllocations")

Arrays = Mapping[int, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class ScheduledKernel:
    """A function with its launches.

    Attributes
    ----------
    name : str
    plain : PrimFunc or Function
        Before its schedule: loops without threads; for a fused group its layers, one after the other; for a
        kernel that TVM writes for a GPU alone, such as a sort, its operator.
    lowered : PrimFunc
        As it is emitted, with threads, shared memory and barriers, in one function with its host code.
    separate : PrimFunc, optional
        The same, with each buffer in shared memory of its own; None if that is no different. A fused group's
        tiles lie in one buffer with gaps between them.
    regions_bytes : tuple of (int, int)
        Begin and end of the parts of that buffer that may be accessed; empty if that is all.
    constants : mapping of int to ndarray
        By parameter, values that the network always gives it, such as the table of a fused group's tiles.
    """

    name: str
    plain: tirx.PrimFunc | relax.Function
    lowered: tirx.PrimFunc
    separate: tirx.PrimFunc | None = None
    regions_bytes: tuple[tuple[int, int], ...] = ()
    constants: Arrays = field(default_factory=dict)

    @property
    def roundings(self) -> int:
        """Layers whose results are rounded one after the other."""
        return len((self.plain.attrs or {}).get(LAYERS, [self.name]))


@dataclass(frozen=True, kw_only=True)
class PlainKernels:
    """Kernels before their schedule.

    Attributes
    ----------
    module : IRModule
        Functions of loops; fused groups have their schedule already.
    target : Target
    limits : KernelLimits
        Those of the GPU that kernels are scheduled for.
    groups : mapping of str to Function
        By fused group, the layers that it computes.
    operators : mapping of str to Function
        By kernel that TVM writes with blocks and threads, its operator.
    with_gaps : mapping of str to PrimFunc
        By fused group, its kernel with tiles that lie apart.
    constants : mapping of str to mapping of int to ndarray
        By kernel, see `ScheduledKernel`.
    """

    module: tvm.IRModule
    target: tvm.target.Target
    limits: KernelLimits
    groups: Mapping[str, relax.Function] = field(default_factory=dict)
    operators: Mapping[str, relax.Function] = field(default_factory=dict)
    with_gaps: Mapping[str, tirx.PrimFunc] = field(default_factory=dict)
    constants: Mapping[str, Arrays] = field(default_factory=dict)

    @classmethod
    def from_network(cls, module: tvm.IRModule, system: System, target: str = "cuda+pim") -> PlainKernels:
        """From a module to which a plan was applied, or any canonical module."""
        limits = system.gpu.kernel_limits(system.dtype)
        resolved = with_limits(target_by_name(target), limits)
        phases = kernel_phases(resolved, system.dtype, views=system.uses_views, limits=limits)
        groups: dict[str, relax.Function] = {}
        opaque_calls: dict[str, relax.Call] = {}  # by the variable of its result
        with resolved:
            for phase in phases:
                opaque_calls |= {
                    b.var.name: b.value for b in main_bindings(module) if operator(b.value) in OPAQUE
                }
                if of_layers := _tiled_functions(module, relax.Function):
                    groups, grouped = of_layers, module
                module = phase(module)
            tile = TileGroups(system.dtype, limits, with_gaps=True)
            apart = tvm.transform.Sequential([tile])(grouped) if groups else tvm.IRModule()
        return cls(
            module=module,
            target=resolved,
            limits=limits,
            groups=groups,
            operators=_operators(module, opaque_calls),
            with_gaps={_symbol(func): func for func in _tiled_functions(apart, tirx.PrimFunc).values()},
            constants=_constants(module),
        )

    def functions(self) -> dict[tvm.ir.GlobalVar, tirx.PrimFunc]:
        """The kernels themselves."""
        return {gv: func for gv, func in self.module.functions_items() if isinstance(func, tirx.PrimFunc)}

    def scheduled_module(
        self, functions: Mapping[tvm.ir.GlobalVar, tirx.PrimFunc] | None = None
    ) -> tvm.IRModule:
        """All kernels with blocks and threads, or `functions` of them."""
        with self.target:
            module = tvm.IRModule(self.functions() if functions is None else functions)
            return tvm.transform.Sequential([ScheduleGpu(self.limits)])(module)

    def schedule(self, names: Container[str] | None = None) -> list[ScheduledKernel]:
        """Schedule and lower all kernels, or those called `names`."""
        functions = {
            gv: func for gv, func in self.functions().items() if names is None or gv.name_hint in names
        }
        scheduled = self.scheduled_module(functions)
        lowered = {gv.name_hint: func for gv, func in lower_kernels(scheduled, self.target).functions_items()}
        sharing = {
            gv: func for gv, func in scheduled.functions_items() if _has_shared_memory(lowered[gv.name_hint])
        }
        apart = {gv: self.with_gaps[_symbol(func)] for gv, func in functions.items() if _is_tiled(func)}
        sharing |= dict(self.scheduled_module(apart).functions_items())
        separate = lower_kernels(tvm.IRModule(sharing), self.target, disabled=_SHARING)
        separate_by_name = {gv.name_hint: func for gv, func in separate.functions_items()}
        return [
            ScheduledKernel(
                name=gv.name_hint,
                plain=self.groups.get(_symbol(func)) or self.operators.get(gv.name_hint, func),
                lowered=lowered[gv.name_hint],
                separate=separate_by_name.get(gv.name_hint),
                regions_bytes=_regions_bytes(apart.get(gv)),
                constants=self.constants.get(gv.name_hint, {}),
            )
            for gv, func in functions.items()
        ]


def network_kernels(module: tvm.IRModule, system: System) -> list[ScheduledKernel]:
    """The CUDA kernels of a module to which a plan was applied, or of any canonical module."""
    return PlainKernels.from_network(module, system).schedule()


def _has_shared_memory(func: tirx.PrimFunc) -> bool:
    return any(alloc.buffer.scope().startswith("shared") for alloc in nodes(func.body, tirx.AllocBuffer))


def _tiled_functions(module: tvm.IRModule, kind: type) -> dict[str, Any]:
    """The functions of `kind` in a module that compute fused groups, by name."""
    return {
        gv.name_hint: func
        for gv, func in module.functions_items()
        if isinstance(func, kind) and _is_tiled(func)
    }


def _is_tiled(func: tirx.PrimFunc | relax.Function) -> bool:
    return TILES in (func.attrs or {})


def _regions_bytes(func: tirx.PrimFunc | None) -> tuple[tuple[int, int], ...]:
    ends = [int(byte) for byte in func.attrs[REGIONS]] if func is not None else []
    return tuple(zip(ends[::2], ends[1::2]))


def _symbol(func: tirx.PrimFunc) -> str:
    """The name that a kernel of a fused group was made with."""
    return str((func.attrs or {}).get("global_symbol", ""))


def _operators(module: tvm.IRModule, calls: Mapping[str, relax.Call]) -> dict[str, relax.Function]:
    """By kernel of `module`, the operator whose result the variable of its call had."""
    functions: dict[str, relax.Function] = {}
    for binding in main_bindings(module):
        call = calls.get(binding.var.name)
        if call is None or operator(binding.value) != "call_tir":
            continue
        builder = relax.BlockBuilder()
        operands = {var: relax.Var(var.name, var.ty) for var in relax.analysis.free_vars(call)}
        with builder.function("main", list(operands.values())):
            builder.emit_func_output(builder.emit(substitute(call, operands)))
        functions[binding.value.args[0].name_hint] = builder.get()["main"]
    return functions


def _constants(module: tvm.IRModule) -> dict[str, Arrays]:
    """By kernel, the arguments of its first call that are constants."""
    constants: dict[str, Arrays] = {}
    for binding in main_bindings(module):
        if operator(binding.value) == "call_tir":
            kernel, arguments = binding.value.args[:2]
            constants.setdefault(
                kernel.name_hint,
                {
                    index: np.from_dlpack(argument.value)
                    for index, argument in enumerate(arguments.fields)
                    if isinstance(argument, tvm.ir.GenericConst)
                },
            )
    return constants
