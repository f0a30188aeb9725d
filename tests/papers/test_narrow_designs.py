"""GEMVs with narrow operands beside two publications."""

from dataclasses import replace

import pytest
from papers import narrow_designs

from pimflow.hardware import PimSpec

LPDDR5X, HBM = PimSpec.load("lpddr5x-pim"), PimSpec.load("hbm-pim-narrow")
ROWS = (narrow_designs.PUBLISHED[0], narrow_designs.PUBLISHED[-1])


def test_gemvs_of_lpddr5x_pim_are_near_the_note():
    comparisons = list(narrow_designs.speedup_comparisons(LPDDR5X, (4096,), ROWS))
    assert [row.published.name for row in comparisons] == ["W8A8", "lowest with fences, W4A16"]
    for row in comparisons:
        assert abs(row.error) < 0.15 and max(row.speedups) <= min(row.phase_fences)


@pytest.mark.parametrize(("weights", "activations"), [("int8", "int8"), ("int4", "fp16")])
def test_a_gemv_takes_its_rows_products_and_refreshes(weights, activations):
    """The cycles by hand: rows of 64 COMPs, changed behind one another, in the time that refreshes leave."""
    gemv = narrow_designs.package_gemv(LPDDR5X, 4096, 4096, weights, activations)
    rows = 4096 * 4096 // (4 * 16) // (2048 if weights == "int8" else 4096)
    row_cycles = 64 * 4 + 12 + 26 + 23
    low_ns = rows * row_cycles * LPDDR5X.tCK_ns / (1 - 456 / 4687)
    assert low_ns * 0.97 < gemv.time_ns < low_ns * 1.08
    assert gemv.read_ns == pytest.approx(4096 * 4096 * (1 if weights == "int8" else 0.5) / 76.8)
    assert gemv.result_reads == 4096 // (4 * 16)
    assert gemv.speedup(2) == pytest.approx(gemv.read_ns / (gemv.time_ns + 300))


def test_fewer_sums_take_longer():
    slow = replace(LPDDR5X, accumulators=1)
    times = [narrow_designs.package_gemv(pim, 4096, 4096, "int8", "int8").time_ns for pim in (LPDDR5X, slow)]
    assert times[0] < times[1]


def test_scales_of_groups_are_near_the_letter():
    (times,) = narrow_designs.group_scales(HBM, ((4096, 4096),))
    assert times.comps == 4096 * 4096 // (16 * 8 * 16) and times.group_comps == 8
    assert times.cascade_ns / times.fp16_ns == pytest.approx(1.07, rel=0.15)
    assert times.plain_ns / times.cascade_ns == pytest.approx(1.55, rel=0.15)
    assert times.fp16_ns < times.in_unit_ns < times.cascade_ns < times.plain_ns


@pytest.mark.long
def test_each_term_of_w4a8kv4_shortens_a_block():
    fp16, narrow, wide, bytes_, fast = narrow_designs.p3_times(PimSpec.load("hbm-pim"))
    assert narrow.comps_ns == fp16.comps_ns == 4 * wide.comps_ns == 8 * fast.comps_ns
    assert bytes_.vectors_ns < 0.6 * wide.vectors_ns
    assert fp16.block_ns > narrow.block_ns > wide.block_ns > bytes_.block_ns > fast.block_ns
    assert fp16.block_ns / fast.block_ns == pytest.approx(narrow_designs.P3_PUBLISHED, rel=0.15)
