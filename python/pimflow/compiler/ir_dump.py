"""The module after each pass of a compilation, as files of TVMScript, for those who work on passes."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import tvm
from tvm.ir.instrument import pass_instrument

from pimflow.core.typed_values import has_type
from pimflow.host.directories import DirectoryKind, Seals, new_directory
from pimflow.host.files import file_sha256
from pimflow.host.pass_context import changed_copy

MARK = "passes.json"
VERSION = "pimflow-passes/1"


@pass_instrument
class ModuleWriter:
    """An instrument of TVM that writes the module after every pass: ``0001_NAME.py``, and so on.

    A pass that calls others is written after them. `tvm.transform.Sequential` is left out: its last pass has
    the same module.

    Attributes
    ----------
    error : OSError, optional
        Why a file could not be written. TVM would lose its type.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.digests: dict[str, str] = {}
        self.error: OSError | None = None

    def run_after_pass(self, mod: tvm.IRModule, info: tvm.transform.PassInfo) -> None:
        """Write the module; TVM calls this."""
        if info.name == "sequential" or self.error is not None:
            return
        name = f"{len(self.digests) + 1:04}_{re.sub(r'[^A-Za-z0-9_.-]', '_', info.name)}.py"
        try:
            (self.folder / name).write_text(mod.script() + "\n", encoding="utf-8")
            self.digests[name] = file_sha256(self.folder / name)
        except OSError as error:
            self.error = error


@contextlib.contextmanager
def dump_ir(folder: str | os.PathLike[str] | None, *, force: bool = False) -> Iterator[None]:
    """Write the module after every pass of the block to directory `folder`; do nothing if it is None.

    The directory is written after an error in the block, too. Other parts of TVM's current `PassContext`
    still hold.

    Parameters
    ----------
    force : bool
        See `host.directories.check_target`.

    Raises
    ------
    ArtifactError
        If the directory cannot be written.
    """
    if folder is None:
        yield
        return
    failure: BaseException | None = None
    with new_directory(folder, KIND, force=force) as directory:
        writer, context = ModuleWriter(directory), tvm.transform.PassContext.current()
        try:
            with changed_copy(context, instruments=[*context.instruments, writer]):
                yield
        except BaseException as error:
            failure = error
        if writer.error is not None:
            raise writer.error
        table = {"version": VERSION, "sha256": writer.digests}
        (directory / MARK).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    if failure is not None:
        raise failure


def _seals(directory: Path) -> Seals:
    """The files that the mark names, by digests."""
    try:
        table = json.loads((directory / MARK).read_text(encoding="utf-8"))
        digests = table["sha256"] if table["version"] == VERSION else {}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}
    return {**digests, MARK: None} if digests and has_type(digests, dict[str, str]) else {}


KIND = DirectoryKind(name="modules after passes", mark=MARK, seals=_seals)
