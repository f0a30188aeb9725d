"""A system: a GPU, a PIM device in some of its memory channels, and the conventions of its cost model."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from pimflow.core.kernel import NETWORK_DTYPES
from pimflow.core.keywords import check_keywords
from pimflow.core.options import OptionSet, declarations, option
from pimflow.errors import SpecError, UnknownNameError, UsageError
from pimflow.hardware.gpu import GpuSpec
from pimflow.hardware.pim import PimSpec
from pimflow.hardware.reader import build, read_toml, require_not_negative, require_positive
from pimflow.hardware.spec_text import fields_text, html_table

ACCOUNTINGS = ("full", "paper")
# Costs that ``full`` charges and ``paper`` does not; ``paper+crossbar+…`` charges the costs that it names.
CHARGES = ("pim-launch", "crossbar", "epilogue", "layout", "channel-modes")
TIMINGS = ("strict", "ramulator-pimflow")
# Parts of tensors are views where the memory layout allows it, or always copies.
COPIES = ("elided", "made")
# Padding of the GPU's convolutions: any padding at each end of an axis, or equal padding at both ends.
PADDINGS = ("asymmetric", "symmetric")
# Loop orders that the PIM compiler may choose from, with the names of the paper. ``newton+``: whole tiles and
# one buffer, which is filled before it is used. ``newton++``: all buffers, which are written while others are
# used, and tiles that are split if channels would be idle. ``pimflow``: all loop orders of
# `pim_backend.programs.schedule`.
SCHEDULINGS = ("newton+", "newton++", "pimflow")
# Splits of a layer that are candidates: the best ones (``exact``), or the paper's tenths of the rows.
SPLITS = ("exact", "grid")

# A launch begins when its inputs are there and its device is free, or already during the task before it.
LAUNCHES = ("in-turn", "ahead")

# Weights of the GPU lie in its memory, or in the host's, from where each is copied into the pool when needed.
WEIGHTS = ("resident", "streamed")

# Use of the channels that have PIM: by the GPU too while no PIM program runs, or only by PIM.
SHARINGS = ("time-shared", "partitioned")

Device = TypeVar("Device", GpuSpec, PimSpec)


@check_keywords
@dataclass(frozen=True, kw_only=True)
class System(OptionSet, group="system"):
    """A GPU, a PIM device, their memory channels, and the conventions of the cost model.

    Attributes
    ----------
    pim_channels : int
        Memory channels of the GPU that have PIM; the others serve the GPU in a mixed plan. A plan without PIM
        uses all channels for the GPU. All channels may have PIM if they are time-shared.
    pim_launch_ns : float
        Time of one PIM submission.
    crossbar_bytes_per_ns : float
        Bandwidth between the memory channels and everything else, shared by all traffic. A transfer
        reaches the global buffers of one channel.
    copies : str
        ``elided``: slices and concatenations of split results are no kernels where the memory layout allows
        it; ``made``: they always are.
    padding : str
        One of `PADDINGS`; with ``symmetric``, the GPU's part of a split reads rows of zeros around its input.
    channel_mode_switch_ns : float
        Time of a switch of the channels that have PIM between plain-memory mode and PIM mode.
    host_link_bytes_per_ns : float
        Bandwidth from the host's memory to the GPU's, for streamed weights; 0 if it is not known.
    """

    name: str
    description: str
    gpu: GpuSpec = option(syntax="--gpu NAME|FILE", help="GPU (default: the system's)")
    pim: PimSpec = option(syntax="--pim NAME|FILE", help="PIM device (default: the system's)")
    pim_channels: int = option(syntax="--pim-channels N", help="memory channels that have PIM")
    dtype: str = option("fp16", "--dtype TYPE", f"storage type: {', '.join(NETWORK_DTYPES)}")
    pim_launch_ns: float
    crossbar_bytes_per_ns: float
    accounting: str = option(
        "full",
        "--accounting HOW",
        f"what is charged: {', '.join(ACCOUNTINGS)}, or paper+… with some of {', '.join(CHARGES)}",
        is_convention=True,
    )
    timing: str = option(
        "strict", "--timing RULES", "PIM's timing: {choices}", choices=TIMINGS, is_convention=True
    )
    scheduling: str = option(
        SCHEDULINGS[-1], "--scheduling LEVEL", "loop orders of PIM: {choices}", choices=SCHEDULINGS
    )
    copies: str = option(
        COPIES[0],
        "--copies HOW",
        f"copies of parts of tensors are {' or '.join(COPIES)}",
        choices=COPIES,
        is_convention=True,
    )
    padding: str = option(
        PADDINGS[0],
        "--padding HOW",
        "padding of GPU convolutions: {choices}",
        choices=PADDINGS,
        is_convention=True,
    )
    splits: str = option(
        SPLITS[0],
        "--splits HOW",
        "splits of layers, at the best place or at tenths of their rows: {choices}",
        choices=SPLITS,
    )
    # Not in `repr`, so that cached results of systems without them stay valid: `identity` has them.
    channel_sharing: str = option(
        SHARINGS[0],
        "--channel-sharing HOW",
        "who uses the channels that have PIM: GPU kernels too while no PIM program runs, or PIM alone: "
        "{choices}",
        repr=False,
        choices=SHARINGS,
    )
    channel_mode_switch_ns: float = field(default=0.0, repr=False)
    launches: str = option(
        LAUNCHES[0],
        "--launches HOW",
        "a launch begins when its task could, or is issued while the task before it runs, on the GPU "
        "alone too: {choices}",
        repr=False,
        choices=LAUNCHES,
        is_convention=True,
    )
    weights: str = option(
        WEIGHTS[0],
        "--weights HOW",
        "weights of the GPU lie in its memory, or in the host's, from where each is copied into the pool for "
        "the kernels that read it: {choices}",
        repr=False,
        choices=WEIGHTS,
    )
    copy_ahead: int = option(
        0,
        "--copy-ahead KERNELS",
        "with streamed weights, begin each copy so many kernels before its weight is used: more memory, less "
        "waiting",
        repr=False,
    )
    host_link_bytes_per_ns: float = field(default=0.0, repr=False)
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_positive(crossbar_bytes_per_ns=self.crossbar_bytes_per_ns)
        require_not_negative(
            pim_launch_ns=self.pim_launch_ns,
            channel_mode_switch_ns=self.channel_mode_switch_ns,
            copy_ahead=self.copy_ahead,
            host_link_bytes_per_ns=self.host_link_bytes_per_ns,
        )
        if self.copy_ahead and not self.streams_weights:
            raise ValueError(f"copy_ahead {self.copy_ahead} is for streamed weights: set weights to streamed")
        if self.streams_weights and not self.host_link_bytes_per_ns:
            raise ValueError("streamed weights need host_link_bytes_per_ns, the bandwidth of the host's link")
        channel_count = self.gpu.memory_channels
        if self.pim_channels == channel_count and not self.is_time_shared:
            raise ValueError(
                f"pim_channels {channel_count} leaves the GPU no channel of its {channel_count}; use "
                f"0..{channel_count - 1}, or "
                "channel_sharing time-shared"
            )
        if not 0 <= self.pim_channels <= channel_count:
            raise ValueError(
                f"pim_channels {self.pim_channels} is none of the GPU's 0..{channel_count} channels"
            )
        if self.dtype not in self.pim.dtypes:
            raise ValueError(
                f"dtype '{self.dtype}' is none of {', '.join(self.pim.dtypes)} of {self.pim.name}"
            )
        for name, declaration in declarations(System).items():
            value = getattr(self, name)
            if declaration.choices and value not in declaration.choices:
                raise ValueError(f"{name} '{value}' is none of {', '.join(declaration.choices)}")
        first, *extra_charges = self.accounting.split("+")
        if first not in ACCOUNTINGS or (
            extra_charges and (first == "full" or not set(extra_charges) <= set(CHARGES))
        ):
            raise ValueError(
                f"accounting '{self.accounting}' is none of {', '.join(ACCOUNTINGS)} and "
                f"paper+… with some of {', '.join(CHARGES)}"
            )

    def require_network_dtype(self) -> None:
        """Raise `UsageError` if networks cannot be compiled in the storage type."""
        if self.dtype not in NETWORK_DTYPES:
            dtypes = [dtype for dtype in self.pim.dtypes if dtype in NETWORK_DTYPES]
            use = f"use {' or '.join(dtypes)}" if dtypes else f"{self.pim.name} takes neither"
            raise UsageError(
                f"networks are compiled in {' or '.join(NETWORK_DTYPES)}, not {self.dtype}; {use}"
            )

    @property
    def gpu_channels(self) -> int:
        """Memory channels without PIM, which serve the GPU at any time of a mixed plan."""
        return self.gpu.memory_channels - self.pim_channels

    @property
    def pim_bytes(self) -> int:
        """Capacity of all channels that have PIM."""
        return self.pim.bytes_per_channel * self.pim_channels

    @property
    def is_time_shared(self) -> bool:
        """Whether the GPU's kernels may use the channels that have PIM."""
        return self.channel_sharing == SHARINGS[0]

    @property
    def overlaps_launches(self) -> bool:
        """Whether launches are issued while the task before them runs."""
        return self.launches == LAUNCHES[1]

    @property
    def streams_weights(self) -> bool:
        """Whether weights of the GPU are copied from the host's memory while a network runs."""
        return self.weights == WEIGHTS[1]

    @functools.cached_property
    def identity(self) -> str:
        """The system as a text without sources: the key of cached results."""
        sharing = f" {self.channel_sharing} {self.channel_mode_switch_ns!r}" if self.is_time_shared else ""
        launches = f" launches {self.launches}" if self.overlaps_launches else ""
        weights = f" weights streamed {self.copy_ahead}" if self.streams_weights else ""
        fields = fields_text(dataclasses.replace(self, sources={}))
        return f"{fields}{sharing}{launches}{weights}{self.pim.narrow_text}"

    def without_sources(self) -> System:
        """A copy without the sources of its numbers, which no result depends on."""
        gpu, pim = dataclasses.replace(self.gpu, sources={}), dataclasses.replace(self.pim, sources={})
        return dataclasses.replace(self, sources={}, gpu=gpu, pim=pim)

    def __repr__(self) -> str:
        """One line: the devices, and how channels are shared; `identity` has all fields."""
        pim = f"{self.pim_channels} of {self.gpu.memory_channels} channels with {self.pim.name}"
        how = f"{self.channel_sharing}, {self.dtype}, accounting {self.accounting}, timing {self.timing}"
        return f"System({self.name}: {self.gpu.name}, {pim}, {how})"

    def _repr_html_(self) -> str:
        """What a notebook shows: each field in a row."""
        return html_table(self)

    @property
    def available_charges(self) -> tuple[str, ...]:
        """Those of `CHARGES` that can occur: channels that are not time-shared do not switch modes."""
        return (
            CHARGES
            if self.is_time_shared
            else tuple(charge for charge in CHARGES if charge != "channel-modes")
        )

    def charges(self, charge: str) -> bool:
        """Whether one of `CHARGES` is charged."""
        return self.accounting == "full" or charge in self.accounting.split("+")

    @property
    def uses_views(self) -> bool:
        """Whether parts of tensors may be views of them."""
        return self.copies == COPIES[0]

    @property
    def has_symmetric_padding(self) -> bool:
        """Whether the GPU's convolutions need equal padding at both ends of an axis."""
        return self.padding == PADDINGS[1]

    @property
    def hides_gwrites(self) -> bool:
        """Whether ``ramulator-pimflow`` hides the latency of a GWRITE; not with only one buffer."""
        return self.scheduling != "newton+"

    def with_launches(self, *, gpu_ns: float, pim_ns: float) -> System:
        """The same system with other launch times."""
        gpu = dataclasses.replace(self.gpu, launch_ns=gpu_ns)
        return dataclasses.replace(self, gpu=gpu, pim_launch_ns=pim_ns)

    def assumptions(self) -> list[str]:
        """All values without a public source, as ``where: field = value (source)``."""
        rows = []
        for where, spec in (
            ("system", self),
            (f"gpu {self.gpu.name}", self.gpu),
            (f"pim {self.pim.name}", self.pim),
        ):
            for key, source in spec.sources.items():
                is_used = {
                    "channel_mode_switch_ns": self.is_time_shared,
                    "host_link_bytes_per_ns": self.streams_weights,
                }.get(key, True)
                if "assumed" in source and is_used:
                    value: object = spec
                    for part in key.split("."):
                        value = value[part] if isinstance(value, dict) else getattr(value, part)
                    rows.append(f"{where}: {key} = {value} ({source})")
        rows += [
            f"pim {self.pim.name}: {o.multiplications} products of {o.weights} a COMP ({o.source})"
            for o in self.pim.operands
            if "assumed" in o.source
        ]
        return rows


def system(name_or_path: str | os.PathLike[str] = "pimflow", **changes: object) -> System:
    """The system of a name or TOML file, with changes of any fields.

    Parameters
    ----------
    name_or_path : str or path
        Name of an embedded system, or a TOML file.
    **changes
        Fields of `System`; ``gpu`` and ``pim`` may be names, files or specs. None keeps the value.

    Raises
    ------
    UnknownNameError, SpecError, UsageError
        For unknown devices, malformed files, and inconsistent values.
    """
    stem, table = read_toml("system", name_or_path)
    table = dict(table)
    changes = {key: value for key, value in changes.items() if value is not None}
    changed = bool(changes)
    unknown = set(changes) - {f.name for f in dataclasses.fields(System)}
    if unknown:
        raise UnknownNameError("system field", min(unknown), [f.name for f in dataclasses.fields(System)])
    where = f"system '{stem}'"
    devices = {
        "gpu": _device(GpuSpec, "gpu", table, changes, where),
        "pim": _device(PimSpec, "pim", table, changes, where),
    }
    table |= {key: list(value) if isinstance(value, tuple) else value for key, value in changes.items()}
    for key in devices:
        table.pop(key, None)
    try:
        return build(System, table, where, name=stem, **devices)
    except SpecError as error:
        if changed:
            raise UsageError(str(error)) from error
        raise


def _device(
    kind: type[Device], field: str, table: Mapping[str, object], changes: Mapping[str, object], where: str
) -> Device:
    """The device of a system: that of `changes` for `field`, else that of the file's `table`."""
    device = changes.get(field, table.get(field))
    if device is None:
        raise SpecError(f"{where}: missing field '{field}'")
    if isinstance(device, kind):
        return device
    if not isinstance(device, str | os.PathLike):
        raise SpecError(f"{where}: field '{field}': {device!r} is no name or file")
    try:
        return kind.load(device)
    except UnknownNameError as error:
        if field in changes:
            raise
        raise SpecError(f"{where}: {error}") from error
