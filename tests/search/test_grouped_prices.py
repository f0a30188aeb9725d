"""What a depthwise convolution takes on PIM, or would at best, as ``--explain`` says it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pimflow.commands.compile.explain import explain
from pimflow.core.commands import Affine, Comp, GAct, Gwrite, Node, Readres, Write
from pimflow.core.kernel import ConvGeometry
from pimflow.core.program import PimProgram
from pimflow.hardware import PimSpec, system
from pimflow.placement import search
from pimflow.relay_passes.regions.extract_regions import extract_regions
from pimflow.simulators.pim.elementwise_bound import elementwise_bounds, lane_cycles
from pimflow.simulators.pim.timing import time_program

REGION = "block.depthwise.conv"
LANES = "by lanes, inputs in the banks; no COMP names a column of the buffer"
HBM = PimSpec.load("hbm-pim")


@pytest.fixture(scope="module")
def graph():
    from pimflow import frontend

    return extract_regions(frontend.load("toy").module, "toy")


def lower_bounds_ns(graph, pim: str | PimSpec, **changes):
    region = graph.region(REGION)
    region = replace(region, geometry=replace(region.geometry, **changes))
    return {e.how: e.lower_bound_ns for e in elementwise_bounds(region, system(pim=pim), 1000.0)}


def test_the_ways_of_each_device(graph):
    assert list(lower_bounds_ns(graph, "newton-gddr6")) == []
    assert list(lower_bounds_ns(graph, "aim-gddr6")) == ["by elementwise products, which the GPU adds"]
    assert list(lower_bounds_ns(graph, "hbm-pim")) == [LANES]
    dense_layer = replace(graph.region(REGION), geometry=ConvGeometry(n=1, h=4, w=4, c=8, oc=8))
    assert elementwise_bounds(dense_layer, system(pim="aim-gddr6"), 0.0) == []


def test_by_hand(graph):
    """16 x 16 pixels of 64 channels, 9 products each, on 16 channels of AiM at 2 clocks of 0.5 ns a burst."""
    outputs = 16 * 16 * 64
    bursts = (outputs + 9 * outputs) / 16
    launch_ns = system(pim="aim-gddr6").gpu.launch_ns
    expected = 1000 + bursts * 2 * 0.5 / 16 + launch_ns
    by_products = lower_bounds_ns(graph, "aim-gddr6")["by elementwise products, which the GPU adds"]
    assert by_products == pytest.approx(expected)
    # By lanes: 4 columns of channels in tiles of 2 x 4 pixels, a round of 8 banks for each channel of PIM. A
    # sum takes 9 COMPs and 20 clocks until it is read, and the ninth weight has no place in a buffer of 8.
    sums = 2 * 4 * (8 * 4 + 20 + 2)
    written = (3 + 6 * 4 + 3) * (5 + 2 * 6 + 5) * 4 * 2 / 16
    assert lower_bounds_ns(graph, "hbm-pim")[LANES] == pytest.approx(1000 + sums + written)


@st.composite
def layers(draw: st.DrawFn) -> ConvGeometry:
    groups, inputs, outputs = (draw(st.sampled_from(sizes)) for sizes in ((8, 48, 80), (1, 2), (1, 2)))
    kh, kw = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    h, w = draw(st.integers(kh, 12)), draw(st.integers(kw, 12))
    return ConvGeometry(
        n=draw(st.integers(1, 2)),
        h=h,
        w=w,
        c=groups * inputs,
        oc=groups * outputs,
        kh=kh,
        kw=kw,
        groups=groups,
        stride=(draw(st.integers(1, 2)), draw(st.integers(1, 2))),
        padding=tuple(draw(st.integers(0, min(1, k - 1))) for k in (kh, kw, kh, kw)),
    )


def clocks(g: ConvGeometry, tile: tuple[int, int], channels: int) -> int:
    """What `strict` takes for the commands of the busiest channel, by lanes with inputs in the banks.

    A row holds the tiles of one round of banks; columns beyond a row go on in the same columns.
    """

    def cut(axis, longest):
        extent = axis.output_extent
        parts = [axis.inputs(b, min(b + longest, extent)) for b in range(0, extent, longest)]
        return [part.end - part.begin for part in parts]

    sizes = [r * c for r in cut(g.rows, tile[0]) for c in cut(g.columns, tile[1])] * g.n
    rounds = -(-len(sizes) // HBM.banks)
    lots = [sizes[first::rounds] for first in range(rounds)] * -(-g.oc // 16)
    nothing = dict(pixel=Affine(0), k=Affine(0))
    nodes: list[Node] = []
    for row, lot in enumerate(lots[: -(-len(lots) // channels)]):
        nodes.append(GAct(gang=0, row=Affine(row)))
        for bank, inputs in enumerate(lot):
            place = dict(gang=0, bank=bank, banks=1, row=Affine(row), column=Affine(0))
            for _ in range(inputs * (g.c // g.groups)):
                nodes.append(Write(**place, count=1, element=0, elements=16, **nothing))
        for pixel in range(tile[0] * tile[1]):
            # A sum begins with the weights that the one before it ended with.
            for first in range(0, g.reduction, HBM.buffer_columns):
                columns = min(HBM.buffer_columns, g.reduction - first)
                if first or not pixel:
                    nodes.append(Gwrite(buffer=0, pixels=1, columns=columns, **nothing))
                nodes.append(Comp(buffer=0, row=Affine(row), column=Affine(0), count=columns))
            nodes.append(Readres(buffer=0, pixel=Affine(0), channel=Affine(0)))
    organisation = dict(banks=HBM.banks, gangs=1, columns_per_row=64, elements_per_column=16, buffers=1)
    program = PimProgram(
        region="by lanes",
        pim=HBM.name,
        dtype="fp16",
        geometry=g,
        pixel_begin=0,
        pixel_end=g.pixels,
        **organisation,
        buffer_columns=HBM.buffer_columns,
        readres_bursts=HBM.readres_bursts("fp16"),
        result_lanes=HBM.result_lanes,
        row_begin=0,
        rows=len(lots),
        channels=(tuple(nodes),),
    )
    return time_program(program, HBM).cycles


@settings(max_examples=60, deadline=None)
@given(layers(), st.integers(1, 12), st.integers(1, 12), st.sampled_from((1, 3, 16)))
def test_no_program_by_lanes_is_faster(g, rows, columns, channels):
    tile = min(rows, g.oh), min(columns, g.ow)
    assert lane_cycles(g, HBM, "fp16", channels) <= clocks(g, tile, channels)


@pytest.mark.parametrize(
    ("size", "channels", "stride", "tile"), [(7, 960, 1, (7, 1)), (14, 384, 1, (7, 2)), (28, 192, 2, (1, 7))]
)
def test_a_program_by_lanes_comes_close(size, channels, stride, tile):
    """Layers of MobileNetV2: what the bound leaves out is a third at most."""
    window = {"kh": 3, "kw": 3, "stride": (stride, stride), "padding": (1,) * 4}
    g = ConvGeometry(n=1, h=size, w=size, c=channels, oc=channels, groups=channels, **window)
    least = lane_cycles(g, HBM, "fp16", 16)
    assert least <= clocks(g, tile, 16) <= 4 / 3 * least


def test_lanes_need_writes_and_no_adder(graph):
    rules = tuple(rule for rule in HBM.constraints if "WRITE" not in rule.before + rule.after)
    for without in (replace(HBM, constraints=rules), replace(HBM, result_lanes=4)):
        assert list(lower_bounds_ns(graph, without)) == []


@pytest.mark.long
def test_explain_says_it(graph):
    target = system(pim="aim-gddr6")
    search_result = search(graph, target)
    explanation = explain(search_result, graph.region(REGION))
    (way,) = explanation.at_best
    times = f"{way.lower_bound_ns / 1e3:.2f} us at least, the GPU {explanation.gpu_ns / 1e3:.2f} us"
    assert times in explanation.text()
    assert explanation.to_json()["at_best"][0]["how"] == way.how
    assert explain(search_result, graph.region("stem.conv")).at_best == ()
    # As dense products it has candidates like any other layer.
    names = {candidate.name.split()[0] for candidate in explanation.candidates}
    assert {"GPU", "PIM"} <= names and "16 groups together" in explanation.text()
