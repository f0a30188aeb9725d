"""The lower bound of a step: no plan is below it, with any device, type of weights, batch and size."""

import random
from dataclasses import replace

import pytest
from decoders import SMALL
from drawn_plans import random_plan
from hypothesis import given, settings
from hypothesis import strategies as st

import pimflow
from pimflow.commands.generate.decoding import Lengths, StepRequest, step_times
from pimflow.commands.generate.step_bound import pim_share, shared_bound_ns, weight_times
from pimflow.commands.shared.search import SearchRequest
from pimflow.core.kernel import ConvGeometry
from pimflow.hardware import PimSpec, System
from pimflow.placement import CandidateGenerator, profile
from pimflow.placement.costs.pim_runs import PimTarget
from pimflow.placement.solvers.evaluate import evaluate
from pimflow.simulators.pim.bound import min_read_ns
from pimflow.simulators.profiler import BuiltIn
from pimflow.zoo.language import graph

DEVICES = ("newton-gddr6", "newton-hbm2", "aim-gddr6", "hbm-pim", "newton-gddr6-narrow", "hbm-pim-narrow")
TYPES = (None, "int8", "q4_k")


def without_launches(pim: str, channels: int) -> System:
    """A system on which only reads take time, so that the bound is near."""
    system = pimflow.system(pim=pim, pim_channels=channels).with_launches(gpu_ns=0.0, pim_ns=0.0)
    return replace(system, channel_mode_switch_ns=0.0)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    pim=st.sampled_from(DEVICES),
    weights=st.sampled_from(TYPES),
    columns=st.integers(1, 24),
    outputs=st.integers(1, 40),
    uses=st.integers(1, 3),
    channels=st.sampled_from([1, 2, 5]),
)
def test_no_program_is_below_the_time_of_its_rows(pim, weights, columns, outputs, uses, channels):
    """Every loop order: what is not whole rows of all banks takes longer."""
    spec = PimSpec.load(pim)
    geometry = ConvGeometry(n=uses, h=1, w=1, c=256 * columns, oc=16 * outputs, weights=weights)
    target = PimTarget(pim=spec, channels=channels, dtype="fp16", profiler=BuiltIn())
    device = target.device(geometry)
    bound_ns = min_read_ns(geometry.oc * geometry.reduction, uses, device, "fp16", channels)
    # the last row need not be closed, nor the first change be waited for
    slack_ns = device.row_switch_cycles * device.tCK_ns
    for order in target.schedules(geometry):
        assert target.cost(geometry, order, "layer").time_ns + slack_ns >= bound_ns


CASES = [
    ("newton-gddr6", None, 1, 16),
    ("newton-gddr6-narrow", "q4_k", 1, 16),
    ("newton-gddr6-narrow", "int8", 2, 32),
    pytest.param("aim-gddr6", None, 2, 8, marks=pytest.mark.long),
    pytest.param("newton-hbm2", "q8_0", 1, 16, marks=pytest.mark.long),
    pytest.param("hbm-pim-narrow", "q4_0", 4, 31, marks=pytest.mark.long),
]


@pytest.mark.long
@pytest.mark.parametrize(("pim", "weights", "batch", "channels"), CASES)
def test_no_plan_is_below_the_bound(pim, weights, batch, channels):
    """The best plan of a block, and plans at random; on the GPU alone too."""
    decoder = replace(SMALL, hidden=1024, heads=8, kv_heads=2, head_size=128, feed_forward=2048)
    decoder = decoder.with_weights(weights) if weights else decoder
    system = without_launches(pim, channels)
    lengths = Lengths(attended=64, places=64, batch=batch)
    request = SearchRequest.from_arguments(system).validate()
    result = StepRequest(graph.block_graph(decoder, 64, batch=batch), request, lengths).place()[2]
    kv_elements = decoder.kv_bytes_per_token(1)
    parts = step_times(result, lengths, kv_elements, decoder.group)
    bound_ns = shared_bound_ns(parts, pim_share(system))
    assert bound_ns <= result.evaluation.latency_ns and bound_ns <= result.baseline.latency_ns
    assert weights or bound_ns > 0.2 * result.evaluation.latency_ns  # not empty words
    generator = CandidateGenerator(result.graph, system, result.costs)
    table = profile(result.graph, generator)
    source = random.Random(0)
    for _ in range(10):
        plan = random_plan(generator, table, source)
        assert evaluate(result.graph, plan, table, system).latency_ns >= bound_ns


def test_the_bound_without_pim_is_that_of_the_gpus_reads():
    system = without_launches("newton-gddr6", 0)
    request = SearchRequest.from_arguments(system).validate()
    head = graph.head_graph(replace(SMALL, hidden=256))
    result = StepRequest(head, request, Lengths(attended=1)).place()[2]
    parts = weight_times(result.graph, 1, system)
    expected = 256 * SMALL.vocabulary * 2 / (32 * system.gpu.channel_bytes_per_ns)
    assert shared_bound_ns(parts, pim_share(system)) == pytest.approx(expected)
