"""Does every device compute what is lowered for it, legally, and do its programs survive their file form?"""

from dataclasses import replace

import pytest
from calibration.pim_device import PimDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import PimLayer, require_legal, sums
from length import examples, long_but
from reference import Window

from pimflow.hardware import PimSpec, spec_names

NAMES = spec_names("pim")


def device(name: str) -> PimSpec:
    """The device, with multipliers for every storage type that its columns and lanes hold."""
    pim = PimSpec.load(name)
    return replace(pim, dtypes=("fp16", "bf16", "int8", "fp32") if pim.result_lanes == 1 else DTYPES)


DTYPES = ("fp16", "bf16", "int8")


@st.composite
def small_layers(draw: st.DrawFn, pim: PimSpec) -> PimLayer:
    """Reductions shorter and longer than a buffer and a row, tiles and pixels that do not divide evenly."""
    dtype = draw(st.sampled_from(pim.dtypes))
    kernel = draw(st.sampled_from(((1, 1), (1, 1), (3, 3), (2, 1))))
    buffer = pim.buffer_columns * pim.elements_per_column(dtype)
    row = pim.elements_per_row(dtype)
    reduction = draw(st.sampled_from((1, buffer // 3, buffer, buffer + 1, 3 * buffer, row + 1, 2 * row)))
    layer = PimLayer(
        x_shape=(
            1,
            draw(st.integers(2, 4)),
            draw(st.integers(1, 5)),
            max(1, reduction // (kernel[0] * kernel[1])),
        ),
        oc=draw(st.sampled_from((1, 3, pim.banks, pim.banks + 1, 4 * pim.banks - 1))),
        window=Window(kernel=kernel, stride=(1, draw(st.integers(1, 2))), padding=(1, 1, 1, 1)),
        dtype=dtype,
        pim=pim,
        channels=draw(st.integers(1, 5)),
        row_begin=draw(st.sampled_from((0, 0, 777))),
        seed=draw(st.integers(0, 99)),
    )
    begin = draw(st.sampled_from((0, 0, layer.geometry.pixels // 2)))
    return replace(layer, pixel_begin=begin)


@pytest.mark.parametrize("name", long_but(["hbm-pim", "newton-gddr6"], NAMES))
@settings(max_examples=examples(25), deadline=None)
@given(st.data())
def test_every_loop_order_is_legal_and_right_and_comes_back(name, data):
    layer = data.draw(small_layers(device(name)))
    x, w = layer.operands()
    exact, limit = sums(layer)
    for schedule in layer.schedules:
        program = layer.lower(schedule)
        require_legal(program, layer)
        assert (abs(PimDevice(program, layer.image(program, w)).run(x) - exact) <= limit).all(), str(schedule)
