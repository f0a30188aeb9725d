"""Does what was written of a dataclass come back as it was?"""

import dataclasses
import json
import typing
from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pimflow.core.json_form import json_form
from pimflow.core.typed_values import from_fields, has_type


class Length(str, Enum):
    SHORT = "short"
    LONG = "long"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeNode:
    name: str
    length: Length = Length.SHORT
    pair: tuple[int, float] | None = None
    sizes: tuple[tuple[int, ...], ...] = ()
    table: dict[str, float] = dataclasses.field(default_factory=dict)
    device: typing.Literal["gpu", "pim"] = "gpu"
    inside: "tuple[TreeNode, ...]" = ()
    sibling: "TreeNode | None" = None


names, numbers = st.text(max_size=3), st.integers(0, 9)
leaves = st.builds(
    TreeNode,
    name=names,
    length=st.sampled_from(Length),
    pair=st.none() | st.tuples(numbers, st.floats(0, 1)),
    sizes=st.lists(st.lists(numbers, max_size=2).map(tuple), max_size=2).map(tuple),
    table=st.dictionaries(names, st.floats(0, 1), max_size=2),
    device=st.sampled_from(["gpu", "pim"]),
)
nodes = st.recursive(
    leaves,
    lambda inner: st.builds(
        TreeNode, name=names, inside=st.lists(inner, max_size=2).map(tuple), sibling=st.none() | inner
    ),
    max_leaves=4,
)


@given(nodes)
def test_what_is_written_comes_back(node):
    for plain in (dataclasses.asdict(node), json.loads(json.dumps(json_form(node)))):
        restored = from_fields(TreeNode, plain)
        assert restored == node and has_type(restored, TreeNode)


@pytest.mark.parametrize("plain", [{}, {"name": "a", "other": 1}, {"name": "a", "pair": [1]}, []])
def test_other_fields_are_refused(plain):
    with pytest.raises((TypeError, ValueError)):  # a pair of one number is of another length
        from_fields(TreeNode, plain)


def test_fields_may_be_missing_where_there_is_a_default():
    assert from_fields(TreeNode, {"name": "a"}) == TreeNode(name="a")


def test_another_literal_has_not_the_type():
    assert not has_type(from_fields(TreeNode, {"name": "a", "device": "cpu"}), TreeNode)
