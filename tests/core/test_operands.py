"""Devices whose multipliers take narrow weights: rows with their scales, and devices that widen."""

import dataclasses
import math

import pytest

from pimflow.errors import SpecError
from pimflow.hardware import PimSpec
from pimflow.hardware.operands import Operand
from pimflow.hardware.reader import spec_names

NARROW = ("newton-gddr6-narrow", "hbm-pim-narrow")
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
    scale_bytes = row.chunks * blocks * kind.scale_bytes
    assert row.scale_columns * spec.column_bytes >= scale_bytes > (row.scale_columns - 1) * spec.column_bytes
    used = math.ceil(values / (spec.column_bytes * 8 // kind.bits)) + row.scale_columns
    assert used <= spec.columns_per_row
    assert values * kind.bits <= 8 * (spec.columns_per_row - row.scale_columns) * spec.column_bytes


@pytest.mark.parametrize(("name", "operand"), OPERANDS, ids=lambda value: getattr(value, "weights", value))
def test_the_device_of_narrow_weights_charges_vectors_and_scales(name, operand):
    spec = PimSpec.load(name)
    narrow, row = spec.with_weights(operand.weights, "fp16"), spec.narrow_row(operand)
    assert narrow.with_weights(operand.weights, "fp16") is narrow and narrow.digest != spec.digest
    assert narrow.elements_per_column("fp16") == operand.multiplications
    assert narrow.vector_bursts("fp16") == -(-operand.multiplications * 2 // spec.column_bytes)
    assert narrow.buffer_columns * narrow.vector_bursts("fp16") <= spec.buffer_columns
    cycles = row.scale_columns * spec.timing["nCCDS"]
    assert narrow.timing["nRCDR"] == spec.timing["nRCDR"] + cycles
    assert narrow.energy["activate_pj"] == pytest.approx(
        spec.energy["activate_pj"] + row.scale_columns * spec.energy["column_read_pj"]
    )
    assert narrow.bytes_per_channel == narrow.banks * narrow.usable_rows * row.comps * spec.column_bytes


def test_operands_are_checked():
    fields = dataclasses.asdict(PimSpec.load(NARROW[0]).operands[-1])
    for changes in ({"weights": "q9"}, {"scales": "none"}, {"multiplications": 0}, {"accumulator": "int4"}):
        with pytest.raises(ValueError, match=next(iter(changes)) if "scales" not in changes else "scales"):
            Operand(**fields | changes)


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
