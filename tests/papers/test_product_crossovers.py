"""Where products with weights stop being faster in PIM, beside bounds that share no code with the search."""

from dataclasses import replace

import pytest
from calibration.latency_bound import row_limited_ns
from hypothesis import given
from hypothesis import strategies as st
from papers import product_crossovers as crossovers

from pimflow import zoo
from pimflow.core.kernel import ELEMENT_BYTES, convolution_kernel
from pimflow.core.layer_text import parse_layer
from pimflow.hardware import system
from pimflow.placement import Profiling
from pimflow.simulators.gpu.model import kernel_cost

pytestmark = pytest.mark.long

SYSTEM = system(pim="newton-gddr6")
TOKENS = (1, 4, 16, 64)


@pytest.fixture(scope="module")
def crossings():
    decoder = zoo.decoder("gpt-2")
    profiling = Profiling()
    return [crossovers.product_crossing(decoder, "query", tokens, SYSTEM, profiling) for tokens in TOKENS]


def test_times_of_a_product_match_the_layer_and_exceed_the_row_bound(crossings):
    gpu, dtype = SYSTEM.gpu, SYSTEM.dtype
    for point in crossings:
        layer = parse_layer(f"fc:{point.tokens}x{point.inputs},{point.outputs}")
        alone = kernel_cost(convolution_kernel(layer, dtype), gpu, dtype=dtype, channels=gpu.memory_channels)
        assert point.gpu_ns == pytest.approx(alone.total_ns, abs=1e-3)
        weight_bytes = point.inputs * point.outputs * ELEMENT_BYTES[dtype]
        least_ns = row_limited_ns(weight_bytes, point.tokens, SYSTEM.pim, SYSTEM.pim_channels)
        assert point.pim_ns > least_ns
        assert point.plan_ns <= min(point.gpu_ns, point.pim_ns) + 1e-3
        assert 0 <= point.pim_share <= 1 and (point.pim_share == 0) == (point.plan_ns == point.gpu_ns)


def test_pim_gains_less_the_more_tokens_share_the_weights(crossings):
    gains = [crossing.gpu_ns / crossing.pim_ns for crossing in crossings]
    assert gains[0] > 1 > gains[-1] and gains[1:] == sorted(gains[1:], reverse=True)


@given(st.lists(st.booleans(), min_size=1), st.randoms())
def test_slower_from_is_where_it_is_slower_to_the_end(slower, random):
    product = {"model": "", "product": "", "inputs": 1, "outputs": 1, "tokens": 1}
    base = crossovers.ProductCrossing(**product, gpu_ns=1.0, pim_ns=1.0, plan_ns=1.0, pim_share=1)
    points = [replace(base, tokens=tokens) for tokens in range(len(slower))]
    random.shuffle(points)
    first = crossovers.first_slower_tokens(points, lambda point: slower[point.tokens])
    for tokens in range(len(slower)):
        assert all(slower[tokens:]) == (first is not None and tokens >= first)


def test_banks_use_each_weight_so_often_while_the_gpu_reads_it():
    """Both ways of the same row of all banks, at the uses that are told."""
    for pim in ("newton-gddr6", "aim-gddr6"):
        target = system(pim=pim)
        uses, gpu = crossovers.uses_while_read(target), target.gpu
        megabyte_ns = (1 << 20) / (gpu.memory_channels * gpu.channel_bytes_per_ns)
        assert row_limited_ns(1 << 20, uses, target.pim, target.pim_channels) == pytest.approx(megabyte_ns)
        wider = replace(target, gpu=replace(gpu, channel_bytes_per_ns=2 * gpu.channel_bytes_per_ns))
        assert crossovers.uses_while_read(wider) < uses


def test_the_chart_has_a_line_for_each_product_and_a_point_for_each_time(crossings):
    others = [replace(point, model="other") for point in crossings]
    chart = crossovers.speedup_chart({"a": [*crossings, *others], "b": crossings})
    drawn_points = {(point["system"], point["model"], point["tokens"]) for point in chart["data"]["values"]}
    models = ("a", "gpt-2"), ("a", "other"), ("b", "gpt-2")
    assert drawn_points == {(*pair, tokens) for pair in models for tokens in TOKENS}
    assert chart["facet"]["column"]["sort"] == ["gpt-2", "other"]
