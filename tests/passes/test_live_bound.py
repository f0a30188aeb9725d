"""Is the bound of live tensors never above the planned pool, and does it change no choice?"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from skip_graphs import SkipGraph, networks

from pimflow import frontend
from pimflow.decomposition import skips
from pimflow.frontend import Network
from pimflow.hardware import system
from pimflow.relay_passes.decomposition.live_bound import LiveBound
from pimflow.relay_passes.decomposition.optimize_skips import copy_skips
from pimflow.relay_passes.decomposition.split_concat import unsplit_elements

SYSTEM = system()
FP16_BYTES = 2
TOY = frontend.load("toy")  # whose module is replaced


def pool_bytes(mod, fuse: bool) -> int:
    return skips.estimate_pool_bytes(replace(TOY, module=mod), SYSTEM, fuse)


@pytest.mark.long
@given(networks(), st.booleans(), st.data())
@settings(max_examples=examples(60))
def test_no_pool_is_smaller(mod, fuse, data):
    copies = data.draw(st.lists(st.sampled_from(skips.skips(mod) or [None]), unique=True))
    mod = copy_skips(mod, [skip for skip in copies if skip is not None])
    for transformation in data.draw(st.sampled_from(list(skips.TRANSFORMATIONS.values()))):
        mod = transformation[0]()(mod)
    assert LiveBound(mod).peak() * FP16_BYTES <= pool_bytes(mod, fuse)
    assert max(unsplit_elements(mod).values(), default=0) * FP16_BYTES <= pool_bytes(mod, fuse)


def test_a_skip_connection_is_live_beside_what_it_skips():
    graph = SkipGraph(3)
    skip = graph.layer(graph.x, 8, "a")
    wide = graph.layer(skip, 16, "b")
    narrow = graph.layer(wide, 8, "c")
    mod = graph.module(graph.layer(graph.concat([skip, wide, narrow], "joined"), 4, "last"))
    assert LiveBound(mod).peak() == 16 * (8 + 16 + 8)
    assert unsplit_elements(mod) == {"last_fconv": 16 * (8 + 16 + 8)}


def chosen(network: Network, fuse: bool):
    result = skips.find(network, SYSTEM, fuse_activations=fuse)
    return result.copies, result.transformation, result.sites, result.folded, result.flops


def chosen_without_bounds(network: Network, fuse: bool):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skips.LiveBound, "peak", lambda self: 0)
        patch.setattr(skips, "unsplit_elements", lambda mod: {})
        return chosen(network, fuse)


@pytest.mark.long
@given(networks(), st.booleans())
@settings(max_examples=examples(60))
def test_the_bound_changes_no_choice(mod, fuse):
    network = replace(TOY, module=mod)
    assert chosen(network, fuse) == chosen_without_bounds(network, fuse)
