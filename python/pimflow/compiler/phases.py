"""The phases of passes from a canonical module and a plan to an executable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import tvm
from tvm import relax

from pimflow import memory
from pimflow.core.attention import SCORES, VALUES
from pimflow.core.blocks import SMALLEST_GPU, KernelLimits
from pimflow.core.liveness import Liveness
from pimflow.core.program import PimProgram
from pimflow.core.split import AXES, PIM_SUFFIX, Split
from pimflow.core.stages import Pipeline, part_name, whole_name
from pimflow.errors import UnknownNameError, UnsupportedOpError, last_line
from pimflow.fusion import GroupTiling
from pimflow.fusion.kernels.tile_groups import TileGroups
from pimflow.hardware import System
from pimflow.hardware import system as default_system
from pimflow.host import stderr
from pimflow.memory import MemoryPlan
from pimflow.pim_backend.programs.cached_attention import CachedAttention
from pimflow.pim_backend.programs.packed_cache import PackedCache
from pimflow.pim_backend.runtime import codegen
from pimflow.pim_backend.runtime.targets import target_by_name
from pimflow.pim_backend.runtime.weights_module import create_weights
from pimflow.placement import SearchResult
from pimflow.placement.candidates.substitutions import SUBSTITUTIONS
from pimflow.relay_passes import grid_sample, integer_division, keep_nan
from pimflow.relay_passes.flat import CHANNEL_SETS, RESULT, layer_name, main_bindings
from pimflow.relay_passes.kernels import group_norm, round_bf16
from pimflow.relay_passes.kernels.group_kernels import GroupKernels
from pimflow.relay_passes.kernels.mark_checked import MarkChecked
from pimflow.relay_passes.kernels.outline_groups import OutlineGroups
from pimflow.relay_passes.kernels.store_half import StoreHalf
from pimflow.relay_passes.memory.allocate_each import AllocateEach
from pimflow.relay_passes.memory.capture_launches import CaptureLaunches
from pimflow.relay_passes.memory.keep_views import KeepViews
from pimflow.relay_passes.memory.lift_workspaces import LiftWorkspaces
from pimflow.relay_passes.memory.plan_pool import PlanPool
from pimflow.relay_passes.memory.stream_weights import StoreWeightsOnHost, StreamWeights
from pimflow.relay_passes.pim.decompose_to_matrix_vector import DecomposeToMatrixVector
from pimflow.relay_passes.pim.drop_codegen_constants import DropCodegenConstants
from pimflow.relay_passes.pim.outline_attention import OutlineAttention, PimAttention, attention_sites
from pimflow.relay_passes.pim.outline_pim import OutlinePim, symbol
from pimflow.relay_passes.regions.extract_regions import region_groups
from pimflow.relay_passes.schedules import keep_registers
from pimflow.relay_passes.schedules.launch_limits import with_limits
from pimflow.relay_passes.schedules.schedule_cpu import ScheduleCpu
from pimflow.relay_passes.schedules.schedule_gpu import ScheduleGpu
from pimflow.relay_passes.splits.pipeline_rows import PipelineRows
from pimflow.relay_passes.splits.split_axis import SplitAxis
from pimflow.relay_passes.splits.split_mddp import SplitMdDp
from pimflow.relay_passes.structure_cache import StructureCache

codegen.register()
keep_registers.register()

CacheProduct = tuple[CachedAttention, str, int]
ALLOCATIONS = ("pool", "eager", "lazy")
# Kernels of operators that TVM's own get wrong.
_LEGAL = keep_nan.LEGAL | round_bf16.LEGAL | group_norm.LEGAL | grid_sample.LEGAL | integer_division.LEGAL


@dataclass(frozen=True, kw_only=True)
class PlanRewrites:
    """What a plan does with a module.

    Attributes
    ----------
    programs : mapping of str to PimProgram
        By region wholly or partly on PIM; parts have the names of `stage_name`.
    pipelines : sequence of Pipeline
        Runs of regions that are done in stages.
    tilings : mapping of tuple of str to GroupTiling
        By group of regions that is one kernel over tiles.
    caches : mapping of str to CachedAttention
        By region of attention on PIM.
    channel_sets : mapping of str to str
        By region, the set of memory channels of its result (`core.channel_sets`), if there are several
        sets.
    substitutions : sequence of callable
        Passes that replace groups of regions by other operators.
    """

    splits: Mapping[str, Split] = field(default_factory=dict)
    programs: Mapping[str, PimProgram] = field(default_factory=dict)
    pipelines: Sequence[Pipeline] = ()
    tilings: Mapping[tuple[str, ...], GroupTiling] = field(default_factory=dict)
    caches: Mapping[str, CachedAttention] = field(default_factory=dict)
    channel_sets: Mapping[str, str] = field(default_factory=dict)
    substitutions: Sequence[Callable[[tvm.IRModule], tvm.IRModule]] = ()

    @classmethod
    def from_search(cls, search_result: SearchResult) -> PlanRewrites:
        """From a search result."""
        return cls(
            splits=search_result.splits(),
            programs=search_result.programs(),
            pipelines=search_result.pipelines(),
            tilings=search_result.group_tilings(),
            caches=search_result.attention(),
            channel_sets=search_result.channel_sets(),
            substitutions=[
                SUBSTITUTIONS[name].lowering(groups) for name, groups in search_result.substitutions().items()
            ],
        )


def apply_plan(mod: tvm.IRModule, rewrites: PlanRewrites, system: System | None = None) -> tvm.IRModule:
    """Apply a plan to a canonical module: split, pipeline and outline its regions.

    `system` gives the padding of the GPU's convolutions, and whether parts of tensors are views.
    """
    target_system, splits = system or default_system(), rewrites.splits
    if rewrites.channel_sets:
        mod = CHANNEL_SETS.attach(mod, _sets_by_variable(mod, rewrites.channel_sets, target_system))
    cached = {
        name: attention_on_pim(attention)
        for name, attention in caches_by_anchor(mod, rewrites.caches, target_system).items()
    }
    names = _programs_by_variable(mod, splits, rewrites.programs)
    splits_by_axis = {axis: {name: s.gpu for name, s in splits.items() if s.axis == axis} for axis in AXES}
    tilings = {covers: str(tiling) for covers, tiling in rewrites.tilings.items()}
    # Each pass visits the whole network; passes without work are left out.
    phases = [
        (OutlineAttention(cached), cached),
        *((substitution, True) for substitution in rewrites.substitutions),
        (OutlineGroups(tilings, target_system.uses_views), tilings),
        (PipelineRows(rewrites.pipelines), rewrites.pipelines),
        (
            SplitMdDp(splits_by_axis["rows"], target_system.has_symmetric_padding, target_system.uses_views),
            splits_by_axis["rows"],
        ),
        *(
            (SplitAxis(axis, splits_by_axis[axis]), splits_by_axis[axis])
            for axis in ("channels", "reduction", "batch")
        ),
        (DecomposeToMatrixVector(names), names),
        (OutlinePim(names), names),
    ]
    return tvm.transform.Sequential([phase for phase, work in phases if work])(mod)


def _sets_by_variable(mod: tvm.IRModule, sets: Mapping[str, str], system: System) -> dict[str, str]:
    """Channel sets by variable, from `sets` by region."""
    groups = region_groups(mod, views=system.uses_views)
    sets_by_variable = {
        b.var.name: sets[name] for name, group in groups.items() if name in sets for b in group.bindings
    }
    result = mod["main"].body.body
    return sets_by_variable | (
        {RESULT: sets_by_variable[result.name]} if result.name in sets_by_variable else {}
    )


def programs_by_symbol(
    mod: tvm.IRModule, splits: Mapping[str, Split], programs: Mapping[str, PimProgram]
) -> dict[str, PimProgram]:
    """Programs by the symbol that the executable calls; see `apply_plan`."""
    return {symbol(name): program for name, program in _programs_by_variable(mod, splits, programs).items()}


def caches_by_anchor(
    mod: tvm.IRModule, caches: Mapping[str, CachedAttention], system: System
) -> dict[str, CachedAttention]:
    """Caches by the variable of the attention, from `caches` by region."""
    groups = region_groups(mod, views=system.uses_views) if caches else {}
    anchors = {name: groups[name].anchor for name in caches}
    return {anchor.var.name: caches[name] for name, anchor in anchors.items() if anchor is not None}


def attention_on_pim(cached: CachedAttention) -> PimAttention:
    """What `OutlineAttention` needs to know of an attention."""
    return PimAttention(
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
    """The products and caches of attention on PIM in a canonical module.

    Attributes
    ----------
    products : dict of str to (CachedAttention, str, int)
        By the symbol that the executable calls: the attention, one of its products, and the group.
    """

    products: dict[str, CacheProduct]
    inputs: dict[str, PackedCache]

    @classmethod
    def from_module(
        cls, mod: tvm.IRModule, caches: Mapping[str, CachedAttention], system: System
    ) -> CachesInModule:
        """Find the products and inputs of `caches`, which are by region."""
        by_variable = caches_by_anchor(mod, caches, system)
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
                for region in attention_sites(mod, by_variable)
                for append, cache in zip(region.appends, packed[region.attention.name], strict=True)
            },
        )


def _programs_by_variable(
    mod: tvm.IRModule, splits: Mapping[str, Split], programs: Mapping[str, PimProgram]
) -> dict[str, PimProgram]:
    """Programs by the variable of the product that they compute."""
    variables = {layer_name(mod, b.var): b.var.name for b in main_bindings(mod)}
    by_variable = {}
    for name, program in programs.items():
        region = whole_name(name, variables)
        part = PIM_SUFFIX if name in splits else name.removeprefix(region)
        by_variable[variables[region] + part] = program
    return by_variable


def kernel_phases(
    target: tvm.target.Target,
    dtype: str,
    *,
    views: bool = True,
    limits: KernelLimits = SMALLEST_GPU,
    cache: StructureCache | None = None,
) -> list[tvm.transform.Pass]:
    """Passes from a graph with PIM regions to one loop nest a kernel; a GPU stores `dtype`."""
    transform, gpu = relax.transform, "gpu" in list(target.keys)
    return [
        GroupKernels(views),
        *([StoreHalf()] if gpu and dtype == "fp16" else []),
        KeepViews(),
        TileGroups(dtype, limits, cache=cache) if gpu else TileGroups(cache=cache),
        transform.RunCodegen(),
        DropCodegenConstants(),
        relax.backend.DispatchSortScan(),
        transform.LegalizeOps(_LEGAL),
        transform.AnnotateTIROpPattern(),
        transform.FuseTIR(),
        transform.DeadCodeElimination(["main"]),
    ]


def scheduling_phases(
    target: tvm.target.Target, system: System, cache: StructureCache | None = None
) -> list[tvm.transform.Pass]:
    """Passes from a graph with PIM regions to calls of scheduled kernels."""
    gpu, limits = "gpu" in list(target.keys), system.gpu.kernel_limits(system.dtype)
    views = system.uses_views
    return [
        *kernel_phases(target, system.dtype, views=views, limits=limits, cache=cache),
        ScheduleGpu(limits) if gpu else ScheduleCpu(cache),
        LiftWorkspaces(),
        relax.transform.RewriteDataflowReshape(),
        MarkChecked(),
    ]


def allocating_phases(
    target: tvm.target.Target, system: System, cache: StructureCache | None = None
) -> list[tvm.transform.Pass]:
    """Passes from a graph with PIM regions to calls of kernels, with an allocation for each tensor."""
    streams = [StreamWeights(system.copy_ahead)] if system.streams_weights else []
    return [*scheduling_phases(target, system, cache), *tensor_phases(), *streams]


def tensor_phases() -> list[tvm.transform.Pass]:
    """Passes from calls of scheduled kernels to the same with an allocated tensor for each result."""
    transform = relax.transform
    return [transform.ToNonDataflow(), transform.RemovePurityChecking(), transform.CallTIRRewrite()]


def allocate(
    mod: tvm.IRModule, target: tvm.target.Target, system: System, cache: StructureCache | None = None
) -> tvm.IRModule:
    """Lower `mod` up to the planning of memory: what `relay_passes.memory.buffers` reads.

    With a `cache` only kernels that it lacks are made; such a module is for measuring.
    """
    return _run_phases(mod, target, system, allocating_phases(target, system, cache))


def _run_phases(
    mod: tvm.IRModule, target: tvm.target.Target, system: System, phases: Sequence[tvm.transform.Pass]
) -> tvm.IRModule:
    """`mod` after `phases`; raises `UnsupportedOpError` for an operator that TVM cannot lower."""
    try:
        limits = system.gpu.kernel_limits(system.dtype)
        with with_limits(target, limits), stderr.hidden():  # TVM warns of kernels that are right
            return tvm.transform.Sequential(phases)(mod)
    except tvm.error.InternalError as error:
        raise UnsupportedOpError(f"TVM has no kernel for an operator: {last_line(error)}") from error


def lower(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    system: System,
    on_memory_plan: Callable[[MemoryPlan], None] = lambda _: None,
    allocation: str = "pool",
    cuda_graphs: bool = False,
) -> tvm.IRModule:
    """Lower `mod` to the form that the virtual machine runs on `target`; see `build`."""
    transform = relax.transform
    if allocation not in ALLOCATIONS:
        raise UnknownNameError("allocation", allocation, ALLOCATIONS)

    def place(liveness: Liveness) -> MemoryPlan:
        """Plan the pool, and hand the plan on."""
        plan = memory.merge_pools(memory.plan(liveness.lifetimes))
        on_memory_plan(plan)
        return plan

    phases = [
        *allocating_phases(target, system),
        PlanPool(place, cuda_graphs) if allocation == "pool" else AllocateEach(allocation == "eager"),
        *([CaptureLaunches()] if cuda_graphs else []),
        *([StoreWeightsOnHost(create_weights)] if system.streams_weights else []),
        # Unused tuples would keep their tensors alive.
        transform.CanonicalizeBindings(),
        transform.DeadCodeElimination(["main"]),
        transform.LowerAllocTensor(),
        *([transform.KillAfterLastUse()] if allocation != "eager" else []),
        transform.LowerRuntimeBuiltin(),
        transform.ComputePrimValue(),
        transform.VMShapeLower(),
        transform.AttachGlobalSymbol(),
    ]
    return _run_phases(mod, target, system, phases)


def build(
    mod: tvm.IRModule,
    target: str | tvm.target.Target = "llvm+pim",
    system: System | None = None,
    on_memory_plan: Callable[[MemoryPlan], None] = lambda _: None,
    allocation: str = "pool",
    cuda_graphs: bool = False,
) -> relax.VMExecutable:
    """Build an executable from a result of `apply_plan`, or from any canonical module.

    Parameters
    ----------
    system : System, optional
        Gives the storage type and size of the GPU; the CPU that stands in for it always stores fp32.
    on_memory_plan : callable
        Called with the memory plan, if the tensors lie in a pool.
    allocation : str
        ``pool``: one planned allocation for all tensors. For comparison, ``eager``: one allocation a tensor,
        from before the first kernel until after the last, or ``lazy``: from its first use to its last.
    cuda_graphs : bool
        Whether runs of kernels are captured at the first inference, and replayed (`CaptureLaunches`).

    Raises
    ------
    UnknownNameError
        If `target` is none of `TARGETS`, or `allocation` none of `ALLOCATIONS`.
    """
    resolved = target_by_name(target) if isinstance(target, str) else target
    target_system = system or default_system()
    phases = tvm.transform.module_pass(
        lambda module, _: lower(
            module, resolved, target_system, on_memory_plan, allocation, cuda_graphs=cuda_graphs
        ),
        opt_level=0,
        name="pimflow",
    )
    with stderr.hidden():  # TVM warns of powers that are right
        return tvm.compile(mod, resolved, relax_pipeline=phases, tir_pipeline=keep_registers.PIPELINE)
