"""GGUF files: the table of metadata and the tensors, with checks of their types."""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pimflow.errors import ModelError
from pimflow.zoo.language.gguf_header import GgufTensor, read_header

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """The header of a file; unlike the library's reader, it does not hold hundreds of megabytes of arrays."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def field(self, name: str, kind: type[Value], default: Value | None = None) -> Value | None:
        """A value of the file's table, or `default`; raises `ModelError` if it is of another type."""
        value = self.fields.get(name, default)
        if kind is float and type(value) is int:
            value = float(value)
        if value is not None and type(value) is not kind:
            raise ModelError(f"'{self.path}': {name} is a {type(value).__name__}, not a {kind.__name__}")
        return value

    def array(self, name: str, kind: type[Value]) -> list[Value]:
        """An array of the file's table, empty without one; raises `ModelError` as `field`."""
        values = self.field(name, list) or []
        if any(type(value) is not kind for value in values):
            raise ModelError(f"'{self.path}': {name} is no array of {kind.__name__}")
        return values

    def tensor(self, name: str) -> GgufTensor:
        """A tensor by its name in the file; raises `ModelError` if there is none."""
        if name not in self.tensors:
            raise ModelError(f"'{self.path}': has no tensor '{name}'; it is incomplete, or of another family")
        return self.tensors[name]


def open_file(path: Path) -> GgufFile:
    """Read the header of a file; raises `ModelError`. The last one is cached."""
    try:
        return _open_file(os.fspath(path), path.stat().st_mtime_ns)
    except ImportError:
        raise ModelError(
            f"'{path}': the library gguf reads such files; pip install 'pimflow[gguf]'"
        ) from None
    except OSError as error:
        raise ModelError(f"'{path}': cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ModelError(f"'{path}': is not a GGUF file, or is damaged: a text is no UTF-8") from None
    except (ValueError, KeyError, OverflowError) as error:
        raise ModelError(f"'{path}': is not a GGUF file, or is damaged: {error}") from None


@functools.lru_cache(maxsize=1)
def _open_file(path: str, _: int) -> GgufFile:
    fields, tensors = read_header(path)
    return GgufFile(path=Path(path), fields=fields, tensors=tensors)


def storage_types(path: str) -> str:
    """Types in which a file stores weights, such as ``Q4_1, Q8_0, F32``; the most frequent first."""
    elements: Counter[str] = Counter()
    for tensor in open_file(Path(path)).tensors.values():
        elements[tensor.kind.name] += math.prod(tensor.shape)
    return ", ".join(name for name, _ in elements.most_common())
