"""One wrong command, one wrong address, one wrong row of weights: every such mutant must be caught.

There are two nets. VALUES: what the device computes is outside the error bound of the reference, or is
no program at all. COMMANDS: the engine refuses the stream, or the independent checker says that it is
not the program's. Each mutation names the nets that must catch each of its mutants by themselves.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from calibration.pim_device import PimDevice
from layers import PimLayer, flat
from reference import Window, bound, convolve

from pimflow.core.commands import Affine, Comp, GAct, Gwrite, Node, Readres
from pimflow.core.program import MemoryImage, PimProgram
from pimflow.errors import TraceError
from pimflow.simulators.pim.checker import violations
from pimflow.simulators.pim.timing import issue_program

SAME = Window(kernel=(3, 3), padding=(1, 1, 1, 1))
# More pixels than two rounds of all buffers, or a dropped GWRITE would leave just what it writes; and
# whole tiles, or a wrong row in some banks would touch no result.
LAYERS = {
    "pointwise": PimLayer(x_shape=(1, 5, 6, 120), oc=48, channels=2),
    "padded": PimLayer(x_shape=(1, 5, 5, 20), oc=48, window=SAME, channels=2, row_begin=9),
    "strided": PimLayer(x_shape=(2, 9, 9, 20), oc=32, window=replace(SAME, stride=(2, 2)), channels=3),
    "two rows": PimLayer(x_shape=(1, 3, 3, 64), oc=48, window=SAME, channels=3),
    "three rows": PimLayer(x_shape=(3, 1, 1, 1344), oc=64, channels=2),
    "fp32": PimLayer(x_shape=(1, 5, 5, 12), oc=48, window=SAME, channels=2, dtype="fp32"),
}
CASES = [
    pytest.param(layer, schedule, id=f"{name}, {schedule}", marks=pytest.mark.long if index else ())
    for name, layer in LAYERS.items()
    for index, schedule in enumerate(layer.schedules)
]
SAMPLES = 5


class MutationCase:
    """A lowered layer, and whether a mutant of it is caught."""

    def __init__(self, layer: PimLayer, schedule):
        self.layer = layer
        self.x, self.w = layer.operands()
        self.program = layer.lower(schedule)
        self.image = layer.image(self.program, self.w)
        self.exact, magnitude = convolve(self.x, self.w, layer.window, layer.dtype)
        self.limit = bound(self.exact, magnitude, layer.reduction, layer.dtype)
        # The middle one has neighbours on both sides.
        self.channel = layer.channels // 2
        self.stream = flat(self.program.channels[self.channel])
        self.vectors = np.concatenate(layer.window.taps(self.x), axis=-1).reshape(len(self.exact), -1)

    def living(self, index: int) -> list[int]:
        """Columns of a run of COMPs, from 0, that are not of padding alone: the others add nothing."""
        run = self.stream[index]
        fill = next(n for n in self.stream[index::-1] if isinstance(n, Gwrite) and n.buffer == run.buffer)
        slot, column = divmod(run.column.base, fill.columns)
        assert column + run.count <= fill.columns
        vector = self.vectors[fill.pixel.base + slot]
        lanes = self.layer.lanes
        begins = range(fill.k.base + column * lanes, fill.k.base + (column + run.count) * lanes, lanes)
        return [i for i, begin in enumerate(begins) if vector[begin : begin + self.layer.lanes].any()]

    def with_stream(self, stream: list[Node]) -> PimProgram:
        """The program with another stream in one channel."""
        channels = list(self.program.channels)
        channels[self.channel] = tuple(stream)
        return replace(self.program, channels=tuple(channels))

    def wrong_values(
        self, program: PimProgram, image: MemoryImage | None = None, x: np.ndarray | None = None
    ) -> bool:
        try:
            result = PimDevice(program, self.image if image is None else image).run(
                self.x if x is None else x, threads=1
            )
        except TraceError:
            return True
        return not (abs(result - self.exact) <= self.limit).all()

    def wrong_commands(self, program: PimProgram) -> bool:
        """Also without refreshes: one right before a second G_ACT makes it one that reopens the row."""
        pim = self.layer.pim
        for device in (pim, replace(pim, timing=pim.timing | {"nREFI": 1 << 30})):
            try:
                stream = issue_program(program, device, self.channel)
            except TraceError:
                return True
            if violations(stream, device, self.program, self.channel):
                return True
        return False


_cases: dict[str, MutationCase] = {}


@pytest.fixture
def case(layer, schedule) -> MutationCase:
    key = f"{layer} {schedule}"
    if key not in _cases:
        _cases[key] = MutationCase(layer, schedule)
    return _cases[key]


@pytest.mark.parametrize("layer, schedule", CASES)
def test_the_program_itself_is_not_caught(case):
    assert not case.wrong_values(case.program)
    assert not case.wrong_values(case.with_stream(case.stream))
    assert not case.wrong_commands(case.with_stream(case.stream))


# ---- one command ----


def nodes(case: MutationCase, kind: type, where: Callable[[int], object] = lambda index: True) -> list[int]:
    """Where the stream has such commands: the first, the last and some between."""
    positions = [index for index, node in enumerate(case.stream) if isinstance(node, kind) and where(index)]
    return sorted({positions[i] for i in np.linspace(0, len(positions) - 1, SAMPLES).astype(int)})


def edits(case: MutationCase, kind: type, edit: Callable[[Node], list[Node]]) -> Iterator[list[Node]]:
    """Streams with one node changed; COMPs of padding alone are left out, for they add nothing."""
    for index in nodes(case, kind, case.living if kind is Comp else lambda index: True):
        yield case.stream[:index] + edit(case.stream[index]) + case.stream[index + 1 :]


def shift_affine(affine: Affine, offset: int) -> Affine:
    return Affine(affine.base + offset)


def rebuffer(case: MutationCase, node: Node) -> Node:
    return replace(node, buffer=(node.buffer + 1) % case.program.buffers)


def drop(case: MutationCase, kind: type) -> Iterator[list[Node]]:
    return edits(case, kind, lambda node: [])


def drop_comp(case: MutationCase) -> Iterator[list[Node]]:
    """One column of a run: the first, one inside, the last."""
    for number, index in enumerate(nodes(case, Comp, case.living)):
        run, living = case.stream[index], case.living(index)
        gap = (living[0], living[len(living) // 2], living[-1])[number % 3]
        rest = replace(run, column=shift_affine(run.column, gap + 1), count=run.count - gap - 1)
        parts = [part for part in (replace(run, count=gap), rest) if part.count]
        yield case.stream[:index] + parts + case.stream[index + 1 :]


def next_row(case: MutationCase, row: Affine) -> Affine:
    """The row after it, cyclically, or one beyond the region's if that is all it has."""
    begin, rows = case.program.row_begin, case.program.rows
    return Affine(begin + (row.base - begin + 1) % rows if rows > 1 else begin + 1)


def change_row(case: MutationCase) -> Iterator[list[Node]]:
    """The row of the activations and of every COMP until the next ones."""
    for start in nodes(case, GAct)[1:]:
        start -= case.stream[start].gang
        mutant, gangs = list(case.stream), case.program.gangs
        for index in range(start, len(mutant)):
            node = mutant[index]
            if index >= start + gangs and isinstance(node, GAct):
                break
            if isinstance(node, GAct | Comp):
                mutant[index] = replace(node, row=next_row(case, node.row))
        yield mutant


def shift_pixel(case: MutationCase, kind: type) -> Iterator[list[Node]]:
    """The neighbour on the right, or on the left for the last."""

    def edit(node: Node) -> list[Node]:
        last = node.pixel.base + getattr(node, "pixels", 1) == case.program.pixel_end
        return [replace(node, pixel=shift_affine(node.pixel, -1 if last else 1))]

    return edits(case, kind, edit)


def shift_channel(case: MutationCase, offset: int) -> Iterator[list[Node]]:
    def edit(node: Readres) -> list[Node]:
        beyond = node.channel.base + offset >= case.layer.oc
        return [replace(node, channel=shift_affine(node.channel, -offset if beyond else offset))]

    return edits(case, Readres, edit)


def shift_column(case: MutationCase) -> Iterator[list[Node]]:
    """A run that leaves out its first column, or its last at the end of a row."""

    def matters(i: int) -> bool:
        return {0, case.stream[i].count - 1} <= set(case.living(i))

    for i in nodes(case, Comp, matters):
        run = case.stream[i]
        offset = -1 if run.column.base + run.count == case.program.columns_per_row else 1
        yield [*case.stream[:i], replace(run, column=shift_affine(run.column, offset)), *case.stream[i + 1 :]]


def early_readres(case: MutationCase) -> Iterator[list[Node]]:
    """A READRES before the last COMPs that it reads."""
    for k in nodes(case, Readres):
        buffer = case.stream[k].buffer
        runs = [i for i in range(k) if isinstance(case.stream[i], Comp) and case.stream[i].buffer == buffer]
        if case.living(runs[-1]):
            mutant = list(case.stream)
            mutant.insert(runs[-1], mutant.pop(k))
            yield mutant


VALUES, COMMANDS = "values", "commands"
MUTATIONS: dict[str, tuple[Callable[[MutationCase], Iterator[list[Node]]], set[str]]] = {
    "dropped COMP": (drop_comp, {VALUES, COMMANDS}),
    "dropped run of COMPs": (lambda c: drop(c, Comp), {VALUES, COMMANDS}),
    "dropped READRES": (lambda c: drop(c, Readres), {VALUES, COMMANDS}),
    "dropped GWRITE": (lambda c: drop(c, Gwrite), {VALUES, COMMANDS}),
    # If the row is still open, the values are right all the same.
    "dropped G_ACT": (lambda c: drop(c, GAct), {COMMANDS}),
    "G_ACT twice": (lambda c: edits(c, GAct, lambda n: [n, n]), {COMMANDS}),
    "COMP twice": (lambda c: edits(c, Comp, lambda n: [n, n]), {VALUES, COMMANDS}),
    "READRES twice": (lambda c: edits(c, Readres, lambda n: [n, n]), {VALUES, COMMANDS}),
    "READRES too early": (early_readres, {VALUES, COMMANDS}),
    "changed row": (change_row, {VALUES, COMMANDS}),
    "changed row of one G_ACT": (
        lambda c: edits(c, GAct, lambda n: [replace(n, row=next_row(c, n.row))]),
        {VALUES, COMMANDS},
    ),
    # COMP computes on any open row.
    "changed row of COMPs": (
        lambda c: edits(c, Comp, lambda n: [replace(n, row=next_row(c, n.row))]),
        {COMMANDS},
    ),
    "changed column": (shift_column, {VALUES, COMMANDS}),
    "wrong buffer of GWRITE": (lambda c: edits(c, Gwrite, lambda n: [rebuffer(c, n)]), {VALUES, COMMANDS}),
    "wrong buffer of COMP": (lambda c: edits(c, Comp, lambda n: [rebuffer(c, n)]), {VALUES, COMMANDS}),
    "wrong buffer of READRES": (lambda c: edits(c, Readres, lambda n: [rebuffer(c, n)]), {VALUES, COMMANDS}),
    # Issued commands do not say what is gathered or read: only values show the fault.
    "wrong pixel of GWRITE": (lambda c: shift_pixel(c, Gwrite), {VALUES}),
    "wrong pixel of READRES": (lambda c: shift_pixel(c, Readres), {VALUES}),
    "wrong k by an element": (
        lambda c: edits(c, Gwrite, lambda n: [replace(n, k=shift_affine(n.k, 1))]),
        {VALUES},
    ),
    "wrong k by a column": (
        lambda c: edits(c, Gwrite, lambda n: [replace(n, k=shift_affine(n.k, c.layer.lanes))]),
        {VALUES},
    ),
    "wrong output channel by a tile": (lambda c: shift_channel(c, 16), {VALUES}),
    "wrong output channel by one": (lambda c: shift_channel(c, 1), {VALUES}),
}


@pytest.mark.parametrize("layer, schedule", CASES)
def test_wrong_command_is_caught(case):
    for mutation, (mutants, nets) in MUTATIONS.items():
        count = 0
        for mutant in mutants(case):
            program = case.with_stream(mutant)
            if VALUES in nets:
                assert case.wrong_values(program), f"{mutation}: mutant {count} computes the right values"
            if COMMANDS in nets:
                assert case.wrong_commands(program), f"{mutation}: mutant {count} issues the right commands"
            count += 1
        assert count, mutation


# ---- the whole program, or what it runs on ----


@pytest.mark.parametrize("layer, schedule", CASES)
def test_skipped_border_is_caught(case):
    """The window shifted by a pixel in each direction, as if padding were on one side only."""
    g = case.program.geometry
    top, left, bottom, right = g.padding
    shifts = [(top - 1, left, bottom + 1, right), (top, left - 1, bottom, right + 1)]
    shifts += [(top + 1, left, bottom - 1, right), (top, left + 1, bottom, right - 1)]
    if g.kh == 1:  # below the map it would be outside the program
        shifts = [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 0, 1)]
    for padding in shifts:
        shifted = replace(g, padding=padding)
        program = replace(case.program, geometry=shifted)
        if g.kh > 1:
            assert (shifted.oh, shifted.ow) == (g.oh, g.ow)
        assert case.wrong_values(program), padding


@pytest.mark.parametrize("layer, schedule", CASES)
def test_lost_border_is_caught(case):
    """The map's outermost rows and columns, taken for padding."""
    for border in (np.s_[:, 0], np.s_[:, -1], np.s_[:, :, 0], np.s_[:, :, -1]):
        x = case.x.copy()
        x[border] = 0
        assert case.wrong_values(case.program, x=x)


@pytest.mark.parametrize("layer, schedule", CASES)
def test_swapped_channels_are_caught(case):
    tables = case.image.table
    pairs = [(a, b) for b in range(len(tables)) for a in range(b)]
    a, b = next((pair for pair in pairs if (tables[pair[0]] != tables[pair[1]]).any()), pairs[0])
    # Channels that hold the same weights may trade their work.
    differ = (tables[a] != tables[b]).any()
    streams, table = list(case.program.channels), case.image.table.copy()
    streams[a], streams[b] = streams[b], streams[a]
    table[[a, b]] = table[[b, a]]
    swapped, image = replace(case.program, channels=tuple(streams)), replace(case.image, table=table)
    assert case.wrong_values(swapped) == differ
    assert case.wrong_values(case.program, image) == differ
    assert not case.wrong_values(swapped, image), "both swapped is the same device"


@pytest.mark.parametrize("layer, schedule", CASES)
def test_one_stream_in_two_channels_is_caught(case):
    for a, b in ((0, 1), (1, 0)):
        streams = list(case.program.channels)
        streams[a] = streams[b]
        assert case.wrong_values(replace(case.program, channels=tuple(streams)))


@pytest.mark.parametrize("layer, schedule", CASES)
def test_misplaced_weights_are_caught(case):
    table, pages = case.image.table, case.image.pages
    for channel, rows in enumerate(table):
        nodes = flat(case.program.channels[channel])
        used = [n.row.base - case.program.row_begin for n in nodes if isinstance(n, GAct)]
        for row in sorted({used[0], used[-1]}):
            for page in {-1, (rows[row] + 1) % len(pages)}:
                mutant = table.copy()
                mutant[channel, row] = page
                assert case.wrong_values(case.program, replace(case.image, table=mutant))
    for axis, offset in ((0, 1), (1, 1), (2, case.layer.lanes), (2, 1)):
        assert case.wrong_values(case.program, replace(case.image, pages=np.roll(pages, offset, axis)))
