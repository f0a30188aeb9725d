"""Control flow of PyTorch's programs (cond, while_loop, scan, map), replaced by the operators that run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pimflow.errors import UnsupportedOpError
from pimflow.frontend.control_flow import MOST_NODES, MOST_TRIPS
from pimflow.frontend.torch_precision import graph_module_copy, operator_name

if TYPE_CHECKING:
    import torch

_LARGEST_VALUE = 4096  # elements of a constant that is evaluated to decide a condition


def inline_control_flow(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """`program` without control flow; itself if it has none.

    A constant condition chooses a branch of a ``cond``; otherwise both are computed, and the condition
    chooses between their results. Loops are unrolled.

    Raises
    ------
    UnsupportedOpError
        If computed values decide the number of trips, for more than `MOST_TRIPS` of them, or more than
        `MOST_NODES` nodes; for a condition on an open size.
    """
    if not any(_kind(node) in _HANDLERS for node in program.graph.nodes):
        return program
    changed = copy.copy(program)
    changed._graph_module = graph_module_copy(program)
    inliner = _Inliner(changed)
    while node := next((n for n in changed.graph.nodes if _kind(n) in _HANDLERS), None):
        inliner.replace(node)
    changed.graph_module.delete_all_unused_submodules()
    changed.graph_module.recompile()
    return changed


def _kind(node: torch.fx.Node) -> str:
    """Name of a higher-order operator, such as ``cond``; else empty."""
    is_call = node.op == "call_function" and type(node.target).__module__.startswith(
        "torch._higher_order_ops"
    )
    return str(node.target) if is_call else ""


class _Inliner:
    """One program, whose control flow is replaced in place."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self.module, self.graph = program.graph_module, program.graph
        signature, self.values = program.graph_signature, {}
        for node in self.graph.nodes:
            if node.op == "placeholder" and node.name in signature.inputs_to_lifted_tensor_constants:
                target = signature.inputs_to_lifted_tensor_constants[node.name]
                self.values[node] = program.constants[target]
            else:
                self._evaluate(node)

    def replace(self, node: torch.fx.Node) -> None:
        """Replace a node of control flow by what runs."""
        with self.graph.inserting_before(node):
            results = _HANDLERS[_kind(node)](self, node)
        for reader in list(node.users):
            reader.replace_all_uses_with(results[reader.args[1]])
            self.graph.erase_node(reader)
        self.graph.erase_node(node)
        if len(self.graph.nodes) > MOST_NODES:
            raise UnsupportedOpError(f"it has more than {MOST_NODES} nodes after its loops are unrolled")

    def _evaluate(self, node: torch.fx.Node) -> None:
        """Note the value of a node, if it depends on small constants alone."""
        import torch

        if operator_name(node).endswith("_") and operator_name(node) != "detach_":
            self.values.pop(node.args[0], None)  # it has another value from here on
            return
        result = node.meta.get("val")
        is_small = isinstance(result, torch.Tensor) and 0 < result.numel() <= _LARGEST_VALUE
        if node.op != "call_function" or not is_small or not set(node.all_input_nodes) <= set(self.values):
            return
        operands = torch.fx.node.map_arg((node.args, node.kwargs), lambda source: self.values[source].clone())
        self.values[node] = node.target(*operands[0], **operands[1])

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...], like: torch.fx.Node) -> torch.fx.Node:
        """A call of an operator, from the same module as the node `like`."""
        result = self.graph.call_function(target, args)
        result.meta = {key: value for key, value in like.meta.items() if key != "val"}
        return result

    def _inline(self, body: torch.fx.Node, operands: Sequence[Any]) -> list[Any]:
        """Add the nodes of a body, with `operands` in place of its inputs; gives its results."""
        graph = getattr(self.module, str(body.target)).graph
        remaining, sources = iter(operands), {}
        for node in graph.nodes:
            if node.op == "placeholder":
                sources[node] = next(remaining)
            elif node.op == "get_attr":
                sources[node] = self._attribute(body, node)
            elif node.op == "output":
                results = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
                return [sources.get(result, result) for result in results]
            else:
                sources[node] = self.graph.node_copy(node, lambda source: sources[source])
                self._evaluate(sources[node])
        raise AssertionError("a graph without an output")

    def _attribute(self, body: torch.fx.Node, node: torch.fx.Node) -> torch.fx.Node:
        """A node for what a body has as an attribute: the body of a nested loop."""
        name = f"{body.target}_{node.target}"
        setattr(self.module, name, getattr(getattr(self.module, str(body.target)), str(node.target)))
        return self.graph.get_attr(name)

    def branch(self, node: torch.fx.Node) -> list[Any]:
        """Results of a ``cond``."""
        import torch

        condition, *branches, operands = node.args
        if not isinstance(condition, torch.fx.Node):
            return self._inline(branches[0 if condition else 1], operands)
        if condition in self.values:
            return self._inline(branches[0 if bool(self.values[condition]) else 1], operands)
        if not isinstance(condition.meta.get("val"), torch.Tensor):
            raise UnsupportedOpError(f"'{node.name}' chooses by an open size; export it with fixed ones")
        both = [self._inline(branch, operands) for branch in branches]
        where = torch.ops.aten.where.self
        return [self._call(where, (condition, *pair), node) for pair in zip(*both, strict=True)]

    def loop(self, node: torch.fx.Node) -> list[Any]:
        """Results of a ``while_loop``: the carried values after the last trip."""
        condition, body, carried, further = node.args
        for _ in range(MOST_TRIPS + 1):
            (goes_on,) = self._inline(condition, [*carried, *further])
            value = self.values.get(goes_on) if hasattr(goes_on, "meta") else goes_on
            if value is None:
                raise UnsupportedOpError(f"'{node.name}' ends when computed values say so")
            if not bool(value):
                return list(carried)
            carried = self._inline(body, [*carried, *further])
        raise UnsupportedOpError(f"'{node.name}' makes more than {MOST_TRIPS} trips; use fewer")

    def scan(self, node: torch.fx.Node) -> list[Any]:
        """Results of a ``scan``: the last carried values, and rows of all trips."""
        body, carried, sequences, further = node.args
        rows = []
        for elements in self._elements(node, sequences):
            results = self._inline(body, [*carried, *elements, *further])
            carried = results[: len(carried)]
            rows.append(results[len(carried) :])
        return [*carried, *self._stacks(node, rows)]

    def map(self, node: torch.fx.Node) -> list[Any]:
        """Results of a ``map``: rows of all trips."""
        body, sequences, further = node.args
        rows = [self._inline(body, [*elements, *further]) for elements in self._elements(node, sequences)]
        return self._stacks(node, rows)

    def _elements(self, node: torch.fx.Node, sequences: Sequence[torch.fx.Node]) -> list[list[Any]]:
        """For each trip, an element of each sequence."""
        import torch

        trips = sequences[0].meta["val"].shape[0]
        if not isinstance(trips, int) or not 0 < trips <= MOST_TRIPS:
            raise UnsupportedOpError(f"'{node.name}' makes {trips} trips; 1 to {MOST_TRIPS} are supported")
        select = torch.ops.aten.select.int
        return [[self._call(select, (x, 0, trip), node) for x in sequences] for trip in range(trips)]

    def _stacks(self, node: torch.fx.Node, rows: Sequence[Sequence[Any]]) -> list[Any]:
        """All trips' results of one place along a new first axis, for each place."""
        import torch

        stack = torch.ops.aten.stack.default
        return [self._call(stack, (list(column),), node) for column in zip(*rows, strict=True)]


_HANDLERS: dict[str, Callable[[_Inliner, torch.fx.Node], list[Any]]] = {
    "cond": _Inliner.branch,
    "while_loop": _Inliner.loop,
    "scan": _Inliner.scan,
    "map_impl": _Inliner.map,
}
