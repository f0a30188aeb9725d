"""Do TVM's users find what they know: the Relay snippet, the graph executor, export and load?"""

import subprocess
import sys

import pimflow  # isort: skip  first: it gives TVM the Relay that the others import

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from branching import wide_branches
from onnx import helper
from onnx_models import onnx_model
from tvm import relay
from tvm.contrib import graph_executor

from pimflow import frontend, zoo
from pimflow.errors import ArtifactError, PlanError, UnknownNameError, UsageError, VerificationError


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """File, input and reference output."""
    return save_model("toy", tmp_path_factory.mktemp("relay"))


def save_model(name, folder):
    model = zoo.load(name)
    path = folder / f"{name}.onnx"
    onnx.save(model, path)
    x = zoo.example_inputs(model)["input"]
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return path, x, session.run(None, {"input": x})[0]


@pytest.fixture(scope="module")
def built(toy):
    mod, params = relay.frontend.from_onnx(onnx.load(toy[0]))
    return relay.build(mod, target="llvm+pim", params=params)


def check_close(y, reference):
    assert y.shape == reference.shape
    assert np.abs(y - reference).max() <= 2e-3 * np.abs(reference).max()


@pytest.mark.long
@pytest.mark.parametrize("target", ["llvm+pim", "llvm"])
def test_wrong_values_are_refused(target):
    """What `from_onnx` gave is compared with its model, unless one asks for no verification."""
    product = helper.make_node("MatMul", ["x", "w"], ["p"], "product")
    nodes = [product, helper.make_node("Relu", ["p"], ["y"], "relu")]
    weights = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
    model = onnx_model(nodes, {"x": [4, 16]}, {"y": [4, 8]}, {"w": weights})
    mod, params = relay.frontend.from_onnx(model, freeze_params=False)
    relay.build(mod, target=target, params=params)
    params["w"] = tvm.runtime.tensor(-weights)
    with pytest.raises(VerificationError, match="outputs differ from the reference"):
        relay.build(mod, target=target, params=params)
    with tvm.transform.PassContext(config={"pimflow.verify": False}):
        relay.build(mod, target=target, params=params)
    relay.build(mod, target=target, params=dict(params))  # no model is known


@pytest.mark.long
def test_a_fresh_process_needs_only_pimflow(toy, built, tmp_path):
    _, x, reference = toy
    built.export_library(tmp_path / "net.so")
    np.save(tmp_path / "x.npy", x)
    script = """
import sys
{first}
import numpy as np, tvm
lib = tvm.runtime.load_module("net.so")
from tvm.contrib import graph_executor
m = graph_executor.GraphModule(lib["default"](tvm.cpu()))
m.set_input("input", np.load("x.npy"))
m.run()
np.save("y.npy", m.get_output(0).numpy())
assert "pimflow.commands.compile.compile" not in sys.modules
"""

    def start(first):
        command = [sys.executable, "-c", script.format(first=first)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert start("import pimflow").returncode == 0
    check_close(np.load(tmp_path / "y.npy"), reference)
    without = start("")
    assert without.returncode != 0 and "import pimflow" in without.stderr
    assert start("import tvm, pimflow").returncode == 0


@pytest.mark.long
def test_weights_as_parameters(toy):
    path, x, reference = toy
    mod, params = relay.frontend.from_onnx(onnx.load(path), freeze_params=False)
    assert params["fc.weight"].shape == (10, 32)
    assert [v.name for v in mod["main"].params] == ["input", *params]
    lib = relay.build(mod, target="llvm+pim", params=params)
    assert set(lib.get_params()) == set(params)
    assert "PIM" in {choice.mode for choice in lib.plan.choices}
    m = graph_executor.GraphModule(lib["default"](tvm.cpu()))
    m.run(input=x, **params)
    check_close(m.get_output(0).numpy(), reference)


def test_wrong_parameters_are_named(toy):
    mod, params = relay.frontend.from_onnx(onnx.load(toy[0]), freeze_params=False)
    with pytest.raises(UnknownNameError, match=r"fc\.weight"):
        relay.build(mod, target="llvm+pim", params={"fc.wieght": params["fc.weight"]})
    with pytest.raises(UsageError, match=r"'fc\.weight' is \[10, 32\] float32, not \[32\]"):
        relay.build(mod, target="llvm+pim", params={"fc.weight": np.ones(32, np.float32)})


@pytest.mark.long
def test_a_target_without_pim_is_tvm_alone(toy):
    path, x, reference = toy
    mod, params = relay.frontend.from_onnx(onnx.load(path))
    lib = relay.build(mod, target="llvm", params=params)
    assert lib.plan is None
    m = graph_executor.GraphModule(lib["default"](tvm.cpu()))
    m.run(input=x)
    assert np.abs(m.get_output(0).numpy() - reference).max() <= 1e-5 * np.abs(reference).max()


@pytest.mark.long
def test_options_of_the_search_come_from_the_pass_context(toy, tmp_path):
    mod, params = relay.frontend.from_onnx(onnx.load(toy[0]))
    few = pimflow.system(pim_channels=4, accounting="paper", timing="ramulator-pimflow")
    search_result = pimflow.search(mod, few)
    config = {"pimflow.system": few, "pimflow.objective": "latency", "pimflow.search_seconds": 20.0}
    config |= {"pimflow.modes": "gpu,pim,split,pipeline"}
    config |= {"pimflow.max_latency_ns": 2 * search_result.plan.latency_ns, "pimflow.max_energy_pj": 10**15}
    with tvm.transform.PassContext(opt_level=3, config=config):
        assert relay.build(mod, target="llvm+pim", params=params).plan == search_result.plan
    (tmp_path / "plan.json").write_text(search_result.plan.to_json())
    config["pimflow.plan"] = str(tmp_path / "plan.json")
    with (
        tvm.transform.PassContext(config=config),
        pytest.raises(UsageError, match="--search-seconds has no effect"),
    ):
        relay.build(mod, target="llvm+pim", params=params)
    del config["pimflow.search_seconds"]
    with tvm.transform.PassContext(config=config):
        relay_plan = relay.build(mod, target="llvm+pim", params=params).plan
    assert [c.mode for c in relay_plan.choices] == [c.mode for c in search_result.plan.choices]


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        ({"pimflow.solver": "labels"}, UnknownNameError, "label"),
        ({"pimflow.modes": "gpu,splits"}, UnknownNameError, "split"),
        ({"pimflow.objective": "latenci"}, UnknownNameError, "latency"),
        ({"pimflow.max_latency_ns": -3}, UsageError, "max_latency_ns -3"),
        ({"pimflow.max_energy_pj": "little"}, UsageError, "max_energy_pj"),
        ({"pimflow.system": 3}, UsageError, "a name or a file"),
        ({"pimflow.system": "pimflaw"}, UnknownNameError, "pimflow"),
        ({"pimflow.plan": "nowhere.json"}, PlanError, "nowhere.json"),
        ({"pimflow.decompose": "tuker:0.1"}, UnknownNameError, "tucker"),
        ({"pimflow.decompose": "tucker:none"}, UsageError, "rank .none."),
        ({"pimflow.decompose": "tucker:0.1,where=some"}, UsageError, "all, pays"),
        ({"pimflow.decompose": 0.1}, UsageError, "a Request or its text"),
        ({"pimflow.optimize_skips": "pol"}, UnknownNameError, "pool"),
        ({"pimflow.reorder": "perhaps"}, UsageError, r"pimflow\.reorder is True or False"),
        ({"pimflow.fuse_activations": 2}, UsageError, r"pimflow\.fuse_activations is True or False"),
        ({"pimflow.primitives": "some"}, UsageError, r"pimflow\.primitives is True or False"),
        ({"pimflow.max_memory_bytes": 0}, UsageError, "max_memory_bytes 0"),
        ({"pimflow.max_memory_bytes": "1MiB"}, UsageError, "max_memory_bytes"),
    ],
)
def test_wrong_options_are_refused_at_once(config, error, says):
    with pytest.raises(error, match=says):
        tvm.transform.PassContext(config=config)


def outputs(module, x):
    m = graph_executor.GraphModule(module["default"](tvm.cpu()))
    m.set_input(0, x)
    m.run()
    return m.get_output(0).numpy()


def asking(options):
    return tvm.transform.PassContext(config={f"pimflow.{key}": value for key, value in options.items()})


def test_relay_builds_what_compile_does():
    """The same plan and the same bits for the same options, and not what it builds without them."""
    options = {"reorder": True, "fuse": True}
    mod, params = relay.frontend.from_onnx(wide_branches(3))
    with asking(options):
        lib = relay.build(mod, target="llvm+pim", params=params)
    compiled = pimflow.compile(mod, **options, conventions="none")
    assert compiled.verification.is_verified and lib.plan == compiled.plan
    (x,) = frontend.load(mod).example_inputs().values()
    y = outputs(lib.module, x)
    assert (y == outputs(compiled.builds[0].module, x)).all()
    assert lib.plan != pimflow.search(mod).plan


@pytest.mark.long
def test_primitives_in_the_pass_context():
    """Those of a GPU are candidates, as `select` makes them, for a GPU's code alone."""
    mod, params = relay.frontend.from_onnx(zoo.load("toy"))
    fp32 = pimflow.system(dtype="fp32")
    with asking({"system": fp32, "primitives": True}):
        lib = relay.build(mod, target="cuda+pim", params=params)
        with pytest.raises(UsageError, match="no kernels for a GPU"):
            relay.build(mod, target="llvm+pim", params=params)
    assert lib.plan == pimflow.search(mod, fp32, select={"device": "cuda"}).plan
    assert any(choice.primitive for choice in lib.plan.choices)
    with pytest.raises(UsageError, match="fp32"), asking({"primitives": True}):
        relay.build(mod, target="cuda+pim", params=params)


@pytest.mark.long
def test_options_that_contradict_one_another_are_refused(toy):
    mod, params = relay.frontend.from_onnx(onnx.load(toy[0]))
    for options, target, error, says in (
        ({"fuse_activations": True}, "llvm+pim", UsageError, "joins the chains of decomposed layers"),
        ({"decompose": "tucker:0.5"}, "llvm", UsageError, r"'llvm' has no PIM, and pimflow\.decompose"),
        ({"decompose": "tucker:0.5", "plan": pimflow.search(mod).plan}, "llvm+pim", PlanError, "another net"),
    ):
        with asking(options), pytest.raises(error, match=says):
            relay.build(mod, target=target, params=params)


@pytest.mark.long
def test_the_graph_executor_has_its_calls(toy, built):
    m = graph_executor.GraphModule(built["default"](tvm.cpu()))
    assert m.get_num_inputs() == 1 and m.get_input_index("input") == 0 and m.get_input_index("x") == -1
    assert m.get_input_info() == ({"input": (1, 3, 16, 16)}, {"input": "float32"})
    with pytest.raises(ArtifactError, match="'input' was not set"):
        m.run()
    with pytest.raises(ArtifactError, match="call run first"):
        m.get_output(0)
    m.set_input(0, tvm.runtime.tensor(toy[1]))
    m["run"]()
    check_close(m.get_output(0, tvm.runtime.empty((1, 10))).numpy(), toy[2])
    timed = m.benchmark(tvm.cpu(), repeat=2, number=2)
    assert len(timed.results) == 2 and timed.mean > 0
    end_to_end = m.benchmark(tvm.cpu(), repeat=2, number=1, end_to_end=True, input=toy[1])
    assert len(end_to_end.results) == 2 and end_to_end.min > 0
    assert built["get_target"]() == "llvm+pim"


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda m: m.set_input("imput", 0), UnknownNameError, "input"),
        (lambda m: m.set_input("input", np.ones((3, 16, 16), np.float32)), ArtifactError, "1, 3, 16, 16"),
        (lambda m: m.set_input("input", np.full((1, 3, 16, 16), "a")), UsageError, "float32"),
        (lambda m: m.set_input(1, np.ones(1)), ArtifactError, "no input 1"),
        (lambda m: m.set_input("input", [[1], [1, 2]]), UsageError, "no array"),
        (lambda m: m.benchmark(tvm.cpu(), repeat=0), UsageError, "1 or more"),
        (lambda m: m.load_params(b""), UsageError, "params=params"),
        (lambda m: graph_executor.GraphModule(np.ones(1)), UsageError, "default"),
        (lambda m: graph_executor.create("{}", None, None), UsageError, "GraphModule"),
    ],
)
def test_wrong_calls_of_the_executor_say_what_to_do(built, call, error, says):
    with pytest.raises(error, match=says):
        call(graph_executor.GraphModule(built["default"](tvm.cpu())))


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("transform", "tvm.relax.transform"),
        ("vm", "VirtualMachine"),
        ("Var", "tvm.relax.Var"),
        ("zzz", "tvm.relax"),
    ],
)
def test_what_is_gone_says_what_to_use(name, instead):
    with pytest.raises(AttributeError, match=instead):
        getattr(relay, name)
    assert not hasattr(relay, name)
    with pytest.raises(ImportError, match=instead):
        __import__(f"tvm.relay.{name}")


@pytest.mark.long
@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda mod: relay.build(mod, "lvm+pim"), UnknownNameError, r"llvm\+pim"),
        (lambda mod: relay.build(mod), UsageError, "needs a target"),
        (lambda mod: relay.build(mod, "llvm -mcpu=core-avx2"), UsageError, "as a dictionary"),
        (lambda mod: relay.build(mod, "metal"), UsageError, "none of llvm, cuda"),
        (lambda mod: relay.frontend.from_onnx(zoo.load("toy"), opset=10**30), UsageError, "from 1 on"),
        (lambda mod: relay.build("net.onnx", "llvm+pim"), UsageError, "IRModule"),
        (lambda mod: relay.build(mod, "llvm+pim", executor="vm"), UsageError, "leave them out"),
        (lambda mod: relay.build(mod, "llvm+pim")["main"], UnknownNameError, "default"),
        (lambda mod: list(relay.build(mod, "llvm+pim")), UsageError, "one module"),
        (lambda mod: relay.build(mod, "llvm+pim")["default"](tvm.cuda()), ArtifactError, r"llvm\+pim"),
        (lambda mod: relay.frontend.from_keras, AttributeError, "ONNX"),
    ],
)
def test_wrong_calls_of_relay_say_what_to_do(toy, call, error, says):
    mod, _ = relay.frontend.from_onnx(onnx.load(toy[0]))
    with pytest.raises(error, match=says):
        call(mod)


@pytest.mark.long
def test_cuda_builds_anywhere(toy, tmp_path):
    """Kernels beside PIM programs; without a device, whoever runs them is told what to do."""
    mod, _ = relay.frontend.from_onnx(onnx.load(toy[0]))
    lib = relay.build(mod, target="cuda+pim")
    assert "__global__" in lib.kernels.source
    assert bool(lib.kernels.compiler) != bool(lib.kernels.problem)
    lib.export_library(tmp_path / "net.so")
    reloaded = tvm.runtime.load_module(str(tmp_path / "net.so"))
    assert reloaded["get_target"]() == "cuda+pim"
    if not tvm.cuda().exist:
        for library in (lib, reloaded):
            with pytest.raises(ArtifactError, match=r"llvm\+pim|pimflow\[cuda\]"):
                library["default"](tvm.cuda())


@pytest.mark.long
def test_what_was_generated_can_be_read_at_any_level_of_optimisation(toy):
    """At level 0, TVM leaves out the pass that inlines functions."""
    paper = pimflow.system(accounting="paper", timing="ramulator-pimflow")
    config = {"pimflow.system": paper, "pimflow.profiler": "gpu=analytic"}
    with tvm.transform.PassContext(opt_level=0, config=config):
        mod, params = relay.frontend.from_onnx(onnx.load(toy[0]))
        lib = relay.build(mod, target="cuda+pim", params=params)
        with pytest.raises(UnknownNameError, match="learned"):
            tvm.transform.PassContext(config={"pimflow.profiler": "gpu=learnd"})
    on_pim = {name for choice in lib.plan.choices if choice.mode != "GPU" for name in choice.regions}
    assert on_pim and lib.programs.keys() == on_pim
    streams = lib.inspect_source("pim")
    assert all(name in streams for name in ("GWRITE", "G_ACT", "COMP", "READRES", *on_pim))
    assert "__global__" in lib.inspect_source("cuda") and streams in lib.inspect_source()
    with pytest.raises(UnknownNameError, match="cuda, pim"):
        lib.inspect_source("ptx")


def test_an_option_of_two_names_is_given_once(toy):
    mod, params = relay.frontend.from_onnx(onnx.load(toy[0]))
    config = {"pimflow.profiler": "gpu=learned", "pimflow.profiling": pimflow.Profiling()}
    with tvm.transform.PassContext(config=config), pytest.raises(UsageError, match="are one option"):
        relay.build(mod, target="llvm+pim", params=params)


@pytest.mark.long
def test_tvm_is_extended_after_others_looked_for_it():
    """As torch.export does; a process of its own has not imported TVM yet."""
    code = "import importlib.util, pimflow; importlib.util.find_spec('tvm'); from tvm import relay"
    subprocess.run([sys.executable, "-c", code], check=True)
