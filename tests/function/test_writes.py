"""WRITE by value: what it puts into banks, and what products make of it."""

from dataclasses import replace

import numpy as np
import pytest
from calibration.pim_device import PimDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples

from pimflow.core.commands import Affine, Comp, GAct, Gwrite, Readres, Write
from pimflow.core.kernel import ConvGeometry
from pimflow.core.program import MemoryImage, PimProgram
from pimflow.errors import TraceError, UsageError
from pimflow.pim_backend.programs.layout import NUMPY_DTYPE

GANGS, BANKS, COLUMNS, ELEMENTS, ROWS = 2, 4, 8, 4, 3


def write_program(nodes, dtype="fp16", pixels=2, reduction=64) -> PimProgram:
    return PimProgram(
        region="cache",
        pim="newton-gddr6",
        dtype=dtype,
        geometry=ConvGeometry(n=pixels, h=1, w=1, c=reduction, oc=BANKS),
        pixel_begin=0,
        pixel_end=pixels,
        banks=BANKS,
        gangs=GANGS,
        columns_per_row=COLUMNS,
        elements_per_column=ELEMENTS,
        buffers=1,
        readres_bursts=1,
        row_begin=5,
        rows=ROWS,
        channels=(tuple(nodes),),
    )


def image(dtype: str) -> MemoryImage:
    lanes = np.zeros((ROWS, COLUMNS * ELEMENTS, BANKS), NUMPY_DTYPE[dtype])
    table = np.arange(ROWS, dtype=np.int32)[None]
    return MemoryImage(row_begin=5, pages=lanes.swapaxes(1, 2), table=table)


@st.composite
def writes(draw) -> Write:
    banks = draw(st.integers(1, BANKS // GANGS))
    count, elements = draw(st.integers(1, COLUMNS)), draw(st.integers(1, ELEMENTS))
    return Write(
        gang=draw(st.integers(0, GANGS - 1)),
        bank=draw(st.integers(0, BANKS // GANGS - banks)),
        banks=banks,
        row=Affine(5 + draw(st.integers(0, ROWS - 1))),
        column=Affine(draw(st.integers(0, COLUMNS - count))),
        count=count,
        element=draw(st.integers(0, ELEMENTS - elements)),
        elements=elements,
        pixel=Affine(draw(st.integers(0, 1))),
        k=Affine(draw(st.integers(0, 63))),
    )


@settings(max_examples=examples(60))
@given(st.lists(writes(), min_size=1, max_size=6), st.sampled_from(("fp16", "bf16", "fp32", "int8")))
def test_cells_hold_what_was_written(stored, dtype):
    rng = np.random.default_rng(0)
    x = rng.integers(-99, 99, (2, 1, 1, 64)) if dtype == "int8" else rng.standard_normal((2, 1, 1, 64)) * 1e-3
    x = x.astype(np.int8 if dtype == "int8" else np.float32)
    memory = image(dtype)
    nodes = [node for write in stored for node in (GAct(gang=write.gang, row=write.row), write)]
    PimDevice(write_program(nodes, dtype), memory).run(x)
    expected = np.zeros((ROWS, BANKS, COLUMNS, ELEMENTS), NUMPY_DTYPE[dtype])
    for w in stored:
        vector = np.append(x[w.pixel.base, 0, 0], np.zeros(256, x.dtype))[w.k.base :]
        values = vector[: w.banks * w.count * w.elements].reshape(w.banks, w.count, w.elements)
        bank, column = BANKS // GANGS * w.gang + w.bank, w.column.base
        place = (slice(bank, bank + w.banks), slice(column, column + w.count))
        expected[w.row.base - 5][(*place, slice(w.element, w.element + w.elements))] = values
    assert np.ascontiguousarray(memory.pages).tobytes() == expected.tobytes()


def test_a_product_sees_what_was_written_before_it():
    """In the open row too, whose columns were used already."""
    row = Affine(5)
    read = Readres(buffer=0, pixel=Affine(0), channel=Affine(0))
    product = (Comp(buffer=0, row=row, column=Affine(0), count=1), read)
    second_product = (product[0], replace(read, pixel=Affine(1)))
    store = Write(
        gang=1, bank=1, banks=1, row=row, column=Affine(0), count=1, element=1, elements=2,
        pixel=Affine(1), k=Affine(4),
    )  # fmt: skip
    opened = (GAct(gang=0, row=row), GAct(gang=1, row=row))
    first = Gwrite(buffer=0, pixel=Affine(0), pixels=1, k=Affine(0), columns=1)
    x = np.zeros((2, 1, 1, 64), np.float32)
    x[0, 0, 0, :4], x[1, 0, 0, 4:6] = (1, 10, 100, 1000), (2, 3)
    out = PimDevice(write_program((first, *opened, *product, store, *second_product)), image("fp16")).run(x)
    assert out.tolist() == [[0, 0, 0, 0], [0, 0, 0, 320]]


def test_rows_that_are_lacking_or_shared_are_not_written():
    store = Write(
        gang=0, bank=0, banks=1, row=Affine(5), column=Affine(0), count=1, element=0, elements=1,
        pixel=Affine(0), k=Affine(0),
    )  # fmt: skip
    program, memory = write_program((GAct(gang=0, row=Affine(5)), store)), image("fp16")
    for page, problem in ((-1, "lacks some"), (1, "holds once for several")):
        table = np.array([[page, 1, 2]], np.int32)
        with pytest.raises(UsageError, match=problem):
            PimDevice(program, replace(memory, table=table))
    for wrong in (
        {"bank": 1, "banks": 2},
        {"row": Affine(8)},
        {"column": Affine(8)},
        {"element": 3, "elements": 2},
        {"pixel": Affine(2)},
        {"elements": 0},
    ):
        with pytest.raises(TraceError):
            PimDevice(write_program((GAct(gang=0, row=Affine(5)), replace(store, **wrong))), memory)


def test_a_file_keeps_it():
    store = Write(
        gang=0, bank=0, banks=2, row=Affine(5), column=Affine(0), count=1, element=0, elements=1,
        pixel=Affine(0), k=Affine(3),
    )  # fmt: skip
    program = replace(write_program((GAct(gang=0, row=Affine(5)), store)), matrices=2, lanes=2)
    text = program.to_json()
    assert PimProgram.from_json(text) == program and '"WRITE", 0, 0, 2, [5], [0], 1, 0, 1, [0], [3]' in text
