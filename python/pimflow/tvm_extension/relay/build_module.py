"""``tvm.relay.build``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm

from pimflow.errors import UnknownNameError, UsageError
from pimflow.tvm_extension.relay import pass_options
from pimflow.tvm_extension.relay.frontend import OnnxParams

if TYPE_CHECKING:
    import onnx

    from pimflow.compiler.build import Build
    from pimflow.core.plan import Plan
    from pimflow.core.program import PimProgram
    from pimflow.pim_backend.runtime.cuda_binary import CudaKernels

KINDS = ("llvm", "cuda")  # of targets that executors run on
save_param_dict = tvm.runtime.save_param_dict
load_param_dict = tvm.runtime.load_param_dict


@dataclass(eq=False, repr=False)
class GraphExecutorFactoryModule:
    """A built network: ``lib["default"](device)`` is what `graph_executor.GraphModule` takes.

    Attributes
    ----------
    kernels : CudaKernels
        CUDA source of the GPU part, if any, and whether it was compiled.
    programs : dict of str to PimProgram
        The command streams, by region; a region that is split or pipelined may have several, by their parts.
    """

    module: tvm.runtime.Module
    ir_mod: tvm.IRModule
    target: tvm.target.Target
    params: dict[str, tvm.runtime.Tensor]
    plan: Plan | None
    kernels: CudaKernels
    programs: dict[str, PimProgram]

    def __getitem__(self, name: str) -> object:
        try:
            return self.module[name]
        except AttributeError as error:
            raise UnknownNameError("function", name, ("default", "get_target")) from error

    def __iter__(self):
        raise UsageError("relay.build returns one module, no triple: lib = relay.build(…)")

    def get_params(self) -> dict[str, tvm.runtime.Tensor]:
        """The bound parameters."""
        return self.params

    def get_lib(self) -> tvm.runtime.Module:
        """The module itself."""
        return self.module

    def inspect_source(self, fmt: str = "") -> str:
        """The source of what was generated; without `fmt`, all of it.

        Parameters
        ----------
        fmt : str
            ``cuda``: the kernels of the GPU. ``pim``: the command streams, each as a ``.pimprog`` text
            (docs/formats.md).

        Raises
        ------
        UnknownNameError
            For another format.
        """
        sources = {
            "cuda": self.kernels.source,
            "pim": "\n".join(program.to_json() for program in self.programs.values()),
        }
        if fmt:
            if fmt not in sources:
                raise UnknownNameError("format", fmt, sources)
            return sources[fmt]
        return "\n".join(filter(None, sources.values()))

    def get_graph_json(self) -> str:
        """Not supported: raises `UsageError`; a plan replaces it."""
        raise UsageError("there is no graph JSON; lib.plan has the placement, lib.ir_mod the network")

    def export_library(self, file_name: str | os.PathLike, **options: object) -> None:
        """Write a shared library for ``tvm.runtime.load_module``, in a process that imports pimflow.

        Raises
        ------
        ArtifactError
            If it cannot be written or linked.
        """
        from pimflow.frontend.relax_module import weight_bytes
        from pimflow.pim_backend.runtime.network_module import store

        store(self.module, Path(file_name), weight_bytes(self.ir_mod), **options)


# Its parameters are those of ``relay.build`` in TVM.
def build(
    mod: tvm.IRModule,
    target: str | tvm.target.Target | dict | None = None,
    target_host: object = None,
    executor: object = None,
    runtime: object = None,
    params: Mapping[str, np.ndarray | tvm.runtime.Tensor] | None = None,
    mod_name: str = "default",
) -> GraphExecutorFactoryModule:
    """Compile a network; if the target has PIM, search for the best plan.

    Parameters
    ----------
    mod : IRModule
        A module from `frontend.from_onnx`, or any Relax module with a ``main``.
    target : str, Target or dict, optional
        ``cuda+pim``, ``llvm+pim``, or a TVM target of one of `KINDS`; by default the current one.
    params : mapping of str to ndarray or GgufTensor, optional
        Values of those inputs of ``main`` that are weights.
    target_host, executor, runtime
        Must be None: TVM chooses the host, and there is one executor.
    mod_name : str
        Must be ``default``.

    Raises
    ------
    UsageError
        For arguments that Relax has no counterpart of, and unknown targets and parameters.
    VerificationError
        If the built module computes other values than the ONNX model that `params` is from; see Notes.
    PimflowError
        The errors of `pimflow.search`.

    Notes
    -----
    Arguments of `pimflow.search` come from the ``PassContext``: ``pimflow.system`` is `system`, and
    ``pimflow.NAME`` is each other one, but the target and what a module determines; ``pimflow.dump_ir``,
    ``pimflow.check_kernels`` and ``pimflow.cuda_graphs`` are those of `pimflow.compile` (docs/usage.md). An
    invalid value is an error when the context is created, contradictory options are an error when the
    network is built.

    What came from `frontend.from_onnx` is run on drawn inputs and compared with ONNX Runtime, if the device
    of the target is here, and `mod` has the inputs and outputs of the model. ``pimflow.verify: False`` leaves
    that out.
    """
    if not isinstance(mod, tvm.IRModule):
        raise UsageError(f"relay.build takes an IRModule, not {type(mod).__name__}")
    if target_host is not None or executor is not None or runtime is not None or mod_name != "default":
        raise UsageError("relay.build takes no target_host, executor, runtime or mod_name; leave them out")
    from pimflow.pim_backend.runtime import targets
    from pimflow.pim_backend.runtime.cuda_binary import CudaKernels

    resolved, options = _resolve_target(target), pass_options.current()
    verifies = options.pop("verify", True)
    model = params.model if isinstance(params, OnnxParams) and verifies else None
    if options and not targets.has_pim(resolved):
        raise UsageError(
            f"target '{targets.target_name(resolved)}' has no PIM, and pimflow.{min(options)} of the "
            f"PassContext would be of no account; use one of {', '.join(targets.TARGETS)}, or leave it out"
        )
    bound_mod = _bind_params(mod, params or {})
    values = {name: tvm.runtime.tensor(_to_numpy(value)) for name, value in (params or {}).items()}
    if targets.has_pim(resolved):
        built, plan = _build_with_pim(bound_mod, resolved, options, model)
        programs = {program.region: program for program in built.programs.values()}
        return GraphExecutorFactoryModule(
            built.module, bound_mod, resolved, values, plan, built.kernels, programs
        )
    module = _build_plain(bound_mod, resolved, model)
    return GraphExecutorFactoryModule(module, bound_mod, resolved, values, None, CudaKernels(), {})


def _build_with_pim(
    mod: tvm.IRModule, target: tvm.target.Target, options: dict[str, Any], model: onnx.ModelProto | None
) -> tuple[Build, Plan]:
    """Search for a plan and build by it; verify it against `model`, if there is one."""
    from pimflow import frontend
    from pimflow.commands.shared.search import search_network
    from pimflow.compiler import build as compilation
    from pimflow.compiler.ir_dump import dump_ir
    from pimflow.compiler.kernel_checks.check import require_cuda, require_kernels
    from pimflow.host.pass_context import all_passes
    from pimflow.pim_backend.runtime.targets import target_name
    from pimflow.primitive_selection.options import CUDA, SelectionOptions, check_device
    from pimflow.tvm_extension.relay.verification import verify_build

    name = target_name(target)
    if options.get("primitives"):
        check_device(SelectionOptions(device=CUDA), name)
    system, folder = options.pop("system", None), options.pop("dump_ir", None)
    checks_kernels, cuda_graphs = (options.pop(key, False) for key in ("check_kernels", "cuda_graphs"))
    for option, is_set in (("check_kernels", checks_kernels), ("cuda_graphs", cuda_graphs)):
        if is_set:
            require_cuda(option, name)
    with all_passes(), dump_ir(folder):
        network, search_result = search_network(frontend.load(mod), system, target=name, **options)
        if checks_kernels:
            require_kernels(network, search_result)
        built = compilation.build(network, search_result, target, cuda_graphs=cuda_graphs)
    if model is not None:
        verify_build(model, mod, network, built, search_result)
    return built, search_result.plan


def _build_plain(
    mod: tvm.IRModule, target: tvm.target.Target, model: onnx.ModelProto | None
) -> tvm.runtime.Module:
    """Build for a target without PIM; verify it against `model`, if there is one."""
    from pimflow.compiler.build import build_plain
    from pimflow.host.pass_context import all_passes
    from pimflow.tvm_extension.relay.verification import verify_module

    with all_passes():
        module = build_plain(mod, target)
    if model is not None:
        verify_module(model, mod, module, target)
    return module


def _resolve_target(target: str | tvm.target.Target | dict | None) -> tvm.target.Target:
    requested = tvm.target.Target.current(allow_none=True) if target is None else target
    if requested is None:
        raise UsageError("relay.build needs a target, such as 'llvm+pim'")
    try:
        resolved = tvm.target.Target(requested)
    except (ValueError, TypeError, RuntimeError) as error:
        from pimflow.pim_backend.runtime.targets import TARGETS

        if isinstance(requested, str) and " -" in requested:
            raise UsageError(
                f"target '{requested}': TVM now takes options as a dictionary, such as "
                "{'kind': 'llvm', 'mcpu': 'core-avx2'}"
            ) from error
        if isinstance(requested, str):
            raise UnknownNameError("target", requested, (*TARGETS, "llvm", "cuda")) from error
        raise UsageError(f"no such target: {requested}") from error
    if resolved.kind.name not in KINDS:
        raise UsageError(f"target '{resolved.kind.name}' is none of {', '.join(KINDS)}, with +pim or not")
    return resolved


def _to_numpy(value: np.ndarray | tvm.runtime.Tensor) -> np.ndarray:
    return value.numpy() if isinstance(value, tvm.runtime.Tensor) else np.asarray(value)


def _bind_params(mod: tvm.IRModule, params: Mapping[str, np.ndarray | tvm.runtime.Tensor]) -> tvm.IRModule:
    """`mod` with `params` as constants."""
    from tvm import relax

    from pimflow.frontend.relax_module import main, sizes

    inputs = {var.name: var for var in main(mod).params}
    for name, value in params.items():
        if name not in inputs:
            raise UnknownNameError("parameter", name, inputs)
        array, required = _to_numpy(value), inputs[name].ty
        if sizes(required) != list(array.shape) or str(required.dtype) != str(array.dtype):
            actual = f"{list(array.shape)} {array.dtype}"
            raise UsageError(f"parameter '{name}' is {sizes(required)} {required.dtype}, not {actual}")
    values = {name: _to_numpy(value) for name, value in params.items()}
    return relax.transform.BindParams("main", values)(mod) if values else mod
