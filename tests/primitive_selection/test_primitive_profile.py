"""Are times of primitives measured in a sensible order, kept, stored and refused where they do not belong?"""

import ast
import importlib.util
import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm
from conv_layers import layers_for, to_layout
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples

from pimflow.core.kernel import ConvGeometry
from pimflow.errors import OutputError, ProfileError
from pimflow.host import result_cache as cache_module
from pimflow.host.result_cache import ResultCache
from pimflow.primitive_selection import machines, measuring
from pimflow.primitive_selection.profile import (
    Device,
    Pooling,
    Profile,
    applicable_primitives,
    bound_ns,
    count_unmeasured,
    is_free,
    macs,
    measuring_order,
)
from pimflow.primitives import PRIMITIVES, get_primitive
from pimflow.primitives.families import tensor_shape
from pimflow.primitives.layer import LAYOUTS

LAYER = ConvGeometry(n=1, h=8, w=8, c=16, oc=16, kh=3, kw=3, padding=(1, 1, 1, 1))
HERE = Device(cpu="here", model="a processor", threads=2)
maps = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 3, 16, 32]))


def layouts_of(shape):
    return [layout for layout in LAYOUTS if layout != "CHWc16" or shape[-1] % 16 == 0]


@given(maps)
def test_a_transform_is_free_where_bytes_stay(shape):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    for target in layouts_of(shape):
        for source in layouts_of(shape):
            stay = to_layout(source, x).tobytes() == to_layout(target, x).tobytes()
            # Of one image; a pixel of several, or one that is free by chance, may be charged.
            assert stay or not is_free((shape, source, target))
            if shape[0] == 1 and source != target and min(shape[1:]) > 1 and shape[-1] != 16:
                assert not stay and not is_free((shape, source, target))


@settings(max_examples=examples(6), deadline=None)
@given(maps, st.integers(0, 99))
def test_transforms_move_every_element(shape, seed):
    x = np.random.default_rng(seed).standard_normal(shape, np.float32)
    n, h, w, c = shape
    for source in layouts_of(shape):
        for target in layouts_of(shape):
            function = measuring.transform_kernel((shape, source, target)).with_attr("global_symbol", "main")
            y = tvm.runtime.tensor(np.zeros(tensor_shape(target, n, c, h, w), np.float32))
            executable = tvm.compile(tvm.IRModule({"main": function}), "llvm")
            executable["main"](tvm.runtime.tensor(to_layout(source, x)), y)
            assert np.array_equal(y.numpy(), to_layout(target, x))


@pytest.mark.long
@pytest.mark.parametrize("name", PRIMITIVES)
def test_bounds_count_the_products_that_are_formed(name):
    chosen = PRIMITIVES[name]
    for layer in layers_for(chosen, 3):
        formed = macs(chosen, layer)
        assert formed > 0 and bound_ns(chosen, layer) > 0
        if chosen.family in ("loops", "depthwise"):
            assert formed == layer.macs
        elif chosen.family not in ("winograd", "fft", "shifted"):
            assert layer.macs <= formed


def test_winograd_saves_what_it_should():
    layer = ConvGeometry(n=1, h=26, w=26, c=64, oc=64, kh=3, kw=3)
    assert layer.macs / macs(get_primitive("winograd-2d-f4-hwc-14x16"), layer) == 4.0
    assert layer.macs / macs(get_primitive("winograd-1d-f2-hwc-14x16"), layer) == 1.5


def test_every_kind_is_measured_before_the_second_of_any():
    ordered = measuring_order(LAYER)
    assert sorted(p.name for p in ordered) == sorted(p.name for p in applicable_primitives(LAYER))
    kinds = [(p.family, p.layout, p.tile, p.directions) for p in ordered]
    assert len(set(kinds[: len(set(kinds))])) == len(set(kinds))


@settings(max_examples=examples(6), deadline=None)
@given(
    st.sampled_from(["nn.max_pool2d", "nn.avg_pool2d", "mean"]),
    st.tuples(*(st.integers(1, 3) for _ in range(3))),
    st.sampled_from([16, 32]),
    st.integers(0, 99),
)
def test_pools_are_the_same_in_every_layout(operator, window, channels, seed):
    k, stride, side = window
    size, step = (side + 2, stride) if operator != "mean" else (side, 1)
    k, pad = (min(k, size), k // 2) if operator != "mean" else (size, 0)
    sides = {"kh": k, "kw": k, "stride": (step, step), "padding": (pad,) * 4}
    layer = ConvGeometry(n=1, h=size, w=size, c=channels, oc=channels, groups=channels, **sides)
    x = np.random.default_rng(seed).standard_normal((1, size, size, channels), np.float32)
    results = []
    for layout in LAYOUTS:
        function = measuring.pooling_kernel(Pooling(operator=operator, window=layer), layout)
        built = measuring.build_kernels({"main": function}, machines.Machine())
        shape = tensor_shape(layout, 1, channels, layer.oh, layer.ow)
        y = tvm.runtime.tensor(np.zeros(shape, np.float32))
        built["main"](tvm.runtime.tensor(to_layout(layout, x)), y)
        results.append(y.numpy())
    for layout, result in zip(LAYOUTS, results, strict=True):
        np.testing.assert_allclose(result, to_layout(layout, results[0]), rtol=1e-6, atol=1e-6)


profiles = st.builds(
    Profile,
    device=st.builds(Device, cpu=st.text(), model=st.text(), threads=st.integers(1, 99)),
    code=st.text(),
    times_ns=st.dictionaries(
        st.tuples(
            st.sampled_from(sorted(PRIMITIVES)),
            st.builds(
                ConvGeometry,
                **dict.fromkeys(("n", "h", "w", "c", "oc", "kh"), st.integers(1, 9)),
                stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
            ),
        ),
        st.integers(0, 10**9).map(float),
    ),
    moves_ns=st.dictionaries(
        st.tuples(maps, st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)), st.integers(0, 10**9).map(float)
    ),
    pools_ns=st.dictionaries(
        st.tuples(st.builds(Pooling, operator=st.text(), window=st.just(LAYER)), st.sampled_from(LAYOUTS)),
        st.integers(0, 10**9).map(float),
    ),
)


@settings(deadline=None)
@given(profiles)
def test_files_say_all(tmp_path_factory, profile):
    path = tmp_path_factory.mktemp("profile") / "p.json"
    profile.write(path)
    assert Profile.read(path) == profile
    first = path.read_bytes()
    Profile.read(path).write(path)
    assert path.read_bytes() == first
    assert list(path.parent.iterdir()) == [path]


def broken(**changes):
    times_ns, moves_ns = {("direct-hwc-loops", LAYER): 5.0}, {((1, 2, 2, 3), "HWC", "CHW"): 2.0}
    plain = Profile(device=HERE, code="c", times_ns=times_ns, moves_ns=moves_ns).to_plain()
    return json.dumps(plain | changes)


@pytest.mark.parametrize(
    "content, said",
    [
        ("{", "Expecting property name"),
        ("[]", "is no profile of version"),
        (broken(version="pimflow-profile/0"), "is no profile of version"),
        (broken(device={"cpu": "x"}), "device"),
        (broken(layers=[{"layer": {"n": 1}, "times_ns": {}}]), r"layers\[0\]"),
        (broken(layers=[{"times_ns": {}}]), r"layers\[0\]"),
        (broken(kernels=[["x", 10**400]]), r"kernels\[0\]: .*a time of 1000"),
        (broken(transforms=[[[1, 2, 2, 3], "HWC", "CHW", -1]]), r"transforms\[0\].*-1 ns"),
        (broken(transforms=[[[1, 2, 2, 3], "HWC", "CHW", "2"]]), r"transforms\[0\].*'2' ns"),
        (broken(transforms=[["HWC"]]), "transforms"),
        (broken(pools=[["mean", {"n": 1}, "HWC", 3]]), r"pools\[0\]"),
    ],
)
def test_files_that_are_no_profiles(tmp_path, content, said):
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(ProfileError, match=said) as caught:
        Profile.read(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(ProfileError, match="cannot be read: No such file"):
        Profile.read(tmp_path / "p.json")
    with pytest.raises(OutputError, match="cannot be written"):
        Profile(device=HERE, code="c").write(tmp_path / "no" / "p.json")


def test_a_profile_of_another_machine():
    profile = Profile(device=HERE, code="c")
    profile.require_device(HERE, None)
    profile.require_device(None, HERE.name)
    with pytest.raises(ProfileError, match="measured on 'a processor, here, 2 threads', not on 'b, there"):
        profile.require_device(Device(cpu="there", model="b", threads=2), None)
    with pytest.raises(ProfileError, match="not on 'another'"):
        profile.require_device(HERE, "another")


@pytest.mark.long
def test_what_was_measured_is_not_measured_again(tmp_path, monkeypatch):
    cache = ResultCache(tmp_path / "cache.sqlite")
    moves = [((1, 8, 8, 16), "HWC", "CHW"), ((1, 8, 8, 16), "CHW", "HWC")]
    seen = []
    pools = [(Pooling(operator="mean", window=replace(LAYER, kh=8, kw=8, groups=16)), "CHW")]
    first = measuring.Measurer(cache, seen.append).measure([LAYER, LAYER], moves, 2, pools=pools)
    assert [name for name, _ in first.times_ns] == [p.name for p in measuring_order(LAYER)[:2]]
    assert all(ns > 0 for times in (first.times_ns, first.moves_ns, first.pools_ns) for ns in times.values())
    assert set(first.moves_ns) == set(moves) and set(first.pools_ns) == set(pools)
    assert seen == sorted(seen) and seen[-1] == 1.0
    assert count_unmeasured(first, [LAYER]) == len(applicable_primitives(LAYER)) - 2
    monkeypatch.setattr(measuring, "primitive_ns", None)
    monkeypatch.setattr(measuring, "small_ns", None)
    for count in (2, 1):  # known ones cost nothing
        assert measuring.Measurer(cache).measure([LAYER], moves, count, pools=pools) == first


def test_everything_that_makes_a_kernel_decides_its_time():
    """Nothing that `MEASURED` imports is missing there, but data types that are part of the key."""
    of_the_key = {"core.kernel", "core.region", "errors", "primitives", "primitives.catalogue"}
    schedules = ("relay_passes.schedules.schedule_cpu", "relay_passes.schedules.keep_registers")
    waiting = ["primitives.kernels", *schedules]
    modules: set[str] = set()
    while waiting:
        part = waiting.pop()
        if part in modules or part in of_the_key:
            continue
        modules.add(part)
        origin = Path(importlib.util.find_spec(f"pimflow.{part}").origin)
        for path in origin.parent.glob("*.py") if origin.name == "__init__.py" else [origin]:
            waiting += imports_of_file(path)
    kernels = {part for part in modules if part.startswith("primitives.kernels.")}
    assert modules - kernels == set(measuring.MEASURED)


def test_no_two_primitives_have_one_key():
    """The key of a time has a primitive's parameters for its name; its family is one of them."""
    keys = {repr(replace(primitive, name="")) for primitive in PRIMITIVES.values()}
    assert len(keys) == len(PRIMITIVES)
    assert not any(" at 0x" in key for key in keys), "addresses differ from process to process"


def imports_of_file(path):
    """Modules of pimflow that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pimflow."):
            base = node.module.removeprefix("pimflow.")
            inner = [f"{base}.{alias.name}" for alias in node.names]
            modules = (
                [name for name in inner if importlib.util.find_spec(f"pimflow.{name}")]
                if (importlib.util.find_spec(node.module).submodule_search_locations)
                else []
            )
            yield from modules or [base]


def test_measurements_are_those_of_their_cause(tmp_path, monkeypatch):
    cache = ResultCache(tmp_path / "cache.sqlite")
    monkeypatch.setattr(measuring, "primitive_ns", lambda *_: 7.0)
    name = measuring_order(LAYER)[0].name
    first = measuring.Measurer(cache).measure([LAYER], [], 1)
    assert list(first.times_ns) == [(name, LAYER)]

    def cache_count():
        return len(measuring.Measurer(cache).measure([LAYER], [], 0).times_ns)

    assert cache_count() == 1
    monkeypatch.setattr(cache_module, "code_digest", lambda: "search and simulators were edited")
    assert cache_count() == 1
    changes = [
        (machines, "thread_count", lambda: 99),
        (measuring, "compiler", lambda: "another compiler"),
        (measuring, "COLD", "other temperatures"),
        (measuring, "sources_digest", lambda _: "kernels were edited"),
    ]
    for module, attribute, value in changes:
        with monkeypatch.context() as patched:
            patched.setattr(module, attribute, value)
            assert cache_count() == 0
    with monkeypatch.context() as patched:
        patched.setitem(PRIMITIVES, name, replace(PRIMITIVES[name], places=3))
        assert cache_count() == 0
    with monkeypatch.context() as patched:
        patched.setitem(PRIMITIVES, "renamed", replace(PRIMITIVES[name], name="renamed"))
        patched.delitem(PRIMITIVES, name)
        assert cache_count() == 1


@pytest.mark.parametrize("value", ['"fast"', "-1", "NaN", "null", "[1]"])
def test_what_is_no_time_is_measured_again(tmp_path, monkeypatch, value):
    cache = ResultCache(tmp_path / "cache.sqlite")
    monkeypatch.setattr(measuring, "primitive_ns", lambda *_: 7.0)
    first = measuring.Measurer(cache).measure([LAYER], [], 1)
    with sqlite3.connect(tmp_path / "cache.sqlite") as connection:
        connection.execute("UPDATE results SET value = ?", (value,))
    assert measuring.Measurer(cache).measure([LAYER], [], 1) == first


def test_what_cannot_be_built_is_left_out(monkeypatch):
    def fails(name, layer, machine):
        if name == measuring_order(LAYER)[0].name:
            raise RuntimeError("first\nno such instruction")
        return 7.0

    monkeypatch.setattr(measuring, "primitive_ns", fails)
    profile = measuring.Measurer().measure([LAYER], [], 2)
    assert list(profile.failed.values()) == ["no such instruction"]
    assert list(profile.times_ns.values()) == [7.0]
