"""Compiled networks as directories: which files one has, and how they are read and written."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pimflow.compiler.interface import (
    C_TARGET,
    INTERFACE,
    LIBRARIES,
    VERSION,
    Interface,
    convert_read_errors,
    require_type,
    table_digest,
)
from pimflow.compiler.layers_table import layers_table
from pimflow.core.json_form import json_form
from pimflow.core.plan import Plan
from pimflow.core.program import PimProgram
from pimflow.core.region_graph import RegionGraph
from pimflow.core.table_files import read_json, read_text
from pimflow.core.typed_values import from_fields, has_type
from pimflow.errors import ArtifactError
from pimflow.hardware.pim import PimSpec
from pimflow.hardware.systems import PADDINGS
from pimflow.host.directories import DirectoryKind, Seals, new_directory, replace_unsealed
from pimflow.host.files import file_sha256
from pimflow.simulators.pim.expansion import pim_text

if TYPE_CHECKING:
    from pimflow.compiler.build import Build
    from pimflow.compiler.packed_states import PackedStates

REPORT_VERSION = "pimflow-report/2"
PLAN, REPORT = "plan.json", "report.json"
PAGE = "report.html"
LAYERS = "layers.csv"
UNSEALED = (REPORT, PAGE)  # contain times of this compilation; no program reads them
REGIONS = "regions.json"
PIM = "pim.json"
TIMELINE = "timeline.json"
KERNELS = "kernels.cu"
_STEM_BYTES = 200  # file systems allow 255 bytes, and a number and a suffix follow


@dataclass(frozen=True, kw_only=True)
class PlacedRegions:
    """The regions of a plan, with the parameters that their GPU kernels depend on.

    Attributes
    ----------
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
            require_type(placed_regions, cls)
        return placed_regions

    def to_json(self) -> str:
        return json.dumps(json_form(self), indent=1) + "\n"


def load_device(directory: Path) -> PimSpec:
    """Read the PIM device of a compiled directory; raises `ArtifactError` if it is none, or damaged."""
    Interface.load(directory).check(directory, PIM)
    with convert_read_errors(directory, PIM):
        spec = PimSpec.from_json(read_text(directory / PIM, ArtifactError), f"{directory / PIM}")
        require_type(spec, PimSpec)
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
    pim : PimSpec
        The device that the programs are for, stored so that they can be read without a device file.
    timeline : str
        The plan's timeline as JSON for Perfetto.
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


def _report_bytes(report: Mapping[str, object]) -> bytes:
    return (json.dumps(report, indent=1) + "\n").encode()


def _seals(directory: Path) -> Seals:
    """Digests of the files that ``interface.json`` names, in any version, and files that may be replaced."""
    try:
        table = json.loads((directory / INTERFACE).read_text(encoding="utf-8"))
        digest, version, names = table.pop("digest"), table["version"], table["sha256"]
        if version.partition("/")[0] != VERSION.partition("/")[0] or not has_type(names, dict[str, str]):
            return {}
        if version == VERSION and digest != table_digest(table):
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
