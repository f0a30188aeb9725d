"""Is attention over a cache in PIM what it is elsewhere, step after step, and is what is wrong refused?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from decoders import Decoder

from pimflow import frontend
from pimflow.compiler import build
from pimflow.compiler.verification import verify
from pimflow.errors import ArtifactError
from pimflow.frontend import onnx_runtime
from pimflow.hardware import PimSpec, System, system
from pimflow.pim_backend.programs.cache_schedule import CacheSchedule
from pimflow.pim_backend.programs.cached_attention import CachedAttention
from pimflow.pim_backend.programs.packed_cache import packed
from pimflow.pim_backend.runtime import targets
from pimflow.placement import Searched, search
from pimflow.relay_passes.regions.extract_regions import extract_regions

CONTEXT, TOKENS = 24, 20
ROUNDING = 2e-3  # of what PIM stores in fp16
SCHEDULES = {
    "newton-gddr6": "keys vector-stationary, spread 2; values vector-stationary, spread 2",
    "aim-gddr6": "keys row-stationary, spread 1; values vector-stationary, spread 2",
}
FORMS = {"many heads": {"heads": 2, "kv_heads": 2}, "shared heads": {"kv_heads": 2, "layers": 2}}


def small(name: str) -> System:
    """Two channels of four banks with rows so short that a cache of tens of tokens takes several."""
    spec = PimSpec.load(name)
    columns = 2 if spec.comp_starts_at_row else 1
    pim = replace(
        spec, name="small", banks_per_gang=4 // spec.gangs, columns_per_row=2, buffer_columns=columns
    )
    return replace(system(pim=name), pim=pim, pim_channels=2)


def cached(searched: Searched, schedule: str) -> dict[str, CachedAttention]:
    """All attention of a network on PIM, behind the rows of weights."""
    row_begin, found = sum(each.placed_rows for each in searched.candidates), {}
    for region in searched.graph.regions:
        if region.attention is not None:
            made = CachedAttention.of(
                region.attention,
                CacheSchedule.parse(schedule),
                searched.system.pim,
                searched.system.dtype,
                channels=searched.system.pim_channels,
                region=region.name,
                row_begin=row_begin,
            )
            row_begin += made.keys.rows + made.values.rows
            found[region.name] = made
    return found


@pytest.fixture(scope="module", params=[(d, f) for d in SCHEDULES for f in FORMS], ids=" ".join)
def built(request):
    device, form = request.param
    network = frontend.load(Decoder(past=CONTEXT - 1, **FORMS[form]).model(), context=CONTEXT)
    searched = search(extract_regions(network.module), small(device))
    caches = cached(searched, SCHEDULES[device])
    made = build.build(network, searched, targets.named_target("llvm+pim"), caches=caches)
    return network, searched, made, FORMS[form]


def test_a_step_is_verified(built):
    network, searched, made, _ = built
    inputs = network.example_inputs()
    found = verify(network, made, searched.system, inputs, network.reference(inputs))
    found.require()
    parts = {check.region.partition("__")[2] for check in found.regions} - {""}
    assert parts >= {"new_keys", "scores", "new_values", "values"}
    assert found.timing_violations == 0


def test_decoding_with_the_cache_is_prefill_of_the_whole_sequence(built):
    """Over rows, tiles and channels, behind a token that is in the caches from the start."""
    network, _, made, form = built
    rng = np.random.default_rng(0)
    ids = rng.integers(50, size=(1, TOKENS))
    prefill = onnx_runtime.reference(Decoder(tokens=TOKENS, past=1, mask="causal", **form).model())
    past = {
        state.name: rng.standard_normal((1, form["kv_heads"], 1, 8)).astype(np.float32)
        for state in network.states
    }
    logits, *presents = prefill({"input_ids": ids, **past})
    executor = made.module["default"](made.device)
    for name, value in past.items():  # bound once
        layout = made.states.inputs[name]
        assert layout.rows > 1
        cache = np.concatenate([value, np.zeros((*value.shape[:2], CONTEXT - 1, 8), np.float32)], axis=2)
        executor["set_input"](name, tvm.runtime.tensor(packed(layout, cache)))
    for turn in range(TOKENS):
        executor["set_input"]("input_ids", tvm.runtime.tensor(ids[:, turn : turn + 1]))
        executor["set_input"]("position", tvm.runtime.tensor(np.array([1 + turn])))
        executor["run"]()
        found = executor["get_output"](0).numpy()[0, 0]
        np.testing.assert_allclose(found, logits[0, turn], rtol=0, atol=ROUNDING * abs(logits).max())
    outputs = [executor["get_output"](n).numpy() for n in range(network.outputs)]
    for cache, present in zip(made.states.unpacked(outputs)[1:], presents, strict=True):
        np.testing.assert_allclose(
            cache[:, :, : 1 + TOKENS], present, rtol=0, atol=ROUNDING * abs(present).max()
        )
        assert (cache[:, :, 1 + TOKENS :] == 0).all()


@pytest.mark.parametrize("position", [-1, CONTEXT])
def test_a_position_that_is_not_in_the_cache_is_refused(built, position):
    network, _, made, _ = built
    inputs = network.example_inputs() | {"position": np.array([position])}
    with pytest.raises(ArtifactError, match=rf"no place {position} in a cache of {CONTEXT}; compile with"):
        made.infer(inputs)
