"""What a depthwise convolution takes on PIM, or would at best, as ``--explain`` says it."""

from dataclasses import replace

import pytest

from pimflow.api.explain import explain
from pimflow.core.region import ConvGeometry
from pimflow.hardware import PimSpec, system
from pimflow.placement import search
from pimflow.placement.candidates.grouped import ways
from pimflow.relay_passes.regions.extract_regions import extract_regions

REGION = "block.depthwise.conv"


@pytest.fixture(scope="module")
def graph():
    from pimflow import frontend

    return extract_regions(frontend.load("toy").module, "toy")


def found(graph, pim: str | PimSpec, **changes):
    region = graph.region(REGION)
    region = replace(region, geometry=replace(region.geometry, **changes))
    return {way.how: way.least_ns for way in ways(region, system(pim=pim), 1000.0)}


def test_the_ways_of_each_device(graph):
    assert list(found(graph, "newton-gddr6")) == []
    assert list(found(graph, "aim-gddr6")) == ["by elementwise products, which the GPU adds"]
    assert list(found(graph, "hbm-pim")) == ["by lanes, which nothing lowers"]
    dense_layer = replace(graph.region(REGION), geometry=ConvGeometry(n=1, h=4, w=4, c=8, oc=8))
    assert ways(dense_layer, system(pim="aim-gddr6"), 0.0) == []


def test_more_work_takes_longer(graph):
    for pim in ("aim-gddr6", "hbm-pim"):
        least = found(graph, pim)
        more = found(graph, pim, h=32, w=32)
        assert all(1000 < least[how] < more[how] for how in least)


def test_by_hand(graph):
    """16 x 16 pixels of 64 channels, 9 products each, on 16 channels of AiM at 2 clocks of 0.5 ns a burst."""
    outputs = 16 * 16 * 64
    bursts = (outputs + 9 * outputs) / 16
    launch_ns = system(pim="aim-gddr6").gpu.launch_ns
    expected = 1000 + bursts * 2 * 0.5 / 16 + launch_ns
    assert found(graph, "aim-gddr6")["by elementwise products, which the GPU adds"] == pytest.approx(expected)
    # By lanes: of the 8 banks that an input reaches, all have a use for it, a column each 4 ns.
    comps = 9 * outputs / 16 / 8
    lanes = 1000 + max(comps * 4, 2 * outputs / 16 * 2) / 16
    assert found(graph, "hbm-pim")["by lanes, which nothing lowers"] == pytest.approx(lanes)


def test_explain_says_it(graph):
    on = system(pim="aim-gddr6")
    searched = search(graph, on)
    explanation = explain(searched, graph.region(REGION))
    (way,) = explanation.at_best
    times = f"{way.least_ns / 1e3:.2f} us at least, the GPU {explanation.gpu_ns / 1e3:.2f} us"
    assert times in explanation.text()
    assert explanation.to_json()["at_best"][0]["how"] == way.how
    assert explain(searched, graph.region("stem.conv")).at_best == ()
    # As dense products, it is a candidate as any other layer.
    names = {each.name.split()[0] for each in explanation.candidates}
    assert {"GPU", "PIM"} <= names and "16 groups together" in explanation.text()
