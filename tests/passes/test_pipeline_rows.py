"""Does a run of convolutions in stages give the very bits of the run region by region, or a clear refusal?"""

from dataclasses import dataclass

import numpy as np
import pytest
import tvm
from by_numpy import evaluate_by_numpy
from graphs import as_module, conv2d_nhwc, inputs, names, operators, same_bits
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from length import examples
from tvm import relax
from tvm.script import relax as R

from pimflow.core.rewrite import Mode
from pimflow.core.stages import Pipeline
from pimflow.errors import PlanError
from pimflow.relay_passes.flat import main_bindings, operator, shape
from pimflow.relay_passes.regions.kernel_groups import kernel_groups
from pimflow.relay_passes.splits.pipeline_rows import PipelineRows

RNG = np.random.default_rng(0)
WIDE = RNG.standard_normal((16, 1, 1, 8), np.float32)
DEEP = RNG.standard_normal((16, 3, 3, 1), np.float32)
BIAS = RNG.standard_normal((1, 1, 1, 16), np.float32)
LAYOUT = {"data_layout": "NHWC", "kernel_layout": "OHWI"}
RUN = Pipeline(regions=("wide", "deep"), modes=(Mode.PIM, Mode.GPU), cuts=(2,))


@as_module
def PipelinedRowsBefore(x: R.Tensor((1, 4, 4, 8), "float32")):
    wide = conv2d_nhwc(x, WIDE)
    biased = R.add(wide, R.const(BIAS))
    deep = conv2d_nhwc(biased, DEEP, padding=1, groups=16)
    y = R.nn.relu(deep)
    return y


# Rows 0, 1 read rows 0..2 of ``wide``; rows 2, 3 read row 3 too, which the second stage computes.
@as_module
def PipelinedRowsExpected(x: R.Tensor((1, 4, 4, 8), "float32")):
    x0 = R.strided_slice(x, [1], [0], [3], assume_inbound=True)
    wide0 = conv2d_nhwc(x0, WIDE)
    x1 = R.strided_slice(x, [1], [3], [4], assume_inbound=True)
    wide1 = conv2d_nhwc(x1, WIDE)
    wide = R.concat((wide0, wide1), axis=1)
    biased0 = R.add(wide0, R.const(BIAS))
    deep0 = conv2d_nhwc(biased0, DEEP, padding=[1, 1, 0, 1], groups=16)
    y0 = R.nn.relu(deep0)
    read1 = R.strided_slice(wide, [1], [1], [4], assume_inbound=True)
    biased1 = R.add(read1, R.const(BIAS))
    deep1 = conv2d_nhwc(biased1, DEEP, padding=[0, 1, 1, 1], groups=16)
    y1 = R.nn.relu(deep1)
    y = R.concat((y0, y1), axis=1)
    return y


@pytest.mark.long
def test_rewrite():
    after = PipelineRows([RUN])(PipelinedRowsBefore)
    tvm.ir.assert_structural_equal(after, PipelinedRowsExpected)
    assert {"wide__stage0", "wide__stage1", "deep__stage0", "deep__stage1", "y"} <= {
        binding.var.name for binding in main_bindings(after)
    }
    assert same_bits(PipelinedRowsBefore, after)
    tvm.ir.assert_structural_equal(PipelineRows([RUN])(after), after)


@pytest.mark.parametrize("regions", [("wide", "other"), ("biased", "deep")])
def test_what_is_not_there_is_left_alone(regions):
    pipeline = Pipeline(regions=regions, modes=(Mode.PIM, Mode.GPU), cuts=(2,))
    tvm.ir.assert_structural_equal(PipelineRows([pipeline])(PipelinedRowsBefore), PipelinedRowsBefore)
    tvm.ir.assert_structural_equal(PipelineRows([])(PipelinedRowsBefore), PipelinedRowsBefore)


@pytest.mark.parametrize(
    ("regions", "modes", "cuts", "says"),
    [
        (("wide", "deep"), (Mode.PIM, Mode.GPU), (0,), "ascending rows of 1 to 3, not at \\[0\\]"),
        (("wide", "deep"), (Mode.PIM, Mode.GPU), (2, 2), "ascending"),
        (("wide", "deep"), (Mode.PIM, Mode.GPU), (4,), "ascending"),
        (("wide", "deep"), (Mode.PIM, Mode.GPU), (3,), "stage 1 computes no rows of region 0"),
        (("deep", "wide"), (Mode.PIM, Mode.GPU), (2,), "'wide' .*does not read the region before"),
        (("wide", "deep"), (Mode.PIM, Mode.PIM), (2,), "'wide' .*epilogue needs the GPU"),
    ],
)
def test_what_cannot_be_pipelined_is_refused(regions, modes, cuts, says):
    with pytest.raises(PlanError, match=says):
        PipelineRows([Pipeline(regions=regions, modes=modes, cuts=cuts)])(PipelinedRowsBefore)


@dataclass(frozen=True)
class ChainConvolution:
    """One region of a chain."""

    kernel: int
    stride: int
    padding: tuple[int, int]
    dilation: int
    depthwise: bool
    silu: bool  # whether it begins with one
    follows: str  # what its epilogue is

    def emit(self, builder: relax.BlockBuilder, x: relax.Var, name: str, residuals: list) -> relax.Var:
        channels = shape(x)[-1]
        out = channels if self.depthwise else 12 - channels  # 4 and 8 by turns
        per_group = 1 if self.depthwise else channels
        filters = RNG.standard_normal((out, self.kernel, 1, per_group), np.float32)
        if self.silu:
            x = builder.emit(relax.op.multiply(x, builder.emit(relax.op.sigmoid(x))))
        conv = relax.op.nn.conv2d(
            x,
            relax.const(filters),
            strides=(self.stride, 1),
            padding=[self.padding[0], 0, self.padding[1], 0],
            dilation=(self.dilation, 1),
            groups=channels if self.depthwise else 1,
            **LAYOUT,
        )
        y = builder.emit(conv, name_hint=name)
        if "bias" in self.follows:
            y = builder.emit(relax.op.add(y, relax.const(RNG.standard_normal(shape(y)[3:], np.float32))))
        if "map" in self.follows:
            y = builder.emit(relax.op.multiply(y, relax.const(RNG.standard_normal(shape(y), np.float32))))
        if "residual" in self.follows:
            rows = 1 if "broadcast" in self.follows else shape(y)[1]
            residuals.append(
                relax.Var(f"{name}_residual", relax.TensorType((1, rows, *shape(y)[2:]), "float32"))
            )
            y = builder.emit(relax.op.add(residuals[-1], y))
        return builder.emit(relax.op.nn.relu(y)) if "relu" in self.follows else y


FOLLOWS = st.sampled_from(
    ("", "bias", "bias relu", "residual", "bias residual relu", "map", "broadcast residual")
)
CONVOLUTION = st.builds(
    ChainConvolution,
    kernel=st.integers(1, 4),
    stride=st.integers(1, 2),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=st.integers(1, 2),
    depthwise=st.booleans(),
    silu=st.integers(0, 3).map(lambda n: n == 0),
    follows=FOLLOWS,
)


@st.composite
def runs(draw):
    """A chain of two to four convolutions, something after it, and a pipeline of it."""
    chain = draw(st.lists(CONVOLUTION, min_size=2, max_size=4))
    x = relax.Var("x", relax.TensorType((1, draw(st.integers(8, 24)), 2, 4), "float32"))
    builder, params = relax.BlockBuilder(), [x]
    height = shape(x)[1]
    for layer in chain:
        padded = height + sum(layer.padding) - (layer.kernel - 1) * layer.dilation
        assume(padded >= 1)
        height = (padded - 1) // layer.stride + 1
    assume(height >= 2)
    residuals: list[relax.Var] = []
    with builder.function("main"):
        with builder.dataflow():
            y = x
            for position, layer in enumerate(chain):
                y = layer.emit(builder, y, f"conv_{'abcd'[position]}", residuals)
            out = builder.emit_output(relax.op.negative(y))
        builder.emit_func_output(out, [*params, *residuals])
    cuts = sorted(draw(st.sets(st.integers(1, height - 1), min_size=1, max_size=7)))
    modes = draw(st.lists(st.sampled_from((Mode.GPU, Mode.PIM)), min_size=len(chain), max_size=len(chain)))
    for position, layer in enumerate(chain):
        if layer.silu or (position and chain[position - 1].follows and modes[position - 1] is Mode.PIM):
            modes[position] = Mode.GPU
    regions = tuple(f"conv_{letter}" for letter in "abcd"[: len(chain)])
    return builder.get(), Pipeline(regions=regions, modes=tuple(modes), cuts=tuple(cuts))


def apply_or_reject(mod: tvm.IRModule, run: Pipeline) -> tvm.IRModule:
    """`mod` in stages; examples that cannot be are left out."""
    try:
        return PipelineRows([run])(mod)
    except PlanError:
        assume(False)


@pytest.mark.long
@settings(max_examples=examples(60))
@given(runs())
def test_any_run_gives_the_same_bits_and_computes_no_row_twice(case):
    before, run = case
    after = apply_or_reject(before, run)
    stages = len(run.cuts) + 1
    assert operators(after).count("nn.conv2d") == stages * len(run.regions)
    operands = inputs(before)
    assert np.array_equal(evaluate_by_numpy(after, *operands), evaluate_by_numpy(before, *operands))
    rows = {name: 0 for name in run.regions}
    for binding in main_bindings(after):
        if operator(binding.value) == "nn.conv2d":
            rows[binding.var.name.split("__")[0]] += shape(binding.var)[1]
    original_rows = {name: 0 for name in run.regions} | {
        binding.var.name: shape(binding.var)[1]
        for binding in main_bindings(before)
        if operator(binding.value) == "nn.conv2d"
    }
    assert all(rows[name] <= original_rows[name] for name in rows)
    assert rows[run.regions[-1]] == original_rows[run.regions[-1]]


@settings(max_examples=examples(24))
@given(runs())
def test_parts_are_issued_as_soon_as_their_turn_comes(case):
    """A part of a region on the other device comes after the next part of the region before it."""
    before, run = case
    order = [name.split("__stage") for name in names(apply_or_reject(before, run), "nn.conv2d")]
    place_of = {(run.regions.index(name), int(stage)): place for place, (name, stage) in enumerate(order)}
    for (position, stage), place in place_of.items():
        if position:
            assert place_of[position - 1, stage] < place
        if position and stage < len(run.cuts):
            crosses_devices = run.modes[position] != run.modes[position - 1]
            assert (place_of[position - 1, stage + 1] < place) == crosses_devices


def test_parts_lie_in_their_tensor():
    """Rows of 4 * 16 elements begin at multiples of 64 bytes: nothing is copied, one kernel a part."""
    groups = kernel_groups(PipelineRows([RUN])(PipelinedRowsBefore))
    assert not any(group.copy_reasons for group in groups)
    assert sum(group.fusible for group in groups) == 4
    assert len(operators(PipelinedRowsBefore)) == 4
