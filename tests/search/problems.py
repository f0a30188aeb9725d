"""Small networks with candidates drawn at random, and oracles that share no code with the search."""

import itertools
import operator
from collections.abc import Collection
from dataclasses import replace

from hypothesis import strategies as st

from pimflow.core.candidate import (
    RESOURCES,
    Candidate,
    CostTable,
    EdgeCost,
    Footprint,
    LayerAlternative,
    Task,
)
from pimflow.core.kernel import ConvGeometry
from pimflow.core.region import Epilogue, Region
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import OPERATOR_KERNELS, PimRewrite, SplitRewrite
from pimflow.core.tensor_placement import (
    IN_ALL_CHANNELS,
    IN_GPU_CHANNELS,
    ChannelMode,
    Layout,
    TensorPlacement,
)
from pimflow.hardware import system
from pimflow.placement.solvers.label_search import ERROR, LATENCY, Criterion

# Constant power of a milliwatt: a picojoule a nanosecond, beside which the drawn energies matter.
BASE = system()
QUIET = replace(
    BASE,
    gpu=replace(BASE.gpu, energy=BASE.gpu.energy | {"static_w": 0.001}),
    pim=replace(BASE.pim, energy=BASE.pim.energy | {"background_mw_per_channel": 0.0}),
)
# Whole numbers: sums are exact, and plans of the same latency are common.
durations = st.integers(1, 30).map(float)
criteria = st.sampled_from(
    [
        LATENCY,
        Criterion(per_pj=1.0),
        Criterion(per_ns=3.0, per_pj=2.0),
        ERROR,
        Criterion(per_ns=1.0, per_error=9.0),
    ]
)


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
            epilogue=Epilogue(operators=("add",) if i in adding else ()),
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
        inputs_of = st.lists(st.integers(0, i - 1), unique=True, max_size=2) if i else st.just([])
        inputs.append(tuple(draw(inputs_of)))
    return graph_of(inputs, draw(st.sets(st.integers(0, count - 1))))


def task(draw, resource: str, after: tuple[int, ...] = (), launch_ns: float = 0.0) -> Task:
    charges = {"execution_ns": draw(durations), "energies_pj": {f"{resource}_work": draw(durations)}}
    return Task(label=resource, resource=resource, launch_ns=launch_ns, after=after, **charges)


REWRITES = {"GPU": OPERATOR_KERNELS, "PIM": PimRewrite(), "SPLIT": SplitRewrite(gpu_share=0.5)}


def candidate(draw, covers: tuple[str, ...], mode: str, number: int, may_wait: bool) -> Candidate:
    """Tasks like those of `placement.candidates.candidates`: GPU; PIM, transfer, GPU rows, an epilogue."""
    if mode == "GPU":
        tasks = [task(draw, "gpu")]
    else:
        tasks = [task(draw, "pim", launch_ns=draw(durations)), task(draw, "crossbar")]
        if mode == "SPLIT":
            tasks += [task(draw, "gpu")]
        if draw(st.booleans()):
            tasks += [task(draw, "gpu", after=tuple(range(len(tasks))))]
    deferred = mode != "GPU" and may_wait and draw(st.booleans())
    return Candidate(
        name=f"{mode} {number} of {len(covers)}",
        covers=covers,
        rewrite=REWRITES[mode],
        tasks=tuple(tasks),
        fuses_epilogue=mode == "GPU" and draw(st.booleans()),
        deferred_epilogue=("bias",) if deferred else (),
    )


def runs(graph: RegionGraph) -> list[tuple[str, ...]]:
    """Every run of two to four regions that a candidate may cover: what is inside is read inside alone."""
    all_runs = []
    for begin, count in itertools.product(range(len(graph.regions)), (2, 3, 4)):
        names = tuple(region.name for region in graph.regions[begin : begin + count])
        read = [set(graph.consumers[name]) for name in names[:-1]]
        if len(names) == count and all(readers and readers <= set(names) for readers in read):
            all_runs.append(names)
    return all_runs


def add_alternatives(draw, graph: RegionGraph, candidates: dict[str, list[Candidate]]) -> None:
    """Add candidates of neighbours that are chosen in one form or not at all."""
    names = [region.name for region in graph.regions]
    for number, (before, after) in enumerate(itertools.pairwise(names)):
        for alternative in draw(st.lists(st.sampled_from("ab"), unique=True)) if draw(st.booleans()) else ():
            for name in (before, after):
                read = bool(graph.consumers[name])
                for _ in range(draw(st.integers(1, 2))):
                    option = candidate(draw, (name,), draw(st.sampled_from(["GPU", "PIM"])), 0, read)
                    candidates[name].append(
                        replace(
                            option,
                            name=f"{option.name} in form {alternative} of {number}, {len(candidates[name])}",
                            leaves_open=f"{alternative}{number}" if name == before else "",
                            requires_open=f"{alternative}{number}" if name == after else "",
                            alternative=LayerAlternative(error=draw(st.integers(0, 8)) / 8),
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
    add_alternatives(draw, graph, candidates)
    edges = st.one_of(st.none(), st.just("gpu"))
    table = CostTable(
        candidates={name: tuple(options) for name, options in candidates.items()},
        epilogue_cost={r.name: EdgeCost(task=draw(edges) and task(draw, "gpu")) for r in graph.regions},
        fused_epilogue_cost={r.name: EdgeCost(task=draw(edges) and task(draw, "gpu")) for r in graph.regions},
    )
    return graph, table


LAYOUTS = (Layout.NHWC, Layout.CHW, Layout.CHWC16)


@st.composite
def layout_problems(draw, resources: tuple[str, ...] = RESOURCES, **parameters):
    """The same where candidates take and give several layouts, hold workspaces, and run on `resources` alone.

    A transform of any layout into another takes a task of the GPU, or of the only resource.
    """
    graph, table = draw(problems(**parameters))
    layout, sizes = st.sampled_from(LAYOUTS), st.sampled_from((0, 100, 300, 1000))

    def remap(task: Task | None) -> Task | None:
        return task and replace(task, resource=task.resource if task.resource in resources else resources[0])

    def edges(entries: dict[str, EdgeCost]) -> dict[str, EdgeCost]:
        return {name: EdgeCost(task=remap(edge.task)) for name, edge in entries.items()}

    candidates = {
        name: tuple(
            replace(
                c,
                tasks=tuple(map(remap, c.tasks)),
                input=TensorPlacement(layout=draw(layout)),
                output=TensorPlacement(layout=draw(layout)),
                footprint=Footprint(workspace_bytes=draw(sizes)),
            )
            for c in entries
        )
        for name, entries in table.candidates.items()
    }
    moved = {pair: draw(st.integers(0, 20)) for pair in itertools.permutations(LAYOUTS, 2)}
    transforms = {
        (tensor, *(TensorPlacement(layout=layout) for layout in pair)): EdgeCost(
            task=Task(
                label="transform", resource=resources[0], execution_ns=float(ns), energies_pj={"move": ns / 2}
            )
        )
        for tensor in ("%x", *candidates)
        for pair, ns in moved.items()
        if ns
    }
    changed = {"epilogue_cost": edges(table.epilogue_cost)}
    changed |= {"fused_epilogue_cost": edges(table.fused_epilogue_cost)}
    return graph, replace(table, candidates=candidates, transforms=transforms, **changed)


@st.composite
def shared_channel_problems(draw, spread: bool = True, copied: bool = False, **parameters):
    """The same where PIM's channels are plain memory or PIM's, and to change that takes a task.

    Some candidates on the GPU hold them as plain memory. If tensors are `spread`, these read and give some
    over all channels, where nobody else can read them; to read what lies elsewhere may take them longer. Some
    may be `copied` back.
    """
    graph, table = draw(problems(**parameters))
    layout = st.sampled_from((IN_GPU_CHANNELS, IN_ALL_CHANNELS)) if spread else st.just(IN_GPU_CHANNELS)

    def widen(c: Candidate) -> Candidate:
        times = {"launch_ns": durations, "execution_ns": durations}
        tasks = tuple(
            replace(member, also=("pim",), **{name: draw(ns) for name, ns in times.items()})
            for member in c.tasks
        )
        read, written = draw(layout), draw(layout)
        next_use = draw(st.sampled_from((ChannelMode.PLAIN_MEMORY, ChannelMode.PIM)))
        use = {"channel_mode": ChannelMode.PLAIN_MEMORY, "final_channel_mode": next_use}
        return replace(c, name=f"{c.name} at all channels", tasks=tasks, input=read, output=written, **use)

    candidates: dict[str, tuple[Candidate, ...]] = {}
    for name, options in table.candidates.items():
        on_gpu = [c for c in options if not c.uses_pim]
        pim = {"channel_mode": ChannelMode.PIM, "final_channel_mode": ChannelMode.PIM}
        others = [replace(c, **pim) for c in options if c.uses_pim]
        wide = [widen(c) for c in on_gpu for _ in range(draw(st.integers(0, 1)))]
        candidates[name] = (*on_gpu, *others, *wide)
    slower = {
        (tensor, IN_GPU_CHANNELS, IN_ALL_CHANNELS): EdgeCost(task=replace(task(draw, "gpu"), launched=False))
        for tensor in ("%x", *candidates)
        if draw(st.booleans())
    }
    back = {
        (tensor, IN_ALL_CHANNELS, IN_GPU_CHANNELS): EdgeCost(task=task(draw, "gpu"))
        if copied and draw(st.booleans())
        else EdgeCost(possible=False)
        for tensor in candidates
    }
    transforms = {**slower, **back} if spread else {}
    switch = EdgeCost(task=replace(task(draw, "pim"), readies_channels=True))
    return graph, replace(table, candidates=candidates, transforms=transforms, switch=switch)


@st.composite
def view_problems(draw, problem):
    """The same where some regions show what another stores, and lie where that does."""
    graph, table = draw(problem)
    drawn = draw(st.sets(st.sampled_from([region.name for region in graph.regions])))
    read = {r.name: r.inputs[0] for r in graph.regions if r.name in drawn and len(r.inputs) == 1}
    read = {name: source for name, source in read.items() if source in graph.readers}
    regions = tuple(replace(region, is_view=region.name in read) for region in graph.regions)
    candidates, transforms = dict(table.candidates), dict(table.transforms)
    for name, source in read.items():
        places = (IN_GPU_CHANNELS, IN_ALL_CHANNELS) if transforms else (IN_GPU_CHANNELS,)
        views = [
            Candidate(
                name=f"VIEW {place.channels}",
                covers=(name,),
                rewrite=OPERATOR_KERNELS,
                tasks=(),
                input=replace(place, reader=name),
                output=place,
                fuses_epilogue=False,
            )
            for place in places
        ]
        candidates[name] = (*views, *(c for c in candidates[name] if len(c.covers) > 1))
        if transforms:
            for place, view in zip(reversed(places), views):
                transforms[source, place, view.input] = EdgeCost(possible=False)
    return replace(graph, regions=regions), replace(table, candidates=candidates, transforms=transforms)


def covers(graph: RegionGraph, table: CostTable) -> list[tuple[Candidate, ...]]:
    """Every way to do each region once, and what is begun in one form in that form."""
    names = [region.name for region in graph.regions]

    def rest(begin: int) -> list[tuple[Candidate, ...]]:
        if begin == len(names):
            return [()]
        return [(c, *more) for c in table.candidates[names[begin]] for more in rest(begin + len(c.covers))]

    def open_at(cover: tuple[Candidate, ...]) -> tuple[list[str], list[str]]:
        return ["", *(c.leaves_open for c in cover)], [*(c.requires_open for c in cover), ""]

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
        edges.extend((item, number) for item in waits)
        # Resources that are held only after the launch may become free later by its time.
        for item, early_ns in ((resource, 0.0), *((resource_name, launch_ns) for resource_name in also)):
            if item in on_resource:
                edges.append((on_resource[item], number, early_ns))
            on_resource[item] = number
        on_resource.pop("", None)
        return number

    for choice in chosen:
        names = [n for covered in choice.covers for n in graph.region(covered).inputs]
        outside = [n for n in names if n not in choice.covers]
        region = graph.region(choice.covers[0])
        after_all: list[str] = []  # tensors that a deferred epilogue adds
        if len(choice.covers) == 1 and choice.deferred_epilogue and region.epilogue.operators:
            after_all = [n for n in outside[1:] if n != outside[0]]
            after_all = [] if waiting & set(after_all) else after_all
        begin = add(0.0, "", [last_of[n] for n in outside if n in last_of and n not in after_all])
        for name in sorted(waiting & set(outside)):
            edge = table.fused_epilogue_cost[name] if choice.fuses_epilogue else table.epilogue_cost[name]
            waiting.discard(name)
            if edge.task:
                begin = add(edge.task.launch_ns + edge.task.execution_ns, edge.task.resource, [begin])
        free = stayed and graph.region(choice.covers[0]).inputs[0] == stayed and choice.rewrite.mode == "PIM"
        if choice.channel_mode and plain_memory != (choice.channel_mode == ChannelMode.PLAIN_MEMORY):
            before = on_resource.get("pim", begin)
            readied = add(table.switch.task.execution_ns, "pim", [begin])
        else:
            readied = None
        plain_memory = (
            choice.final_channel_mode == ChannelMode.PLAIN_MEMORY if choice.channel_mode else plain_memory
        )
        task_numbers: list[int] = []
        for t in choice.tasks:
            launch_ns = 0.0 if free and t.resource == "pim" else t.launch_ns
            waits = [task_numbers[i] for i in t.after] or [begin]
            if readied is not None and launch_ns and t.resource == "pim":
                if not t.after:  # the launch is on its way while the channels change
                    edges.append((readied, len(durations_ns), launch_ns))
                    on_resource["pim"] = before
                readied = None
            task_numbers.append(add(launch_ns + t.execution_ns, t.resource, waits, t.also, launch_ns))
        last_of[choice.covers[-1]] = add(0.0, "", [begin, *task_numbers, *(last_of[n] for n in after_all)])
        waiting |= {choice.covers[-1]} if choice.deferred_epilogue else set()
        quiet = not choice.deferred_epilogue and all(t.resource != "gpu" for t in choice.tasks)
        stayed = choice.covers[-1] if quiet else ""

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
def launch_ahead_problems(draw, problem):
    """The same where launches take some time, also on the GPU, and are issued ahead."""
    graph, table = draw(problem)

    def with_launch(task: Task | None) -> Task | None:
        return task and replace(task, launch_ns=draw(durations)) if task and task.resource == "gpu" else task

    def edges(entries: dict[str, EdgeCost]) -> dict[str, EdgeCost]:
        return {name: EdgeCost(task=with_launch(edge.task)) for name, edge in entries.items()}

    candidates = {
        name: tuple(replace(c, tasks=tuple(map(with_launch, c.tasks))) for c in entries)
        for name, entries in table.candidates.items()
    }
    changed = {"epilogue_cost": edges(table.epilogue_cost)}
    changed |= {"fused_epilogue_cost": edges(table.fused_epilogue_cost)}
    return graph, replace(table, candidates=candidates, overlaps_launches=True, **changed)
