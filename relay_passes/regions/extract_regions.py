"""Regions of a canonical module: the units that the search places."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import tvm
from tvm import relax

from pimflow.core.attention import Attention
from pimflow.core.kernel import ConvGeometry
from pimflow.core.region import APPEND, GATHERS, MOVES, RESHAPE, Epilogue, KernelShape, PimShape, Region
from pimflow.core.region_graph import RegionGraph
from pimflow.errors import UnsupportedOpError
from pimflow.relay_passes.attention import NAME as ATTENTION
from pimflow.relay_passes.attention import attention_from_call
from pimflow.relay_passes.caches import IN_PLACE
from pimflow.relay_passes.flat import (
    ACTIVATION_TYPES,
    LAYER_ROLES,
    WEIGHT_TYPES,
    has_static_shape,
    is_pure_reshape,
    layer_name,
    main_bindings,
    operator,
    shape,
)
from pimflow.relay_passes.operators import LOOKUP, POOL
from pimflow.relay_passes.regions.arithmetic import Arithmetic, arithmetic
from pimflow.relay_passes.regions.kernel_groups import (
    OPAQUE,
    KernelGroup,
    attention_kernels,
    free_variables,
    kernel_groups,
)
from pimflow.relay_passes.regions.padded_inputs import input_copy_reasons
from pimflow.weight_types import plain_type

# Operators that schedules inline (`ScheduleCpu`).
_CHEAP = (*MOVES, *GATHERS, LOOKUP, "add", "subtract", "")


def extract_regions(mod: tvm.IRModule, name: str = "", *, views: bool = True) -> RegionGraph:
    """Regions of `mod` in execution order: each kernel that a GPU-only build launches, and each view.

    Parameters
    ----------
    mod : IRModule
        In canonical form.
    views : bool
        See `kernel_groups`.

    Raises
    ------
    UnsupportedOpError
        For dynamic shapes and operators with several results, naming the operator.
    """
    groups = _layer_groups(mod, views)
    names: dict[relax.Var, str] = {v: f"%{v.name}" for v in mod["main"].params}
    extra_outputs = {var for group in groups for var in group.extra_outputs}
    copy_reasons = input_copy_reasons(mod, groups, views=views)
    regions, role_of, types = [], LAYER_ROLES.read(mod), WEIGHT_TYPES.read(mod)
    for group in groups:
        opaque = operator(group.bindings[-1].value) in (*OPAQUE, IN_PLACE)
        if not isinstance(group.result.ty, relax.TensorType) or not (group.fusible or group.view or opaque):
            what = operator(group.bindings[-1].value) or "a call of another function"
            raise UnsupportedOpError(f"'{group.title.name}': {what} is not supported")
        for binding in group.bindings:
            if not has_static_shape(binding.var) and all(
                map(has_static_shape, relax.analysis.free_vars(binding.value))
            ):
                kind, layer = operator(binding.value), layer_name(mod, binding.var)
                raise UnsupportedOpError(
                    f"the shape of {kind} ('{layer}') depends on the data, which is not supported; "
                    "export the model without it"
                )
        layer = layer_name(mod, group.title)
        region = group_region(layer, group, names, extra_outputs, role_of.get(layer, ""))
        region = replace(
            region, pim=replace(region.pim, padding_copy_reason=copy_reasons.get(group.title, ""))
        )
        if region.geometry is not None and (kind := types.get(layer_name(mod, group.anchor.var))):
            integers = ACTIVATION_TYPES.read(mod).get(layer_name(mod, group.anchor.var))
            geometry = replace(region.geometry, weights=kind, activations=integers)
            region = replace(region, geometry=geometry)
        regions.append(_with_append(group, _with_attention(mod, group, region)))
        names.update((b.var, layer) for b in group.bindings)
    if len({r.name for r in regions}) != len(regions):
        raise UnsupportedOpError("two layers carry the same name; rename one in the model file")
    result_vars = _result_vars(mod)
    outputs = {
        layer_name(mod, g.title): g.result for g in groups if result_vars & {b.var for b in g.bindings}
    }
    return RegionGraph(
        name=name,
        regions=tuple(regions),
        outputs=tuple(outputs),
        extra_outputs=tuple(layer for layer, result in outputs.items() if result not in result_vars),
    )


def region_groups(mod: tvm.IRModule, *, views: bool = True) -> dict[str, KernelGroup]:
    """The kernel or view of each region that `extract_regions` finds."""
    return {layer_name(mod, group.title): group for group in _layer_groups(mod, views)}


def _layer_groups(mod: tvm.IRModule, views: bool) -> list[KernelGroup]:
    """All groups except the tuple of the network's results."""
    returned = mod["main"].body.body
    return [
        group
        for group in kernel_groups(mod, views=views)
        if not (group.result.same_as(returned) and isinstance(group.bindings[-1].value, relax.Tuple))
    ]


def _result_vars(mod: tvm.IRModule) -> set[relax.Expr]:
    """The variable that ``main`` returns, and the variables of which it is an alias or a tuple."""
    body = mod["main"].body.body
    result = next((b.value for b in main_bindings(mod) if b.var.same_as(body)), body)
    return {body, *(() if isinstance(result, relax.Call) else relax.analysis.free_vars(result))}


def filters(mod: tvm.IRModule) -> dict[str, np.ndarray]:
    """By region, the filters of its convolution or product, [OC, K] in (kh, kw, c) order, fp32, no copies."""
    filters_of = {}
    for binding in main_bindings(mod):
        kind = operator(binding.value)
        if kind in ("nn.conv2d", "matmul") and isinstance(binding.value.args[1], tvm.ir.GenericConst):
            array = np.from_dlpack(binding.value.args[1].value)
            rows = array.T if kind == "matmul" else array.reshape(array.shape[0], -1)
            filters_of[layer_name(mod, binding.var)] = rows
    return filters_of


def biases(mod: tvm.IRModule) -> dict[str, np.ndarray]:
    """By region, the bias [OC] in fp32 of its convolution or product, also if other additions come first."""
    products: dict[relax.Var, list[relax.Var]] = {}  # by variable, the products that are summed in it
    biases_of: dict[str, np.ndarray] = {}
    for binding in main_bindings(mod):
        kind = _epilogue_kind(binding.value)
        read = [p for v in relax.analysis.free_vars(binding.value) for p in products.get(v, ())]
        if kind in ("nn.conv2d", "matmul"):
            products[binding.var] = [binding.var]
        elif kind == "add":
            products[binding.var] = read
        elif read and kind == "bias":
            constants = [a for a in binding.value.args if isinstance(a, tvm.ir.GenericConst)]
            flat = np.from_dlpack(constants[0].value).reshape(-1)
            for product in read:
                bias = np.broadcast_to(flat, shape(binding.value)[-1:])
                biases_of.setdefault(layer_name(mod, product), bias)
    return biases_of


def group_region(
    name: str,
    group: KernelGroup,
    names: Mapping[relax.Var, str],
    extra_outputs: Collection[relax.Var] = (),
    role: str = "",
) -> Region:
    """One kernel or view as a region; attention is one operator of it.

    Parameters
    ----------
    names : mapping of Var to str
        By variable that the group reads, the region that computes it, or ``"%name"`` for a graph input.
    extra_outputs : collection of Var
        Variables among them that are extra outputs of a region, not its result.
    """
    anchor_inputs = _anchor_inputs(group)
    operands = _operands(group, anchor_inputs)
    position = group.bindings.index(group.anchor) if group.anchor is not None else -1
    before, behind = group.bindings[: max(position, 0)], group.bindings[position + 1 :]
    anchor = [operator(group.anchor.value)] if group.anchor is not None else []
    kinds = [*_kinds(before), *anchor, *_kinds(behind)]
    geometry = layer_geometry(group.anchor.var.name, group.anchor.value) if group.anchor is not None else None
    bounds = tuple(_bounds(binding.value) for binding in behind if operator(binding.value) == "clip")
    return Region(
        name=name,
        role=role,
        operator=_kind(group.anchor, geometry) if group.anchor is not None else kinds[0],
        operators=tuple(kinds),
        is_view=group.view,
        geometry=geometry,
        inputs=tuple(names[v] for v in operands),
        input_shapes=tuple(shape(v) for v in operands),
        operands=sum(v in anchor_inputs for v in operands) if geometry else 1,
        extra_inputs=tuple(i for i, v in enumerate(operands) if v in extra_outputs),
        output_shape=shape(group.result),
        prologue=tuple(kinds[: max(position, 0)]) if geometry else (),
        epilogue=Epilogue(operators=_epilogue(behind), clip_bounds=bounds) if geometry else Epilogue(),
        kernel=_kernel_shape(group, operands, geometry, extra_outputs),
        pim=PimShape(prologue_kernels=sum(not is_pure_reshape(kernel) for kernel in group.prologue_kernels)),
    )


def _operands(group: KernelGroup, anchor_inputs: Collection[relax.Var]) -> list[relax.Var]:
    """Variables that a group reads from outside: those of its anchor, of the prologue, then of the rest."""
    by_anchor = sorted(group.bindings, key=lambda binding: binding is not group.anchor)
    return sorted(free_variables(by_anchor), key=lambda var: var not in anchor_inputs)


def _kernel_shape(
    group: KernelGroup,
    operands: Sequence[relax.Var],
    geometry: ConvGeometry | None,
    extra_outputs: Collection[relax.Var],
) -> KernelShape:
    work = Arithmetic() if geometry or group.view else arithmetic(group.bindings)
    return KernelShape(
        has_anchor=group.anchor is not None,
        fusible_inputs=tuple(
            i for i, v in enumerate(operands) if v in group.fusible_inputs and v not in extra_outputs
        ),
        weight_elements=sum(_elements(a) for b in group.bindings for a in getattr(b.value, "args", ())),
        unread_weight_elements=sum(_unread_elements(b.value) for b in group.bindings),
        extra_output_elements=sum(math.prod(shape(v)) for v in group.extra_outputs),
        workspace_elements=_workspace_elements(group),
        pooling=pooling_geometry(group.anchor) if group.anchor is not None else None,
        product=work.product,
        integers=group.anchor is not None and _multiplies_integers(group.anchor.value),
        operations=work.operations,
        multiplications=work.multiplications,
    )


def _multiplies_integers(value: relax.Expr) -> bool:
    kind = operator(value)
    is_product = kind == "matmul" or kind.startswith("nn.conv")
    return is_product and "int" in str(value.args[0].ty.dtype)


SLICE = "strided_slice"


def _with_attention(mod: tvm.IRModule, group: KernelGroup, region: Region) -> Region:
    """`region` with its `Attention`, if its anchor is one, and the kernels that a GPU launches for it."""
    module = attention_kernels(mod, group)
    attention = None if group.anchor is None else attention_from_call(mod, group.anchor.value)
    if module is None or attention is None:
        return region
    position = group.bindings.index(group.anchor)
    kinds = region.operators
    inner = _layer_groups(module, views=False)
    names = {v: f"%{v.name}" for v in module["main"].params}
    extra_outputs = {var for kernel in inner for var in kernel.extra_outputs}
    parts = []
    for kernel in inner:
        layer = kernel.title.name
        parts.append(_with_cache_extent(attention, group_region(layer, kernel, names, extra_outputs)))
        names.update((b.var, layer) for b in kernel.bindings)
    between = max(part.output_elements + part.kernel.workspace_elements for part in parts[:-1])
    return replace(
        region,
        operator=ATTENTION,
        operators=(*kinds[:position], ATTENTION, *kinds[position + 1 :]),
        prologue=kinds[:position],
        epilogue=replace(region.epilogue, operators=_epilogue(group.bindings[position + 1 :])),
        operands=len(_anchor_inputs(group).difference(b.var for b in group.bindings)),
        attention=attention,
        kernel=replace(
            region.kernel,
            workspace_elements=region.kernel.workspace_elements + 2 * between,
            parts=tuple(parts),
        ),
    )


def _with_cache_extent(attention: Attention, kernel: Region) -> Region:
    """`kernel` of `attention`, with the places that it reads as input shapes in place of the whole cache.

    A product reads keys or values in the type of the cache.

    Its operators are those of a kernel that reads all places: a slice that is read in place is no operator.
    """
    product = kernel.kernel.product
    if product is not None and attention.cache_type:
        product = replace(product, second_type=plain_type(attention.cache_type))
        kernel = replace(kernel, kernel=replace(kernel.kernel, product=product))
    caches = [attention.key_shape, attention.value_shape]
    caches += [attention.scale_shape] if attention.cache_type else []
    cut = {dims: (*dims[:2], attention.extent, dims[3]) for dims in caches}
    return replace(
        kernel,
        input_shapes=tuple(cut.get(dims, dims) for dims in kernel.input_shapes),
        operators=tuple(kind for kind in kernel.operators if kind != SLICE or not attention.read),
        pim=replace(kernel.pim, prologue_kernels=0),  # unused: PIM never does one of these kernels alone
    )


def _with_append(group: KernelGroup, region: Region) -> Region:
    """`region` as an append, if it writes into a cache in place."""
    if group.anchor is None or operator(group.anchor.value) != IN_PLACE:
        return region
    cache, new, _ = group.anchor.value.args[1].fields
    assert shape(cache) == region.output_shape
    kernel = replace(region.kernel, append_elements=math.prod(shape(new)))
    return replace(region, operator=APPEND, operators=(APPEND,), kernel=kernel)


def _workspace_elements(group: KernelGroup) -> int:
    """Elements of the anchor's operands that its kernel computes once and stores in a workspace."""
    if group.anchor is None:
        return 0
    inside = {b.var: operator(b.value) for b in group.bindings[: group.bindings.index(group.anchor)]}
    if all(kind in _CHEAP for kind in inside.values()):
        return 0
    read = relax.analysis.free_vars(group.anchor.value)
    return sum(math.prod(shape(v)) for v in read if v in inside and v not in group.extra_outputs)


def _anchor_inputs(group: KernelGroup) -> set[relax.Var]:
    """Variables from outside that the anchor reads, directly or through its prologue."""
    if group.anchor is None:
        return set()
    required = set(relax.analysis.free_vars(group.anchor.value))
    for binding in reversed(group.bindings[: group.bindings.index(group.anchor)]):
        if binding.var in required:
            required |= set(relax.analysis.free_vars(binding.value))
    return required


def _elements(expr: relax.Expr) -> int:
    return math.prod(expr.value.shape) if isinstance(expr, tvm.ir.GenericConst) else 0


def _unread_elements(value: relax.Expr) -> int:
    """Elements of a constant table that a look-up does not read: at most as many as it returns."""
    if operator(value) != LOOKUP:
        return 0
    return max(_elements(value.args[0]) - math.prod(shape(value)), 0)


def _kinds(bindings: Sequence[relax.VarBinding]) -> list[str]:
    """Names of operators; a chain that only gives a tensor another shape counts as reshapes."""
    return [RESHAPE] * len(bindings) if is_pure_reshape(bindings) else [operator(b.value) for b in bindings]


def _epilogue(bindings: Sequence[relax.VarBinding]) -> tuple[str, ...]:
    """Names of the operators behind a layer, as in `Region.epilogue`."""
    return tuple(
        _epilogue_kind(binding.value) if kind == "add" else kind
        for kind, binding in zip(_kinds(bindings), bindings)
    )


def _bounds(clip: relax.Call) -> tuple[float, float]:
    low, high = (float(bound.value) for bound in clip.args[1:])
    return low, high


def _epilogue_kind(value: relax.Call) -> str:
    """``bias`` for the addition of one constant, or one for each channel; else the operator's name."""
    kind = operator(value)
    constants = [a.value.shape for a in getattr(value, "args", ()) if isinstance(a, tvm.ir.GenericConst)]
    if kind != "add" or not constants:
        return kind
    elements, channels = math.prod(constants[0]), math.prod(constants[0][-1:])
    return "bias" if elements == channels and channels in (1, *shape(value)[-1:]) else kind


def _kind(anchor: relax.VarBinding, geometry: ConvGeometry | None) -> str:
    kind = operator(anchor.value)
    if geometry is None or kind == "matmul":
        return "fc" if geometry is not None else kind
    return "depthwise" if geometry.is_depthwise else "grouped" if geometry.groups > 1 else "conv2d"


def layer_geometry(name: str, value: relax.Expr) -> ConvGeometry | None:
    """Geometry of a convolution with constant filters, or of a product with a constant matrix; else None.

    Also None for integers but those of `IntegerProduct`, int8 by int8 with sums of int32: neither PIM nor the
    kernels of such layers compute others.
    """
    kind = operator(value)
    if kind not in ("nn.conv2d", "matmul") or not isinstance(value.args[1], tvm.ir.GenericConst):
        return None
    dtypes = [str(operand.ty.dtype) for operand in value.args]
    is_integer = dtypes == ["int8", "int8"] and str(value.attrs.out_dtype) == "int32"
    if not (dtypes[0].startswith("float") or is_integer):
        return None
    types = {"weights": "int8", "activations": "int8"} if is_integer else {}
    x, filters = shape(value.args[0]), value.args[1].value.shape
    if kind == "matmul":
        if len(x) != 2 or len(filters) != 2:
            return None
        return ConvGeometry(n=x[0], h=1, w=1, c=x[1], oc=int(filters[1]), **types)
    attrs = value.attrs
    if attrs.data_layout != "NHWC" or attrs.kernel_layout != "OHWI":
        raise UnsupportedOpError(f"'{name}': {attrs.data_layout} convolution is not canonical")
    oc, kh, kw, _ = (int(d) for d in filters)
    return ConvGeometry(
        **dict(zip("nhwc", x)),
        oc=oc,
        kh=kh,
        kw=kw,
        stride=tuple(int(s) for s in attrs.strides),
        dilation=tuple(int(d) for d in attrs.dilation),
        padding=tuple(int(p) for p in attrs.padding),
        groups=int(attrs.groups),
        **types,
    )


def pooling_geometry(anchor: relax.VarBinding) -> ConvGeometry | None:
    """Geometry of a pooling over NHWC, else None; pixels that ``ceil_mode`` adds count as padding."""
    value = anchor.value
    if operator(value) not in POOL or value.attrs.layout != "NHWC":
        return None
    x, y, attrs = shape(value.args[0]), shape(anchor.var), value.attrs
    kernel, stride, dilation = (
        tuple(int(d) for d in axis) for axis in (attrs.pool_size, attrs.strides, attrs.dilation)
    )
    top, left, *_ = (int(p) for p in attrs.padding)
    behind = [
        (y[1 + axis] - 1) * stride[axis] + (kernel[axis] - 1) * dilation[axis] + 1 - x[1 + axis] - before
        for axis, before in enumerate((top, left))
    ]
    return ConvGeometry(
        **dict(zip("nhwc", x)),
        oc=x[3],
        kh=kernel[0],
        kw=kernel[1],
        stride=stride,
        dilation=dilation,
        padding=(top, left, *behind),
        groups=x[3],
    )
