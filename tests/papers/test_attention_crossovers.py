"""Are costs of long caches and of many requests on the line that shorter ones say?"""

from dataclasses import replace

import pytest
from papers import attention_crossovers as crossovers

from pimflow.core.attention import Attention
from pimflow.hardware import system
from pimflow.pim_backend.programs.cache_schedule import KEYS, VALUES
from pimflow.placement import Costs, Profiling
from pimflow.placement.costs.attention_runs import CacheWork

pytestmark = pytest.mark.long

SYSTEM = system(pim="aim-gddr6")
SIZES = {"head_size": 32, "value_size": 32, "queries": 1, "keys": 128}
STEP = Attention(batch=1, heads=16, kv_heads=8, scale=1.0, positioned=True, **SIZES)


@pytest.fixture
def costs(monkeypatch):
    monkeypatch.setattr(crossovers, "MIN_TIMED_TOKENS", 1024)
    return Costs(SYSTEM, Profiling())


def test_of_lengths(costs):
    attention = replace(STEP, keys=4096, batch=3)
    caches = crossovers.LengthCosts(costs).attention_costs(attention)
    for product, ours in ((KEYS, caches[KEYS][0]), (VALUES, caches[VALUES][0])):
        its = CacheWork.from_attention(costs.pim_target, attention, product).cost(ours.schedule)
        assert ours.product.time_ns == pytest.approx(its.product.time_ns, rel=0.04)
        assert ours.product.commands["COMP"] == pytest.approx(its.product.commands["COMP"], rel=0.02)
        assert ours.product.traffic_bursts == pytest.approx(its.product.traffic_bursts, rel=0.02)
        assert (ours.sums, ours.rows) == (its.sums, its.rows)


def test_short_ones_are_timed(costs):
    exact = costs.attention_costs(STEP)
    for product, caches in crossovers.LengthCosts(costs).attention_costs(STEP).items():
        assert all(cost in exact[product] for cost in caches)


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
