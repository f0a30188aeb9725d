"""Compiled networks as directories: which files one has, and how they are read and written."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from pimflow import zoo
from pimflow.core.json_form import json_form
from pimflow.core.plan import Plan
from pimflow.core.program import PimProgram
from pimflow.core.region import RegionGraph
from pimflow.core.table_files import read_json, read_text
from pimflow.core.typed_values import from_fields, has_type
from pimflow.errors import ArtifactError, UsageError
from pimflow.hardware.pim import PimSpec
from pimflow.hardware.systems import PADDINGS
from pimflow.host.directories import DirectoryKind, Seals, new_directory, replace_unsealed
from pimflow.host.files import file_sha256
from pimflow.simulators.pim.expansion import pim_text
from pimflow.zoo.shapes import LARGEST

if TYPE_CHECKING:
    from pimflow.compiler.build import Build
    from pimflow.compiler.packed_states import PackedStates

VERSION = "pimflow-artifact/1"
REPORT_VERSION = "pimflow-report/2"
PLAN, REPORT, INTERFACE = "plan.json", "report.json", "interface.json"
PAGE = "report.html"
LAYERS = "layers.csv"
UNSEALED = (REPORT, PAGE)  # contain times of this compilation; no program reads them
REGIONS = "regions.json"
PIM = "pim.json"
TIMELINE = "timeline.json"
LIBRARIES = {"llvm+pim": "model.so", "cuda+pim": "model-cuda.so"}
C_TARGET = "c"  # `targets.C_TARGET`, which is TVM's side
KERNELS = "kernels.cu"
_STEM_BYTES = 200  # file systems allow 255 bytes, and a number and a suffix follow


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
        if digest != _digest(table):
            raise ArtifactError(f"{directory}: {INTERFACE} was changed or damaged; compile again")
        with convert_read_errors(directory, INTERFACE):
            interface = cls._from_table(table)
            _require_type(interface, cls)
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

        Parameters
        ----------
        allow_missing : bool
            Whether inputs may be missing.

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
            if array.shape != shape or array.dtype.kind not in "biuf":
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
        return json.dumps({**table, "digest": _digest(table)}, indent=1) + "\n"


@dataclass(frozen=True, kw_only=True)
class PlacedRegions:
    """The regions of a plan, with the parameters that their GPU kernels depend on.

    Attributes
    ----------
    graph : RegionGraph
    gpu, dtype, padding : str
        Name of the GPU, storage type, and how convolutions pad (`System.padding`).
    bounds : tuple of float
        Error bound of each output, if one is wider than `output_error.OUTPUT_BOUND`; else empty.
    """

    graph: RegionGraph
    gpu: str
    dtype: str
    padding: str = PADDINGS[0]
    bounds: tuple[float, ...] = ()

    @classmethod
    def load(cls, directory: Path) -> PlacedRegions:
        """Read a compiled directory; raises `ArtifactError` if it is none, or damaged."""
        Interface.load(directory).check(directory, REGIONS)
        with convert_read_errors(directory, REGIONS):
            placed_regions = from_fields(cls, read_json(directory / REGIONS, ArtifactError))
            _require_type(placed_regions, cls)
        return placed_regions

    def to_json(self) -> str:
        return json.dumps(json_form(self), indent=1) + "\n"


def load_device(directory: Path) -> PimSpec:
    """Read the PIM device of a compiled directory; raises `ArtifactError` if it is none, or damaged."""
    Interface.load(directory).check(directory, PIM)
    with convert_read_errors(directory, PIM):
        spec = PimSpec.from_json(read_text(directory / PIM, ArtifactError), f"{directory / PIM}")
        _require_type(spec, PimSpec)
        if fault := next(spec.faults(), ""):
            raise ValueError(fault)
    return spec


def load_packed_states(directory: Path, interface: Interface) -> PackedStates:
    """Read how caches of a compiled directory lie in the banks; raises `ArtifactError` if it is damaged."""
    from pimflow.compiler.packed_states import PackedStates

    if not any("layout" in state for state in interface.states.values()):
        return PackedStates()
    pim = load_device(directory)
    with convert_read_errors(directory, INTERFACE):
        states = PackedStates.from_table(interface.states, pim)
        if any(interface.inputs[name][0] != cache.cache_shape for name, cache in states.inputs.items()):
            raise ValueError("caches")
    return states


@contextlib.contextmanager
def convert_read_errors(directory: Path, name: str) -> Iterator[None]:
    """Turn errors from reading a malformed table into `ArtifactError`: a digest does not prove its form."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise ArtifactError(f"{directory}: {name} was not written by this pimflow; compile again") from error


def _require_type(value: object, kind: type) -> None:
    if not has_type(value, kind):
        raise TypeError(f"not of the types of {kind.__name__}")


def enclosing_directory(file: Path) -> Path | None:
    """The compiled directory that `file`, a program or a trace, belongs to; None if there is none."""
    parts = file.absolute().parts
    for depth, folder in ((2, "programs"), (3, "traces")):
        if len(parts) > depth and parts[-depth] == folder:
            directory = Path(*parts[:-depth])
            if (directory / INTERFACE).is_file():
                return directory
    return None


@dataclass(frozen=True, kw_only=True)
class ArtifactFiles:
    """What a compiled directory holds.

    Attributes
    ----------
    builds : sequence of Build
        One a target, the requested target first.
    interface : Interface
        Without targets and digests, which `write` adds; with outputs and a pool if there are `c_files`.
    placed_regions : PlacedRegions
        The regions that the plan places.
    pim : PimSpec
        The device that the programs are for, stored so that they can be read without a device file.
    timeline : str
        The plan's timeline as JSON for Perfetto.
    report : mapping
        The report as JSON.
    programs : mapping of str to PimProgram
        By region.
    traced_regions : collection of str
        Regions to write command traces of, a ``.pim`` file for each channel.
    c_files : mapping of str to bytes
        The network in C, by file name; empty unless target C was requested.
    front : mapping of str to Plan
        Plans of a front, by file name.
    """

    builds: Sequence[Build]
    interface: Interface
    plan: Plan
    placed_regions: PlacedRegions
    pim: PimSpec
    timeline: str
    report: Mapping[str, object]
    programs: Mapping[str, PimProgram]
    traced_regions: Collection[str] = ()
    c_files: Mapping[str, bytes] = field(default_factory=dict)
    front: Mapping[str, Plan] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Write all files to an empty directory, but `INTERFACE` and `PAGE`."""
        from pimflow.pim_backend.runtime.network_module import store

        for build in self.builds:
            store(build.module, directory / LIBRARIES[build.target], build.weight_bytes, build.code)
            if build.kernels.source:
                (directory / KERNELS).write_text(build.kernels.source, encoding="utf-8")
        texts = {
            **{name: plan.to_json() for name, plan in {PLAN: self.plan, **self.front}.items()},
            REGIONS: self.placed_regions.to_json(),
            PIM: self.pim.to_json(),
            TIMELINE: self.timeline,
            LAYERS: layers_table(self.report),
        }
        contents = {**self.c_files, **{name: text.encode() for name, text in texts.items()}}
        for name, content in {**contents, REPORT: _report_bytes(self.report)}.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(content)
        self._write_programs(directory)

    def _write_programs(self, directory: Path) -> None:
        (directory / "programs").mkdir()
        stems = file_stems(self.programs)
        for region, program in self.programs.items():
            stem = stems[region]
            (directory / "programs" / f"{stem}.pimprog").write_text(program.to_json(), encoding="utf-8")
            if region in self.traced_regions:
                (directory / "traces" / stem).mkdir(parents=True)
                for channel in range(len(program.channels)):
                    with (directory / "traces" / stem / f"channel{channel}.pim").open("wb") as trace:
                        trace.writelines(pim_text(program, channel))

    def seal(self, directory: Path) -> Interface:
        """The interface with the targets, and with digests of all files of `directory` but `UNSEALED`.

        These files have the same bytes for the same inputs.
        """
        files = sorted(p for p in directory.rglob("*") if p.is_file() and p.name not in UNSEALED)
        return replace(
            self.interface,
            targets=(*([C_TARGET] if self.c_files else []), *(build.target for build in self.builds)),
            sha256={str(p.relative_to(directory)): file_sha256(p) for p in files},
        )


def write(
    target: str | os.PathLike[str],
    files: ArtifactFiles,
    *,
    page: Callable[[Path], bytes] | None = None,
    force: bool = False,
) -> WrittenDirectory:
    """Write a compiled network to directory `target`.

    Parameters
    ----------
    page : callable, optional
        Makes `PAGE` from the directory, after all other files are written.
    force : bool
        See `host.directories.check_target`.
    """
    with new_directory(target, KIND, force=force) as directory:
        files.write(directory)
        interface = files.seal(directory)
        (directory / INTERFACE).write_text(interface.to_json(), encoding="utf-8")
        if page is not None:
            (directory / PAGE).write_bytes(page(directory))
    return WrittenDirectory(path=Path(target), interface=interface, page=page)


@dataclass(frozen=True, kw_only=True)
class WrittenDirectory:
    """A compiled directory that was written; its report can be replaced.

    Attributes
    ----------
    interface : Interface
        With the digests of its files.
    page : callable, optional
        See `write`.
    """

    path: Path
    interface: Interface
    page: Callable[[Path], bytes] | None

    def replace_report(self, report: Mapping[str, object]) -> None:
        """Write another report and its page; raises `ArtifactError` if another network lies there now."""
        self._replace(REPORT, _report_bytes(report))
        if self.page is not None:
            self._replace(PAGE, self.page(self.path))

    def _replace(self, name: str, data: bytes) -> None:
        replace_unsealed(self.path, KIND, name, data, mark=self.interface.to_json().encode())


def layers_table(report: Mapping[str, Any]) -> str:
    """The layers of a report as CSV: a row for each, without its candidates and programs.

    Parts of a field are columns of their own, such as ``busy_ns.gpu``; shapes are as ``1x3x224x224``.
    """
    rows = [_flat_row(row) for row in report["regions"]]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat_row(row: Mapping[str, Any]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{part}": item for part, item in value.items()}
        elif name not in ("candidates", "programs"):
            flat[name] = _cell(value)
    return flat


def _cell(value: object) -> object:
    """A value for a table; what a spreadsheet would take for a formula gets an apostrophe."""
    if isinstance(value, list | tuple):
        inner = "x" if all(isinstance(item, int) for item in value) else " + "
        value = inner.join(str(_cell(item)) for item in value)
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value


def _report_bytes(report: Mapping[str, object]) -> bytes:
    return (json.dumps(report, indent=1) + "\n").encode()


def _seals(directory: Path) -> Seals:
    """Digests of the files that ``interface.json`` names, in any version, and files that may be replaced."""
    try:
        table = json.loads((directory / INTERFACE).read_text(encoding="utf-8"))
        digest, version, names = table.pop("digest"), table["version"], table["sha256"]
        if version.partition("/")[0] != VERSION.partition("/")[0] or not has_type(names, dict[str, str]):
            return {}
        if version == VERSION and digest != _digest(table):
            return {}  # damaged, or changed by somebody
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
    return {**names, **dict.fromkeys((INTERFACE, *UNSEALED))}


KIND = DirectoryKind(name="a compiled network", mark=INTERFACE, seals=_seals, guests=(".npy",))


def file_stems(regions: Iterable[str]) -> dict[str, str]:
    """File name stems, by region: the region's name where it is a valid one, made unique without case."""
    stems: dict[str, str] = {}
    used_names: set[str] = set()
    for region in regions:
        base = re.sub(r"[^\w.-]|^\.", "_", region).encode()[:_STEM_BYTES].decode(errors="ignore") or "_"
        numbered = (f"{base}-{number}" for number in itertools.count(2))
        stem = next(name for name in itertools.chain([base], numbered) if name.casefold() not in used_names)
        used_names.add(stem.casefold())
        stems[region] = stem
    return stems


def _digest(table: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
