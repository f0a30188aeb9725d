"""Do whole networks come out as the paper has them?"""

import itertools
import json

import pytest
from command_line import run_json

from pimflow import zoo
from pimflow.commands.fuse import fuse
from pimflow.commands.fuse.fusion_report import layer_shares
from pimflow.commands.main import main
from pimflow.core.kernel import ConvGeometry
from pimflow.core.region import KernelShape, Region
from pimflow.core.region_graph import RegionGraph
from pimflow.errors import UsageError
from pimflow.fusion import (
    OBJECTIVES,
    Accelerator,
    FusionRules,
    fuse_layers,
    layers_from_onnx,
    layers_from_regions,
)

# Deep Fusion, Table 1: shares of computation and of memory access in ResNet-18, in percent.
TABLE_1 = {
    "convolution": (99.55, 45.59),
    "batch_norm": (0.15, 15.27),
    "scale": (0.15, 15.24),
    "relu": (0.06, 13.10),
    "pooling": (0.05, 2.92),
    "eltwise": (0.02, 6.41),
    "inner_product": (0.03, 1.46),
}


def layers_of(name):
    return layers_from_onnx(zoo.load_model(name, seed=None))


@pytest.fixture(scope="module")
def resnet18():
    return layers_of("resnet-18")


def test_table_1(resnet18):
    shares = {row.kind: row for row in layer_shares(resnet18)}
    assert shares.keys() == TABLE_1.keys()
    for kind, (computation, memory) in TABLE_1.items():
        assert 100 * shares[kind].computation == pytest.approx(computation, abs=1)
        assert 100 * shares[kind].memory == pytest.approx(memory, abs=1)


@pytest.mark.parametrize(
    "name", ["toy", "googlenet", "inception-v3", "mobilenet-v2", "squeezenet-1.1", "vgg-19"]
)
def test_layers_have_the_shapes_and_the_work_of_the_network(name):
    graph = layers_of(name)
    for layer in graph.layers:
        for source, maps in zip(layer.inputs, layer.maps, strict=True):
            assert graph.shapes[source] == tuple(axis.extent for axis in maps), layer.name
            assert graph.shapes[layer.name] == tuple(axis.output_extent for axis in maps), layer.name
    info = zoo.describe(name)
    assert sum(layer.macs for layer in graph.layers) == info.macs
    # means and variances are weights here, too
    statistics = sum(2 * graph.shapes[layer.name][3] for layer in graph.layers if layer.kind == "batch_norm")
    assert sum(layer.weight_elements for layer in graph.layers) == info.parameters + statistics


@pytest.mark.parametrize("name", ["bert-base", "efficientnet-b0", "srgan", "ssd-resnet50"])
def test_any_network_can_be_read(name):
    graph = layers_of(name)
    for layer in graph.layers:
        for source, maps in zip(layer.inputs, layer.maps, strict=True):
            assert graph.shapes[source] == tuple(axis.extent for axis in maps), layer.name
    assert graph.ideal_elements < sum(map(graph.traffic_elements, graph.layers))


@pytest.mark.long
def test_resnet18_moves_less_with_each_step(resnet18):
    """Figures 8 and 9: fusion pays, reuse more; never slower than unfused."""
    rules = [FusionRules(reuse=reuse, search="runs") for reuse in ("none", "lifetime", "deep")]
    plans = [fuse_layers(resnet18, rules=item) for item in rules]
    moved = [plans[0].dram_bytes_unfused, *(plan.dram_bytes for plan in plans)]
    assert moved == sorted(moved, reverse=True)
    assert plans[-1].reduction >= 0.55
    assert all(plan.time_overlapped_ns <= plan.layer_by_layer.time_overlapped_ns for plan in plans)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
def test_the_objective_is_what_gets_least(dtype):
    """Of three plans in memory that is short, each is the best by its own measure; energy by hand."""
    graph = layers_of("toy")
    accelerator = Accelerator(on_chip_bytes=12 << 10, operations_per_second=2e9, dtype=dtype)
    plans = {o: fuse_layers(graph, accelerator, FusionRules(objective=o)) for o in OBJECTIVES}
    measures = {
        "traffic": lambda plan: plan.dram_bytes,
        "time": lambda plan: plan.time_overlapped_ns,
        "energy": lambda plan: plan.energy_pj,
    }
    for objective, measure in measures.items():
        assert min(map(measure, plans.values())) == pytest.approx(measure(plans[objective]))
    by_hand = (
        {"fp32": 4.6, "fp16": 1.5, "int8": 0.3}[dtype] * sum(g.operations for g in plans["time"].groups) / 2
    )
    assert plans["time"].energy_pj == pytest.approx(by_hand + 162.5 * plans["time"].dram_bytes)


@pytest.mark.long
def test_the_search_of_networks_with_branches_is_bounded(monkeypatch):
    """In tilings that are priced, which no other work on the machine changes."""
    memory_ns, priced = Accelerator.memory_ns, itertools.count()

    def count_and_price(*args):
        next(priced)
        return memory_ns(*args)

    monkeypatch.setattr(Accelerator, "memory_ns", count_and_price)
    assert fuse_layers(layers_of("googlenet")).reduction > 0.7
    assert 30_000 < next(priced) < 65_000


def test_folded_layers_are_the_regions(capsys):
    from pimflow import frontend
    from pimflow.relay_passes.regions.extract_regions import extract_regions

    network = frontend.load("toy")
    regions = extract_regions(network.module, "toy")
    graph = layers_from_regions(regions)
    assert [layer.name for layer in graph.layers] == [region.name for region in regions.regions]
    assert sum(layer.macs for layer in graph.layers) == zoo.describe("toy").macs
    plan = fuse.fuse(network.module, baseline="folded")
    assert plan.dram_bytes == plan.dram_bytes_ideal  # 768 KiB hold all of it
    with pytest.raises(UsageError, match="--baseline folded"):
        fuse.fuse(network.module)


def test_a_folded_pooling_keeps_its_map_through_a_flatten():
    """As VGG's last one: what reads it may need all of it, it reads its windows alone."""
    window = ConvGeometry(n=1, h=4, w=4, c=2, oc=2, kh=2, kw=2, stride=(2, 2), groups=2)
    kinds = ("nn.max_pool2d", "reshape")
    pool = Region(
        name="pool", operator=kinds[0], operators=kinds, inputs=("%x",), input_shapes=((1, 4, 4, 2),),
        output_shape=(1, 8), kernel=KernelShape(pooling=window),
    )  # fmt: skip
    fc = Region(
        name="fc", operator="fc", operators=("matmul",), inputs=("pool",), input_shapes=((1, 8),),
        output_shape=(1, 3), geometry=ConvGeometry(n=1, h=1, w=1, c=8, oc=3),
        kernel=KernelShape(weight_elements=24),
    )  # fmt: skip
    graph = layers_from_regions(RegionGraph(name="g", regions=(pool, fc), outputs=("fc",)))
    assert graph.shapes["pool"] == (1, 2, 2, 2)
    plan = fuse_layers(graph)
    assert (plan.dram_bytes, plan.recomputed_macs) == (4 * (32 + 24 + 3), 0)


def test_command(capsys):
    report = run_json(capsys, "fuse toy --on-chip 24KiB --halo retain")
    assert report["dram_bytes_ideal"] <= report["dram_bytes"] < report["dram_bytes_unfused"]
    assert report["reduction"] == pytest.approx(1 - report["dram_bytes"] / report["dram_bytes_unfused"])
    assert report["speedup_roofline"] >= 1 and report["speedup_serial_baseline"] > report["speedup_roofline"]
    assert sum(group["dram_bytes"] for group in report["groups"]) == report["dram_bytes"]
    assert all((group["on_chip_bytes"] or 0) <= 24 << 10 for group in report["groups"])
    assert sum(row["memory"] for row in report["layers"]) == pytest.approx(1)
    assert main(["fuse", "toy", "--search", "greedy", "--objective", "time"]) == 0
    assert "less" in capsys.readouterr().out


@pytest.mark.long
def test_a_decomposed_network_is_fused(capsys):
    """Against the original's layers, whose outputs it does not give."""
    options = ["--decompose", "tucker:0.3", "--json", "--quiet", "--on-chip", "24KiB"]
    assert main(["fuse", "toy", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["dram_bytes_original"] == fuse.fuse("toy").dram_bytes_unfused
    assert report["dram_bytes_ideal"] <= report["dram_bytes"] < report["dram_bytes_unfused"]
    assert report["reduction_of_original"] == 1 - report["dram_bytes"] / report["dram_bytes_original"]
    change = report["decomposition"]
    assert change["max_relative_difference"] > 0.01 and change["request"] == "tucker:0.3"
    names = {name for group in report["groups"] for name in group["layers"]}
    assert {f"{change['layers'][0]['name']}.{part}" for part in ("fconv", "core", "lconv")} <= names


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--on-chip", "100B"], 4, "smallest tile of layer 'pool': needs 260 bytes, 100 bytes available"),
        (["--on-chip", "0KiB"], 2, "give a positive number"),
        (["--on-chip", "1.5"], 2, "unknown number or unit; write it as 768KiB"),
        (["--on-chip", "0.3B"], 2, "no whole number"),
        (["--bandwidth", "0GB/s"], 2, "give a positive number"),
        (["--bandwidth=-1GB/s"], 2, "give a positive number"),
        (["--bandwidth", "3parsec"], 2, "write it as 1.5GB/s"),
        (["--compute", "200GB/s"], 2, "write it as 200GFLOPS"),
        (["--reuse", "depp"], 2, "unknown reuse 'depp'; did you mean deep?"),
        (["--search", "gredy"], 2, "did you mean greedy?"),
        (["--halo", "x"], 2, "unknown halo"),
        (["--baseline", "folde"], 2, "did you mean folded"),
        (["--dtype", "fp33"], 2, "unknown dtype"),
        (["--objective", "money"], 2, "unknown objective"),
        (["--decompose", "tuker:0.1"], 2, "tuker"),
        (["--decompose", "tucker:0.1", "--execute"], 2, "not with --decompose"),
        (["--energy", "deep-fusio"], 2, "did you mean deep-fusion?"),
        (["--energy", "no.toml"], 3, "no.toml: cannot be read"),
    ],
)
def test_bad_input(options, code, message, capsys):
    assert main(["fuse", "toy", "--quiet", *options]) == code
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""
