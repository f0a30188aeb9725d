"""Selection problems drawn at random, and oracles that share no code with the integer program."""

import itertools
from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st
from papers.taso_instances import candidate, network, selection_problem
from scipy import optimize, sparse

from pimflow.core.candidate import Candidate, Footprint
from pimflow.core.tensor_placement import Layout, TensorPlacement
from pimflow.primitive_selection.problem import SelectionProblem
from pimflow.primitives.layer import LAYOUTS

HWC = TensorPlacement(layout=Layout.HWC)


@st.composite
def problems(draw, memory_model: str, most: int = 5) -> SelectionProblem:
    """Branches and joins; whole times, so that sums are exact and ties common."""
    count = draw(st.integers(1, most))
    inputs = []
    for i in range(count):
        operands = st.lists(st.integers(0, i - 1), unique=True, max_size=2) if i else st.just([])
        inputs.append(tuple(draw(operands)))
    graph = network(inputs, draw(st.lists(st.sampled_from([16, 32, 64]), min_size=count, max_size=count)))
    sizes = st.integers(0, 40).map(lambda n: 100 * n)
    footprints = st.builds(Footprint, workspace_bytes=sizes, filter_bytes=sizes)
    candidates = {}
    for region in graph.regions:
        layouts = st.sampled_from(LAYOUTS)
        options = st.tuples(layouts, layouts, st.integers(1, 30).map(float), footprints)
        drawn_fields = draw(st.lists(options, min_size=1, max_size=4))
        candidates[region.name] = tuple(
            candidate(region.name, f"p{n}", *fields) for n, fields in enumerate(drawn_fields)
        )
    prices = draw(st.lists(st.integers(0, 9), min_size=6, max_size=6))
    price = dict(zip(itertools.permutations(LAYOUTS, 2), prices))
    return selection_problem(graph, candidates, lambda _, a, b: float(price[a, b]), memory_model)


def choices(problem: SelectionProblem) -> Iterator[dict[str, Candidate]]:
    """Every one."""
    names = [region.name for region in problem.graph.regions]
    for combination in itertools.product(*(problem.table.candidates[name] for name in names)):
        yield dict(zip(names, combination))


def choice_costs(problem: SelectionProblem, choice: dict[str, Candidate]) -> tuple[float, int, int]:
    """Time, memory and workspace, from the definitions: what is live is looked up reader by reader."""
    graph, table = problem.graph, problem.table

    def align_up(size: int) -> int:
        return (size + 63) // 64 * 64

    order = [region.name for region in graph.regions]
    size = {"%x": align_up(4 * int(np.prod((1, 4, 4, 16))))}
    size |= {region.name: align_up(4 * int(np.prod(region.output_shape))) for region in graph.regions}
    reads = {region.name: list(dict.fromkeys(region.inputs)) for region in graph.regions}
    steps = [(name, reads[name]) for name in order] + [(None, [name]) for name in graph.outputs]
    time_ns = sum(choice[name].tasks[0].execution_ns for name in order)
    peak = 0
    for number, (name, operands) in enumerate(steps):
        later = {tensor for _, others in steps[number + 1 :] for tensor in others} | set(graph.outputs)
        live = {tensor for tensor in ("%x", *order[:number]) if tensor in later or tensor in operands}
        if not any("%x" in others for _, others in steps[number:]):
            live.discard("%x")
        transformed = set()
        for tensor in operands:
            written = choice[tensor].output if tensor in choice else HWC
            read = choice[name].input if name else HWC
            edge = table.transforms.get((tensor, written, read))
            if edge:
                time_ns += edge.task.execution_ns
                transformed.add(f"{tensor} copied")
                size[f"{tensor} copied"] = size[tensor]
                peak = max(peak, sum(size[t] for t in live | transformed))
                if tensor not in later:
                    live.discard(tensor)
        output_bytes = size[name] + align_up(choice[name].footprint.workspace_bytes) if name else 0
        peak = max(peak, sum(size[t] for t in live | transformed) + output_bytes)
    filters = sum(align_up(choice[name].footprint.filter_bytes) for name in order)
    footprints = [
        sum(size[t] for t in (*reads[name], name))
        + align_up(choice[name].footprint.filter_bytes)
        + align_up(choice[name].footprint.workspace_bytes)
        for name in order
    ]
    memory = sum(footprints) if problem.memory_model == "sum" else peak + filters
    return time_ns, memory, max(footprints)


def min_time_ns(problem: SelectionProblem, memory_bytes: float) -> float | None:
    """Least time in the paper's own form, made linear: z >= x_i + x_j - 1 for pairs; memory is the sum."""
    names = [region.name for region in problem.graph.regions]
    x = {(name, c.name): n for n, (name, c) in enumerate(
        (name, c) for name in names for c in problem.table.candidates[name])}  # fmt: skip
    costs, rows = [0.0] * len(x), []
    footprint = {}
    for name in names:
        chosen = any(c.primitive for c in problem.table.candidates[name])
        for c in problem.table.candidates[name]:
            region = problem.graph.region(name)
            tensors = [problem.tensor_bytes[t] for t in (*dict.fromkeys(region.inputs), name)]
            sizes = c.footprint.filter_bytes, c.footprint.workspace_bytes
            buffer_bytes = sum((size + 63) // 64 * 64 for size in sizes)
            footprint[name, c.name] = sum(tensors) + buffer_bytes if chosen else 0
            costs[x[name, c.name]] += sum(task.execution_ns for task in c.tasks)
        rows.append(({x[name, c.name]: 1.0 for c in problem.table.candidates[name]}, 1.0, 1.0))
    for region in problem.graph.regions:
        for tensor in dict.fromkeys(region.inputs):
            for c in problem.table.candidates[region.name]:
                for p in problem.table.candidates.get(tensor, (None,)):
                    written = p.output if p else problem.table.inputs[tensor]
                    edge = problem.table.transforms.get((tensor, written, c.input))
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
            edge = problem.table.transforms.get((name, c.output, HWC))
            costs[x[name, c.name]] += edge.task.execution_ns if edge else 0.0
    rows.append(({x[key]: size / 1024 for key, size in footprint.items()}, 0.0, memory_bytes / 1024))
    matrix = sparse.lil_matrix((len(rows), len(costs)))
    for n, (row, _, _) in enumerate(rows):
        for column, factor in row.items():
            matrix[n, column] = factor
    solution = optimize.milp(
        costs,
        integrality=[n < len(x) for n in range(len(costs))],
        bounds=optimize.Bounds(0, 1),
        constraints=optimize.LinearConstraint(matrix.tocsr(), [r[1] for r in rows], [r[2] for r in rows]),
    )
    return None if solution.x is None else float(solution.fun)
