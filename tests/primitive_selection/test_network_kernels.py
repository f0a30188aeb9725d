"""Are the kernels that are timed alone those that the network calls, and their sum its time?"""

import pytest
import tvm
from tvm import relax

import pimflow
from pimflow import frontend
from pimflow.compiler import build, phases
from pimflow.compiler import kernel_calls as compiler_calls
from pimflow.compiler.kernel_calls import kernel_calls
from pimflow.host.result_cache import ResultCache
from pimflow.pim_backend.runtime import targets
from pimflow.primitive_selection import network_time as network_kernels
from pimflow.primitive_selection.network_time import network_time
from pimflow.primitive_selection.profile import PARTS, KernelTime, NetworkTime, Profile
from pimflow.primitive_selection.selection import summary
from pimflow.primitives import PRIMITIVES

CHOICES = {
    "stem.conv": "im2col-chw-7x32",
    "block.expand.conv": "pointwise-hwc-7x32",
    "block.depthwise.conv": "depthwise-hwc-1x16",
    "down.conv": "im2row-hwc-7x32",
}


@pytest.fixture(scope="module")
def applied():
    network = frontend.load("toy")
    chosen = {layer: PRIMITIVES[name] for layer, name in CHOICES.items()}
    return network, build.with_primitives(network.module, build.LayerPrimitives(chosen))


@pytest.fixture(scope="module")
def calls(applied):
    return kernel_calls(applied[1], pimflow.system())


@pytest.mark.long
def test_they_are_what_an_inference_calls(applied, calls):
    network, mod = applied
    built = phases.build(mod, targets.this_cpu_target())
    machine, seen = relax.VirtualMachine(built, tvm.cpu()), []
    names = {call.name for call in calls}

    def note(_function, symbol, before, _result, *operands):
        if before and symbol in names:
            seen.append((symbol, len(operands)))
        return 0

    machine.set_instrument(tvm.runtime.convert(note))
    machine["main"](*map(tvm.runtime.tensor, network.example_inputs().values()))
    assert seen == [(call.name, len(call.function.params)) for call in calls]


def results(call):
    return len(call.function.params) - int(call.function.attrs.get("pimflow.workspaces", 0))


def test_parts_and_what_is_cold(calls):
    parts = {call.name: call.part for call in calls}
    assert set(parts.values()) <= set(PARTS)
    of_primitives = [name for name, part in parts.items() if part == "primitive"]
    assert len(of_primitives) == len(CHOICES)
    for n, call in enumerate(calls):
        if call.part == "primitive":  # filters, and a bias; a residual was just computed
            assert 1 in call.cold and len(call.cold) >= 2
        assert (0 in call.cold) == (n == 0), "the network's input was read an inference ago"
        assert all(parameter < results(call) - 1 for parameter in call.cold)


@pytest.mark.long
def test_results_are_cold_in_a_pool_larger_than_the_last_cache(applied, calls, tmp_path, monkeypatch):
    size = tmp_path / "size"
    monkeypatch.setattr(compiler_calls, "LAST_LEVEL", size)
    for text, cold in (("8K\n", True), ("1048576K\n", False), ("unknown", False)):
        size.write_text(text)
        for call, before in zip(kernel_calls(applied[1], pimflow.system()), calls, strict=True):
            assert (results(call) - 1 in call.cold) == cold
            assert set(before.cold) <= set(call.cold) and (call.key == before.key) == (not cold)


def test_the_same_kernel_is_timed_once_and_kept(calls, tmp_path, monkeypatch):
    cache, timed = ResultCache(tmp_path / "cache.sqlite"), []

    def count(some):
        timed.extend(some)
        return [float(100 + n) for n in range(len(some))]

    monkeypatch.setattr(network_kernels, "_times_ns", count)
    result = network_time([*calls, *calls], cache)
    assert len(timed) == len({call.key for call in calls}) and len(result.kernels) == 2 * len(calls)
    assert result.time_ns == pytest.approx(2 * network_time(calls, cache).time_ns)
    assert len(timed) == len({call.key for call in calls})
    kernel_times = {kernel.key: kernel.time_ns for kernel in result.kernels}
    assert network_time(calls, known_ns=kernel_times) == network_time(calls, cache)
    kernel_times.pop(calls[0].key)
    assert network_time(calls, known_ns=kernel_times) is None


@pytest.mark.long
def test_select_says_how_long_the_network_takes(tmp_path):
    cache = ResultCache(tmp_path / "cache.sqlite")
    selection = pimflow.select("toy", measure=1, cache=cache)
    row = summary(selection).network_time
    assert row.time_ns == pytest.approx(sum(kernel.time_ns for kernel in row.kernels))
    assert row.time_ns == pytest.approx(sum(getattr(row, f"{part}s_ns") for part in PARTS))
    assert all(kernel.time_ns > 0 for kernel in row.kernels)
    selection.profile.write(tmp_path / "p.json")
    stored = pimflow.select("toy", profile=tmp_path / "p.json")
    assert summary(stored).network_time.time_ns == pytest.approx(row.time_ns, abs=len(row.kernels))
    without = Profile(device=selection.profile.device, code="", times_ns=selection.profile.times_ns,
                      moves_ns=selection.profile.moves_ns)  # fmt: skip
    assert summary(pimflow.select("toy", profile=without)).network_time is None


def test_sums():
    kernels = [KernelTime(kernel=part, part=part, key=part, time_ns=ns) for ns, part in enumerate(PARTS, 1)]
    plain = NetworkTime(kernels=tuple(kernels), measured_ns=8.0).summary()
    assert [getattr(plain, f"{part}s_ns") for part in PARTS] == [1, 2, 3]
    assert (plain.time_ns, plain.difference) == (6, -0.25)
    assert plain.text().endswith("0.000 ms measured, -25.0%")
