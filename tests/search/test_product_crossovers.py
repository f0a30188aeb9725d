"""Where products with weights stop being faster in PIM, beside bounds that share no code with the search."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pimflow import zoo
from pimflow.api import product_crossovers as crossovers
from pimflow.core.layer_text import parse_layer
from pimflow.core.region import ELEMENT_BYTES, convolution_kernel
from pimflow.hardware import system
from pimflow.placement import Profiling
from pimflow.simulators.gpu.model import kernel_cost
from pimflow.simulators.pim.bound import row_limited_ns

SYSTEM = system(pim="newton-gddr6")
TOKENS = (1, 4, 16, 64)


@pytest.fixture(scope="module")
def found():
    decoder = zoo.decoder("gpt-2")
    profiling = Profiling()
    return [crossovers.product_crossing(decoder, "query", tokens, SYSTEM, profiling) for tokens in TOKENS]


def test_times_of_a_product_are_those_of_the_layer_and_above_the_bound_of_rows(found):
    gpu, dtype = SYSTEM.gpu, SYSTEM.dtype
    for each in found:
        layer = parse_layer(f"fc:{each.tokens}x{each.inputs},{each.outputs}")
        alone = kernel_cost(convolution_kernel(layer, dtype), gpu, dtype=dtype, channels=gpu.memory_channels)
        assert each.gpu_ns == pytest.approx(alone.total_ns, abs=1e-3)
        weight_bytes = each.inputs * each.outputs * ELEMENT_BYTES[dtype]
        least_ns = row_limited_ns(weight_bytes, each.tokens, SYSTEM.pim, SYSTEM.pim_channels)
        assert each.pim_ns > least_ns
        assert each.plan_ns <= min(each.gpu_ns, each.pim_ns) + 1e-3
        assert 0 <= each.pim_share <= 1 and (each.pim_share == 0) == (each.plan_ns == each.gpu_ns)


def test_pim_gains_less_the_more_tokens_share_the_weights(found):
    gains = [each.gpu_ns / each.pim_ns for each in found]
    assert gains[0] > 1 > gains[-1] and gains[1:] == sorted(gains[1:], reverse=True)


@given(st.lists(st.booleans(), min_size=1), st.randoms())
def test_slower_from_is_where_it_is_slower_to_the_end(slower, random):
    one = crossovers.ProductCrossing(
        model="", product="", inputs=1, outputs=1, tokens=1, gpu_ns=1.0, pim_ns=1.0, plan_ns=1.0, pim_share=1
    )
    found = [replace(one, tokens=tokens) for tokens in range(len(slower))]
    random.shuffle(found)
    first = crossovers.slower_from(found, lambda each: slower[each.tokens])
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


def test_the_chart_has_a_line_for_each_product_and_a_point_for_each_time(found):
    other = [replace(each, model="other") for each in found]
    chart = crossovers.speedup_chart({"a": [*found, *other], "b": found})
    points = {(each["system"], each["model"], each["tokens"]) for each in chart["data"]["values"]}
    assert points == {
        (name, model, tokens)
        for name, model in (("a", "gpt-2"), ("a", "other"), ("b", "gpt-2"))
        for tokens in TOKENS
    }
    assert chart["facet"]["column"]["sort"] == ["gpt-2", "other"]
