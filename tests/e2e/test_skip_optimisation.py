"""Does ``--optimize-skips`` make the pool of a compiled network smaller, and nothing else different?"""

import json

import numpy as np
import pytest
from command_line import error_line
from skip_networks import hourglass

import pimflow
from pimflow import frontend
from pimflow.commands.main import main
from pimflow.commands.shared.options import NetworkOptions
from pimflow.commands.shared.prepare import MinimumPools, reduce_skips
from pimflow.decomposition import network as decomposed_network
from pimflow.decomposition import skips
from pimflow.decomposition.request import DecompositionRequest
from pimflow.errors import UnknownNameError, UsageError
from pimflow.hardware import system

PARTITIONED = system(channel_sharing="partitioned")  # pools do not depend on it, and searches are short


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "hourglass.onnx"
    path.write_bytes(hourglass().SerializeToString())
    return str(path)


@pytest.fixture(scope="module")
def decomposed():
    return decomposed_network.decompose(frontend.load(hourglass()), DecompositionRequest.parse("tucker:0.1"))


@pytest.fixture(scope="module")
def skip_reduction(decomposed):
    originals = skips.original_flops(decomposed)
    return skips.find(decomposed.network, system(), "pool", originals)


def test_the_transposed_convolution_is_decomposed(decomposed):
    assert [layer.layer for layer in decomposed.layers] == ["a", "b", "c", "up", "d", "y"]
    (up,) = (layer for layer in decomposed.layers if layer.layer == "up")
    assert up.method == "tucker" and [link.name for link in up.links] == ["fconv", "core", "lconv"]
    assert up.links[-1].geometry.oh == 32


@pytest.mark.long
def test_what_is_found_computes_the_same(decomposed, skip_reduction):
    assert skip_reduction.changed and [skip.name for skip in skip_reduction.copies] == ["skip"]
    assert set(skips.original_flops(decomposed)) >= {"a.lconv", "up.lconv"}
    assert skip_reduction.copies[0].flops_original == 2 * 32 * 32 * 32 * 32 * 9
    inputs = decomposed.network.example_inputs()
    (before,) = decomposed.network.reference(inputs)
    after = frontend.load(skip_reduction.network.module)
    (result,) = after.reference(dict(zip(after.inputs, inputs.values(), strict=True)))
    assert np.abs(before - result).max() <= 1e-4 * np.abs(before).max()


def test_no_copy_is_left_that_saves_nothing(decomposed, skip_reduction):
    target_system = system()
    pool_bytes = skips.estimate_pool_bytes(skip_reduction.network, target_system)
    assert pool_bytes < skips.estimate_pool_bytes(decomposed.network, target_system)
    assert skip_reduction.transformation == "split" and skip_reduction.sites == ("d_fconv",)
    assert skip_reduction.folded == ("d_fconv_2",), "behind the transposed convolution there is no activation"
    assert skip_reduction.flops < skip_reduction.flops_given, "the copy takes fewer than folding saves"
    assert skip_reduction.flops_given < 2 * sum(layer.geometry.macs for layer in decomposed.layers)


def test_a_network_is_kept_if_its_pool_would_not_shrink(skip_reduction):
    outcome = skip_reduction.keep_if_smaller(lambda network: 100)
    assert outcome.network is skip_reduction.original and not outcome.copies and not outcome.sites
    assert "100 to 100 B" in outcome.kept_because
    assert outcome.flops == outcome.flops_given
    outcome = skip_reduction.keep_if_smaller(lambda net: 100 if net is skip_reduction.original else 99)
    assert outcome.changed and (outcome.pool_given_bytes, outcome.pool_bytes) == (100, 99)


@pytest.mark.long
def test_memory_says_what_it_takes_before_and_after(path, capsys):
    options = ["--decompose", "tucker:0.1", "--batch", "2", "--json", "--quiet"]
    rows = {}
    for name, extra_options in (("without", []), ("with", ["--optimize-skips"])):
        assert main(["memory", path, *options, *extra_options]) == 0
        rows[name] = json.loads(capsys.readouterr().out)
    plain, row = rows["without"], rows["with"]
    assert plain["skips"] is None and row["skips"]["changed"]
    assert row["internal_peak_bytes"] == row["pool_bytes"] == row["skips"]["pool_bytes"]
    assert row["skips"]["pool_given_bytes"] == plain["internal_peak_bytes"] > row["internal_peak_bytes"]
    assert row["flops"] == row["skips"]["flops"] < plain["flops"]
    shared_keys = ("internal_peak_bytes_original", "internal_peak_bytes_original_coalesced",
            "internal_peak_bytes_decomposed", "weight_bytes_original", "flops_original")  # fmt: skip
    assert all(plain[key] == row[key] for key in shared_keys)
    # At the concatenation, in maps of 32 channels and 32 x 32 pixels: that which waits, that behind the
    # transposed convolution, and both as one.
    full = 2 * 32 * 32 * 32 * 4
    assert row["internal_peak_bytes_original"] == 4 * full
    assert row["weight_bytes"] < row["weight_bytes_original"] and row["flops"] < row["flops_original"]


@pytest.mark.long
def test_compiled_and_verified_against_the_decomposed_network(path, decomposed):
    """The pools are those with activations fused, which are others; with the least memory they are built."""
    compiled = pimflow.compile(
        path,
        decompose="tucker:0.1",
        optimize_skips="pool",
        fuse_activations=True,
        objective="memory",
        system=PARTITIONED,
        conventions="none",
    )
    fused, unfused = (
        reduce_skips(
            decomposed.network,
            decomposed,
            NetworkOptions(optimize_skips="pool", fuse_activations=fuse),
            MinimumPools(system=PARTITIONED),
        )
        for fuse in (True, False)
    )
    assert compiled.report.extras.skips == fused.summary() != unfused.summary()
    assert compiled.verification.is_verified and compiled.report.extras.skips.changed
    assert unfused.pool_bytes > fused.pool_bytes == compiled.builds[-1].memory.pool_bytes
    names = [region.name for region in compiled.report.regions]
    assert "b.lconv.copy" in names
    roles = {region.name: region.role for region in compiled.search_result.graph.regions}
    assert roles["b.lconv"] == roles["b.lconv.copy"] == "lconv"


def test_by_the_paper_every_cheap_copy_is_made(decomposed):
    originals = skips.original_flops(decomposed)
    by_paper = skips.find(decomposed.network, system(), "paper", originals)
    assert not by_paper.folded
    assert by_paper.copies and all(skip.is_profitable() for skip in by_paper.copies)
    nothing = skips.find(decomposed.network, system(), "paper", dict.fromkeys(originals, 0))
    assert not nothing.copies


def test_bad_input(path, capsys):
    with pytest.raises(UsageError, match="--optimize-skips works on decomposed layers"):
        skips.find(frontend.load("toy"), system())
    with pytest.raises(UnknownNameError, match="criterion"):
        skips.check_criterion("pools")
    assert "add --decompose" in error_line(capsys, 2, "memory", path, "--optimize-skips", "--quiet")
    options = ["--decompose", "tucker:0.1", "--optimize-skips", "--skip-criterion", "pol", "--quiet"]
    assert "pool" in error_line(capsys, 2, "compile", path, *options)
