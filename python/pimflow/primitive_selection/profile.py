"""Profiles: times of convolution primitives and layout transforms on a machine, and the file format."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pimflow.core.json_form import OMITTED, report_from
from pimflow.core.kernel import ConvGeometry
from pimflow.core.table_files import read_json
from pimflow.core.typed_values import from_fields
from pimflow.errors import ProfileError
from pimflow.host.files import replace_file
from pimflow.primitives import PRIMITIVES, Primitive
from pimflow.primitives.families import tile_counts
from pimflow.primitives.layer import FP32_BYTES, Shape, input_bytes

VERSION = "pimflow-profile/1"
ROWS = ("layers", "transforms", "pools", "kernels")  # the lists in a file
PARTS = ("primitive", "transform", "other")  # parts of a network's time, by the purpose of a kernel
ANALYTIC = "analytic"  # in place of an architecture: times are those of the GPU model
# Rates of a core with wide vectors, of its memory, and of one lane (assumed). They only order measurements.
MACS_PER_NS = 100.0
BYTES_PER_NS = 20.0
SCALAR_MACS_PER_NS = 2.0
FEW_PLACES = 4  # smaller tiles are bound by the latency of multiply-adds, which depend on one another

Move = tuple[Shape, str, str]  # (batch, height, width, channels) of a tensor, source and target layout


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """A pooling layer, which no primitive computes.

    Attributes
    ----------
    operator : str
        Such as ``nn.max_pool2d``, or ``mean`` over all pixels.
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
        Unit of `threads`; ``multiprocessors`` for a GPU.
    """

    cpu: str
    model: str
    threads: int
    unit: str = "threads"

    @property
    def name(self) -> str:
        """Name in reports and in files."""
        return f"{self.model}, {self.cpu}, {self.threads} {self.unit}"

    @property
    def target(self) -> str:
        """Target of the primitives that it runs: ``cpu`` or ``cuda``."""
        return "cpu" if self.unit == "threads" else "cuda"


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """Time of one kernel call of a compiled network.

    Attributes
    ----------
    part : str
        ``primitive``: it computes a selected primitive, with all operators that were fused with it;
        ``transform``: it moves data and computes nothing; ``other``.
    key : str
        Digest of its code, and of which operands are constants.
    time_ns : float
        Of the kernel by itself; its constants and results are in no cache.
    """

    kernel: str
    part: str
    key: str
    time_ns: float


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """A kernel of a compiled network, in a report."""

    kernel: str
    part: str
    time_ns: float


@dataclass(frozen=True, kw_only=True)
class NetworkTimeReport:
    """Time of a whole network, in a report; see `NetworkTime`.

    Attributes
    ----------
    time_ns : float
        Sum over all kernels; the next fields are the sums by `PARTS`.
    measured_ns, difference : float or None
        Time of whole inferences, and by which share the sum is above it; None if no inference was run.
    """

    time_ns: float
    primitives_ns: float
    transforms_ns: float
    others_ns: float
    kernels: tuple[KernelReport, ...]
    measured_ns: float | None = field(default=None, metadata=OMITTED)
    difference: float | None = field(default=None, metadata=OMITTED)

    def text(self) -> str:
        """The times as one line."""
        by_part = zip((self.primitives_ns, self.transforms_ns, self.others_ns), PARTS, strict=True)
        parts = ", ".join(f"{part_ns / 1e6:.3f} ms {part}s" for part_ns, part in by_part)
        line = f"inference {self.time_ns / 1e6:.3f} ms by its {len(self.kernels)} kernels alone ({parts})"
        if self.measured_ns is not None and self.difference is not None:
            line += f", {self.measured_ns / 1e6:.3f} ms measured, {100 * self.difference:+.1f}%"
        return line


@dataclass(frozen=True, kw_only=True)
class NetworkTime:
    """Time of a whole network on a CPU: all kernels, one after the other.

    Attributes
    ----------
    kernels : tuple of KernelTime
        In the order of calls.
    measured_ns : float or None
        Median time of whole inferences; None if no inference was run.
    """

    kernels: tuple[KernelTime, ...]
    measured_ns: float | None = None

    @property
    def time_ns(self) -> float:
        """Sum over all kernels."""
        return sum(kernel.time_ns for kernel in self.kernels)

    def summary(self) -> NetworkTimeReport:
        """The report: sums by part, all kernels, and the measured time."""
        primitives_ns, transforms_ns, others_ns = (
            sum(kernel.time_ns for kernel in self.kernels if kernel.part == part) for part in PARTS
        )
        return NetworkTimeReport(
            time_ns=self.time_ns,
            primitives_ns=primitives_ns,
            transforms_ns=transforms_ns,
            others_ns=others_ns,
            kernels=tuple(report_from(KernelReport, kernel) for kernel in self.kernels),
            measured_ns=self.measured_ns,
            difference=None if self.measured_ns is None else self.time_ns / self.measured_ns - 1,
        )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Times of a device, measured or by a model.

    Attributes
    ----------
    code : str
        Digest of the sources of the measured code.
    times_ns : dict of (str, ConvGeometry) to float
        Times by primitive and layer; medians of calls.
    kernels_ns : dict of str to float
        Times of kernels of compiled networks, by `KernelTime.key`.
    failed : dict of (str, ConvGeometry) to str
        Primitives that could not be built, and why; not in the file.
    predicted_ns : dict of (str, ConvGeometry) to float
        Times that `primitive_selection.prediction` predicts for primitives without a time; not in the file.
    """

    device: Device
    code: str
    times_ns: dict[tuple[str, ConvGeometry], float] = field(default_factory=dict)
    moves_ns: dict[Move, float] = field(default_factory=dict)
    pools_ns: dict[tuple[Pooling, str], float] = field(default_factory=dict)
    kernels_ns: dict[str, float] = field(default_factory=dict)
    failed: dict[tuple[str, ConvGeometry], str] = field(default_factory=dict)
    predicted_ns: dict[tuple[str, ConvGeometry], float] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """The contents of the file, in an order that does not depend on the order of measurements."""
        layers: dict[ConvGeometry, dict[str, float]] = {}
        for (name, layer), ns in sorted(
            self.times_ns.items(), key=lambda item: repr(item[0][1]) + item[0][0]
        ):
            layers.setdefault(layer, {})[name] = round(ns)
        return {
            "version": VERSION,
            "device": dataclasses.asdict(self.device),
            "code": self.code,
            "layers": [
                {"layer": _without_defaults(layer), "times_ns": times} for layer, times in layers.items()
            ],
            "transforms": [
                [list(shape), source, target, round(ns)]
                for (shape, source, target), ns in sorted(self.moves_ns.items())
            ],
            "pools": [
                [pool.operator, _without_defaults(pool.window), layout, round(ns)]
                for (pool, layout), ns in sorted(self.pools_ns.items(), key=lambda item: repr(item[0]))
            ],
            "kernels": [[key, round(ns)] for key, ns in sorted(self.kernels_ns.items())],
        }

    def write(self, path: str | os.PathLike) -> None:
        """Write the file; raises `OutputError` if it cannot be written."""
        plain = self.to_plain()
        lists = [
            f'"{key}": [\n' + ",\n".join(json.dumps(row) for row in plain.pop(key)) + "\n]" for key in ROWS
        ]
        text = ",\n".join([json.dumps(plain)[:-1], *lists]) + "}\n"
        replace_file(path, text.encode())

    @classmethod
    def read(cls, path: str | os.PathLike) -> Profile:
        """Read a file; raises `ProfileError`, which names file and field, if it is no valid profile."""
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
                    shape, source, target, ns = row
                    moves[tuple(shape), source, target] = duration(ns)
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
        return cls(
            device=device,
            code=code,
            times_ns={key: ns for key, ns in times.items() if key[0] in PRIMITIVES},
            moves_ns=moves,
            pools_ns=pools,
            kernels_ns=kernels,
        )

    def require_device(self, device: Device | None, device_name: str | None) -> None:
        """Raise `ProfileError` if this profile is of another device than `device_name`, or than `device`.

        Without a name, `device` is the expected one.
        """
        expected = device_name or (device.name if device else "")
        if self.device.name != expected:
            raise ProfileError(
                f"the profile was measured on '{self.device.name}', not on '{expected}': measure here, or "
                f"name the machine that it is for with --device '{self.device.name}'"
            )


def duration(ns: float) -> float:
    """`ns` as a float; raises `ValueError` if it is no valid time."""
    if type(ns) not in (int, float) or not 0 <= ns <= sys.float_info.max:
        raise ValueError(f"a time of {ns!r:.40} ns")
    return float(ns)


def _without_defaults(layer: ConvGeometry) -> dict[str, Any]:
    """The fields of `layer` that differ from their defaults."""
    defaults = {f.name: f.default for f in dataclasses.fields(ConvGeometry)}
    return {name: value for name, value in dataclasses.asdict(layer).items() if value != defaults[name]}


def applicable_primitives(layer: ConvGeometry, target: str = "cpu") -> list[Primitive]:
    """Primitives of `target` that compute `layer`."""
    return [p for p in PRIMITIVES.values() if p.target == target and p.applies(layer)]


def macs(primitive: Primitive, layer: ConvGeometry) -> float:
    """Multiply-accumulates of the sums that `primitive` computes."""
    uses = layer.pixels
    if primitive.family in ("winograd", "fft"):
        rows, columns = tile_counts(primitive, layer)
        uses = layer.n * (layer.oh if primitive.directions == 1 else rows) * columns
    if primitive.family == "fft":
        uses *= 2  # a complex product is four real ones, of two real numbers that are stored
    if primitive.family == "shifted" and not primitive.accumulating:
        uses = layer.n * layer.h * layer.w
    return uses * math.prod(primitive.filter_shape(layer))


def bound_ns(primitive: Primitive, layer: ConvGeometry) -> float:
    """A rough lower bound of the time, from arithmetic and bytes; workspaces count twice."""
    rate = SCALAR_MACS_PER_NS
    if primitive.places:
        rate = MACS_PER_NS * min(1.0, primitive.extents(layer).places / FEW_PLACES)
    output_bytes = FP32_BYTES * layer.pixels * layer.oc
    moved_bytes = input_bytes(layer) + output_bytes + primitive.filter_bytes(layer)
    moved_bytes += 2 * primitive.workspace_bytes(layer)
    return macs(primitive, layer) / rate + moved_bytes / BYTES_PER_NS


def measuring_order(layer: ConvGeometry, target: str = "cpu") -> list[Primitive]:
    """Primitives of `target` for `layer`, in the order in which to measure them.

    First comes the one with the smallest bound of each kind (family, layout, tile), then the second of each,
    and so on.
    """
    kinds: dict[tuple, list[Primitive]] = {}
    for primitive in sorted(applicable_primitives(layer, target), key=lambda p: bound_ns(p, layer)):
        kind = (primitive.family, primitive.layout, primitive.tile, primitive.directions)
        kinds.setdefault(kind, []).append(primitive)
    ranked = [
        (rank, bound_ns(p, layer), p) for primitives in kinds.values() for rank, p in enumerate(primitives)
    ]
    return [p for _, _, p in sorted(ranked, key=lambda entry: entry[:2])]


def is_free(move: Move) -> bool:
    """Whether the bytes of a tensor have the same order in both layouts."""
    (_, height, width, channels), source, target = move
    blocks = {layout: channels if layout == "HWC" else 1 for layout in ("HWC", "CHW")} | {"CHWc16": 16}
    return source == target or height * width == 1 or blocks[source] == blocks[target]


def count_unmeasured(profile: Profile, layers: Iterable[ConvGeometry]) -> int:
    """How many of the primitives that apply to `layers` have no time."""
    keys = ((p.name, layer) for layer in layers for p in applicable_primitives(layer, profile.device.target))
    return sum(key not in profile.times_ns for key in keys)
