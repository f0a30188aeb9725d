"""Programs as text, as words and as commands: the same thing thrice, and nothing malformed gets in."""

import itertools
import json
import pickle
from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest
from calibration.pim_device import PimDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import PimLayer, layers
from length import examples
from reference import STORAGE, Window

from pimflow.core.commands import MAX_DEPTH, Affine, Comp, GAct, Gwrite, Loop, Node, Readres, residues
from pimflow.core.program import MemoryImage, PimProgram
from pimflow.errors import TraceError

LAYER = PimLayer(x_shape=(1, 4, 4, 20), oc=20, window=Window(kernel=(3, 3), padding=(1, 1, 1, 1)), channels=2)
LOWERED = LAYER.lower(LAYER.schedules[0])
ROWS, COLUMNS, PIXELS = 40, 32, 16


def affines(depth: int, end: int) -> st.SearchStrategy[Affine]:
    """Below `end` in loops of at most three rounds, falling as well as rising."""
    step = (end - 1) // (4 * MAX_DEPTH)
    coefficients = st.lists(st.integers(-step, step), max_size=depth).map(tuple)
    return st.builds(Affine, st.integers(end // 2 - step, end // 2), coefficients)


def nodes(depth: int) -> st.SearchStrategy:
    buffer = st.integers(0, 3)
    kinds = [
        st.builds(
            Gwrite,
            buffer=buffer,
            pixel=affines(depth, PIXELS),
            pixels=st.integers(1, 2),
            k=affines(depth, LAYER.reduction),
            columns=st.integers(1, 16),
        ),
        st.builds(GAct, gang=buffer, row=affines(depth, ROWS)),
        st.builds(
            Comp,
            buffer=buffer,
            row=affines(depth, ROWS),
            column=affines(depth, COLUMNS),
            count=st.integers(1, 8),
        ),
        st.builds(Readres, buffer=buffer, pixel=affines(depth, PIXELS), channel=affines(depth, LAYER.oc)),
    ]
    if depth < MAX_DEPTH:
        body = st.deferred(lambda: st.lists(nodes(depth + 1), max_size=3).map(tuple))
        kinds.append(st.builds(Loop, extent=st.integers(1, 3), body=body))
    return st.one_of(kinds)


programs = st.one_of(
    st.lists(st.lists(nodes(0), max_size=5).map(tuple), min_size=1, max_size=3).map(
        lambda streams: replace(LOWERED, rows=ROWS, channels=tuple(streams))
    ),
    layers().flatmap(lambda layer: st.sampled_from(layer.schedules).map(layer.lower)),
)


@pytest.mark.long
@settings(max_examples=examples(200))
@given(programs)
def test_text_round_trips(program):
    text = program.to_json()
    reread = PimProgram.from_json(text)
    assert reread == program
    assert reread.to_json() == text
    json.loads(text)


def decode_words(words: np.ndarray, readres_bursts: int, counters: tuple[int, ...] = ()) -> list[tuple]:
    """Commands of encoded words, by the format that ``simulators/src/program.h`` documents."""
    commands: list[tuple] = []
    padded = np.zeros(MAX_DEPTH, np.int64)
    padded[: len(counters)] = counters

    def address(operand: int) -> int:
        return int(node[operand] + node[operand + 1 : operand + 1 + MAX_DEPTH] @ padded)

    start, affine = 0, 1 + MAX_DEPTH
    while start < len(words):
        node = words[start : start + words[start + 1]]
        kind, operand = node[0], node[2]
        if kind == 0:
            for i in range(operand):
                commands += decode_words(node[3:], readres_bursts, (*counters, i))
        elif kind == 1:
            bursts = node[3 + affine] * node[4 + 2 * affine]
            commands.append(("GWRITE", -1, operand, -1, -1, bursts))
        elif kind == 2:
            commands.append(("G_ACT", operand, -1, address(3), -1, 0))
        elif kind == 3:
            row, begin = address(3), address(3 + affine)
            commands += [("COMP", -1, operand, row, c, 0) for c in range(begin, begin + node[3 + 2 * affine])]
        else:
            commands.append(("READRES", -1, operand, -1, -1, readres_bursts))
        start += int(node[1])
    assert start == len(words)
    return commands


@settings(max_examples=examples(60))
@given(programs)
def test_words_are_the_commands(program):
    words, offsets = program.program_words()
    assert len(offsets) == len(program.channels) + 1
    assert offsets[-1] == len(words)
    for channel in range(len(program.channels)):
        commands = decode_words(words[offsets[channel] : offsets[channel + 1]], program.readres_bursts)
        expected = list(program.commands(channel))
        assert Counter(c[0] for c in commands) == Counter(c.name for c in expected)
        assert commands == [(c.name, c.gang, c.buffer, c.row, c.column, c.bursts) for c in expected]


def test_what_was_printed_is_found_while_it_lives():
    program = replace(LOWERED, region="printed")
    text = program.to_json()
    assert PimProgram.from_printed_text("".join(text)) is program and PimProgram.from_json(text) == program
    assert PimProgram.from_printed_text(text.replace("printed", "other")) is None
    del program
    assert PimProgram.from_printed_text(text) is None


def test_what_was_printed_is_validated():
    program = replace(LOWERED, channels=((GAct(gang=LOWERED.gangs, row=Affine(0)),),))
    for read in (PimProgram.from_printed_text, PimProgram.from_json):
        with pytest.raises(TraceError, match="channel 0: gang"):
            read(program.to_json())


# ---- what is not a program ----


def deepest(levels: int, *commands: Node) -> PimProgram:
    for _ in range(levels):
        commands = (Loop(extent=1, body=commands),)
    return replace(LOWERED, channels=(commands,))


@pytest.mark.parametrize("commands", [(Readres(buffer=0, pixel=Affine(0), channel=Affine(0)),), ()])
def test_depth_is_bounded(commands):
    deepest(MAX_DEPTH, *commands).validate()
    with pytest.raises(ValueError, match=f"channel 0: loops are nested deeper than {MAX_DEPTH}"):
        deepest(MAX_DEPTH + 1, *commands).validate()


@pytest.mark.parametrize("depth", range(MAX_DEPTH + 1))
@pytest.mark.parametrize(
    "make, what",
    [
        (lambda a: Gwrite(buffer=0, pixel=a, pixels=1, k=Affine(0), columns=1), "pixel of Gwrite"),
        (lambda a: Gwrite(buffer=0, pixel=Affine(0), pixels=1, k=a, columns=1), "element of Gwrite"),
        (lambda a: GAct(gang=0, row=a), "row of GAct"),
        (lambda a: Comp(buffer=0, row=a, column=Affine(0), count=1), "row of Comp"),
        (lambda a: Comp(buffer=0, row=Affine(0), column=a, count=1), "column of Comp"),
        (lambda a: Readres(buffer=0, pixel=a, channel=Affine(0)), "pixel of Readres"),
        (lambda a: Readres(buffer=0, pixel=Affine(0), channel=a), "output channel of Readres"),
    ],
)
def test_affines_use_only_enclosing_loops(depth, make, what):
    for used in range(MAX_DEPTH + 2):
        node = make(Affine(0, (0,) * used))
        for _ in range(depth):
            node = Loop(extent=2, body=(node,))
        program = replace(LOWERED, channels=((), (node,)))
        if used <= depth:
            program.validate()
        else:
            with pytest.raises(ValueError, match=f"channel 1: {what} uses more loops than enclose it"):
                program.validate()


def test_ranges_are_of_all_rounds():
    """A command is out of range if any round of its loops is, at either end."""

    def row_program(base: int, *coefficients: int) -> PimProgram:
        node = GAct(gang=0, row=Affine(base, coefficients))
        for extent in (4, 3)[: len(coefficients)]:
            node = Loop(extent=extent, body=(node,))
        return replace(LOWERED, row_begin=10, rows=8, channels=((node,),))

    for legal in (
        row_program(10),
        row_program(17),
        row_program(10, 2),
        row_program(17, -2),
        row_program(13, 2, -1),
        row_program(10, 2, 1),
    ):
        legal.validate()
    for program, reach in (
        (row_program(9), "9..9"),
        (row_program(18), "18..18"),
        (row_program(12, 2), "12..18"),
        (row_program(15, -2), "9..15"),
        (row_program(12, 2, -1), "9..16"),
    ):
        with pytest.raises(ValueError, match=f"row {reach} of GAct is not in \\[10, 18\\)"):
            program.validate()


@settings(max_examples=examples(200))
@given(
    st.integers(0, 30),
    st.lists(st.tuples(st.integers(-9, 9), st.integers(1, 6)), max_size=4),
    st.integers(1, 12),
)
def test_residues_are_those_of_all_rounds(base, loops, size):
    affine = Affine(base, tuple(c for c, _ in loops))
    extents = tuple(n for _, n in loops)
    rounds = itertools.product(*map(range, extents))
    assert residues(affine, extents, size) == sum(1 << r for r in {affine.value(i) % size for i in rounds})


def test_small_buffers_are_not_overrun():
    def with_node(node, *extents: int, columns: int = 8) -> PimProgram:
        for extent in extents:
            node = Loop(extent=extent, body=(node,))
        return replace(LOWERED, channels=((node,),), buffer_columns=columns)

    def comp(count: int, base: int, *coefficients: int) -> Comp:
        return Comp(buffer=0, row=Affine(0), column=Affine(base, coefficients), count=count)

    def write(columns: int, pixels: int = 1) -> Gwrite:
        return Gwrite(buffer=0, pixel=Affine(0), pixels=pixels, k=Affine(0), columns=columns)

    for legal in (
        with_node(write(8)),
        with_node(write(4, 2)),
        with_node(comp(8, 24)),
        with_node(comp(3, 5)),
        with_node(comp(5, 0, 3), 2),
        with_node(comp(8, 0, 8), 4),
        with_node(comp(2, 6, -6), 2),
        with_node(comp(32, 0), columns=32),
        with_node(comp(32, 0), columns=40),
    ):
        legal.validate()
    for program, message in (
        (with_node(write(9)), "column 8..8 of Gwrite is not in"),
        (with_node(write(3, 3)), "column 8..8 of Gwrite is not in"),
        (with_node(comp(9, 0)), "9 columns of Comp from 0 of the buffer on leave its 8"),
        (with_node(comp(4, 5)), "4 columns of Comp from 5 of the buffer on leave its 8"),
        (with_node(comp(6, 0, 3), 2), "6 columns of Comp from 3 of the buffer on leave its 8"),
        (with_node(comp(3, 0, 3), 3), "3 columns of Comp from 6 of the buffer on leave its 8"),
        (with_node(comp(1, 0), columns=0), "'buffer_columns'"),
        (with_node(comp(1, 0), columns=2**28), "buffers \\* buffer_columns \\* elements_per_column"),
        (replace(with_node(comp(1, 0), columns=5000), columns_per_row=6000), "at most 4096 columns"),
        (replace(LOWERED, result_lanes=0), "'result_lanes'"),
    ):
        with pytest.raises(ValueError, match=message):
            program.validate()


def test_files_without_the_later_fields_are_read():
    table = json.loads(LOWERED.to_json())
    del table["buffer_columns"], table["result_lanes"]
    assert PimProgram.from_json(json.dumps(table)) == LOWERED
    assert (LOWERED.buffer_columns, LOWERED.result_lanes) == (COLUMNS, 1)


def test_other_pixels_are_out_of_range():
    """A program reads and writes its own pixels alone."""
    part = replace(LOWERED, pixel_begin=5, pixel_end=9)
    for pixel in range(16):
        write = Gwrite(buffer=0, pixel=Affine(pixel), pixels=2, k=Affine(0), columns=1)
        read = Readres(buffer=0, pixel=Affine(pixel), channel=Affine(0))
        for node, end in ((write, 8), (read, 9)):
            program = replace(part, channels=((node,),))
            if 5 <= pixel < end:
                program.validate()
            else:
                with pytest.raises(
                    ValueError, match=f"pixel {pixel}\\.\\.{pixel} of .* is not in \\[5, {end}\\)"
                ):
                    program.validate()


def edit_text(**fields: object) -> str:
    """The lowered program's text with some fields replaced; `channels` by name, `None` to drop one."""
    table = json.loads(LOWERED.to_json())
    for name, value in fields.items():
        place, key = (table["geometry"], name[2:]) if name.startswith("g_") else (table, name)
        if value is None:
            del place[key]
        else:
            place[key] = value
    return json.dumps(table)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", r"^a\.pimprog:1: Expecting value"),
        ("[]", r"^a\.pimprog:1: not a pimprog/1 file"),
        (edit_text(format="pimprog/9"), r"^a\.pimprog:1: not a pimprog/1 file"),
        (edit_text(format=None), r"^a\.pimprog:1: not a pimprog/1 file"),
        (edit_text(rows=None), "field 'rows' is missing"),
        (edit_text(geometry=None), "field 'geometry' is missing"),
        (edit_text(geometry=[]), "field of 'geometry'.* is not a table"),
        (edit_text(channels=None), "field 'channels' is missing"),
        (edit_text(channels=[]), "0 channels; a program has 1 to 4096"),
        (edit_text(channels=[[]] * 4097), "4097 channels; a program has 1 to 4096"),
        (edit_text(channels=3), "field 'channels' is not a list"),
        (edit_text(colour="red"), "field 'colour' is unknown"),
        (edit_text(g_colour=1), "field of 'geometry', 'colour' is unknown"),
        (edit_text(g_oc=None), "field of 'geometry', 'oc' is missing"),
        (edit_text(dtype="fp8"), "'dtype'"),
        (edit_text(region=4), "'region'"),
        (edit_text(gangs=0), "'gangs'"),
        (edit_text(gangs=5), "16 banks are not 5 gangs"),
        (edit_text(buffers=2.0), "'buffers'"),
        (edit_text(banks=True), "'banks'"),
        (edit_text(rows="many"), "'rows'"),
        (edit_text(row_begin=-1), "'row_begin'"),
        (edit_text(readres_bursts=0), "'readres_bursts'"),
        (edit_text(pixel_end=17), r"pixels \[0, 17\) are not in the output"),
        (edit_text(pixel_begin=16), r"pixels \[16, 16\) are not in the output"),
        (edit_text(g_stride=[0, 1]), "'geometry.stride'"),
        (edit_text(g_padding=[0, 0]), "'geometry.padding'"),
        (edit_text(g_h=-4), "'geometry.h'"),
        (edit_text(g_n=2**40), "'geometry.n'"),
        (edit_text(channels=[{}]), "channel 0: {} is not a list of commands"),
        (edit_text(channels=[["COMP"]]), "channel 0: 'COMP' is no command"),
        (edit_text(channels=[[[["COMP"]]]]), r"channel 0: \[\['COMP'\]\] is no command"),
        (edit_text(channels=[[], [["JUMP", 1]]]), r"channel 1: \['JUMP', 1\] is no command"),
        (edit_text(channels=[[["LOOP", 0, []]]]), "channel 0: a loop is"),
        (edit_text(channels=[[["LOOP", 1]]]), "channel 0: a loop is"),
        (edit_text(channels=[[["LOOP", 1, 5]]]), "channel 0: 5 is not a list of commands"),
        (edit_text(channels=[[["G_ACT", 0]]]), "channel 0: G_ACT takes gang, row"),
        (edit_text(geometry=asdict(LOWERED.geometry) | {"groups": 7}), "do not go together with 7 groups"),
        (edit_text(buffer_columns=2**40), "'buffer_columns'"),
        (edit_text(result_lanes="1"), "'result_lanes'"),
        (edit_text(channels=[[["G_ACT", 0, 3]]]), "channel 0: G_ACT has a bad row: 3"),
        (edit_text(channels=[[["G_ACT", "0", [0]]]]), "channel 0: G_ACT has a bad gang: '0'"),
        (edit_text(channels=[[["G_ACT", 4, [0]]]]), r"channel 0: gang 4..4 of GAct is not in \[0, 4\)"),
        (edit_text(channels=[[["READRES", 4, [0], [0]]]]), "channel 0: buffer 4..4 of Readres"),
        (edit_text(channels=[[["READRES", 0, [0], [20]]]]), "channel 0: output channel 20..20 of Readres"),
        (edit_text(channels=[[["GWRITE", 0, [0], -1, [0], -1]]]), "'pixels'"),
        (edit_text(channels=[[["GWRITE", 0, [0], 1, [180], 1]]]), "channel 0: element 180..180 of Gwrite"),
        (edit_text(channels=[[["COMP", 0, [0], [30], 3]]]), "channel 0: column 30..30 of Comp"),
        (edit_text(channels=[[["COMP", 0, [0], [0], 0]]]), "'count'"),
        ("[" * 10**5, "a.pimprog"),
        (edit_text(channels=[[]]).replace("[[]]", "[" * 600 + "]" * 600), "a.pimprog"),
        (edit_text(rows=0).replace('"rows": 0', '"rows": 1' + "0" * 5000), "a.pimprog"),
    ],
)
def test_malformed_text(text, message):
    with pytest.raises(TraceError, match=message) as error:
        PimProgram.from_json(text, "a.pimprog")
    assert str(error.value).startswith("a.pimprog:")
    assert "\n" not in str(error.value)


def test_broken_line_is_named():
    lines = LOWERED.to_json().splitlines()
    for index in range(1, len(lines) - 1):
        broken = lines.copy()
        broken[index] = broken[index].replace("[", "[?", 1) if "[" in broken[index] else "?" + broken[index]
        with pytest.raises(TraceError) as error:
            PimProgram.from_json("\n".join(broken), "a.pimprog")
        assert str(error.value).startswith(f"a.pimprog:{index + 1}: ")
        assert broken[index].strip() in str(error.value)


def test_every_cut_is_noticed():
    text = LOWERED.to_json().rstrip("\n")
    for end in range(0, len(text), 7):
        with pytest.raises(TraceError):
            PimProgram.from_json(text[:end])


def leaves(value: object, path: tuple = ()) -> list[tuple]:
    """Paths of everything inside a JSON value, containers included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [p for key, item in items for p in ((*path, key), *leaves(item, (*path, key)))]


NUMBERS = ("-1", "0", "1", "2", "3", "7", "17", "33", "200", *map(str, (2**31 - 1, 2**31, 2**63, -(2**70))))
ODD = ("0.5", "1e400", "NaN", "true", "null", '"fp32"', '""', '"COMP"', '"é\\n"', "[]", "{}", "[0]", "[1, 1]")
WORDS = st.one_of(st.sampled_from(NUMBERS), st.sampled_from((*ODD, '[["LOOP", 2, []]]'))).map(json.loads)
SCHEDULED = [LAYER.lower(schedule).to_json() for schedule in LAYER.schedules]


@pytest.mark.long
@settings(max_examples=examples(600))
@given(st.sampled_from(SCHEDULED), st.data())
def test_any_change_is_refused_or_runs(text, data):
    """A damaged file is a `TraceError` or another program, and never a crash or another exception."""
    table = json.loads(text)
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from(leaves(table)))
        place = table
        for key in path:
            place = place[key]
        place[last] = data.draw(WORDS)
    try:
        program = PimProgram.from_json(json.dumps(table), "a.pimprog")
    except TraceError as error:
        assert str(error).startswith("a.pimprog:")
        assert "\n" not in str(error)
        return
    assert PimProgram.from_json(program.to_json()) == program
    g = program.geometry
    row = program.columns_per_row * program.elements_per_column
    buffers = program.buffers * program.buffer_columns * program.elements_per_column
    sizes = (g.n * g.h * g.w * g.c, g.pixels * g.oc, program.banks * row, buffers, program.rows)
    rounds = [len(list(zip(range(10_000), program.commands(c)))) for c in range(len(program.channels))]
    if max(*sizes, *rounds) >= 10_000:
        return
    integer = program.dtype == "int8"
    image = MemoryImage(
        row_begin=program.row_begin,
        pages=np.ones((1, program.banks, row), STORAGE[program.dtype]),
        table=np.zeros((len(program.channels), program.rows), np.int32),
    )
    x = np.ones((g.n, g.h, g.w, g.c), np.int8 if integer else np.float32)
    result = PimDevice(program, image).run(x)
    assert result.shape == (program.pixel_end - program.pixel_begin, g.oc)


def test_words_are_made_once_and_stay_in_their_process():
    """Timing, checker and executor ask for the same words; programs are handed on without them."""
    fresh = replace(LOWERED)
    before = pickle.dumps(fresh)
    words = fresh.channel_words(0)
    assert words is fresh.channel_words(0)
    assert pickle.dumps(fresh) == before
    unpickled = pickle.loads(before)
    assert unpickled == fresh and (unpickled.channel_words(0) == words).all()
