"""Kernels of the groups of layers that a plan fuses over on-chip memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm
from tvm import relax, tirx

from pimflow.core.fused_tile import BLOCK_SHARED_BYTES
from pimflow.core.region import ELEMENT_BYTES
from pimflow.fusion import Group, GroupTiling, Layer, LayerGraph, place
from pimflow.fusion.kernels.formula import Computation
from pimflow.fusion.kernels.generator import generate
from pimflow.fusion.kernels.parameters import STORED, Target, bounds
from pimflow.fusion.kernels.relax_formulas import read_layer
from pimflow.relay_passes.flat import operator, rebuild, shape, substitute
from pimflow.relay_passes.kernels.outline_groups import LAYERS
from pimflow.relay_passes.schedules.own_barriers import TILES

THREADS = 256  # of a block
OPAQUE = 8  # TVM's pattern of kernels that nothing is fused with


@tvm.transform.module_pass(opt_level=0, name="TileGroups")
class TileGroups:
    """The functions of `OutlineGroups` as kernels over tiles.

    On a GPU a block does a tile in shared memory; a CPU does one after the other in a workspace. What is
    computed is fp32.

    Parameters
    ----------
    dtype : str
        What is stored on chip, and of the weights.
    on_gpu : bool

    Rewrite: ``y = tiled_y(x) -> y = call_tir(tiled_y, (x, weights, table), Y)``.
    Preserves: values up to the order of sums and what is stored between layers, names, types.
    """

    def __init__(self, dtype: str = "fp32", on_gpu: bool = False):
        self.dtype, self.on_gpu = dtype, on_gpu

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        tiled = {
            gv: f
            for gv, f in mod.functions_items()
            if isinstance(f, relax.Function) and TILES in (f.attrs or {})
        }
        if not tiled:
            return mod

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            callee = value.op if isinstance(value, relax.Call) else None
            if callee not in tiled:
                return None
            kernel, constants = _kernel(callee.name_hint, tiled[callee], self.dtype, self.on_gpu)
            made = builder.add_func(kernel, callee.name_hint)
            return relax.call_tir(made, [*value.args, *map(relax.const, constants)], tiled[callee].ret_ty)

        return rebuild(mod, rewrite)


def _kernel(
    name: str, function: relax.Function, stored: str, on_gpu: bool
) -> tuple[tirx.PrimFunc, list[np.ndarray]]:
    """The kernel, and what it takes behind the operands of `function`: weights, the table of tiles."""
    layers = _layers(function)
    result = _name(len(layers) - 1)
    types = {f"%{p.name}": str(p.ty.dtype) for p in function.params} | {result: str(function.ret_ty.dtype)}
    graph = _graph(function, [layer for layer, _, _ in layers], [dims for _, _, dims in layers])
    group = Group(
        graph=graph,
        begin=0,
        end=len(layers),
        tiling=GroupTiling.parse(str(function.attrs[TILES])),
        reuse="lifetime",
        weights_placed=False,
    )
    computed = {layer.name: computation for layer, computation, _ in layers}
    placed = place(group, ELEMENT_BYTES[stored], BLOCK_SHARED_BYTES if on_gpu else 1 << 62)
    target = Target(threads=THREADS if on_gpu else 0, network=True, dtype=stored, types=types)
    kernel = generate(name, group, placed, computed, target)
    marks = {"tirx.is_scheduled": True, "op_pattern": OPAQUE, TILES: str(group.tiling)}
    weights = [computed[layer.name].weights for layer, _, _ in layers if computed[layer.name].weights.size]
    constants = [np.ascontiguousarray(each.astype(STORED[stored])).ravel() for each in weights]
    return kernel.with_attrs(marks), [*constants, bounds(group)]


def _name(index: int) -> str:
    return f"layer{index}"


def _layers(function: relax.Function) -> list[tuple[Layer, Computation, tuple[int, ...]]]:
    """Layers with what they compute and the shapes of their results; casts are what tensors store."""
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
    read = []
    for index, count in enumerate(map(int, function.attrs[LAYERS])):
        of_region, bindings = bindings[:count], bindings[count:]
        layer, computation = read_layer(_name(index), of_region, names)
        names[of_region[-1].var] = layer.name
        read.append((layer, computation, shape(of_region[-1].var)))
    return read


def _graph(function: relax.Function, layers: Sequence[Layer], dims: Sequence[tuple[int, ...]]) -> LayerGraph:
    shapes = {f"%{param.name}": shape(param) for param in function.params}
    shapes |= {layer.name: dims_of for layer, dims_of in zip(layers, dims)}
    return LayerGraph(name="tiled", layers=tuple(layers), shapes=shapes, outputs=(layers[-1].name,))
