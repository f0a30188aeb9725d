"""Shapes over several devices: parts of a model, their room, links, and products in parts by value."""

from dataclasses import replace

import numpy as np
import pytest
from decoders import SMALL
from hypothesis import given
from hypothesis import strategies as st

import pimflow
from pimflow import zoo
from pimflow.commands.generate.devices import PIPELINE, TENSOR, DeviceGroup, min_devices
from pimflow.errors import InfeasibleError, UsageError
from pimflow.hardware.link import LinkSpec
from pimflow.zoo.language.reference import ReferenceDecoder

LINK = LinkSpec.load("nvlink-dgx")
WIDE = replace(SMALL, heads=4, kv_heads=2, feed_forward=64, layers=3)


def group(count: int, parallel: str) -> DeviceGroup:
    return DeviceGroup(count=count, parallel=parallel, link=LINK)


def test_a_link_has_sources_and_prices_of_collectives():
    assert LINK.sources.keys() == {"latency_ns", "bytes_per_ns"}
    link = replace(LINK, latency_ns=100.0, bytes_per_ns=2.0)
    assert link.message_ns(40) == 120
    assert link.all_reduce_ns(80, 4) == 280  # twice a whole tensor; a ring takes six steps of 110
    assert link.all_reduce_ns(8000, 4) == 6 * 1100  # a ring: six quarters
    assert link.all_gather_ns(80, 4) == 230 and link.all_reduce_ns(80, 1) == link.all_gather_ns(80, 1) == 0


def test_parts_of_blocks_add_up_to_the_block():
    """The sums of all devices, with their heads and parts of the feed-forward, are those of one device."""
    decoder = replace(WIDE, layers=1)
    part = group(2, TENSOR).device_part(decoder)
    assert (part.heads, part.kv_heads, part.feed_forward, part.hidden) == (2, 1, 32, decoder.hidden)
    weights = zoo.decoder_weights(decoder)
    x = np.random.default_rng(0).normal(size=(3, decoder.hidden)).astype(np.float32)
    places, name = np.arange(3), "layers.0"
    whole = ReferenceDecoder(decoder, weights, np.float64)
    sums = 0.0
    for device in range(2):
        own = {}
        for key, shape in part.block_weights(0).items():
            value = weights[key]
            axes = [axis for axis in range(value.ndim) if value.shape[axis] != shape[axis]]
            own[key] = np.split(value, 2, axes[0])[device] if axes else value
        reference = ReferenceDecoder(part, {**weights, **own}, np.float64)
        sums = sums + reference._attention(x, 0, places) + reference._feed_forward(x, name)
    np.testing.assert_allclose(sums, whole._attention(x, 0, places) + whole._feed_forward(x, name), rtol=1e-9)


@pytest.mark.parametrize(
    ("count", "parallel", "says"),
    [
        (3, TENSOR, "the 4 heads of 'small' cannot be shared equally"),
        (4, TENSOR, "the 2 kv_heads of 'small'"),
        (4, PIPELINE, "'small' has 3 blocks"),
    ],
)
def test_what_cannot_be_shared_is_refused(count, parallel, says):
    with pytest.raises(UsageError, match=says):
        group(count, parallel).device_part(WIDE)
    with pytest.raises(UsageError, match="give 1 to"):
        group(0, parallel)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 30), st.integers(1, 50))
def test_the_fullest_device_of_a_pipeline(blocks, block_bytes, output_bytes, count):
    """All divisions of the blocks into equal stages and a last one, which has the output layer."""
    held = group(count, PIPELINE).held_bytes(blocks, block_bytes, output_bytes)
    stages = []
    for last in range(blocks + 1):
        if count > 1 or last == blocks:
            others = -(-(blocks - last) // max(count - 1, 1))
            stages.append(max(others * block_bytes, last * block_bytes + output_bytes))
    assert held == min(stages)
    decoder = replace(WIDE, layers=blocks)
    least = min_devices(decoder, block_bytes, output_bytes, held)
    assert least is None or least <= count or count > blocks


def test_links_are_of_the_batch_and_the_blocks():
    pipeline, tensor = group(3, PIPELINE), group(2, TENSOR)
    hidden_bytes = 5 * WIDE.hidden * 2
    assert pipeline.link_ns(WIDE, 5, 2) == pytest.approx(2 * LINK.message_ns(hidden_bytes) + LINK.latency_ns)
    sums, logits = LINK.all_reduce_ns(hidden_bytes, 2), LINK.all_gather_ns(WIDE.vocabulary * 2, 2)
    assert tensor.link_ns(WIDE, 5, 2) == pytest.approx(6 * sums + logits)
    assert group(1, TENSOR).link_ns(WIDE, 5, 2) == 0


@pytest.mark.long
def test_a_model_without_room_names_the_devices_that_have_it(monkeypatch):
    monkeypatch.setattr(zoo, "decoder", lambda _: replace(WIDE, hidden=512, head_size=64, feed_forward=1024))
    system = pimflow.system()
    arguments = dict(tokens=[1], n=1, context=8, system=system)
    with_room = pimflow.generate("gpt-2", **arguments)
    rows = int(0.7 * system.pim.rows_per_bank * with_room.held_bytes / with_room.room_bytes)
    arguments["system"] = replace(system, pim=replace(system.pim, rows_per_bank=rows))
    with pytest.raises(InfeasibleError, match=r"--devices 2, which share the blocks"):
        pimflow.generate("gpt-2", **arguments)
    shared = pimflow.generate("gpt-2", **arguments, devices=2)
    assert shared.held_bytes <= shared.room_bytes and shared.devices == "2 in pipeline, over nvlink-dgx"
    assert with_room.devices is None and shared.held_bytes < with_room.held_bytes
    assert shared.tpot_ns > with_room.tpot_ns + LINK.latency_ns


def test_a_model_with_weights_is_not_shared():
    with pytest.raises(UsageError, match="only shapes without weights are shared"):
        pimflow.generate("tiny-lm", prompt="a", n=1, devices=2)
