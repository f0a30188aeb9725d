"""What reads the files that users give: each target has files to begin with, and the command that reads one.

A mutant is read by the command itself, in this process. It must end with an exit code of ours other than 1,
and with one line on stderr if that is an error. An exception and a second line are faults.
"""

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mutators
import numpy as np
import onnx
import onnxruntime
import pytest
from decoders import SMALL
from onnx import helper, numpy_helper
from onnx_models import onnx_model

import pimflow
from pimflow import zoo
from pimflow.commands.main import main
from pimflow.compiler.interface import Interface
from pimflow.core.output_error import relative_error
from pimflow.errors import PimflowError
from pimflow.host.result_cache import ResultCache
from pimflow.zoo.language import graph

RIGHT_CODES = (0, 2, 3, 4, 5)
STORED = {"tensor(float16)": np.float16, "tensor(double)": np.float64}
VALUES_BOUND = 1e-4  # in fp32, whose own is 1e-5 for networks that amplify no rounding
CONTEXT = 12
STEPS = [
    {
        "input_ids": [[token]],
        "attention_mask": [[1] * CONTEXT],
        "position_ids": [[position]],
        "position": [position],
    }
    for position, token in enumerate((3, 4, 5))
]
KEPT = {("fuzz", index): {"cycles": index} for index in range(20)}


def command_failure(argv: Sequence[object]) -> str:
    """What is wrong with how a command ends; empty if nothing is."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in argv])
    lines = [line for line in err.getvalue().splitlines() if not line.startswith("pimflow: warning: ")]
    if code not in RIGHT_CODES:
        return f"exit code {code}: {err.getvalue()}"
    if code and (len(lines) != 1 or not lines[0].startswith("pimflow: error: ")):
        return f"exit code {code}, and not one line: {err.getvalue()}"
    return ""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A kind of file.

    Attributes
    ----------
    suffix : str
        Of its files' names.
    seeds : callable
        Takes a folder for scratch files; gives contents of right files.
    check : callable
        Takes the path of a mutant, and what is prepared; gives what is wrong, or nothing.
    weight : float
        Its share of mutants, over that of others: less for what takes long.
    mutate : callable, optional
        From a right file and a `random.Random` to a mutant; by default `mutators.mutant`.
    """

    suffix: str
    seeds: Callable[[Path], list[bytes]]
    check: Callable[[Path], str]
    weight: float = 1.0
    mutate: Callable[[bytes, random.Random], bytes] | None = None

    def mutant(self, data: bytes, draw: random.Random) -> bytes:
        return self.mutate(data, draw) if self.mutate else mutators.mutant(data, draw, self.suffix)


def _command_output(folder: Path, *argv: object) -> Path:
    place = folder / "made"
    shutil.rmtree(place, ignore_errors=True)
    assert not command_failure([*argv, "-o", place, "--quiet"]), argv
    return place


def _programs(folder: Path) -> list[bytes]:
    layers = ("fc:32,16", "conv:1x20x4x4,33,3x3,p1")
    return [
        next(
            _command_output(folder, "trace", layer, "--format", "pimprog", "--pim-channels", 2).glob("*")
        ).read_bytes()
        for layer in layers
    ]


def _traces(folder: Path) -> list[bytes]:
    paths = _command_output(folder, "trace", "fc:64,16", "--format", "pim", "--pim-channels", 1).rglob(
        "*.pim"
    )
    return [next(paths).read_bytes()]


def compile_network(folder: Path) -> Path:
    """A compiled directory of a small network."""
    (folder / "net.onnx").write_bytes(_networks(folder)[0])
    return _command_output(folder, "compile", folder / "net.onnx", "--conventions", "none")


def _specs(kind: str) -> Callable[[Path], list[bytes]]:
    from pimflow.hardware import description

    root = Path(description.__file__).parent / "specs" / kind
    return lambda folder: [path.read_bytes() for path in sorted(root.glob("*.toml"))[:3]]


def _networks(_folder: Path) -> list[bytes]:
    rng = np.random.default_rng(0)

    def random_tensor(name: str, *dims: int) -> onnx.TensorProto:
        return numpy_helper.from_array(rng.uniform(-1, 1, dims).astype(np.float32), name)

    layers = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], "c", pads=[1, 1, 1, 1], kernel_shape=[3, 3]),
        helper.make_node("BatchNormalization", ["c", "s", "b", "b", "v"], ["n"], "n", epsilon=1e-5),
        helper.make_node("Relu", ["n"], ["r"], "r"),
        helper.make_node("MaxPool", ["r"], ["p"], "p", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["p", "d"], ["e"], "e", group=8, kernel_shape=[1, 1]),
        helper.make_node("Add", ["p", "e"], ["a"], "a"),
        helper.make_node("GlobalAveragePool", ["a"], ["g"], "g"),
        helper.make_node("Flatten", ["g"], ["f"], "f", axis=1),
        helper.make_node("Gemm", ["f", "m", "b"], ["y"], "y", transB=1, alpha=0.5),
    ]
    more_layers = [
        helper.make_node("Transpose", ["x"], ["t"], "t", perm=[0, 2, 3, 1]),
        helper.make_node("Reshape", ["t", "to"], ["q"], "q"),
        helper.make_node("MatMul", ["q", "w"], ["k"], "k"),
        helper.make_node("Softmax", ["k"], ["o"], "o", axis=-1),
        helper.make_node("Split", ["o"], ["l", "u"], "u", axis=1, num_outputs=2),
        helper.make_node("Concat", ["u", "l"], ["y"], "y", axis=1),
    ]
    vectors = [random_tensor(n, 8) for n in "bs"] + [numpy_helper.from_array(np.full(8, 2, np.float32), "v")]
    weights = [random_tensor("w", 8, 4, 3, 3), random_tensor("d", 8, 1, 1, 1)]
    weights += [random_tensor("m", 8, 8), *vectors]
    to = numpy_helper.from_array(np.int64([1, 16, 4]), "to")
    models = []
    for nodes, shape, stored in (
        (layers, [1, 4, 8, 8], weights),
        (more_layers, [1, 4, 4, 4], [random_tensor("w", 4, 6), to]),
    ):
        models.append(onnx_model(nodes, {"x": shape}, {"y": None}, stored, opset=18).SerializeToString())
    return models


def _kinds(_folder: Path) -> list[bytes]:
    """Small networks of all kinds of layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "e2e")
        from onnx_kinds import KINDS
    return [model.SerializeToString() for model in KINDS.values()]


def _cache(folder: Path) -> list[bytes]:
    path = folder / "cache"
    path.unlink(missing_ok=True)
    cache = ResultCache(path)
    cache.put(KEPT, "fuzz")
    cache.close()
    return [path.read_bytes()]


def _read_cache(path: Path) -> str:
    """What is read is what was kept, whatever else is lost."""
    cache = ResultCache(path)
    entries = cache.get(KEPT, "fuzz")
    cache.put({("fuzz", "new"): 1}, "fuzz")
    flaw = cache.flaw
    cache.close()
    wrong_values = {key: value for key, value in entries.items() if value != KEPT[key]}
    return f"read {wrong_values}" if wrong_values else "two lines" if "\n" in flaw else ""


_directories: dict[Path, Path] = {}


def _directory(path: Path, make: Callable[[Path], Path] = compile_network) -> Path:
    """A compiled directory beside `path`, made once."""
    if path.parent not in _directories:
        folder = path.parent / "artifact"
        folder.mkdir(exist_ok=True)
        _directories[path.parent] = folder / "made" if (folder / "made").exists() else make(folder)
    return _directories[path.parent]


def _decoders(_folder: Path) -> list[bytes]:
    """A step of a language model, whose caches are inputs and outputs."""
    return [zoo.load_model(graph.step_graph(SMALL, CONTEXT)).SerializeToString()]


def _decoder(path: Path) -> Path:
    model = path.parent / "decoder.onnx"
    if not model.exists():
        model.write_bytes(_decoders(path.parent)[0])
    return model


def _compile_decoder(folder: Path) -> Path:
    return _command_output(
        folder, "compile", _decoder(folder / "x"), "--context", CONTEXT, "--conventions", "none"
    )


def _plans(folder: Path) -> list[bytes]:
    return [(_directory(folder / "x") / "plan.json").read_bytes()]


def _interfaces(folder: Path) -> list[bytes]:
    return [(_directory(folder / "x") / "interface.json").read_bytes()]


def _regions(folder: Path) -> list[bytes]:
    return [(_directory(folder / "x") / "regions.json").read_bytes()]


def _inspect(directory: Path) -> str:
    """What is wrong with how commands that read a compiled directory end."""
    shutil.rmtree(directory.parent / "aim", ignore_errors=True)
    commands = [
        ["timeline", directory, "--quiet"],
        ["trace", directory, "--format", "aim", "-o", directory.parent / "aim", "--quiet"],
    ]
    program = next((directory / "programs").iterdir(), None)
    if program is not None:
        commands.append(["simulate", program])
    return next(filter(None, map(command_failure, commands)), "")


def _replacement_check(
    name: str, read: Callable[[Path], str] = _inspect, make: Callable[[Path], Path] = compile_network
) -> Callable[[Path], str]:
    """A compiled directory with another file of that name, under right digests wherever it is JSON."""

    def check(path: Path) -> str:
        original = _directory(path, make)
        copy = path.parent / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(original, copy, copy_function=os.link)
        for changed in {name, "interface.json"}:
            (copy / changed).unlink()
        shutil.copy(path, copy / name)
        try:
            table = json.loads(
                (copy if name == "interface.json" else original).joinpath("interface.json").read_bytes()
            )
            right = json.loads((original / "interface.json").read_bytes())["sha256"]
            table["sha256"] |= {n: right[n] for n in right.keys() & table["sha256"].keys()}
            if name != "interface.json":
                table["sha256"][name] = hashlib.sha256(path.read_bytes()).hexdigest()
            table.pop("digest", None)
            digest = hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
            text = json.dumps(table | {"digest": digest})
            (copy / "interface.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            if name != "interface.json":
                shutil.copy(original / "interface.json", copy)
        return read(copy)

    return check


def _run_steps(session: pimflow.Session, steps: object) -> str:
    """What is wrong with how steps are refused; other lists and values than steps have are none."""
    for step in steps if isinstance(steps, list) else []:
        try:
            session.run(step if isinstance(step, dict) else {})
        except PimflowError as error:
            if "\n" in str(error):
                return f"not one line: {error}"
    return ""


def _session(directory: Path) -> str:
    try:
        return _run_steps(pimflow.Session(directory), STEPS)
    except PimflowError as error:
        return f"not one line: {error}" if "\n" in str(error) else ""


def _logits(session: pimflow.Session) -> list[np.ndarray]:
    """Of right steps, from empty caches on."""
    session.set({name: np.zeros_like(session.cache(name)) for name in session.caches})
    return [session.run(step)["logits"] for step in STEPS]


def _steps(path: Path) -> str:
    """Refused or not, other steps leave nothing behind but what they set."""
    directory = _directory(path, _compile_decoder)
    try:
        steps = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return ""
    session = pimflow.Session(directory)
    failure = _run_steps(session, steps)
    right = _logits(pimflow.Session(directory))
    same = all(map(np.array_equal, _logits(session), right))
    return failure or ("" if same else "wrong value: right steps give others after it")


ARGUMENTS = (
    ["memory", "--context", "12", "--state", "past_key_values.0.key=present.0.key"],
    ["memory", "--context", "7", "--batch", "1", "--shape", "input_ids=1x1"],
    ["generate", "--tokens", "3,4", "-n", "2", "--context", "12", "--modes", "gpu", "--jobs", "1"],
    ["generate", "--prompt", "a b", "-n", "1", "--batch", "1", "--modes", "gpu", "--jobs", "1"],
)


def _arguments(path: Path) -> str:
    """A command about a decoder: what is no text of a command line is left out."""
    try:
        words = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return ""
    words = [str(word)[:99].replace("\0", "") for word in words] if isinstance(words, list) else []
    words = [word.encode(errors="replace").decode() for word in words]
    written = {word.partition("=")[0] for word in words} & {"-o", "--output", "--cache"}
    if written or not words or words[0] not in ("memory", "generate"):
        return ""
    return command_failure([words[0], _decoder(path), *words[1:], "--quiet"])


def _profile(path: Path) -> str:
    return command_failure(["select", _network(path), "--profile", path, "--quiet"])


def _profiles(_folder: Path) -> list[bytes]:
    return [(Path(__file__).parents[1] / "primitive_selection" / "published-profile.json").read_bytes()]


def _network(path: Path) -> Path:
    model = path.parent / "net.onnx"
    if not model.exists():
        model.write_bytes(_networks(path.parent)[0])
    return model


def _values(path: Path) -> str:
    """Compiled, it gives what ONNX Runtime does, on inputs that verification never saw; or it is refused."""
    out = path.parent / "compiled"
    shutil.rmtree(out, ignore_errors=True)
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        code = main(
            ["compile", str(path), "-o", str(out), "--dtype", "fp32", "--conventions", "none", "--quiet"]
        )
    if code == 5 and "of the reference is NaN or infinity" not in err.getvalue():
        return f"wrong value: {err.getvalue()}"
    if code:
        return "" if code in RIGHT_CODES else f"exit code {code}: {err.getvalue()}"
    interface = Interface.load(out)
    inputs = zoo.example_arrays(interface.inputs, seed=1, rows=interface.table_rows)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        types = {model_input.name: STORED.get(model_input.type) for model_input in session.get_inputs()}
        references = session.run(None, {name: x.astype(types[name] or x.dtype) for name, x in inputs.items()})
    except Exception:  # ONNX Runtime's own hierarchy: it has no fp64 convolution, for one
        return ""
    for y, reference in zip(pimflow.run(out, inputs), references, strict=True):
        eps = 0.0 if reference.dtype.kind in "biu" else float(np.finfo(reference.dtype).eps)
        if np.isfinite(reference).all() and not relative_error(y, reference) <= max(VALUES_BOUND, 4 * eps):
            return f"wrong value: differs by {relative_error(y, reference)}"
    return ""


def _plan(path: Path) -> str:
    return command_failure(["timeline", _network(path), "--plan", path, "--quiet", "--jobs", 1])


TARGETS = {
    "ONNX": Target(
        suffix=".onnx", seeds=_networks, check=lambda path: command_failure(["memory", path, "--quiet"])
    ),
    "ONNX: values": Target(
        suffix=".onnx", seeds=_kinds, check=_values, weight=0.3, mutate=mutators.neighbour
    ),
    "decoder": Target(
        suffix=".onnx",
        seeds=_decoders,
        check=lambda path: command_failure(["memory", path, "--context", CONTEXT, "--quiet"]),
        weight=0.3,
    ),
    "arguments": Target(
        suffix=".json",
        seeds=lambda folder: [json.dumps(arguments).encode() for arguments in ARGUMENTS],
        check=_arguments,
        weight=0.3,
    ),
    "generate": Target(
        suffix=".onnx",
        seeds=_decoders,
        check=lambda path: command_failure(
            ["generate", path, "--tokens", "3", "-n", 2, "--modes", "gpu", "--jobs", 1, "--quiet"]
        ),
        weight=0.1,
    ),
    "Session: steps": Target(suffix=".json", seeds=lambda folder: [json.dumps(STEPS).encode()], check=_steps),
    "Session: interface": Target(
        suffix=".json",
        seeds=lambda folder: [(_directory(folder / "x", _compile_decoder) / "interface.json").read_bytes()],
        check=_replacement_check("interface.json", _session, _compile_decoder),
    ),
    ".pimprog": Target(suffix=".pimprog", seeds=_programs, check=lambda p: command_failure(["simulate", p])),
    ".pim": Target(suffix=".pim", seeds=_traces, check=lambda path: command_failure(["simulate", path])),
    "plan": Target(suffix=".json", seeds=_plans, check=_plan),
    "PIM device": Target(
        suffix=".toml", seeds=_specs("pim"), check=lambda path: command_failure(["devices", path])
    ),
    "GPU": Target(suffix=".toml", seeds=_specs("gpu"), check=lambda path: command_failure(["devices", path])),
    "system": Target(suffix=".toml", seeds=_specs("system"), check=lambda p: command_failure(["devices", p])),
    "profile": Target(suffix=".json", seeds=_profiles, check=_profile),
    "cache": Target(suffix=".sqlite", seeds=_cache, check=_read_cache),
    "artifact: interface": Target(
        suffix=".json", seeds=_interfaces, check=_replacement_check("interface.json")
    ),
    "artifact: regions": Target(suffix=".json", seeds=_regions, check=_replacement_check("regions.json")),
}


def slug(name: str) -> str:
    """The name of a target as part of a file's name."""
    return name.replace(":", "").replace(" ", "-")
