"""Networks into the canonical Relax form."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping

import onnx
import onnxruntime
import tvm
from onnx import helper
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter

from pimflow import zoo
from pimflow.errors import ModelError, PimflowError, UnsupportedOpError
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
    """An ONNX network with fixed shapes in canonical Relax form; see `Canonicalise`.

    Raises
    ------
    ModelError, UnsupportedOpError
        If two nodes carry one name, or if TVM cannot import it, also after ONNX Runtime has folded what
        depends on shapes only.
    """
    counts = Counter(node.name for node in model.graph.node if node.name)
    shared = next((name for name, count in counts.items() if count > 1), None)
    if shared is not None:
        name = model.graph.name
        raise ModelError(f"model '{name}': {counts[shared]} nodes are named '{shared}'; rename them")
    model = _inference_graph(model)
    try:
        return _canonical(model)
    except ModelError:
        folded = _shapes_folded(model)
        if folded is None:
            raise
        return _canonical(folded)


def _canonical(model: onnx.ModelProto) -> tvm.IRModule:
    name = model.graph.name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return Canonicalise()(_import(model))
        except PimflowError:
            raise
        except tvm.error.OpNotImplemented as error:
            raise UnsupportedOpError(f"model '{name}': {_last_line(error)}") from error
        except Exception as error:  # importer and passes raise whatever their operators raise
            raise ModelError(f"model '{name}' cannot be imported: {_last_line(error)}") from error


def _shapes_folded(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """The network as ONNX Runtime's basic optimisations leave it; None if they fail."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 4
    with tempfile.TemporaryDirectory() as scratch:
        options.optimized_model_filepath = os.path.join(scratch, "model.onnx")
        try:
            onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
            return onnx.load(options.optimized_model_filepath)
        except Exception:  # ONNX Runtime's own hierarchy; TVM's error says more
            return None


class _NamingImporter(ONNXGraphImporter):
    """TVM's importer, noting which variable holds which ONNX node's convolution, product or result."""

    def __init__(self) -> None:
        super().__init__({}, "float32", keep_params_in_input=False)
        self.names: dict[relax.Var, str] = {}

    def _convert_operator(self, op_name, node_inputs, attrs, opset):
        result = super()._convert_operator(op_name, node_inputs, attrs, opset)
        name = attrs.get("tvm_custom", {}).get("name")
        if name and isinstance(result, relax.Call):
            result = self.bb.emit(result)
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
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)
    importer = _NamingImporter()
    with contextlib.redirect_stdout(io.StringIO()):  # the importer prints the operators it fails on
        mod = importer.from_onnx(model.graph, opset)
    identifiers = _identifiers(importer.names, [v.name for v in mod["main"].params])

    def rename(builder, var, value):
        return builder.emit(value, name_hint=identifiers[var]) if var in identifiers else None

    layers = {identifiers[var]: name for var, name in importer.names.items()}
    return with_layer_names(rebuild(mod, rename), layers)


def _identifiers(names: dict[relax.Var, str], reserved: Iterable[str]) -> dict[relax.Var, str]:
    """Distinct variable names for layer names, which may hold any character.

    None is `reserved`, nor one that TVM makes up.
    """
    taken = set(reserved)
    identifiers = {}
    for var, name in names.items():
        plain = re.sub(r"\W", "_", name)
        if re.fullmatch(r"(lv|gv)\d*", plain):
            plain += "_"
        identifiers[var], count = plain, 1
        while identifiers[var] in taken:
            count += 1
            identifiers[var] = f"{plain}__{count}"
        taken.add(identifiers[var])
    return identifiers


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


def _inference_graph(model: onnx.ModelProto) -> onnx.ModelProto:
    """Sums as additions, and nodes that do nothing at inference left out.

    The importer stacks the operands of a Sum, which hides a residual connection, and makes a tuple of
    a Dropout, which TVM's layout pass does not survive.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    outputs = {value.name for value in graph.output}
    same: dict[str, str] = {}
    nodes = []
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = same.get(name, name)
        skipped = (node.op_type in ("Identity", "Sum") and len(node.input) == 1) or (
            node.op_type == "Dropout" and not any(name in used for name in node.output[1:])
        )
        if skipped and node.output[0] not in outputs:
            same[node.output[0]] = node.input[0]
        elif skipped:
            nodes.append(helper.make_node("Identity", node.input[:1], node.output[:1], name=node.name))
        elif node.op_type == "Sum":
            nodes += _additions(node)
        else:
            nodes.append(node)
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)
    return copy


def _additions(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    nodes, left = [], node.input[0]
    for index, right in enumerate(node.input[1:], 1):
        last = index == len(node.input) - 1
        out = node.output[0] if last else f"{node.output[0]}.{index}"
        name = node.name if last else f"{node.name}.{index}"
        nodes.append(helper.make_node("Add", [left, right], [out], name=name))
        left = out
    return nodes
