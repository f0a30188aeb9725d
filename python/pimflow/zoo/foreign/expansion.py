"""Operators of other domains than ONNX's own, replaced by those of the standard.

ONNX Runtime's optimiser and quantiser, and converters of classical machine learning, write them into files.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

from pimflow.errors import ModelError, UnsupportedOpError
from pimflow.zoo.foreign import quantized, renamed, tabular, transformer, trees
from pimflow.zoo.foreign.builder import ExpandedNode, NodeBuilder

MICROSOFT = transformer.MICROSOFT
DYNAMIC = "DynamicQuantizeLSTM"
_POOL = ("kernel_shape", "strides", "pads", "auto_pad", "ceil_mode", "count_include_pad")
EXPANSIONS: dict[tuple[str, str], Callable[[ExpandedNode], None]] = {
    (MICROSOFT, "Attention"): transformer.attention,
    (MICROSOFT, "BiasGelu"): transformer.gelu,
    (MICROSOFT, "CDist"): renamed.c_dist,
    (MICROSOFT, "ConvTransposeWithDynamicPads"): renamed.conv_transpose_with_dynamic_pads,
    (MICROSOFT, "EmbedLayerNormalization"): transformer.embed_layer_normalization,
    (MICROSOFT, "ExpandDims"): renamed.expand_dims,
    (MICROSOFT, "FastGelu"): transformer.fast_gelu,
    (MICROSOFT, "FusedConv"): transformer.fused_conv,
    (MICROSOFT, "FusedGemm"): transformer.fused_gemm,
    (MICROSOFT, "FusedMatMul"): transformer.fused_mat_mul,
    (MICROSOFT, "GatherBlockQuantized"): quantized.gather_block_quantized,
    (MICROSOFT, "GatherND"): renamed.rename_to("GatherND"),
    (MICROSOFT, "Gelu"): transformer.gelu,
    (MICROSOFT, "GridSample"): renamed.grid_sample,
    (MICROSOFT, "MatMulBnb4"): quantized.mat_mul_bnb4,
    (MICROSOFT, "MatMulInteger16"): renamed.mat_mul_integer16,
    (MICROSOFT, "NhwcMaxPool"): renamed.nhwc_max_pool,
    (MICROSOFT, "Pad"): renamed.rename_to("Pad"),
    (MICROSOFT, "QEmbedLayerNormalization"): transformer.q_embed_layer_normalization,
    (MICROSOFT, "QuickGelu"): transformer.quick_gelu,
    (MICROSOFT, "SkipLayerNormalization"): transformer.skip_layer_normalization,
    (MICROSOFT, "TransposeMatMul"): transformer.fused_mat_mul,
    (MICROSOFT, "Trilu"): renamed.rename_to("Trilu"),
    (MICROSOFT, "UnfoldTensor"): renamed.unfold_tensor,
    (MICROSOFT, "DequantizeLinear"): quantized.dequantize_linear,
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
    (MICROSOFT, "QLinearWhere"): quantized.qlinear_where,
    ("ai.onnx.ml", "ArrayFeatureExtractor"): tabular.array_feature_extractor,
    ("ai.onnx.ml", "Binarizer"): tabular.binarizer,
    ("ai.onnx.ml", "FeatureVectorizer"): tabular.feature_vectorizer,
    ("ai.onnx.ml", "Imputer"): tabular.imputer,
    ("ai.onnx.ml", "LabelEncoder"): tabular.label_encoder,
    (MICROSOFT, "QuantizeLinear"): quantized.quantize_linear,
    ("ai.onnx.ml", "LinearClassifier"): tabular.linear_classifier,
    ("ai.onnx.ml", "LinearRegressor"): tabular.linear_regressor,
    ("ai.onnx.ml", "Normalizer"): tabular.normalizer,
    ("ai.onnx.ml", "OneHotEncoder"): tabular.one_hot_encoder,
    ("ai.onnx.ml", "SVMRegressor"): tabular.svm_regressor,
    ("ai.onnx.ml", "Scaler"): tabular.scaler,
    ("ai.onnx.ml", "TreeEnsemble"): trees.tree_ensemble,
    ("ai.onnx.ml", "TreeEnsembleClassifier"): trees.tree_classifier,
    ("ai.onnx.ml", "TreeEnsembleRegressor"): trees.tree_regressor,
}
_NUMBERS = {"value_float": "float32", "value_floats": "float32", "value_int": "int64", "value_ints": "int64"}
# Their expansions differ by the shapes of operands.
_BY_SHAPE = {
    *("ArrayFeatureExtractor", "Attention", "Col2Im", "CumProd", "DeformConv", "DequantizeLinear", "Det"),
    *("DFT", "EyeLike", "FusedMatMul", "LayerNormalization", "LpPool", "MaxPool", "MaxUnpool", "OneHot"),
    *("QAttention", "QuantizeLinear", "ReduceLogSumExp", "ReverseSequence", "RMSNormalization"),
    *("SpaceToDepth", "STFT"),
    *("MatMulInteger16", "TensorScatter", "TfIdfVectorizer", "TransposeMatMul", "UnfoldTensor"),
}


def is_foreign(node: onnx.NodeProto) -> bool:
    """Whether `EXPANSIONS` has an operator."""
    return operator_key(node) in EXPANSIONS


def operator_key(node: onnx.NodeProto) -> tuple[str, str]:
    """Domain and operator of a node; ONNX's own domain is empty."""
    return "" if node.domain == "ai.onnx" else node.domain, node.op_type


def has_foreign(model: onnx.ModelProto) -> bool:
    """Whether `expand` changes anything."""
    return any(map(is_foreign, model.graph.node))


def expand(
    model: onnx.ModelProto,
    weights: Mapping[str, onnx.TensorProto],
    expansions: Mapping[tuple[str, str], Callable[[ExpandedNode], None]] = EXPANSIONS,
    is_chosen: Callable[[onnx.NodeProto], bool] = is_foreign,
) -> None:
    """Replace operators by what `expansions` make of them, in place; new constants become initializers.

    Parameters
    ----------
    model : ModelProto
        With or without its weights.
    expansions : mapping of (str, str) to callable
        By domain and operator.

    Raises
    ------
    UnsupportedOpError
        For an attribute or an operand that an expansion does not know.
    """
    weights = {**weights, **constants(model.graph)}
    pending = sum(map(is_chosen, model.graph.node))
    while pending:
        chosen = [node for node in model.graph.node if is_chosen(node)]
        types = _tensor_types(model, weights) if any(node.op_type in _BY_SHAPE for node in chosen) else {}
        known = {name for name, entry in types.items() if entry.HasField("shape")} | weights.keys()
        ready = {
            id(node)
            for node in chosen
            if node.op_type not in _BY_SHAPE or known >= set(filter(None, node.input))
        }
        # If none is ready, all are tried, and an error says what is not known.
        _replace(model, ready or set(map(id, chosen)), expansions, weights, types)
        pending = sum(map(is_chosen, model.graph.node))


def constants(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """The tensors of Constant nodes, by result."""
    tensors = {}
    for node in (node for node in graph.node if node.op_type == "Constant" and node.attribute):
        attribute, name = node.attribute[0], node.output[0]
        if attribute.HasField("t"):
            tensors[name] = attribute.t
        elif attribute.name in _NUMBERS:
            value = np.array(helper.get_attribute_value(attribute), _NUMBERS[attribute.name])
            tensors[name] = numpy_helper.from_array(value, name)
    return tensors


def _replace(
    model: onnx.ModelProto,
    ready: Container[int],
    expansions: Mapping[tuple[str, str], Callable[[ExpandedNode], None]],
    weights: Mapping[str, onnx.TensorProto],
    types: Mapping[str, onnx.TypeProto.Tensor],
) -> None:
    """Replace the nodes of `ready`, which are identities of objects."""
    shapes = {
        name: [dim.dim_value for dim in entry.shape.dim]
        for name, entry in types.items()
        if entry.HasField("shape")
    }
    kinds = {name: entry.elem_type for name, entry in types.items() if entry.elem_type}
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
    nodes: list[onnx.NodeProto] = []
    for proto in model.graph.node:
        if id(proto) not in ready:
            nodes.append(proto)
            continue
        builder = NodeBuilder(proto.name or proto.output[0])
        node = ExpandedNode(
            proto=proto, builder=builder, weights=weights, shapes=shapes, kinds=kinds, opset=opset
        )
        try:
            expansions[operator_key(proto)](node)
        except KeyError as error:
            raise ModelError(f"'{proto.name}': {proto.op_type} has no attribute {error}") from None
        except (AttributeError, IndexError, TypeError, ValueError):
            raise ModelError(
                f"'{proto.name}': {proto.op_type} has attributes or constants that contradict each other"
            ) from None
        nodes += builder.nodes
        model.graph.initializer.extend(builder.constants)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)


def _tensor_types(
    model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto]
) -> dict[str, onnx.TypeProto.Tensor]:
    """Type and shape of every tensor that shape inference knows; open sizes are 0."""
    light = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    light.graph.CopyFrom(model.graph)
    stored = {tensor.name for tensor in light.graph.initializer}
    for name, tensor in weights.items():
        if name not in stored:
            light.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
    graph = shape_inference.infer_shapes(light).graph
    values = (*graph.input, *graph.value_info, *graph.output)
    return {value.name: value.type.tensor_type for value in values if value.type.HasField("tensor_type")}


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
        if node.op_type != DYNAMIC:
            continue
        node.op_type, node.domain = "LSTM", ""
        if not {*node.input[1:3]} <= tensors.keys():
            raise UnsupportedOpError(f"'{node.name}': {DYNAMIC} with computed weights is not supported")
        for index in (1, 2):
            wide = f"{node.name}.typed{index}"
            directions, width, gates = tensors[node.input[index]].dims
            model.graph.input.append(
                helper.make_tensor_value_info(wide, TensorProto.FLOAT, [directions, gates, width])
            )
            node.input[index] = wide
        del node.input[8:]
