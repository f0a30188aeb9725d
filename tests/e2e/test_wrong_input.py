"""Does every wrong input end with one clear line, the right exit code, and nothing half-written?"""

import json
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from command_line import ALONE, run
from onnx import TensorProto, helper, numpy_helper
from onnx_models import onnx_model

from pimflow import zoo
from pimflow.commands.main import main
from pimflow.compiler.artifact import UNSEALED
from pimflow.compiler.interface import table_digest
from pimflow.errors import ArtifactError
from pimflow.host.directories import DirectoryKind
from pimflow.host.files import file_sha256
from pimflow.pim_backend.runtime import network_module

MARKED = DirectoryKind(name="a mark", mark="mark", seals=lambda _: {"mark": None})


def array(name, *dims, dtype=np.float32):
    values = np.random.default_rng(0).uniform(-1, 1, dims)
    return numpy_helper.from_array(values.astype(dtype), name)


def model(nodes, inputs, weights=(), outputs=None, opset=17):
    """A network with inputs and outputs {name: dims}; one output ``y`` of any shape by default."""
    outputs = outputs or {"y": None}
    return onnx_model(nodes, inputs, outputs, list(weights), opset=opset)


def save_model(folder, proto, **options) -> Path:
    onnx.save(proto, folder / "net.onnx", **options)
    return folder / "net.onnx"


def write_network(folder, content: bytes) -> Path:
    (folder / "net.onnx").write_bytes(content)
    return folder / "net.onnx"


def conv_net(batch="1"):
    dims = [int(batch) if batch.isdigit() else batch, 4, 8, 8]
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], "conv")]
    return model(nodes, {"x": dims}, [array("w", 8, 4, 3, 3)])


def with_its_data_nowhere(folder) -> Path:
    proto = conv_net()
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w" * 5000)
    return write_network(folder, proto.SerializeToString())


def random_operator(folder) -> Path:
    relu = helper.make_node("Relu", ["x"], ["a"], "first")
    nodes = [relu, helper.make_node("RandomUniformLike", ["a"], ["y"], "second")]
    return save_model(folder, model(nodes, {"x": [2, 4, 4]}))


def own_operator(folder) -> Path:
    nodes = [helper.make_node("Magic", ["x"], ["y"], "spell", domain="com.example")]
    proto = model(nodes, {"x": [1, 4]}, outputs={"y": [1, 4]})
    proto.opset_import.append(helper.make_opsetid("com.example", 1))
    return save_model(folder, proto)


def no_operator(folder) -> Path:
    return save_model(
        folder, model([helper.make_node("Convv", ["x"], ["y"], "typo")], {"x": [1, 4]}, outputs={"y": [1, 4]})
    )


def wrong_shapes(folder) -> Path:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "product")]
    return save_model(folder, model(nodes, {"x": [1, 4]}, [array("w", 5, 6)]))


# Those that are no model at all are refused in tests/zoo.
FILES = [
    ("truncated", lambda f: write_network(f, zoo.load("toy").SerializeToString()[:-1000]), "damaged"),
    ("external data of no possible name", with_its_data_nowhere, "net.onnx"),
    ("unsupported operator", random_operator, "RandomUniformLike.*second"),
    ("operator of another domain", own_operator, "Magic.*spell"),
    ("operator that does not exist", no_operator, "Convv"),
    ("shapes that do not fit", wrong_shapes, "product|MatMul"),
    ("dynamic shape", lambda folder: save_model(folder, conv_net("batch")), "--shape x="),
]


def one_line(err: str) -> str:
    assert err.count("\n") == 1 and "Traceback" not in err, err
    assert err.startswith("pimflow: error: ")
    return err


@pytest.mark.long
@pytest.mark.parametrize(("make", "says"), [f[1:] for f in FILES], ids=[f[0] for f in FILES])
def test_wrong_files(capsys, tmp_path, make, says):
    path, out = make(tmp_path), tmp_path / "out"
    before = sorted(tmp_path.iterdir())
    code, stdout, err = run(capsys, "compile", path, "-o", out, "--quiet")
    assert (code, stdout) == (3, "")

    assert re.search(says, one_line(err)), err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.long
def test_dynamic_shape_is_fixed_by_the_option(capsys, tmp_path):
    path = save_model(tmp_path, conv_net("batch"))
    assert run(capsys, "compile", path, "--shape", "x=1,4,8,8", "--quiet", *ALONE)[0] == 0
    code, _, err = run(capsys, "compile", path, "--shape", "x=1,5,8,8", "--quiet")
    assert code == 3 and "'x'" in one_line(err)
    code, _, err = run(capsys, "compile", path, "--shape", "X=1,4,8,8", "--quiet")
    assert code == 2 and "did you mean x" in one_line(err)


@pytest.fixture(scope="module")
def artifact(compiled_toy):
    return compiled_toy[0]


@pytest.mark.long
def test_an_artifact_changed_by_one_byte_is_refused(capsys, tmp_path, artifact):
    draw = np.random.default_rng(0)
    for name in sorted(p.relative_to(artifact) for p in artifact.rglob("*") if p.is_file()):
        if name.name in UNSEALED:
            continue  # for people: it is not read again
        copy = tmp_path / "copy"
        shutil.copytree(artifact, copy)
        content = bytearray((copy / name).read_bytes())
        for position in {0, len(content) - 1, *map(int, draw.integers(0, len(content), 3))}:
            content[position] ^= 1
            (copy / name).write_bytes(content)
            code, out, err = run(capsys, "run", copy)
            assert (code, out) == (3, ""), (name, position)
            assert "compile again" in one_line(err) or "pimflow compile" in err
            content[position] ^= 1
        (copy / name).unlink()
        assert run(capsys, "run", copy)[0] == 3
        shutil.rmtree(copy)


def test_an_artifact_of_another_version_says_so(capsys, tmp_path, artifact):
    copy = tmp_path / "copy"
    shutil.copytree(artifact, copy)
    table = json.loads((copy / "interface.json").read_text())
    (copy / "interface.json").write_text(json.dumps({**table, "version": "pimflow-artifact/99"}))
    code, _, err = run(capsys, "run", copy)
    assert code == 3 and "pimflow-artifact/99" in one_line(err)


def mutations(value):
    """Copies of JSON with each of its parts replaced by what is of another type, size or name."""
    others = [None, -1, 1.5, "odd", [], {}, [None], {"odd": 1}, 1 << 70, True]
    if isinstance(value, int) and not isinstance(value, bool):
        others.append(value + 1)
    yield from others
    parts = value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
    for key, part in parts:
        for new in mutations(part):
            copy = dict(value) if isinstance(value, dict) else list(value)
            copy[key] = new
            yield copy


def test_an_interface_of_other_types_under_a_right_digest(capsys, tmp_path, artifact):
    copy = tmp_path / "copy"
    shutil.copytree(artifact, copy)
    table = json.loads((copy / "interface.json").read_text())
    table["sha256"] = {name: table["sha256"][name] for name in ("model.so", "plan.json")}
    table |= {"outputs": [{"shape": [1, 10], "dtype": "float32"}], "pool_bytes": 64, "cpu": ""}
    del table["digest"]
    seen = set()
    for changed in mutations(table):
        if isinstance(changed, dict):
            changed = {"version": table["version"]} | changed | {"digest": table_digest(changed)}
        (copy / "interface.json").write_text(json.dumps(changed))
        code, _, err = run(capsys, "run", copy)
        assert code in (0, 3), changed
        assert code == 0 or one_line(err)
        seen.add(code)
    assert seen == {0, 3}


@pytest.mark.long
@pytest.mark.parametrize("name", ["regions.json", "pim.json"])
def test_tables_of_other_types_under_a_right_digest(tmp_path, artifact, name):
    from pimflow.compiler import artifact as artifacts

    copy = tmp_path / "copy"
    shutil.copytree(artifact, copy)
    table, interface = (json.loads((copy / file_name).read_text()) for file_name in (name, "interface.json"))
    if name == "regions.json":
        table["graph"]["regions"] = table["graph"]["regions"][:1]
    else:
        table["constraints"] = table["constraints"][:1]
    refusals = 0
    for changed in mutations(table):
        (copy / name).write_text(json.dumps(changed))
        interface["sha256"][name] = file_sha256(copy / name)
        del interface["digest"]
        interface["digest"] = table_digest(interface)
        (copy / "interface.json").write_text(json.dumps(interface))
        try:
            artifacts.load_device(copy) if name == "pim.json" else artifacts.PlacedRegions.load(copy)
        except ArtifactError as error:
            assert name in str(error)
            refusals += 1
    assert refusals > 100


def test_wrong_inputs_of_a_run(capsys, tmp_path, artifact):
    np.save(tmp_path / "small.npy", np.ones((1, 3, 4, 4), np.float32))
    (tmp_path / "text.npy").write_text("1 2 3")
    (tmp_path / "zip.npy").write_bytes(b"PK\3\4 and no more")
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 4), }".ljust(127) + b"\n"
    (tmp_path / "large.npy").write_bytes(b"\x93NUMPY\1\0\x80\0" + header)
    (tmp_path / "open.npy").write_bytes(b"\x93NUMPY\1\0\x80\0" + b"{'descr': ('".ljust(127) + b"\n")
    np.savez(tmp_path / "many.npz", a=1, b=2)
    for argument, code, says in [
        (tmp_path / "small.npy", 3, "(1, 3, 16, 16)"),
        (tmp_path / "text.npy", 3, ".npy"),
        (tmp_path / "many.npz", 3, "no input 'a'"),
        (tmp_path / "zip.npy", 3, "not a .npy file"),
        (tmp_path / "large.npy", 3, "more than fits"),
        (tmp_path / "open.npy", 3, "not a .npy file"),
        (tmp_path / "none.npy", 3, "cannot be read"),
        (f"imput={tmp_path / 'small.npy'}", 3, "imput"),
    ]:
        exit_code, _, err = run(capsys, "run", artifact, "--input", argument)
        assert exit_code == code and says in one_line(err)
    for place in (".", tmp_path, "y" * 300):
        code, _, err = run(capsys, "run", artifact, "-o", place)
        assert code == 3 and str(place) in one_line(err)
    code, _, err = run(capsys, "run", artifact, "--target", "cuda+pim")
    assert code == 2 and "llvm+pim" in one_line(err)


@pytest.mark.long
def test_running_without_the_device(capsys, tmp_path):
    import tvm

    if tvm.cuda().exist:
        pytest.skip("there is a CUDA device")
    assert run(capsys, "compile toy --target cuda+pim --quiet -o", tmp_path / "out", *ALONE)[0] == 0
    code, _, err = run(capsys, "run", tmp_path / "out")
    assert code == 3 and ("llvm+pim" in one_line(err) or "pimflow[cuda]" in err)
    assert run(capsys, "run", tmp_path / "out", "--target", "llvm+pim")[0] == 0


def start_compile(folder, *argv, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "pimflow", "compile", "toy", "-o", "out", *argv, *ALONE]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


@pytest.mark.parametrize(
    ("phase", "stop"),
    [
        ("searching", signal.SIGINT),
        pytest.param("verifying", signal.SIGTERM, marks=pytest.mark.long),
        pytest.param("writing", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_an_interrupted_run_leaves_nothing(tmp_path, phase, stop):
    process = start_compile(tmp_path, "--emit-traces")
    for line in process.stderr:
        if phase in line:
            break
    process.send_signal(stop)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (130, 0)  # 0: it was through before the signal came
    if process.returncode == 130:
        assert err == "pimflow: interrupted\n"
        assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_several_runs_into_one_directory(capsys, tmp_path):
    processes = [start_compile(tmp_path, "--quiet") for _ in range(2)]
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert run(capsys, "run", tmp_path / "out")[0] == 0
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.long
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))

    process = start_compile(tmp_path, "--quiet", preexec_fn=small_files)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (3, ""), err
    one_line(err)
    assert list(tmp_path.iterdir()) == []


def test_places_change_hands_without_loss(tmp_path):
    """Another run, and somebody, write there while this one works."""
    from pimflow.host.directories import new_directory

    path = tmp_path / "out"
    with new_directory(path, MARKED) as outer_folder:
        (outer_folder / "mark").write_text("mine")
        with new_directory(path, MARKED) as inner_folder:
            (inner_folder / "mark").write_text("theirs")
        assert (path / "mark").read_text() == "theirs"
        (path / "result").write_text("somebody's")
    assert {p.name: p.read_text() for p in path.iterdir()} == {"mark": "mine", "result": "somebody's"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("nth", [1, 2])
def test_an_interrupt_right_after_a_directory_was_made(tmp_path, monkeypatch, nth):
    """`nth`: the new directory, then the one that keeps the old."""
    from pimflow.host.directories import new_directory

    path = tmp_path / "out"
    path.mkdir()
    (path / "mark").write_text("old")
    mkdir, calls = Path.mkdir, iter(range(1, 10))

    def mkdir_then_interrupt(self, *args, **kwargs):
        mkdir(self, *args, **kwargs)
        if self.name.startswith(".mark.") and next(calls) == nth:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "mkdir", mkdir_then_interrupt)
    with pytest.raises(KeyboardInterrupt), new_directory(path, MARKED) as new:
        (new / "mark").write_text("new")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert {p.name: p.read_text() for p in path.iterdir()} == {"mark": "old"}


@pytest.mark.parametrize("compiler", ["", "missing/g++"])
def test_without_a_compiler(tmp_path, monkeypatch, compiler):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ArtifactError, match=r"is linked by a C\+\+ compiler: .*; install g\+\+, or set CXX"):
        network_module.store(None, tmp_path / "model.so", 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_comparison_names_the_report_that_is_of_another_form(capsys, tmp_path):
    for name in ("one", "other"):
        assert main(["compile", "toy", "-o", str(tmp_path / name), "--quiet", "--conventions", "none"]) == 0
    (tmp_path / "other/report.json").write_text('{"model": 1}')
    capsys.readouterr()
    argv = ["compare", str(tmp_path / "one"), str(tmp_path / "other"), "-o", str(tmp_path / "page.html")]
    assert main(argv) == 3
    err = capsys.readouterr().err
    assert err.startswith(f"pimflow: error: {tmp_path / 'other'}: report.json was not written by")
    assert err.count("\n") == 1
