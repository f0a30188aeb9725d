"""Are costs of long caches and of many requests on the line that shorter ones say?"""

from dataclasses import replace

import pytest

from pimflow.api import crossovers
from pimflow.core.attention import Attention
from pimflow.hardware import system
from pimflow.placement import Costs, Profiling

SYSTEM = system(pim="aim-gddr6")
STEP = Attention(
    batch=1,
    heads=16,
    kv_heads=8,
    head_size=32,
    value_size=32,
    queries=1,
    keys=128,
    scale=1.0,
    positioned=True,
)


@pytest.fixture
def costs(monkeypatch):
    monkeypatch.setattr(crossovers, "TIMED_TOKENS", 256)
    return Costs(SYSTEM, Profiling())


def test_of_lengths(costs):
    near = {"keys": 1024, "batch": 3}
    (found,) = crossovers.LengthCosts(costs).caches([(replace(STEP, **near), 0)])
    (exact,) = costs.caches([(replace(STEP, **near), 0)])
    for line, timed in ((found.keys, exact.keys), (found.values, exact.values)):
        known = {each.schedule: each for each in timed}
        both = [(each, known[each.schedule]) for each in line if each.schedule in known]
        assert both
        for ours, its in both:
            assert ours.product.time_ns == pytest.approx(its.product.time_ns, rel=0.08)  # refreshes are few
            assert ours.product.commands["COMP"] == pytest.approx(its.product.commands["COMP"], rel=0.02)
            assert ours.product.traffic_bursts == pytest.approx(its.product.traffic_bursts, rel=0.03)
            assert (ours.sums, ours.rows) == (its.sums, pytest.approx(its.rows, abs=1, rel=0.03))


def test_short_ones_are_timed(costs):
    assert crossovers.LengthCosts(costs).caches([(STEP, 0)]) == costs.caches([(STEP, 0)])


def test_a_crossing(costs):
    """PIM gains with what it reads, and not where keys are shared by more heads than it has buffers."""
    few, many = (
        crossovers.crossing(
            replace(STEP, kv_heads=kv, heads=32, head_size=128, value_size=128), SYSTEM, costs
        )
        for kv in (4, 32)
    )
    assert few.beside_ns >= few.gpu_ns and many.beside_ns >= many.gpu_ns
    assert many.speedup > few.speedup
    tight = replace(SYSTEM, pim=replace(SYSTEM.pim, rows_per_bank=SYSTEM.pim.row_base + 1))
    full = crossovers.crossing(replace(STEP, keys=1024), tight, Costs(tight, Profiling()))
    assert full.pim_ns is None and full.speedup is None
