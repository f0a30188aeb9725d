"""Is C that pimflow writes C, right, and built by any compiler without TVM?"""

import ctypes
import json
import math
import re
import shutil
import subprocess

import ml_dtypes
import numpy as np
import onnx
import pytest
import tvm
from command_line import error_line, run_json
from conv_layers import ON_CPU, layers_for, operands, to_layout
from hostile_names import NAMES
from length import long_but
from tvm import relax

import pimflow
from pimflow.commands.main import main
from pimflow.compiler.c_code import builds, kernels
from pimflow.compiler.c_code import source as c_source
from pimflow.compiler.c_code.network import require_no_pim
from pimflow.core.output_error import relative_error
from pimflow.errors import ArtifactError, UnknownNameError, UnsupportedOpError, UsageError
from pimflow.hardware import system
from pimflow.primitives import PRIMITIVES
from pimflow.primitives.families import output_shape
from pimflow.primitives.filters import transform_filters
from pimflow.primitives.kernels.prim_func import kernel
from pimflow.relay_passes.memory.lift_workspaces import with_workspaces
from pimflow.relay_passes.schedules.schedule_cpu import ScheduleCpu

pytestmark = [pytest.mark.skipif(not builds.local_compiler(), reason="needs a C compiler")]
C = tvm.target.Target(kernels.TARGET)
LLVM = tvm.target.Target("llvm")
WARNINGS = ("-Wall", "-Wextra", "-pedantic", "-Werror")
BOUND = 2e-6  # of the largest output: compilers contract products into sums, or do not


def schedule(primitive, layer, target):
    """A kernel that allocates nothing: its workspaces are its last parameters."""
    with target:
        module = ScheduleCpu()(tvm.IRModule({"kernel": kernel(primitive, layer)}))
    return with_workspaces(module["kernel"])


@pytest.mark.parametrize("options", long_but([], [(), ("-DPIMFLOW_LANES=4",), ("-DPIMFLOW_LANES=1", "-O1")]))
def test_primitives_of_every_family_are_what_llvm_makes_of_them(tmp_path, options):
    on_cpu = [PRIMITIVES[name] for name in ON_CPU]
    chosen = {f: next(p for p in on_cpu if p.family == f) for f in {p.family: 1 for p in on_cpu}}
    chosen["blocked"] = PRIMITIVES["direct-chwc16-7x16"]
    if options:
        del chosen["fft"]  # half a megabyte of C
    layers = {name: layers_for(primitive, 1)[0] for name, primitive in chosen.items()}
    functions = {name: schedule(p, layers[name], C) for name, p in chosen.items()}
    text = kernels.kernel_source(functions, C).replace("PIMFLOW_KERNEL void", "void")
    (tmp_path / "k.c").write_text(text)
    builds.require_compiler().build([tmp_path / "k.c"], tmp_path / "k.so", [*builds.SHARED, *options])
    library = ctypes.CDLL(str(tmp_path / "k.so"))
    for name, primitive in chosen.items():
        layer = layers[name]
        x, filters = operands(layer)
        inputs = [to_layout(primitive.layout, x), transform_filters(primitive, layer, filters)]
        shapes = [tuple(int(d) for d in param.shape) for param in functions[name].params]
        arrays = inputs + [np.full(shape, np.nan, np.float32) for shape in shapes[2:]]
        library[name](*[ctypes.c_void_p(a.ctypes.data) for a in arrays])
        y = tvm.runtime.tensor(np.zeros(output_shape(primitive, layer), np.float32))
        function = ScheduleCpu()(
            tvm.IRModule({"main": kernel(primitive, layer).with_attr("global_symbol", "main")})
        )
        tvm.compile(function, target=LLVM)["main"](*map(tvm.runtime.tensor, inputs), y)
        bound = 1e-5 if primitive.family in ("winograd", "fft") else BOUND
        assert np.abs(arrays[2] - y.numpy()).max() <= bound * np.abs(y.numpy()).max(), (name, layer)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """`toy` in C with chosen primitives, by the command; what it printed, and where it wrote."""
    folder = tmp_path_factory.mktemp("c") / "toy"
    options = ["--target", "c", "--select", "--measure", "1", "--json", "--quiet"]
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr("builtins.print", lambda *text, **_: printed.append(" ".join(map(str, text))))
        assert main(["compile", "toy", "-o", str(folder), *options, "--conventions", "none"]) == 0
    return json.loads(printed[-1]), folder


@pytest.mark.long
def test_the_report_says_what_was_built(compiled):
    report, _ = compiled
    part = report["c_part"]
    assert part["compiler"] == builds.require_compiler().version and part["flaw"] == ""
    assert part["max_relative_error"] <= 1e-5 and part["measured_ns"] > 0
    assert (part["parallel_ns"] is None) == (part["threads"] == 1)
    assert f"C by {part['compiler']} for " in report["primitives"]["device"]
    assert "1 threads" in report["primitives"]["device"]
    assert {region["mode"] for region in report["regions"]} == {"GPU"}


def test_a_program_of_it_needs_nothing_of_ours(compiled, tmp_path):
    _, folder = compiled
    text = "".join((folder / name).read_text() for name in ("network.c", "network.h", "main.c"))
    assert "TVM" not in text and "float32x" not in text and "malloc" not in text
    sources = [str(folder / name) for name in ("network.c", "main.c")]
    command, output_options = builds.require_compiler().command, ["-o", str(tmp_path / "n"), "-lm"]
    subprocess.run([*command, "-std=c11", "-O1", *WARNINGS, *sources, *output_options], check=True)
    x = np.random.default_rng(0).standard_normal((1, 3, 16, 16), np.float32)
    x.tofile(tmp_path / "x.bin")
    run = [tmp_path / "n", folder / "weights.bin", tmp_path / "x.bin", tmp_path / "y.bin"]
    subprocess.run(run, check=True)
    y = np.fromfile(tmp_path / "y.bin", np.float32)
    expected = pimflow.run(folder, x, target="llvm+pim")[0].ravel()
    assert np.abs(y - expected).max() <= 1e-5 * np.abs(expected).max()
    (tmp_path / "x.bin").write_bytes(b"short")
    process = subprocess.run(run, capture_output=True, text=True, check=False)
    assert process.returncode == 3 and "x.bin: cannot be read" in process.stderr
    process = subprocess.run(run[:2], capture_output=True, text=True, check=False)
    assert process.returncode == 2 and "weights.bin input0.bin output0.bin" in process.stderr


@pytest.mark.long
def test_run_builds_and_runs_the_library(compiled, tmp_path, capsys):
    _, folder = compiled
    x = np.random.default_rng(0).standard_normal((1, 3, 16, 16), np.float32)
    np.save(tmp_path / "x.npy", x)
    words = ["--input", str(tmp_path / "x.npy"), "-o", str(tmp_path / "y.npy"), "--compare", "--repeat", "2"]
    assert main(["run", str(folder), *words, "--json"]) == 0
    out, err = capsys.readouterr()
    row = json.loads(out)
    assert row["target"] == "c"
    assert row["compiler"] == builds.require_compiler().version and "building C" in err
    assert (row["threads"], row["calls"]) == (1, 2) and row["median_ns"] > 0
    twin = pimflow.run(folder, x, target="llvm+pim")[0]
    assert list(row["max_relative_error"]) == ["llvm+pim"]
    assert row["max_relative_error"]["llvm+pim"] == relative_error(np.load(tmp_path / "y.npy"), twin) <= 1e-5
    inference = pimflow.infer(folder, x, target="llvm+pim", repeat=1, compare=True)
    assert inference.threads is None and inference.median_ns > 0 and inference.max_relative_error["c"] <= 1e-5
    assert main(["run", str(folder), "--repeat", "1", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert "ms, the median of 1 runs of c on 1 of its threads, by" in out and err == ""


@pytest.mark.long
def test_wrong_runs(compiled, tmp_path, monkeypatch, capsys):
    _, folder = compiled

    def run_error(*options, code):
        err = error_line(capsys, code, "run", folder, *options, "--quiet")
        return err

    assert "those of llvm+pim are TVM_NUM_THREADS" in run_error(
        "--target", "llvm+pim", "--threads", "1", code=2
    )
    assert "999 threads: the C library runs on at most" in run_error("--threads", "999", code=2)
    assert "--repeat -1: give a number" in run_error("--repeat", "-1", code=2)
    with monkeypatch.context() as patch:
        patch.setattr("pimflow.commands.run.run.OUTPUT_BOUND", {"fp16": -1.0})
        assert "outputs of c differ from those of llvm+pim by" in run_error("--compare", code=5)
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "or run the twin: --target llvm+pim" in run_error(code=3)
    alone = run_error("--target", "llvm+pim", "--compare", code=2)
    assert "nothing besides llvm+pim that runs here" in alone
    changed = shutil.copytree(folder, tmp_path / "changed")
    (changed / "network.c").write_text("int pimflow_run;")
    assert main(["run", str(changed)]) == 3
    assert "network.c is missing or was changed" in capsys.readouterr().err


@pytest.mark.long
def test_select_goes_by_times_of_c(compiled, capsys):
    report, _ = compiled
    row = run_json(capsys, "select toy --target c --measure 1")
    assert row["device"] == report["primitives"]["device"]
    assert row["choices"] == report["primitives"]["choices"]  # kept, not measured anew


@pytest.mark.long
def test_the_same_bytes_each_time(compiled):
    network = pimflow.frontend.load("toy")
    first, second = (c_source.source(network.module, system(), "toy").files() for _ in range(2))
    assert first == second and set(first) == {"network.c", "network.h", "main.c", "weights.bin"}


@pytest.mark.long
def test_without_a_compiler(monkeypatch, capsys, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(builds, "local_compiler", lambda: None)
        compiled_network = pimflow.compile("toy", tmp_path / "toy", target="c", conventions="none")
    assert compiled_network.report.extras.c_part.flaw.startswith("no C compiler was found")
    assert compiled_network.verification.is_verified and (tmp_path / "toy" / "network.c").exists()
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "no C compiler was found: install" in error_line(capsys, 3, "select toy --target c --cache none")
    monkeypatch.setenv("CC", shutil.which("false"))
    with pytest.raises(ArtifactError, match="failed: no reason given"):
        builds.Library(c_source.source(pimflow.frontend.load("toy").module, system(), "toy"))


def test_wrong_uses(tmp_path, capsys):
    with pytest.raises(UnknownNameError, match="unknown target 'cc'; did you mean c"):
        pimflow.compile("toy", target="cc")
    assert "give --target c too" in error_line(capsys, 2, "compile toy --select --device rpc:here:9")
    plan = pimflow.search("toy").plan
    require_no_pim(None)
    with pytest.raises(UsageError, match="--target c has no PIM, but the plan puts"):
        require_no_pim(plan)


def one_operator(operator, dtype="float32"):
    x = relax.Var("x", relax.TensorType((4, 8), dtype))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(builder.emit(operator(x)))
        builder.emit_func_output(y)
    return builder.get()


def test_what_c_does_not_have():
    with pytest.raises(UnsupportedOpError, match=r"target c: .*runtime"):
        c_source.source(one_operator(relax.op.sort), system(), "one")
    with pytest.raises(UnsupportedOpError, match="target c: C has no type for float8_e4m3fn"):
        kernels.c_type("float8_e4m3fn")


OPERATORS = {
    "exp": (relax.op.exp, np.exp),
    "sigmoid": (relax.op.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "tanh": (relax.op.tanh, np.tanh),
    "abs": (relax.op.abs, np.abs),
    "square": (lambda x: x * x, np.square),
}


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", OPERATORS)
def test_floating_point_types(name, dtype):
    operator, plain = OPERATORS[name]
    source = c_source.source(one_operator(operator, dtype), system(), "one")
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(dtype)
    (y,) = builds.Library(source)([x])
    expected = plain(x.astype(np.float64))
    bound = 2 * float(ml_dtypes.finfo(dtype).eps)
    assert y.dtype == x.dtype and (np.abs(y.astype(np.float64) - expected) <= bound * np.abs(expected)).all()


def test_mathematical_functions():
    source = c_source.source(one_operator(lambda x: relax.op.erf(relax.op.exp(x))), system(), "one")
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    (y,) = builds.Library(source)([x])
    expected = np.vectorize(math.erf)(np.exp(x))
    assert np.abs(y - expected).max() <= 1e-6


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_what_is_measured_is_also_cxx(tmp_path):
    """TVM's server gives sources to a C++ compiler, with no options."""
    layer = layers_for(PRIMITIVES["im2row-hwc-7x32"], 1)[0]
    function = ScheduleCpu()(tvm.IRModule({"main": kernel(PRIMITIVES["im2row-hwc-7x32"], layer)}))["main"]
    (tmp_path / "k.c").write_text(kernels.callable_source({"main": function}))
    for standard in (["g++"], [*builds.require_compiler().command, "-std=c11"]):
        options = ["-shared", "-fPIC", "-o", str(tmp_path / "k.so"), str(tmp_path / "k.c")]
        subprocess.run([*standard, *WARNINGS, *options], check=True)


def test_who_may_lie_in_anothers_memory():
    """A kernel whose result may lie where its operand lay must not promise the contrary."""
    function = schedule(PRIMITIVES["direct-hwc-loops"], layers_for(PRIMITIVES["direct-hwc-loops"], 1)[0], C)
    apart = {"apart": function.with_attr("tirx.noalias", True)}
    source = kernels.kernel_source(apart | {"inside": function.with_attr("tirx.noalias", False)}, C)
    heads = {line.split("(")[0].split()[-1]: line for line in source.splitlines() if "_KERNEL void" in line}
    assert heads["apart"].count("* PIMFLOW_RESTRICT ") == heads["apart"].count("*") == len(function.params)
    assert "RESTRICT" not in heads["inside"]


def test_a_name_is_no_code():
    """Of a network it is a comment, of a layer part of an identifier."""
    graph = ' **// */ system("x"); /*\n#include <x> *\\\n/ int x; //'
    nodes = [
        onnx.helper.make_node("Relu", ["x"], ["y*/"], name='*/ system("x"); /*'),
        onnx.helper.make_node("Sigmoid", ["y*/"], ["z"], name="9\n#error"),
    ]
    x, z = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 8]) for name in "xz")
    model = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, graph, [x], [z]), opset_imports=[onnx.helper.make_opsetid("", 17)]
    )
    module = pimflow.frontend.load(model).module
    plain = c_source.source(module, system("pimflow"), "plain")
    for name in (graph, *NAMES):
        head = c_source.head_comment(name)
        assert head.startswith("/* ") and head.endswith(" */\n") and head.count("*/") == head.count("\n") == 1
    source = c_source.source(module, system("pimflow"), graph)
    assert source.code.split("\n")[1:] == plain.code.split("\n")[1:]
    assert not re.search(r"system\(|^#error", plain.code, re.M)
