"""Operators of other domains than ONNX's own, replaced by those of the standard.

ONNX Runtime's optimiser and quantiser, and converters of classical machine learning, write them into files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx
from onnx import TensorProto, helper, shape_inference

from pimflow.zoo.foreign import quantized, tabular, transformer
from pimflow.zoo.foreign.builder import ForeignNode, GraphBuilder

MICROSOFT = transformer.MICROSOFT
_POOL = ("kernel_shape", "strides", "pads", "auto_pad", "ceil_mode", "count_include_pad")
EXPANSIONS: dict[tuple[str, str], Callable[[ForeignNode], None]] = {
    (MICROSOFT, "Attention"): transformer.attention,
    (MICROSOFT, "BiasGelu"): transformer.gelu,
    (MICROSOFT, "EmbedLayerNormalization"): transformer.embed_layer_normalization,
    (MICROSOFT, "FastGelu"): transformer.fast_gelu,
    (MICROSOFT, "FusedConv"): transformer.fused_conv,
    (MICROSOFT, "FusedGemm"): transformer.fused_gemm,
    (MICROSOFT, "FusedMatMul"): transformer.fused_mat_mul,
    (MICROSOFT, "Gelu"): transformer.gelu,
    (MICROSOFT, "QuickGelu"): transformer.quick_gelu,
    (MICROSOFT, "SkipLayerNormalization"): transformer.skip_layer_normalization,
    (MICROSOFT, "TransposeMatMul"): transformer.fused_mat_mul,
    (MICROSOFT, "DynamicQuantizeMatMul"): quantized.dynamic_quantize_mat_mul,
    (MICROSOFT, "MatMulIntegerToFloat"): quantized.mat_mul_integer_to_float,
    (MICROSOFT, "MatMulNBits"): quantized.mat_mul_nbits,
    (MICROSOFT, "QAttention"): quantized.qattention,
    (MICROSOFT, "QGemm"): quantized.qgemm,
    (MICROSOFT, "QLinearAdd"): quantized.qlinear_binary("Add"),
    (MICROSOFT, "QLinearAveragePool"): quantized.qlinear_unary("AveragePool", *_POOL),
    (MICROSOFT, "QLinearConcat"): quantized.qlinear_concat,
    ("", "QLinearConv"): quantized.qlinear_conv,
    (MICROSOFT, "QLinearConv"): quantized.qlinear_conv,
    (MICROSOFT, "QLinearGlobalAveragePool"): quantized.qlinear_unary("GlobalAveragePool"),
    (MICROSOFT, "QLinearLeakyRelu"): quantized.qlinear_unary("LeakyRelu", "alpha"),
    ("", "QLinearMatMul"): quantized.qlinear_mat_mul,
    (MICROSOFT, "QLinearMul"): quantized.qlinear_binary("Mul"),
    (MICROSOFT, "QLinearSigmoid"): quantized.qlinear_unary("Sigmoid"),
    (MICROSOFT, "QLinearSoftmax"): quantized.qlinear_unary("Softmax", "axis"),
    ("ai.onnx.ml", "ArrayFeatureExtractor"): tabular.array_feature_extractor,
    ("ai.onnx.ml", "Binarizer"): tabular.binarizer,
    ("ai.onnx.ml", "Imputer"): tabular.imputer,
    ("ai.onnx.ml", "LinearRegressor"): tabular.linear_regressor,
    ("ai.onnx.ml", "Normalizer"): tabular.normalizer,
    ("ai.onnx.ml", "Scaler"): tabular.scaler,
}
# Their expansions differ by the number of dimensions of an operand.
_BY_RANK = {"ArrayFeatureExtractor", "Attention", "FusedMatMul", "QAttention", "TransposeMatMul"}


def has_foreign(model: onnx.ModelProto) -> bool:
    """Whether `expand` changes anything."""
    return any(map(_is_foreign, model.graph.node))


def _domain(node: onnx.NodeProto) -> str:
    return "" if node.domain == "ai.onnx" else node.domain


def _is_foreign(node: onnx.NodeProto) -> bool:
    return (_domain(node), node.op_type) in EXPANSIONS


def expand(model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto]) -> None:
    """Replace operators of `EXPANSIONS` by standard ones, in place; new constants become initializers.

    Parameters
    ----------
    model : ModelProto
        With or without its weights.
    weights : mapping of str to TensorProto
        All weights by name.

    Raises
    ------
    UnsupportedOpError
        For an attribute or an operand that an expansion does not know.
    """
    weights = {**weights, **_constants(model.graph)}
    pending = sum(map(_is_foreign, model.graph.node))
    while pending:
        ranks = _ranks(model, weights)
        _expand_ready(model, weights, ranks)
        remaining = sum(map(_is_foreign, model.graph.node))
        if remaining == pending:
            _expand_ready(model, weights, ranks, last=True)  # raises
        pending = remaining


def _constants(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    return {
        node.output[0]: node.attribute[0].t
        for node in graph.node
        if node.op_type == "Constant" and node.attribute[0].HasField("t")
    }


def _expand_ready(
    model: onnx.ModelProto,
    weights: Mapping[str, onnx.TensorProto],
    ranks: Mapping[str, int],
    last: bool = False,
) -> None:
    """Replace the nodes whose operands are of known rank, or all of them the `last` time."""
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
    nodes: list[onnx.NodeProto] = []
    for proto in model.graph.node:
        waits = proto.op_type in _BY_RANK and not ranks.keys() | weights.keys() >= set(
            filter(None, proto.input)
        )
        if not _is_foreign(proto) or (waits and not last):
            nodes.append(proto)
            continue
        builder = GraphBuilder(proto.name or proto.output[0])
        node = ForeignNode(proto=proto, builder=builder, weights=weights, ranks=ranks, opset=opset)
        EXPANSIONS[_domain(proto), proto.op_type](node)
        nodes += builder.nodes
        model.graph.initializer.extend(builder.constants)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)


def _ranks(model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto]) -> dict[str, int]:
    """The number of dimensions of every tensor that shape inference knows."""
    if not any(node.op_type in _BY_RANK and _is_foreign(node) for node in model.graph.node):
        return {}
    light = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    light.graph.CopyFrom(model.graph)
    stored = {tensor.name for tensor in light.graph.initializer}
    for name, tensor in weights.items():
        if name not in stored:
            light.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
    graph = shape_inference.infer_shapes(light).graph
    values = (*graph.input, *graph.value_info, *graph.output)
    return {
        value.name: len(value.type.tensor_type.shape.dim)
        for value in values
        if value.type.tensor_type.HasField("shape")
    }


def infer_types(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` with inferred shapes, those of results of foreign operators too; raises `InferenceError`."""
    typed = onnx.ModelProto()
    typed.CopyFrom(model)
    expand(typed, {tensor.name: tensor for tensor in model.graph.initializer})
    _widen_dynamic_recurrent(typed)
    inferred = shape_inference.infer_shapes(typed, strict_mode=True, data_prop=True)
    names = {name for node in model.graph.node for name in node.output}
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.value_info[:]
    result.graph.value_info.extend(value for value in inferred.graph.value_info if value.name in names)
    del result.graph.output[:]
    result.graph.output.extend(inferred.graph.output)
    return result


def _widen_dynamic_recurrent(model: onnx.ModelProto) -> None:
    """Replace each DynamicQuantizeLSTM by an LSTM of the same shapes, in place; only its types count."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type != "DynamicQuantizeLSTM":
            continue
        node.op_type, node.domain = "LSTM", ""
        for index in (1, 2):
            wide = f"{node.name}.typed{index}"
            directions, width, gates = tensors[node.input[index]].dims
            model.graph.input.append(
                helper.make_tensor_value_info(wide, TensorProto.FLOAT, [directions, gates, width])
            )
            node.input[index] = wide
        del node.input[8:]
