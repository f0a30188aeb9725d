"""Products of experts in PyTorch's programs: rows in groups, each group with a matrix of its own.

transformers sorts tokens by their experts, counts the tokens of each (``histc``) and multiplies by groups.
Where the number of rows is fixed, each row multiplied with the matrix of its group is the same.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tvm import relax

from pimflow.relay_passes.flat import shape

if TYPE_CHECKING:
    import torch
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

_NAMESPACE, _NAME = "transformers", "grouped_mm_fallback"
_TARGETS = (f"{_NAMESPACE}.{_NAME}.default", "aten._grouped_mm.default")
_KEPT_META = ("nn_module_stack", "stack_trace")  # what says which module a node is from


@contextlib.contextmanager
def known_grouped_product() -> Iterator[None]:
    """Context in which programs with transformers' grouped product are read, though it is not imported."""
    import torch

    if hasattr(getattr(torch.ops, _NAMESPACE), _NAME):
        yield
        return
    with torch.library._scoped_library(_NAMESPACE, "FRAGMENT") as library:
        library.define(f"{_NAME}(Tensor input, Tensor weight, Tensor offs) -> Tensor")
        yield


def replace_grouped_products(program: torch.export.ExportedProgram) -> None:
    """Replace grouped products, in place, by products of each row with the matrix of its group."""
    graph = program.graph_module.graph
    nodes = [node for node in graph.nodes if str(node.target) in _TARGETS and _row_count(node)]
    for node in nodes:
        with graph.inserting_before(node):
            _replace_product(graph, node)
    if nodes:
        program.graph_module.recompile()


def _row_count(node: torch.fx.Node) -> int:
    """Rows of a grouped product; 0 where they are not fixed, or the operands are others."""
    rows, weight = (operand.meta["val"].shape for operand in node.args[:2])
    is_plain = len(node.args) + len(node.kwargs) <= 3 and len(rows) == 2 and len(weight) == 3
    return rows[0] if is_plain and isinstance(rows[0], int) else 0


def _replace_product(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Replace one product; `offs` are the ends of the groups."""
    import torch

    aten = torch.ops.aten

    def call(target: Any, *args: Any) -> torch.fx.Node:
        result = graph.call_function(target, args)
        result.meta = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
        return result

    rows, weight = node.args[:2]
    ends = node.args[2] if len(node.args) > 2 else node.kwargs["offs"]
    ends = call(aten.unsqueeze.default, call(aten.to.dtype, ends, torch.int64), 0)
    places = call(aten.unsqueeze.default, call(aten.arange.default, _row_count(node)), 1)
    groups = call(aten.sum.dim_IntList, call(aten.le.Tensor, ends, places), [1])
    chosen = call(aten.index.Tensor, weight, [groups])
    product = call(aten.bmm.default, call(aten.unsqueeze.default, rows, 1), chosen)
    node.replace_all_uses_with(call(aten.squeeze.dim, product, 1))
    graph.erase_node(node)


def histogram(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Var:
    """Convert ``histc`` with bounds: how many elements are in each of some equal intervals."""
    x, bins, low, high = (*importer.retrieve_args(node), *(100, 0, 0)[len(node.args) - 1 :])
    if low >= high:
        raise NotImplementedError("histc without bounds is not supported: they depend on the data")
    op, emit, dtype = relax.op, importer.block_builder.emit, str(x.ty.dtype)
    flat = emit(op.reshape(x, (1, math.prod(shape(x)))))
    steps = emit(op.subtract(flat, relax.const(float(low), dtype)))
    steps = emit(op.floor(emit(op.multiply(steps, relax.const(bins / (high - low), dtype)))))
    is_last = emit(op.equal(flat, relax.const(float(high), dtype)))
    steps = emit(op.where(is_last, relax.const(float(bins - 1), dtype), steps))
    numbers = emit(op.reshape(emit(op.arange(0, bins, 1, dtype)), (bins, 1)))
    counts = emit(op.astype(emit(op.equal(numbers, steps)), dtype))
    return emit(op.sum(counts, axis=[1]))
