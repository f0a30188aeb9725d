"""Does liveness say, for every step, exactly which buffers still matter?"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples

from pimflow.core.liveness import ALIGNMENT_BYTES, Lifetime, Liveness, view_obstacle
from pimflow.core.region import Region
from pimflow.core.region_graph import RegionGraph

PROPERTY = settings(derandomize=True, deadline=None, max_examples=examples(300))


@st.composite
def programs(draw):
    """Steps that read what exists and write one or two buffers, a few of them in place."""
    inputs = [f"in{i}" for i in range(draw(st.integers(0, 3)))]
    names, steps = list(inputs), []
    for index in range(draw(st.integers(1, 8))):
        reads = draw(st.lists(st.sampled_from(names), max_size=3)) if names else []
        writes = [f"b{index}.{i}" for i in range(draw(st.integers(1, 2)))]
        if names and draw(st.booleans()):
            writes.append(draw(st.sampled_from(names)))
        names += [name for name in writes if name not in names]
        steps.append((reads, writes))
    outputs = draw(st.lists(st.sampled_from(names), unique=True, max_size=3))
    sizes = {name: draw(st.integers(0, 100)) for name in names}
    return steps, sizes, inputs, outputs


def live_by_definition(steps, name, step, inputs, outputs):
    """A buffer is live in a step if it has come to be, and this or a later step, or the caller, uses it."""
    touched = [i for i, (reads, writes) in enumerate(steps) if name in (*reads, *writes)]
    begin = 0 if name in inputs else min(i for i, (_, writes) in enumerate(steps) if name in writes)
    end = len(steps) if name in outputs else max([*touched, 0 if name in inputs else -1]) + 1
    return begin <= step < end


@PROPERTY
@given(programs())
def test_live_bytes_against_the_definition(program):
    steps, sizes, inputs, outputs = program
    liveness = Liveness.from_steps(steps, sizes, inputs=inputs, outputs=outputs)
    expected = [
        sum(size for name, size in sizes.items() if live_by_definition(steps, name, step, inputs, outputs))
        for step in range(len(steps))
    ]
    assert [liveness.live_bytes(step) for step in range(len(steps))] == expected
    assert liveness.peak_bytes == max(expected)
    assert {life.name for life in liveness.lifetimes} == set(sizes)
    pinned = {life.name for life in liveness.lifetimes if life.pinned}
    assert pinned == set(inputs) | set(outputs)


def test_a_chain_by_hand():
    """x -> a -> b -> y: two neighbours at a time, the result until the end."""
    steps = [(["x"], ["a"]), (["a"], ["b"]), (["b"], ["y"])]
    sizes = {"x": 1, "a": 10, "b": 100, "y": 1000}
    liveness = Liveness.from_steps(steps, sizes, inputs=["x"], outputs=["y"])
    spans = [("x", 0, 1), ("a", 0, 2), ("b", 1, 3), ("y", 2, 3)]
    assert [(life.name, life.begin, life.end) for life in liveness.lifetimes] == spans
    assert [liveness.live_bytes(step) for step in range(3)] == [11, 110, 1100]


def test_an_alias_class_counts_once_at_its_largest():
    def life(name, size_bytes, alias=""):
        return Lifetime(name=name, begin=0, end=1, size_bytes=size_bytes, alias=alias)

    lifetimes = (life("whole", 64, "t"), life("top", 32, "t"), life("rest", 32, "t"), life("u", 5))
    liveness = Liveness(steps=1, lifetimes=lifetimes)
    assert liveness.live_bytes(0) == 69


def test_no_steps_take_no_memory():
    assert Liveness.from_steps([], {}).peak_bytes == 0


def test_reading_before_writing_is_refused():
    with pytest.raises(ValueError, match="step 1 reads 'ghost' before it is written"):
        Liveness.from_steps([([], ["a"]), (["ghost"], ["b"])], {"a": 1, "b": 1})


def test_an_output_nobody_writes_is_refused():
    with pytest.raises(ValueError, match="output 'y' is never written"):
        Liveness.from_steps([([], ["a"])], {"a": 1}, outputs=["y"])


@PROPERTY
@given(st.lists(st.integers(1, 8), min_size=1, max_size=4).map(tuple), st.data(), st.sampled_from([2, 4]))
def test_which_parts_lie_inside_against_numpy(shape, data, element_bytes):
    """numpy's own strides say what is contiguous, and where it begins."""
    axis = data.draw(st.integers(0, len(shape) - 1))
    begin = data.draw(st.integers(0, shape[axis]))
    array = np.zeros(shape, f"f{element_bytes}")
    part = array[(slice(None),) * axis + (slice(begin, None),)]
    offset_bytes = begin * array.strides[axis]
    inside = not view_obstacle(shape, axis, begin, element_bytes)
    if inside:
        assert part.flags.c_contiguous and offset_bytes % ALIGNMENT_BYTES == 0
    elif part.size and begin:
        assert not part.flags.c_contiguous or offset_bytes % ALIGNMENT_BYTES


def _region(name: str, inputs: str, elements: int, sizes: dict[str, int], **options) -> Region:
    names = tuple(inputs.split())
    shapes = tuple((sizes[operand],) for operand in names)
    sizes[name] = elements
    options = {"operator": name, "operators": (name,)} | options
    return Region(name=name, inputs=names, input_shapes=shapes, output_shape=(elements,), **options)


@pytest.mark.parametrize("view", [True, False])
def test_a_view_takes_no_bytes(view):
    """In fp16: a and b are the parts of a whole, of which a slice is read last."""
    sizes = {"%x": 1}
    regions = (
        _region("a", "%x", 10, sizes),
        _region("b", "%x", 100, sizes),
        _region("whole", "a b", 110, sizes, operator="concat", is_view=view),
        _region("c", "whole", 1000, sizes),
        _region("part", "whole", 50, sizes, operator="strided_slice", is_view=view),
        _region("y", "c part", 10000, sizes),
    )
    live = RegionGraph(name="net", regions=regions, outputs=("y",)).liveness("fp16")
    in_views = [1 + 110, 1 + 110, 110, 110 + 1000, 110 + 1000, 110 + 1000 + 10000]
    of_their_own = [1 + 10, 1 + 10 + 100, 110 + 110, 110 + 1000, 110 + 1000 + 50, 1000 + 50 + 10000]
    assert [live.live_bytes(step) // 2 for step in range(6)] == (in_views if view else of_their_own)
