"""The phases from a canonical module and a plan to an executable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

from pimflow import memory
from pimflow.core.attention import SCORES, VALUES
from pimflow.core.liveness import Liveness
from pimflow.core.program import PimProgram
from pimflow.core.split import AXES, PIM_SUFFIX, Split
from pimflow.core.stages import Pipeline, part_name, whole_name
from pimflow.errors import UnknownNameError
from pimflow.fusion import GroupTiling
from pimflow.fusion.kernels.tile_groups import TileGroups
from pimflow.hardware import System
from pimflow.hardware import system as default_system
from pimflow.memory import MemoryPlan
from pimflow.pim_backend.programs.cached_attention import CachedAttention
from pimflow.pim_backend.programs.packed_cache import PackedCache
from pimflow.pim_backend.runtime import codegen
from pimflow.pim_backend.runtime.targets import named_target
from pimflow.relay_passes.flat import RESULT, layer_name, main_bindings, with_channel_sets
from pimflow.relay_passes.kernels import keep_nan, round_bf16
from pimflow.relay_passes.kernels.group_kernels import GroupKernels
from pimflow.relay_passes.kernels.mark_checked import MarkChecked
from pimflow.relay_passes.kernels.outline_groups import OutlineGroups
from pimflow.relay_passes.kernels.store_half import StoreHalf
from pimflow.relay_passes.memory.allocate_each import AllocateEach
from pimflow.relay_passes.memory.keep_views import KeepViews
from pimflow.relay_passes.memory.lift_workspaces import LiftWorkspaces
from pimflow.relay_passes.memory.plan_pool import PlanPool
from pimflow.relay_passes.pim.decompose_to_matrix_vector import DecomposeToMatrixVector
from pimflow.relay_passes.pim.drop_codegen_constants import DropCodegenConstants
from pimflow.relay_passes.pim.outline_attention import (
    OnPim,
    OutlineAttention,
    cached_regions,
)
from pimflow.relay_passes.pim.outline_pim import OutlinePim, symbol
from pimflow.relay_passes.regions.extract_regions import region_groups
from pimflow.relay_passes.schedules import keep_registers
from pimflow.relay_passes.schedules.schedule_cpu import ScheduleCpu
from pimflow.relay_passes.schedules.schedule_gpu import ScheduleGpu
from pimflow.relay_passes.splits.pipeline_rows import PipelineRows
from pimflow.relay_passes.splits.split_batch import SplitBatch
from pimflow.relay_passes.splits.split_channels import SplitChannels
from pimflow.relay_passes.splits.split_mddp import SplitMdDp
from pimflow.relay_passes.splits.split_reduction import SplitReduction

codegen.register()
keep_registers.register()

CacheProduct = tuple[CachedAttention, str, int]
ALLOCATIONS = ("pool", "eager", "lazy")


def apply_plan(
    mod: tvm.IRModule,
    splits: Mapping[str, Split],
    programs: Mapping[str, PimProgram],
    pipelines: Sequence[Pipeline] = (),
    system: System | None = None,
    tiled: Mapping[tuple[str, ...], GroupTiling] | None = None,
    caches: Mapping[str, CachedAttention] | None = None,
    sets: Mapping[str, str] | None = None,
) -> tvm.IRModule:
    """Apply a plan to a canonical module: split, pipeline and outline its regions.

    Parameters
    ----------
    mod : IRModule
        In canonical form.
    splits : mapping of str to Split
        By region, how it is split.
    programs : mapping of str to PimProgram
        For every region wholly or partly on PIM, its program; those of parts by `stage_name`.
    pipelines : sequence of Pipeline
        Runs that are done in stages.
    system : System, optional
        Says how the GPU's convolutions pad, and which parts of tensors lie inside them.
    tiled : mapping of tuple of str to GroupTiling, optional
        Groups of regions that are one kernel over tiles each.
    caches : mapping of str to CachedAttention, optional
        By region, attention that PIM computes.
    sets : mapping of str to str, optional
        By region, the set of memory channels that its result lies in (`core.channel_sets`), if there are
        several.
    """
    target_system = system or default_system()
    if sets:
        mod = with_channel_sets(mod, _by_variable(mod, sets, target_system))
    cached = {name: on_pim(each) for name, each in by_anchor(mod, caches or {}, target_system).items()}
    names = _variables(mod, splits, programs)
    along = {axis: {name: s.gpu for name, s in splits.items() if s.axis == axis} for axis in AXES}
    # Each goes through the whole network: those that find nothing to do are left out.
    phases = [
        (OutlineAttention(cached), cached),
        (
            OutlineGroups(
                {covers: str(tiling) for covers, tiling in (tiled or {}).items()}, target_system.views
            ),
            tiled,
        ),
        (PipelineRows(pipelines), pipelines),
        (SplitMdDp(along["rows"], target_system.symmetric, target_system.views), along["rows"]),
        (SplitChannels(along["channels"]), along["channels"]),
        (SplitReduction(along["reduction"]), along["reduction"]),
        (SplitBatch(along["batch"]), along["batch"]),
        (DecomposeToMatrixVector(names), names),
        (OutlinePim(names), names),
    ]
    return tvm.transform.Sequential([phase for phase, work in phases if work])(mod)


def _by_variable(mod: tvm.IRModule, sets: Mapping[str, str], system: System) -> dict[str, str]:
    """`sets`, which are by region, by the variables of its operators."""
    groups = region_groups(mod, views=system.views)
    found = {b.var.name: sets[name] for name, group in groups.items() if name in sets for b in group.bindings}
    result = mod["main"].body.body
    return found | ({RESULT: found[result.name]} if result.name in found else {})


def symbols(
    mod: tvm.IRModule, splits: Mapping[str, Split], programs: Mapping[str, PimProgram]
) -> dict[str, PimProgram]:
    """Programs by the symbol under which the executable calls them; see `apply_plan`."""
    return {symbol(name): program for name, program in _variables(mod, splits, programs).items()}


def by_anchor(
    mod: tvm.IRModule, caches: Mapping[str, CachedAttention], system: System
) -> dict[str, CachedAttention]:
    """`caches`, which are by region, by the variable that holds the attention."""
    groups = region_groups(mod, views=system.views) if caches else {}
    anchors = {name: groups[name].anchor for name in caches}
    return {anchor.var.name: caches[name] for name, anchor in anchors.items() if anchor is not None}


def on_pim(cached: CachedAttention) -> OnPim:
    """What `OutlineAttention` has to know."""
    return OnPim(
        text=cached.to_json(),
        group=cached.groups[0].attention,
        groups=len(cached.groups),
        product_part=cached.product_part,
        keys_shape=cached.keys.shape,
        values_shape=cached.values.shape,
        dtype=cached.keys.dtype.name,
        terms=cached.terms,
    )


@dataclass(frozen=True, kw_only=True)
class CachesInModule:
    """What a canonical module has of attention that PIM computes.

    Attributes
    ----------
    products : dict of str to (CachedAttention, str, int)
        By the symbol that the executable calls, which product of which group of which attention it is.
    inputs : dict of str to PackedCache
        By inputs that are caches, how they lie in the banks.
    """

    products: dict[str, CacheProduct]
    inputs: dict[str, PackedCache]

    @classmethod
    def of(cls, mod: tvm.IRModule, caches: Mapping[str, CachedAttention], system: System) -> CachesInModule:
        """`caches` by region."""
        by_variable = by_anchor(mod, caches, system)
        packed = {name: (cached.keys, cached.values) for name, cached in by_variable.items()}
        return cls(
            products={
                symbol(part_name(name, cached.product_part(product, group))): (cached, product, group)
                for name, cached in by_variable.items()
                for product in (SCORES, VALUES)
                for group in range(len(cached.groups))
            },
            inputs={
                append.cache.name: cache
                for each in cached_regions(mod, by_variable)
                for append, cache in zip(each.appends, packed[each.attention.name], strict=True)
            },
        )


def _variables(
    mod: tvm.IRModule, splits: Mapping[str, Split], programs: Mapping[str, PimProgram]
) -> dict[str, PimProgram]:
    """Programs by the variable that holds the product which they compute."""
    variables = {layer_name(mod, b.var): b.var.name for b in main_bindings(mod)}
    by_variable = {}
    for name, program in programs.items():
        region = whole_name(name, variables)
        part = PIM_SUFFIX if name in splits else name.removeprefix(region)
        by_variable[variables[region] + part] = program
    return by_variable


def kernel_phases(
    target: tvm.target.Target, dtype: str, *, views: bool = True, tensor_cores: bool = True
) -> list[tvm.transform.Pass]:
    """From a graph with PIM regions to one loop nest a kernel, storing `dtype` where `target` is a GPU."""
    transform, gpu = relax.transform, "gpu" in list(target.keys)
    return [
        GroupKernels(views),
        *([StoreHalf()] if gpu and dtype == "fp16" else []),
        KeepViews(),
        TileGroups(dtype if gpu else "fp32", gpu, tensor_cores=tensor_cores),
        transform.RunCodegen(),
        DropCodegenConstants(),
        relax.backend.DispatchSortScan(),
        transform.LegalizeOps(keep_nan.LEGAL | round_bf16.LEGAL),
        transform.AnnotateTIROpPattern(),
        transform.FuseTIR(),
        transform.DeadCodeElimination(["main"]),
    ]


def scheduled_phases(target: tvm.target.Target, system: System) -> list[tvm.transform.Pass]:
    """From a graph with PIM regions to calls of kernels as they will run."""
    gpu, multiplies = "gpu" in list(target.keys), system.gpu.multiplies_tiles(system.dtype)
    return [
        *kernel_phases(target, system.dtype, views=system.views, tensor_cores=multiplies),
        ScheduleGpu(system.gpu.sms) if gpu else ScheduleCpu(),
        LiftWorkspaces(),
        relax.transform.RewriteDataflowReshape(),
        MarkChecked(),
    ]


def allocating_phases(target: tvm.target.Target, system: System) -> list[tvm.transform.Pass]:
    """From a graph with PIM regions to calls of kernels, each tensor allocated by itself."""
    return [*scheduled_phases(target, system), *tensor_phases()]


def tensor_phases() -> list[tvm.transform.Pass]:
    """From calls of kernels as they will run to the same with a tensor for each result."""
    transform = relax.transform
    return [transform.ToNonDataflow(), transform.RemovePurityChecking(), transform.CallTIRRewrite()]


def allocate(mod: tvm.IRModule, target: tvm.target.Target, system: System) -> tvm.IRModule:
    """`mod` before its memory is planned: what `relay_passes.memory.buffers` reads."""
    with target:
        return tvm.transform.Sequential(allocating_phases(target, system))(mod)


def lower(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    system: System,
    planned: Callable[[MemoryPlan], None] = lambda _: None,
    allocation: str = "pool",
) -> tvm.IRModule:
    """`mod` as the virtual machine runs it on `target`; see `build`."""
    transform = relax.transform
    if allocation not in ALLOCATIONS:
        raise UnknownNameError("allocation", allocation, ALLOCATIONS)

    def place(liveness: Liveness) -> MemoryPlan:
        plan = memory.in_one_pool(memory.plan(liveness.lifetimes))
        planned(plan)
        return plan

    phases = [
        *allocating_phases(target, system),
        PlanPool(place) if allocation == "pool" else AllocateEach(allocation == "eager"),
        # Tuples that nothing takes any more would keep their tensors from being freed.
        transform.CanonicalizeBindings(),
        transform.DeadCodeElimination(["main"]),
        transform.LowerAllocTensor(),
        *([transform.KillAfterLastUse()] if allocation != "eager" else []),
        transform.LowerRuntimeBuiltin(),
        transform.ComputePrimValue(),
        transform.VMShapeLower(),
        transform.AttachGlobalSymbol(),
    ]
    with target:
        return tvm.transform.Sequential(phases)(mod)


def build(
    mod: tvm.IRModule,
    target: str | tvm.target.Target = "llvm+pim",
    system: System | None = None,
    planned: Callable[[MemoryPlan], None] = lambda _: None,
    allocation: str = "pool",
) -> relax.VMExecutable:
    """Executable of a graph that `apply_plan` made, or of any canonical one.

    Parameters
    ----------
    system : System, optional
        Says what a GPU stores and how wide it is; the CPU that stands in for one always stores fp32.
    planned : callable
        Told where its tensors lie, if they lie in a pool.
    allocation : str
        ``pool``: one planned allocation for all tensors; to compare with, ``eager``: one for each, all
        before the first kernel and until the last, or ``lazy``: each from its first use to its last.

    Raises
    ------
    UnknownNameError
        If `target` is none of `TARGETS`, or `allocation` none of `ALLOCATIONS`.
    """
    resolved = named_target(target) if isinstance(target, str) else target
    target_system = system or default_system()
    phases = tvm.transform.module_pass(
        lambda module, _: lower(module, resolved, target_system, planned, allocation),
        opt_level=0,
        name="pimflow",
    )
    return tvm.compile(mod, resolved, relax_pipeline=phases, tir_pipeline=keep_registers.PIPELINE)
