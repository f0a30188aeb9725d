"""Programs for the timing tests, in a notation short enough to compute their cycles by hand."""

from dataclasses import replace

from pimflow.core.commands import Af, Affine, Comp, GAct, Gwrite, Loop, Node, Readres, Wrbias, Write
from pimflow.core.kernel import ConvGeometry
from pimflow.core.program import PimProgram
from pimflow.hardware.pim import PimSpec

GANGS = range(4)


def write(buffer: int = 0, bursts: int = 32) -> Gwrite:
    return Gwrite(buffer=buffer, pixel=Affine(0), pixels=1, k=Affine(0), columns=bursts)


def act(gang: int, row: int | Affine = 0) -> GAct:
    return GAct(gang=gang, row=row if isinstance(row, Affine) else Affine(row))


def act_all(row: int | Affine = 0) -> tuple[GAct, ...]:
    return tuple(act(gang, row) for gang in GANGS)


def comp(count: int = 1, buffer: int = 0, row: int | Affine = 0, column: int = 0) -> Comp:
    row = row if isinstance(row, Affine) else Affine(row)
    return Comp(buffer=buffer, row=row, column=Affine(column), count=count)


def read(buffer: int = 0) -> Readres:
    return Readres(buffer=buffer, pixel=Affine(0), channel=Affine(0))


def start(latch: int = 0) -> Wrbias:
    return Wrbias(buffer=latch, pixel=Affine(0), channel=Affine(0))


def apply(latch: int = 0, row: int | Affine = 0) -> Af:
    return Af(buffer=latch, row=row if isinstance(row, Affine) else Affine(row))


def store(gang: int = 0, row: int | Affine = 0, bursts: int = 1) -> Write:
    """A WRITE of so many columns of one bank."""
    row = row if isinstance(row, Affine) else Affine(row)
    places = {"gang": gang, "bank": 0, "banks": 1, "row": row, "column": Affine(0), "count": bursts}
    return Write(**places, element=0, elements=16, pixel=Affine(0), k=Affine(0))


def loop(extent: int, *body: Node) -> Loop:
    return Loop(extent=extent, body=body)


def program(*channels: tuple[Node, ...], readres_bursts: int = 1) -> PimProgram:
    """A program of these streams, one a channel, for `newton-gddr6`."""
    return PimProgram(
        region="test",
        pim="newton-gddr6",
        dtype="fp16",
        geometry=ConvGeometry(n=1, h=8, w=8, c=512, oc=512),
        pixel_begin=0,
        pixel_end=64,
        banks=16,
        gangs=len(GANGS),
        columns_per_row=32,
        elements_per_column=16,
        buffers=4,
        readres_bursts=readres_bursts,
        row_begin=0,
        rows=1024,
        channels=channels,
    )


def with_timing(spec: PimSpec, **cycles: int) -> PimSpec:
    """`spec` with some latencies replaced."""
    return replace(spec, timing=spec.timing | cycles)
