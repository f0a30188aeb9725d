"""Build a network by a plan, for one target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import tvm
from tvm import relax

from pimflow.compiler import phases
from pimflow.compiler.kernel_calls import KernelCall, kernel_calls
from pimflow.compiler.packed_states import PackedStates
from pimflow.core.program import PimProgram
from pimflow.core.region import CONCAT_SUFFIX
from pimflow.core.split import Split
from pimflow.frontend import Network, relax_module
from pimflow.host import garbage_collection
from pimflow.memory import MemoryPlan
from pimflow.pim_backend.programs.packed_cache import PackedCache
from pimflow.pim_backend.runtime import targets
from pimflow.pim_backend.runtime.cuda_binary import CudaKernels, compile_kernels
from pimflow.pim_backend.runtime.network_module import MachineCode, infer, pack
from pimflow.placement import SearchResult
from pimflow.primitives import Primitive
from pimflow.relay_passes.canonical.sink_layout import SinkLayout
from pimflow.relay_passes.flat import operator
from pimflow.relay_passes.kernels.select_primitives import SelectPrimitives
from pimflow.relay_passes.regions.extract_regions import region_groups
from pimflow.relay_passes.regions.kernel_groups import TensorCopy, copies


@dataclass(frozen=True, kw_only=True)
class Build:
    """A network built for one target.

    Attributes
    ----------
    target : str
        Name of the target, from `pim_backend.runtime.targets.target_name`.
    module : Module
        The executable with its interface; see `pim_backend.runtime.network_module.pack`.
    programs : dict of str to PimProgram
        By the symbol that the executable calls.
    kernels : CudaKernels
        CUDA source of the GPU part, and whether it was compiled.
    copies : tuple of TensorCopy
        Parts of tensors that could have been views but are copied.
    calls : tuple of KernelCall
        Kernels that one inference calls, if it has primitives and no part on PIM; see
        `primitive_selection.network_time`.
    products : dict of str to (CachedAttention, str, int)
        Products of attention that PIM computes, by the symbol that the executable calls.
    states : PackedStates
        Inputs and outputs in the layout of the banks.
    code : MachineCode, optional
        Machine code of `module`, if it will be stored.
    """

    target: str
    executable: relax.VMExecutable
    module: tvm.runtime.Module
    programs: dict[str, PimProgram]
    splits: dict[str, Split]
    kernels: CudaKernels
    memory: MemoryPlan
    copies: tuple[TensorCopy, ...]
    weight_bytes: int
    calls: tuple[KernelCall, ...] = ()
    products: dict[str, phases.CacheProduct] = field(default_factory=dict)
    states: PackedStates = field(default_factory=PackedStates)
    code: MachineCode | None = None

    def infer(self, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Outputs of one inference; inputs and outputs have the layouts of the network."""
        return self.states.unpack(infer(self.module, self.states.pack(inputs), self.device))

    @property
    def can_run_here(self) -> bool:
        """Whether this machine has the device of the target, and the kernels are compiled."""
        return not self.kernels.problem and bool(self.device.exist)

    @property
    def device(self) -> tvm.runtime.Device:
        """The device that the target runs on."""
        return targets.target_device(targets.target_by_name(self.target))


@dataclass(frozen=True)
class LayerPrimitives:
    """Primitives of convolutions, and layouts of what is between them.

    Attributes
    ----------
    layouts : mapping of str to str, optional
        Layouts of all other regions, by the names of `primitive_selection.layers.separate_concats`; HWC for
        regions without an entry. If None, a region keeps the layout that all its operands have.
    """

    choices: Mapping[str, Primitive]
    layouts: Mapping[str, str] | None = None


@garbage_collection.pause()
def build(
    network: Network,
    search_result: SearchResult,
    target: tvm.target.Target,
    primitives: LayerPrimitives | None = None,
    *,
    keep_code: bool = False,
    cuda_graphs: bool = False,
) -> Build:
    """Build `network` for `target` by the plan of `search_result`.

    Parameters
    ----------
    primitives : LayerPrimitives, optional
        If `target` is a CPU, they replace those of the plan, for layers that are not on PIM; the code then
        runs only on the CPU of this machine.
    keep_code : bool
        Whether the build will be stored after it has run.
    cuda_graphs : bool
        Whether runs of kernels are launched as CUDA graphs, if `target` is CUDA.
    """
    programs, splits = search_result.programs(), search_result.splits()
    caches = phases.CachesInModule.from_module(
        network.module, search_result.attention(), search_result.system
    )
    states = find_packed_states(network, caches.inputs)
    primitives = primitives if target.kind.name == "llvm" else None
    planned_module = apply_search_result(network.module, search_result, primitives)
    calls: tuple[KernelCall, ...] = ()
    if primitives:
        target = targets.this_cpu_target()
        calls = () if programs else kernel_calls(planned_module, search_result.system)
    plans: list[MemoryPlan] = []
    graphs = cuda_graphs and target.kind.name == "cuda"
    executable, kernels = compile_kernels(
        lambda: phases.build(planned_module, target, search_result.system, plans.append, cuda_graphs=graphs),
        target,
    )
    name = targets.target_name(target)
    device, inputs = targets.target_device(target), states.types(network.inputs)
    module = pack(executable, inputs, network.outputs, name, device, kernels.problem)
    on_cpu = target.kind.name == "llvm"
    return Build(
        target=name,
        executable=executable,
        module=module,
        programs=phases.programs_by_symbol(network.module, splits, programs),
        splits=splits,
        kernels=kernels,
        memory=plans[-1],
        copies=copies(planned_module, views=search_result.system.uses_views),
        weight_bytes=relax_module.weight_bytes(network.module),
        calls=calls,
        products=caches.products,
        states=states,
        code=MachineCode.from_network(module) if keep_code and on_cpu and not primitives else None,
    )


def find_packed_states(network: Network, inputs: Mapping[str, PackedCache]) -> PackedStates:
    """States of `network` in the layout of the banks: inputs, and outputs that are their new values."""
    outputs = {state.result: state.name for state in network.states if state.name in inputs}
    return PackedStates(inputs=dict(inputs), outputs=outputs)


def apply_search_result(
    mod: tvm.IRModule, search_result: SearchResult, primitives: LayerPrimitives | None = None
) -> tvm.IRModule:
    """Apply a plan to `mod`, with its primitives, or with `primitives` instead."""
    rewrites = phases.PlanRewrites.from_search(search_result)
    planned_module = phases.apply_plan(mod, rewrites, search_result.system)
    if primitives:
        return with_primitives(planned_module, primitives, views=search_result.system.uses_views)
    choices = search_result.primitives()
    return with_primitives(planned_module, LayerPrimitives(choices)) if choices else planned_module


def with_primitives(mod: tvm.IRModule, primitives: LayerPrimitives, *, views: bool = True) -> tvm.IRModule:
    """`mod` with chosen primitives in place of its convolutions; ignores choices for missing layers."""
    choices, layouts = primitives.choices, primitives.layouts
    layout_by_variable = None if layouts is None else _variable_layouts(mod, choices, layouts, views)
    passes: list[tvm.transform.Pass] = [SelectPrimitives(choices)]
    used_layouts = (
        {primitive.layout for primitive in choices.values()}
        if layout_by_variable is None
        else set(layout_by_variable.values())
    )
    for layout, relax_layout in (("CHW", "NCHW"), ("CHWc16", "NCHW16c")):
        if layout in used_layouts:
            variables = (
                None
                if layout_by_variable is None
                else {
                    name for name, variable_layout in layout_by_variable.items() if variable_layout == layout
                }
            )
            passes.append(SinkLayout(relax_layout, variables))
    return tvm.transform.Sequential(passes)(mod)


def _variable_layouts(
    mod: tvm.IRModule, choices: Mapping[str, Primitive], layouts: Mapping[str, str], views: bool
) -> dict[str, str]:
    """By variable, the layout of its operator: that of the region which it belongs to."""
    by_variable = {}
    for name, group in region_groups(mod, views=views).items():
        layout = choices[name].layout if name in choices else layouts.get(name, "HWC")
        concat_layout = layouts.get(f"{name}{CONCAT_SUFFIX}", layout)
        for binding in group.bindings:
            by_variable[binding.var.name] = concat_layout if operator(binding.value) == "concat" else layout
    return by_variable


def build_plain(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.runtime.Module:
    """Compile a Relax module by TVM's own pipeline, without PIM, and pack it as `build` does."""
    inputs, outputs = relax_module.inputs(mod), relax_module.outputs(mod)
    plain = relax.transform.DecomposeOpsForInference()(mod)
    name, device = targets.target_name(target), targets.target_device(target)
    return pack(tvm.compile(plain, target), inputs, outputs, name, device)
