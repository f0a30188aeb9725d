"""Synthetic selection problems: networks of regions, and instances of the sizes of the paper's Table 1.

Wen et al., *TASO*: its networks have 8, 13, 30 and 70 layers, each with 57 primitives.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pimflow.core.candidate import Candidate, CostTable, EdgeCost, Footprint, Task
from pimflow.core.kernel import ConvGeometry
from pimflow.core.region import KernelShape, Region
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import GpuRewrite
from pimflow.core.tensor_placement import Layout, TensorPlacement
from pimflow.primitive_selection.problem import SelectionProblem
from pimflow.primitives.layer import LAYOUTS

INPUT_CHANNELS = 16
NO_MEMORY = Footprint()
# Parameters (assumed) of the log-normal distributions that times (ns) and sizes (bytes) are drawn from.
WORK, SPREAD, SIZES, TRANSFORM_NS = (13, 1), (0, 0.5), (11, 2), 40e3


def candidate(
    region: str,
    name: str,
    input_layout: str,
    output_layout: str,
    time_ns: float,
    footprint: Footprint = NO_MEMORY,
) -> Candidate:
    """A candidate of `region` that reads layout `input_layout` and writes layout `output_layout`."""
    return Candidate(
        name=name,
        covers=(region,),
        rewrite=GpuRewrite(primitive=name),
        tasks=(Task(label=name, resource="cpu", execution_ns=time_ns),),
        input=TensorPlacement(layout=Layout(input_layout)),
        output=TensorPlacement(layout=Layout(output_layout)),
        footprint=footprint,
    )


def network(inputs: Sequence[tuple[int, ...]], channels: Sequence[int], side: int = 4) -> RegionGraph:
    """1x1 convolutions on maps of `side` by `side`.

    Region i has ``channels[i]`` channels and reads the regions ``inputs[i]``, or the graph's input if empty.
    """
    shapes = [(1, side, side, c) for c in channels]
    regions = []
    for i, operands in enumerate(inputs):
        input_channels = shapes[operands[0]][-1] if operands else INPUT_CHANNELS
        region = Region(
            name=f"r{i}",
            operator="conv2d",
            operators=("conv2d",),
            inputs=tuple(f"r{j}" for j in operands) or ("%x",),
            input_shapes=tuple(shapes[j] for j in operands) or ((1, side, side, INPUT_CHANNELS),),
            output_shape=shapes[i],
            geometry=ConvGeometry(n=1, h=side, w=side, c=input_channels, oc=channels[i]),
            kernel=KernelShape(weight_elements=input_channels * channels[i]),
        )
        regions.append(region)
    used = {j for operands in inputs for j in operands}
    outputs = tuple(f"r{i}" for i in range(len(inputs)) if i not in used)
    return RegionGraph(name="drawn", regions=tuple(regions), outputs=outputs)


def selection_problem(
    graph: RegionGraph,
    candidates: Mapping[str, tuple[Candidate, ...]],
    price: Callable[[str, str, str], float],
    memory_model: str,
) -> SelectionProblem:
    """The selection problem; `price` gives the time of a transform by tensor and layouts, 0 for none."""
    transforms = {}
    for tensor in ("%x", *candidates):
        for source, target in itertools.permutations(LAYOUTS, 2):
            time_ns = price(tensor, source, target)
            if time_ns:
                task = Task(label="transform", resource="cpu", execution_ns=time_ns)
                written, read = (TensorPlacement(layout=Layout(layout)) for layout in (source, target))
                transforms[tensor, written, read] = EdgeCost(task=task)
    table = CostTable(
        candidates=dict(candidates), transforms=transforms, inputs={"%x": TensorPlacement(layout=Layout.HWC)}
    )
    return SelectionProblem(graph=graph, table=table, memory_model=memory_model)


def inception_problem(layers: int, primitives: int, memory_model: str, seed: int = 0) -> SelectionProblem:
    """A problem of so many layers, in modules of four branches that join.

    The more memory a primitive uses, the faster it is, with noise, over two orders of magnitude.
    """
    rng = np.random.default_rng(seed)
    graph = network(_modules(layers), [int(c) for c in rng.choice([64, 128, 256], layers)], side=28)
    candidates = {}
    for region in graph.regions:
        work = float(rng.lognormal(*WORK))
        region_candidates = []
        for n in range(primitives):
            layout = LAYOUTS[n % 3]
            workspace, filters = (int(size) for size in rng.lognormal(*SIZES, 2))
            faster = 3e3 / (1e2 + (workspace + filters) ** 0.5)
            time_ns = max(1, round(work * float(rng.lognormal(*SPREAD)) * faster))
            footprint = Footprint(workspace_bytes=workspace, filter_bytes=filters)
            region_candidates.append(candidate(region.name, f"p{n}", layout, layout, time_ns, footprint))
        candidates[region.name] = tuple(region_candidates)
    return selection_problem(graph, candidates, lambda *_: TRANSFORM_NS, memory_model)


def _modules(layers: int) -> list[tuple[int, ...]]:
    """Inputs of each layer."""
    inputs: list[tuple[int, ...]] = [()]
    while len(inputs) < layers:
        last, room = len(inputs) - 1, layers - len(inputs)
        if room < 7:
            inputs.append((last,))
            continue
        inputs += [(last,)] * 4 + [(last + 2,), (last + 3,)]
        inputs.append((last + 1, last + 4, last + 5, last + 6))
    return inputs
