"""Runs of GPU kernels that are launched as one CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm import relax, tirx

from pimflow.relay_passes.flat import operator

CAPTURE, CACHE = "pimflow.runtime.run_or_capture", "pimflow.runtime.cached_storage"
MIN_LAUNCHES = 2  # a graph of one kernel saves no launch
# What gives a tensor in the storage of its operand, or its operand under another name.
_PLACES = ("memory.alloc_tensor", "memory.view", "memory.ensure_zero_offset", "reshape")


@tvm.transform.module_pass(opt_level=0, name="CaptureLaunches")
class CaptureLaunches:
    """Make a function of each run of kernels whose operands have the same addresses in every inference.

    The runtime captures such a function in a CUDA graph when it first runs, and replays it afterwards
    (`pim_backend/src/cuda_graphs.cc`). Addresses are the same in storage that holds no result of ``main``: it
    is allocated once, and kept. Kernels that read an input or write a result, and all other calls, such as
    those of PIM, stay in ``main``, between the runs.

    Rewrite: ``pool = alloc_storage(n); …; f(x, y); g(y, z) -> (pool,) = cached_storage(allocate); …;
    run_or_capture(captured, (x, y, z), 0)``, with ``captured(x, y, z): f(x, y); g(y, z)``.
    Preserves: values, names, the order of kernels; runs of fewer than `MIN_LAUNCHES`.
    """

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        return _Capture(mod).module()


class _Capture:
    """Writes ``main`` anew, and the functions of its runs."""

    def __init__(self, mod: tvm.IRModule):
        self.mod, self.builder = mod, relax.BlockBuilder(mod)
        self.bindings = [b for block in mod["main"].body.blocks for b in block.bindings]
        self.fixed = self._fixed_variables()
        self.run: list[relax.Call] = []
        self.runs = 0

    def module(self) -> tvm.IRModule:
        """The module after the pass."""
        main = self.mod["main"]
        if not any(len(run) >= MIN_LAUNCHES for run in self._runs()):
            return self.mod
        with self.builder.function("pimflow_captured", list(main.params)):
            self._keep_storage()
            for binding in self.bindings:
                if self._is_fixed_launch(binding.value):
                    self.run.append(binding.value)
                elif binding.var not in self.fixed or not _is_storage(binding.value):
                    if _acts(binding.value):
                        self._end_run()
                    self.builder.emit_normalized(binding)
            self._end_run()
            self.builder.emit_func_output(main.body.body)
        captured = self.builder.get()
        functions = dict(captured.functions_items())
        rewritten = functions.pop(captured.get_global_var("pimflow_captured"))
        functions[captured.get_global_var("main")] = rewritten.with_attrs(dict(main.attrs))
        return tvm.IRModule(functions, attrs=self.mod.attrs)

    def _fixed_variables(self) -> set[relax.Var]:
        """Storage that holds no result of ``main``, and what lies in it."""
        sources = {b.var: list(_sources(b.value)) for b in self.bindings}
        escaping, pending = set[relax.Var](), [self.mod["main"].body.body]
        while pending:
            for var in relax.analysis.free_vars(pending.pop()):
                if var not in escaping:
                    escaping.add(var)
                    pending += sources.get(var, [])
        fixed: set[relax.Var] = set()
        for binding in self.bindings:
            if _is_storage(binding.value):
                if binding.var not in escaping:
                    fixed.add(binding.var)
            elif sources[binding.var] and fixed.issuperset(sources[binding.var]):
                fixed.add(binding.var)
        return fixed

    def _is_fixed_launch(self, value: relax.Expr) -> bool:
        """Whether `value` calls a kernel of the GPU whose operands keep their addresses."""
        if not isinstance(value, relax.Call) or not isinstance(value.op, tvm.ir.GlobalVar):
            return False
        kernel = self.mod[value.op]
        if not isinstance(kernel, tirx.PrimFunc) or (kernel.attrs or {}).get("tirx.is_host_func"):
            return False
        return all(arg in self.fixed or isinstance(arg, tvm.ir.GenericConst) for arg in value.args)

    def _runs(self) -> Iterator[list[relax.Call]]:
        run: list[relax.Call] = []
        for binding in self.bindings:
            if self._is_fixed_launch(binding.value):
                run.append(binding.value)
            elif _acts(binding.value):
                yield run
                run = []
        yield run

    def _keep_storage(self) -> None:
        """Emit the storage that keeps its address: the variables stay, their values come from the runtime."""
        kept = [b for b in self.bindings if b.var in self.fixed and _is_storage(b.value)]
        allocator = relax.BlockBuilder()
        with allocator.function("allocate", [], attrs={"relax.force_pure": True}, private=True):
            storages = [allocator.emit(binding.value) for binding in kept]
            allocator.emit_func_output(relax.Tuple(storages))
        function = self.builder.add_func(allocator.get()["allocate"], "allocate_kept")
        types = [binding.var.ty for binding in kept]
        call = relax.op.call_builtin_with_ctx(
            CACHE, (function, relax.prim_value(0)), ty_args=relax.TupleType(types)
        )
        storages = self.builder.emit(call, name_hint="kept")
        for index, binding in enumerate(kept):
            item = self.builder.normalize(relax.TupleGetItem(storages, index))
            self.builder.emit_normalized(relax.VarBinding(binding.var, item))

    def _end_run(self) -> None:
        """Emit the kernels since the last other call, as one call if there are several."""
        run, self.run = self.run, []
        if len(run) < MIN_LAUNCHES:
            for call in run:
                self.builder.emit(call)
            return
        operands = list(dict.fromkeys(arg for call in run for arg in call.args if isinstance(arg, relax.Var)))
        function = self.builder.add_func(_captured_function(run, operands), f"captured_{self.runs}")
        arguments = (function, relax.Tuple(operands), relax.prim_value(self.runs))
        result = relax.TupleType([operands[-1].ty])
        self.builder.emit(relax.op.call_builtin_with_ctx(CAPTURE, arguments, ty_args=result))
        self.runs += 1


def _captured_function(run: list[relax.Call], operands: list[relax.Var]) -> relax.Function:
    """A function of the calls of a run; TVM's virtual machine takes none that returns nothing."""
    parameters = [relax.Var(var.name, var.ty) for var in operands]
    names = dict(zip(operands, parameters))
    builder = relax.BlockBuilder()
    with builder.function("captured", parameters, attrs={"relax.force_pure": True}, private=True):
        for call in run:
            arguments = [names.get(arg, arg) if isinstance(arg, relax.Var) else arg for arg in call.args]
            builder.emit(relax.Call(call.op, arguments, call.attrs, call.ty_args))
        builder.emit_func_output(relax.Tuple(parameters[-1:]))
    return builder.get()["captured"]


def _sources(value: relax.Expr) -> Iterator[relax.Var]:
    """The variable in whose memory `value` lies, if it lies in another one's."""
    if isinstance(value, relax.Var):
        yield value
    elif isinstance(value, relax.Tuple):
        for item in value.fields:
            yield from _sources(item)
    elif isinstance(value, relax.TupleGetItem):
        yield from _sources(value.tuple_value)
    elif operator(value) in _PLACES and isinstance(value.args[0], relax.Var):
        yield value.args[0]


def _acts(value: relax.Expr) -> bool:
    """Whether `value` does more than to name memory."""
    return isinstance(value, relax.Call) and operator(value) not in _PLACES and not _is_storage(value)


def _is_storage(value: relax.Expr) -> bool:
    return operator(value) == "memory.alloc_storage"
