"""Networks of the zoo written by hand, after their papers: graphs whose weights have shapes, no values.

`build_zoo.py` calls them and says how each weight is drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
# operator -> (input position -> rule); rules are those of pimflow.zoo.weights
TRAINED = {
    "Add": {1: "bias"},
    "Conv": {1: "weight", 2: "bias"},
    "ConvTranspose": {1: "weight", 2: "bias"},
    "Gather": {0: "embedding"},
    "Gemm": {1: "weight", 2: "bias"},
    "MatMul": {1: "weight"},
    "PRelu": {1: "slope"},
    "Slice": {0: "embedding"},
    "BatchNormalization": {1: "scale", 2: "bias", 3: "mean", 4: "variance"},
    "LayerNormalization": {1: "scale", 2: "bias"},
}


class ZooGraphBuilder:
    """Nodes in order, each named as its result; weights are named after their node.

    Parameters
    ----------
    kind : int, optional
        Their ONNX element type.
    """

    def __init__(self, inputs: dict[str, tuple[int, ...]], kind: int = TensorProto.FLOAT) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.inputs = [helper.make_tensor_value_info(name, kind, dims) for name, dims in inputs.items()]

    def add(
        self, operator: str, name: str, inputs: list[str], *dims: tuple[int, ...], **attributes: object
    ) -> str:
        """Add a node, and for each of `dims` a weight of that shape, in order of positions."""
        operands = dict(enumerate(inputs))
        vacant = (position for position in TRAINED.get(operator, ()) if not operands.get(position))
        for position, shape in zip(vacant, dims):
            operands[position] = f"{name}.{TRAINED[operator][position]}"
            self.weights.append(TensorProto(name=operands[position], dims=shape, data_type=TensorProto.FLOAT))
        ordered = [operands[position] for position in sorted(operands)]
        self.nodes.append(helper.make_node(operator, ordered, [name], name, **attributes))
        return name

    def constant(self, name: str, value: object, dtype: type = np.float32) -> str:
        """Add a constant to the graph; returns its name."""
        if all(tensor.name != name for tensor in self.weights):
            self.weights.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def conv(
        self,
        name: str,
        source: str,
        channels: tuple[int, int],
        kernel: int,
        *,
        bias: bool = True,
        **window: int,
    ) -> str:
        """A square convolution from channels[1] to channels[0].

        `window` may have ``stride``, ``group`` and ``padding``; the usual padding keeps the size at stride 1.
        """
        out_channels, in_channels = channels
        stride, group = window.get("stride", 1), window.get("group", 1)
        padding = window.get("padding", kernel // 2)
        dims = [(out_channels, in_channels // group, kernel, kernel), (out_channels,)]
        return self.add(
            "Conv",
            name,
            [source],
            *dims[: 2 if bias else 1],
            kernel_shape=[kernel] * 2,
            strides=[stride] * 2,
            pads=[padding] * 4,
            dilations=[1, 1],
            group=group,
        )

    def conv_transpose(self, name: str, source: str, channels: tuple[int, int], size: int) -> str:
        """A transposed convolution from channels[1] to channels[0] that makes maps `size` times as large."""
        out_channels, in_channels = channels
        dims = [(in_channels, out_channels, size, size), (out_channels,)]
        window = dict(kernel_shape=[size] * 2, strides=[size] * 2)
        return self.add("ConvTranspose", name, [source], *dims, **window)

    def norm(self, name: str, source: str, channels: int) -> str:
        """Batch normalisation."""
        return self.add("BatchNormalization", name, [source], *[(channels,)] * 4)

    def conv_norm(self, name: str, source: str, channels: tuple[int, int], kernel: int, **window: int) -> str:
        """A convolution without bias, ``NAME.conv``, and ``NAME.norm``."""
        return self.norm(
            f"{name}.norm",
            self.conv(f"{name}.conv", source, channels, kernel, bias=False, **window),
            channels[0],
        )

    def model(self, name: str, outputs: dict[str, tuple[str, tuple[int, ...]]]) -> onnx.ModelProto:
        """The network; `outputs` has by name the node of each output, and its shape."""
        renamed = {node_name: output for output, (node_name, _) in outputs.items()}
        for node in self.nodes:
            node.input[:] = [renamed.get(operand, operand) for operand in node.input]
            node.output[0] = renamed.get(node.output[0], node.output[0])
        results = [
            helper.make_tensor_value_info(output, TensorProto.FLOAT, dims)
            for output, (_, dims) in outputs.items()
        ]
        graph = helper.make_graph(self.nodes, name, self.inputs, results, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])


def toy() -> onnx.ModelProto:
    """Build eight layers, one of each kind that MobileNetV2 has, and a 3x3 with K = 576."""
    graph = ZooGraphBuilder({"input": (1, 3, 16, 16)})
    clamp = [graph.constant("zero", 0.0), graph.constant("six", 6.0)]

    def conv(
        name: str, source: str, channels: tuple[int, int], kernel: int, norm: bool = True, relu6: bool = True,
        **window: int,
    ) -> str:  # fmt: skip
        """A convolution, with batch normalisation and ReLU6 unless switched off."""
        if norm:
            source = graph.conv_norm(name, source, channels, kernel, **window)
        else:
            source = graph.conv(f"{name}.conv", source, channels, kernel, **window)
        return graph.add("Clip", f"{name}.relu6", [source, *clamp]) if relu6 else source

    stem = conv("stem", "input", (16, 3), 3)
    hidden = conv("block.expand", stem, (64, 16), 1)
    hidden = conv("block.depthwise", hidden, (64, 64), 3, group=64)
    hidden = conv("block.project", hidden, (16, 64), 1, relu6=False)
    hidden = graph.add("Add", "block.add", [stem, hidden])
    hidden = conv("widen", hidden, (64, 16), 1, norm=False)
    hidden = conv("down", hidden, (32, 64), 3, stride=2, norm=False)
    hidden = graph.add("GlobalAveragePool", "pool", [hidden])
    hidden = graph.add("Flatten", "flatten", [hidden], axis=1)
    hidden = graph.add("Gemm", "fc", [hidden], (10, 32), (10,), transB=1)
    return graph.model("toy", {"output": (hidden, (1, 10))})


def mobilenet_v1() -> onnx.ModelProto:
    """MobileNet 1.0 at 224 x 224: arXiv 1704.04861, table 1.

    The table gives the last depthwise convolution stride 2 though its map stays 7 x 7; every
    implementation has stride 1 there. The rectifiers end at 6, as in the authors' TF-slim.
    """
    graph = ZooGraphBuilder({"input": (1, 3, 224, 224)})
    clamp = [graph.constant("zero", 0.0), graph.constant("six", 6.0)]

    def conv(name: str, source: str, channels: tuple[int, int], kernel: int, **window: int) -> str:
        """A convolution with batch normalisation and ReLU6."""
        normed = graph.conv_norm(name, source, channels, kernel, **window)
        return graph.add("Clip", f"{name}.relu6", [normed, *clamp])

    hidden, channels = conv("stem", "input", (32, 3), 3, stride=2), 32
    blocks = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1)]
    blocks += [(512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)]
    for index, (wider, stride) in enumerate(blocks, 1):
        name = f"blocks.{index}"
        hidden = conv(f"{name}.depthwise", hidden, (channels,) * 2, 3, stride=stride, group=channels)
        hidden = conv(f"{name}.pointwise", hidden, (wider, channels), 1)
        channels = wider
    hidden = graph.add("GlobalAveragePool", "pool", [hidden])
    hidden = graph.add("Flatten", "flatten", [hidden], axis=1)
    hidden = graph.add("Gemm", "fc", [hidden], (1000, channels), (1000,), transB=1)
    return graph.model("mobilenet-v1", {"output": (hidden, (1, 1000))})


@dataclass(frozen=True)
class EncoderBuilder:
    """Adds layers of BERT's encoder to a graph."""

    graph: ZooGraphBuilder
    width: int
    heads: int

    def dense(self, name: str, source: str, outputs: int, inputs: int) -> str:
        """A fully connected layer."""
        product = self.graph.add("MatMul", f"{name}.product", [source], (inputs, outputs))
        return self.graph.add("Add", name, [product], (outputs,))

    def norm(self, name: str, source: str) -> str:
        """Layer normalisation."""
        sizes = (self.width,), (self.width,)
        return self.graph.add("LayerNormalization", name, [source], *sizes, axis=-1, epsilon=1e-12)

    def layer(self, name: str, source: str, mask: str) -> str:
        """Self-attention and feed-forward, each with residual and norm after it."""
        graph, width, heads, dense, norm = self.graph, self.width, self.heads, self.dense, self.norm
        split = graph.constant("heads", [0, 0, heads, width // heads], np.int64)
        joined = graph.constant("joined", [0, 0, width], np.int64)

        def per_head(part: str, perm: list[int]) -> str:
            """A dense layer whose result is split into heads."""
            value = graph.add("Reshape", f"{part}.split", [dense(part, source, width, width), split])
            return graph.add("Transpose", f"{part}.heads", [value], perm=perm)

        query = per_head(f"{name}.query", [0, 2, 1, 3])
        key = per_head(f"{name}.key", [0, 2, 3, 1])
        value = per_head(f"{name}.value", [0, 2, 1, 3])
        scores = graph.add("MatMul", f"{name}.scores", [query, key])
        root = graph.constant("root", math.sqrt(width // heads))
        scores = graph.add("Div", f"{name}.scaled", [scores, root])
        scores = graph.add("Add", f"{name}.masked", [scores, mask])
        scores = graph.add("Softmax", f"{name}.softmax", [scores], axis=-1)
        context = graph.add("MatMul", f"{name}.context", [scores, value])
        context = graph.add("Transpose", f"{name}.context.heads", [context], perm=[0, 2, 1, 3])
        context = graph.add("Reshape", f"{name}.context.joined", [context, joined])
        context = dense(f"{name}.attention", context, width, width)
        middle = norm(f"{name}.attention.norm", graph.add("Add", f"{name}.attention.add", [context, source]))
        wide = dense(f"{name}.intermediate", middle, 4 * width, width)
        erf = graph.add("Div", f"{name}.gelu.div", [wide, graph.constant("root_2", math.sqrt(2))])
        erf = graph.add("Erf", f"{name}.gelu.erf", [erf])
        erf = graph.add("Add", f"{name}.gelu.add", [erf, graph.constant("one", 1.0)])
        wide = graph.add("Mul", f"{name}.gelu.mul", [wide, erf])
        wide = graph.add("Mul", f"{name}.gelu", [wide, graph.constant("half", 0.5)])
        narrow = dense(f"{name}.output", wide, width, 4 * width)
        return norm(f"{name}.output.norm", graph.add("Add", f"{name}.output.add", [narrow, middle]))


@dataclass(frozen=True, kw_only=True)
class EncoderSizes:
    """Sizes of an encoder: layers, elements of a token, heads, word pieces, and positions that it knows."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    positions: int


def bert(name: str, sizes: EncoderSizes, length: int) -> onnx.ModelProto:
    """An encoder of BERT's kind (arXiv 1810.04805) with embeddings and pooler, for `length` tokens.

    Norms follow the residual sums, the activation is the exact GELU, a key with mask 0 gets -10000
    before the softmax, as in the published code.
    """
    names = ("input_ids", "token_type_ids", "attention_mask")
    graph = ZooGraphBuilder(dict.fromkeys(names, (1, length)), TensorProto.INT64)
    width = sizes.width
    encoder = EncoderBuilder(graph, width, sizes.heads)
    hidden = graph.add("Gather", "embeddings.words", ["", "input_ids"], (sizes.vocabulary, width))
    bounds = [graph.constant(n, [v], np.int64) for n, v in (("first", 0), ("length", length), ("rows", 0))]
    place = graph.add("Slice", "embeddings.positions", ["", *bounds], (sizes.positions, width))
    kind = graph.add("Gather", "embeddings.types", ["", "token_type_ids"], (2, width))
    hidden = graph.add("Add", "embeddings.add_types", [hidden, kind])
    hidden = encoder.norm("embeddings.norm", graph.add("Add", "embeddings.add_positions", [hidden, place]))

    visible = graph.add("Cast", "mask.kept", ["attention_mask"], to=TensorProto.BOOL)
    zero, hide = graph.constant("zero", 0.0), graph.constant("minus_10000", -10000.0)
    visible = graph.add("Where", "mask.added", [visible, zero, hide])
    mask = graph.add("Unsqueeze", "mask", [visible, graph.constant("axes", [1, 2], np.int64)])

    for index in range(sizes.layers):
        hidden = encoder.layer(f"layers.{index}", hidden, mask)

    first = graph.add("Gather", "pooler.first", [hidden, graph.constant("zeroth", 0, np.int64)], axis=1)
    pooled = graph.add("Gemm", "pooler.dense", [first], (width, width), (width,), transB=1)
    pooled = graph.add("Tanh", "pooler.tanh", [pooled])
    outputs = {"sequence_output": (hidden, (1, length, width)), "pooled_output": (pooled, (1, width))}
    return graph.model(name, outputs)


def bert_base() -> onnx.ModelProto:
    """BERT-base uncased for 128 tokens: arXiv 1810.04805, section 3; 30522 word pieces, 512 positions."""
    sizes = EncoderSizes(layers=12, width=768, heads=12, vocabulary=30522, positions=512)
    return bert("bert-base", sizes, length=128)


def ssd_resnet50() -> onnx.ModelProto:
    """SSD300 with ResNet-50, as NVIDIA's Deep Learning Examples have it (SSD: arXiv 1512.02325).

    The backbone ends with conv4_x, whose stride is 1; five more pairs of convolutions with batch norms
    halve the map, heads read all six maps. Outputs are what its ``forward`` returns: the boxes as
    offsets from the 8732 default boxes, and scores before the softmax; no suppression.
    """
    graph = ZooGraphBuilder({"input": (1, 3, 300, 300)})
    relu = lambda source: graph.add("Relu", source.removesuffix(".norm") + ".relu", [source])  # noqa: E731
    hidden = relu(graph.conv_norm("conv1", "input", (64, 3), 7, stride=2))
    window = dict(kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    hidden, channels = graph.add("MaxPool", "pool", [hidden], **window), 64
    for stage, width, blocks, stride in ((2, 64, 3, 1), (3, 128, 4, 2), (4, 256, 6, 1)):
        for block in range(blocks):
            name = f"conv{stage}.{block}"
            step = stride if block == 0 else 1
            narrow = relu(graph.conv_norm(f"{name}.reduce", hidden, (width, channels), 1))
            narrow = relu(graph.conv_norm(f"{name}.middle", narrow, (width, width), 3, stride=step))
            wide = graph.conv_norm(f"{name}.expand", narrow, (4 * width, width), 1)
            if block == 0:
                hidden = graph.conv_norm(f"{name}.shortcut", hidden, (4 * width, channels), 1, stride=step)
            hidden, channels = relu(graph.add("Add", f"{name}.add", [wide, hidden])), 4 * width
    maps = [(hidden, channels)]
    halved, inner = dict(stride=2), dict(padding=0)
    extras = [(256, 512, halved)] * 2 + [(128, 256, halved)] + [(128, 256, inner)] * 2
    for index, (width, wider, window) in enumerate(extras, 1):
        hidden = relu(graph.conv_norm(f"extra.{index}.reduce", hidden, (width, channels), 1))
        hidden = relu(graph.conv_norm(f"extra.{index}.down", hidden, (wider, width), 3, **window))
        channels = wider
        maps.append((hidden, channels))
    outputs = {}
    for output, values in (("boxes", 4), ("scores", 81)):
        shape = graph.constant(f"{output}.shape", [0, values, -1], np.int64)
        parts = []
        for index, ((source, channels), defaults) in enumerate(zip(maps, (4, 6, 6, 6, 4, 4))):
            head = graph.conv(f"{output}.{index}", source, (defaults * values, channels), 3)
            parts.append(graph.add("Reshape", f"{head}.flat", [head, shape]))
        outputs[output] = (graph.add("Concat", f"{output}.all", parts, axis=2), (1, values, 8732))
    return graph.model("ssd-resnet50", outputs)


def yolov1() -> onnx.ModelProto:
    """YOLO at 448 x 448: arXiv 1506.02640, figure 3; 7 x 7 cells of 2 boxes and 20 classes.

    As in the paper, no batch norms, and leaky rectifiers of slope 0.1 after every layer but the last.
    """
    graph = ZooGraphBuilder({"input": (1, 3, 448, 448)})
    pool = "pool"
    layers = [
        (64, 7, 2), pool, (192, 3, 1), pool,
        (128, 1, 1), (256, 3, 1), (256, 1, 1), (512, 3, 1), pool,
        *[(256, 1, 1), (512, 3, 1)] * 4, (512, 1, 1), (1024, 3, 1), pool,
        *[(512, 1, 1), (1024, 3, 1)] * 2, (1024, 3, 1), (1024, 3, 2), (1024, 3, 1), (1024, 3, 1),
    ]  # fmt: skip
    hidden, channels, index, pools = "input", 3, 0, 0
    for layer in layers:
        if layer == pool:
            pools += 1
            hidden = graph.add("MaxPool", f"pool{pools}", [hidden], kernel_shape=[2, 2], strides=[2, 2])
            continue
        index += 1
        wider, kernel, stride = layer
        hidden = graph.conv(f"conv{index}", hidden, (wider, channels), kernel, stride=stride)
        hidden = graph.add("LeakyRelu", f"leaky{index}", [hidden], alpha=0.1)
        channels = wider
    hidden = graph.add("Flatten", "flatten", [hidden], axis=1)
    hidden = graph.add("Gemm", "fc1", [hidden], (4096, 7 * 7 * 1024), (4096,), transB=1)
    hidden = graph.add("LeakyRelu", "leaky_fc1", [hidden], alpha=0.1)
    hidden = graph.add("Gemm", "fc2", [hidden], (7 * 7 * 30, 4096), (7 * 7 * 30,), transB=1)
    cells = graph.constant("cells", [-1, 7, 7, 30], np.int64)
    hidden = graph.add("Reshape", "reshape", [hidden, cells])
    return graph.model("yolov1", {"output": (hidden, (1, 7, 7, 30))})


def srgan() -> onnx.ModelProto:
    """The generator of SRGAN: arXiv 1609.04802, figure 4; 16 residual blocks, 4 times larger.

    The input is 24 x 24: section 3.2 trains on 96 x 96 crops, whose low-resolution images these are.
    Each PReLU has one slope.
    """
    graph = ZooGraphBuilder({"input": (1, 3, 24, 24)})
    prelu = lambda name, source: graph.add("PRelu", name, [source], (1, 1, 1))  # noqa: E731
    stem = hidden = prelu("stem.prelu", graph.conv("stem", "input", (64, 3), 9))
    for index in range(1, 17):
        name, before = f"blocks.{index}", hidden
        for part in ("first", "second"):
            hidden = graph.conv(f"{name}.{part}.conv", hidden, (64, 64), 3)
            hidden = graph.norm(f"{name}.{part}.norm", hidden, 64)
            hidden = prelu(f"{name}.prelu", hidden) if part == "first" else hidden
        hidden = graph.add("Add", f"{name}.add", [before, hidden])
    hidden = graph.norm("trunk.norm", graph.conv("trunk.conv", hidden, (64, 64), 3), 64)
    hidden = graph.add("Add", "trunk.add", [stem, hidden])
    for index in (1, 2):
        hidden = graph.conv(f"up{index}.conv", hidden, (256, 64), 3)
        hidden = graph.add("DepthToSpace", f"up{index}.shuffle", [hidden], blocksize=2, mode="CRD")
        hidden = prelu(f"up{index}.prelu", hidden)
    hidden = graph.conv("head", hidden, (3, 64), 9)
    return graph.model("srgan", {"output": (hidden, (1, 3, 96, 96))})
