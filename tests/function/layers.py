"""Random layers on random devices, and how to run them."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st
from reference import Window, bound, convolve, storage_values

from pimflow.core.commands import Affine, Comp, GAct, Gwrite, Loop, Node, Readres
from pimflow.core.kernel import ConvGeometry
from pimflow.core.loop_order import LoopOrder
from pimflow.core.program import MemoryImage, PimProgram
from pimflow.hardware.pim import Constraint, PimSpec
from pimflow.hardware.systems import SCHEDULINGS
from pimflow.pim_backend.programs.layout import memory_image
from pimflow.pim_backend.programs.lowering import ProgramRequest, lower
from pimflow.pim_backend.programs.schedule import BankTiling, schedules
from pimflow.simulators.pim.checker import violations
from pimflow.simulators.pim.coverage import product_coverage
from pimflow.simulators.pim.timing import issue_program

NEWTON = PimSpec.load("newton-gddr6")
POINT = Window()
# A column of 12 elements and 8 banks: an adder tree with odd levels, on no fast path of the executor.
UNEVEN = replace(NEWTON, gangs=2, column_bytes=24, columns_per_row=20, buffer_columns=20)
SHORT = replace(NEWTON, buffer_columns=8)  # several buffers make a row


def with_latches(pim: PimSpec) -> PimSpec:
    """`pim` with latches that can be written, whenever a GWRITE may come, and after a COMP as a READRES."""

    def also(commands: tuple[str, ...]) -> tuple[str, ...]:
        return (*commands, "WRBIAS") if "GWRITE" in commands else commands

    rules = [replace(rule, before=also(rule.before), after=also(rule.after)) for rule in pim.constraints]
    rules = [replace(r, after=(*r.after, "WRBIAS")) if r.latency == "nTREE" else r for r in rules]
    energy = pim.energy | {"latch_write_pj": 1.0}
    return replace(pim, latch_initial_value=True, constraints=tuple(rules), energy=energy)


def with_activations(pim: PimSpec) -> PimSpec:
    """`pim` with AFs that come wherever COMPs may, some clocks later than these behind a G_ACT."""

    def also(commands: tuple[str, ...]) -> tuple[str, ...]:
        return (*commands, "AF") if "COMP" in commands else commands

    others = [rule for rule in pim.constraints if rule.latency not in ("nTREE", "nRCDR")]
    rules = [replace(rule, before=also(rule.before), after=also(rule.after)) for rule in others]
    rules += [rule for rule in pim.constraints if rule.latency in ("nTREE", "nRCDR")]
    for level, before, after, latency in (
        ("gang", "G_ACT", "AF", "nRCDAF"),
        ("buffer", "COMP", "AF", "nTREE"),
        *((("buffer", "AF", command, "nCCDS")) for command in ("READRES", "WRBIAS")),
    ):
        rules.append(Constraint(level=level, before=(before,), after=(after,), latency=latency))
    timing = pim.timing | {"nRCDAF": pim.timing["nRCDR"] + 7}
    energy = pim.energy | {"activation_pj": 3.0}
    return replace(
        pim, activation_unit=True, row_base=2, constraints=tuple(rules), timing=timing, energy=energy
    )


@dataclass(frozen=True, kw_only=True)
class PimLayer:
    """A convolution of data drawn from `seed`, on `channels` channels of `pim`."""

    x_shape: tuple[int, int, int, int]
    oc: int
    window: Window = POINT
    dtype: str = "fp16"
    pim: PimSpec = NEWTON
    channels: int = 1
    pixel_begin: int = 0
    pixel_end: int | None = None
    row_begin: int = 0
    seed: int = 0
    added_channels: int = 0  # of `x_shape`, those of a tensor that the product adds

    @property
    def geometry(self) -> ConvGeometry:
        n, h, w, c = self.x_shape
        kh, kw = self.window.kernel
        window = self.window
        sizes = {"n": n, "h": h, "w": w, "c": c, "oc": self.oc, "kh": kh, "kw": kw}
        return ConvGeometry(**sizes, stride=window.stride, dilation=window.dilation, padding=window.padding)

    @property
    def reduction(self) -> int:
        return self.x_shape[3] * self.window.kernel[0] * self.window.kernel[1]

    @property
    def pixels(self) -> slice:
        return slice(self.pixel_begin, self.pixel_end)

    @property
    def lanes(self) -> int:
        return self.pim.column_bytes // {"fp16": 2, "bf16": 2, "fp32": 4, "int8": 1}[self.dtype]

    @property
    def chunk_columns(self) -> int:
        """Columns of the parts into which the reduction is cut; 0 if it is in one part."""
        columns = -(-self.reduction // self.lanes)
        chunks = -(-columns // self.pim.buffer_columns)
        return -(-columns // chunks) if chunks > 1 else 0

    @property
    def schedules(self) -> list[LoopOrder]:
        orders = (schedules(self.geometry, self.pim, self.dtype, level) for level in SCHEDULINGS[::-1])
        return list(dict.fromkeys(itertools.chain.from_iterable(orders)))

    def operands(self) -> tuple[np.ndarray, np.ndarray]:
        """Input [n, h, w, c] and filters [oc, kh, kw, c], float32 or int8."""
        rng = np.random.default_rng(self.seed)
        shapes = self.x_shape, (self.oc, *self.window.kernel, self.x_shape[3])
        if self.dtype == "int8":
            return tuple(rng.integers(-128, 128, shape, np.int8) for shape in shapes)
        return tuple(rng.standard_normal(shape, np.float32) for shape in shapes)

    def lower(self, schedule: LoopOrder, initial: str = "", activation: str = "") -> PimProgram:
        return lower(
            ProgramRequest(
                "layer",
                self.geometry,
                schedule,
                pixel_begin=self.pixel_begin,
                pixel_end=self.pixel_end,
                row_begin=self.row_begin,
                initial=initial,
                added_channels=self.added_channels,
                activation=activation,
            ),
            self.pim,
            dtype=self.dtype,
            channels=self.channels,
        )

    def image(self, program: PimProgram, w: np.ndarray) -> MemoryImage:
        with np.errstate(over="ignore", invalid="ignore"):
            return memory_image(program, w.reshape(self.oc, -1))


def start_of(layer: PimLayer, initial: str) -> np.ndarray | None:
    """What the latches of `layer` start from: a bias, a residual, or nothing."""
    if not initial:
        return None
    g, rng = layer.geometry, np.random.default_rng(layer.seed + 1)
    shape = (g.oc,) if initial == "bias" else (g.n, g.oh, g.ow, g.oc)
    if layer.dtype == "int8":
        return rng.integers(-(1 << 20), 1 << 20, shape, np.int32)
    return 4 * rng.standard_normal(shape, np.float32)


def sums(layer: PimLayer, start: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """What a layer is, and what each sum may be off by if it is rounded once."""
    exact, magnitude = convolve(*layer.operands(), layer.window, layer.dtype)
    if start is not None:
        values = start.astype(np.float64) if layer.dtype == "int8" else storage_values(start, layer.dtype)
        added = values.reshape(-1, layer.oc)
        exact, magnitude = exact + added, magnitude + abs(added)
    exact, magnitude = exact[layer.pixels], magnitude[layer.pixels]
    return exact, bound(exact, magnitude, layer.reduction + (start is not None), layer.dtype)


def axis(draw: st.DrawFn, largest: int) -> tuple[int, int, int, int, int, int]:
    """Extent, taps, stride, dilation, padding before and after, of an axis with some output."""
    taps, stride = draw(st.integers(1, 5)), draw(st.sampled_from((1, 1, 2, 3)))
    dilation = draw(st.sampled_from((1, 1, 2, 3)))
    before, after = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    smallest = max(1, (taps - 1) * dilation + 1 - before - after)
    return smallest + draw(st.integers(0, largest)), taps, stride, dilation, before, after


@st.composite
def layers(draw: st.DrawFn, most_channels: int = 16) -> PimLayer:
    """Kernels of 1..5 taps a side, reductions on both sides of one and two rows, every organisation."""
    height, kh, sh, dh, top, bottom = axis(draw, 12)
    width, kw, sw, dw, left, right = axis(draw, 12)
    around = draw(st.sampled_from((1, 16, 40, 200, 256, 257, 500, 512, 513, 700, 1024, 1100, 1500)))
    c = max(1, -(-around // (kh * kw)) - draw(st.integers(0, 1)))
    layer = PimLayer(
        x_shape=(draw(st.integers(1, 2)), height, width, c),
        oc=draw(st.sampled_from((1, 5, 15, 16, 17, 31, 33, 48, 70))),
        window=Window(
            kernel=(kh, kw), stride=(sh, sw), dilation=(dh, dw), padding=(top, left, bottom, right)
        ),
        dtype=draw(st.sampled_from(("fp16", "fp16", "fp16", "fp32", "bf16", "int8"))),
        pim=replace(
            draw(st.sampled_from((NEWTON, NEWTON, NEWTON, UNEVEN, SHORT))),
            global_buffers=draw(st.integers(1, 4)),
        ),
        channels=draw(st.integers(1, most_channels)),
        row_begin=draw(st.sampled_from((0, 0, 1, 777))),
        seed=draw(st.integers(0, 999)),
    )
    pixels = layer.geometry.pixels
    begin = draw(st.one_of(st.just(0), st.integers(0, pixels - 1)))
    end = draw(st.one_of(st.none(), st.integers(begin + 1, pixels)))
    return replace(layer, pixel_begin=begin, pixel_end=end)


def small_buffer_program(layer: PimLayer, buffer_columns: int) -> PimProgram:
    """`layer` on one channel with global buffers of `buffer_columns` columns, written piece by piece.

    Two buffers take turns at the pixels; the rows are those of the program that the lowering makes.
    """
    full_program = replace(layer, channels=1).lower(layer.schedules[0])
    tiling = BankTiling.from_geometry(layer.geometry, layer.pim, layer.dtype)
    nodes: list[Node] = []
    for tile in range(tiling.tiles):
        for pixel in range(full_program.pixel_begin, full_program.pixel_end):
            buffer = pixel % min(2, full_program.buffers)
            for chunk in range(tiling.chunks):
                row = Affine(layer.row_begin + tile * tiling.chunks + chunk)
                nodes += [GAct(gang=gang, row=row) for gang in range(full_program.gangs)]
                for column in range(0, tiling.columns, buffer_columns):
                    k = (chunk * tiling.columns + column) * full_program.elements_per_column
                    count = min(buffer_columns, tiling.columns - column)
                    if k >= layer.reduction:
                        continue
                    nodes.append(
                        Gwrite(buffer=buffer, pixel=Affine(pixel), pixels=1, k=Affine(k), columns=count)
                    )
                    nodes.append(Comp(buffer=buffer, row=row, column=Affine(column), count=count))
            nodes.append(Readres(buffer=buffer, pixel=Affine(pixel), channel=Affine(tile * layer.pim.banks)))
    return replace(full_program, channels=(tuple(nodes),), buffer_columns=buffer_columns)


def flat(nodes: tuple[Node, ...], counters: tuple[int, ...] = ()) -> list[Node]:
    """The stream without loops: one node a command, runs of COMPs kept."""
    out: list[Node] = []
    for node in nodes:
        if isinstance(node, Loop):
            for i in range(node.extent):
                out += flat(node.body, (*counters, i))
            continue
        fields = {name: getattr(node, name) for name in node.__slots__}
        affines = {name: v for name, v in fields.items() if isinstance(v, Affine)}
        out.append(replace(node, **{name: Affine(v.value(counters)) for name, v in affines.items()}))
    return out


def expand_program(program: PimProgram, change: Callable[[list[Node]], list[Node]] = list) -> PimProgram:
    """`program` without loops, where each channel's commands are what `change` makes of them."""
    return replace(program, channels=tuple(tuple(change(flat(nodes))) for nodes in program.channels))


def first(nodes: list[Node], kind: type, **fields: object) -> int:
    """Where the first command of that kind is, with these fields."""
    return next(
        i
        for i, node in enumerate(nodes)
        if isinstance(node, kind) and all(getattr(node, name) == value for name, value in fields.items())
    )


def require_legal(program: PimProgram, layer: PimLayer) -> None:
    """No rule is broken on any channel, and the file says the same program."""
    for channel in range(layer.channels):
        stream = issue_program(program, layer.pim, channel)
        assert violations(stream, layer.pim, program, channel) == [], program.schedule
    assert PimProgram.from_json(program.to_json()) == program


def require_legal_and_exact(program: PimProgram, layer: PimLayer) -> None:
    """It is legal, and each product is computed once."""
    require_legal(program, layer)
    assert product_coverage(program).exact, program.schedule
