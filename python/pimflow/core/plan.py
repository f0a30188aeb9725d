"""Plans: which candidate computes each region, as a file that people read, compare and edit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path

from pimflow.core.region import Region, RegionGraph
from pimflow.core.split import AXES
from pimflow.core.table_files import parse_json, read_text
from pimflow.errors import PlanError, UnknownNameError, hint

MODES = ("GPU", "PIM", "SPLIT", "PIPELINE")
FORMAT = "pimflow-plan/1"
# Changes to a network before a search with a goal about memory: fields of `NetworkOptions`.
NETWORK_OPTIONS = ("optimize_skips", "fuse_activations", "reorder")
# Fields that are lists, with the type of their items; a choice for one region has only `finishes`.
_LISTS = {"covers": str, "stages": int, "modes": str, "schedules": str, "finishes": str}
_OPTIONAL = (*_LISTS, "primitive", "channels", "joins")
# Sets of channels that a tensor may lie in where the GPU may use the channels that have PIM: ``left``, those
# that serve the GPU while PIM works; ``all``; ``pim``, those with PIM. A kernel over all channels reads from
# one set and writes to one: ``left-all``. ``left-from12`` writes rows from 12 on over all channels, and the
# rows before to the GPU channels. A PIM input over all channels is ``staged``. The default is ``left``.
CHANNEL_SETS = ("left", "all", "pim")
STAGED = "staged"
# PIM's part of a result may be ``kept`` in the L2 until the next kernel is launched.
_CHANNEL_PAIR = f"({'|'.join(CHANNEL_SETS)})-({'|'.join(CHANNEL_SETS)}|from[0-9]+)"
CHANNELS_PATTERN = re.compile(
    rf"|({_CHANNEL_PAIR}, )?behind kept|{_CHANNEL_PAIR}|({STAGED}, )?result kept|{STAGED}"
)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How one region, or several regions together, are computed.

    Attributes
    ----------
    region : str
        The first one, if there are several.
    mode : str
        One of `MODES`.
    gpu_share : float or None
        The GPU's share of the axis of a split (its first part), by default of the output rows. None for
        pipelines, whose shares differ by region.
    schedule : str
        Loop order of the PIM program.
    axis : str
        Axis along which a region is split: one of `core.split.AXES`.
    latency_ns : float
        Predicted latency, including the transition from its inputs.
    reason : str
        Why the region is on the GPU, if it is.
    covers : tuple of str
        The regions, if there are several; empty for `region` only.
    stages : tuple of int
        For ``PIPELINE``, output rows of the last region at which a stage ends and the next begins.
    modes : tuple of str
        For ``PIPELINE``, ``GPU`` or ``PIM`` for each of `covers`.
    schedules : tuple of str
        For ``PIPELINE``, loop orders of `covers`; empty means the fastest.
    primitive : str
        For ``GPU``, the convolution primitive that computes the region; empty for the operator.
    finishes : tuple of str
        For ``PIM``, the device epilogue, which PIM does: the whole epilogue of the region, or nothing.
    joins : bool
        Whether the product itself does the addition in `finishes`, with the residual as additional channels
        of its vectors. If False, it does so only where the latches cannot.
    channels : str
        In a plan that has anything on PIM, one of `CHANNELS_PATTERN`.
    """

    region: str
    mode: str
    gpu_share: float | None
    schedule: str = ""
    axis: str = "rows"
    latency_ns: float = 0.0
    reason: str = ""
    covers: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()
    modes: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    primitive: str = ""
    finishes: tuple[str, ...] = ()
    joins: bool = False
    channels: str = ""

    @property
    def regions(self) -> tuple[str, ...]:
        """The regions that it covers."""
        return self.covers or (self.region,)

    def to_table(self) -> dict[str, object]:
        """The entry of a plan file; empty optional fields are omitted."""
        return {name: value for name, value in self.__dict__.items() if name not in _OPTIONAL or value}


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
    latency_ns : float
        Latency that the solver predicts.
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
                choice_by_region.get(region.name, Choice(region=region.name, mode="GPU", gpu_share=1.0)),
                region,
                can_compute,
            )
            for region in graph.regions
            if region.name not in later_regions
        )
        return replace(self, model=graph.digest, choices=choices)

    def with_gpu_channels(self) -> Plan:
        """The same plan with all tensors in the GPU channels."""
        return replace(self, choices=tuple(replace(choice, channels="") for choice in self.choices))

    def to_table(self) -> dict[str, object]:
        """The table of a plan file."""
        table = {"format": FORMAT, **self.__dict__, "choices": [c.to_table() for c in self.choices]}
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
        rows = table.pop("choices", None)
        if not isinstance(rows, list):
            raise PlanError(f"{where}: field 'choices' is not a list")
        choices = tuple(_parse_choice(row, index, where) for index, row in enumerate(rows))
        options = table.pop("options", [])
        if not isinstance(options, list) or not set(map(str, options)) <= set(NETWORK_OPTIONS):
            option_names = ", ".join(NETWORK_OPTIONS)
            raise PlanError(f"{where}: field 'options' {options!r} is not a list of some of {option_names}")
        table |= {"choices": choices, "options": tuple(options)}
        _require_fields(cls, table, where)
        plan = cls(**table)
        _check_types(plan, ("model", "system"), ("latency_ns", "lower_bound_ns"), where)
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
    return replace(choice, primitive="") if is_unsupported else choice


def _is_transferable(choice: Choice, graph: RegionGraph, views: bool, caches: bool) -> bool:
    if choice.mode == "PIPELINE":
        return views
    names = [region.name for region in graph.regions]
    covers = choice.regions
    if len(covers) == 1 or covers in graph.runs:
        return True
    are_adjacent = covers[0] in names and tuple(names[names.index(covers[0]) :][: len(covers)]) == covers
    return are_adjacent and (caches if choice.mode == "PIM" else set(covers) <= set(graph.fusible))


def _parse_choice(row: object, index: int, where: str) -> Choice:
    if not isinstance(row, dict) or not isinstance(row.get("region"), str):
        raise PlanError(f"{where}: choice {index} has no 'region'")
    place = f"{where}: region '{row['region']}'"
    lists = {}
    for name, kind in _LISTS.items():
        values = row.get(name, [])
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            item_names = {"covers": "regions", "stages": "rows"}.get(name, "texts")
            raise PlanError(f"{place}: {name} {values!r} is not a list of {item_names}")
        lists[name] = tuple(values)
    covers = lists["covers"]
    if covers and covers[0] != row["region"]:
        raise PlanError(f"{place}: covers begins with '{covers[0]}', not with the region itself")
    _require_fields(Choice, row := row | lists, place)
    choice = Choice(**row)
    if choice.mode not in MODES:
        raise PlanError(f"{place}: mode {choice.mode!r} is none of {', '.join(MODES)}")
    _check_types(choice, ("schedule", "axis", "reason", "primitive", "channels"), ("latency_ns",), place)
    if not (isinstance(choice.channels, str) and CHANNELS_PATTERN.fullmatch(choice.channels)):
        raise PlanError(
            f"{place}: channels {choice.channels!r} is neither '{STAGED}' nor a pair of "
            f"{', '.join(CHANNEL_SETS)} "
            "such as 'left-all'"
        )
    if not isinstance(choice.joins, bool):
        raise PlanError(f"{place}: joins {choice.joins!r} is neither true nor false")
    if choice.axis not in AXES:
        raise PlanError(f"{place}: axis {choice.axis!r} is none of {', '.join(AXES)}")
    if choice.gpu_share is None and len(choice.regions) > 1:
        return choice
    _check_types(choice, (), ("gpu_share",), place)
    if choice.gpu_share is not None and not 0 <= choice.gpu_share <= 1:
        raise PlanError(f"{place}: gpu_share {choice.gpu_share:g} is not in [0, 1]")
    return choice


def _require_fields(kind: type[Plan | Choice], table: dict[str, object], place: str) -> None:
    field_names = [attribute.name for attribute in fields(kind)]
    if unknown := [name for name in table if name not in field_names]:
        raise PlanError(f"{place}: unknown field '{unknown[0]}'; {hint(unknown[0], field_names)}")
    for attribute in fields(kind):
        if (
            attribute.name not in table
            and attribute.default is MISSING
            and attribute.default_factory is MISSING
        ):
            raise PlanError(f"{place}: field '{attribute.name}' is missing")


def _check_types(owner: Plan | Choice, texts: tuple[str, ...], numbers: tuple[str, ...], place: str) -> None:
    for name in texts:
        if not isinstance(getattr(owner, name), str):
            raise PlanError(f"{place}: {name} {getattr(owner, name)!r} is not a text")
    for name in numbers:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise PlanError(f"{place}: {name} {value!r} is not a number")
        try:
            float(value)
        except OverflowError:
            raise PlanError(f"{place}: {name} is a number of {len(str(value))} digits") from None
