"""Kernels of groups of layers that a plan fuses over on-chip memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import tvm
from tvm import relax, tirx

from pimflow.core.region import Region, RegionGraph
from pimflow.errors import InfeasibleError, UnsupportedOpError
from pimflow.fusion import Group, GroupTiling, Layer, LayerGraph, Placement, folded, place, tiled
from pimflow.fusion.fragments import WARPS
from pimflow.fusion.group import CPU_LANES, GPU_LANES, padded
from pimflow.fusion.kernels.formula import Computation
from pimflow.fusion.kernels.generator import generate
from pimflow.fusion.kernels.parameters import STORED, Target, bounds
from pimflow.fusion.kernels.relax_formulas import read_region
from pimflow.fusion.kernels.tensor_cores import padded_weights
from pimflow.fusion.own_tiles import Room, own_tilings
from pimflow.relay_passes.flat import operator, rebuild, substitute
from pimflow.relay_passes.kernels.outline_groups import LAYERS
from pimflow.relay_passes.schedules.keep_barriers import TILES

THREADS = 32 * WARPS  # in a block
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
    on_gpu : bool
    as_planned : bool
        Whether a CPU, too, has the tiles of the plan.
    tensor_cores : bool
        Whether a GPU multiplies fp16 on tensor cores.

    Rewrite: ``y = tiled_y(x) -> y = call_tir(tiled_y, (x, weights, table), Y)``.
    Preserves: names, types, and values up to the order of sums and the storage type between layers.
    """

    def __init__(
        self, dtype: str = "fp32", on_gpu: bool = False, as_planned: bool = False, tensor_cores: bool = True
    ):
        self.dtype, self.on_gpu, self.as_planned = dtype, on_gpu, as_planned or on_gpu
        self.tensor_cores = tensor_cores and on_gpu and dtype == "fp16"

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        functions = {
            gv: f
            for gv, f in mod.functions_items()
            if isinstance(f, relax.Function) and TILES in (f.attrs or {})
        }
        if not functions:
            return mod

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            callee = value.op if isinstance(value, relax.Call) else None
            if callee not in functions:
                return None
            kernel, constants = self._kernel(callee.name_hint, functions[callee])
            made = builder.add_func(kernel, callee.name_hint)
            return relax.call_tir(made, [*value.args, *map(relax.const, constants)], functions[callee].ret_ty)

        return rebuild(mod, rewrite)

    def _kernel(self, name: str, function: relax.Function) -> tuple[tirx.PrimFunc, list[np.ndarray]]:
        """The kernel, and its arguments after the operands of `function`: weights, the table of tiles."""
        regions, computed = _regions(function)
        result = regions[-1].name
        types = {f"%{p.name}": str(p.ty.dtype) for p in function.params}
        types[result] = str(function.ret_ty.dtype)
        graph = folded(RegionGraph(name="tiled", regions=tuple(regions), outputs=(result,)))
        group, placed = self._placed(str(function.attrs[TILES]), graph, computed)
        target = Target(threads=THREADS if self.on_gpu else 0, network=True, dtype=self.dtype, types=types)
        computed = {
            layer.name: replace(
                computed[layer.name], weights=_padded(computed[layer.name].weights, group, layer)
            )
            for layer in graph.layers
        }
        kernel = generate(name, group, placed, computed, target)
        marks = {"tirx.is_scheduled": True, "op_pattern": OPAQUE, TILES: str(group.tiling)}
        weights = [each.weights for each in computed.values()]
        constants = [each.astype(STORED[self.dtype]).ravel() for each in weights if each.size]
        return kernel.with_attrs(marks), [*constants, bounds(group)]

    def _placed(
        self, planned: str, graph: LayerGraph, computed: Mapping[str, Computation]
    ) -> tuple[Group, Placement]:
        """The group of all layers in the planned tiles, or in the first own tiles that can be placed."""
        tilings: Iterable[GroupTiling] = [GroupTiling.parse(planned)] if planned and self.as_planned else ()
        room = Room.of_gpu(self.dtype) if self.on_gpu else Room()
        terms = {name: each.terms for name, each in computed.items()}
        for tiling in tilings or own_tilings(graph, terms, room):
            lanes = GPU_LANES if self.on_gpu else CPU_LANES
            with contextlib.suppress(InfeasibleError, ValueError):
                group = tiled(graph, 0, len(graph.layers), tiling, lanes, self.tensor_cores)
                return group, place(group, room.element_bytes, room.most_bytes)
        raise UnsupportedOpError(f"layers of '{graph.name}' do not fit on chip, whatever their tiles")


def _padded(weights: np.ndarray, group: Group, layer: Layer) -> np.ndarray:
    """Pad weights to whole vectors of filters, or fragments."""
    if not weights.size:
        return weights
    if group.on_tensor_cores(layer):
        return padded_weights(weights)
    return np.pad(weights, ((0, 0), (0, padded(weights.shape[1], group.lanes) - weights.shape[1])))


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
    regions, computed = [], {}
    for index, count in enumerate(map(int, function.attrs[LAYERS])):
        of_region, bindings = bindings[:count], bindings[count:]
        region, computed[f"layer{index}"] = read_region(f"layer{index}", of_region, names)
        names[of_region[-1].var] = region.name
        regions.append(region)
    return regions, computed
