"""A tensor that a product adds, as more channels of its vectors: by value, legal, exact, charged."""

from dataclasses import replace

import numpy as np
import pytest
import tvm_ffi
from calibration.pim_device import PimDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import NEWTON, SHORT, UNEVEN, PimLayer, flat, require_legal_and_exact, with_latches
from length import examples
from reference import bound, convolve, storage_values

from pimflow.compiler.verification import check_region
from pimflow.core.commands import Comp, Gwrite
from pimflow.core.program import PimProgram
from pimflow.errors import TraceError, UsageError
from pimflow.hardware import PimSpec
from pimflow.pim_backend.programs.layout import with_identity
from pimflow.pim_backend.runtime import codegen
from pimflow.simulators.pim.coverage import product_coverage
from pimflow.simulators.pim.expansion import command_counts
from pimflow.simulators.pim.timing import time_program

AIM = PimSpec.load("aim-gddr6")


@st.composite
def adding(draw, most_channels: int = 6) -> PimLayer:
    """A product that adds a tensor, of one chunk or of several, on every organisation."""
    oc = draw(st.sampled_from((1, 5, 16, 17, 33, 48, 70)))
    around = draw(st.sampled_from((1, 16, 40, 256, 257, 500, 512, 513, 1024, 1100)))
    pim = draw(st.sampled_from((NEWTON, NEWTON, UNEVEN, SHORT, with_latches(NEWTON), AIM)))
    if pim is not AIM:
        pim = replace(pim, global_buffers=draw(st.integers(1, 4)))
    layer = PimLayer(
        x_shape=(
            draw(st.integers(1, 2)),
            draw(st.integers(1, 4)),
            draw(st.integers(1, 5)),
            max(around, oc + 1),
        ),
        oc=oc,
        pim=pim,
        dtype="fp16" if pim is AIM else draw(st.sampled_from(("fp16", "fp16", "fp32", "bf16", "int8"))),
        channels=draw(st.integers(1, most_channels)),
        row_begin=draw(st.sampled_from((0, 1, 777))),
        seed=draw(st.integers(0, 999)),
        added_channels=oc,
    )
    begin = draw(st.integers(0, layer.geometry.pixels - 1))
    return replace(layer, pixel_begin=begin, pixel_end=draw(st.integers(begin + 1, layer.geometry.pixels)))


def operands(layer: PimLayer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The layer's own input and filters, and what is added."""
    x, w = layer.operands()
    own_channels = layer.x_shape[3] - layer.oc
    return x[..., :own_channels].copy(), w[..., :own_channels].copy(), x[..., own_channels:].copy()


@pytest.mark.long
@settings(max_examples=examples(100), deadline=None)
@given(adding(), st.booleans())
def test_the_product_adds_the_tensor(layer, also_bias):
    x, w, added = operands(layer)
    initial = "bias" if also_bias and layer.pim.can_write_latches else ""
    start = np.arange(layer.oc).astype(np.int32 if layer.dtype == "int8" else np.float32) / 8
    start = start.astype(np.int32) if layer.dtype == "int8" else start
    start_values = start.astype(np.float64) if layer.dtype == "int8" else storage_values(start, layer.dtype)
    exact, magnitude = convolve(x, w, layer.window, layer.dtype)
    for term in (
        storage_values(added, layer.dtype).reshape(exact.shape),
        start_values if initial else np.zeros(1),
    ):
        exact, magnitude = exact + term, magnitude + abs(term)
    exact, magnitude = exact[layer.pixels], magnitude[layer.pixels]
    for schedule in layer.schedules:
        program, begins = layer.lower(schedule, initial), start if initial else None
        result = PimDevice(program, layer.image(program, w)).run(x, initial=begins, added=added)
        if schedule.resumed:  # rounded several times
            assert check_region(program, w.reshape(layer.oc, -1), x, result, begins, added).matches
            continue
        # Products with zeros add no error.
        limit = bound(exact, magnitude, x.shape[3] + 2, layer.dtype)
        assert (abs(result - exact) <= limit).all(), str(schedule)


@settings(max_examples=examples(60), deadline=None)
@given(adding(), st.data())
def test_programs_are_legal_and_exact_and_come_back(layer, data):
    """And take what the commands of a layer with as many channels of its own take: zeros are charged."""
    alone = replace(layer, added_channels=0)
    for schedule in data.draw(st.lists(st.sampled_from(layer.schedules), min_size=1, max_size=3)):
        program, dense = layer.lower(schedule), alone.lower(schedule)
        require_legal_and_exact(program, layer)
        # Products with the identity count too.
        pixels = program.pixel_end - program.pixel_begin
        assert product_coverage(program).products == pixels * layer.oc * layer.x_shape[3]
        assert program.rows == dense.rows and command_counts(program) == command_counts(dense)
        assert time_program(program, layer.pim).cycles == time_program(dense, layer.pim).cycles


@settings(max_examples=examples(30), deadline=None)
@given(adding(), st.data())
def test_a_mutant_is_found(layer, data):
    """A COMP or a GWRITE less, wherever it is, is seen by who counts products: zeros are products too."""
    schedule = data.draw(st.sampled_from(layer.schedules))
    program = layer.lower(schedule)
    channel = data.draw(st.sampled_from([i for i, nodes in enumerate(program.channels) if nodes]))
    stream = flat(program.channels[channel])
    index = data.draw(st.sampled_from([i for i, n in enumerate(stream) if isinstance(n, Comp | Gwrite)]))
    streams = list(program.channels)
    streams[channel] = (*stream[:index], *stream[index + 1 :])
    mutant = replace(program, channels=tuple(streams))
    assert not product_coverage(mutant).exact


LAYER = PimLayer(x_shape=(1, 2, 3, 60), oc=20, added_channels=20, channels=2)


def test_the_weights_are_those_of_the_layer_and_the_identity():
    program = LAYER.lower(LAYER.schedules[0])
    _, w, _ = operands(LAYER)
    assert (with_identity(w.reshape(20, -1)) == np.hstack([w.reshape(20, -1), np.eye(20)])).all()
    image, weights = LAYER.image(program, w), with_identity(w.reshape(20, -1))
    dense = replace(program, added_channels=0)
    assert (image.pages == LAYER.image(dense, weights).pages).all()
    slots = program.columns_per_row // 4
    assert np.count_nonzero(image.pages) == slots * (w.size + 20)


def test_the_check_of_a_region_finds_what_is_not_added():
    program = LAYER.lower(LAYER.schedules[0])
    x, w, added = operands(LAYER)
    y = PimDevice(program, LAYER.image(program, w)).run(x, added=added)
    filters = w.reshape(20, -1)
    assert check_region(program, filters, x, y, added=added).matches
    wrong = added.copy()
    wrong[0, 1, 2, 7] += 0.5
    assert not check_region(program, filters, x, y, added=wrong).matches
    assert not check_region(program, filters, x, y, added=np.roll(added, 1, axis=-1)).matches


def test_a_module_joins_both_tensors():
    """The result may go where an operand was."""
    program = LAYER.lower(LAYER.schedules[0])
    x, w, added = operands(LAYER)
    expected = PimDevice(program, LAYER.image(program, w)).run(x, added=added)
    module = codegen._create_module()
    codegen.add_region(module, "layer", program, LAYER.image(program, w))
    seen = []
    y = added.copy()
    with codegen.observe_regions(lambda symbol, operands, y: seen.append([np.array(x) for x in operands])):
        module["layer"](*map(tvm_ffi.from_dlpack, (x, y, y)))
    assert (y.reshape(-1, 20) == expected).all()
    ((given_x, start, given_added),) = seen
    assert (given_x == x).all() and start.size == 0 and (given_added == added).all()
    with pytest.raises(TypeError, match="takes an input, what it adds, and an output"):
        module["layer"](*map(tvm_ffi.from_dlpack, (x, y)))
    with pytest.raises(RuntimeError, match="what a region adds does not fit its input"):
        module["layer"](*map(tvm_ffi.from_dlpack, (x[:, :1, :1, :7].copy(), added, y)))


def test_a_program_says_what_it_adds():
    program = LAYER.lower(LAYER.schedules[0])
    assert '"added_channels": 20' in program.to_json()
    assert "added_channels" not in replace(program, added_channels=0).to_json()
    x, w, added = operands(LAYER)
    image = LAYER.image(program, w)
    with pytest.raises(UsageError, match=r"takes an input of shape \(1, 2, 3, 40\), got \(1, 2, 3, 60\)"):
        PimDevice(program, image).run(np.concatenate([x, added], axis=-1), added=added)
    with pytest.raises(UsageError, match=r"adds a tensor of shape \(1, 2, 3, 20\), got none"):
        PimDevice(program, image).run(x)
    dense = replace(program, added_channels=0)
    with pytest.raises(UsageError, match=r"adds a tensor of shape \(1, 2, 3, 0\), got \(1, 2, 3, 20\)"):
        PimDevice(dense, image).run(np.concatenate([x, added], axis=-1), added=added)


@pytest.mark.parametrize(
    "changes",
    [{"added_channels": 19}, {"added_channels": 60}, {"c": 20}, {"kh": 2}, {"stride": (2, 2)}],
    ids=str,
)
def test_only_a_product_adds_as_many_channels_as_it_gives(changes):
    program = LAYER.lower(LAYER.schedules[0])
    added = {"added_channels": changes.get("added_channels", 20)}
    geometry = {name: value for name, value in changes.items() if name != "added_channels"}
    wrong = replace(program, geometry=replace(program.geometry, **geometry), **added)
    with pytest.raises(TraceError, match="may be added"):
        PimProgram.from_json(wrong.to_json())


def test_a_value_that_is_no_number_spreads_over_its_pixel():
    """Zero times infinity is NaN: docs/pim.md says so."""
    program = LAYER.lower(LAYER.schedules[0])
    x, w, added = operands(LAYER)
    added[0, 1, 1, 3] = np.inf
    y = PimDevice(program, LAYER.image(program, w)).run(x, added=added)
    assert np.isnan(y[4, np.arange(20) != 3]).all() and np.isinf(y[4, 3])
    assert np.isfinite(np.delete(y, 4, axis=0)).all()
