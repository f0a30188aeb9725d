"""Checks of ``.pt2`` archives: only tables and weights are read; content that runs as code is refused.

PyTorch's reader trusts its files. It unpickles objects, loads compiled libraries, evaluates expressions of
sizes as Python, looks up operators by any dotted name below ``torch``, imports modules that trees of inputs
name, and writes names of values into source that it executes. So every table of an archive is checked
first, with the reader that PyTorch uses: content that is not plain data is refused, and pickles may contain
only weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from pimflow.errors import ModelError

_PROGRAM = "serialized_exported_program.json"  # in archives before PyTorch 2.8
_LIBRARIES = "aotinductor"  # folder of compiled libraries, which PyTorch would load
_EXAMPLES = "sample_inputs"  # folder of pickled example inputs
_TENSORS = ("weight_", "tensor_")  # records of weights and of constants; others are pickled objects
_ONLY_WEIGHTS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # every `torch.load` reads it

# Operators: those of the dispatcher by namespace, name and overload; those of numbers by name.
_OPERATOR = re.compile(
    r"torch\.ops(\.(?!__)\w+){2,3}|(_operator|math)\.(?!_)\w+|torch\.(sym_\w+|_sym_\w+)"
    r"|torch\.ops\.aten\.__(and|or|xor|lshift|rshift)__\.\w+"
)
_PYTHON_SIDE = ("torch.ops.load_library", "torch.ops.loaded_libraries", "torch.ops.import_module")
# Expressions of sizes: symbols such as s0, numbers, and these functions; only small powers.
_SYMBOL = re.compile(r"Symbol\('[a-z]+\d+'(, [a-z_]+=(True|False))*\)|\b[a-z]{1,8}\d+\b")
_FUNCTIONS = (
    "Integer|Rational|Float|Add|Mul|Max|Min|Mod|PythonMod|FloorDiv|CeilDiv|CleanDiv|ModularIndexing|Where"
    "|CeilToInt|FloorToInt|TruncToInt|RoundToInt|IntTrueDiv|FloatTrueDiv|ToFloat|Abs|Eq|Equality|Ne|Unequality"
    "|Lt|Le|Gt|Ge|GreaterThan|LessThan|StrictGreaterThan|StrictLessThan|And|Or|Not|int_oo|oo|true|false"
)
_NUMBER = r"(?<![\w.])\d{1,19}(\.\d{0,19})?(?![\w.])"
_EXPRESSION = re.compile(rf"(\b({_FUNCTIONS})\b|{_NUMBER}|[\s,()+\-*/%<>=!&|~])*")
_POWER = re.compile(r"\bPow\(X, (Integer\()?[1-8]\)?\)|\bX\*\*[1-8]\b")
# Names of values and parameters become source code, which must call nothing; torchvision's have hyphens.
_NAME = re.compile(r"[\w.-]*")
_EXPRESSION_LENGTH = 1000  # SymPy is slow for longer expressions
_NAMES = ("name", "as_name", "arg_name", "target", "parameter_name", "buffer_name", "tensor_constant_name")


@contextlib.contextmanager
def weights_only() -> Iterator[None]:
    """Context in which `torch.load` unpickles only tensors and containers of them, and else raises."""
    previous = os.environ.get(_ONLY_WEIGHTS)
    os.environ[_ONLY_WEIGHTS] = "1"
    try:
        yield
    finally:
        if previous is None:
            del os.environ[_ONLY_WEIGHTS]
        else:
            os.environ[_ONLY_WEIGHTS] = previous


@contextlib.contextmanager
def plain_containers() -> Iterator[None]:
    """Context in which PyTorch reads archives without example inputs, and unknown containers as tuples.

    Programs that transformers exports take and return objects of its classes, such as ``DynamicCache``. Their
    tensors are inputs and outputs of the graph like all others, so that the classes need not be imported.
    """
    from torch.export.pt2_archive._package import PT2ArchiveReader

    read_bytes = PT2ArchiveReader.read_bytes

    def read_plain(reader: Any, name: str) -> bytes:
        """A record of an archive."""
        if _EXAMPLES in PurePosixPath(name).parts:
            return b""
        record: bytes = read_bytes(reader, name)
        return _with_plain_containers(record) if name.startswith("models/") else record

    PT2ArchiveReader.read_bytes = read_plain
    try:
        yield
    finally:
        PT2ArchiveReader.read_bytes = read_bytes


def _with_plain_containers(record: bytes) -> bytes:
    """The table of a program in which containers that PyTorch does not know are tuples."""
    program = json.loads(record)
    for call in program["graph_module"]["module_call_graph"]:
        signature = call.get("signature") or {}
        for key in ("in_spec", "out_spec"):
            if signature.get(key):
                protocol, tree = json.loads(signature[key])
                signature[key] = json.dumps([protocol, _plain_tree(tree)])
    return json.dumps(program).encode()


def _plain_tree(tree: dict[str, Any]) -> dict[str, Any]:
    from torch.utils._pytree import SERIALIZED_TYPE_TO_PYTHON_TYPE

    is_known = tree["type"] is None or tree["type"] in SERIALIZED_TYPE_TO_PYTHON_TYPE
    own = tree if is_known else {"type": "builtins.tuple", "context": "null"}
    return {**own, "children_spec": [_plain_tree(child) for child in tree["children_spec"]]}


def require_plain(path: str | os.PathLike[str]) -> None:
    """Raise `ModelError` if a ``.pt2`` file has content that would run as code; no other checks."""
    import torch

    where = f"'{os.fspath(path)}'"
    try:
        reader = torch._C.PyTorchFileReader(os.fspath(path))
        names = reader.get_all_records()
    except RuntimeError:  # not an archive of PyTorch; it then tries the old format
        names = []
    for name in names:
        _require_plain_record(where, name, lambda name=name: reader.get_record(name))
    with contextlib.suppress(zipfile.BadZipFile, KeyError), zipfile.ZipFile(path) as archive:
        _require_plain_program(where, json.loads(archive.read(_PROGRAM)))


def _require_plain_record(where: str, name: str, read: Any) -> None:
    parts = PurePosixPath(name).parts
    if _LIBRARIES in parts:
        raise ModelError(f"{where}: holds a compiled library, '{name[:80]}', which is not loaded")
    if not name.lower().endswith(".json"):
        return
    if parts[0] == "models" or parts[-1] == _PROGRAM:
        _require_plain_program(where, json.loads(read()))
    elif parts[-1].endswith("_config.json"):
        for key, entry in json.loads(read())["config"].items():
            _require_name(where, key)
            if not entry["path_name"].startswith(_TENSORS):
                raise ModelError(
                    f"{where}: '{key[:80]}' is a pickled object, which would run code; export tensors only"
                )


def _require_plain_program(where: str, program: Any) -> None:
    """Check a program's table, and all nested tables."""
    queue: list[tuple[str, Any]] = [("", program)]
    while queue:
        key, value = queue.pop()
        if isinstance(value, dict):
            for inner in value:
                _require_name(where, inner)
            queue += [(inner, item) for inner, item in value.items() if inner != "metadata"]
        elif isinstance(value, list):
            queue += [(key, item) for item in value]
        elif isinstance(value, str):
            _require_plain_text(where, key, value)


def _require_plain_text(where: str, key: str, text: str) -> None:
    if key == "expr_str":
        if not _is_size(text):
            raise ModelError(f"{where}: '{text[:80]}' is no expression of a size; it is not evaluated")
    elif key == "target" and text.startswith(("torch", "_operator", "math", "#")):
        if not _OPERATOR.fullmatch(text) or text.startswith(_PYTHON_SIDE):
            raise ModelError(f"{where}: '{text[:80]}' is no operator of a network; it is not called")
        _require_operator(where, text)
    elif key in ("in_spec", "out_spec"):
        if "__enum__" in text or "default_factory" in text or "\\u" in text:
            raise ModelError(f"{where}: its inputs or outputs are classes, which are not imported")
    elif key in _NAMES:
        _require_name(where, text)


def _require_operator(where: str, target: str) -> None:
    """Raise `ModelError` for an operator of the dispatcher that PyTorch alone does not have."""
    import torch

    root, _, path = target.partition("torch.ops.")
    if root or not path:
        return
    namespace, name = path.split(".")[:2]
    if not hasattr(getattr(torch.ops, namespace), name):
        raise ModelError(f"{where}: calls '{path[:80]}', an operator of another library than PyTorch")


def _is_size(text: str) -> bool:
    """Whether an expression has only numbers, symbols and known functions."""
    if len(text) > _EXPRESSION_LENGTH:
        return False
    numbers = _POWER.sub("1", _SYMBOL.sub("X", text)).replace("X", "1")
    return "**" not in numbers and _EXPRESSION.fullmatch(numbers) is not None


def _require_name(where: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ModelError(f"{where}: '{name[:80]}' is no name of a value; it is not read")
