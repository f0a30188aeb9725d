"""Random small ONNX networks: windows with padding and strides, groups, branches that meet again."""

import numpy as np
import onnx
import onnxruntime
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx_models import onnx_model


class NetworkBuilder:
    """A network that grows by a node at a time; `shapes` are NCHW."""

    def __init__(self, draw):
        self.draw, self.nodes, self.constants = draw, [], []
        self.random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        self.shapes = {"x": tuple(draw(st.integers(*limits)) for limits in ((1, 2), (1, 6), (2, 9), (2, 9)))}

    def constant(self, *dims, low=-1.0):
        name = f"w{len(self.constants)}"
        values = self.random.uniform(low, 1.0, dims).astype(np.float32)
        self.constants.append(numpy_helper.from_array(values, name))
        return name

    def node(self, kind, inputs, shape, **attributes):
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        self.shapes[name] = tuple(shape)

    def window(self, shape, min_extent=1):
        kernel = [self.draw(st.integers(1, min(3, extent))) for extent in shape[2:]]
        strides = [self.draw(st.integers(1, 2)) for _ in kernel]
        pads = [self.draw(st.integers(0, k - 1)) for k in kernel * 2]
        extents = [
            (extent + pads[axis] + pads[axis + 2] - kernel[axis]) // strides[axis] + 1
            for axis, extent in enumerate(shape[2:])
        ]
        return extents, dict(kernel_shape=kernel, strides=strides, pads=pads)

    def convolution(self, source):
        n, c, *_ = shape = self.shapes[source]
        groups = self.draw(st.sampled_from([g for g in range(1, c + 1) if c % g == 0]))
        filters = groups * self.draw(st.integers(1, 3))
        extents, window = self.window(shape)
        inputs = [source, self.constant(filters, c // groups, *window["kernel_shape"])]
        inputs += [self.constant(filters)] if self.draw(st.booleans()) else []
        self.node("Conv", inputs, (n, filters, *extents), group=groups, **window)

    def pooling(self, source):
        n, c, *_ = shape = self.shapes[source]
        extents, window = self.window(shape)
        kind = self.draw(st.sampled_from(["MaxPool", "AveragePool"]))
        if kind == "AveragePool":
            window["count_include_pad"] = self.draw(st.integers(0, 1))
        self.node(kind, [source], (n, c, *extents), **window)

    def elementwise(self, source):
        shape = self.shapes[source]
        same_shape = [name for name in self.shapes if self.shapes[name] == shape]
        kinds = ["Relu", "HardSwish", "LeakyRelu", "PRelu", "BatchNormalization", "Mul", "LRN", "Add", "Sub"]
        kind = self.draw(st.sampled_from(kinds))
        inputs, attributes = [source], {}
        if kind in ("Add", "Sub"):
            inputs.append(self.draw(st.sampled_from(same_shape)))
        elif kind == "Mul":
            inputs.insert(self.draw(st.integers(0, 1)), self.constant(shape[1], 1, 1))
        elif kind == "PRelu":
            inputs.append(self.constant(shape[1], 1, 1))
        elif kind == "LRN":
            attributes = dict(size=self.draw(st.sampled_from([1, 3])), alpha=0.5)
        elif kind == "BatchNormalization":
            inputs += [self.constant(shape[1]) for _ in range(3)] + [self.constant(shape[1], low=0.1)]
        self.node(kind, inputs, shape, **attributes)

    def concatenation(self, source):
        n, c, h, w = self.shapes[source]
        same_map = [name for name, s in self.shapes.items() if (s[0], *s[2:]) == (n, h, w)]
        second = self.draw(st.sampled_from(same_map))
        self.node("Concat", [source, second], (n, c + self.shapes[second][1], h, w), axis=1)

    def model(self):
        last = self.nodes[-1].output[0]
        inputs, outputs = {"x": self.shapes["x"]}, {last: self.shapes[last]}
        return onnx_model(self.nodes, inputs, outputs, self.constants, name="drawn")


@st.composite
def models(draw, most=7):
    """An ONNX network of 2 to `most` nodes."""
    drawing = NetworkBuilder(draw)
    kinds = ["convolution"] * 3 + ["elementwise"] * 2 + ["pooling", "concatenation"]
    for _ in range(draw(st.integers(2, most))):
        source = draw(st.sampled_from(sorted(drawing.shapes)[-3:]))
        getattr(drawing, draw(st.sampled_from(kinds)))(source)
    return drawing.model()


@st.composite
def classifiers(draw):
    """An ONNX network of convolutions, some with a residual, that ends with matrix products of its map."""
    drawing = NetworkBuilder(draw)
    for _ in range(draw(st.integers(1, 3))):
        source = sorted(drawing.shapes)[-1]
        drawing.convolution(source)
        result = drawing.nodes[-1].output[0]
        alike = [n for n in drawing.shapes if drawing.shapes[n] == drawing.shapes[result] and n != result]
        if alike and draw(st.booleans()):
            drawing.node("Add", [result, draw(st.sampled_from(alike))], drawing.shapes[result])
        if draw(st.booleans()):
            drawing.node("Relu", [drawing.nodes[-1].output[0]], drawing.shapes[result])
    source = drawing.nodes[-1].output[0]
    n, c, h, w = drawing.shapes[source]
    if draw(st.booleans()):
        drawing.node("GlobalAveragePool", [source], (n, c, 1, 1))
        h = w = 1
    elif draw(st.booleans()):
        drawing.pooling(source)
        n, c, h, w = drawing.shapes[drawing.nodes[-1].output[0]]
    drawing.node("Flatten", [drawing.nodes[-1].output[0]], (n, c * h * w), axis=1)
    for units in draw(st.lists(st.integers(1, 9), min_size=1, max_size=2)):
        source = drawing.nodes[-1].output[0]
        inputs = [source, drawing.constant(units, drawing.shapes[source][1]), drawing.constant(units)]
        drawing.node("Gemm", inputs, (n, units), transB=1)
    return drawing.model()


def all_tensors(model: onnx.ModelProto, x: np.ndarray) -> dict[str, np.ndarray]:
    """All tensors by ONNX Runtime, unoptimised, NHWC."""
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    names = [name for node in model.graph.node for name in node.output]
    del shown.graph.output[:]
    shown.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(shown.SerializeToString(), options, ["CPUExecutionProvider"])
    tensors = {"x": x} | dict(zip(names, session.run(names, {"x": x})))
    return {name: value.transpose(0, 2, 3, 1) for name, value in tensors.items()}
