"""Roles of decomposed layers in the metadata of ONNX models, where they survive training elsewhere."""

from __future__ import annotations

import onnx
import tvm

from pimflow.core.region import ROLES
from pimflow.core.table_files import parse_json
from pimflow.errors import ModelError
from pimflow.relay_passes.flat import LAYER_ROLES, layer_name, main_bindings

# Key of the model's metadata. Its value is a JSON object from names of nodes to `core.region.ROLES`.
ROLES_KEY = "pimflow.roles"


def read_roles(model: onnx.ModelProto) -> dict[str, str]:
    """Read roles by node from the metadata of a model; raises `ModelError` for an unknown role."""
    metadata = next((entry.value for entry in model.metadata_props if entry.key == ROLES_KEY), "{}")
    where = f"model '{model.graph.name}': its metadata '{ROLES_KEY}'"
    node_roles = parse_json(metadata, where, ModelError)
    if not isinstance(node_roles, dict) or not all(role in ROLES for role in node_roles.values()):
        role_names = ", ".join(ROLES[1:])
        raise ModelError(f"{where} has no role of {role_names} for each node that it names; remove it")
    return node_roles


def with_stored_roles(mod: tvm.IRModule, model: onnx.ModelProto) -> tvm.IRModule:
    """`mod`, which is imported from `model`, with roles from the metadata for existing layers.

    Raises
    ------
    ModelError
        If the metadata is not of the form of `ROLES_KEY`.
    """
    stored = read_roles(model)
    if not stored:
        return mod
    layers = {layer_name(mod, binding.var) for binding in main_bindings(mod)}
    present = {layer: role for layer, role in stored.items() if layer in layers}
    return LAYER_ROLES.attach(mod, LAYER_ROLES.read(mod) | present) if present else mod
