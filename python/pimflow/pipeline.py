"""The phases from a canonical module and a plan to an executable."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import relax

from pimflow.core.program import PimProgram
from pimflow.errors import UnknownNameError
from pimflow.pim_backend import codegen
from pimflow.relay_passes.decompose_to_matrix_vector import DecomposeToMatrixVector
from pimflow.relay_passes.flat import layer_name, main_bindings
from pimflow.relay_passes.group_kernels import GroupKernels
from pimflow.relay_passes.outline_pim import OutlinePim, symbol
from pimflow.relay_passes.split_mddp import PIM_SUFFIX, SplitMdDp

codegen.register()


def apply_plan(
    mod: tvm.IRModule, gpu_rows: Mapping[str, int], programs: Mapping[str, PimProgram]
) -> tvm.IRModule:
    """The graph that a plan describes, PIM regions outlined, everything else as it was.

    Parameters
    ----------
    mod : IRModule
        In canonical form.
    gpu_rows : mapping of str to int
        For every split region, its output rows on the GPU.
    programs : mapping of str to PimProgram
        For every region wholly or partly on PIM, its program.
    """
    names = _variables(mod, gpu_rows, programs)
    phases = [SplitMdDp(gpu_rows), DecomposeToMatrixVector(names), OutlinePim(names)]
    return tvm.transform.Sequential(phases)(mod)


def symbols(
    mod: tvm.IRModule, gpu_rows: Mapping[str, int], programs: Mapping[str, PimProgram]
) -> dict[str, PimProgram]:
    """Programs by the symbol under which the executable calls them; see `apply_plan`."""
    return {symbol(name): program for name, program in _variables(mod, gpu_rows, programs).items()}


def _variables(
    mod: tvm.IRModule, gpu_rows: Mapping[str, int], programs: Mapping[str, PimProgram]
) -> dict[str, PimProgram]:
    """Programs by the variable that holds the product which they compute."""
    variables = {layer_name(mod, b.var): b.var.name for b in main_bindings(mod)}
    return {
        variables[region] + (PIM_SUFFIX if region in gpu_rows else ""): program
        for region, program in programs.items()
    }


def lower_phases() -> list[tvm.transform.Pass]:
    """From a graph with PIM regions to what the virtual machine runs."""
    transform = relax.transform
    return [
        GroupKernels(),
        transform.RunCodegen(),
        transform.LegalizeOps(),
        transform.AnnotateTIROpPattern(),
        transform.FuseTIR(),
        transform.DeadCodeElimination(["main"]),
        transform.RewriteDataflowReshape(),
        transform.ToNonDataflow(),
        transform.RemovePurityChecking(),
        transform.CallTIRRewrite(),
        transform.StaticPlanBlockMemory(),
        transform.LowerAllocTensor(),
        transform.KillAfterLastUse(),
        transform.LowerRuntimeBuiltin(),
        transform.ComputePrimValue(),
        transform.VMShapeLower(),
        transform.AttachGlobalSymbol(),
    ]


TARGETS = {"llvm+pim": {"kind": "llvm", "keys": ["cpu", "pim"]}}


def named_target(name: str) -> tvm.target.Target:
    """The target of that name; raises `UnknownNameError` if it is none of `TARGETS`."""
    if name not in TARGETS:
        raise UnknownNameError("target", name, TARGETS)
    return tvm.target.Target(TARGETS[name])


def build(mod: tvm.IRModule, target: str = "llvm+pim") -> relax.VMExecutable:
    """Executable of a graph that `apply_plan` made, or of any canonical one.

    Raises
    ------
    UnknownNameError
        If `target` is none of `TARGETS`.
    """
    resolved = named_target(target)

    @tvm.transform.module_pass(opt_level=0, name="pimflow")
    def pipeline(module: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        with resolved:
            return tvm.transform.Sequential(lower_phases())(module)

    return tvm.compile(mod, resolved, relax_pipeline=pipeline)
