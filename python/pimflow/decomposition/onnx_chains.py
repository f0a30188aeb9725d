"""Decomposed layers as nodes of the ONNX model that the network came from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from pimflow.core.chains import Decomposed, Link
from pimflow.decomposition.factorisation import joined
from pimflow.errors import UnsupportedOpError
from pimflow.frontend.onnx_roles import ROLES_KEY, stored_roles
from pimflow.relay_passes.decomposition.decompose import DecomposableLayer
from pimflow.relay_passes.flat import unused
from pimflow.zoo.nodes import attributes, constant_nodes

# How far filters of the file, scaled by row, may be from those of the layer, over the latter's norm.
SCALED = 1e-4
_DIRECTIONS = ("strides", "dilations", "output_padding")


def with_chains(
    model: onnx.ModelProto,
    layers: Sequence[Decomposed],
    given: Mapping[str, DecomposableLayer],
    pushed: Mapping[str, np.ndarray],
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
    given : mapping of str to DecomposableLayer
        The original layers, by name.
    pushed : mapping of str to ndarray
        Biases that were pushed through layers; see `Canonicalise`.

    Raises
    ------
    UnsupportedOpError
        For a layer that is no node with constant filters, or whose filters are not those of the node.
    """
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    writer = _Writer(changed, {layer.layer: layer for layer in layers}, given, pushed)
    nodes = [made for node in changed.graph.node for made in writer.nodes(node)]
    if writer.chains:
        name = next(iter(writer.chains))
        raise UnsupportedOpError(
            f"layer '{name}' is no node of the model, so that no chain can stand for it; decompose others (a "
            ".toml file names layers)"
        )
    unused_now = writer.replaced - {name for node in nodes for name in node.input}
    nodes = [node for node in nodes if not unused_now.issuperset(node.output)]
    weights = [tensor for tensor in changed.graph.initializer if tensor.name not in unused_now]
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    tensors = [onnx.TensorProto.FromString(t.SerializeToString()) for t in (*weights, *writer.weights)]
    for field, values in (("node", kept), ("initializer", tensors), ("value_info", ())):
        changed.graph.ClearField(field)
        getattr(changed.graph, field).extend(values)
    known = {entry.key: entry.value for entry in changed.metadata_props}
    roles = stored_roles(model) | writer.roles
    helper.set_model_props(changed, known | {ROLES_KEY: json.dumps(roles)})
    return changed


class _Writer:
    """Writes chains as nodes, and collects their weights and roles."""

    def __init__(
        self,
        model: onnx.ModelProto,
        chains: dict[str, Decomposed],
        given: Mapping[str, DecomposableLayer],
        pushed: Mapping[str, np.ndarray],
    ) -> None:
        self.chains, self.given, self.pushed = chains, given, pushed
        self.weights: list[onnx.TensorProto] = []
        self.roles: dict[str, str] = {}
        self.replaced: set[str] = set()  # constants of the nodes that were replaced by chains
        graph = model.graph
        self.tensors = {tensor.name: tensor for tensor in graph.initializer}
        self.tensors |= constant_nodes(graph)
        self.named = {node.name for node in graph.node}
        self.values = {name for node in graph.node for name in (*node.input, *node.output)}

    def nodes(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """The nodes that replace `node`; `node` itself if it is no decomposed layer."""
        chain = self.chains.pop(node.name, None)
        if chain is None:
            return [node]
        arrays, scale = self._arrays(node, chain)
        self.replaced.add(node.input[1])
        bias, added = self._bias(node, chain, scale)
        nodes, x = [], node.input[0]
        for position, (link, array) in enumerate(zip(chain.links, arrays, strict=True)):
            last = position == len(arrays) - 1
            name = self._new(f"{node.name}.{link.name}", self.named)
            weight = self._new(f"{name}.weight", self.values)
            y = node.output[0] if last and not added else self._new(f"{name}.out", self.values)
            self._keep(array, weight)
            self.roles[name] = link.role
            kind, attributes = _operator(node, chain, position)
            operands = [x, weight, *bias] if last else [x, weight]
            nodes.append(helper.make_node(kind, operands, [y], name=name, **attributes))
            x = y
        if added:
            name = self._new(f"{node.name}.bias", self.named)
            nodes.append(helper.make_node("Add", [x, added], node.output[:1], name=name))
        return nodes

    def _bias(self, node: onnx.NodeProto, chain: Decomposed, scale: np.ndarray) -> tuple[list[str], str]:
        """The bias operand of the last link, and a tensor to add after it: a MatMul has no bias operand."""
        if node.name not in self.pushed:
            return list(node.input[2:]), ""
        given = attributes(node)
        lost = _lost(chain, self.given[node.name].filters, self.pushed[node.name]) / scale
        lost *= given.get("alpha", 1.0) / given.get("beta", 1.0)
        known = np.zeros(1)
        for old in node.input[2:]:
            if old not in self.tensors or np.prod(self.tensors[old].dims) not in (1, len(lost)):
                raise UnsupportedOpError(
                    f"layer '{node.name}': its bias is no constant by channel; decompose others (a .toml "
                    "file names layers)"
                )
            known = numpy_helper.to_array(self.tensors[old]).reshape(-1)
            self.replaced.add(old)
        bias = self._new(f"{node.name}.{chain.links[-1].name}.bias", self.values)
        self._keep(known + lost, bias)
        return ([], bias) if node.op_type == "MatMul" else ([bias], "")

    def _keep(self, array: np.ndarray, name: str) -> None:
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(array, np.float32), name))

    def _new(self, name: str, taken: set[str]) -> str:
        name = unused(name, taken)
        taken.add(name)
        return name

    def _arrays(self, node: onnx.NodeProto, chain: Decomposed) -> tuple[list[np.ndarray], np.ndarray]:
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
        rows = _rows(node, filters)
        whole = _kernel(node, chain, chain.geometry.groups, self.given[node.name].filters, rows.shape[2:])
        scale = _row_scale(node.name, whole, rows)
        arrays = []
        for position, link in enumerate(chain.links):
            core, last = 0 < position < len(chain.links) - 1, position == len(chain.links) - 1
            array = link.filters.transpose(0, 3, 1, 2).astype(np.float64)
            if core and chain.upsampling:
                taps = tuple(
                    size if along else 1 for size, along in zip(rows.shape[2:], _along(chain, position))
                )
                array = _kernel(node, link, link.geometry.groups, link.filters, taps)
            array = array / scale[:, None, None, None] if last else array
            arrays.append(_stored(node, array, link.geometry.groups, core))
        return arrays, scale


_RANKS = {"Conv": 4, "ConvTranspose": 4, "Gemm": 2, "MatMul": 2}


def _rows(node: onnx.NodeProto, filters: np.ndarray) -> np.ndarray:
    """The filters of a node, transposed to [OC, C // groups, KH, KW]."""
    if node.op_type == "Conv":
        return filters
    if node.op_type == "ConvTranspose":
        groups = attributes(node).get("group", 1)
        return np.concatenate([each.swapaxes(0, 1) for each in np.split(filters, groups)])
    transposed = node.op_type == "Gemm" and attributes(node).get("transB", 0)
    return (filters if transposed else filters.T)[:, :, None, None]


def _kernel(
    node: onnx.NodeProto, link: Decomposed | Link, groups: int, filters: np.ndarray, taps: tuple[int, ...]
) -> np.ndarray:
    """Canonical filters [OC, KH, KW, C] as [OC, C, *taps]; phases of a transposed convolution are merged."""
    scale = link.scale if isinstance(link, Link) else link.upsampling.scale if link.upsampling else None
    if scale is None:
        return filters.transpose(0, 3, 1, 2)
    (sh, sw), dilation = scale, attributes(node).get("dilations", [1, 1])
    parts = []
    for each in np.split(filters, groups):
        oc, height, width, c = joined(each, scale).shape
        phases = joined(each, scale).reshape(oc, sh, height // sh, sw, width // sw, c)
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
        if np.linalg.norm(difference) <= SCALED * np.linalg.norm(filters):
            return np.where(scale == 0, 1.0, scale)
    raise UnsupportedOpError(
        f"layer '{name}': its filters are not those of its node, scaled by channel; decompose others "
        "(a .toml file names layers)"
    )


def _lost(chain: Decomposed, filters: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """By output channel, what a layer makes of a bias of its input, minus what its chain makes of it.

    Without padding: each output sees the bias in all of its window.
    """
    left = bias.astype(np.float64)
    for link in chain.links:
        taps = link.filters.sum(axis=(1, 2), dtype=np.float64)
        left = taps[:, 0] * left if link.geometry.groups > 1 else taps @ left
    return filters.sum(axis=(1, 2), dtype=np.float64) @ bias - left


def _stored(node: onnx.NodeProto, array: np.ndarray, groups: int, core: bool) -> np.ndarray:
    """Filters [OC, C // groups, KH, KW] in the layout of a link's node."""
    if node.op_type == "ConvTranspose" and core:
        return np.concatenate([each.swapaxes(0, 1) for each in np.split(array, groups)])
    if node.op_type in ("Gemm", "MatMul"):
        return array[:, :, 0, 0] if node.op_type == "Gemm" else array[:, :, 0, 0].T
    return array


def _along(chain: Decomposed, position: int) -> tuple[bool, bool]:
    """Whether a core extends along rows, and along columns."""
    return position == 1, position == len(chain.links) - 2


def _operator(node: onnx.NodeProto, chain: Decomposed, position: int) -> tuple[str, dict[str, Any]]:
    """Operator and attributes of a link: those of `node`, for the axes along which the link extends."""
    given, count = attributes(node), len(chain.links)
    first, last = position == 0, position == count - 1
    if node.op_type == "MatMul":
        return "MatMul", {}
    if node.op_type == "Gemm":
        shared = {name: given[name] for name in ("alpha", "beta") if name in given and last}
        return "Gemm", shared | ({"transA": 1} if first and given.get("transA") else {}) | {"transB": 1}
    link = chain.links[position]
    groups = {"group": link.geometry.groups}
    moves = first if count == 2 else not (first or last)
    if not moves:
        return "Conv", groups
    along = (True, True) if count == 2 else _along(chain, position)
    kept = {name: given[name] for name in ("auto_pad",) if name in given}
    for name in _DIRECTIONS:
        if name in given:
            still = 0 if name == "output_padding" else 1
            kept[name] = [value if there else still for value, there in zip(given[name], along)]
    if "pads" in given:
        kept["pads"] = [value if there else 0 for value, there in zip(given["pads"], along * 2)]
    if "output_shape" in given:
        if count > 3:
            raise UnsupportedOpError(
                f"layer '{node.name}': two cores cannot share its output_shape; decompose it by tucker"
            )
        kept["output_shape"] = given["output_shape"]
    return node.op_type, kept | groups
