"""Compiled networks as directories: written whole or not at all, and run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tvm import relax

from pimflow.core.plan import Plan
from pimflow.core.program import PimProgram
from pimflow.errors import ArtifactError
from pimflow.execution import infer, load, store
from pimflow.simulators.trace import expand_to_pim

LIBRARY, PLAN, REPORT, INTERFACE = "model.so", "plan.json", "report.json", "interface.json"


@dataclass(frozen=True, kw_only=True)
class Interface:
    """What a compiled directory takes.

    Attributes
    ----------
    inputs : dict of str to (tuple of int, str)
        Shape and dtype of every input, in order.
    library_sha256 : str
        Digest of the library: loading a damaged one would end the process.
    """

    inputs: dict[str, tuple[tuple[int, ...], str]]
    library_sha256: str = ""

    @classmethod
    def load(cls, directory: Path) -> Interface:
        try:
            table = json.loads((directory / INTERFACE).read_text(encoding="utf-8"))
            inputs = {
                name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in table["inputs"].items()
            }
            digest = table["library_sha256"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(
                f"{directory} is no compiled network; make one with 'pimflow compile'"
            ) from error
        return cls(inputs=inputs, library_sha256=digest)

    def ordered(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """`inputs` in the network's order and dtypes.

        Raises
        ------
        ArtifactError
            If one is missing, unknown, of another shape, or holds no numbers.
        """
        for name in inputs:
            if name not in self.inputs:
                raise ArtifactError(f"no input '{name}'; inputs are {', '.join(self.inputs)}")
        arrays = {}
        for name, (shape, dtype) in self.inputs.items():
            if name not in inputs:
                raise ArtifactError(f"input '{name}' of shape {shape} is missing")
            array = np.asarray(inputs[name])
            if array.shape != shape or not np.issubdtype(array.dtype, np.number):
                given = f"{array.shape} {array.dtype}"
                raise ArtifactError(f"input '{name}' has shape {shape} and dtype {dtype}, not {given}")
            arrays[name] = array.astype(dtype)
        return arrays

    def to_json(self) -> str:
        inputs = {name: {"shape": shape, "dtype": dtype} for name, (shape, dtype) in self.inputs.items()}
        return json.dumps({"inputs": inputs, "library_sha256": self.library_sha256}, indent=1) + "\n"


@contextlib.contextmanager
def new_directory(target: str | os.PathLike) -> Iterator[Path]:
    """An empty directory that takes the place of `target` once the block has ended without error.

    Raises
    ------
    ArtifactError
        If `target` exists and is not an empty or a compiled directory, or cannot be written.
    """
    path = Path(target)
    check_target(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        yield scratch
        scratch.chmod(0o755)
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
            path.rename(old / path.name)
            scratch.rename(path)
            shutil.rmtree(old)
        else:
            scratch.rename(path)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_target(target: str | os.PathLike) -> None:
    """Raise `ArtifactError` if `target` holds something that `new_directory` must not replace."""
    path = Path(target)
    if path.exists() and not path.is_dir():
        raise ArtifactError(f"{path} is a file; name a directory")
    if path.is_dir() and any(path.iterdir()) and not (path / INTERFACE).exists():
        raise ArtifactError(f"{path} holds something else than a compiled network; name another directory")


def write(
    target: str | os.PathLike,
    *,
    executable: relax.VMExecutable,
    interface: Interface,
    plan: Plan,
    report: Mapping[str, object],
    programs: Mapping[str, PimProgram],
    traces: bool,
) -> None:
    """Write a compiled network to directory `target`.

    Parameters
    ----------
    programs : mapping of str to PimProgram
        By region.
    traces : bool
        Whether to add a ``.pim`` file for every region and channel.
    """
    with new_directory(target) as directory:
        store(executable, directory / LIBRARY)
        (directory / PLAN).write_text(plan.to_json(), encoding="utf-8")
        (directory / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        sealed = replace(interface, library_sha256=_sha256(directory / LIBRARY))
        (directory / INTERFACE).write_text(sealed.to_json(), encoding="utf-8")
        (directory / "programs").mkdir()
        for region, program in programs.items():
            stem = re.sub(r"[^\w.-]", "_", region)
            (directory / "programs" / f"{stem}.pimprog").write_text(program.to_json(), encoding="utf-8")
            if traces:
                (directory / "traces" / stem).mkdir(parents=True)
                for channel in range(len(program.channels)):
                    trace = directory / "traces" / stem / f"channel{channel}.pim"
                    trace.write_bytes(expand_to_pim(program, channel))


def run(directory: str | os.PathLike, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs of the compiled network in `directory`.

    Parameters
    ----------
    inputs : mapping of str to ndarray
        Every input by name, of its shape; numbers are converted to its dtype.

    Raises
    ------
    ArtifactError
        If the directory is none, or an input is missing, unknown or of another shape.
    """
    path = Path(directory)
    interface = Interface.load(path)
    arrays = interface.ordered(inputs)
    if not (path / LIBRARY).exists() or _sha256(path / LIBRARY) != interface.library_sha256:
        raise ArtifactError(f"{path}: {LIBRARY} is missing or damaged; compile again")
    return infer(load(path / LIBRARY), list(arrays.values()))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
