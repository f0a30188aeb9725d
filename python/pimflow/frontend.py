"""Networks into the canonical Relax form."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping

import onnx
import tvm
from onnx import helper
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

from pimflow import zoo
from pimflow.errors import ModelError, UnsupportedOpError
from pimflow.relay_passes.canonicalise import ANCHORS, Canonicalise
from pimflow.relay_passes.flat import operator, rebuild, with_layer_names


def load(
    model: str | os.PathLike | onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> tuple[onnx.ModelProto, tvm.IRModule]:
    """A network as ONNX, and in canonical Relax form.

    Parameters
    ----------
    model : str, path or ModelProto
        Name of the embedded zoo, or an ONNX file.
    shapes : mapping of str to tuple of int, optional
        Shapes of inputs that the file leaves open.

    Raises
    ------
    UnknownNameError, ModelError
        If there is no such network, or the file cannot be read.
    UnsupportedOpError
        If the network uses an operator that cannot be imported.
    """
    proto = zoo.load_model(model, dict(shapes or {}))
    return proto, from_onnx(proto)


def from_onnx(model: onnx.ModelProto) -> tvm.IRModule:
    """An ONNX network with fixed shapes in canonical Relax form; see `Canonicalise`."""
    return Canonicalise()(_import(model))


class _NamingImporter(ONNXGraphImporter):
    """TVM's importer, noting which variable holds which ONNX node's convolution, product or result."""

    def __init__(self) -> None:
        super().__init__({}, "float32", keep_params_in_input=False)
        self.names: dict[relax.Var, str] = {}

    def _convert_operator(self, op_name, node_inputs, attrs, opset):
        result = super()._convert_operator(op_name, node_inputs, attrs, opset)
        name = attrs.get("tvm_custom", {}).get("name")
        if name and isinstance(result, relax.Call):
            result = self.bb.emit(result, name_hint=name)
            anchor = self._anchor(result)
            self.names[result] = name
            if anchor is not None and anchor is not result:
                self.names |= {anchor: name, result: f"{name}.out"}
        return result

    def _anchor(self, var: relax.Var) -> relax.Var | None:
        """The convolution or product that `var` is, or adds a bias to."""
        value = self.bb.lookup_binding(var)
        if operator(value) in ANCHORS:
            return var
        inner = value.args[0] if operator(value) in ("add", "multiply") else None
        if isinstance(inner, relax.Var) and inner not in self.names:
            value = self.bb.lookup_binding(inner)
            return inner if value is not None and operator(value) in ANCHORS else None
        return None


def _import(model: onnx.ModelProto) -> tvm.IRModule:
    model = _plain_sums(model)
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importer = _NamingImporter()
            mod = importer.from_onnx(model.graph, opset)
        except tvm.error.OpNotImplemented as error:
            raise UnsupportedOpError(f"model '{model.graph.name}': {_last_line(error)}") from error
        except Exception as error:  # the importer raises whatever its operators raise
            raise ModelError(f"model '{model.graph.name}' cannot be imported: {_last_line(error)}") from error

    identifiers = _identifiers(importer.names)

    def rename(builder, var, value):
        return builder.emit(value, name_hint=identifiers[var]) if var in identifiers else None

    layers = {identifiers[var]: name for var, name in importer.names.items()}
    return with_layer_names(rebuild(mod, rename), layers)


def _identifiers(names: dict[relax.Var, str]) -> dict[relax.Var, str]:
    """Distinct variable names for layer names, which may hold any character."""
    taken: dict[str, int] = {}
    identifiers = {}
    for var, name in names.items():
        plain = re.sub(r"\W", "_", name)
        taken[plain] = taken.get(plain, 0) + 1
        identifiers[var] = plain if taken[plain] == 1 else f"{plain}__{taken[plain]}"
    return identifiers


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


def _plain_sums(model: onnx.ModelProto) -> onnx.ModelProto:
    """Sum as additions: the importer stacks its operands, which hides a residual connection."""
    if not any(node.op_type == "Sum" for node in model.graph.node):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    nodes = []
    for node in copy.graph.node:
        if node.op_type != "Sum":
            nodes.append(node)
            continue
        left = node.input[0]
        for index, right in enumerate(node.input[1:], 1):
            last = index == len(node.input) - 1
            out = node.output[0] if last else f"{node.output[0]}.{index}"
            name = node.name if last else f"{node.name}.{index}"
            nodes.append(helper.make_node("Add", [left, right], [out], name=name))
            left = out
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return copy
