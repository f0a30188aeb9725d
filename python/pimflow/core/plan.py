"""Plans: which candidate computes each region, as a file that people read, compare and edit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pimflow.core.region import Region
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import (
    MODES,
    OPERATOR_KERNELS,
    TILES,
    AttentionRewrite,
    FusedGroupRewrite,
    GpuRewrite,
    Mode,
    PimRewrite,
    PipelineRewrite,
    Rewrite,
    SplitRewrite,
    SubstitutionRewrite,
)
from pimflow.core.split import AXES
from pimflow.core.table_files import parse_json, read_text
from pimflow.core.tensor_placement import GPU_CHANNELS_ALONE, ChannelUse
from pimflow.errors import PlanError, UnknownNameError, hint

FORMAT = "pimflow-plan/1"
# Changes to a network before a search with a goal about memory: fields of `NetworkOptions`.
NETWORK_OPTIONS = ("optimize_skips", "fuse_activations", "reorder")
# Fields of a choice in a file, in their order: defaults of those that may be missing, and types.
_CHOICE_FIELDS: dict[str, Any] = {
    "region": None,
    "mode": None,
    "gpu_share": None,
    "schedule": "",
    "axis": "rows",
    "latency_ns": 0.0,
    "reason": "",
    "covers": (),
    "stages": (),
    "modes": (),
    "schedules": (),
    "primitive": "",
    "finishes": (),
    "joins": False,
    "channels": "",
}
# What each field of a file says, which the file repeats for people who edit it: those of the plan, and of its
# choices.
PLAN_MEANINGS = {
    "format": "version of this form",
    "model": "digest of the regions that the plan is for; it applies to no other network",
    "system": "digest of the system that it was made for; it may be applied to another",
    "gpu_channels": "memory channels of the GPU while PIM works; all of them in a plan without PIM",
    "choices": "how each region is done, in execution order; together they cover every region once",
    "latency_ns": "predicted latency of the network, in ns; not read back",
    "lower_bound_ns": "no plan of the same candidates is faster, in ns; 0 if it was not searched",
    "ranks": "by decomposed layer, its ranks",
    "options": "options with which a goal about memory changed the network",
}
CHOICE_MEANINGS = {
    "region": "the layer, or the first of 'covers'",
    "mode": "GPU, PIM, SPLIT (both, at the same time) or PIPELINE (a chain of layers in stages)",
    "gpu_share": "the GPU's share: 1 for GPU, 0 for PIM, between them for SPLIT, null for PIPELINE",
    "schedule": "loop order on PIM, tiling of a fused kernel, or name of a substitution; empty: the fastest",
    "axis": "what a SPLIT cuts: rows, channels, reduction or batch",
    "latency_ns": "by how much it prolongs the network, in ns: these add up to its latency; not read back",
    "reason": "why it stays on the GPU; not read back",
    "covers": "all regions that it does together",
    "stages": "output rows of the last region at which stages of a PIPELINE end",
    "modes": "by region of a PIPELINE, GPU or PIM",
    "schedules": "by region of a PIPELINE, the loop order; empty for GPU, and for the fastest",
    "primitive": "the convolution primitive that the GPU runs in place of the operator",
    "finishes": "operators of the epilogue that PIM does",
    "joins": "whether the product on PIM adds the residual itself",
    "channels": "on a time-shared system, memory channels of what it reads and of its result, if not the "
    "GPU's; what depends on another layer's changes with it, so change layers by --pin",
}
_LISTS = {"covers": str, "stages": int, "modes": str, "schedules": str, "finishes": str}
_OMITTED_FIELDS = (*_LISTS, "primitive", "channels", "joins")  # if they are empty
# By field of a `Rewrite`, its name in a file, if that is another.
_FILE_NAMES = {
    "tiling": "schedule",
    "substitution": "schedule",
    "cuts": "stages",
    "device_epilogue": "finishes",
    "accumulates_residual": "joins",
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How one region, or several regions together, are computed.

    Attributes
    ----------
    rewrite : Rewrite
        The kind of candidate, with what an edited plan says of it.
    channels : ChannelUse
        In a plan that has anything on PIM.
    latency_ns : float
        Predicted latency, including the transition from its inputs.
    reason : str
        Why the region is on the GPU, if it is.
    """

    regions: tuple[str, ...]
    rewrite: Rewrite = OPERATOR_KERNELS
    channels: ChannelUse = GPU_CHANNELS_ALONE
    latency_ns: float = 0.0
    reason: str = ""

    @property
    def region(self) -> str:
        """The first region, under which the choice is listed."""
        return self.regions[0]

    @property
    def mode(self) -> Mode:
        """The devices that compute it."""
        return self.rewrite.mode

    @property
    def uses_pim(self) -> bool:
        """Whether PIM computes any part of it."""
        return self.mode is not Mode.GPU

    @property
    def primitive(self) -> str:
        """The convolution primitive that computes it; empty if none does."""
        return self.rewrite.primitive if isinstance(self.rewrite, GpuRewrite) else ""

    def to_table(self) -> dict[str, object]:
        """The entry of a plan file; empty optional fields are omitted."""
        table = _CHOICE_FIELDS | {
            "region": self.region,
            "mode": self.mode.value,
            "gpu_share": self.rewrite.gpu_share,
            "latency_ns": self.latency_ns,
            "reason": self.reason,
            "covers": self.regions if len(self.regions) > 1 else (),
            "channels": str(self.channels),
        }
        for attribute in fields(self.rewrite):
            value = getattr(self.rewrite, attribute.name)
            table[_FILE_NAMES.get(attribute.name, attribute.name)] = (
                tuple(map(str, value)) if attribute.name == "modes" else value
            )
        return {name: value for name, value in table.items() if name not in _OMITTED_FIELDS or value}

    @classmethod
    def from_table(cls, table: object, index: int = 0, where: str = "<table>") -> Choice:
        """The inverse of `to_table`; raises `PlanError` for choice `index` of the file `where`."""
        if not isinstance(table, dict) or not isinstance(table.get("region"), str):
            raise PlanError(f"{where}: choice {index} has no 'region'")
        place = f"{where}: region '{table['region']}'"
        row = _choice_row(table, place)
        try:
            channels = ChannelUse.parse(row["channels"])
        except ValueError as error:
            raise PlanError(f"{place}: channels {row['channels']!r} is {error}") from None
        return cls(
            regions=row["covers"] or (row["region"],),
            rewrite=_parse_rewrite(row, place),
            channels=channels,
            latency_ns=row["latency_ns"],
            reason=row["reason"],
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An exact cover of a model's regions by candidates.

    Attributes
    ----------
    model, system : str
        Digests of the model and system that it was made for; a plan may be applied to another system, but not
        to another model.
    gpu_channels : int
        Memory channels that serve the GPU: all of them in a plan without PIM.
    choices : tuple of Choice
        In execution order; together they cover every region once.
    lower_bound_ns : float
        Lower bound on the latency of any plan over the same candidates.
    ranks : dict of str to str
        By decomposed layer, its chosen ranks; empty if there was no choice of ranks.
    options : tuple of str
        Those of `NETWORK_OPTIONS` with which the network was prepared because the goal of the search was
        about memory. To apply the plan, prepare the network with them too.
    """

    model: str
    system: str
    gpu_channels: int
    choices: tuple[Choice, ...]
    latency_ns: float
    lower_bound_ns: float
    ranks: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    @property
    def uses_pim(self) -> bool:
        """Whether PIM computes any part of it."""
        return any(choice.uses_pim for choice in self.choices)

    def choice(self, region: str) -> Choice:
        """The choice for `region`; raises `UnknownNameError` if there is none."""
        for choice in self.choices:
            if region in choice.regions:
                return choice
        raise UnknownNameError("region", region, [name for c in self.choices for name in c.regions])

    def to_graph(
        self,
        graph: RegionGraph,
        can_compute: Callable[[str, Region], bool],
        views: bool = True,
        caches: bool = True,
    ) -> Plan:
        """The same choices for `graph`, the same network in another order or with other copies.

        On the GPU are regions that only `graph` has, pipelines without `views`, and fused regions that cannot
        be one kernel in `graph`. A region whose primitive cannot compute it there uses the operator's own
        kernel. If the graph differs, no kernel uses the channels that have PIM, because other regions may
        read its result.

        Parameters
        ----------
        can_compute : callable
            Whether the convolution primitive of a name can compute a region.
        views : bool
            Whether parts of tensors may be views, which pipelines need.
        caches : bool
            Whether PIM can write to caches there; if not, attention over caches is on the GPU.
        """
        plan = self if graph.digest == self.model else self.with_gpu_channels()
        valid_choices = [choice for choice in plan.choices if _is_transferable(choice, graph, views, caches)]
        choice_by_region = {choice.region: choice for choice in valid_choices}
        later_regions = {name for choice in valid_choices for name in choice.regions[1:]}
        choices = tuple(
            _with_supported_primitive(
                choice_by_region.get(region.name, Choice(regions=(region.name,))), region, can_compute
            )
            for region in graph.regions
            if region.name not in later_regions
        )
        return replace(self, model=graph.digest, choices=choices)

    def with_gpu_channels(self) -> Plan:
        """The same plan with all tensors in the GPU channels."""
        return replace(
            self, choices=tuple(replace(choice, channels=GPU_CHANNELS_ALONE) for choice in self.choices)
        )

    def to_table(self) -> dict[str, object]:
        """The table of a plan file."""
        meanings = {"plan": PLAN_MEANINGS, "choice": CHOICE_MEANINGS}
        choices = [choice.to_table() for choice in self.choices]
        table = {"format": FORMAT, "meanings": meanings, **self.__dict__, "choices": choices}
        if not self.ranks:
            del table["ranks"]
        if not self.options:
            del table["options"]
        return table

    def to_json(self) -> str:
        """The text of a plan file."""
        return json.dumps(self.to_table(), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "<text>") -> Plan:
        """Read a plan file.

        Raises
        ------
        PlanError
            With the line of a syntax error, or the wrong region and field.
        """
        table = parse_json(text, where, PlanError)
        if not isinstance(table, dict) or table.pop("format", None) != FORMAT:
            raise PlanError(f"{where}: not a {FORMAT} file")
        table.pop("meanings", None)
        rows = table.pop("choices", None)
        if not isinstance(rows, list):
            raise PlanError(f"{where}: field 'choices' is not a list")
        choices = tuple(Choice.from_table(row, index, where) for index, row in enumerate(rows))
        options = table.pop("options", [])
        if not isinstance(options, list) or not set(map(str, options)) <= set(NETWORK_OPTIONS):
            option_names = ", ".join(NETWORK_OPTIONS)
            raise PlanError(f"{where}: field 'options' {options!r} is not a list of some of {option_names}")
        table |= {"choices": choices, "options": tuple(options)}
        attributes = fields(cls)
        unset = [f.name for f in attributes if f.default is MISSING and f.default_factory is MISSING]
        _require_fields(table, [f.name for f in attributes], unset, where)
        _check_types(table, ("model", "system"), ("latency_ns", "lower_bound_ns"), where)
        plan = cls(**table)
        ranks = plan.ranks.items() if isinstance(plan.ranks, dict) else [(plan.ranks, None)]
        if not all(isinstance(text, str) for pair in ranks for text in pair):
            raise PlanError(f"{where}: field 'ranks' is no table of texts")
        if type(plan.gpu_channels) is not int or plan.gpu_channels < 1:
            raise PlanError(f"{where}: field 'gpu_channels' is not an integer above zero")
        return plan

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file; raises `PlanError`."""
        return cls.from_json(read_text(path, PlanError), str(path))


def _with_supported_primitive(
    choice: Choice, region: Region, can_compute: Callable[[str, Region], bool]
) -> Choice:
    is_unsupported = choice.primitive and not can_compute(choice.primitive, region)
    return replace(choice, rewrite=OPERATOR_KERNELS) if is_unsupported else choice


def _is_transferable(choice: Choice, graph: RegionGraph, views: bool, caches: bool) -> bool:
    if isinstance(choice.rewrite, PipelineRewrite):
        return views
    names = [region.name for region in graph.regions]
    covers = choice.regions
    if len(covers) == 1 or covers in graph.runs:
        return True
    are_adjacent = covers[0] in names and tuple(names[names.index(covers[0]) :][: len(covers)]) == covers
    is_attention = isinstance(choice.rewrite, AttentionRewrite)
    return are_adjacent and (caches if is_attention else set(covers) <= set(graph.fusible))


def _choice_row(table: dict[str, Any], place: str) -> dict[str, Any]:
    """All fields of a choice, with their types and ranges checked."""
    _require_fields(table, list(_CHOICE_FIELDS), ("mode", "gpu_share"), place)
    row = _CHOICE_FIELDS | table
    for name, kind in _LISTS.items():
        if not isinstance(row[name], list | tuple) or not all(type(item) is kind for item in row[name]):
            item_names = {"covers": "regions", "stages": "rows"}.get(name, "texts")
            raise PlanError(f"{place}: {name} {row[name]!r} is not a list of {item_names}")
        row[name] = tuple(row[name])
    covers, is_run = row["covers"], len(row["covers"]) > 1
    if covers and covers[0] != row["region"]:
        raise PlanError(f"{place}: covers begins with '{covers[0]}', not with the region itself")
    for name, names in (("mode", MODES), ("axis", AXES)):
        if row[name] not in names:
            raise PlanError(f"{place}: {name} {row[name]!r} is none of {', '.join(names)}")
    if not isinstance(row["joins"], bool):
        raise PlanError(f"{place}: joins {row['joins']!r} is neither true nor false")
    numbers = ["latency_ns", *(["gpu_share"] if row["gpu_share"] is not None or not is_run else [])]
    _check_types(row, ("schedule", "reason", "primitive", "channels"), numbers, place)
    if row["gpu_share"] is not None and not 0 <= row["gpu_share"] <= 1:
        raise PlanError(f"{place}: gpu_share {row['gpu_share']:g} is not in [0, 1]")
    return row


def _parse_rewrite(row: Mapping[str, Any], place: str) -> Rewrite:
    """The kind of candidate that the mode and the regions of a choice name, with its fields."""
    mode, schedule, share = Mode(row["mode"]), row["schedule"], row["gpu_share"]
    count = len(row["covers"]) or 1
    if row["primitive"] and (mode is not Mode.GPU or count > 1):
        raise PlanError(
            f"{place}: a primitive computes one region that is wholly on the GPU, not {mode} of {count} "
            "regions"
        )
    if mode is Mode.SPLIT:
        if row["finishes"]:
            raise PlanError(f"{place}: PIM finishes a layer that is wholly its own, not mode {mode}")
        if count > 1:
            raise PlanError(f"{place}: mode SPLIT splits one region, not {count}")
        return SplitRewrite(axis=row["axis"], gpu_share=share, schedule=schedule)
    if mode is Mode.PIPELINE and not set(row["modes"]) <= {Mode.GPU, Mode.PIM}:
        raise PlanError(f"{place}: modes {list(row['modes'])} of a PIPELINE are GPU or PIM")
    rewrite: Rewrite
    match mode, count > 1:
        case Mode.PIPELINE, _:
            modes = tuple(map(Mode, row["modes"]))
            rewrite = PipelineRewrite(cuts=row["stages"], modes=modes, schedules=row["schedules"])
        case Mode.PIM, True:
            rewrite = AttentionRewrite(schedule=schedule)
        case Mode.PIM, False:
            rewrite = PimRewrite(
                schedule=schedule, device_epilogue=row["finishes"], accumulates_residual=row["joins"]
            )
        case _, True if schedule and not schedule.startswith(TILES):
            rewrite = SubstitutionRewrite(substitution=schedule)
        case _, True:
            rewrite = FusedGroupRewrite(tiling=schedule)
        case _:
            rewrite = GpuRewrite(primitive=row["primitive"])
    if share != rewrite.gpu_share:
        expected, actual = ("null" if x is None else f"{x:g}" for x in (rewrite.gpu_share, share))
        raise PlanError(f"{place}: mode {mode} has gpu_share {expected}, not {actual}")
    return rewrite


def _require_fields(
    table: Mapping[str, object], names: Sequence[str], required: Sequence[str], place: str
) -> None:
    if unknown := [name for name in table if name not in names]:
        raise PlanError(f"{place}: unknown field '{unknown[0]}'; {hint(unknown[0], names)}")
    if missing := [name for name in required if name not in table]:
        raise PlanError(f"{place}: field '{missing[0]}' is missing")


def _check_types(table: Mapping[str, Any], texts: Sequence[str], numbers: Sequence[str], place: str) -> None:
    for name in texts:
        if not isinstance(table[name], str):
            raise PlanError(f"{place}: {name} {table[name]!r} is not a text")
    for name in numbers:
        value = table[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise PlanError(f"{place}: {name} {value!r} is not a number")
        try:
            float(value)
        except OverflowError:
            raise PlanError(f"{place}: {name} is a number of {len(str(value))} digits") from None
