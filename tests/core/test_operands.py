"""Devices whose multipliers take narrow weights: rows with their scales, and devices that widen."""

import dataclasses
import math

import numpy as np
import pytest
from calibration.pim_device import PimDevice

from pimflow.core.kernel import ConvGeometry
from pimflow.core.program import PimProgram
from pimflow.errors import SpecError
from pimflow.hardware import PimSpec
from pimflow.hardware.operands import Operand
from pimflow.hardware.reader import spec_names
from pimflow.pim_backend.programs.layout import memory_image
from pimflow.pim_backend.programs.lowering import ProgramRequest
from pimflow.placement.costs.pim_runs import PimTarget
from pimflow.simulators.pim.coverage import program_coverage
from pimflow.simulators.pim.legality import program_violations_by_rule
from pimflow.simulators.profiler import BuiltIn

NARROW = ("newton-gddr6-narrow", "hbm-pim-narrow", "hbm4-pim", "lpddr5x-pim", "lpddr6-pim")
OPERANDS = [(name, operand) for name in NARROW for operand in PimSpec.load(name).operands]


def test_devices_that_are_sold_take_their_own_types_only():
    for name in spec_names("pim"):
        spec = PimSpec.load(name)
        assert bool(spec.operands) == (name in NARROW)
        assert all("assumed" in operand.source for operand in spec.operands)
        if not spec.operands:
            assert spec.with_weights("q4_0", "fp16") is spec and "operands" not in spec.to_json()


@pytest.mark.parametrize(("name", "operand"), OPERANDS, ids=lambda value: getattr(value, "weights", value))
def test_a_row_has_room_for_its_values_and_their_scales(name, operand):
    spec = PimSpec.load(name)
    row, kind = spec.narrow_row(operand), operand.weight_type
    values = row.comps * operand.multiplications
    blocks = -(-row.buffer_columns * operand.multiplications // kind.block) if kind.block else 1
    scale_bytes = row.chunks * blocks * kind.scale_bytes * (operand.scales == "unit")
    assert row.scale_columns == math.ceil(scale_bytes / spec.column_bytes)
    used = math.ceil(values / (spec.column_bytes * 8 // kind.bits)) + row.scale_columns
    assert used <= spec.columns_per_row
    assert values * kind.bits <= 8 * (spec.columns_per_row - row.scale_columns) * spec.column_bytes


@pytest.mark.parametrize(("name", "operand"), OPERANDS, ids=lambda value: getattr(value, "weights", value))
def test_the_device_of_narrow_weights_charges_vectors_and_scales(name, operand):
    spec = PimSpec.load(name)
    pair, row = (operand.weights, operand.activations), spec.narrow_row(operand)
    narrow, dtype = spec.with_weights(*pair), operand.container
    assert narrow.with_weights(*pair) is narrow and narrow.digest != spec.digest
    assert narrow.elements_per_column(dtype) == operand.multiplications
    bits = {"fp16": 16, "int4": 4}.get(operand.activations, 8)
    assert narrow.vector_bursts(dtype) == -(-operand.multiplications * bits // (8 * spec.column_bytes))
    if operand.buffer_elements:
        assert row.buffer_columns * operand.multiplications <= operand.buffer_elements
    else:
        assert narrow.buffer_columns * narrow.vector_bursts(dtype) <= spec.buffer_columns
    cycles = row.scale_columns * spec.timing["nCCDS"]
    assert narrow.timing["nRCDR"] == spec.timing["nRCDR"] + cycles
    scales_pj = row.scale_columns * spec.energy["column_read_pj"]
    assert narrow.energy["activate_pj"] == pytest.approx(spec.energy["activate_pj"] + scales_pj)
    assert narrow.bytes_per_channel == narrow.banks * narrow.usable_rows * row.comps * spec.column_bytes


def test_operands_are_checked():
    fields = dataclasses.asdict(PimSpec.load(NARROW[0]).operands[-1])
    for changes in (
        *({"weights": "q9"}, {"scales": "none"}, {"multiplications": 0}, {"accumulator": "int4"}),
        *({"accumulator": "int32"}, {"scales": "result"}, {"activations": "q8_0"}, {"buffer_elements": -1}),
    ):
        with pytest.raises(ValueError, match=next(iter(changes))):
            Operand(**fields | changes)


def test_integer_operands_are_exact_by_value():
    """W8A8, W4A8 and W4A4: int32 sums of small integers, on every device that takes them."""
    draw = np.random.default_rng(1)
    for name in NARROW:
        pim = PimSpec.load(name)
        for operand in (operand for operand in pim.operands if operand.accumulator == "int32"):
            types = {"weights": operand.weights, "activations": operand.activations}
            geometry = ConvGeometry(n=1, h=1, w=1, c=5000, oc=40, **types)
            target = PimTarget(pim=pim, channels=2, dtype="fp16", profiler=BuiltIn())
            for order in target.rank_schedules(geometry, "layer")[:2]:
                program = target.program(ProgramRequest("layer", geometry, order))
                assert PimProgram.from_json(program.to_json()) == program and program.dtype == "int8"
                assert program_coverage(program).exact and pim.is_target_of(program)
                assert not any(program_violations_by_rule(program, pim).values())
                tops = {8: 127, 4: 7}[operand.weight_type.bits], {"int8": 127, "int4": 7}[operand.activations]
                w, x = (draw.integers(-n, n + 1, shape) for n, shape in zip(tops, ((40, 5000), 5000)))
                image = memory_image(program, w.astype(np.int8))
                y = PimDevice(program, image).run(x.astype(np.int8).reshape(1, 1, 1, -1))
                np.testing.assert_array_equal(y[0], w @ x)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('as = "newton"', "no other embedded device 'newton' to begin as"),
        ('as = "hbm-pim-narrow"', "begins as another device itself"),
        ('as = "newton-gddr6"\nweights = "q4_0"', "unknown field 'weights'"),
        ('as = "newton-gddr6"\n[[operands]]\nweights = "q4_0"', "missing fields"),
    ],
)
def test_a_file_that_begins_as_another(tmp_path, text, says):
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=says):
        PimSpec.load(path)
    path.write_text('as = "newton-gddr6"\ndescription = "mine"\n[timing]\nnRP = 12')
    own = PimSpec.load(path)
    newton = PimSpec.load("newton-gddr6")
    assert own.timing == newton.timing | {"nRP": 12} and own.description == "mine" and own.name == "own"
    assert own.sources["timing.nRC"] == newton.sources["timing.nRC"]
