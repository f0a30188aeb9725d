"""Attention in PIM beside others' cycles; scripts/compare_attention.py prints all of it."""

from dataclasses import replace
from pathlib import Path

import pytest
from calibration.latency_bound import row_limited_ns
from papers import attention_comparison as compare
from papers.attention_comparison import fastest_product, time_product

from pimflow.errors import UnsupportedOpError
from pimflow.hardware import PimSpec, spec_names
from pimflow.pim_backend.programs import attention as programs
from pimflow.pim_backend.programs.cache_layout import KeyLayout, ValueLayout
from pimflow.pim_backend.programs.cache_schedule import KEYS, VALUES
from pimflow.simulators.profiler import BuiltIn

pytestmark = pytest.mark.long

# Of the others, HBM-PIM is below.
DENSE = ("aim-gddr6", "attacc-hbm3", "newton-gddr6", "newton-hbm2")
RUNS = compare.attacc_runs(Path(__file__).parents[1] / "timing/data/attacc_bank.csv")


@pytest.mark.parametrize(("accumulators", "most"), ((1, 115_712), (32, 38_000)))
def test_scores_on_aim_without_refresh(accumulators, most):
    """CENT's mapping takes 115,712 cycles in the AiM simulator; regrouped for 32 accumulators 36,320."""
    pim = compare.disable_refresh(PimSpec.load("aim-gddr6"), accumulators)
    layout = KeyLayout(attention=compare.decode(4096), pim=pim, dtype="fp16", channels=8, spread=8)
    assert time_product(layout, programs.scores(layout, 4096), BuiltIn()).cycles <= most


def test_weights_on_aim_without_refresh():
    """Small products, and the one of several chunks with one accumulator, beside CENT's mapping."""
    chosen = [row for row in compare.AIM_WEIGHTS if row[0] <= 1024 or row[3] == 1]
    assert (4096, 4096, 8, 1, 37_120) in chosen and (576, 576, 8, 32, 1_002) in chosen
    for comparison in compare.aim_weights(chosen):
        assert comparison.error <= 0.02, comparison


def test_neupims_formula():
    """Its 184 cycles a row are ours; S*V writes a vector for each row there, and for some rows here."""
    for comparison in compare.neupims():
        if comparison.what.startswith("QK"):
            assert abs(comparison.error) <= 0.05, comparison
        else:
            assert -0.15 <= comparison.error <= 0.05, comparison


def test_attaccs_runs():
    short = [run for run in RUNS if int(run["L"]) * int(run["nhead"]) < 80_000][::4][:12]
    median, largest = compare.error_summary([compare.attacc(run) for run in short])
    assert median <= 0.10 and largest <= 0.25
    powers = {run["power_constraint"] for run in short}
    assert powers == {"True", "False"}


@pytest.mark.parametrize("name", DENSE)
def test_near_the_bound_of_rows(name):
    """A head of 128, and 4 that share a key: what is not COMPs and changes of rows hides behind them.

    AiM's banks wait while results of two accumulators are read; that alone keeps it below with a query head
    a key. With several, a device with one buffer opens a row, or writes a vector, for each.
    """
    pim = PimSpec.load(name)
    shared = list(compare.device_products([pim], tokens=2048, channels=2, kv_heads=(8,)))
    separate = list(compare.device_products([pim], tokens=2048, channels=2, kv_heads=(32,)))
    assert len(separate) == len(shared) == 2
    assert all(comparison.fraction_with_bus >= 0.9 for comparison in shared), shared
    assert pim.global_buffers == 1 or all(comparison.fraction >= 0.9 for comparison in shared), shared
    for comparison in separate:
        assert comparison.fraction_with_bus >= 0.9, comparison
        assert name == "aim-gddr6" or comparison.fraction >= 0.9, comparison
        if name.startswith("newton"):  # others change rows in a smaller share of the time
            assert comparison.busy >= 2.5 * comparison.busy_of_layer, comparison


@pytest.mark.parametrize("name", spec_names("pim"))
def test_no_order_beats_the_bound(name):
    """Without refresh: its share of the time is a mean, and a short program may have none."""
    pim = compare.disable_refresh(PimSpec.load(name))
    for kv_heads in (8, 2):
        a = compare.decode(384, heads=8, kv_heads=kv_heads)
        scores, queries = a.heads * 384, a.heads * a.head_size
        sizes = {"keys": (scores, queries), "values": (queries, scores)}
        bounds = {
            kind: compare.decode_limited_ns(a, results, 2 * vectors, pim, 2) / pim.tCK_ns
            - 2 * pim.row_switch_cycles  # none in front of the first, none behind the last
            for kind, (results, vectors) in sizes.items()
        }
        for spread in (1, 2):
            layout_fields = {"attention": a, "pim": pim, "dtype": "fp16", "channels": 2, "spread": spread}
            keys, values = KeyLayout(**layout_fields), ValueLayout(**layout_fields)
            for order in programs.ORDERS:
                scores, mix = programs.scores(keys, 384, order), programs.mix(values, 384, order)
                assert time_product(keys, scores, BuiltIn()).cycles >= bounds["keys"]
                assert time_product(values, mix, BuiltIn()).cycles >= bounds["values"]


def test_the_fastest_is_one_of_those_that_fit():
    """Three heads are dealt to AiM's channels in lockstep only where all share each."""
    aim = PimSpec.load("aim-gddr6")
    a = compare.decode(64, heads=3)
    for product in (KEYS, VALUES):
        assert fastest_product(product, a, aim, "fp16", 4, BuiltIn()).layout.spread == 4
    mute = replace(aim, constraints=tuple(rule for rule in aim.constraints if "WRITE" not in rule.after))
    with pytest.raises(UnsupportedOpError, match="no rules for WRITE"):
        fastest_product(KEYS, a, mute, "fp16", 4, BuiltIn())


def test_lanes_read_less_on_a_device_without_adder_trees():
    """Near the bound of rows, where 16 partial sums of each result keep the bus for half of the time."""
    hbm = PimSpec.load("hbm-pim")
    a = compare.decode(2048, heads=4)
    bound = row_limited_ns(a.cache_elements, a.group, hbm, 2) / hbm.tCK_ns
    for cls, step in ((KeyLayout, programs.scores), (ValueLayout, programs.mix)):
        layout_fields = {"attention": a, "pim": hbm, "dtype": "fp16", "channels": 2, "spread": 2}
        by_lanes, trees = cls(**layout_fields, lanes=16), cls(**layout_fields)
        accumulate = {"accumulate": True} if cls is ValueLayout else {}
        cycles = time_product(by_lanes, step(by_lanes, 2048, **accumulate), BuiltIn()).cycles
        assert cycles < 0.8 * time_product(trees, step(trees, 2048), BuiltIn()).cycles
        assert bound >= 0.9 * cycles
