"""If, Loop and Scan of ONNX, replaced by the operators that run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, shape_inference

from pimflow.errors import UnsupportedOpError
from pimflow.frontend.constant_values import ConstantValues, fold_constants
from pimflow.zoo.foreign.builder import NodeBuilder
from pimflow.zoo.nodes import attributes, bodies, constant_nodes

OPERATORS = ("If", "Loop", "Scan")
MOST_TRIPS = 256
MOST_NODES = 20_000  # of the network, after unrolling


def inline_control_flow(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace every If, Loop and Scan by the nodes of its branch, or of its trips.

    A constant condition chooses a branch; otherwise both are computed, and the condition chooses between
    their results, which have to be of one shape.

    Parameters
    ----------
    model : ModelProto
        With fixed shapes of inputs, and with its weights.

    Raises
    ------
    UnsupportedOpError
        If inputs decide the number of trips, or the shape of a result; for more than `MOST_TRIPS` trips.
    """
    while any(node.op_type in OPERATORS for node in model.graph.node):
        model = _Inliner(fold_constants(model)).model()  # sizes that constants decide choose branches
    return model


class _Inliner:
    """One network, whose outermost control flow is replaced."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.source = model
        self.values = ConstantValues(model, {tensor.name: tensor for tensor in model.graph.initializer})
        self.nodes: list[onnx.NodeProto] = []

    def model(self) -> onnx.ModelProto:
        """The network with what replaces its control flow.

        What no constant decides waits for a next pass, if sizes behind what was replaced may decide it.
        """
        is_changed = False
        for node in self.source.graph.node:
            if node.op_type not in OPERATORS or (is_changed and not self._is_decided(node)):
                self.nodes.append(node)
            else:
                _HANDLERS[node.op_type](self, node)
                is_changed = True
        return self._model_so_far(self.source.graph.output)

    def _is_decided(self, node: onnx.NodeProto) -> bool:
        """Whether the condition of an If, or the trips and the condition of a Loop, are constants."""
        deciding = {"If": node.input[:1], "Loop": node.input[:2]}.get(node.op_type, ())
        return all(self.values.value(name) is not None for name in deciding if name)

    def add(self, nodes: Sequence[onnx.NodeProto]) -> None:
        """Append nodes, on which later conditions may depend."""
        self.nodes += nodes
        if len(self.nodes) > MOST_NODES:
            raise UnsupportedOpError(
                f"model '{self.source.graph.name}': more than {MOST_NODES} nodes after its loops are "
                "unrolled; use fewer trips"
            )
        self.values.add_nodes(nodes)

    def inline(
        self, body: onnx.GraphProto, operands: Sequence[str], prefix: str, owner: str | None = None
    ) -> list[str]:
        """Append a copy of `body` with `operands`; returns the names of its results.

        Constants are stored once for all copies of one `owner`, which is `prefix` by default.
        """
        names = dict(zip((value.name for value in body.input), operands))
        names |= {out: f"{prefix}/{out}" for node in body.node for out in node.output if out}
        constants = {tensor.name: tensor for tensor in body.initializer} | constant_nodes(body)
        for name, tensor in constants.items():
            names[name] = f"{owner or prefix}/{name}"
            if names[name] not in self.values.weights:
                copy = onnx.TensorProto()
                copy.CopyFrom(tensor)
                copy.name = names[name]
                self.values.weights[copy.name] = copy
        nodes = []
        for index, node in enumerate(body.node):
            if any(name in constants for name in node.output):
                continue
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.name = f"{prefix}/{node.name or index}"
            _rename(copy, names)
            nodes.append(copy)
        self.add(nodes)
        return [names.get(value.name, value.name) for value in body.output]

    def bind(self, values: Sequence[str], node: onnx.NodeProto) -> None:
        """Let `values` be the results of `node`."""
        builder = NodeBuilder(node.name or node.output[0])
        for value, result in zip(values, node.output):
            if result:
                builder.bind(value, result)
        self.add(builder.nodes)

    def add_built(self, builder: NodeBuilder) -> None:
        """Append the nodes and constants of a builder."""
        self.values.weights |= {tensor.name: tensor for tensor in builder.constants}
        self.add(builder.nodes)

    def branch(self, node: onnx.NodeProto) -> None:
        """Replace an If."""
        attrs = attributes(node)
        branches = {True: attrs["then_branch"], False: attrs["else_branch"]}
        prefix = node.name or node.output[0]
        condition = self.values.value(node.input[0])
        if condition is not None:
            self.bind(self.inline(branches[bool(condition.reshape(-1)[0])], [], prefix), node)
            return
        chosen, otherwise = (self.inline(branches[key], [], f"{prefix}/{key}") for key in (True, False))
        builder = NodeBuilder(f"{prefix}/choice")
        flag = builder.emit("Reshape", [node.input[0], builder.constant(np.zeros(0, "int64"))])
        results = [builder.emit("Where", [flag, *pair]) for pair in zip(chosen, otherwise)]
        self._require_equal_shapes(node, list(zip(chosen, otherwise)))
        self.add_built(builder)
        self.bind(results, node)

    def _require_equal_shapes(self, node: onnx.NodeProto, pairs: Sequence[tuple[str, str]]) -> None:
        """Raise `UnsupportedOpError` unless the results of both branches are of the same known shapes."""
        results = [helper.make_empty_tensor_value_info(name) for pair in pairs for name in pair]
        probe = self._model_so_far(results)
        shapes = ConstantValues(shape_inference.infer_shapes(probe, data_prop=True), {}).shapes
        shapes |= {name: list(tensor.dims) for name, tensor in self.values.weights.items()}
        for pair in pairs:
            left, right = (shapes.get(name) for name in pair)
            if left is None or left != right:
                inputs = ", ".join(f"'{name}'" for name in self._deciding_inputs(node.input[0]))
                raise self._unsupported(
                    node,
                    f"chooses by the values of {inputs or 'its condition'} between results of different "
                    "shapes; make them constants, inputs by --value NAME=X",
                )

    def _model_so_far(self, results: Iterable[onnx.ValueInfoProto]) -> onnx.ModelProto:
        """The network up to here, which returns `results`."""
        model = onnx.ModelProto(ir_version=self.source.ir_version, opset_import=self.source.opset_import)
        model.graph.name = self.source.graph.name
        model.graph.input.extend(self.source.graph.input)
        model.graph.initializer.extend(self.values.weights.values())
        model.graph.node.extend(self.nodes)
        model.graph.output.extend(results)
        return model

    def _deciding_inputs(self, name: str) -> list[str]:
        """The inputs that a tensor depends on."""
        queue, seen = [name], {name}
        while queue:
            node = self.values.producers.get(queue.pop())
            fresh = set(node.input if node is not None else ()) - seen
            queue += fresh
            seen |= fresh
        return [value.name for value in self.source.graph.input if value.name in seen]

    def loop(self, node: onnx.NodeProto) -> None:
        """Replace a Loop by its trips; its conditions have to be constants."""
        body, prefix = attributes(node)["body"], node.name or node.output[0]
        limit_name, condition, *carried = [*node.input, ""][: max(len(node.input), 2)]
        limit = self._trip_limit(node, limit_name)
        count = len(body.output) - 1 - len(carried)
        columns: list[list[str]] = [[] for _ in range(count)]
        for trip in range(MOST_TRIPS + 1):
            if trip == limit or (condition and not self._holds(node, condition)):
                break
            if trip == MOST_TRIPS:
                raise self._unsupported(node, f"makes more than {MOST_TRIPS} trips; use fewer")
            builder = NodeBuilder(f"{prefix}/{trip}")
            number = builder.constant(np.array(trip, "int64"))
            flag = builder.constant(np.array(True))
            self.add_built(builder)
            condition, *results = self.inline(
                body, [number, condition or flag, *carried], f"{prefix}/{trip}", prefix
            )
            carried, rows = results[: len(carried)], results[len(carried) :]
            for column, row in zip(columns, rows):
                column.append(row)
        self._bind_rows(node, carried, columns, [0] * count, [0] * count)

    def _trip_limit(self, node: onnx.NodeProto, name: str) -> int | None:
        """The constant upper bound on trips; None for none."""
        if not name:
            return None
        value = self.values.value(name)
        if value is None:
            inputs = ", ".join(f"'{entry}'" for entry in self._deciding_inputs(name))
            raise self._unsupported(
                node,
                f"makes as many trips as the values of {inputs or 'its inputs'} say; make them "
                "constants, inputs by --value NAME=X",
            )
        return min(int(value.reshape(-1)[0]), MOST_TRIPS + 1)

    def _holds(self, node: onnx.NodeProto, name: str) -> bool:
        value = self.values.value(name)
        if value is None:
            raise self._unsupported(node, "ends when computed values say so, which is not supported")
        return bool(value.reshape(-1)[0])

    def scan(self, node: onnx.NodeProto) -> None:
        """Replace a Scan by its trips, as many as its sequences have elements."""
        attrs, prefix = attributes(node), node.name or node.output[0]
        body, inputs = attrs["body"], int(attrs["num_scan_inputs"])
        split = len(node.input) - inputs
        carried, sequences = list(node.input[:split]), list(node.input[split:])
        axes = list(attrs.get("scan_input_axes", [0] * inputs))
        backward = list(attrs.get("scan_input_directions", [0] * inputs))
        shapes = [self.values.shapes.get(name) for name in sequences]
        if any(shape is None for shape in shapes):
            raise self._unsupported(node, "over a sequence of unknown length; fix shapes with --shape")
        trips = shapes[0][axes[0]] if shapes and shapes[0] is not None else 0
        if trips > MOST_TRIPS:
            raise self._unsupported(node, f"makes {trips} trips; {MOST_TRIPS} are supported")
        count = len(body.output) - split
        columns: list[list[str]] = [[] for _ in range(count)]
        for trip in range(trips):
            builder = NodeBuilder(f"{prefix}/{trip}")
            places = [trips - 1 - trip if reverse else trip for reverse in backward]
            elements = [
                builder.emit("Gather", [name, builder.constant(np.array(place))], axis=axis)
                for name, place, axis in zip(sequences, places, axes)
            ]
            self.add_built(builder)
            results = self.inline(body, [*carried, *elements], f"{prefix}/{trip}", prefix)
            carried = results[:split]
            for column, row in zip(columns, results[split:]):
                column.append(row)
        out_axes = list(attrs.get("scan_output_axes", [0] * count))
        self._bind_rows(node, carried, columns, out_axes, attrs.get("scan_output_directions", [0] * count))

    def _bind_rows(
        self,
        node: onnx.NodeProto,
        carried: Sequence[str],
        columns: Sequence[list[str]],
        axes: Sequence[int],
        backward: Sequence[int],
    ) -> None:
        """Let the last carried values, and the rows of all trips stacked along `axes`, be the results."""
        builder = NodeBuilder(f"{node.name or node.output[0]}/rows")
        results = list(carried)
        for rows, axis, reverse, name in zip(columns, axes, backward, node.output[len(carried) :]):
            if not rows and name:
                raise self._unsupported(node, "makes no trip, and its result holds nothing")
            place = builder.constant(np.array([axis]))
            parts = [builder.emit("Unsqueeze", [row, place]) for row in (rows[::-1] if reverse else rows)]
            results.append(builder.concat(parts, axis) if parts else "")
        self.add_built(builder)
        self.bind(results, node)

    def _unsupported(self, node: onnx.NodeProto, reason: str) -> UnsupportedOpError:
        label = node.name or node.output[0]
        return UnsupportedOpError(
            f"model '{self.source.graph.name}': {node.op_type} of node '{label}' {reason}"
        )


_HANDLERS = {"If": _Inliner.branch, "Loop": _Inliner.loop, "Scan": _Inliner.scan}


def _rename(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Rename the tensors that a node reads and writes, in its bodies too, in place."""
    for field in (node.input, node.output):
        for index, name in enumerate(field):
            field[index] = names.get(name, name)
    for body in bodies(node):
        for inner in body.node:
            _rename(inner, names)
        for value in body.output:
            value.name = names.get(value.name, value.name)
