"""Make the graph-only ONNX files of the embedded zoo: ``build_zoo.py [NAMES...] --out DIR``.

Needs ``torch`` and ``torchvision`` (``pip install torch==2.13.0``, then ``pip install --no-deps
torchvision==0.28.0``), which pimflow itself never does.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx
import zoo_classifiers
import zoo_graphs
import zoo_segmentation
from onnx import TensorProto, helper, numpy_helper
from zoo_graphs import OPSET, TRAINED

GRAPHS = Path(__file__).resolve().parents[1] / "python/pimflow/zoo/graphs"
IR_VERSION = 10  # the first with metadata on values

# what reads a layer's output -> gain of its weights; what made its input -> factor on that.
# Found by experiment. Checked with ONNX Runtime, seeds 0 to 7: every value stays below 200, the rms of
# every layer's output above 0.05; the outputs reach 0.5 to 10 and move by at least 1 % of that when the
# middle 32 x 32 pixels become zero, by at most 0.2 % when every weight and value is rounded to fp16.
# Other networks by hand: seeds 0 to 3, of YOLO 0, and not rounded. EfficientNet-B1 to B6, GoogLeNet,
# Inception-v3, SqueezeNet and the wider networks: seeds 0 to 2, above 3 GMAC 0, and not rounded. Of these
# GoogLeNet and SqueezeNet, one rectifier after another, move by 0.6 % or more, by 2 % for another image.
# DenseNets and ResNet-34: seeds 0 to 2; AlexNet, U-Net, VGG-11 and -13: seed 0. DenseNets, whose pool adds
# up all pixels, move by 1.5 %, by 0.7 % or more for another image.
# A SiLU of inputs of order 1 falls faster than its input, and many in a row make orders of magnitude of
# the luck of a seed; larger inputs keep it close to a Relu.
GAINS = {"Add": 0.4, "Clip": 1.0, "Concat": 1.2, "SiLU": 3.0, "Sigmoid": 0.25}
GAINS |= {"LeakyRelu": 0.95, "PRelu": 0.8, "Relu": 0.95}
LINEAR_GAIN = 0.71
RESIDUALS = 17  # with more sums, values would exceed fp16: the gain before each falls
FACTORS = {"SiLU": 0.32, "Gate": 0.63}
TRANSPARENT = frozenset({"AveragePool", "Flatten", "GlobalAveragePool", "MaxPool"})


def torchvision_network(builder: str, image: int = 224, **options: object) -> Callable[[], onnx.ModelProto]:
    """Name a network of torchvision by its `builder`, with inputs 1 x 3 x `image` x `image`.

    `options` go to the builder.
    """

    def export() -> onnx.ModelProto:
        """The network as torchvision defines it, exported by PyTorch."""
        import torch

        # torchvision without its compiled operators imports once their schemas exist
        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, schema):
                library.define(f"{schema}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
        import torchvision

        network = getattr(torchvision.models, builder)(**options).eval()
        for tensor in network.state_dict().values():
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5)  # equal tensors would be merged, whatever their meaning
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.onnx.export(
                network,
                (torch.zeros(1, 3, image, image),),
                file,
                dynamo=False,  # the new exporter spells a clip in five nodes, a flatten in four
                opset_version=OPSET,
                input_names=["input"],
                output_names=["output"],
                do_constant_folding=False,
                training=torch.onnx.TrainingMode.PRESERVE,  # keeps BatchNormalization apart
            )
        model = onnx.load_from_string(file.getvalue())
        rename_nodes(model.graph, {path for path, module in network.named_modules() if path})
        return model

    return export


# Whose weights `train_small_network.py` makes; what they are drawn by is where that begins.
TRAINED_NETWORKS = ("glyphs", "glyphs-densenet", "glyphs-unet")
# Resolutions of arXiv 1905.11946, as its authors' code has them; torchvision's weights are for others.
EFFICIENTNETS = (224, 240, 260, 300, 380, 456, 528)

NETWORKS = {
    "alexnet": zoo_classifiers.alexnet,
    "bert-base": zoo_graphs.bert_base,
    "densenet-121": zoo_classifiers.densenet121,
    "densenet-169": zoo_classifiers.densenet169,
    **{
        f"efficientnet-b{index}": torchvision_network(f"efficientnet_b{index}", image)
        for index, image in enumerate(EFFICIENTNETS)
    },
    "glyphs": zoo_classifiers.glyphs,
    "glyphs-densenet": zoo_classifiers.glyphs_densenet,
    "glyphs-unet": zoo_segmentation.glyphs_unet,
    "googlenet": torchvision_network("googlenet", init_weights=False),
    "inception-v3": torchvision_network("inception_v3", 299, init_weights=False),
    "mnasnet-1.0": torchvision_network("mnasnet1_0"),
    "mnasnet-1.3": torchvision_network("mnasnet1_3"),
    "mnasnet-2.0": torchvision_network("MNASNet", alpha=2.0),
    "mobilenet-v1": zoo_graphs.mobilenet_v1,
    "mobilenet-v2": torchvision_network("mobilenet_v2"),
    "mobilenet-v2-1.4": torchvision_network("mobilenet_v2", width_mult=1.4),
    "mobilenet-v2-2.0": torchvision_network("mobilenet_v2", width_mult=2.0),
    "resnet-18": zoo_classifiers.resnet18,
    "resnet-34": zoo_classifiers.resnet34,
    "resnet-50": torchvision_network("resnet50"),
    "squeezenet-1.1": torchvision_network("squeezenet1_1"),
    "srgan": zoo_graphs.srgan,
    "ssd-resnet50": zoo_graphs.ssd_resnet50,
    "toy": zoo_graphs.toy,
    "unet": zoo_segmentation.unet,
    "vgg-11": zoo_classifiers.vgg11,
    "vgg-13": zoo_classifiers.vgg13,
    "vgg-16": torchvision_network("vgg16"),
    "vgg-19": zoo_classifiers.vgg19,
    "yolov1": zoo_graphs.yolov1,
}


def module_path(scope: list[str]) -> str:
    """Join the scopes that torch traced: features / features.2 / conv / conv.0 -> features.2.conv.0."""
    path, previous = "", None
    for part in scope:
        nested = previous is not None and part.startswith(f"{previous}.")
        path = path[: len(path) - len(previous)] + part if nested else f"{path}.{part}".lstrip(".")
        previous = part
    return path


def rename_nodes(graph: onnx.GraphProto, modules: set[str]) -> None:
    """Name each node and its output tensor after its torch module.

    If the module is no leaf or has several nodes, the operator is appended.
    """
    paths = {node.name: module_path(node.name.strip("/").split("/")[:-1]) for node in graph.node}
    parents = {path.rpartition(".")[0] for path in modules} | {""}
    nodes = [node for node in graph.node if node.op_type != "Constant"]
    node_counts = Counter(paths[node.name] for node in nodes)
    outputs = {value.name for value in graph.output}
    renamed: dict[str, str] = {}
    for node in nodes:
        path, operator = paths[node.name], node.name.rpartition("/")[2].lower()
        is_single = node_counts[path] == 1 and path not in parents
        node.name = path if is_single else f"{path}.{operator}".lstrip(".")
        if node.output[0] not in outputs:
            renamed[node.output[0]] = node.name
    for node in nodes:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]


def hoist_constants(graph: onnx.GraphProto) -> None:
    """Replace Constant nodes by initializers, one for each distinct value."""
    names: dict[str, str] = {}
    for node in [node for node in graph.node if node.op_type == "Constant"]:
        array = numpy_helper.to_array(node.attribute[0].t)
        shared = f"constant_{'_'.join(str(item) for item in array.ravel())}_{array.dtype}"
        if shared not in names.values():
            graph.initializer.append(numpy_helper.from_array(array, shared))
        names[node.output[0]] = shared
        graph.node.remove(node)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]


def kind_of(node: onnx.NodeProto, producers: dict[str, onnx.NodeProto]) -> str:
    """The operator of a node, but SiLU for x * sigmoid(x) and Gate for x * sigmoid(y)."""
    if node.op_type == "Mul":
        for gate, gated in (node.input, reversed(node.input)):
            if gate in producers and producers[gate].op_type == "Sigmoid":
                return "SiLU" if producers[gate].input[0] == gated else "Gate"
    return node.op_type


def gain_of(
    node: onnx.NodeProto, readers: dict[str, list[onnx.NodeProto]], producers: dict[str, onnx.NodeProto]
) -> float:
    """A layer's gain, by its readers (after BatchNormalization) and by what it reads."""
    if node.op_type == "MatMul":
        return LINEAR_GAIN  # LayerNormalization follows, and adding a bias is no residual
    after = readers.get(node.output[0], [])
    if [reader.op_type for reader in after] == ["BatchNormalization"]:
        after = readers.get(after[0].output[0], [])
    additions = sum(producer.op_type == "Add" for producer in producers.values())
    kind_gains = GAINS | {"Add": GAINS["Add"] * min(1.0, RESIDUALS / max(additions, 1))}
    gains = (kind_gains.get(kind_of(reader, producers), LINEAR_GAIN) for reader in after)
    before = producers.get(node.input[0])
    while before is not None and before.op_type in TRANSPARENT:
        before = producers.get(before.input[0])
    factor = 1.0 if before is None else FACTORS.get(kind_of(before, producers), 1.0)
    return max(gains, default=LINEAR_GAIN) * factor


def strip(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """Turn weights into typed inputs with an ``init`` rule, and remove all but the graph."""
    source = model.graph
    hoist_constants(source)
    shapes = {tensor.name: tuple(tensor.dims) for tensor in source.initializer}
    readers: dict[str, list[onnx.NodeProto]] = {}
    producers = {node.output[0]: node for node in source.node}
    for node in source.node:
        for tensor in node.input:
            readers.setdefault(tensor, []).append(node)
    inputs, weight_names = list(source.input), set()
    for node in source.node:
        for position, rule in TRAINED.get(node.op_type, {}).items():
            weight = node.input[position] if position < len(node.input) else ""
            if weight in weight_names or not weight.startswith(f"{node.name}.") or weight not in shapes:
                continue  # weights are named after their node: others are constants or computed
            fan_in, gain = 1, 1.0
            if rule == "weight":
                dims = shapes[weight]
                fan_in = dims[0] if node.op_type in ("MatMul", "ConvTranspose") else math.prod(dims[1:])
                gain = gain_of(node, readers, producers)
            value = helper.make_tensor_value_info(weight, TensorProto.FLOAT, shapes[weight])
            props = {"init": f"{rule}:{fan_in}:{gain:g}"}
            helper.set_model_props(value, props | ({"trained": name} if name in TRAINED_NETWORKS else {}))
            inputs.append(value)
            weight_names.add(weight)
    constants = [tensor for tensor in source.initializer if tensor.name not in weight_names]
    for item in (*source.node, *constants, *source.output):
        item.ClearField("doc_string")
        item.ClearField("metadata_props")
    graph = helper.make_graph(source.node, name, inputs, source.output, constants)
    opset = [helper.make_opsetid("", OPSET)]
    return helper.make_model(graph, opset_imports=opset, ir_version=IR_VERSION)


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAMES", help=f"default: {' '.join(NETWORKS)}")
    parser.add_argument("--out", type=Path, default=GRAPHS, metavar="DIR", help="default: the zoo")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(NETWORKS):
        parser.error(f"unknown network {', '.join(sorted(unknown))}; known: {', '.join(NETWORKS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or NETWORKS:
        model = strip(NETWORKS[name](), name)
        onnx.checker.check_model(model, full_check=True)
        path = arguments.out / f"{name}.onnx"
        partial = path.with_suffix(".partial")
        partial.write_bytes(model.SerializeToString(deterministic=True))
        os.replace(partial, path)
        print(f"{path}: {len(model.graph.node)} nodes, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
