"""The interface of a compiled directory: its inputs, outputs and files, each with its digest."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pimflow import zoo
from pimflow.core.table_files import read_json
from pimflow.core.typed_values import has_type
from pimflow.errors import ArtifactError, UsageError
from pimflow.host.files import file_sha256
from pimflow.zoo.shapes import LARGEST

VERSION = "pimflow-artifact/1"
INTERFACE = "interface.json"
LIBRARIES = {"llvm+pim": "model.so", "cuda+pim": "model-cuda.so"}
C_TARGET = "c"  # `targets.C_TARGET`, which is TVM's side


@dataclass(frozen=True, kw_only=True)
class Interface:
    """Inputs, outputs and files of a compiled directory.

    Attributes
    ----------
    inputs : dict of str to (tuple of int, str)
        Shape and dtype of every input, in order.
    targets : tuple of str
        Targets that the directory has a library for; the first is the requested one.
    table_rows : dict of str to int
        Number of rows, by input that selects rows of a table or places of a cache; see
        `frontend.Network`.
    draws : dict of str to str
        By input that is not drawn as usual, the text of its distribution (`zoo.Draw`).
    sha256 : dict of str to str
        Digest of every file except `UNSEALED`: loading a damaged library would end the process.
    cpu : str
        LLVM's name of the only CPU that runs ``llvm+pim``; empty if any CPU of this architecture does.
    outputs : tuple of ((int, ...), str)
        Shapes and dtypes of the outputs of the C library; empty without one.
    pool_bytes : int
        Size of the pool that the caller of the C library provides for its tensors.
    output_names : tuple of str
        Names of the outputs, in order; empty where the model does not name them.
    states : dict of str to dict
        By input that is a cache updated in place: the number of the ``output`` that has its new value, and,
        if it lies in the banks of PIM, its ``layout`` (`PackedCache.to_table`).
    """

    inputs: dict[str, tuple[tuple[int, ...], str]]
    targets: tuple[str, ...] = ()
    table_rows: dict[str, int] = field(default_factory=dict)
    sha256: dict[str, str] = field(default_factory=dict)
    cpu: str = ""
    outputs: tuple[tuple[tuple[int, ...], str], ...] = ()
    pool_bytes: int = 0
    output_names: tuple[str, ...] = ()
    states: dict[str, dict[str, object]] = field(default_factory=dict)
    draws: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path) -> Interface:
        """Read ``interface.json``; raises `ArtifactError` if it is none, damaged, or of another version."""
        try:
            exists = (directory / INTERFACE).is_file()
        except (OSError, ValueError):  # a name that no file can have
            exists = False
        try:
            table = read_json(directory / INTERFACE, ArtifactError) if exists else None
        except ArtifactError as error:
            raise ArtifactError(f"{error}; make one with 'pimflow compile'") from None
        if not isinstance(table, dict) or not {"version", "digest"} <= table.keys():
            raise ArtifactError(f"{directory} is no compiled network; make one with 'pimflow compile'")
        version, digest = table["version"], table.pop("digest")
        if version != VERSION:
            raise ArtifactError(
                f"{directory} is of version {version!r}, this pimflow reads '{VERSION}'; compile again"
            )
        if digest != table_digest(table):
            raise ArtifactError(f"{directory}: {INTERFACE} was changed or damaged; compile again")
        with convert_read_errors(directory, INTERFACE):
            interface = cls._from_table(table)
            require_type(interface, cls)
            interface._require_values()
        return interface

    @classmethod
    def _from_table(cls, table: Mapping[str, Any]) -> Interface:
        """Build an interface from the table that `to_json` writes."""
        return cls(
            inputs={name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in table["inputs"].items()},
            targets=tuple(table["targets"]),
            table_rows={name: entry["rows"] for name, entry in table["inputs"].items() if "rows" in entry},
            draws={name: entry["draw"] for name, entry in table["inputs"].items() if "draw" in entry},
            sha256=table["sha256"],
            cpu=table.get("cpu", ""),
            outputs=tuple((tuple(output["shape"]), output["dtype"]) for output in table.get("outputs", ())),
            pool_bytes=table.get("pool_bytes", 0),
            output_names=tuple(table.get("output_names", ())),
            states=table.get("states", {}),
        )

    def _require_values(self) -> None:
        """Raise `ValueError` or `TypeError` for a target, size or dtype that was never written."""
        if not self.targets or not set(self.targets) <= {*LIBRARIES, C_TARGET}:
            raise ValueError("targets")
        tensors = (*self.inputs.values(), *self.outputs)
        min_size = min([self.pool_bytes, *(rows - 1 for rows in self.table_rows.values())])
        if min_size < 0 or any(
            min(shape, default=0) < 0 or math.prod(shape) > LARGEST for shape, _ in tensors
        ):
            raise ValueError("sizes")
        kinds = {np.dtype(dtype) for _, dtype in tensors} - {np.dtype(ml_dtypes.bfloat16)}
        if any(kind.kind not in "biuf" for kind in kinds):
            raise ValueError("dtypes")
        try:
            for text in self.draws.values():
                zoo.Draw.parse(text)
        except UsageError as error:
            raise ValueError("draws") from error
        output_numbers = [state["output"] for state in self.states.values()]
        if not self.states.keys() <= self.inputs.keys() or not all(
            type(number) is int for number in output_numbers
        ):
            raise ValueError("states")

    def example_inputs(self, draws: Mapping[str, zoo.Draw]) -> dict[str, np.ndarray]:
        """Values of all inputs, those in `draws` from these distributions; see `zoo.example_arrays`."""
        stored = {name: zoo.Draw.parse(text) for name, text in self.draws.items()}
        return zoo.example_arrays(self.inputs, rows=self.table_rows, draws={**stored, **draws})

    def order_inputs(
        self, inputs: Mapping[str, np.ndarray], *, allow_missing: bool = False
    ) -> dict[str, np.ndarray]:
        """Sort `inputs` in the network's order and convert them to its dtypes.

        Raises
        ------
        ArtifactError
            If an input is missing, unknown, of another shape, ragged, or not numeric.
        UsageError
            If an input selects a row or a place that does not exist.
        """
        for name in inputs:
            if name not in self.inputs:
                raise ArtifactError(f"no input '{name}'; inputs are {', '.join(self.inputs)}")
        arrays = {}
        for name, (shape, dtype) in self.inputs.items():
            if allow_missing and name not in inputs:
                continue
            if name not in inputs:
                raise ArtifactError(f"input '{name}' of shape {shape} is missing")
            try:
                array = np.asarray(inputs[name])
            except ValueError:
                raise ArtifactError(f"input '{name}' has rows of different lengths") from None
            is_number = array.dtype.kind in "biuf" or array.dtype == ml_dtypes.bfloat16
            if array.shape != shape or not is_number:
                actual = f"{array.shape} {array.dtype}"
                raise ArtifactError(f"input '{name}' has shape {shape} and dtype {dtype}, not {actual}")
            rows = self.table_rows.get(name)
            lowest = 0 if self.states or not rows else -rows  # -1 is the last row, but no place of a cache
            if rows and array.size and not lowest <= array.min() <= array.max() < rows:
                bad_index = array.max() if array.max() >= rows else array.min()
                raise UsageError(
                    f"input '{name}' has {bad_index}, and picks one of {rows}: give {lowest} to {rows - 1}"
                )
            arrays[name] = array.astype(dtype)
        return arrays

    def check(self, directory: Path, name: str) -> None:
        """Raise `ArtifactError` unless file `name` is unchanged since it was written.

        Call this before any file of a compiled directory is read or loaded.
        """
        path = directory / name
        if name not in self.sha256:
            raise ArtifactError(
                f"{directory}: {INTERFACE} has no digest of {name[:200]}, and it is not read; compile again"
            )
        try:
            is_intact = path.is_file() and file_sha256(path) == self.sha256[name]
        except OSError:  # a name that no file can have, or a file that cannot be read
            is_intact = False
        if not is_intact:
            raise ArtifactError(f"{directory}: {name[:200]} is missing or was changed; compile again")

    def to_json(self) -> str:
        """Text of ``interface.json``, with a digest of its own content."""
        inputs: dict[str, dict[str, object]] = {
            name: {"shape": shape, "dtype": dtype} for name, (shape, dtype) in self.inputs.items()
        }
        for name, rows in self.table_rows.items():
            inputs[name]["rows"] = rows
        for name, draw in self.draws.items():
            inputs[name]["draw"] = draw
        table: dict[str, object] = {"version": VERSION, "inputs": inputs, "targets": self.targets}
        table |= {"sha256": self.sha256}
        table |= {"cpu": self.cpu} if self.cpu else {}
        table |= {"output_names": self.output_names} if self.output_names else {}
        table |= {"states": self.states} if self.states else {}
        if self.outputs:
            outputs = [{"shape": shape, "dtype": dtype} for shape, dtype in self.outputs]
            table |= {"outputs": outputs, "pool_bytes": self.pool_bytes}
        return json.dumps({**table, "digest": table_digest(table)}, indent=1) + "\n"


@contextlib.contextmanager
def convert_read_errors(directory: Path, name: str) -> Iterator[None]:
    """Turn errors from reading a malformed table into `ArtifactError`: a digest does not prove its form."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise ArtifactError(f"{directory}: {name} was not written by this pimflow; compile again") from error


def require_type(value: object, kind: type) -> None:
    if not has_type(value, kind):
        raise TypeError(f"not of the types of {kind.__name__}")


def table_digest(table: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
