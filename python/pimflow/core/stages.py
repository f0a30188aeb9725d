"""Pipelines: a chain of regions that is computed in stages of rows, and the rows of each stage."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pimflow.core.ranges import RangeMap
from pimflow.core.rewrite import Mode


def stage_name(name: str, stage: int) -> str:
    """Name of the part of region or variable `name` that a stage computes."""
    return f"{name}__stage{stage}"


def part_name(name: str, part: str) -> str:
    """Name of one `part` of the attention `name` (a region or variable) that PIM computes."""
    return f"{name}__{part}"


def whole_name(name: str, names: Container[str]) -> str:
    """The region or variable that `name` names, or of which it names a stage or part.

    A name in `names` is returned unchanged, since a layer's own name may end like that of a part.
    """
    if name in names:
        return name
    return re.sub(r"__(stage\d+|(scores|values|new_keys|new_values)\d*(_g\d+)?)$", "", name)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A chain of regions in stages; each region reads the one before.

    Attributes
    ----------
    modes : tuple of Mode
        By region: ``GPU`` or ``PIM``.
    cuts : tuple of int
        Output rows of the last region at which a stage ends and the next begins, ascending.
    """

    regions: tuple[str, ...]
    modes: tuple[Mode, ...]
    cuts: tuple[int, ...]

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """(Index of region, index of stage) in issue order.

        A region on another device than the one before is one stage later, so that both devices work at the
        same time.
        """
        return _steps(self.modes, len(self.cuts) + 1)


@functools.cache
def _steps(modes: tuple[Mode, ...], stages: int) -> tuple[tuple[int, int], ...]:
    positions = range(len(modes))
    changes = [a != b for a, b in itertools.pairwise(modes)]
    delays = [sum(changes[:i]) for i in positions]
    return tuple(
        sorted(((i, s) for i in positions for s in range(stages)), key=lambda step: delays[step[0]] + step[1])
    )


StageRows: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]


def stage_rows(maps: Sequence[RangeMap], cuts: Sequence[int]) -> StageRows:
    """Output rows ``[begin, end)`` that every stage computes, by region and stage.

    A stage computes those rows of a region that it needs and that no earlier stage has computed, so that no
    row is computed twice.

    Parameters
    ----------
    maps : sequence of RangeMap
        Output rows to input rows of every region, in order.

    Raises
    ------
    ValueError
        If the stages cannot be computed one after the other.
    """
    return _stage_rows(tuple(maps), tuple(cuts))


# Cached: other modes and other searches need the same layers.
@functools.lru_cache(maxsize=1 << 14)
def _stage_rows(maps: tuple[RangeMap, ...], cuts: tuple[int, ...]) -> StageRows:
    for producer, consumer in itertools.pairwise(maps):
        if producer.output_extent != consumer.extent:
            raise ValueError(f"{producer.output_extent} rows are computed, {consumer.extent} are read")
    ends = [*cuts, maps[-1].output_extent]
    if len(ends) < 2 or any(a >= b for a, b in zip([0, *ends], ends)):
        raise ValueError(f"stages end at ascending rows of 1 to {ends[-1] - 1}, not at {list(cuts)}")
    by_region: list[tuple[tuple[int, int], ...]] = []
    for position in reversed(range(len(maps))):
        rows = tuple(zip([0, *ends], ends))
        empty = next((stage for stage, (begin, end) in enumerate(rows) if begin >= end), None)
        if empty is not None:
            raise ValueError(f"stage {empty} computes no rows of region {position}")
        for begin, end in rows:
            if not len(maps[position].inputs(begin, end)):
                raise ValueError(f"output rows {begin}..{end - 1} of region {position} read only padding")
        by_region.insert(0, rows)
        ends = [maps[position].inputs(0, end).end for end in ends]
    if ends[0] == maps[0].extent:
        raise ValueError("the first stage reads all rows")
    return tuple(by_region)
