"""Are loops over tiles and pixels the very commands that they stand for, on devices with accumulators?"""

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import flat
from length import examples

from pimflow.core.kernel import ConvGeometry
from pimflow.hardware import PimSpec
from pimflow.pim_backend.programs import lowering
from pimflow.pim_backend.programs.schedule import schedules

AIM = PimSpec.load("aim-gddr6")


@st.composite
def devices(draw) -> PimSpec:
    """AiM with shorter rows and any number of accumulators."""
    columns = AIM.columns_per_row // draw(st.sampled_from([1, 2, 4, 8]))
    sizes = {"columns_per_row": columns, "buffer_columns": columns}
    return replace(AIM, name="small", **sizes, accumulators=draw(st.integers(2, 5)))


@settings(max_examples=examples(40), deadline=None)
@given(devices(), st.integers(1, 5), st.integers(1, 40), st.integers(1, 600), st.data())
def test_loops_are_the_commands_that_they_stand_for(pim, pixels, chunks, outputs, data):
    geometry = ConvGeometry(n=pixels, h=1, w=1, c=64 * chunks, oc=outputs)
    orders = [order for order in schedules(geometry, pim, "fp16") if order.accumulators > 1]
    if not orders:
        return
    channels = data.draw(st.integers(1, 4))
    request = lowering.ProgramRequest(
        "r",
        geometry,
        data.draw(st.sampled_from(orders)),
        initial=data.draw(st.sampled_from(["", "bias"])),
        activation=data.draw(st.sampled_from(["", "relu"])),
        row_begin=8,
    )
    rolled = lowering.lower(request, pim, dtype="fp16", channels=channels)
    with pytest.MonkeyPatch.context() as patch:
        fields = lowering._fields
        patch.setattr(lowering, "_fields", lambda *args: {**fields(*args), "loops": False})
        plain = lowering.lower(request, pim, dtype="fp16", channels=channels)
    for actual, expected in zip(rolled.channels, plain.channels, strict=True):
        assert flat(actual) == flat(expected)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_vocabulary_is_lowered_as_loops(resumed):
    """A search times thousands of parts of such a layer."""
    geometry = ConvGeometry(n=16, h=1, w=1, c=4096, oc=128256)
    orders = [e for e in schedules(geometry, AIM, "fp16") if e.accumulators > 1 and e.resumed == resumed]
    began = time.process_time()
    request = lowering.ProgramRequest("r", geometry, orders[0])
    limits = lowering.LoweringLimits(timing_only=True)
    program = lowering.lower(request, AIM, dtype="fp16", channels=16, limits=limits)
    assert time.process_time() - began < 2
    assert len(program.to_json()) < 1 << 20
