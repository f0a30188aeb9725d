"""Is what a program computes for its layer counted right? A changed command must show, if it matters."""

import itertools
import json
from dataclasses import replace

import pytest
from calibration.pim_device import PimDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import NEWTON, SHORT, PimLayer, expand_program, first, flat, layers, small_buffer_program
from length import examples
from reference import Window, convolve

from pimflow.commands.main import main
from pimflow.compiler.verification import inexact_products
from pimflow.core.commands import Affine, Comp, GAct, Gwrite, Loop, Readres
from pimflow.core.program import PimProgram
from pimflow.errors import TraceError
from pimflow.simulators.pim import coverage as coverage_module
from pimflow.simulators.pim.coverage import product_coverage

SAME = Window(kernel=(3, 3), padding=(1, 1, 1, 1))
# Rows of several buffers, reductions of several rows, and tiles that are not full.
LAYERS = {
    "pointwise": PimLayer(x_shape=(1, 5, 6, 120), oc=40, channels=2),
    "padded": PimLayer(x_shape=(1, 5, 5, 20), oc=48, window=SAME, channels=3, row_begin=9),
    "three rows": PimLayer(x_shape=(1, 1, 1, 1344), oc=64, channels=2),
    "small buffers": PimLayer(x_shape=(1, 4, 4, 100), oc=33, pim=SHORT, dtype="int8"),
}
CASES = [
    pytest.param(layer, schedule, id=f"{name}, {schedule}")
    for name, layer in LAYERS.items()
    for schedule in layer.schedules[:2]
]
PLAIN = LAYERS["pointwise"]


def with_stream(program: PimProgram, channel: int, stream: list) -> PimProgram:
    channels = list(program.channels)
    channels[channel] = tuple(stream)
    return replace(program, channels=tuple(channels))


@given(layers(most_channels=4), st.data())
@settings(max_examples=examples(40))
def test_every_lowered_program_is_exact(layer, data):
    program = layer.lower(data.draw(st.sampled_from(layer.schedules)))
    coverage_report = product_coverage(program)
    outputs = (program.pixel_end - program.pixel_begin) * layer.oc
    assert coverage_report.exact and coverage_report.products == outputs * layer.reduction


@pytest.mark.parametrize("columns", (1, 4, 8))
def test_buffers_that_are_written_piece_by_piece(columns):
    assert product_coverage(
        small_buffer_program(PimLayer(x_shape=(1, 3, 3, 300), oc=20, pim=SHORT), columns)
    ).exact


@pytest.mark.parametrize("layer, schedule", CASES)
def test_loops_are_what_they_expand_to(layer, schedule):
    program = layer.lower(schedule)
    assert product_coverage(expand_program(program)) == product_coverage(program)


@pytest.mark.parametrize("layer, schedule", CASES)
def test_a_deleted_command_is_missed(layer, schedule):
    program = layer.lower(schedule)
    stream = flat(program.channels[0])
    for kind in (Gwrite, GAct, Comp, Readres):
        index = first(stream, kind)
        report = product_coverage(with_stream(program, 0, stream[:index] + stream[index + 1 :]))
        assert report.missing > 0, kind
    comp = stream[first(stream, Comp)]
    lanes = min(program.tile_banks, layer.oc)
    products = lanes * min(comp.count * program.elements_per_column, layer.reduction)
    index = first(stream, Comp)
    report = product_coverage(with_stream(program, 0, stream[:index] + stream[index + 1 :]))
    assert (report.missing, report.repeated, report.foreign, report.unread) == (products, 0, 0, 0)


@pytest.mark.parametrize("layer, schedule", CASES)
def test_a_doubled_command_is_counted(layer, schedule):
    program = layer.lower(schedule)
    stream = flat(program.channels[0])
    for kind in (Comp, Readres):
        i = first(stream, kind)
        report = product_coverage(with_stream(program, 0, [*stream[:i], stream[i], *stream[i:]]))
        assert report.repeated > 0 and (report.missing > 0) == (kind is Readres), kind
    for kind in (Gwrite, GAct):  # they write the same values again
        i = first(stream, kind)
        assert product_coverage(with_stream(program, 0, [*stream[:i], stream[i], *stream[i:]])).exact


SHIFTS = {
    "pixel of a GWRITE": (Gwrite, lambda node: replace(node, pixel=Affine(node.pixel.base + 1))),
    "element of a GWRITE": (Gwrite, lambda node: replace(node, k=Affine(node.k.base + 1))),
    "row of a G_ACT": (GAct, lambda node: replace(node, row=Affine(node.row.base + 1))),
    "row of a COMP": (Comp, lambda node: replace(node, row=Affine(node.row.base + 1))),
    "column of a COMP": (Comp, lambda node: replace(node, column=Affine(node.column.base + 1))),
    "buffer of a COMP": (Comp, lambda node: replace(node, buffer=1 - min(node.buffer, 1))),
    "pixel of a READRES": (Readres, lambda node: replace(node, pixel=Affine(node.pixel.base + 1))),
    "channel of a READRES": (Readres, lambda node: replace(node, channel=Affine(node.channel.base + 1))),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SHIFTS)
@pytest.mark.parametrize("layer, schedule", CASES)
def test_a_shifted_command_is_not_exact(layer, schedule, name):
    kind, shift = SHIFTS[name]
    program = layer.lower(schedule)
    stream = flat(program.channels[0])
    index = first(stream, kind)
    coverage_report = product_coverage(
        with_stream(program, 0, [*stream[:index], shift(stream[index]), *stream[index + 1 :]])
    )
    assert not coverage_report.exact and coverage_report.missing > 0


@pytest.mark.long
@pytest.mark.parametrize("name", SHIFTS)
@pytest.mark.parametrize("layer, schedule", CASES)
def test_channels_that_differ_in_place_are_counted_as_each_alone(monkeypatch, layer, schedule, name):
    kind, shift = SHIFTS[name]
    program = layer.lower(schedule)
    for channel, nodes in enumerate(program.channels):
        stream = flat(nodes)
        index = first(stream, kind)
        program = with_stream(program, channel, [*stream[:index], shift(stream[index]), *stream[index + 1 :]])
    counts, digests = product_coverage(program), map(str, itertools.count())
    monkeypatch.setattr(coverage_module, "_relative_commands", lambda *_: (0, next(digests)))
    assert product_coverage(program) == counts and not counts.exact


@pytest.mark.long
@given(st.sampled_from([case.values for case in CASES]), st.data())
@settings(max_examples=examples(150))
def test_what_computes_wrong_values_is_not_exact(case, data):
    """Values are the judge: whatever one edit makes of them, the count says so."""
    layer, schedule = case
    layer = replace(layer, dtype="int8")
    program = layer.lower(layer.schedules[0] if layer.dtype != case[0].dtype else schedule)
    channel = data.draw(st.integers(0, layer.channels - 1))
    stream = flat(program.channels[channel])
    index = data.draw(st.integers(0, len(stream) - 1))
    node = stream[index]
    fields = [name for name in node.__slots__ if name not in ("count", "columns", "pixels")]
    field, offset = data.draw(st.sampled_from(fields)), data.draw(st.sampled_from((-2, -1, 1, 2)))
    value = getattr(node, field)
    moved = Affine(value.base + offset) if isinstance(value, Affine) else value + offset
    edit = data.draw(st.sampled_from(("delete", "double", "move", "swap")))
    rest = stream[index + 1 :]
    mutant = {
        "delete": [*stream[:index], *rest],
        "double": [*stream[:index], node, node, *rest],
        "move": [*stream[:index], replace(node, **{field: moved}), *rest],
        "swap": [*stream[:index], *rest[:1], node, *rest[1:]],
    }[edit]
    x, w = layer.operands()
    try:
        wrong = with_stream(program, channel, mutant)
        wrong.validate()
        got = PimDevice(wrong, layer.image(program, w)).run(x, threads=1)
    except (TraceError, ValueError):
        return
    exact, _ = convolve(x, w, layer.window, layer.dtype)
    if not (got == exact[layer.pixels]).all():
        assert not product_coverage(wrong).exact


def test_what_nobody_could_follow_is_not_counted(monkeypatch):
    program = PLAIN.lower(PLAIN.schedules[0])
    monkeypatch.setattr(coverage_module, "MAX_RUNS", 3)
    assert product_coverage(program) is None
    endless = replace(program, channels=((Loop(extent=1 << 30, body=program.channels[0]),),))
    monkeypatch.undo()
    assert product_coverage(endless) is None


def test_a_program_may_be_for_another_order_and_place():
    """Nothing of our lowering is asked for: one pixel after the other, weights where they like."""
    layer = PimLayer(x_shape=(1, 2, 2, 32), oc=32, pim=NEWTON)
    program = layer.lower(layer.schedules[0])
    nodes = []
    for pixel in (3, 0, 2, 1):
        for tile in (1, 0):
            row = Affine(1 - tile)
            nodes += [GAct(gang=gang, row=row) for gang in range(program.computing_gangs)]
            for column in (1, 0):
                k = Affine(16 * column)
                nodes.append(Gwrite(buffer=0, pixel=Affine(pixel), pixels=1, k=k, columns=1))
                place = Affine(32 * (column == 1) // program.elements_per_column * program.buffer_columns)
                nodes.append(Comp(buffer=0, row=row, column=place, count=1))
            nodes.append(Readres(buffer=0, pixel=Affine(pixel), channel=Affine(tile * program.tile_banks)))
    reordered = replace(program, channels=(tuple(nodes),), rows=2, columns_per_row=4 * program.buffer_columns)
    reordered.validate()
    assert product_coverage(reordered).exact


@pytest.mark.parametrize("exact", (True, False))
def test_simulate_says_it(capsys, tmp_path, exact):
    program = PLAIN.lower(PLAIN.schedules[0])
    stream = flat(program.channels[0])
    index = first(stream, Readres)
    del stream[index : index + (not exact)]
    path = tmp_path / "layer.pimprog"
    path.write_text(with_stream(program, 0, stream).to_json(), encoding="utf-8")
    assert main(["simulate", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["timing_violations"] == 0
    products = report["products"]
    assert products["products"] == program.geometry.macs and (products["missing"] == 0) == exact
    assert main(["simulate", str(path)]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert ("each of 144000 products formed once" in line) == exact == ("missing" not in line)


def test_verification_names_the_region():
    program = PLAIN.lower(PLAIN.schedules[0])
    stream = flat(program.channels[0])
    short = with_stream(program, 0, stream[: first(stream, Readres)])
    assert inexact_products([program]) == {}
    (said,) = inexact_products([short]).values()
    assert said == str(product_coverage(short)) and "missing" in said
