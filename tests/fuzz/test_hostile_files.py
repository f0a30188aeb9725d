"""Files that were made to do harm: each is refused in one line, soon, and nothing of it runs."""

import contextlib
import hashlib
import io
import json
import pickle
import re
import shutil
import sqlite3
import struct
import subprocess
import time
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import onnx
import pytest
from targets import command_failure

import pimflow
from pimflow import zoo
from pimflow.commands.main import main
from pimflow.core import table_files
from pimflow.errors import ArtifactError, TraceError
from pimflow.host import machine, result_cache

SECONDS = 5.0
DEPTH = 200_000
JSON_TEXTS = {
    "deep list": "[" * DEPTH,
    "deep object": '{"a":' * DEPTH,
    "no UTF-8": b'{"a": "\xff"}',
    "NaN": '{"a": NaN}',
    "infinite": '{"a": 1e999}',
    "digits": '{"a": ' + "1" * 10_000 + "}",
    "twice": '{"a": 1, "a": 2}',
    "half a character": '{"a": "\\ud800"}',
    "a list": "[]",
    "a text": '"x"',
    "nothing": "",
    "null": "null",
}


def error_line(argv, capsys, code=3):
    """The one line that a command ends with."""
    begin = time.process_time()  # of this process alone: other tests have the cores too
    assert main([str(word) for word in argv]) == code
    assert time.process_time() - begin < SECONDS
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning" not in line]
    assert len(lines) == 1 and lines[0].startswith("pimflow: error: "), lines
    return lines[0]


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    """A compiled directory, with C, and the cache that it filled."""
    folder = tmp_path_factory.mktemp("hostile")
    cache = folder / "cache.sqlite"
    options = ["--quiet", "--cache", cache, "--jobs", 1, "--conventions", "none"]
    assert not command_failure(["compile", "toy", "-o", folder / "toy", *options])
    return folder / "toy", cache


@pytest.fixture
def directory(compiled, tmp_path):
    return Path(shutil.copytree(compiled[0], tmp_path / "toy"))


def seal(directory, *names, without=()):
    """Give a changed directory right digests."""
    table = json.loads((directory / "interface.json").read_text())
    del table["digest"]
    for name in names:
        table["sha256"][name] = hashlib.sha256((directory / name).read_bytes()).hexdigest()
    for name in without:
        del table["sha256"][name]
    digest = hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
    (directory / "interface.json").write_text(json.dumps(table | {"digest": digest}))


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.long
@pytest.mark.parametrize("content", JSON_TEXTS.values(), ids=JSON_TEXTS)
def test_json_that_is_no_table_of_ours(content, directory, tmp_path, capsys):
    program = next((directory / "programs").iterdir())
    argv = {
        "timeline.json": ["timeline", directory, "--quiet"],
        "report.json": ["report", directory],
        "plan.json": ["timeline", "toy", "--plan", directory / "plan.json", "--quiet"],
        f"programs/{program.name}": ["simulate", program],
    }
    for name, words in argv.items():
        before = (directory / name).read_bytes()
        write(directory / name, content)
        if name == "timeline.json" or name.startswith("programs"):
            seal(directory, name)
        assert directory.name in error_line(words, capsys)
        (directory / name).write_bytes(before)
        if name == "timeline.json" or name.startswith("programs"):
            seal(directory, name)
    profile = write(tmp_path / "profile.json", content)
    assert profile.name in error_line(["select", "toy", "--profile", profile, "--quiet"], capsys)
    write(directory / "interface.json", content)
    error_line(["run", directory], capsys)


@pytest.mark.parametrize("name", ["regions.json", "pim.json"])
@pytest.mark.parametrize("content", [JSON_TEXTS["deep list"], JSON_TEXTS["NaN"], "{}", "[]"])
def test_tables_of_an_artifact_that_are_read_late(name, content, directory, capsys):
    write(directory / name, content)
    seal(directory, name)
    out = directory.parent / "out"
    error_line(["trace", directory, "--format", "aim", "-o", out, "--quiet"], capsys)


def test_metadata_of_a_model(tmp_path, capsys):
    model = zoo.load_model("toy")
    onnx.helper.set_model_props(model, {"pimflow.roles": JSON_TEXTS["deep list"]})
    path = write(tmp_path / "net.onnx", model.SerializeToString())
    assert "pimflow.roles" in error_line(["memory", path, "--quiet"], capsys)


@pytest.mark.parametrize("content", ["a = " + "[" * DEPTH, b"a = '\xff'", "a = " + "1" * 10_000])
def test_toml(content, tmp_path, capsys):
    path = write(tmp_path / "device.toml", content)
    assert path.name in error_line(["devices", path], capsys)
    error_line(["memory", "toy", "--decompose", f"tucker:{path}", "--quiet"], capsys)


def test_a_file_without_an_end(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(table_files, "MAX_FILE_BYTES", 1 << 20)
    (tmp_path / "device.toml").symlink_to("/dev/zero")
    assert "more than" in error_line(["devices", tmp_path / "device.toml"], capsys)
    (tmp_path / "net.onnx").symlink_to("/dev/zero")
    assert "is a device" in error_line(["memory", tmp_path / "net.onnx", "--quiet"], capsys)


def test_a_library_without_digest_is_not_loaded(directory, capsys):
    seal(directory, without=["model.so"])
    assert "no digest of model.so" in error_line(["run", directory], capsys)
    with pytest.raises(ArtifactError, match=r"no digest of model\.so"):
        pimflow.Session(directory)


def test_what_has_its_digest_is_loaded(directory):
    assert not command_failure(["run", directory, "--quiet"])
    assert pimflow.Session(directory).caches == ()


@pytest.mark.long
def test_c_without_digest_is_not_built(tmp_path, capsys):
    options = ["--target", "c", "--quiet", "--jobs", 1, "--conventions", "none"]
    assert not command_failure(["compile", "toy", "-o", tmp_path / "toy", *options])
    seal(tmp_path / "toy", without=["weights.bin"])
    assert "no digest of weights.bin" in error_line(["run", tmp_path / "toy", "--quiet"], capsys)


@pytest.mark.parametrize("code", ["int x;", "int pimflow_run;"])
def test_a_foreign_library_is_one_line(code, directory, tmp_path, capsys):
    source = write(tmp_path / "foreign.c", code)
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", directory / "model.so"], check=True)
    seal(directory, "model.so")
    assert "model.so" in error_line(["run", directory], capsys)
    with pytest.raises(ArtifactError, match="cannot be loaded"):
        pimflow.Session(directory)


class Harm:
    """Pickled, it makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_arrays_are_not_unpickled(directory, tmp_path, capsys):
    mark = tmp_path / "ran"
    harm = np.array([Harm(mark)], object)
    np.save(tmp_path / "x.npy", harm, allow_pickle=True)
    np.savez(tmp_path / "x.npz", x=harm)
    error_line(["run", directory, "--input", tmp_path / "x.npy"], capsys)
    decompose = ["decompose", "toy", "--decompose", "tucker:0.5", "--quiet", "-o", tmp_path / "out"]
    error_line([*decompose, "--calibration", tmp_path / "x.npz"], capsys)
    assert not mark.exists()


TIMELINE = ["timeline", "toy", "--json", "--quiet", "--jobs", "1", "--cache"]


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """What the command prints without a cache."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*TIMELINE, "none"]) == 0
    return out.getvalue()


@pytest.mark.long
@pytest.mark.parametrize("change", ["text", "negative", "nothing", "unknown"])
def test_one_forged_field_makes_a_miss(change, right, compiled, tmp_path, capsys):
    """Every number, text and list in every result is another, one kind of change a run."""

    def forge(value):
        if isinstance(value, dict):
            table = {key: forge(item) for key, item in value.items()}
            return table | {"forged": 1} if change == "unknown" else table
        if isinstance(value, list):
            return [forge(item) for item in value]
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        return {"text": str(value), "negative": -1 - abs(value), "nothing": None, "unknown": value}[change]

    copy = shutil.copy(compiled[1], tmp_path / "cache.sqlite")
    with sqlite3.connect(copy) as rows:
        entries = rows.execute("SELECT key, value FROM results").fetchall()
        for key, sealed in entries:
            plain = json.loads(sealed.partition(" ")[2])
            is_graph = isinstance(plain, dict) and "regions" in plain
            if not (is_graph and change == "negative"):  # the bounds of a clip may be below zero
                text = json.dumps(forge(plain))
                row = (f"{result_cache._seal(key, text)} {text}", key)
                rows.execute("UPDATE results SET value = ? WHERE key = ?", row)
    rows.close()
    assert main([*TIMELINE, str(copy)]) == 0
    assert capsys.readouterr().out == right


def gguf_text(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_pair(name, kind, value):
    return gguf_text(name) + struct.pack("<I", kind) + value


def gguf_size(name, value):
    return gguf_pair(f"llama.{name}", 4, struct.pack("<I", value))


def gguf(*pairs, tensors=(), counts=None):
    tensor_count, pair_count = counts or (len(tensors), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", 3, tensor_count, pair_count)
    return head + b"".join(pairs) + b"".join(tensors) + bytes(64)


def gguf_tensor(name, shape, kind=0, offset=0):
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return gguf_text(name) + sizes + struct.pack("<IQ", kind, offset)


LLAMA = (
    gguf_pair("general.architecture", 8, gguf_text("llama")),
    gguf_size("block_count", 1),
    gguf_size("embedding_length", 64),
    gguf_size("feed_forward_length", 128),
    gguf_size("attention.head_count", 4),
    gguf_size("context_length", 64),
    gguf_pair("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + gguf_text("a") + gguf_text("b")),
)
NESTED = struct.pack("<IQ", 9, 1) * DEPTH
GGUF_FILES = {
    "2^63-1 elements": (gguf(gguf_pair("k", 9, struct.pack("<IQ", 4, 2**63 - 1))), "claims"),
    "2^60 texts": (gguf(gguf_pair("k", 9, struct.pack("<IQ", 8, 2**60))), "claims"),
    "text of 2^60 bytes": (gguf(gguf_pair("k", 8, struct.pack("<Q", 2**60))), "claims"),
    "nested arrays": (gguf(gguf_pair("k", 9, NESTED)), "array of arrays"),
    "2^60 pairs": (gguf(counts=(0, 2**60)), "claims"),
    "2^60 tensors": (gguf(counts=(2**60, 0)), "claims"),
    "tensor of 2^62 values": (gguf(tensors=[gguf_tensor("t", (2**31, 2**31))]), "ends beyond"),
    "tensor of 2^31 dimensions": (gguf(tensors=[gguf_text("t") + struct.pack("<I", 2**31)]), "dimensions"),
    "tensor far away": (gguf(tensors=[gguf_tensor("t", (1,), offset=2**63)]), "ends beyond"),
    "half blocks": (gguf(tensors=[gguf_tensor("t", (33,), kind=8)]), "whole blocks"),
    "unknown kind": (gguf(gguf_pair("k", 99, b"")), "kind 99"),
    "a key twice": (gguf(LLAMA[0], LLAMA[0]), "twice"),
    "no UTF-8": (gguf(gguf_pair("k", 8, gguf_text(b"\xff"))), "UTF-8"),
    "empty": (b"", "empty"),
    "cut": (gguf(*LLAMA)[:100], "ends"),
    "another version": (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
    "2^31 blocks": (gguf(*LLAMA[:1], gguf_size("block_count", 2**31), *LLAMA[2:]), "too few"),
    "text as a size": (
        gguf(*LLAMA[:1], gguf_pair("llama.block_count", 8, gguf_text("x")), *LLAMA[2:]),
        "is a str",
    ),
    "text as architecture": (gguf(gguf_pair("general.architecture", 4, bytes(4)), *LLAMA[1:]), "is a int"),
    "numbers as tokens": (
        gguf(*LLAMA[:-1], gguf_pair("tokenizer.ggml.tokens", 9, struct.pack("<IQI", 4, 1, 7))),
        "tokens",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("content, said", GGUF_FILES.values(), ids=GGUF_FILES)
def test_gguf(content, said, tmp_path, capsys):
    pytest.importorskip("gguf")
    path = write(tmp_path / "m.gguf", content)
    line = error_line(["generate", path, "--tokens", "1,2", "-n", "1", "--quiet"], capsys)
    assert path.name in line and said in line


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The members of a program of PyTorch's, by name."""
    torch = pytest.importorskip("torch", minversion="2.8")
    layers = {"block1-0": torch.nn.Conv2d(2, 3, 1), "relu": torch.nn.ReLU()}  # torchvision has such names
    model = torch.nn.Sequential(OrderedDict(layers)).eval()
    path = tmp_path_factory.mktemp("pt2") / "net.pt2"
    program = torch.export.export(
        model, (torch.randn(2, 2, 4, 4),), dynamic_shapes=({0: torch.export.Dim("n", max=8)},)
    )
    torch.export.save(program, path)
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def write_archive(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"net/{name}", content)
    return path


def harmful_pickle(mark):
    import torch

    content = io.BytesIO()
    torch.save(Harm(mark), content)
    return content.getvalue()


WEIGHTS, PROGRAM = "data/weights/model_weights_config.json", "models/model.json"
CONSTANTS, SAMPLES = "data/constants/model_constants_config.json", "data/sample_inputs/model.pt"


def weight_as_pickle(members, mark):
    table = json.loads(members[WEIGHTS])
    entry = next(iter(table["config"].values()))
    entry["use_pickle"] = True
    return {WEIGHTS: json.dumps(table), f"data/weights/{entry['path_name']}": harmful_pickle(mark)}


def constant_as_pickle(name):
    def change(_members, mark):
        meta = {"path_name": name, "is_param": False, "use_pickle": True, "tensor_meta": None}
        return {
            CONSTANTS: json.dumps({"config": {"k": meta}}),
            f"data/constants/{name}": harmful_pickle(mark)
            if name == "tensor_0"
            else pickle.dumps(Harm(mark)),
        }

    return change


def program(old, new):
    def change(members, mark):
        text = members[PROGRAM].decode()
        assert old in text
        return {PROGRAM: text.replace(old, new.replace("MARK", str(mark)))}

    return change


OPERATOR = "torch.ops.aten.conv2d.default"
SYMBOL = "Symbol('s"
PT2_FILES = {
    "pickled weight": (weight_as_pickle, "pickles more than weights"),
    "pickled constant": (constant_as_pickle("tensor_0"), "pickles more than weights"),
    "opaque object": (constant_as_pickle("opaque_obj_0"), "pickled object"),
    "custom object": (constant_as_pickle("custom_obj_0"), "pickled object"),
    "weights of the old form": (
        lambda _, mark: {"data/weights/model.pt": harmful_pickle(mark)},
        "pickles more than weights",
    ),
    "compiled library": (lambda *_: {"data/aotinductor/model/x.so": b"x"}, "compiled library"),
    "expression": (
        program(SYMBOL, "__import__('pathlib').Path('MARK').touch() or Symbol('s"),
        "no expression",
    ),
    "power": (program(SYMBOL, "9**9**9**9+Symbol('s"), "no expression"),
    "operator": (program(OPERATOR, "torch.os.system"), "no operator"),
    "library of operators": (program(OPERATOR, "torch.ops.load_library"), "no operator"),
    "attribute of an operator": (program(OPERATOR, "torch.ops.__class__.mro"), "no operator"),
    "name": (program('"name": "input"', '"name": "x=print(1)"'), "no name"),
    "name that is no identifier": (program('"name": "input"', '"name": "x-1"'), "is damaged"),
    "import": (program("builtins.tuple", '__enum__\\": 1, \\"'), "classes"),
}


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.parametrize("change, said", PT2_FILES.values(), ids=PT2_FILES)
def test_pt2(change, said, exported, tmp_path, capsys):
    mark = tmp_path / "ran"
    path = write_archive(tmp_path / "net.pt2", exported | change(exported, mark))
    assert said in error_line(["memory", path, "--shape", "input=2,2,4,4", "--quiet"], capsys)
    assert not mark.exists()


@pytest.mark.torch
def test_a_right_pt2_is_read(exported, tmp_path):
    """Without its example inputs, which are pickled."""
    mark = tmp_path / "ran"
    path = write_archive(tmp_path / "net.pt2", exported | {SAMPLES: harmful_pickle(mark)})
    assert not command_failure(["memory", path, "--quiet"]) and not mark.exists()


MOST = 2**31 - 1
COMP = ["COMP", 0, [0], [0], 1]
ACTIVATE = [["G_ACT", gang, [0]] for gang in range(4)]


def nest_loops(times: int, *nodes):
    """`nodes` in so many loops of the largest extent."""
    for _ in range(times):
        nodes = (["LOOP", MOST, list(nodes)],)
    return nodes


# Channels of a program for Newton, and what is said of them; nothing where the program is timed.
ENDLESS = {
    "a closed row": ([[*nest_loops(1, COMP)]], "COMP on a row that is not open"),
    "no end of COMPs": ([[*ACTIVATE, *nest_loops(2, COMP)]], "run beyond 2^62 cycles"),
    "more than can be counted": ([[*ACTIVATE, *nest_loops(4, COMP)]], "hold more than 2^63 commands"),
    "a row again and again": ([[*nest_loops(1, *ACTIVATE, COMP, ["READRES", 0, [0], [0]])]], ""),
    "a run of COMPs": ([[*ACTIVATE, ["COMP", 0, [0], [0], MOST]]], "of Comp is not in"),
    "channels": ([[]] * 500_000, "500000 channels; a program has 1 to 4096"),
}


@pytest.mark.long
@pytest.mark.parametrize("channels, said", ENDLESS.values(), ids=ENDLESS)
def test_programs_of_any_length_are_timed_or_refused(channels, said, compiled, tmp_path, capsys):
    source = next((compiled[0] / "programs").glob("*.pimprog"))
    path = write(tmp_path / "x.pimprog", json.dumps(json.loads(source.read_text()) | {"channels": channels}))
    if said:
        assert said in error_line(["simulate", path], capsys)
        with pytest.raises(TraceError, match=re.escape(said)):
            pimflow.simulate(path)
        return
    begin = time.process_time()
    assert main(["simulate", str(path)]) == 0
    assert time.process_time() - begin < SECONDS


@pytest.mark.long
def test_tensors_that_no_machine_holds(monkeypatch, tmp_path, capsys):
    """Refused before they are computed, by what the machine has; a search computes none."""
    monkeypatch.setattr(machine, "memory_bytes", lambda: 1 << 20)
    line = error_line(["compile", "toy", "--batch", 100, "-o", tmp_path / "toy", "--quiet"], capsys, code=4)
    assert re.search(r"'toy': its weights and its tensors at once, on this machine: needs \d+ bytes, ", line)
    assert not list(tmp_path.iterdir())
    assert main(["profile", "toy", "--batch", "100", "--quiet"]) == 0


def test_what_the_machine_has(tmp_path, monkeypatch):
    """The least of its memory, its container's and its own limit."""
    machine_bytes = machine.memory_bytes()
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "limit").write_text("4096\n")
    monkeypatch.setattr(machine, "_LIMITS", (tmp_path / "max", tmp_path / "none"))
    assert machine.memory_bytes() >= machine_bytes > 1 << 28
    monkeypatch.setattr(machine, "_LIMITS", (tmp_path / "max", tmp_path / "limit"))
    assert machine.memory_bytes() == 4096
