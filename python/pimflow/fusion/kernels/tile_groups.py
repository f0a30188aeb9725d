"""Kernels of groups of layers that a plan fuses over on-chip memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import tvm
from tvm import relax, tirx

from pimflow.core.blocks import KernelLimits
from pimflow.core.region import Region
from pimflow.core.region_graph import RegionGraph
from pimflow.errors import InfeasibleError, UnsupportedOpError
from pimflow.fusion import (
    Group,
    GroupTiling,
    Layer,
    LayerGraph,
    Placement,
    layers_from_regions,
    place,
    tile_group,
)
from pimflow.fusion.default_tilings import TileMemory, default_tilings
from pimflow.fusion.fragments import STAGE_BYTES, WARPS
from pimflow.fusion.group import CPU_LANES, GPU_LANES, pad_channels
from pimflow.fusion.kernels.formula import Computation
from pimflow.fusion.kernels.generator import generate
from pimflow.fusion.kernels.parameters import STORAGE_TYPES, KernelTarget, bounds
from pimflow.fusion.kernels.relax_formulas import read_region
from pimflow.fusion.kernels.tensor_cores import pad_weights
from pimflow.relay_passes.flat import operator, rebuild, substitute
from pimflow.relay_passes.kernels.outline_groups import LAYERS
from pimflow.relay_passes.schedules.keep_barriers import TILES
from pimflow.relay_passes.structure_cache import StructureCache

THREADS = 32 * WARPS  # in a block
REGIONS = "pimflow.regions"  # attribute of a kernel whose tiles lie apart
OPAQUE = 8  # TVM's pattern kind of kernels that are not fused


@tvm.transform.module_pass(opt_level=0, name="TileGroups")
class TileGroups:
    """Write the functions of `OutlineGroups` as kernels over tiles.

    On a GPU each block does a tile in shared memory; on a CPU a core does tiles one after the other, on its
    stack or in a workspace. Arithmetic is fp32. A GPU has the tiles of the plan; a CPU has tiles of its
    own.

    Parameters
    ----------
    dtype : str
        Storage type of tiles on chip and of weights.
    limits : KernelLimits, optional
        Those of the GPU: whether it multiplies fp16 on tensor cores, and what a block has. None for a CPU.
    as_planned : bool
        Whether a CPU, too, has the tiles of the plan.
    with_gaps : bool
        Whether tiles on chip lie apart, with gaps between them: to see that no access leaves its tile. The
        attribute `REGIONS` of a kernel then has begin and end of each, in bytes.
    cache : StructureCache, optional
        Kernels that are used again for equal functions.

    Rewrite: ``y = tiled_y(x) -> y = call_tir(tiled_y, (x, weights, table), Y)``.
    Preserves: names, types, and values up to the order of sums and the storage type between layers.
    """

    def __init__(
        self,
        dtype: str = "fp32",
        limits: KernelLimits | None = None,
        as_planned: bool = False,
        with_gaps: bool = False,
        cache: StructureCache | None = None,
    ):
        self.dtype, self.limits, self.on_gpu = dtype, limits, limits is not None
        self.as_planned = as_planned or self.on_gpu
        self.tensor_cores = limits is not None and limits.tensor_cores and dtype == "fp16"
        self.with_gaps = with_gaps
        self.cache = cache

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        functions = {
            gv: f
            for gv, f in mod.functions_items()
            if isinstance(f, relax.Function) and TILES in (f.attrs or {})
        }
        if not functions:
            return mod
        cache = self.cache or StructureCache()
        settings = self.dtype, self.as_planned, self.limits, self.with_gaps

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            callee = value.op if isinstance(value, relax.Call) else None
            if callee not in functions:
                return None
            name = callee.name_hint
            kernel, constants = cache.result(
                (name, *settings), functions[callee], lambda function: self._kernel(name, function)
            )
            global_var = builder.add_func(kernel, name)
            return relax.call_tir(
                global_var, [*value.args, *map(relax.const, constants)], functions[callee].ret_ty
            )

        return rebuild(mod, rewrite)

    def _kernel(self, name: str, function: relax.Function) -> tuple[tirx.PrimFunc, list[np.ndarray]]:
        """The kernel, and its arguments after the operands of `function`: weights, the table of tiles."""
        regions, computations = _regions(function)
        result = regions[-1].name
        types = {f"%{p.name}": str(p.ty.dtype) for p in function.params}
        types[result] = str(function.ret_ty.dtype)
        graph = layers_from_regions(RegionGraph(name="tiled", regions=tuple(regions), outputs=(result,)))
        group, placement = self._place_group(str(function.attrs[TILES]), graph, computations)
        placement = placement.with_gaps() if self.with_gaps else placement
        target = KernelTarget(
            threads=THREADS if self.on_gpu else 0, in_network=True, dtype=self.dtype, types=types
        )
        computations = {
            layer.name: replace(
                computations[layer.name], weights=_pad_weights(computations[layer.name].weights, group, layer)
            )
            for layer in graph.layers
        }
        kernel = generate(name, group, placement, computations, target)
        marks = {"tirx.is_scheduled": True, "op_pattern": OPAQUE, TILES: str(group.tiling)}
        if self.with_gaps:
            marks[REGIONS] = [byte for region in _regions_bytes(group, placement) for byte in region]
        weights = [item.weights for item in computations.values()]
        constants = [item.astype(STORAGE_TYPES[self.dtype]).ravel() for item in weights if item.size]
        return kernel.with_attrs(marks), [*constants, bounds(group)]

    def _place_group(
        self, plan_tiling: str, graph: LayerGraph, computations: Mapping[str, Computation]
    ) -> tuple[Group, Placement]:
        """The group of all layers in the planned tiles, or in the first own tiles that can be placed."""
        tilings: Iterable[GroupTiling] = (
            [GroupTiling.parse(plan_tiling)] if plan_tiling and self.as_planned else ()
        )
        memory = TileMemory()
        if self.limits:
            shared_bytes = self.limits.shared_bytes if self.limits.threads >= THREADS else 0
            memory = TileMemory.gpu_block(self.dtype, shared_bytes)
        terms = {name: computation.terms for name, computation in computations.items()}
        for tiling in tilings or default_tilings(graph, terms, memory):
            lanes = GPU_LANES if self.on_gpu else CPU_LANES
            with contextlib.suppress(InfeasibleError, ValueError):
                group = tile_group(graph, 0, len(graph.layers), tiling, lanes, self.tensor_cores)
                return group, place(group, memory.element_bytes, memory.max_bytes)
        raise UnsupportedOpError(f"layers of '{graph.name}' do not fit on chip, whatever their tiles")


def _regions_bytes(group: Group, placement: Placement) -> list[tuple[int, int]]:
    """Begin and end of what a kernel has on chip: its tiles, and where warps stage operands."""
    staged = [(placement.on_chip_bytes, placement.on_chip_bytes + WARPS * STAGE_BYTES)]
    return [*placement.regions_bytes(), *(staged if group.staging_bytes else [])]


def _pad_weights(weights: np.ndarray, group: Group, layer: Layer) -> np.ndarray:
    """Pad weights to whole vectors of filters, or fragments."""
    if not weights.size:
        return weights
    if group.uses_tensor_cores(layer):
        return pad_weights(weights)
    return np.pad(weights, ((0, 0), (0, pad_channels(weights.shape[1], group.lanes) - weights.shape[1])))


def _regions(function: relax.Function) -> tuple[list[Region], dict[str, Computation]]:
    """The regions of a group, and their computations by name; casts become storage types of tensors."""
    names: dict[relax.Var, str] = {param: f"%{param.name}" for param in function.params}
    casts: dict[relax.Var, relax.Expr] = {}
    bindings: list[relax.VarBinding] = []
    for binding in (b for block in function.body.blocks for b in block.bindings):
        value = substitute(binding.value, casts)
        if operator(value) == "astype":
            casts[binding.var] = value.args[0]
        elif isinstance(value, relax.Var):
            casts[binding.var] = value
        else:
            bindings.append(relax.VarBinding(binding.var, value))
    regions, computations = [], {}
    for index, count in enumerate(map(int, function.attrs[LAYERS])):
        of_region, bindings = bindings[:count], bindings[count:]
        region, computations[f"layer{index}"] = read_region(f"layer{index}", of_region, names)
        names[of_region[-1].var] = region.name
        regions.append(region)
    return regions, computations
