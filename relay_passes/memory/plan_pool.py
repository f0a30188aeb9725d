"""One allocation for all tensors of a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import tvm
from tvm import relax

from pimflow.core.liveness import Liveness
from pimflow.relay_passes.memory.buffers import MainBuffers, TensorBuffer, buffers
from pimflow.relay_passes.memory.keep_views import PART, view_call


class PoolPlacement(Protocol):
    """Offsets of buffers in a pool.

    Attributes
    ----------
    offsets_bytes : mapping of str to int
        By name of the lifetime.
    """

    @property
    def offsets_bytes(self) -> Mapping[str, int]: ...

    @property
    def pool_bytes(self) -> int: ...


@tvm.transform.module_pass(opt_level=0, name="PlanPool")
class PlanPool:
    """Replace allocations by places in one pool; used instead of ``StaticPlanBlockMemory``.

    Parameters
    ----------
    results_apart : bool
        Whether what ``main`` returns lies in storage of its own, so that no inference overwrites the results
        of the one before, if the pool stays. Its place in the pool is then unused.

    Rewrite: ``alloc_tensor(shape) -> alloc_tensor(pool, offset, shape)``, one ``alloc_storage`` at the
    beginning; calls of `KeepViews` become tensors inside others. A kernel that overwrites an operand
    loses its ``noalias`` attribute.
    Preserves: values, names.
    """

    def __init__(self, planner: Callable[[Liveness], PoolPlacement], results_apart: bool = False):
        self.planner, self.results_apart = planner, results_apart

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        main_buffers = buffers(mod)
        placement = self.planner(main_buffers.liveness())
        offsets = placement.offsets_bytes
        places = {b: ("pool", offsets[name]) for b, name in main_buffers.names.items() if name in offsets}
        sizes = {"pool": placement.pool_bytes} if places else {}
        if self.results_apart:
            homes = dict.fromkeys(b.place()[0] for b in main_buffers.names if b.pinned)
            names = {home: f"result_{index}" for index, home in enumerate(homes)}
            for buffer in places:
                home, within_bytes = buffer.place()
                if home in names:
                    places[buffer] = (names[home], within_bytes)
            sizes |= {name: home.size_bytes for home, name in names.items()}
        return with_main(
            mod, with_storage(mod["main"], main_buffers, places, sizes, eager=True), main_buffers
        )


def with_storage(
    main: relax.Function,
    main_buffers: MainBuffers,
    places: Mapping[TensorBuffer, tuple[str, int]],
    storages_bytes: Mapping[str, int],
    *,
    eager: bool,
) -> relax.Function:
    """`main` with its buffers in storage.

    Parameters
    ----------
    places : mapping of Buffer to (str, int)
        Storage of each buffer, and its offset there.
    eager : bool
        Whether all storage is allocated before the first call, or each before its first tensor.
    """
    by_var = {buffer.var: place for buffer, place in places.items()}
    builder = relax.BlockBuilder()
    storages: dict[str, relax.Var] = {}

    def storage(name: str) -> relax.Var:
        """The variable of storage `name`, emitted when it is first needed."""
        if name not in storages:
            size = relax.ShapeExpr([storages_bytes[name]])
            allocated = relax.op.memory.alloc_storage(size, 0, "global", "uint8")
            storages[name] = builder.emit(allocated, name_hint=name)
        return storages[name]

    def emit(var: relax.Var, tensor: relax.Call) -> None:
        """Emit `tensor` as `var`, with offset 0: kernels take no tensors that begin inside their storage."""
        inside = builder.emit(tensor, name_hint=f"{var.name}_inside")
        at_zero = builder.normalize(relax.op.memory.ensure_zero_offset(inside))
        builder.emit_normalized(relax.VarBinding(var, at_zero))

    with builder.function("pimflow_placed", list(main.params)):
        for name in storages_bytes if eager else ():
            storage(name)
        for binding in (b for block in main.body.blocks for b in block.bindings):
            var, value = binding.var, binding.value
            if var in by_var:
                name, offset = by_var[var]
                where, dtype = relax.prim_value(offset), str(var.ty.dtype)
                emit(var, relax.op.memory.alloc_tensor(storage(name), where, var.ty.shape, dtype))
            elif view_call(value) == PART:
                source, offset = value.args
                emit(var, relax.op.memory.view(source, var.ty.shape, relative_byte_offset=offset))
            elif var not in main_buffers.by_var:
                builder.emit_normalized(binding)
        builder.emit_func_output(main.body.body)
    return builder.get()["pimflow_placed"].with_attrs(dict(main.attrs))


def with_main(mod: tvm.IRModule, main: relax.Function, main_buffers: MainBuffers) -> tvm.IRModule:
    """`mod` with another ``main``; kernels that overwrite an operand lose their ``noalias`` attribute."""
    functions = dict(mod.functions_items())
    functions[mod.get_global_var("main")] = main
    for kernel in main_buffers.kernels_in_place:
        name = mod.get_global_var(kernel.name_hint)
        functions[name] = functions[name].with_attr("tirx.noalias", False)
    return tvm.IRModule(functions, attrs=mod.attrs)
