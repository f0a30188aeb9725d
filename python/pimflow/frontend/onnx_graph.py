"""ONNX networks into the canonical Relax form."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
import onnx
import onnxruntime
import tvm
from onnx import helper
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from pimflow.errors import ModelError, PimflowError, UnsupportedOpError
from pimflow.frontend.naming import layer_names, with_names
from pimflow.frontend.relax_module import canonical, last_line


def from_onnx(model: onnx.ModelProto) -> tvm.IRModule:
    """An ONNX network with fixed shapes in canonical Relax form; see `Canonicalise`.

    Raises
    ------
    ModelError, UnsupportedOpError
        If two nodes carry one name, or if TVM cannot import it, also after ONNX Runtime has folded what
        depends on shapes only.
    """
    return _as_given_or_folded(model, lambda m: canonical(_import(m), m.graph.name))


def imported(model: onnx.ModelProto, keep_params: bool = False) -> tvm.IRModule:
    """An ONNX network with fixed shapes in Relax, not yet canonical; raises what `from_onnx` does.

    Parameters
    ----------
    keep_params : bool
        Whether weights are inputs of ``main`` after its own, their values in its attribute ``params``.
    """
    return _as_given_or_folded(model, lambda m: _import(m, keep_params))


def _as_given_or_folded(
    model: onnx.ModelProto, convert: Callable[[onnx.ModelProto], tvm.IRModule]
) -> tvm.IRModule:
    counts = Counter(node.name for node in model.graph.node if node.name)
    shared = next((name for name, count in counts.items() if count > 1), None)
    if shared is not None:
        name = model.graph.name
        raise ModelError(f"model '{name}': {counts[shared]} nodes are named '{shared}'; rename them")
    model = _inference_graph(model)
    try:
        return convert(model)
    except ModelError:
        folded = _shapes_folded(model)
        if folded is None:
            raise
        return convert(folded)


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


class _NamingImporter(onnx_frontend.ONNXGraphImporter):
    """TVM's importer, noting which variable holds which ONNX node's convolution, product or result."""

    def __init__(self, keep_params: bool) -> None:
        super().__init__({}, "float32", keep_params_in_input=keep_params, sanitize=False)
        self.names: dict[relax.Var, str] = {}

    def _convert_operator(self, op_name, node_inputs, attrs, opset):
        result = super()._convert_operator(op_name, node_inputs, attrs, opset)
        name = attrs.get("tvm_custom", {}).get("name")
        if name and isinstance(result, relax.Call):
            result = self.bb.emit(result)
            self.names |= layer_names(result, name, self.bb, self.names)
        return result


def _import(model: onnx.ModelProto, keep_params: bool = False) -> tvm.IRModule:
    _check_operators(model)
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)
    importer, name = _NamingImporter(keep_params), model.graph.name
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            mod = importer.from_onnx(model.graph, opset)  # prints the operators it fails on
        except PimflowError:
            raise
        except tvm.error.OpNotImplemented as error:
            raise UnsupportedOpError(f"model '{name}': {last_line(error)}") from error
        except Exception as error:  # whatever its operators raise
            raise ModelError(f"model '{name}' cannot be imported: {last_line(error)}") from error
    return with_names(mod, {var.name: layer for var, layer in importer.names.items()})


def _check_operators(model: onnx.ModelProto) -> None:
    """Raise `UnsupportedOpError`, naming operator and node, for what the importer has no rule for."""
    known = set(onnx_frontend._get_convert_map()) | {"Constant", "If"}
    odd = [n for n in model.graph.node if n.op_type not in known or n.domain not in ("", "ai.onnx")]
    if odd:
        kinds = sorted({n.op_type for n in odd} - {odd[0].op_type})
        others = f"; nor can {', '.join(kinds)}" if kinds else ""
        raise UnsupportedOpError(
            f"model '{model.graph.name}': operator {odd[0].op_type} of node '{_called(odd[0])}' cannot be "
            f"imported{others}; export the network without it, or cut the model there"
        )


def _called(node: onnx.NodeProto) -> str:
    """A node's name, or that of its result if it has none."""
    return node.name or next(iter(node.output), "")


def reference(model: onnx.ModelProto) -> Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]:
    """Outputs of `model` by ONNX Runtime."""

    def run(values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return session.run(None, dict(values))

    return run


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
