"""Groups of layers that one kernel computes in tiles, as functions of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from tvm import relax

from pimflow.relay_passes.flat import rebuild, substitute
from pimflow.relay_passes.regions.extract_regions import region_groups
from pimflow.relay_passes.regions.kernel_groups import KernelGroup, free_variables
from pimflow.relay_passes.schedules.keep_barriers import TILES

LAYERS = "pimflow.layers"  # attribute of a function of a group: numbers of operators of its layers, in order


@tvm.transform.module_pass(opt_level=0, name="OutlineGroups")
class OutlineGroups:
    """Outline neighbouring regions as one function, which will be one kernel.

    Parameters
    ----------
    groups : mapping of tuple of str to str
        By the regions of each group, in execution order, its tiling as text; empty to derive one for the
        target. Only the result of the last region may be read outside the group.
    views : bool
        See `kernel_groups`.

    Rewrite: ``a = conv2d(x, v); y = conv2d(relu(a), w) -> y = tiled_y(x)``, with the attributes `TILES` and
    `LAYERS`.
    Preserves: values exactly, names of the other layers.
    """

    def __init__(self, groups: Mapping[tuple[str, ...], str], views: bool = True):
        self.groups, self.views = dict(groups), views

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        if not self.groups:
            return mod
        kernels = region_groups(mod, views=self.views)
        layers = {
            kernels[covers[-1]].result: (_layers([kernels[name] for name in covers]), tiles)
            for covers, tiles in self.groups.items()
        }

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            if var not in layers:
                return None
            operands, function = group_function(*layers[var])
            callee = builder.add_func(function, f"tiled_{var.name}")
            return relax.Call(callee, [var_remap.get(operand, operand) for operand in operands])

        var_remap: dict[relax.Var, relax.Var] = {}
        return rebuild(mod, rewrite, var_remap)


def _layers(kernels: Sequence[KernelGroup]) -> list[list[relax.VarBinding]]:
    """The operators of kernels, with those in front of an anchor at the end of the layer before."""
    layers: list[list[relax.VarBinding]] = []
    for kernel in kernels:
        begin = kernel.bindings.index(kernel.anchor) if layers and kernel.anchor else 0
        if begin:
            layers[-1] += kernel.bindings[:begin]
        layers.append(kernel.bindings[begin:])
    return layers


def group_function(
    layers: Sequence[Sequence[relax.VarBinding]], tiles: str
) -> tuple[list[relax.Var], relax.Function]:
    """The variables that a group reads, and the function of the group; constants stay inside."""
    bindings = [binding for layer in layers for binding in layer]
    operands = free_variables(bindings)
    params = [relax.Var(f"x{index}", var.ty) for index, var in enumerate(operands)]
    env: dict[relax.Var, relax.Expr] = dict(zip(operands, params))
    builder = relax.BlockBuilder()
    attrs = {"Primitive": True, TILES: tiles, LAYERS: [len(layer) for layer in layers]}
    with builder.function("tiled", params, attrs=attrs, private=True):
        with builder.dataflow():
            for binding in bindings:
                env[binding.var] = builder.emit(substitute(binding.value, env))
            output = builder.emit_output(env[bindings[-1].var])
        builder.emit_func_output(output)
    return operands, builder.get()["tiled"]
