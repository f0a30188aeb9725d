"""Networks of about any number of regions, to see how compile times grow: `chain` and `branchy`."""

from __future__ import annotations

import onnx
from zoo_graphs import ZooGraphBuilder

ROWS = 14
# Widths repeat, as in a deep network, whose layers are of few kinds.
WIDTHS = tuple(range(48, 144, 8))
BLOCKS_PER_WIDTH = 4
EXPANSION = 4
REGIONS_PER_RESIDUAL, REGIONS_PER_JOIN = 3, 7


def _width(block: int) -> int:
    return WIDTHS[block // BLOCKS_PER_WIDTH % len(WIDTHS)]


def _relu(
    graph: ZooGraphBuilder, name: str, source: str, channels: tuple[int, int], kernel: int, **window: int
) -> str:
    return graph.add("Relu", f"{name}.relu", [graph.conv_norm(name, source, channels, kernel, **window)])


def chain(regions: int) -> onnx.ModelProto:
    """Inverted residuals (MobileNetV2, table 1) one after the other."""
    graph = ZooGraphBuilder({"input": (1, WIDTHS[0], ROWS, ROWS)})
    last, before = "input", WIDTHS[0]
    for block in range(max(1, regions // REGIONS_PER_RESIDUAL)):
        width, hidden, name = _width(block), before * EXPANSION, f"block{block}"
        x = _relu(graph, f"{name}.expand", last, (hidden, before), 1)
        x = _relu(graph, f"{name}.depthwise", x, (hidden, hidden), 3, group=hidden)
        x = graph.conv_norm(f"{name}.project", x, (width, hidden), 1)
        last = graph.add("Add", f"{name}.add", [x, last]) if width == before else x
        before = width
    return graph.model("chain", {"output": (last, (1, before, ROWS, ROWS))})


def branchy(regions: int) -> onnx.ModelProto:
    """Modules of four branches that are joined (GoogLeNet, figure 2b), one after the other."""
    graph = ZooGraphBuilder({"input": (1, WIDTHS[0] * 4, ROWS, ROWS)})
    last, before = "input", WIDTHS[0] * 4
    for block in range(max(1, regions // REGIONS_PER_JOIN)):
        width, name = _width(block), f"block{block}"
        narrow, wide = width // 2, (width, before)
        pointwise = _relu(graph, f"{name}.one", last, wide, 1)
        three = _relu(graph, f"{name}.three_before", last, (narrow, before), 1)
        three = _relu(graph, f"{name}.three", three, (width, narrow), 3)
        five = _relu(graph, f"{name}.five_before", last, (narrow, before), 1)
        five = _relu(graph, f"{name}.five", five, (width, narrow), 5)
        window = {"kernel_shape": [3, 3], "pads": [1] * 4, "strides": [1, 1]}
        pooled = graph.add("MaxPool", f"{name}.pool", [last], **window)
        pooled = _relu(graph, f"{name}.pool_after", pooled, wide, 1)
        last = graph.add("Concat", f"{name}.join", [pointwise, three, five, pooled], axis=1)
        before = 4 * width
    return graph.model("branchy", {"output": (last, (1, before, ROWS, ROWS))})


KINDS = {"chain": chain, "branchy": branchy}
