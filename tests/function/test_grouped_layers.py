"""Grouped and depthwise convolutions on every device: by value, legally, each product of the layer once."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from calibration.latency_bound import lower_bound
from calibration.pim_device import PimDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import PimLayer, axis, flat, require_legal
from length import examples, long_but
from reference import Window, bound, convolve

from pimflow.core.commands import Affine, Gwrite, Readres
from pimflow.core.kernel import ConvGeometry
from pimflow.core.loop_order import LoopOrder
from pimflow.core.program import PimProgram
from pimflow.errors import TraceError, UnsupportedOpError
from pimflow.hardware import PimSpec, spec_names
from pimflow.pim_backend.programs.layout import memory_image
from pimflow.pim_backend.programs.schedule import groups_per_matrix, schedules
from pimflow.simulators.pim.bound import min_work_ns
from pimflow.simulators.pim.coverage import product_coverage
from pimflow.simulators.pim.timing import time_program

NAMES = spec_names("pim")


@dataclass(frozen=True, kw_only=True)
class GroupedLayer(PimLayer):
    """A convolution in `groups` groups."""

    groups: int = 1

    @property
    def geometry(self) -> ConvGeometry:
        return replace(super().geometry, groups=self.groups)

    @property
    def reduction(self) -> int:
        return self.geometry.reduction

    def operands(self) -> tuple[np.ndarray, np.ndarray]:
        x, w = super().operands()
        return x, w[..., : self.x_shape[3] // self.groups]

    def reference_sums(self) -> tuple[np.ndarray, np.ndarray]:
        """Group by group, by the formula of a dense layer: the pixels of the program."""
        x, w = self.operands()
        parts = zip(np.split(x, self.groups, axis=3), np.split(w, self.groups))
        group_sums = [convolve(*pair, self.window, self.dtype) for pair in parts]
        exact, magnitude = (np.concatenate(pair, axis=1)[self.pixels] for pair in zip(*group_sums))
        return exact, magnitude

    @property
    def products(self) -> int:
        g = self.geometry
        end = g.pixels if self.pixel_end is None else self.pixel_end
        return (end - self.pixel_begin) * g.oc * g.reduction


@st.composite
def layers_in_groups(draw: st.DrawFn, pim: PimSpec) -> GroupedLayer:
    """Depthwise with and without a multiplier, and groups of several channels, tiles full and not full."""
    height, kh, sh, dh, top, bottom = axis(draw, 4)
    width, kw, sw, dw, left, right = axis(draw, 4)
    groups = draw(st.sampled_from((2, 3, 7, 8, 12, 16, 24, 32)))
    channels, outputs = draw(st.sampled_from(((1, 1), (1, 1), (1, 2), (1, 20), (2, 3), (9, 1), (20, 4))))
    layer = GroupedLayer(
        x_shape=(draw(st.integers(1, 2)), height, width, groups * channels),
        oc=groups * outputs,
        groups=groups,
        window=Window(
            kernel=(kh, kw), stride=(sh, sw), dilation=(dh, dw), padding=(top, left, bottom, right)
        ),
        dtype=draw(st.sampled_from([dtype for dtype in ("fp16", "bf16", "int8") if dtype in pim.dtypes])),
        pim=pim,
        channels=draw(st.integers(1, 5)),
        row_begin=draw(st.sampled_from((0, 0, 777))),
        seed=draw(st.integers(0, 99)),
    )
    begin = draw(st.one_of(st.just(0), st.integers(0, layer.geometry.pixels - 1)))
    return replace(layer, pixel_begin=begin)


@pytest.mark.long
@pytest.mark.parametrize("name", long_but(["newton-gddr6"], NAMES))
@settings(max_examples=examples(20), deadline=None)
@given(st.data())
def test_every_loop_order_is_legal_and_right_and_comes_back(name, data):
    layer = data.draw(layers_in_groups(PimSpec.load(name)))
    x, w = layer.operands()
    exact, magnitude = layer.reference_sums()
    limit = bound(exact, magnitude, layer.reduction, layer.dtype)
    g, pixels = layer.geometry, layer.geometry.pixels - layer.pixel_begin
    least_ns = min_work_ns(g, layer.pim, layer.dtype, layer.channels, pixels)
    bound_cycles = lower_bound(g, layer.pim, layer.dtype, layer.channels, pixels).cycles
    for schedule in layer.schedules:
        program = layer.lower(schedule)
        require_legal(program, layer)
        assert (abs(PimDevice(program, layer.image(program, w)).run(x) - exact) <= limit).all(), str(schedule)
        report = product_coverage(program)
        assert report.exact and report.products == layer.products, f"{schedule}: {report}"
        timing = time_program(program, layer.pim)
        assert timing.cycles >= bound_cycles and timing.time_ns >= least_ns
        assert LoopOrder.parse(str(schedule)) == schedule


SAME = Window(kernel=(3, 3), padding=(1, 1, 1, 1))
DEPTHWISE = GroupedLayer(x_shape=(1, 9, 8, 48), oc=48, groups=48, window=SAME, channels=3)


def replace_stream(program: PimProgram, channel: int, stream: list) -> PimProgram:
    channels = list(program.channels)
    channels[channel] = tuple(stream)
    return replace(program, channels=tuple(channels))


def test_real_products_count_and_zeros_do_not():
    program = DEPTHWISE.lower(DEPTHWISE.schedules[0])
    outputs = 9 * 8 * 48
    assert program.matrices == 3 and product_coverage(program).products == outputs * 9
    stream = flat(program.channels[0])
    for index in [i for i, node in enumerate(stream) if isinstance(node, Readres)][::5]:
        coverage_report = product_coverage(replace_stream(program, 0, stream[:index] + stream[index + 1 :]))
        assert not coverage_report.exact and coverage_report.missing >= 16 * 9
    # 16 outputs that are read once are 16 times 9 products of the layer, though 16 times 144 are formed.
    last = max(i for i, node in enumerate(stream) if isinstance(node, Readres))
    assert product_coverage(replace_stream(program, 0, stream[:last])).missing == 16 * 9


def test_what_belongs_to_another_matrix_is_foreign():
    program = DEPTHWISE.lower(DEPTHWISE.schedules[0])
    pixels = DEPTHWISE.geometry.pixels
    stream = flat(program.channels[0])
    place = next(i for i, node in enumerate(stream) if isinstance(node, Gwrite))
    moved = Affine((stream[place].pixel.base + pixels) % (3 * pixels))
    moved_stream = [*stream[:place], replace(stream[place], pixel=moved), *stream[place + 1 :]]
    coverage_report = product_coverage(replace_stream(program, 0, moved_stream))
    assert coverage_report.foreign >= 9 * 16 and not coverage_report.exact


def test_a_pixel_beyond_the_matrices_is_refused():
    program = DEPTHWISE.lower(DEPTHWISE.schedules[0])
    stream = flat(program.channels[0])
    index = next(i for i, node in enumerate(stream) if isinstance(node, Readres))
    beyond = replace(stream[index], pixel=Affine(3 * DEPTHWISE.geometry.pixels))
    with pytest.raises(ValueError, match=r"matrix 3\.\.3 of Readres is not in \[0, 3\)"):
        replace_stream(program, 0, [*stream[:index], beyond, *stream[index + 1 :]]).validate()
    part = replace(DEPTHWISE, pixel_begin=16).lower(DEPTHWISE.schedules[0])
    early = replace(stream[index], pixel=Affine(DEPTHWISE.geometry.pixels + 15))
    with pytest.raises(ValueError, match=r"pixel of its matrix 15\.\.15 of Readres"):
        replace_stream(part, 0, [*flat(part.channels[0]), early]).validate()
    wrong = program.to_json().replace('"matrices": 3', '"matrices": 5')
    with pytest.raises(TraceError, match="5 matrices do not go together with 48 groups"):
        PimProgram.from_json(wrong)


def test_weights_lie_on_the_diagonal_and_the_rest_is_zero():
    program = DEPTHWISE.lower(DEPTHWISE.schedules[0])
    _, w = DEPTHWISE.operands()
    image = memory_image(program, w.reshape(48, -1))
    assert isinstance(program.schedule, LoopOrder)
    slots = program.schedule.pixels
    assert np.count_nonzero(image.pages) == 48 * 9 * (program.columns_per_row // 9)
    assert slots <= program.columns_per_row // 9
    for bank, tap in itertools.product(range(16), range(9)):
        assert image.pages[1, bank, tap * 16 + bank] == np.float16(w[16 + bank].reshape(-1)[tap])


def test_sums_start_from_a_bias_of_their_channels():
    aim = PimSpec.load("aim-gddr6")
    layer = replace(DEPTHWISE, pim=aim, channels=4)
    x, w = layer.operands()
    bias = np.random.default_rng(1).standard_normal(48, np.float32)
    exact, magnitude = layer.reference_sums()
    for initial, start in (("bias", bias), ("add", np.broadcast_to(bias, (1, 9, 8, 48)).copy())):
        program = layer.lower(layer.schedules[0], initial)
        assert product_coverage(program).exact
        result = PimDevice(program, layer.image(program, w)).run(x, initial=start)
        begins = bias.astype(np.float16).astype(np.float64)
        limit = bound(exact + begins, magnitude + abs(begins), 10, "fp16")
        assert (abs(result - exact - begins) <= limit).all(), initial


def test_how_many_groups_are_worth_trying():
    newton = PimSpec.load("newton-gddr6")

    def group_counts(channels: int, taps: int, multiplier: int = 1) -> list[int]:
        g = ConvGeometry(
            n=1, h=7, w=7, c=channels, oc=multiplier * channels, kh=taps, kw=taps, groups=channels
        )
        return groups_per_matrix(g, newton, "fp16")

    assert group_counts(96, 3) == [16]
    assert group_counts(72, 3) == [12]
    assert group_counts(120, 5) == [15, 12]
    assert group_counts(32, 3, multiplier=4) == [4]
    assert group_counts(32, 3, multiplier=20)[0] == 1


def test_the_papers_compilers_have_no_order_for_it():
    for level in ("newton+", "newton++"):
        assert schedules(DEPTHWISE.geometry, DEPTHWISE.pim, "fp16", level) == []
    dense = LoopOrder(stationary="weight", buffers=4, pixels=3)
    with pytest.raises(UnsupportedOpError, match="does not fit"):
        replace(DEPTHWISE, channels=1).lower(replace(dense, together=7))
