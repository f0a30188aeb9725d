"""Decomposed layers as nodes of the ONNX model that the network came from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from pimflow.core.chains import LayerChain, Link
from pimflow.decomposition.factorisation import merge_phases
from pimflow.errors import UnsupportedOpError
from pimflow.frontend.onnx_roles import ROLES_KEY, read_roles
from pimflow.relay_passes.decomposition.decompose import DecomposableLayer
from pimflow.relay_passes.flat import unique_name
from pimflow.zoo.nodes import attributes, constant_nodes

# How far filters of the file, scaled by row, may be from those of the layer, over the latter's norm.
SCALE_TOLERANCE = 1e-4
_DIRECTIONS = ("strides", "dilations", "output_padding")


def with_chains(
    model: onnx.ModelProto,
    layers: Sequence[LayerChain],
    original_layers: Mapping[str, DecomposableLayer],
    pushed_biases: Mapping[str, np.ndarray],
) -> onnx.ModelProto:
    """`model` with the nodes of decomposed layers as chains of nodes.

    A batch norm after a layer is folded into the layer's filters, but is still a node of the model. It stays
    a node, and its scale is divided out of the last link of the chain. If the canonical form pushed a bias
    through the original layer, the chain loses a part of it, which is added to the last link's bias. Roles
    are stored in the metadata, by node, so that they are known when the model is read again.

    Parameters
    ----------
    model : ModelProto
        As `zoo.load_model` returns it; not changed.
    pushed_biases : mapping of str to ndarray
        Biases that were pushed through layers; see `Canonicalise`.

    Raises
    ------
    UnsupportedOpError
        For a layer that is no node with constant filters, or whose filters are not those of the node.
    """
    new_model = onnx.ModelProto()
    new_model.CopyFrom(model)
    writer = _ChainWriter(new_model, {layer.layer: layer for layer in layers}, original_layers, pushed_biases)
    nodes = [new_node for node in new_model.graph.node for new_node in writer.nodes(node)]
    if writer.chains:
        name = next(iter(writer.chains))
        raise UnsupportedOpError(
            f"layer '{name}' is not a node of the model, so that a chain cannot replace it; decompose other "
            "layers (a .toml file names layers)"
        )
    nodes, unused_names = _used_nodes(nodes, writer.replaced)
    weights = [tensor for tensor in new_model.graph.initializer if tensor.name not in unused_names]
    node_copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    tensors = [
        onnx.TensorProto.FromString(tensor_proto.SerializeToString())
        for tensor_proto in (*weights, *writer.weights)
    ]
    for field, values in (("node", node_copies), ("initializer", tensors), ("value_info", ())):
        new_model.graph.ClearField(field)
        getattr(new_model.graph, field).extend(values)
    metadata = {entry.key: entry.value for entry in new_model.metadata_props}
    roles = read_roles(model) | writer.roles
    helper.set_model_props(new_model, metadata | {ROLES_KEY: json.dumps(roles)})
    return new_model


def _used_nodes(nodes: Sequence[onnx.NodeProto], replaced: set[str]) -> tuple[list[onnx.NodeProto], set[str]]:
    """Nodes without those of constants that nobody reads any more, and the names of these constants."""
    while True:
        unused_names = replaced - {name for node in nodes for name in node.input}
        used = [node for node in nodes if not unused_names.issuperset(node.output)]
        if len(used) == len(nodes):
            return used, unused_names
        nodes = used


class _ChainWriter:
    """Writes chains as nodes, and collects their weights and roles."""

    def __init__(
        self,
        model: onnx.ModelProto,
        chains: dict[str, LayerChain],
        original_layers: Mapping[str, DecomposableLayer],
        pushed_biases: Mapping[str, np.ndarray],
    ) -> None:
        self.chains, self.original_layers, self.pushed_biases = chains, original_layers, pushed_biases
        self.weights: list[onnx.TensorProto] = []
        self.roles: dict[str, str] = {}
        self.replaced: set[str] = set()  # constants of the nodes that were replaced by chains
        graph = model.graph
        self.tensors = {tensor.name: tensor for tensor in graph.initializer}
        self.tensors |= constant_nodes(graph)
        self.copied: dict[str, str] = {}  # by the result of an Identity of a constant, that constant
        for node in graph.node:  # exporters of PyTorch store equal constants once
            if node.op_type == "Identity" and node.input[0] in self.tensors:
                self.tensors[node.output[0]] = self.tensors[node.input[0]]
                self.copied[node.output[0]] = node.input[0]
        self.node_names = {node.name for node in graph.node}
        self.value_names = {name for node in graph.node for name in (*node.input, *node.output)}

    def nodes(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """The nodes that replace `node`; `node` itself if it is no decomposed layer."""
        chain = self.chains.pop(node.name, None)
        if chain is None:
            return [node]
        arrays, scale = self._link_arrays(node, chain)
        self._replace(node.input[1])
        bias, added = self._bias(node, chain, scale)
        nodes, x = [], node.input[0]
        for position, (link, array) in enumerate(zip(chain.links, arrays, strict=True)):
            last = position == len(arrays) - 1
            name = self._fresh_name(f"{node.name}.{link.name}", self.node_names)
            weight = self._fresh_name(f"{name}.weight", self.value_names)
            y = node.output[0] if last and not added else self._fresh_name(f"{name}.out", self.value_names)
            self._store_weight(array, weight)
            self.roles[name] = link.role
            kind, attributes = _link_operator(node, chain, position)
            operands = [x, weight, *bias] if last else [x, weight]
            nodes.append(helper.make_node(kind, operands, [y], name=name, **attributes))
            x = y
        if added:
            name = self._fresh_name(f"{node.name}.bias", self.node_names)
            nodes.append(helper.make_node("Add", [x, added], node.output[:1], name=name))
        return nodes

    def _bias(self, node: onnx.NodeProto, chain: LayerChain, scale: np.ndarray) -> tuple[list[str], str]:
        """The bias operand of the last link, and a tensor to add after it: a MatMul has no bias operand."""
        if node.name not in self.pushed_biases:
            return list(node.input[2:]), ""
        node_attributes = attributes(node)
        bias_loss = (
            _bias_loss(chain, self.original_layers[node.name].filters, self.pushed_biases[node.name]) / scale
        )
        bias_loss *= node_attributes.get("alpha", 1.0) / node_attributes.get("beta", 1.0)
        old_bias = np.zeros(1)
        for bias_name in node.input[2:]:
            if bias_name not in self.tensors or np.prod(self.tensors[bias_name].dims) not in (
                1,
                len(bias_loss),
            ):
                raise UnsupportedOpError(
                    f"layer '{node.name}': its bias is no constant by channel; decompose others (a .toml "
                    "file names layers)"
                )
            old_bias = numpy_helper.to_array(self.tensors[bias_name]).reshape(-1)
            self._replace(bias_name)
        bias = self._fresh_name(f"{node.name}.{chain.links[-1].name}.bias", self.value_names)
        self._store_weight(old_bias + bias_loss, bias)
        return ([], bias) if node.op_type == "MatMul" else ([bias], "")

    def _replace(self, constant: str) -> None:
        """Note that a node which read `constant` is replaced, and what it is a copy of."""
        self.replaced.add(constant)
        if constant in self.copied:
            self._replace(self.copied[constant])

    def _store_weight(self, array: np.ndarray, name: str) -> None:
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(array, np.float32), name))

    def _fresh_name(self, name: str, used_names: set[str]) -> str:
        name = unique_name(name, used_names)
        used_names.add(name)
        return name

    def _link_arrays(self, node: onnx.NodeProto, chain: LayerChain) -> tuple[list[np.ndarray], np.ndarray]:
        """The filters of each link in its node's layout, and the scale that the last link leaves out."""
        tensor = self.tensors.get(node.input[1]) if len(node.input) > 1 else None
        # The decomposition treats a transposed convolution of stride 1 as a convolution.
        fits = (node.op_type == "ConvTranspose") == (chain.upsampling is not None)
        if (
            node.op_type not in _RANKS
            or tensor is None
            or len(tensor.dims) != _RANKS[node.op_type]
            or not fits
        ):
            raise UnsupportedOpError(
                f"layer '{node.name}': this {node.op_type} is no product with a constant matrix, no "
                "convolution over two axes with constant filters, and no such transposed one with a stride; "
                "decompose others (a .toml file names layers)"
            )
        filters = numpy_helper.to_array(tensor).astype(np.float64)
        rows = _node_rows(node, filters)
        kernel = _node_kernel(
            node, chain, chain.geometry.groups, self.original_layers[node.name].filters, rows.shape[2:]
        )
        scale = _row_scale(node.name, kernel, rows)
        arrays = []
        for position, link in enumerate(chain.links):
            is_core, is_last = 0 < position < len(chain.links) - 1, position == len(chain.links) - 1
            array = link.filters.transpose(0, 3, 1, 2).astype(np.float64)
            if is_core and chain.upsampling:
                taps = tuple(
                    size if is_along else 1
                    for size, is_along in zip(rows.shape[2:], _core_axes(chain, position))
                )
                array = _node_kernel(node, link, link.geometry.groups, link.filters, taps)
            array = array / scale[:, None, None, None] if is_last else array
            arrays.append(_node_weight(node, array, link.geometry.groups, is_core))
        return arrays, scale


_RANKS = {"Conv": 4, "ConvTranspose": 4, "Gemm": 2, "MatMul": 2}


def _node_rows(node: onnx.NodeProto, filters: np.ndarray) -> np.ndarray:
    """The filters of a node, transposed to [OC, C // groups, KH, KW]."""
    if node.op_type == "Conv":
        return filters
    if node.op_type == "ConvTranspose":
        groups = attributes(node).get("group", 1)
        return np.concatenate([group_filters.swapaxes(0, 1) for group_filters in np.split(filters, groups)])
    transposed = node.op_type == "Gemm" and attributes(node).get("transB", 0)
    return (filters if transposed else filters.T)[:, :, None, None]


def _node_kernel(
    node: onnx.NodeProto, link: LayerChain | Link, groups: int, filters: np.ndarray, taps: tuple[int, ...]
) -> np.ndarray:
    """Canonical filters [OC, KH, KW, C] as [OC, C, *taps]; phases of a transposed convolution are merged."""
    scale = link.scale if isinstance(link, Link) else link.upsampling.scale if link.upsampling else None
    if scale is None:
        return filters.transpose(0, 3, 1, 2)
    (sh, sw), dilation = scale, attributes(node).get("dilations", [1, 1])
    parts = []
    for group_filters in np.split(filters, groups):
        oc, height, width, c = merge_phases(group_filters, scale).shape
        phases = merge_phases(group_filters, scale).reshape(oc, sh, height // sh, sw, width // sw, c)
        # Pixel u sums x[u // s - t] * w[u % s + s * t]: in each phase the order of taps is reversed.
        kernel = phases[:, :, ::-1, :, ::-1].transpose(0, 5, 2, 1, 4, 3).reshape(oc, c, height, width)
        reach = [(n - 1) * (d if n > 1 else 1) + 1 for n, d in zip(taps, dilation)]
        parts.append(kernel[:, :, : reach[0] : dilation[0], : reach[1] : dilation[1]])
    return np.concatenate(parts)


def _row_scale(name: str, filters: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """By output channel, the ratio of the layer's filters to those of the file; 1 where both are zero.

    Raises
    ------
    UnsupportedOpError
        If they differ by more than a ratio.
    """
    if filters.shape == rows.shape:
        squares, products = ((a * rows).sum(axis=(1, 2, 3)) for a in (rows, filters))
        scale = np.divide(products, squares, out=np.zeros_like(products), where=squares > 0)
        difference = filters - scale[:, None, None, None] * rows
        if np.linalg.norm(difference) <= SCALE_TOLERANCE * np.linalg.norm(filters):
            return np.where(scale == 0, 1.0, scale)
    raise UnsupportedOpError(
        f"layer '{name}': its filters are not those of its node, scaled by channel; decompose others "
        "(a .toml file names layers)"
    )


def _bias_loss(chain: LayerChain, filters: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """By output channel, what a layer makes of a bias of its input, minus what its chain makes of it.

    Without padding: each output sees the bias in all of its window.
    """
    chain_bias = bias.astype(np.float64)
    for link in chain.links:
        taps = link.filters.sum(axis=(1, 2), dtype=np.float64)
        chain_bias = taps[:, 0] * chain_bias if link.geometry.groups > 1 else taps @ chain_bias
    return filters.sum(axis=(1, 2), dtype=np.float64) @ bias - chain_bias


def _node_weight(node: onnx.NodeProto, array: np.ndarray, groups: int, is_core: bool) -> np.ndarray:
    """Filters [OC, C // groups, KH, KW] in the layout of a link's node."""
    if node.op_type == "ConvTranspose" and is_core:
        return np.concatenate([group_filters.swapaxes(0, 1) for group_filters in np.split(array, groups)])
    if node.op_type in ("Gemm", "MatMul"):
        return array[:, :, 0, 0] if node.op_type == "Gemm" else array[:, :, 0, 0].T
    return array


def _core_axes(chain: LayerChain, position: int) -> tuple[bool, bool]:
    """Whether a core extends along rows, and along columns."""
    return position == 1, position == len(chain.links) - 2


def _link_operator(node: onnx.NodeProto, chain: LayerChain, position: int) -> tuple[str, dict[str, Any]]:
    """Operator and attributes of a link: those of `node`, for the axes along which the link extends."""
    node_attributes, count = attributes(node), len(chain.links)
    first, last = position == 0, position == count - 1
    if node.op_type == "MatMul":
        return "MatMul", {}
    if node.op_type == "Gemm":
        shared = {
            name: node_attributes[name] for name in ("alpha", "beta") if name in node_attributes and last
        }
        return "Gemm", shared | ({"transA": 1} if first and node_attributes.get("transA") else {}) | {
            "transB": 1
        }
    link = chain.links[position]
    groups = {"group": link.geometry.groups}
    is_core = first if count == 2 else not (first or last)
    if not is_core:
        return "Conv", groups
    core_axes = (True, True) if count == 2 else _core_axes(chain, position)
    link_attributes = {name: node_attributes[name] for name in ("auto_pad",) if name in node_attributes}
    for name in _DIRECTIONS:
        if name in node_attributes:
            neutral = 0 if name == "output_padding" else 1
            link_attributes[name] = [
                value if is_along else neutral for value, is_along in zip(node_attributes[name], core_axes)
            ]
    if "pads" in node_attributes:
        link_attributes["pads"] = [
            value if is_along else 0 for value, is_along in zip(node_attributes["pads"], core_axes * 2)
        ]
    if "output_shape" in node_attributes:
        if count > 3:
            raise UnsupportedOpError(
                f"layer '{node.name}': two cores cannot share its output_shape; decompose it by tucker"
            )
        link_attributes["output_shape"] = node_attributes["output_shape"]
    return node.op_type, link_attributes | groups
