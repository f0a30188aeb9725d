"""Profiles: times of convolution primitives and layout transforms on a machine, and their file."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pimflow.core.json_form import OMITTED, report_of
from pimflow.core.region import ConvGeometry
from pimflow.core.table_files import read_json
from pimflow.core.typed_values import from_fields
from pimflow.errors import ProfileError
from pimflow.host.files import replace_file
from pimflow.primitives import PRIMITIVES, Primitive
from pimflow.primitives.families import tiles
from pimflow.primitives.layer import FP32_BYTES, Shape, input_bytes

VERSION = "pimflow-profile/1"
ROWS = ("layers", "transforms", "pools", "kernels")  # lists of a file
PARTS = ("primitive", "transform", "other")  # of a network's time, by what a kernel does
ANALYTIC = "analytic"  # in place of an architecture: times are those of the GPU model
# Rates that only say what is tried first (assumed): a core with wide vectors, its memory, and one lane.
MACS_PER_NS = 100.0
BYTES_PER_NS = 20.0
SCALAR_MACS_PER_NS = 2.0
FEW_PLACES = 4  # tiles of fewer wait for the result of the product before

Move = tuple[Shape, str, str]  # of a tensor (batch, height, width, channels), from a layout into another


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """A pooling layer, which no primitive computes.

    Attributes
    ----------
    operator : str
        Such as ``nn.max_pool2d``, or ``mean`` over all pixels.
    window : ConvGeometry
        As of a depthwise convolution.
    """

    operator: str
    window: ConvGeometry


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device that a profile was measured on.

    Attributes
    ----------
    cpu : str
        LLVM's name of the processor; of a GPU its architecture, or `ANALYTIC`.
    model : str
        The processor's own name.
    unit : str
        What `threads` counts: a GPU's ``multiprocessors``.
    """

    cpu: str
    model: str
    threads: int
    unit: str = "threads"

    @property
    def name(self) -> str:
        return f"{self.model}, {self.cpu}, {self.threads} {self.unit}"

    @property
    def target(self) -> str:
        """Whose primitives it runs: ``cpu`` or ``cuda``."""
        return "cpu" if self.unit == "threads" else "cuda"


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """One call of a kernel that a network is compiled to.

    Attributes
    ----------
    part : str
        ``primitive``: it computes a chosen primitive, with all operators that were fused with it;
        ``transform``: it moves data and computes nothing; ``other``.
    key : str
        Digest of its code and of which of its operands are constants.
    time_ns : float
        Alone, its constants and results in no cache.
    """

    kernel: str
    part: str
    key: str
    time_ns: float


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """A kernel of a compiled network, by what it does for the network."""

    kernel: str
    part: str
    time_ns: float


@dataclass(frozen=True, kw_only=True)
class NetworkTimeReport:
    """How long a whole network takes; see `NetworkTime`.

    Attributes
    ----------
    time_ns : float
        Of all kernels; then by `PARTS`.
    measured_ns, difference : float or None
        Of whole inferences, and how much the sum is above that, as a share; None if none was run.
    """

    time_ns: float
    primitives_ns: float
    transforms_ns: float
    others_ns: float
    kernels: tuple[KernelReport, ...]
    measured_ns: float | None = field(default=None, metadata=OMITTED)
    difference: float | None = field(default=None, metadata=OMITTED)

    def text(self) -> str:
        """A line for people."""
        by_part = zip((self.primitives_ns, self.transforms_ns, self.others_ns), PARTS, strict=True)
        parts = ", ".join(f"{part_ns / 1e6:.3f} ms {part}s" for part_ns, part in by_part)
        line = f"inference {self.time_ns / 1e6:.3f} ms by its {len(self.kernels)} kernels alone ({parts})"
        if self.measured_ns is not None and self.difference is not None:
            line += f", {self.measured_ns / 1e6:.3f} ms measured, {100 * self.difference:+.1f}%"
        return line


@dataclass(frozen=True, kw_only=True)
class NetworkTime:
    """How long a whole network takes on a CPU: all kernels, one after the other.

    Attributes
    ----------
    kernels : tuple of KernelTime
        In the order of calls.
    measured_ns : float or None
        Median time of whole inferences; None if none was run.
    """

    kernels: tuple[KernelTime, ...]
    measured_ns: float | None = None

    @property
    def time_ns(self) -> float:
        return sum(kernel.time_ns for kernel in self.kernels)

    def summary(self) -> NetworkTimeReport:
        """For a report: sums by part, every kernel, and what was measured."""
        primitives_ns, transforms_ns, others_ns = (
            sum(kernel.time_ns for kernel in self.kernels if kernel.part == part) for part in PARTS
        )
        return NetworkTimeReport(
            time_ns=self.time_ns,
            primitives_ns=primitives_ns,
            transforms_ns=transforms_ns,
            others_ns=others_ns,
            kernels=tuple(report_of(KernelReport, kernel) for kernel in self.kernels),
            measured_ns=self.measured_ns,
            difference=None if self.measured_ns is None else self.time_ns / self.measured_ns - 1,
        )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured times.

    Attributes
    ----------
    code : str
        Digest of the sources of what was measured.
    times_ns : dict of (str, ConvGeometry) to float
        By primitive and layer; medians of calls.
    moves_ns : dict of Move to float
        Times of layout transforms.
    pools_ns : dict of (Pooling, str) to float
        By layout.
    kernels_ns : dict of str to float
        Times of kernels of compiled networks, by `KernelTime.key`.
    failed : dict of (str, ConvGeometry) to str
        What could not be built, and why; not in the file.
    predicted_ns : dict of (str, ConvGeometry) to float
        Times that `primitive_selection.prediction` gave to what was not measured; not in the file.
    """

    device: Device
    code: str
    times_ns: dict[tuple[str, ConvGeometry], float] = field(default_factory=dict)
    moves_ns: dict[Move, float] = field(default_factory=dict)
    pools_ns: dict[tuple[Pooling, str], float] = field(default_factory=dict)
    kernels_ns: dict[str, float] = field(default_factory=dict)
    failed: dict[tuple[str, ConvGeometry], str] = field(default_factory=dict)
    predicted_ns: dict[tuple[str, ConvGeometry], float] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """The contents of the file, in an order that does not depend on how it was measured."""
        layers: dict[ConvGeometry, dict[str, float]] = {}
        for (name, layer), ns in sorted(
            self.times_ns.items(), key=lambda item: repr(item[0][1]) + item[0][0]
        ):
            layers.setdefault(layer, {})[name] = round(ns)
        return {
            "version": VERSION,
            "device": dataclasses.asdict(self.device),
            "code": self.code,
            "layers": [{"layer": _short(layer), "times_ns": times} for layer, times in layers.items()],
            "transforms": [
                [list(shape), given, taken, round(ns)]
                for (shape, given, taken), ns in sorted(self.moves_ns.items())
            ],
            "pools": [
                [pool.operator, _short(pool.window), layout, round(ns)]
                for (pool, layout), ns in sorted(self.pools_ns.items(), key=lambda item: repr(item[0]))
            ],
            "kernels": [[key, round(ns)] for key, ns in sorted(self.kernels_ns.items())],
        }

    def write(self, path: str | os.PathLike) -> None:
        """Raises `OutputError` if it cannot."""
        plain = self.plain()
        lists = [
            f'"{key}": [\n' + ",\n".join(json.dumps(row) for row in plain.pop(key)) + "\n]" for key in ROWS
        ]
        text = ",\n".join([json.dumps(plain)[:-1], *lists]) + "}\n"
        replace_file(path, text.encode())

    @classmethod
    def read(cls, path: str | os.PathLike) -> Profile:
        """Raises `ProfileError`, naming the file and the field, for anything but a profile."""
        plain = read_json(path, ProfileError)
        if not isinstance(plain, dict) or plain.get("version") != VERSION:
            raise ProfileError(
                f"{path}: is no profile of version {VERSION}; write one with 'pimflow select -o'"
            )
        where = "device"
        try:
            device = Device(**plain["device"])
            times, moves, pools, kernels = {}, {}, {}, {}
            rows = [(name, n, row) for name in ROWS for n, row in enumerate(plain.get(name, ()))]
            for name, number, row in rows:
                where = f"{name}[{number}]"
                if name == "layers":
                    layer = from_fields(ConvGeometry, row["layer"])
                    times |= {(name, layer): duration(ns) for name, ns in row["times_ns"].items()}
                elif name == "transforms":
                    shape, given, taken, ns = row
                    moves[tuple(shape), given, taken] = duration(ns)
                elif name == "pools":
                    kind, window, layout, ns = row
                    pool = Pooling(operator=str(kind), window=from_fields(ConvGeometry, window))
                    pools[pool, str(layout)] = duration(ns)
                else:
                    key, ns = row
                    kernels[str(key)] = duration(ns)
            where = "code"
            code = str(plain["code"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProfileError(
                f"{path}: {where}: {error!r}; measure anew with 'pimflow select -o'"
            ) from error
        known = {key: ns for key, ns in times.items() if key[0] in PRIMITIVES}
        timed = {"times_ns": known, "moves_ns": moves, "pools_ns": pools, "kernels_ns": kernels}
        return cls(device=device, code=code, **timed)

    def require(self, device: Device | None, named: str | None) -> None:
        """Refuse a profile of another machine than `here`, or than the one that is `named`.

        Raises
        ------
        ProfileError
        """
        expected = named or (device.name if device else "")
        if self.device.name != expected:
            raise ProfileError(
                f"the profile was measured on '{self.device.name}', not on '{expected}': measure here, or "
                f"name the machine that it is for with --device '{self.device.name}'"
            )


def is_duration(ns: object) -> bool:
    """Whether a value can be a time."""
    return type(ns) in (int, float) and 0 <= ns <= sys.float_info.max


def duration(ns: float) -> float:
    if not is_duration(ns):
        raise ValueError(f"a time of {ns!r:.40} ns")
    return float(ns)


def _short(layer: ConvGeometry) -> dict[str, Any]:
    """Fields that differ from their defaults."""
    defaults = {f.name: f.default for f in dataclasses.fields(ConvGeometry)}
    return {name: value for name, value in dataclasses.asdict(layer).items() if value != defaults[name]}


def applicable(layer: ConvGeometry, target: str = "cpu") -> list[Primitive]:
    """Primitives of `target` that compute `layer`."""
    return [p for p in PRIMITIVES.values() if p.target == target and p.applies(layer)]


def macs(primitive: Primitive, layer: ConvGeometry) -> float:
    """Multiply-accumulates of the sums that `primitive` forms, each filter element once for each use."""
    uses = layer.pixels
    if primitive.family in ("winograd", "fft"):
        rows, columns = tiles(primitive, layer)
        uses = layer.n * (layer.oh if primitive.directions == 1 else rows) * columns
    if primitive.family == "fft":
        uses *= 2  # products of complex numbers: four for two that are stored
    if primitive.family == "shifted" and not primitive.accumulating:
        uses = layer.n * layer.h * layer.w
    return uses * math.prod(primitive.filter_shape(layer))


def bound_ns(primitive: Primitive, layer: ConvGeometry) -> float:
    """A rough lower bound of the time, from arithmetic and bytes; workspaces are written and read."""
    rate = SCALAR_MACS_PER_NS
    if primitive.places:
        rate = MACS_PER_NS * min(1.0, primitive.extents(layer).places / FEW_PLACES)
    output_bytes = FP32_BYTES * layer.pixels * layer.oc
    moved = input_bytes(layer) + output_bytes + primitive.filter_bytes(layer)
    moved += 2 * primitive.workspace_bytes(layer)
    return macs(primitive, layer) / rate + moved / BYTES_PER_NS


def promising(layer: ConvGeometry, target: str = "cpu") -> list[Primitive]:
    """Primitives of `target` for `layer` in the order in which to measure them.

    First the one of the least bound of each family and layout, then the second ones, and so on.
    """
    kinds: dict[tuple, list[Primitive]] = {}
    for primitive in sorted(applicable(layer, target), key=lambda p: bound_ns(p, layer)):
        kind = (primitive.family, primitive.layout, primitive.tile, primitive.directions)
        kinds.setdefault(kind, []).append(primitive)
    ranked = [(rank, bound_ns(p, layer), p) for of in kinds.values() for rank, p in enumerate(of)]
    return [p for _, _, p in sorted(ranked, key=lambda each: each[:2])]


def is_free(move: Move) -> bool:
    """Whether a tensor's bytes lie in the same order in both layouts."""
    (_, height, width, channels), given, taken = move
    blocks = {layout: channels if layout == "HWC" else 1 for layout in ("HWC", "CHW")} | {"CHWc16": 16}
    return given == taken or height * width == 1 or blocks[given] == blocks[taken]


def unmeasured(profile: Profile, layers: Iterable[ConvGeometry]) -> int:
    """How many of the primitives that compute `layers` have no time."""
    wanted = ((p.name, layer) for layer in layers for p in applicable(layer, profile.device.target))
    return sum(key not in profile.times_ns for key in wanted)
