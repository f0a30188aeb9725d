"""Convolutions and products as the chains that a decomposition computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import tvm
from tvm import relax

from pimflow.core.chains import LayerChain, Link, Upsampling, is_decomposable
from pimflow.core.kernel import ConvGeometry
from pimflow.relay_passes.canonical.subpixel_convolution import crop, depth_to_space, upsamplings
from pimflow.relay_passes.flat import (
    LAYER_NAMES,
    LAYER_ROLES,
    layer_name,
    main_bindings,
    operator,
    rebuild,
    shape,
    unique_name,
)
from pimflow.relay_passes.regions.extract_regions import layer_geometry


@dataclass(frozen=True, kw_only=True)
class DecomposableLayer:
    """A layer that can be decomposed.

    Attributes
    ----------
    filters : ndarray, [OC, KH, KW, C // groups]
        A view of the module's filters.
    geometry : ConvGeometry
        The rows of a product are its batch.
    fc : bool
        Whether it is a product.
    upsampling : Upsampling, optional
        Of a transposed convolution: how its channels move to pixels.
    """

    name: str
    filters: np.ndarray
    geometry: ConvGeometry
    fc: bool
    upsampling: Upsampling | None = None


def decomposable_layers(mod: tvm.IRModule) -> list[DecomposableLayer]:
    """Layers of a canonical module that can be decomposed, in order.

    These are convolutions with more channels than groups, transposed ones among them, and products with
    constant matrices. Layers of decomposed chains, which have a role, are not among them.
    """
    layers, layer_roles, spread_over = [], LAYER_ROLES.read(mod), upsamplings(mod)
    for binding in main_bindings(mod):
        layer = _layer(mod, binding)
        if layer is not None and layer.name not in layer_roles and is_decomposable(layer.geometry):
            _, upsampling = spread_over.get(binding.var, (None, None))
            layers.append(replace(layer, upsampling=upsampling))
    return layers


def _layer(mod: tvm.IRModule, binding: relax.VarBinding) -> DecomposableLayer | None:
    kind, name = operator(binding.value), layer_name(mod, binding.var)
    weights = binding.value.args[1] if kind in ("nn.conv2d", "matmul") else None
    if not isinstance(weights, tvm.ir.GenericConst) or str(weights.ty.dtype) not in ("float32", "float16"):
        return None
    matrix = np.from_dlpack(weights.value)
    if kind == "nn.conv2d":
        return DecomposableLayer(
            name=name, filters=matrix, geometry=layer_geometry(binding.var.name, binding.value), fc=False
        )
    if matrix.ndim != 2 or len(shape(binding.value.args[0])) < 2:
        return None
    c, oc = matrix.shape
    rows = int(np.prod(shape(binding.value.args[0])[:-1]))
    geometry = ConvGeometry(n=rows, h=1, w=1, c=c, oc=oc)
    return DecomposableLayer(name=name, filters=matrix.T[:, None, None, :], geometry=geometry, fc=True)


@tvm.transform.module_pass(opt_level=0, name="Decompose")
class Decompose:
    """Replace layers by chains; the bias of a layer, and its other successors, follow the last link.

    Parameters
    ----------
    layers : mapping of str to LayerChain
        By layer name; layers that it does not name stay.

    Rewrite: ``conv2d(x, w) -> conv2d(conv2d(conv2d(x, fconv), core), lconv)``,
    ``matmul(x, w) -> matmul(matmul(x, fconv), lconv)``,
    ``crop(spread(conv2d(x, w))) -> conv2d(crop(spread(conv2d(conv2d(x, fconv), core))), lconv)`` of a
    transposed convolution (`SubpixelConvolution`); of layer ``a``, the new ones are called
    ``a.fconv``, ``a.core``, ``a.lconv``, and have these roles (`flat.LAYER_ROLES`).
    Preserves: values up to the error of the decomposition, shapes, names of all other layers.
    """

    def __init__(self, layers: Mapping[str, LayerChain]):
        self.layers = layers

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        names, role_of = LAYER_NAMES.read(mod), LAYER_ROLES.read(mod)
        bound = [b.var for b in main_bindings(mod)] + list(mod["main"].params)
        variables, layers = {v.name for v in bound}, {layer_name(mod, v) for v in bound}
        sources = {b.var: b.value for b in main_bindings(mod)}
        # By the variable that the end of a chain replaces, its convolution; they differ for transposed ones.
        ends = {result: var for var, (result, _) in upsamplings(mod).items()}
        spread_operands: dict[relax.Var, relax.Expr] = {}  # by transposed convolution, its operand

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            head = ends.get(var, var)
            layer = layer_name(mod, head)
            if operator(sources[head]) not in ("nn.conv2d", "matmul") or layer not in self.layers:
                return None
            chain = self.layers[layer]
            if chain.upsampling and head is var:
                spread_operands[var] = value.args[0]
                return None  # dead once the end is replaced
            x = spread_operands.get(head, value.args[0])
            for link in chain.links:
                name = unique_name(f"{head.name}_{link.name}", variables)
                last = link is chain.links[-1]
                if chain.upsampling and last:
                    x = builder.emit(crop(x, chain.upsampling.begin, chain.upsampling.extent))
                call = _product(x, link) if operator(value) == "matmul" else _convolution(x, link)
                x = builder.emit(call, name_hint=name)
                names[x.name] = unique_name(f"{layer}.{link.name}", layers)
                role_of[names[x.name]] = link.role
                x = depth_to_space(builder, x, link.scale, link.geometry.groups, f"{name}_up")
            return x

        new = rebuild(mod, rewrite)
        return LAYER_ROLES.attach(LAYER_NAMES.attach(new, names), role_of) if role_of else new


def _convolution(x: relax.Expr, link: Link) -> relax.Call:
    g = link.geometry
    return relax.op.nn.conv2d(
        x,
        relax.const(link.filters, x.ty.dtype),
        strides=list(g.stride),
        padding=list(g.padding),
        dilation=list(g.dilation),
        groups=g.groups,
        data_layout="NHWC",
        kernel_layout="OHWI",
        out_layout="NHWC",
    )


def _product(x: relax.Expr, link: Link) -> relax.Call:
    return relax.op.matmul(x, relax.const(np.ascontiguousarray(link.filters[:, 0, 0].T), x.ty.dtype))
