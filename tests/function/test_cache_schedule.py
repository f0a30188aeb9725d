"""Schedules of attention over a cache in PIM are strings that people read and plans keep."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pimflow.pim_backend.programs.cache_schedule import CacheSchedule, ProductSchedule

products = st.builds(
    ProductSchedule,
    order=st.sampled_from(["vector", "row"]),
    spread=st.integers(1, 64),
    lanes=st.sampled_from([1, 8, 16]),
    accumulate=st.booleans(),
)


@given(st.builds(CacheSchedule, keys=products, values=products, parts=st.integers(1, 32)))
def test_parse_is_the_inverse(schedule: CacheSchedule) -> None:
    assert CacheSchedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize("text", ["", "weight-stationary, 1 buffer", "keys row-stationary, spread 2"])
def test_others_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no schedule of attention"):
        CacheSchedule.parse(text)
