"""Does a network get primitives, by the public API and the command, from measured and from stored times?"""

import json
from dataclasses import replace

import pytest
from command_line import run

import pimflow
from pimflow import frontend
from pimflow.core.kernel import ConvGeometry
from pimflow.core.region import KernelShape, Region
from pimflow.core.region_graph import RegionGraph
from pimflow.errors import ProfileError, UsageError
from pimflow.host.result_cache import ResultCache
from pimflow.primitive_selection import figures, measuring
from pimflow.primitive_selection.layers import Layers, separate_concats
from pimflow.primitive_selection.problem import SelectionProblem
from pimflow.primitive_selection.profile import Device, Profile, bound_ns
from pimflow.primitive_selection.search import minimise
from pimflow.primitive_selection.selection import summary
from pimflow.primitives import PRIMITIVES
from pimflow.relay_passes.kernels.select_primitives import SelectPrimitives

HERE = Device(cpu="here", model="a processor", threads=2)
KEYS = {
    *("status", "time_ns", "memory_bytes", "workspace_bytes", "choices", "transforms", "greedy_time_ns"),
    *("solve_seconds", "gap", "front"),
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A profile of `toy`, two primitives of each layer, in a file."""
    path = tmp_path_factory.mktemp("profile") / "toy.json"
    selection = pimflow.select("toy", measure=2)
    selection.profile.write(path)
    return selection, path


def command(capsys, *arguments):
    return run(capsys, "select", *arguments)


def test_what_is_selected_can_be_compiled(measured):
    selection, _ = measured
    choices = {name: PRIMITIVES[c.primitive] for name, c in selection.selected.choice.items() if c.primitive}
    network = frontend.load("toy")
    applied = SelectPrimitives(choices)(network.module)
    kernels = [str(gv.name_hint) for gv in applied.functions if gv.name_hint != "main"]
    assert len(choices) == 7 and len(kernels) >= len({str(p.name) for p in choices.values()})


@pytest.mark.long
def test_the_command_says_what_the_api_returns(measured, capsys):
    selection, path = measured
    code, out, err = command(capsys, "toy", "--profile", path, "--json", "--pareto", "3", "--cache", "none")
    row = json.loads(out)
    assert code == 0 and row.keys() >= KEYS and err == ""
    assert row["status"] == "optimal"
    assert row["time_ns"] == pytest.approx(selection.selected.sums.time_ns, rel=0.02)
    assert {item["layer"] for item in row["choices"]} == set(Layers(selection.problem.graph).primitive_layers)
    zeros = dict.fromkeys(("predicted", "failed", "layouts_untimed"), 0)
    assert row["measured"] == {"primitives": 12, "of": row["measured"]["of"], **zeros}
    parts = (*row["choices"], *row["others"], *row["transforms"])
    assert row["time_ns"] == pytest.approx(sum(item["time_ns"] for item in parts))
    assert {item["layer"] for item in row["others"]} == set(selection.layouts)
    code, out, _ = command(capsys, "toy", "--profile", path, "--pareto", "3", "--cache", "none")
    assert code == 0 and "measured 12 of" in out and "front:" in out and "im2row" in out


@pytest.mark.parametrize(
    "model, over", [("liveness", "memory"), pytest.param("sum", "workspace", marks=pytest.mark.long)]
)
def test_pictures_show_what_was_found(measured, model, over):
    _, path = measured
    selection = pimflow.select("toy", profile=path, pareto=4, memory_model=model, minimize=over)
    panels = [v["data"]["values"] for row in figures.figure(selection)["vconcat"] for v in row["hconcat"]]
    times, memory, front, speedups, layers, families = panels
    kinds = {**selection.baselines, "selected": selection.selected.sums}
    heights = {row["name"]: row["value"] for row in times}
    assert {name: heights[name] for name in kinds} == {n: s.time_ns / 1e6 for n, s in kinds.items()}
    selected_mib = selection.selected.sums.memory_bytes / 2**20
    assert selected_mib in [row["value"] for row in memory if row["name"] == "selected"]
    sizes = [getattr(point.selected.sums, f"{over}_bytes") / 2**20 for point in selection.front]
    assert [row["taken"] for row in front if row["what"] == "integer program"] == sizes
    assert len(speedups) == len(selection.front)
    assert all(row["value"] >= 1 - 1e-9 for row in speedups if row["told"] != "none")
    # every layer once for every point
    assert sum(row["layers"] for row in families) == 7 * len(selection.front)
    step = [row["mib"] for row in layers if row["choice"] == "selected"]
    if model == "sum":
        assert sum(step) == pytest.approx(selected_mib)
    else:
        filters = sum(-(-c.footprint.filter_bytes // 64) * 64 for c in selection.selected.choice.values())
        resident = (filters + selection.problem.weight_bytes) / 2**20
        assert max(step) == pytest.approx(selected_mib - resident)


@pytest.mark.long
def test_the_command_draws_a_front(measured, capsys, tmp_path):
    pytest.importorskip("vl_convert")
    _, path = measured
    stored = ["toy", "--profile", path, "--cache", "none", "--json", "--plot", tmp_path / "toy.svg"]
    code, out, _ = command(capsys, *stored)
    assert code == 0 and 1 <= len(json.loads(out)["front"]) <= 12
    drawn = (tmp_path / "toy.svg").read_text()
    assert "<svg" in drawn and "speed-up over greedy" in drawn
    code, out, _ = command(capsys, *stored, "--pareto", "2")
    assert code == 0 and len(json.loads(out)["front"]) <= 2


@pytest.mark.long
def test_profiles_are_written_by_the_command(measured, capsys, tmp_path):
    _, path = measured
    code, _, _ = command(capsys, "toy", "--profile", path, "-o", tmp_path / "p.json", "--cache", "none")
    assert code == 0 and Profile.read(tmp_path / "p.json") == Profile.read(path)


@pytest.mark.parametrize(
    "options, code, said",
    [
        (["--minimize", "tim"], 2, "unknown objective 'tim'; did you mean time"),
        (["--memory-model", "sums"], 2, "unknown memory model 'sums'; did you mean sum"),
        (["--memory-budget", "5XB"], 2, "--memory-budget 5XB"),
        (["--memory-budget=-5MiB"], 2, "--memory-budget -5MiB"),
        (["--time-budget", "soon"], 2, "--time-budget"),
        (["--pareto", "1"], 2, "at least 2 points"),
        (["--measure", "0"], 2, "--measure 0: give a number"),
        (["--measure", "few"], 2, "--measure few: give a number"),
        (["--profile", "measurd"], 2, "did you mean measured"),
        (["--profile", "no/file.json"], 3, "no/file.json: cannot be read"),
        (["--measure", "1", "--profile", "a.json"], 2, "leave out --measure"),
        (["--plot", "a.pdf"], 2, "a plot is written as .png, .svg, .html"),
    ],
)  # fmt: skip
def test_wrong_options(capsys, options, code, said):
    got, out, err = command(capsys, "toy", *options, "--cache", "none")
    assert (got, out) == (code, "") and said in err and err.count("\n") == 1


def test_budgets_that_nobody_can_keep(measured, capsys):
    _, path = measured
    stored = ["toy", "--profile", path, "--cache", "none"]
    code, out, err = command(capsys, *stored, "--memory-budget", "1KiB")
    assert (code, out) == (4, "") and "at its peak in layer 'down.conv'" in err and "1024 B available" in err
    code, out, err = command(capsys, *stored, "--minimize", "memory", "--time-budget", "1ns")
    assert (code, out) == (4, "") and "time of 'toy'" in err and "1 ns available" in err


@pytest.mark.long
def test_profiles_of_other_machines(measured, capsys, tmp_path):
    selection, _ = measured
    foreign = replace(selection.profile, device=Device(cpu="cortex-a15", model="Exynos 5422", threads=4))
    foreign.write(tmp_path / "p.json")
    stored = ["toy", "--profile", tmp_path / "p.json", "--cache", "none", "--json"]
    code, _, err = command(capsys, *stored)
    assert code == 3 and "measured on 'Exynos 5422, cortex-a15, 4 threads'" in err
    code, out, _ = command(capsys, *stored, "--device", "Exynos 5422, cortex-a15, 4 threads")
    assert code == 0 and json.loads(out)["device"] == "Exynos 5422, cortex-a15, 4 threads"


def test_profiles_without_what_is_needed(measured):
    selection, _ = measured
    some = {key: ns for key, ns in selection.profile.times_ns.items() if key[1].h != 1}
    with pytest.raises(ProfileError, match="no time of any primitive for layer 'fc'"):
        pimflow.select("toy", profile=replace(selection.profile, times_ns=some))
    with pytest.raises(ProfileError, match="no time of a transform of 1x16x16x3 from CHW to HWC"):
        pimflow.select("toy", profile=replace(selection.profile, moves_ns={}))


def test_nothing_to_choose():
    pool = Region(
        name="pool", operator="max", operators=("nn.max_pool2d",), inputs=("%x",),
        input_shapes=((1, 4, 4, 8),), output_shape=(1, 2, 2, 8),
    )  # fmt: skip
    layers = Layers(RegionGraph(name="pools", regions=(pool,), outputs=("pool",)))
    table = layers.table(Profile(device=Device(cpu="", model="", threads=1), code=""))
    with pytest.raises(UsageError, match="no convolution"):
        minimise(SelectionProblem(graph=layers.graph, table=table))


def concatenation_graph() -> RegionGraph:
    """Two branches, joined by the convolution that reads them; a third reads the join too."""
    shape, joined = (1, 4, 4, 16), (1, 4, 4, 32)

    def conv(name, inputs, shapes, channels, prologue=(), stored=0, stored_inputs=()):
        layer = ConvGeometry(n=1, h=4, w=4, c=channels, oc=16)
        return Region(
            name=name, operator="conv2d", operators=(*prologue, "conv2d"), geometry=layer, prologue=prologue,
            inputs=inputs, input_shapes=shapes, output_shape=shape, extra_inputs=stored_inputs,
            kernel=KernelShape(weight_elements=16 * channels, extra_output_elements=stored),
        )  # fmt: skip

    regions = (
        conv("a", ("%x",), (shape,), 16),
        conv("b", ("%x",), (shape,), 16),
        conv("c", ("a", "b"), (shape, shape), 32, ("concat",), 4 * 4 * 32),
        conv("d", ("c",), (joined,), 32, stored_inputs=(0,)),
        conv("e", ("c",), (shape,), 16),
    )
    return RegionGraph(name="joins", regions=regions, outputs=("d", "e"))


def test_concatenations_stand_apart():
    graph = separate_concats(concatenation_graph())
    assert [region.name for region in graph.regions] == ["a", "b", "c.concat", "c", "d", "e"]
    reads = {region.name: region.inputs for region in graph.regions}
    assert (reads["c.concat"], reads["c"], reads["d"]) == (("a", "b"), ("c.concat",), ("c.concat",))
    assert reads["e"] == ("c",)
    assert graph.region("c").kernel.extra_output_elements == 0
    layers = Layers(graph)
    assert set(layers.primitive_layers) == {"a", "b", "c", "d", "e"}
    assert layers.layouts["c.concat"] == ("HWC", "CHW", "CHWc16")
    assert layers.moves["c.concat", "CHWc16", "CHW"] == ((1, 4, 4, 32), "CHWc16", "CHW")


def pooling_graph(channels: int) -> RegionGraph:
    """A convolution, a pool of what it joins with itself, a mean, and a gate of channels."""
    shape, half, pixel = (1, 8, 8, channels), (1, 4, 4, channels), (1, 1, 1, channels)
    layer = ConvGeometry(n=1, h=8, w=8, c=16, oc=channels)
    pool = ConvGeometry(n=1, h=8, w=8, c=channels, oc=channels, kh=2, kw=2, stride=(2, 2), groups=channels)

    def region(name, operator, operators, inputs, shapes, output, geometry=None, **kernel):
        return Region(
            name=name, operator=operator, operators=operators, inputs=inputs, input_shapes=shapes,
            output_shape=output, geometry=geometry, kernel=KernelShape(**kernel),
        )  # fmt: skip

    regions = (
        region("conv", "conv2d", ("conv2d",), ("%x",), ((1, 8, 8, 16),), shape, geometry=layer),
        region("pool", "nn.max_pool2d", ("nn.max_pool2d",), ("conv",), (shape,), half, pooling=pool),
        region("mean", "mean", ("mean", "reshape"), ("pool",), (half,), (1, channels)),
        region("gate", "mean", ("mean",), ("pool",), (half,), pixel),
        region("axes", "mean", ("mean", "permute_dims"), ("pool",), (half,), (1, channels, 1, 1)),
        region("rows", "mean", ("mean",), ("pool",), (half,), (1, 4, 4, 1)),
        region("scaled", "multiply", ("multiply",), ("pool", "gate"), (half, pixel), half, has_anchor=False),
    )
    return RegionGraph(name="pools", regions=regions, outputs=("mean", "axes", "rows", "scaled"))


@pytest.mark.parametrize("channels, every", [(32, ("HWC", "CHW", "CHWc16")), (24, ("HWC", "CHW"))])
def test_pools_and_means_take_part_in_every_layout(channels, every):
    layers = Layers(pooling_graph(channels))
    for name in ("pool", "mean", "axes", "gate", "scaled"):
        assert layers.layouts[name] == every
    assert layers.layouts["rows"] == ("HWC",)  # over channels
    assert layers.pools.keys() == {"pool", "mean", "axes", "gate"}
    assert not any(tensor in ("mean", "axes", "gate") for tensor, _, _ in layers.moves)  # pixels
    assert layers.pools["gate"] == layers.pools["mean"] and layers.pools["mean"].window.kh == 4
    assert Layers(pooling_graph(channels), "cuda").layouts["pool"] == ("HWC",)


def unit_profile(layers: Layers, **pools_ns: float) -> Profile:
    """Where all takes one nanosecond but the pool, which takes `pools_ns`, by layout."""
    pool = layers.pools["pool"]
    return Profile(
        device=HERE,
        code="",
        times_ns={("direct-hwc-7x32", layer): 1.0 for layer in layers.primitive_layers.values()},
        moves_ns=dict.fromkeys(layers.moves.values(), 1.0),
        pools_ns=dict.fromkeys(layers.pool_layouts, 1.0)
        | {(pool, layout): ns for layout, ns in pools_ns.items()},
    )


def test_a_pool_costs_what_its_layout_adds():
    layers = Layers(pooling_graph(32))
    profile = unit_profile(layers, HWC=50.0, CHW=70.0, CHWc16=45.0)
    problem = SelectionProblem(graph=layers.graph, table=layers.table(profile))
    costs = {c.input.layout: problem.time_ns(c) for c in problem.table.candidates["pool"]}
    assert costs == {"HWC": 5.0, "CHW": 25.0, "CHWc16": 0.0}
    selected = minimise(problem)
    layouts = {name: candidate.input.layout for name, candidate in selected.choice.items()}
    # There and back is two transforms, or three: "scaled" too reads the pool.
    assert layouts["pool"] == "CHWc16" and selected.sums.time_ns < 1 + 5
    slow = layers.table(unit_profile(layers, HWC=45.0, CHW=45.0, CHWc16=45.0))
    assert minimise(replace(problem, table=slow)).choice["pool"].input.layout == "HWC"


def test_layouts_without_times_are_left_out():
    layers = Layers(pooling_graph(32))
    every = unit_profile(layers)
    table = layers.table(replace(every, pools_ns={}))
    assert {len(table.candidates[name]) for name in ("pool", "mean", "gate")} == {1}
    moves = {move: ns for move, ns in every.moves_ns.items() if move[:2] != ((1, 4, 4, 32), "CHWc16")}
    table = layers.table(replace(every, moves_ns=moves))
    assert [c.name for c in table.candidates["pool"]] == ["HWC", "CHW"]
    assert [c.name for c in table.candidates["mean"]] == ["HWC", "CHW", "CHWc16"]  # a pixel goes out as it is


def test_a_network_without_joins_stays():
    graph = replace(concatenation_graph(), regions=concatenation_graph().regions[:2], outputs=("a", "b"))
    assert separate_concats(graph) == graph


@pytest.mark.long
def test_what_is_selected_by_a_prediction_is_measured_after_all(tmp_path, monkeypatch):
    def synthetic_ns(name, layer, machine):
        """What depends on a primitive and a layer as times do, for a machine that is always the same."""
        chosen = PRIMITIVES[name]
        slower = 1 + chosen.lanes / 32 + 2 * (chosen.layout == "CHW") + (chosen.family == "direct")
        return round(bound_ns(chosen, layer) * slower + 1)

    monkeypatch.setattr(measuring, "primitive_ns", synthetic_ns)
    cache = ResultCache(tmp_path / "cache.sqlite")
    selection = pimflow.select("toy", profile="mixed", measure=5, cache=cache)
    row = summary(selection)
    assert [choice.known for choice in row.choices] == ["measured"] * 7
    assert row.measured.predicted > 30
    assert row.measured.predicted + row.measured.primitives == row.measured.applicable
    guessed = pimflow.select("toy", profile="predicted", cache=cache)
    assert guessed.selected.sums.time_ns == pytest.approx(selection.selected.sums.time_ns, rel=1e-6)
    best = pimflow.select("toy", measure=None, cache=cache).selected.sums.time_ns
    assert best <= selection.selected.sums.time_ns <= 1.5 * best


@pytest.mark.long
def test_predictions_need_something_to_learn_from(tmp_path):
    cache = ResultCache(tmp_path / "cache.sqlite")
    with pytest.raises(ProfileError, match="0 measured times are too few"):
        pimflow.select("toy", profile="predicted", cache=cache)
