"""Names of layers, from the importers to the variables of the canonical form."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

import tvm
from tvm import relax

from pimflow.relay_passes.canonical.canonicalise import ANCHORS
from pimflow.relay_passes.canonical.plane_convolutions import LIFTED
from pimflow.relay_passes.flat import LAYER_NAMES, operator, rebuild

_PRODUCTS = (*ANCHORS, *LIFTED)


def anchor_of(result: relax.Var, builder: relax.BlockBuilder) -> relax.Var | None:
    """The variable of the convolution or product that `result` is, or that `result` adds a bias to."""
    value = builder.lookup_binding(result)
    if operator(value) in _PRODUCTS:
        return result
    for inner in value.args if operator(value) in ("add", "multiply") else ():
        bound = builder.lookup_binding(inner) if isinstance(inner, relax.Var) else None
        if bound is not None and operator(bound) in _PRODUCTS:
            return inner
    return None


def layer_names(
    result: relax.Var, layer: str, builder: relax.BlockBuilder, named_variables: Container[relax.Var]
) -> dict[relax.Var, str]:
    """`layer` for the variable of its convolution or product, ``layer.out`` for its result if that differs.

    Parameters
    ----------
    builder : BlockBuilder
        Has the bindings of variables.
    named_variables : container of Var
        Variables that have names already: a layer may add to the product of another layer.
    """
    anchor = anchor_of(result, builder)
    if anchor is None or anchor is result or anchor in named_variables:
        return {result: layer}
    return {anchor: layer, result: f"{layer}.out"}


def with_names(mod: tvm.IRModule, names: Mapping[str, str]) -> tvm.IRModule:
    """`mod` with variables named after their layers.

    Parameters
    ----------
    names : mapping of str to str
        From variable names to layer names, which may have any character.
    """
    identifiers = _identifiers(names, {v.name for v in mod["main"].params})

    def rename(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
        return builder.emit(value, name_hint=identifiers[var.name]) if var.name in identifiers else None

    layers = {identifiers[var]: name for var, name in names.items()}
    return LAYER_NAMES.attach(rebuild(mod, rename), layers)


def _identifiers(names: Mapping[str, str], reserved: set[str]) -> dict[str, str]:
    """Distinct variable names for layer names.

    They are not `reserved`, and not of the form that TVM generates.
    """
    used = set(reserved)
    identifiers = {}
    for var, name in names.items():
        base = re.sub(r"\W", "_", name)
        if re.fullmatch(r"(lv|gv)\d*", base):
            base += "_"
        identifiers[var], count = base, 1
        while identifiers[var] in used:
            count += 1
            identifiers[var] = f"{base}__{count}"
        used.add(identifiers[var])
    return identifiers
