"""TVM's importer of ONNX networks, with layers named after nodes, and with further operators."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import onnx
import tvm
from onnx import helper, numpy_helper
from tvm import relax, topi
from tvm.relax.frontend.onnx import onnx_frontend

from pimflow import zoo
from pimflow.errors import ModelError, UnsupportedOpError, last_line
from pimflow.frontend.float8 import FLOAT8, float8_values
from pimflow.frontend.integer_products import convert_integer_product
from pimflow.frontend.naming import layer_names
from pimflow.frontend.onnx_attention import CONVERTERS
from pimflow.frontend.onnx_node import OnnxNode
from pimflow.frontend.onnx_resize import Resizing
from pimflow.frontend.quantisation import convert_quantisation
from pimflow.relay_passes.flat import operator, shape

# The importer stacks their operands, which TVM's layout pass cannot handle.
_PAIRWISE = {"Max": relax.op.maximum, "Min": relax.op.minimum, "Mean": relax.op.add}


_LARGEST_POWER = 1 << 16  # whose products are written out; 2 of a larger one is no number of 64 bits
_OPSET_OF_FULL_MASKS = 12  # of Dropout
# By operator, the operands that have to be constants.
_CONSTANTS = {"Squeeze": {1: "axes"}, "Unsqueeze": {1: "axes"}, "Trilu": {1: "diagonals"}}

# By operator on a sequence, the operand that is a place in it.
_PLACES = {"SequenceAt": 1, "SequenceErase": 1, "SequenceInsert": 2}

# Default alpha and gamma.
_EXPONENTIAL = {
    "Celu": (1.0, 1.0),
    "Elu": (1.0, 1.0),
    "Selu": (1.67326319217681884765625, 1.05070102214813232421875),
}


class NamingImporter(onnx_frontend.ONNXGraphImporter):
    """TVM's importer, which records the variables of each ONNX node's convolution, product or result.

    Weights of the imported graph are initializers of `weights`, or inputs that say how to draw them.
    """

    def __init__(self, weights: onnx.GraphProto, keep_params: bool) -> None:
        super().__init__({}, "float32", keep_params_in_input=keep_params, sanitize=False)
        self.weights = weights
        self.names: dict[relax.Var, str] = {}
        self.declared: dict[str, onnx.ValueInfoProto | None] = {}  # first results of nodes, by name
        self.returned: set[str] = set()
        self.caches: dict[str, onnx.ValueInfoProto | None] = {}  # second results of nodes, by name
        self.sight: dict[tuple, relax.Expr] = {}

    def _check_for_unsupported_ops(self, graph):
        """Does nothing: operators are checked before, and TVM's check ignores domains."""

    def from_onnx(self, graph, opset):
        """Import `graph`; overrides TVM's method."""
        source, graph = graph, onnx.GraphProto()
        graph.CopyFrom(source)  # its nodes are renamed below
        values = {value.name: value for value in (*graph.value_info, *graph.output)}
        counts = Counter(node.name for node in graph.node)
        counts[""] = 0  # nodes of inlined functions have no name
        unique_nodes = [node for node in graph.node if counts[node.name] == 1]
        self.declared = {node.name: values.get(node.output[0]) for node in unique_nodes}
        self.caches = {node.name: values.get(node.output[1]) for node in unique_nodes if len(node.output) > 1}
        for node in graph.node:
            if node.domain not in ("", "ai.onnx"):
                node.op_type = f"{node.domain}.{node.op_type}"  # TVM finds operators by name only
        self.returned = {value.name for value in graph.output}
        for value in graph.input:  # TVM takes a size of 0 for an open one
            sizes = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            if 0 in sizes:
                self._shape[value.name] = sizes
        super()._parse_graph_initializers(self.weights)
        for value in filter(zoo.is_weight, self.weights.input):
            self._nodes[value.name] = relax.const(_draw_weight(value))
        return super().from_onnx(graph, opset)

    def _parse_array(self, tensor_proto):
        if tensor_proto.data_type not in FLOAT8:
            return super()._parse_array(tensor_proto)
        return tvm.runtime.tensor(numpy_helper.to_array(tensor_proto).astype(np.float32))

    def _convert_operator(self, op_name, node_inputs, attrs, opset):
        try:
            return self._convert_node(op_name, node_inputs, attrs, opset)
        except Exception as error:  # any error of a converter
            name = attrs.get("tvm_custom", {}).get("name")
            lacking = isinstance(error, tvm.error.OpNotImplemented | UnsupportedOpError)
            kind = UnsupportedOpError if lacking else ModelError
            raise kind(f"{op_name} of node '{name}' cannot be imported: {last_line(error)}") from error

    def _convert_node(self, op_name, node_inputs, attrs, opset):
        name = attrs.get("tvm_custom", {}).get("name")
        result_count = attrs.get("tvm_custom", {}).get("num_outputs", 1)
        domain, _, kind = op_name.rpartition(".")
        if (domain, kind) in CONVERTERS:
            return self._convert_language_operator(domain, kind, node_inputs, attrs)
        if op_name == "TopK":
            attrs = {**attrs, "sorted": 1}  # where any order is right, so is this one
        if op_name == "Dropout" and result_count > 1:
            result = self._identity_dropout(node_inputs[0], opset)
        else:
            result = self._convert_otherwise(op_name, node_inputs, attrs, result_count)
        if result is None:
            result = self._convert_by_importer(op_name, node_inputs, attrs, opset)
        result = self._cast_to_declared(result, name)
        if result_count > 1 and isinstance(result.ty, relax.TensorType):
            raise ValueError(f"only the first of its {result_count} results can be computed")
        if name and isinstance(result, relax.Call):
            result = self.bb.emit(result)
            self.names |= layer_names(result, name, self.bb, self.names)
        elif name:
            self._name_results(result, name)
        return result

    def _name_results(self, result, name):
        """Name the variables of results that are bound already; the first has the node's name."""
        fields = result.fields if isinstance(result, relax.Tuple) else [result]
        for index, field in enumerate(fields):
            if isinstance(field, relax.Var) and field not in self.names:
                self.names[field] = f"{name}.{index}" if index else name

    def _require_supported(self, op_name, node_inputs, attrs):
        """Raise `UnsupportedOpError` for what neither TVM's importer nor this one converts."""
        for index, what in _CONSTANTS.get(op_name, {}).items():
            if index < len(node_inputs) and isinstance(self._constant_value(node_inputs[index]), relax.Expr):
                raise UnsupportedOpError(f"{what} that are computed are not supported")
        computes_count = op_name == "Unique" and isinstance(self._constant_value(node_inputs[0]), relax.Expr)
        if op_name == "Range":
            bounds = [self._constant_value(bound) for bound in node_inputs]
            computes_count = any(isinstance(bound, relax.Expr) and _is_tensor(bound) for bound in bounds)
        if op_name == "NonMaxSuppression" or computes_count:
            raise UnsupportedOpError("the number of its results depends on the data")
        if op_name == "RoiAlign" and attrs.get("mode", b"avg") == b"max":
            raise UnsupportedOpError("mode 'max' is not supported")
        if op_name == "TopK" and str(node_inputs[0].ty.dtype) == "uint64":
            raise UnsupportedOpError("operands of uint64 are not supported")

    def _convert_otherwise(self, op_name, node_inputs, attrs, result_count):
        """Convert an operator that TVM's importer lacks, or gets wrong; None for all others."""
        if op_name in _PAIRWISE:
            result = functools.reduce(lambda x, y: self.bb.normalize(_PAIRWISE[op_name](x, y)), node_inputs)
            if op_name == "Mean" and len(node_inputs) > 1:
                count = relax.const(len(node_inputs), str(result.ty.dtype))
                result = self.bb.normalize(relax.op.divide(result, count))
            return result
        if op_name == "Pow":
            return self._power(*node_inputs)
        if op_name == "Mod" and not attrs.get("fmod", 0) and "float" in str(node_inputs[0].ty.dtype):
            return self._remainder(*node_inputs)
        if op_name == "Clip" and len(node_inputs) == 3 and str(node_inputs[0].ty.dtype) == "float32":
            low, high = map(self._constant_value, node_inputs[1:])
            if isinstance(low, np.ndarray) and isinstance(high, np.ndarray) and low <= high:
                return relax.op.clip(node_inputs[0], low.item(), high.item())
        if op_name == "Cast" and self._is_integral(node_inputs[0], attrs["to"]):
            return relax.op.astype(node_inputs[0], onnx_frontend.get_type(attrs["to"]))
        if op_name == "Cast" and attrs["to"] in FLOAT8:
            wide = self._normal(relax.op.astype(node_inputs[0], "float32"))
            return float8_values(self.bb, wide, FLOAT8[attrs["to"]], bool(attrs.get("saturate", 1)))
        if op_name == "BitCast":
            return self._bit_cast(node_inputs[0], helper.tensor_dtype_to_np_dtype(attrs["to"]))
        if op_name == "BitShift":
            return self._bit_shift(*node_inputs, attrs["direction"])
        if op_name in ("DequantizeLinear", "QuantizeLinear"):
            values = [self._constant_value(operand) for operand in node_inputs]
            return convert_quantisation(op_name, node_inputs, values, attrs, self._normal)
        self._require_supported(op_name, node_inputs, attrs)
        if op_name in _PLACES or op_name == "SequenceLength":
            return self._convert_sequence(op_name, node_inputs)
        if op_name == "Compress" and isinstance(selected := self._constant_value(node_inputs[1]), np.ndarray):
            flat = node_inputs[0] if "axis" in attrs else relax.op.reshape(node_inputs[0], (-1,))
            flat, axis = self.bb.normalize(flat), attrs.get("axis", 0)
            places = np.flatnonzero(selected[: shape(flat)[axis]])  # as ONNX Runtime, if there are more
            return self.bb.normalize(relax.op.take(flat, relax.const(places), axis))
        if op_name in _EXPONENTIAL and str(node_inputs[0].ty.dtype) == "float32":
            return self._exponential(op_name, node_inputs[0], attrs)
        if op_name == "ThresholdedRelu":  # the importer's multiplies, which gives NaN for infinity
            x, bound = node_inputs[0], relax.const(attrs.get("alpha", 1.0), str(node_inputs[0].ty.dtype))
            above = self.bb.normalize(relax.op.greater(x, bound))
            return self.bb.normalize(relax.op.where(above, x, self.bb.normalize(relax.op.zeros_like(x))))
        if op_name == "InstanceNormalization":
            return self._normalise_channels(*node_inputs, attrs)
        if op_name == "LpNormalization":
            return self._normalise_length(node_inputs[0], attrs)
        if op_name == "Split" and result_count == 1:
            return node_inputs[0]  # TVM returns a tuple only for several parts
        if op_name == "Gather" and _is_one_index(*node_inputs):
            data, axis = node_inputs[0], attrs.get("axis", 0)
            index = int(node_inputs[1].value.numpy()) % shape(data)[axis]
            return relax.op.take(data, relax.const(index, "int64"), axis)  # the importer emits kernels
        if op_name == "Gather" and _is_table(*node_inputs):
            return relax.op.take(*node_inputs, attrs.get("axis", 0), mode="wrap")  # -1 is the last
        return self._constant_pad(node_inputs, attrs) if op_name == "Pad" else None

    def _convert_by_importer(self, op_name, node_inputs, attrs, opset):
        """Convert an operator by TVM's importer, with operands and attributes that it converts rightly."""
        if op_name in ("ConvInteger", "MatMulInteger"):
            values = [self._constant_value(operand) for operand in node_inputs]
            result = convert_integer_product(op_name, node_inputs, values, attrs, self._normal)
            if result is not None:
                return result
        if op_name == "ConvInteger":
            op_name, node_inputs = "Conv", self._subtract_zero_points(*node_inputs)
        elif op_name == "ConvTranspose" and "output_shape" in attrs:
            attrs = _explicit_padding(attrs, shape(node_inputs[0]), shape(node_inputs[1]))
        elif op_name in ("Squeeze", "Unsqueeze") and len(node_inputs) > 1:
            axes = self._constant_value(node_inputs[1])
            if isinstance(axes, np.ndarray) and not axes.ndim:
                node_inputs[1] = relax.const(axes.reshape(1))
        elif op_name == "Resize":
            return self._resize(node_inputs, attrs, opset)
        elif op_name == "RoiAlign":
            node_inputs[1] = self._centre_regions(node_inputs[1], attrs, opset)
        elif op_name in ("Scatter", "ScatterElements"):
            axis, dims = attrs.get("axis", 0), shape(node_inputs[0])
            if _is_partial(dims, shape(node_inputs[1]), axis):
                flat, attrs = self._flat_scatter(*node_inputs, axis), attrs | {"axis": 0}
                result = self._normal(super()._convert_operator(op_name, flat, attrs, opset))
                return self._normal(relax.op.reshape(result, dims))
        result = super()._convert_operator(op_name, node_inputs, attrs, opset)
        if operator(result) == "take":  # the importer's reads out of bounds
            result = relax.op.take(*result.args, result.attrs.axis, mode="clip")
        return result

    def _convert_language_operator(
        self, domain: str, kind: str, operands: Sequence[relax.Expr | None], attrs: dict
    ):
        """Convert an operator of `onnx_attention`, and name its variables after the node."""
        name = attrs["tvm_custom"]["name"]
        cache = self.caches.get(name)
        dims = zoo.dims_of(cache) if cache is not None else None
        node = OnnxNode(
            builder=self.bb,
            operands=list(operands),
            attrs=attrs,
            results=attrs["tvm_custom"]["num_outputs"],
            value_of=self._constant_value,
            present=dims[2] or 0 if dims is not None and len(dims) == 4 else 0,
            sight=self.sight,
        )
        result = CONVERTERS[domain, kind](node)
        layer_by_var = {var: f"{name}.{part}" if part else name for var, part in node.names.items()}
        first = result.fields[0] if isinstance(result, relax.Tuple) else self.bb.emit(result)
        if first not in layer_by_var:
            layer_by_var[first] = f"{name}.out" if name in layer_by_var.values() else name
        self.names |= {var: layer for var, layer in layer_by_var.items() if var not in self.names}
        several = isinstance(result, relax.Tuple) and len(result.fields) > 1
        return result if several else first

    def _convert_sequence(self, op_name: str, operands: Sequence[relax.Expr | None]) -> relax.Expr:
        """Convert an operator on the elements of a sequence; negative places count from its end.

        TVM's importer takes place -1 of an insertion as behind the last element, and no sequences of a Split.
        """
        sequence = self._normal(operands[0])
        elements: list[relax.Expr] = [
            self._normal(relax.TupleGetItem(sequence, index)) for index in range(len(sequence.ty.fields))
        ]
        if op_name == "SequenceLength":
            return relax.const(len(elements), "int64")
        index = _PLACES[op_name]
        place = self._constant_value(operands[index]) if len(operands) > index else None
        if isinstance(place, relax.Expr):
            raise UnsupportedOpError("places that are computed are not supported")
        begin = 0 if place is None else int(place.reshape(()))
        if op_name == "SequenceInsert":
            elements.insert(len(elements) if place is None else begin, operands[1])
        elif op_name == "SequenceErase":
            del elements[-1 if place is None else begin]
        return elements[begin] if op_name == "SequenceAt" else relax.Tuple(elements)

    def _remainder(self, x: relax.Expr, divisor: relax.Expr) -> relax.Expr:
        """Convert a Mod of floats, whose sign is that of the divisor; TVM's gives NaN for infinite ones."""
        rest = self._normal(relax.op.mod(x, divisor))
        zero = relax.const(0.0, str(rest.ty.dtype))
        signs = [self._normal(relax.op.less(value, zero)) for value in (rest, divisor)]
        differs = self._normal(relax.op.logical_xor(*signs))
        wraps = self._normal(relax.op.logical_and(differs, self._normal(relax.op.not_equal(rest, zero))))
        return self._normal(relax.op.where(wraps, self._normal(relax.op.add(rest, divisor)), rest))

    def _bit_cast(self, x: relax.Expr, target: np.dtype) -> relax.Expr:
        """Convert a BitCast; between integers it is a cast, which keeps the bits of those of one width."""
        source, dtype = str(x.ty.dtype), str(target)
        if "float" in source or "float" in dtype:
            return self.bb.emit_te(topi.reinterpret, x, dtype)
        return self._normal(relax.op.astype(x, dtype))

    def _bit_shift(self, x: relax.Expr, places: relax.Expr, direction: bytes) -> relax.Expr:
        """Convert a BitShift; as for ONNX, all bits leave for places that are negative or too many."""
        dtype = str(x.ty.dtype)
        last = relax.const(int(dtype.lstrip("uint")) - 1, dtype)
        is_short = self._normal(relax.op.less_equal(places, last))
        if not dtype.startswith("u"):
            positive = self._normal(relax.op.greater_equal(places, relax.const(0, dtype)))
            is_short = self._normal(relax.op.logical_and(is_short, positive))
        inside = self._normal(relax.op.where(is_short, places, last))
        if direction == b"LEFT":
            shifted = self._normal(relax.op.left_shift(x, inside))
            return self._normal(relax.op.where(is_short, shifted, self._normal(relax.op.zeros_like(shifted))))
        shifted = self._normal(relax.op.right_shift(x, inside))
        if not dtype.startswith("u"):
            return shifted  # the last place leaves the sign
        return self._normal(relax.op.where(is_short, shifted, self._normal(relax.op.zeros_like(shifted))))

    def _power(self, base: relax.Expr, exponent: relax.Expr) -> relax.Expr | None:
        """Convert a Pow of two types, or of integers, whose digits a power of floats would lose."""
        dtype, constant = str(base.ty.dtype), self._constant_value(exponent)
        if "int" not in dtype:
            if str(exponent.ty.dtype) == dtype:
                return None
            return self._normal(relax.op.power(base, self._normal(relax.op.astype(exponent, dtype))))
        result = self._normal(relax.op.ones_like(base))
        is_whole = isinstance(constant, np.ndarray) and bool((constant == np.floor(constant)).all())
        if "int" not in str(exponent.ty.dtype) and not is_whole:
            operands = (self._normal(relax.op.astype(x, "float64")) for x in (base, exponent))
            return self._normal(relax.op.astype(self._normal(relax.op.power(*operands)), dtype))
        if isinstance(constant, np.ndarray) and constant.size == 1:
            number = int(constant.reshape(()))
            for digit in f"{number:b}" if 0 <= number <= _LARGEST_POWER else ():
                result = self._normal(relax.op.multiply(result, result))
                result = self._normal(relax.op.multiply(result, base)) if digit == "1" else result
            return result if 0 <= number <= _LARGEST_POWER else None
        whole = self._normal(relax.op.astype(exponent, "int64"))
        for place in reversed(range(6)):  # of more than 63 factors, only those of 0, 1 and -1 fit 64 bits
            result = self._normal(relax.op.multiply(result, result))
            shifted = relax.op.right_shift(whole, relax.const(place, "int64"))
            bit = self._normal(relax.op.bitwise_and(self._normal(shifted), relax.const(1, "int64")))
            is_set = self._normal(relax.op.astype(bit, "bool"))
            result = self._normal(
                relax.op.where(is_set, self._normal(relax.op.multiply(result, base)), result)
            )
        return result

    def _exponential(self, op_name: str, x: relax.Expr, attrs: dict) -> relax.Expr:
        """Convert Elu, Selu or Celu as the importer does, but keep NaN, which its ``relu`` turns into 0."""
        parameters = (attrs.get(key, value) for key, value in zip(("alpha", "gamma"), _EXPONENTIAL[op_name]))
        alpha, gamma = map(float, parameters)
        inner = relax.op.divide(x, relax.const(alpha)) if op_name == "Celu" and alpha != 1 else x
        curve = relax.op.nn.relu(relax.op.subtract(relax.const(1.0), relax.op.exp(inner)))
        line = relax.op.nn.leakyrelu(x, 0.0)
        result = relax.op.add(relax.op.multiply(relax.const(-alpha), curve), line)
        return self.bb.normalize(result if gamma == 1 else relax.op.multiply(relax.const(gamma), result))

    def _normalise_channels(
        self, x: relax.Expr, scale: relax.Expr, shift: relax.Expr, attrs: dict
    ) -> relax.Expr:
        """Convert InstanceNormalization as groups of one channel, a kernel; the importer emits several."""
        channels, axes = int(x.ty.shape[1]), list(range(2, len(x.ty.shape)))
        epsilon = attrs.get("epsilon", 1e-5)
        return self.bb.normalize(relax.op.nn.group_norm(x, scale, shift, channels, 1, axes, epsilon))

    def _normalise_length(self, x: relax.Expr, attrs: dict) -> relax.Expr:
        """Convert LpNormalization: `x` over its norm along an axis; vectors of norm 0 stay 0."""
        op, axis = relax.op, [int(attrs.get("axis", -1)) % len(shape(x))]
        if attrs.get("p", 2) == 1:
            length = self._normal(op.sum(self._normal(op.abs(x)), axis, keepdims=True))
        else:
            length = self._normal(op.sqrt(self._normal(op.sum(self._normal(op.multiply(x, x)), axis, True))))
        zero, unit = (relax.const(value, str(x.ty.dtype)) for value in (0.0, 1.0))
        nothing = self._normal(op.equal(length, zero))
        return self._normal(op.divide(x, self._normal(op.where(nothing, unit, length))))

    def _subtract_zero_points(
        self,
        x: relax.Expr,
        filters: relax.Expr,
        x_zero: relax.Expr | None = None,
        filters_zero: relax.Expr | None = None,
    ) -> list:
        """Operands of a ConvInteger in int32, less their zero points, for a convolution."""
        operands = onnx_frontend.onnx_input()
        for tensor, zero in ((x, x_zero), (filters, filters_zero)):
            wide = self._normal(relax.op.astype(tensor, "int32"))
            if zero is not None:
                offset = self._normal(relax.op.astype(zero, "int32"))
                if len(shape(zero)) == 1 and tensor is filters:  # one for each output channel
                    offset = self._normal(relax.op.reshape(offset, (-1, *[1] * (len(shape(filters)) - 1))))
                wide = self._normal(relax.op.subtract(wide, offset))
            operands.append(wide)
        return operands

    def _flat_scatter(self, x: relax.Expr, indices: relax.Expr, updates: relax.Expr, axis: int) -> list:
        """Operands of a ScatterElements, flat: each index is a place in the whole tensor."""
        dims, part = shape(x), shape(indices)
        axis %= len(dims)
        strides = [math.prod(dims[place + 1 :]) for place in range(len(dims))]
        begins = sum(
            (np.indices(part)[a] * stride for a, stride in enumerate(strides) if a != axis), np.zeros(part)
        )
        wide = self._normal(relax.op.astype(indices, "int64"))
        end = self._normal(relax.op.add(wide, relax.const(dims[axis], "int64")))
        is_negative = self._normal(relax.op.less(wide, relax.const(0, "int64")))
        place = self._normal(relax.op.where(is_negative, end, wide))
        place = self._normal(relax.op.multiply(place, relax.const(strides[axis], "int64")))
        place = self._normal(relax.op.add(place, relax.const(begins.astype("int64"), "int64")))
        operands = onnx_frontend.onnx_input()
        for tensor in (x, place, updates):
            operands.append(self._normal(relax.op.reshape(tensor, (-1,))))
        return operands

    def _centre_regions(self, regions: relax.Expr, attrs: dict, opset: int) -> relax.Expr:
        """Regions that the importer, which subtracts 0.5 before it scales, puts where ONNX does."""
        default = b"half_pixel" if opset >= 16 else b"output_half_pixel"
        scale = attrs.get("spatial_scale", 1.0)
        if attrs.get("coordinate_transformation_mode", default) != b"half_pixel" or scale == 1:
            return regions
        shift = relax.const(0.5 - 0.5 / scale, str(regions.ty.dtype))
        return self._normal(relax.op.add(regions, shift))

    def _normal(self, value: relax.Expr) -> relax.Expr:
        return self.bb.normalize(value)

    def _identity_dropout(self, x: relax.Expr, opset: int) -> relax.Tuple:
        """Results of a Dropout at inference: its operand, and a mask of zeros in old opsets, else of ones."""
        mask = relax.op.full_like(x, relax.const(opset >= _OPSET_OF_FULL_MASKS, "bool"), "bool")
        return relax.Tuple([x, self.bb.emit(mask)])

    def _resize(self, operands: list[relax.Expr], attrs: dict, opset: int) -> relax.Expr:
        """Convert a Resize: by the importer where it is right, else axis by axis."""
        x = operands[0]
        roi, *values = [self._constant_value(operand) for operand in (*operands[1:], None, None, None)[:3]]
        if opset < 11 or any(isinstance(value, relax.Expr) for value in values):
            return super()._convert_operator("Resize", operands, attrs, opset)
        roi = None if isinstance(roi, relax.Expr) else roi
        resizing = Resizing.from_operands(shape(x), roi, *values, attrs)
        if not resizing.is_like_importer:
            return resizing.interpolate(x, self._normal)
        result = onnx_frontend.onnx_input()
        result.append(x)
        for value in resizing.operands():
            result.append(None if value is None else relax.const(value, str(value.dtype)))
        return super()._convert_operator("Resize", result, resizing.importer_attributes(), opset)

    def _cast_to_declared(self, result: relax.Expr, name: str | None) -> relax.Expr:
        """Cast `result` to the declared type; raises `UnsupportedOpError` if its size differs."""
        value = self.declared.get(name)
        if value is None or not value.type.HasField("tensor_type"):
            return result
        dims, returned = zoo.dims_of(value), value.name in self.returned
        if isinstance(result, relax.ShapeExpr) and returned and _all_known(result):
            return relax.const([int(size) for size in result.values], "int64")
        if isinstance(result, tvm.ir.GenericConst) and returned:
            dtype = str(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
            return relax.const(result.value.numpy(), dtype)
        if not isinstance(result, relax.Call) or not isinstance(result.ty, relax.TensorType):
            return result
        actual_shape = result.ty.shape
        if (
            dims is not None
            and None not in dims
            and isinstance(actual_shape, relax.ShapeExpr)
            and _all_known(actual_shape)
        ):
            sizes = [int(size) for size in actual_shape.values]
            if math.prod(sizes) != math.prod(dims):
                raise UnsupportedOpError(f"TVM computes {sizes} where the network has {list(dims)}")
        kind = value.type.tensor_type.elem_type
        wide = str(result.ty.dtype) == "float64"  # the importer's type of random numbers without a type
        if not kind or not (returned or wide):
            return result
        dtype = str(helper.tensor_dtype_to_np_dtype(kind))
        return result if dtype == str(result.ty.dtype) else self.bb.normalize(relax.op.astype(result, dtype))

    def _is_integral(self, x: relax.Expr, element_type: int) -> bool:
        """Whether `x` is a sum of integers, scaled and clipped to the range of a narrow type.

        The importer guards other casts against NaN, infinity and other ranges, by seven kernels.
        """
        clip, target = self._bound_value(x), helper.tensor_dtype_to_np_dtype(element_type)
        if target.kind not in "iu" or not _is_operator(clip, "relax.clip"):
            return False
        bounds, (low, high) = np.iinfo(target), (float(bound.value) for bound in clip.args[1:])
        value = self._bound_value(clip.args[0])
        while any(_is_operator(value, f"relax.{kind}") for kind in ("add", "multiply", "round")):
            computed = [argument for argument in value.args if not self._is_known(argument)]
            if len(computed) != 1:
                return False
            value = self._bound_value(computed[0])
        is_sum = _is_operator(value, "relax.astype") and "int" in str(value.args[0].ty.dtype)
        return is_sum and bounds.min <= low and high <= bounds.max

    def _is_known(self, expr: relax.Expr) -> bool:
        """Whether an expression is computed from constants alone."""
        value = self._bound_value(expr)
        if isinstance(value, relax.Call):
            return all(map(self._is_known, value.args))
        return isinstance(value, tvm.ir.GenericConst) or not isinstance(value, relax.Expr | None)

    def _bound_value(self, expr: relax.Expr) -> relax.Expr | None:
        """What a variable is bound to; another expression itself."""
        return self.bb.lookup_binding(expr) if isinstance(expr, relax.Var) else expr

    def _constant_pad(self, operands: list[relax.Expr], attrs: dict) -> relax.Expr | None:
        """Convert a Pad by constants to an operator (the importer emits a kernel); None for another Pad."""
        x, *arguments = operands
        arguments = [self._constant_value(argument) for argument in arguments]
        mode, rank = attrs.get("mode", b"constant"), x.ty.ndim
        arguments = [np.array(attrs["pads"])] if "pads" in attrs else arguments
        if (
            mode != b"constant"
            or not arguments
            or any(isinstance(argument, relax.Expr) for argument in arguments)
        ):
            return None
        pads, value, axes = (*arguments, None, None)[:3]
        if value is None:
            value = np.array(attrs.get("value", 0.0))
        axes = range(rank) if axes is None else [int(axis) % rank for axis in axes]
        widths = np.zeros((rank, 2), int)
        widths[list(axes)] = pads.reshape(2, -1).T
        if (widths < 0).any() or str(x.ty.dtype) != "float32":
            return None
        return self.bb.normalize(relax.op.nn.pad(x, widths.flatten().tolist(), "constant", value.item()))

    def _constant_value(self, expr: relax.Expr | None) -> np.ndarray | relax.Expr | None:
        """The value of a constant operand, also if it is an input of ``main``; else `expr`."""
        if expr is not None:
            expr = onnx_frontend.get_constant(expr, [self._nodes, self._params])
        return expr.value.numpy() if isinstance(expr, tvm.ir.GenericConst) else expr


def _is_operator(expr: relax.Expr | None, name: str) -> bool:
    return isinstance(expr, relax.Call) and getattr(expr.op, "name", "") == name


def _all_known(shape: relax.ShapeExpr) -> bool:
    return all(isinstance(size, tvm.tirx.IntImm) for size in shape.values)


def _explicit_padding(attrs: dict, x: Sequence[int], filters: Sequence[int]) -> dict:
    """Attributes of a ConvTranspose with padding in place of ``output_shape``.

    Parameters
    ----------
    x, filters : sequence of int
        Shapes of its operands.
    """
    output_sizes = [int(size) for size in attrs["output_shape"]]
    rank = len(output_sizes)
    strides, dilations, extra = (
        [int(number) for number in attrs.get(key, [default] * rank)]
        for key, default in (("strides", 1), ("dilations", 1), ("output_padding", 0))
    )
    mode = attrs.get("auto_pad", b"NOTSET")
    before, after = [], []
    for axis, size in enumerate(output_sizes):
        reach = (int(filters[2 + axis]) - 1) * dilations[axis] + 1
        total = strides[axis] * (int(x[2 + axis]) - 1) + extra[axis] + reach - size
        extra[axis] += max(0, -total)
        total = max(0, total)
        smaller, larger = total // 2, total - total // 2
        before.append(smaller if mode == b"SAME_UPPER" else larger)
        after.append(larger if mode == b"SAME_UPPER" else smaller)
    remaining = {key: value for key, value in attrs.items() if key not in ("output_shape", "auto_pad")}
    return remaining | {"pads": before + after, "output_padding": extra}


def _draw_weight(value: onnx.ValueInfoProto) -> tvm.runtime.Tensor:
    """Draw a weight of the zoo directly into its final memory."""
    tensor = tvm.runtime.empty(zoo.dims_of(value), "float32")
    flat, begin = np.from_dlpack(tensor).reshape(-1), 0
    for part in zoo.weight_values(value):
        flat[begin : begin + part.size] = part
        begin += part.size
    return tensor


def _is_partial(dims: Sequence[int], indices: Sequence[int], axis: int) -> bool:
    """Whether indices of a scatter are fewer than the tensor beside its axis, which TVM misreads."""
    return any(a != b for number, (a, b) in enumerate(zip(dims, indices)) if number != axis % len(dims))


def _is_tensor(expr: relax.Expr) -> bool:
    """Whether an expression is a tensor, and not a number that the importer computes with."""
    return isinstance(expr.ty, relax.TensorType)


def _is_one_index(data: relax.Expr, index: relax.Expr) -> bool:
    """Whether a Gather takes one element, at a constant index, of a computed tensor of known shape."""
    computed = not isinstance(data, tvm.ir.GenericConst) and isinstance(data.ty, relax.TensorType)
    has_known_shape = computed and isinstance(data.ty.shape, relax.ShapeExpr)
    return has_known_shape and isinstance(index, tvm.ir.GenericConst) and index.value.ndim == 0


def _is_table(data: relax.Expr, index: relax.Expr) -> bool:
    """Whether a Gather has computed indices, for which the importer emits three kernels."""
    tensors = isinstance(data.ty, relax.TensorType) and isinstance(index.ty, relax.TensorType)
    return tensors and not isinstance(index, tvm.ir.GenericConst)
