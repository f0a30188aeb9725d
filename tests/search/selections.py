"""Selection problems drawn at random, and oracles that share no code with the integer program."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st
from scipy import optimize, sparse

from pimflow.core.candidate import Candidate, CostTable, EdgeCost, Port, Rewrite, Task
from pimflow.core.region import ConvGeometry, Region, RegionGraph
from pimflow.placement.selection import Problem

LAYOUTS = ("HWC", "CHW", "CHWc16")


def candidate(region: str, name: str, taken: str, given: str, time_ns: float, workspace=0, filters=0):
    return Candidate(
        name=name,
        covers=(region,),
        gpu_share=None,
        input=Port(layout=taken, dtype="fp32", device="cpu"),
        output=Port(layout=given, dtype="fp32", device="cpu"),
        tasks=(Task(label=name, resource="cpu", execution_ns=time_ns),),
        rewrite=Rewrite(mode="CPU", gpu_rows=0, primitive=name),
        workspace_bytes=workspace,
        filter_bytes=filters,
    )


def network(inputs: list[tuple[int, ...]], channels: list[int], side: int = 4) -> RegionGraph:
    """Region i reads the regions ``inputs[i]``; without any, the graph's input."""
    shapes = [(1, side, side, c) for c in channels]
    regions = tuple(
        Region(
            name=f"r{i}",
            operator="conv2d",
            operators=("conv2d",),
            inputs=tuple(f"r{j}" for j in read) or ("%x",),
            input_shapes=tuple(shapes[j] for j in read) or ((1, side, side, 16),),
            output_shape=shapes[i],
            geometry=ConvGeometry(n=1, h=side, w=side, c=shapes[read[0]][-1] if read else 16, oc=channels[i]),
            weight_elements=(shapes[read[0]][-1] if read else 16) * channels[i],
        )
        for i, read in enumerate(inputs)
    )
    used = {j for read in inputs for j in read}
    outputs = tuple(f"r{i}" for i in range(len(inputs)) if i not in used)
    return RegionGraph(name="drawn", regions=regions, outputs=outputs)


def problem_of(graph: RegionGraph, candidates, price, memory_model: str) -> Problem:
    """`price` is the time of a transform, by tensor and layouts; zero: none is needed."""
    transforms = {}
    for tensor in ("%x", *candidates):
        for given, taken in itertools.permutations(LAYOUTS, 2):
            time_ns = price(tensor, given, taken)
            if time_ns:
                task = Task(label="transform", resource="cpu", execution_ns=time_ns)
                transforms[tensor, given, taken] = EdgeCost(task=task)
    table = CostTable(
        candidates=candidates,
        costs={},
        refused={},
        settle={},
        absorb={},
        transforms=transforms,
        inputs={"%x": Port(layout="HWC", dtype="fp32", device="cpu")},
    )
    return Problem(graph=graph, table=table, memory_model=memory_model)


@st.composite
def problems(draw, memory_model: str, most: int = 5) -> Problem:
    """Branches and joins; whole times, so that sums are exact and ties common."""
    count = draw(st.integers(1, most))
    inputs = []
    for i in range(count):
        ways = st.lists(st.integers(0, i - 1), unique=True, max_size=2) if i else st.just([])
        inputs.append(tuple(draw(ways)))
    graph = network(inputs, draw(st.lists(st.sampled_from([16, 32, 64]), min_size=count, max_size=count)))
    sizes = st.integers(0, 40).map(lambda n: 100 * n)
    candidates = {}
    for region in graph.regions:
        made = draw(
            st.lists(
                st.tuples(*(st.sampled_from(LAYOUTS),) * 2, st.integers(1, 30).map(float), sizes, sizes),
                min_size=1,
                max_size=4,
            )
        )
        candidates[region.name] = tuple(candidate(region.name, f"p{n}", *of) for n, of in enumerate(made))
    prices = draw(st.lists(st.integers(0, 9), min_size=6, max_size=6))
    price = dict(zip(itertools.permutations(LAYOUTS, 2), prices))
    return problem_of(graph, candidates, lambda _, a, b: float(price[a, b]), memory_model)


def choices(problem: Problem) -> Iterator[dict[str, Candidate]]:
    """Every one."""
    names = [region.name for region in problem.graph.regions]
    for found in itertools.product(*(problem.table.candidates[name] for name in names)):
        yield dict(zip(names, found))


def added_up(problem: Problem, choice: dict[str, Candidate]) -> tuple[float, int, int]:
    """Time, memory and workspace, from the definitions: what is live is looked up reader by reader."""
    graph, table = problem.graph, problem.table

    def up(size: int) -> int:
        return (size + 63) // 64 * 64

    order = [region.name for region in graph.regions]
    size = {"%x": up(4 * int(np.prod((1, 4, 4, 16))))}
    size |= {region.name: up(4 * int(np.prod(region.output_shape))) for region in graph.regions}
    reads = {region.name: list(dict.fromkeys(region.inputs)) for region in graph.regions}
    steps = [(name, reads[name]) for name in order] + [(None, [name]) for name in graph.outputs]
    time_ns = sum(choice[name].tasks[0].execution_ns for name in order)
    peak = 0
    for number, (name, operands) in enumerate(steps):
        later = {tensor for _, others in steps[number + 1 :] for tensor in others} | set(graph.outputs)
        there = {tensor for tensor in ("%x", *order[:number]) if tensor in later or tensor in operands}
        if not any("%x" in others for _, others in steps[number:]):
            there.discard("%x")
        made = set()
        for tensor in operands:
            given = choice[tensor].output.layout if tensor in choice else "HWC"
            taken = choice[name].input.layout if name else "HWC"
            edge = table.transforms.get((tensor, given, taken))
            if edge:
                time_ns += edge.task.execution_ns
                made.add(f"{tensor} copied")
                size[f"{tensor} copied"] = size[tensor]
                peak = max(peak, sum(size[t] for t in there | made))
                if tensor not in later:
                    there.discard(tensor)
        own = size[name] + up(choice[name].workspace_bytes) if name else 0
        peak = max(peak, sum(size[t] for t in there | made) + own)
    filters = sum(up(choice[name].filter_bytes) for name in order)
    footprints = [
        sum(size[t] for t in (*reads[name], name))
        + up(choice[name].filter_bytes)
        + up(choice[name].workspace_bytes)
        for name in order
    ]
    memory = sum(footprints) if problem.memory_model == "sum" else peak + filters
    return time_ns, memory, max(footprints)


def product_form(problem: Problem, memory_bytes: float) -> float | None:
    """Least time in the paper's own form, made linear: z >= x_i + x_j - 1 for pairs; memory is the sum."""
    names = [region.name for region in problem.graph.regions]
    x = {(name, c.name): n for n, (name, c) in enumerate(
        (name, c) for name in names for c in problem.table.candidates[name])}  # fmt: skip
    costs, rows = [0.0] * len(x), []
    footprint = {}
    for name in names:
        for c in problem.table.candidates[name]:
            region = problem.graph.region(name)
            tensors = [problem.tensor_bytes[t] for t in dict.fromkeys(region.inputs)] + [
                problem.tensor_bytes[name]
            ]
            footprint[name, c.name] = (
                sum(tensors) + (c.filter_bytes + 63) // 64 * 64 + (c.workspace_bytes + 63) // 64 * 64
            )
            costs[x[name, c.name]] += c.tasks[0].execution_ns
        rows.append(({x[name, c.name]: 1.0 for c in problem.table.candidates[name]}, 1.0, 1.0))
    for region in problem.graph.regions:
        for tensor in dict.fromkeys(region.inputs):
            for c in problem.table.candidates[region.name]:
                for p in problem.table.candidates.get(tensor, (None,)):
                    given = p.output.layout if p else "HWC"
                    edge = problem.table.transforms.get((tensor, given, c.input.layout))
                    if edge is None:
                        continue
                    if p is None:
                        costs[x[region.name, c.name]] += edge.task.execution_ns
                        continue
                    costs.append(edge.task.execution_ns)
                    z = len(costs) - 1
                    rows.append(
                        ({z: 1.0, x[tensor, p.name]: -1.0, x[region.name, c.name]: -1.0}, -1.0, np.inf)
                    )
    for name in problem.graph.outputs:
        for c in problem.table.candidates[name]:
            edge = problem.table.transforms.get((name, c.output.layout, "HWC"))
            costs[x[name, c.name]] += edge.task.execution_ns if edge else 0.0
    rows.append(({x[key]: size / 1024 for key, size in footprint.items()}, 0.0, memory_bytes / 1024))
    matrix = sparse.lil_matrix((len(rows), len(costs)))
    for n, (row, _, _) in enumerate(rows):
        for column, factor in row.items():
            matrix[n, column] = factor
    found = optimize.milp(
        costs,
        integrality=[n < len(x) for n in range(len(costs))],
        bounds=optimize.Bounds(0, 1),
        constraints=optimize.LinearConstraint(matrix.tocsr(), [r[1] for r in rows], [r[2] for r in rows]),
    )
    return None if found.x is None else float(found.fun)


def inceptions(layers: int, primitives: int, memory_model: str, seed: int = 0) -> Problem:
    """As many layers as a network of the paper's Table 1 has, in modules of four branches and a join.

    Times fall with the memory that a primitive takes, with noise, over two orders of magnitude.
    """
    rng = np.random.default_rng(seed)
    inputs: list[tuple[int, ...]] = [()]
    while len(inputs) < layers:
        last, room = len(inputs) - 1, layers - len(inputs)
        if room < 7:
            inputs.append((last,))
            continue
        inputs += [(last,)] * 4 + [(last + 2,), (last + 3,)]
        inputs.append((last + 1, last + 4, last + 5, last + 6))
    graph = network(inputs, [int(c) for c in rng.choice([64, 128, 256], layers)], side=28)
    candidates = {}
    for region in graph.regions:
        work = float(rng.lognormal(13, 1))
        made = []
        for n in range(primitives):
            layout = LAYOUTS[n % 3]
            workspace, filters = (int(size) for size in rng.lognormal(11, 2, 2))
            time_ns = round(work * float(rng.lognormal(0, 0.5)) * 3e3 / (1e2 + (workspace + filters) ** 0.5))
            made.append(candidate(region.name, f"p{n}", layout, layout, max(1, time_ns), workspace, filters))
        candidates[region.name] = tuple(made)
    return problem_of(graph, candidates, lambda *_: 40e3, memory_model)
