"""The table of a GGUF file's architecture: typed access to its keys, none of which is ignored."""

from __future__ import annotations

import math
from typing import Any

from pimflow.errors import ModelError, one_line
from pimflow.zoo.language.gguf_file import GgufFile

# Keys that have no effect on the values of a model.
_WITHOUT_EFFECT = (
    "rope.scaling.attn_factor",  # without rotary positions; else it is read
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
)


class Table:
    """The keys of an architecture in the table of a file; those that are not read are refused."""

    def __init__(self, file: GgufFile, family: str) -> None:
        self.file, self.prefix, self.where = file, f"{family}.", f"'{file.path}'"
        self._read: set[str] = set(_WITHOUT_EFFECT)

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.file.fields

    def value(self, name: str, kind: type, default: Any = None) -> Any:
        """A value, or `default`; raises `ModelError` if it is of another type."""
        self._read.add(name)
        return self.file.field(self.prefix + name, kind, default)

    def size(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """A size, also as an array of equal ones, one for each block; raises `ModelError` if it is none."""
        self._read.add(name)
        key = self.prefix + name
        sizes = self.file.fields.get(key)
        if type(sizes) is list and sizes:
            if any(type(size) is not int or size != sizes[0] for size in sizes):
                raise ModelError(f"{self.where}: {key} differs between blocks, which is not supported")
            value: int | None = sizes[0]
        else:
            value = self.file.field(key, int, default)
        if value is None or value < minimum:
            raise ModelError(f"{self.where}: has no {key}, a number from {minimum} on; it is incomplete")
        return value

    def number(self, name: str, default: float | None = None, *, zero: float | None = None) -> float:
        """A positive number, or `zero` in place of 0; raises `ModelError` if it is none."""
        value = self.value(name, float, default)
        if value == 0 and zero is not None:
            return zero
        if value is None:
            raise ModelError(f"{self.where}: has no {self.prefix}{name}; it is incomplete")
        if not 0 < value < math.inf:
            raise ModelError(f"{self.where}: {self.prefix}{name} is {value}, no finite number above zero")
        return float(value)

    def require(self, name: str, kind: type, *neutral: object) -> None:
        """Raise `ModelError` if there is a value other than the `neutral` ones, which change nothing."""
        value = self.value(name, kind)
        if value is not None and value not in neutral:
            raise ModelError(f"{self.where}: {self.prefix}{name} is {value}, which is not supported")

    def require_all_read(self) -> None:
        """Raise `ModelError` if there is a key that nothing has read."""
        names = {name.removeprefix(self.prefix) for name in self.file.fields if name.startswith(self.prefix)}
        if unread := sorted(names - self._read):
            raise ModelError(
                f"{self.where}: has the key '{one_line(self.prefix + unread[0])[:80]}', which is not "
                "supported but may change the results"
            )
