"""Random programs, and what orders of their steps are worth by definition; nothing of the planner's."""

import itertools

from hypothesis import strategies as st

from pimflow.memory.reorder import StepGraph


@st.composite
def programs(draw, most=8, in_place=True):
    """Up to `most` steps; now and then one that works in place, in a buffer of its own name or an alias's."""
    inputs = [f"in{i}" for i in range(draw(st.integers(0, 2)))]
    buffers, steps, aliases = list(inputs), [], {}
    for index in range(draw(st.integers(1, most))):
        reads = draw(st.lists(st.sampled_from(buffers), max_size=3, unique=True)) if buffers else []
        writes = [f"b{index}"] + [f"work{index}"] * (draw(st.integers(0, 4)) == 0)
        kind = draw(st.integers(0, 5)) if in_place and buffers else 5
        if kind == 0:
            writes.append(draw(st.sampled_from(buffers)))
        elif kind <= 2:
            target = draw(st.sampled_from(buffers))
            aliases[f"b{index}"] = aliases.setdefault(target, f"class {target}")
        buffers.append(f"b{index}")
        steps.append((reads, writes))
    names = {*inputs, *(name for _, writes in steps for name in writes)}
    return StepGraph(
        steps=steps,
        size_bytes={name: draw(st.sampled_from([0, 1, 1, 2, 3, 5, 9, 20])) for name in sorted(names)},
        inputs=tuple(inputs),
        outputs=tuple(draw(st.lists(st.sampled_from(buffers), unique=True, max_size=2))),
        aliases=aliases,
    )


def touching(graph: StepGraph, name: str) -> list[int]:
    return [i for i, (reads, writes) in enumerate(graph.steps) if name in reads or name in writes]


def peak_bytes(graph: StepGraph, order) -> int:
    """Bytes that a step holds because it, or one before it, touched them, and it, or one after it, will."""
    storages: dict[str, list[str]] = {}
    for name in graph.size_bytes:
        if not touching(graph, name) and name not in graph.outputs:
            continue
        storages.setdefault(graph.aliases.get(name, f"only {name}"), []).append(name)
    peak = 0
    for now in range(len(order)):
        live = 0
        for names in storages.values():
            times = [order.index(step) for name in names for step in touching(graph, name)]
            begun = set(names) & set(graph.inputs) or min(times) <= now
            needed = set(names) & set(graph.outputs) or max(times) >= now
            live += max(graph.size_bytes[name] for name in names) * bool(begun and needed)
        peak = max(peak, live)
    return peak


def overwrites(graph: StepGraph) -> set[tuple[str, str]]:
    """Pairs of buffers that share bytes where the second comes when the first is done, in the given order."""
    pairs = set()
    for old, new in itertools.permutations(graph.aliases, 2):
        before, after = touching(graph, old), touching(graph, new)
        if graph.aliases[old] != graph.aliases[new] or old in graph.outputs or new in graph.inputs:
            continue
        if before and after and before[-1] <= after[0]:
            pairs.add((old, new))
    return pairs


def values(graph: StepGraph, order) -> tuple[dict, list]:
    """What each step reads, and the outputs, by value: a write destroys what it overwrites."""
    clash = overwrites(graph)
    memory = {name: name for name in graph.inputs}
    seen = {}
    for step in order:
        reads, writes = graph.steps[step]
        seen[step] = [memory.get(name, "nothing") for name in reads]
        before = [memory.get(name) for name in writes]  # a write into a buffer may leave a part of it
        for name in writes:
            for overlapping in list(memory):
                if (name, overlapping) in clash or (overlapping, name) in clash:
                    memory[overlapping] = "destroyed"
        for name, old in zip(writes, before):
            memory[name] = (step, name, old)
    return seen, [memory.get(name) for name in graph.outputs]


def must_precede(graph: StepGraph) -> list[set[int]]:
    """Of every step, those that have to come before it."""
    count = len(graph.steps)
    first: list[set[int]] = [set() for _ in range(count)]
    for old, new in overwrites(graph):
        begin = touching(graph, new)[0]
        first[begin] |= set(touching(graph, old)) - {begin}
    for a, b in itertools.combinations(range(count), 2):
        (reads_a, writes_a), (reads_b, writes_b) = graph.steps[a], graph.steps[b]
        if set(writes_a) & {*reads_b, *writes_b} or set(writes_b) & set(reads_a):
            first[b].add(a)
    return first


def smallest_peak(graph: StepGraph) -> int:
    """Try every order that the data flow allows."""
    count, first = len(graph.steps), must_precede(graph)
    best = peak_bytes(graph, range(count))

    def extend(order: list[int]) -> None:
        nonlocal best
        rest = [step for step in range(count) if step not in order]
        if not rest:
            best = min(best, peak_bytes(graph, order))
        for step in rest:
            if first[step] <= set(order):
                extend([*order, step])

    extend([])
    return best


def smallest_peak_by_sets(graph: StepGraph) -> int:
    """The same for more steps: the best way to every set of executed steps, with nothing left out."""
    count, first = len(graph.steps), must_precede(graph)
    best = {frozenset(): 0}
    for _ in range(count):
        following: dict[frozenset, int] = {}
        for done, peak in best.items():
            for step in set(range(count)) - done:
                if first[step] <= done:
                    now = max(peak, _live_bytes(graph, done, step))
                    key = done | {step}
                    following[key] = min(now, following.get(key, now))
        best = following
    return min(best.values())


def _live_bytes(graph: StepGraph, done: frozenset, step: int) -> int:
    storages: dict[str, int] = {}
    begun, needed = set(), set()
    for name, size in graph.size_bytes.items():
        key, steps = graph.aliases.get(name, f"only {name}"), set(touching(graph, name))
        if not steps and name not in graph.outputs:
            continue
        storages[key] = max(storages.get(key, 0), size)
        if name in graph.inputs or steps & (done | {step}):
            begun.add(key)
        if name in graph.outputs or steps - done:
            needed.add(key)
    return sum(size for key, size in storages.items() if key in begun & needed)
