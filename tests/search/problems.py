"""Small networks with candidates drawn at random, and oracles that share no code with the search."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection
from dataclasses import replace

from hypothesis import strategies as st

from pimflow.core.candidate import (
    AS_MEMORY,
    AS_PIM,
    LEFT,
    OVER_ALL,
    RESOURCES,
    Candidate,
    CostTable,
    EdgeCost,
    Port,
    Rewrite,
    Task,
)
from pimflow.core.region import ConvGeometry, Region, RegionGraph

# Whole numbers: sums are exact, and plans of the same latency are common.
durations = st.integers(1, 30).map(float)


def graph_of(inputs: list[tuple[int, ...]], adding: Collection[int] = ()) -> RegionGraph:
    """Region i reads the regions ``inputs[i]``; without any, the graph's input.

    Those in `adding` read all but the first only in their epilogue.
    """
    regions = [
        Region(
            name=f"r{i}",
            operator="conv2d",
            operators=("conv2d",),
            inputs=tuple(f"r{j}" for j in read) or ("%x",),
            input_shapes=((1, 4, 4, 8),) * max(len(read), 1),
            operands=1 if i in adding else max(len(read), 1),
            output_shape=(1, 4, 4, 8),
            geometry=ConvGeometry(n=1, h=4, w=4, c=8, oc=8),
            epilogue=("add",) if i in adding else (),
        )
        for i, read in enumerate(inputs)
    ]
    used = {j for read in inputs for j in read}
    outputs = tuple(f"r{i}" for i in range(len(inputs)) if i not in used)
    return RegionGraph(name="drawn", regions=tuple(regions), outputs=outputs)


@st.composite
def graphs(draw, max_regions: int = 6, chain: bool = False) -> RegionGraph:
    count = draw(st.integers(1, max_regions))
    if chain:
        return graph_of([(i - 1,) if i else () for i in range(count)])
    inputs = []
    for i in range(count):
        ways = st.lists(st.integers(0, i - 1), unique=True, max_size=2) if i else st.just([])
        inputs.append(tuple(draw(ways)))
    return graph_of(inputs, draw(st.sets(st.integers(0, count - 1))))


def task(draw, resource: str, after: tuple[int, ...] = (), launch_ns: float = 0.0) -> Task:
    return Task(
        label=resource,
        resource=resource,
        launch_ns=launch_ns,
        execution_ns=draw(durations),
        after=after,
        energies_pj={f"{resource}_work": draw(durations)},
    )


def candidate(draw, covers: tuple[str, ...], mode: str, number: int, may_wait: bool) -> Candidate:
    """Tasks like those of `placement.candidates.candidates`: GPU; PIM, transfer, GPU rows, an epilogue."""
    if mode == "GPU":
        found = [task(draw, "gpu")]
    else:
        found = [task(draw, "pim", launch_ns=draw(durations)), task(draw, "crossbar")]
        if mode == "SPLIT":
            found += [task(draw, "gpu")]
        if draw(st.booleans()):
            found += [task(draw, "gpu", after=tuple(range(len(found))))]
    pending = mode != "GPU" and may_wait and draw(st.booleans())
    return Candidate(
        name=f"{mode} {number} of {len(covers)}",
        covers=covers,
        gpu_share={"GPU": 1.0, "PIM": 0.0}.get(mode, 0.5),
        input=Port(accepts_pending=mode == "GPU" and draw(st.booleans())),
        output=Port(pending=("bias",) if pending else ()),
        tasks=tuple(found),
        rewrite=Rewrite(mode=mode, gpu_rows=0),
    )


def runs(graph: RegionGraph) -> list[tuple[str, ...]]:
    """Every run of two to four regions that a candidate may cover: what is inside is read inside alone."""
    found = []
    for begin, count in itertools.product(range(len(graph.regions)), (2, 3, 4)):
        names = tuple(region.name for region in graph.regions[begin : begin + count])
        read = [set(graph.consumers[name]) for name in names[:-1]]
        if len(names) == count and all(readers and readers <= set(names) for readers in read):
            found.append(names)
    return found


def in_forms(draw, graph: RegionGraph, candidates: dict[str, list[Candidate]]) -> None:
    """Add candidates of neighbours that are chosen in one form or not at all."""
    names = [region.name for region in graph.regions]
    for number, (before, after) in enumerate(itertools.pairwise(names)):
        for form in draw(st.lists(st.sampled_from("ab"), unique=True)) if draw(st.booleans()) else ():
            for name in (before, after):
                read = bool(graph.consumers[name])
                for _ in range(draw(st.integers(1, 2))):
                    made = candidate(draw, (name,), draw(st.sampled_from(["GPU", "PIM"])), 0, read)
                    candidates[name].append(
                        replace(
                            made,
                            name=f"{made.name} in form {form} of {number}, {len(candidates[name])}",
                            leaves_open=f"{form}{number}" if name == before else "",
                            goes_on_with=f"{form}{number}" if name == after else "",
                            error=draw(st.integers(0, 8)) / 8,
                        )
                    )


@st.composite
def problems(draw, max_regions: int = 5, chain: bool = False, fused: bool = True, inputs=None):
    """A graph, drawn or as `graph_of` makes it of `inputs`, with its cost table."""
    graph = graph_of(inputs) if inputs else draw(graphs(max_regions, chain))
    modes = st.lists(st.sampled_from(["PIM", "SPLIT"]), max_size=2)
    covered = [(region.name,) for region in graph.regions]
    if fused:
        covered += [run for run in runs(graph) if draw(st.booleans())]
    candidates: dict[str, list[Candidate]] = {region.name: [] for region in graph.regions}
    for covers in covered:
        may_wait = bool(graph.consumers[covers[-1]])
        for number, mode in enumerate(["GPU" if len(covers) == 1 else "SPLIT", *draw(modes)]):
            candidates[covers[0]].append(candidate(draw, covers, mode, number, may_wait))
    in_forms(draw, graph, candidates)
    edges = st.one_of(st.none(), st.just("gpu"))
    table = CostTable(
        candidates={name: tuple(found) for name, found in candidates.items()},
        refused={},
        settle={r.name: EdgeCost(task=draw(edges) and task(draw, "gpu")) for r in graph.regions},
        absorb={r.name: EdgeCost(task=draw(edges) and task(draw, "gpu")) for r in graph.regions},
    )
    return graph, table


LAYOUTS = ("NHWC", "NCHW", "NCHW16c")


@st.composite
def of_layouts(draw, resources: tuple[str, ...] = RESOURCES, **how):
    """The same where candidates take and give several layouts, hold workspaces, and run on `resources` alone.

    A transform of any layout into another takes a task of the GPU, or of the only resource.
    """
    graph, table = draw(problems(**how))
    layout, sizes = st.sampled_from(LAYOUTS), st.sampled_from((0, 100, 300, 1000))

    def on(task: Task | None) -> Task | None:
        return task and replace(task, resource=task.resource if task.resource in resources else resources[0])

    def edges(found: dict[str, EdgeCost]) -> dict[str, EdgeCost]:
        return {name: EdgeCost(task=on(edge.task)) for name, edge in found.items()}

    candidates = {
        name: tuple(
            replace(
                c,
                tasks=tuple(map(on, c.tasks)),
                input=replace(c.input, layout=draw(layout)),
                output=replace(c.output, layout=draw(layout)),
                workspace_bytes=draw(sizes),
            )
            for c in found
        )
        for name, found in table.candidates.items()
    }
    moved = {pair: draw(st.integers(0, 20)) for pair in itertools.permutations(LAYOUTS, 2)}
    transforms = {
        (tensor, *pair): EdgeCost(
            task=Task(
                label="transform", resource=resources[0], execution_ns=float(ns), energies_pj={"move": ns / 2}
            )
        )
        for tensor in ("%x", *candidates)
        for pair, ns in moved.items()
        if ns
    }
    changed = {"settle": edges(table.settle), "absorb": edges(table.absorb)}
    return graph, replace(table, candidates=candidates, transforms=transforms, **changed)


@st.composite
def of_shared_channels(draw, spread: bool = True, copied: bool = False, **how):
    """The same where PIM's channels are plain memory or PIM's, and to change that takes a task.

    Some candidates on the GPU hold them as plain memory. If tensors are `spread`, these read and give some
    over all channels, where nobody else can read them; to read what lies elsewhere may take them longer. Some
    may be `copied` back.
    """
    graph, table = draw(problems(**how))
    layout = st.sampled_from((LEFT, OVER_ALL)) if spread else st.just(LEFT)

    def at_all_channels(c: Candidate) -> Candidate:
        times = {"launch_ns": durations, "execution_ns": durations}
        tasks = tuple(
            replace(each, also=("pim",), **{name: draw(ns) for name, ns in times.items()}) for each in c.tasks
        )
        read, given = replace(c.input, layout=draw(layout)), replace(c.output, layout=draw(layout))
        behind = draw(st.sampled_from((AS_MEMORY, AS_PIM)))
        use = {"channels_as": AS_MEMORY, "leaves_channels_as": behind}
        return replace(c, name=f"{c.name} at all channels", tasks=tasks, input=read, output=given, **use)

    candidates: dict[str, tuple[Candidate, ...]] = {}
    for name, found in table.candidates.items():
        on_gpu = [c for c in found if c.rewrite.mode == "GPU"]
        pim = {"channels_as": AS_PIM, "leaves_channels_as": AS_PIM}
        others = [replace(c, **pim) for c in found if c.rewrite.mode != "GPU"]
        wide = [at_all_channels(c) for c in on_gpu for _ in range(draw(st.integers(0, 1)))]
        candidates[name] = (*on_gpu, *others, *wide)
    slower = {
        (tensor, LEFT, OVER_ALL): EdgeCost(task=replace(task(draw, "gpu"), launched=False))
        for tensor in ("%x", *candidates)
        if draw(st.booleans())
    }
    back = {
        (tensor, OVER_ALL, LEFT): EdgeCost(task=task(draw, "gpu"))
        if copied and draw(st.booleans())
        else EdgeCost(possible=False)
        for tensor in candidates
    }
    return graph, replace(
        table,
        candidates=candidates,
        transforms={**slower, **back} if spread else {},
        switch=EdgeCost(task=replace(task(draw, "pim"), readies_channels=True)),
    )


def covers(graph: RegionGraph, table: CostTable) -> list[tuple[Candidate, ...]]:
    """Every way to do each region once, and what is begun in one form in that form."""
    names = [region.name for region in graph.regions]

    def rest(begin: int) -> list[tuple[Candidate, ...]]:
        if begin == len(names):
            return [()]
        return [
            (first, *others)
            for first in table.candidates[names[begin]]
            for others in rest(begin + len(first.covers))
        ]

    def open_at(cover: tuple[Candidate, ...]) -> tuple[list[str], list[str]]:
        return ["", *(c.leaves_open for c in cover)], [*(c.goes_on_with for c in cover), ""]

    return [cover for cover in rest(0) if operator.eq(*open_at(cover))]


def longest_path_ns(graph: RegionGraph, table: CostTable, chosen: tuple[Candidate, ...]) -> float:
    """End of a plan: the longest path through its tasks, found by relaxing edges until nothing moves."""
    durations_ns: list[float] = []
    edges: list[tuple[int, ...]] = []
    last_of: dict[str, int] = {}  # by result the task of no duration at its end
    on_resource: dict[str, int] = {}
    waiting: set[str] = set()
    stayed = ""
    plain_memory = False  # PIM's channels, which begin as PIM's

    def add(duration_ns: float, resource: str, waits: list[int], also: Collection[str] = (), launch_ns=0.0):
        number = len(durations_ns)
        durations_ns.append(duration_ns)
        edges.extend((each, number) for each in waits)
        # Resources that are held only after the launch may become free later by its time.
        for each, early_ns in ((resource, 0.0), *((other, launch_ns) for other in also)):
            if each in on_resource:
                edges.append((on_resource[each], number, early_ns))
            on_resource[each] = number
        on_resource.pop("", None)
        return number

    for each in chosen:
        names = [n for covered in each.covers for n in graph.region(covered).inputs]
        outside = [n for n in names if n not in each.covers]
        region = graph.region(each.covers[0])
        after_all: list[str] = []  # tensors that a deferred epilogue adds
        if len(each.covers) == 1 and each.output.pending and region.epilogue:
            after_all = [n for n in outside[1:] if n != outside[0]]
            after_all = [] if waiting & set(after_all) else after_all
        begin = add(0.0, "", [last_of[n] for n in outside if n in last_of and n not in after_all])
        for name in sorted(waiting & set(outside)):
            edge = table.absorb[name] if each.input.accepts_pending else table.settle[name]
            waiting.discard(name)
            if edge.task:
                begin = add(edge.task.launch_ns + edge.task.execution_ns, edge.task.resource, [begin])
        free = stayed and graph.region(each.covers[0]).inputs[0] == stayed and each.rewrite.mode == "PIM"
        if each.channels_as and plain_memory != (each.channels_as == AS_MEMORY):
            before = on_resource.get("pim", begin)
            readied = add(table.switch.task.execution_ns, "pim", [begin])
        else:
            readied = None
        plain_memory = each.leaves_channels_as == AS_MEMORY if each.channels_as else plain_memory
        own: list[int] = []
        for t in each.tasks:
            launch_ns = 0.0 if free and t.resource == "pim" else t.launch_ns
            waits = [own[i] for i in t.after] or [begin]
            if readied is not None and launch_ns and t.resource == "pim":
                if not t.after:  # the launch is on its way while the channels change
                    edges.append((readied, len(durations_ns), launch_ns))
                    on_resource["pim"] = before
                readied = None
            own.append(add(launch_ns + t.execution_ns, t.resource, waits, t.also, launch_ns))
        last_of[each.covers[-1]] = add(0.0, "", [begin, *own, *(last_of[n] for n in after_all)])
        waiting |= {each.covers[-1]} if each.output.pending else set()
        quiet = not each.output.pending and all(t.resource != "gpu" for t in each.tasks)
        stayed = each.covers[-1] if quiet else ""

    starts = [0.0] * len(durations_ns)
    moved = True
    while moved:
        moved = False
        for before, after, *early_ns in edges:
            ready_ns = starts[before] + durations_ns[before] - sum(early_ns)
            if ready_ns > starts[after]:
                starts[after], moved = ready_ns, True
    return max(start + duration for start, duration in zip(starts, durations_ns))


@st.composite
def of_launches_ahead(draw, problem):
    """The same where launches take some time, also on the GPU, and are issued ahead."""
    graph, table = draw(problem)

    def launched(task: Task | None) -> Task | None:
        return task and replace(task, launch_ns=draw(durations)) if task and task.resource == "gpu" else task

    def edges(found: dict[str, EdgeCost]) -> dict[str, EdgeCost]:
        return {name: EdgeCost(task=launched(edge.task)) for name, edge in found.items()}

    candidates = {
        name: tuple(replace(c, tasks=tuple(map(launched, c.tasks))) for c in found)
        for name, found in table.candidates.items()
    }
    changed = {"settle": edges(table.settle), "absorb": edges(table.absorb)}
    return graph, replace(table, candidates=candidates, launched_ahead=True, **changed)
