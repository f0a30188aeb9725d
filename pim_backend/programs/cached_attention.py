"""Attention over a cache as PIM computes it in one network: where its caches lie, and all its programs."""

from __future__ import annotations

import functools
import json
import weakref
from dataclasses import dataclass, replace

import numpy as np

from pimflow.core.attention import SCORES, VALUES, Attention
from pimflow.core.program import PimProgram
from pimflow.core.stages import part_name
from pimflow.errors import UnsupportedOpError
from pimflow.hardware import PimSpec
from pimflow.pim_backend.programs.attention import Step, append_keys, append_values, mix, scores
from pimflow.pim_backend.programs.cache_layout import KeyLayout, ValueLayout
from pimflow.pim_backend.programs.cache_places import every_place
from pimflow.pim_backend.programs.cache_schedule import CacheSchedule


@dataclass(frozen=True, kw_only=True)
class CachedAttention:
    """One region of attention in PIM.

    Attributes
    ----------
    region : str
    schedule : CacheSchedule
    keys, values : KeyLayout, ValueLayout
        Where its caches lie.
    """

    region: str
    schedule: CacheSchedule
    keys: KeyLayout
    values: ValueLayout

    @classmethod
    def of(
        cls,
        attention: Attention,
        schedule: CacheSchedule,
        pim: PimSpec,
        dtype: str,
        *,
        channels: int,
        region: str,
        row_begin: int = 0,
    ) -> CachedAttention:
        """By `schedule`, the caches from `row_begin` on in the banks of so many channels.

        Raises
        ------
        UnsupportedOpError, InfeasibleError
            If the device cannot, or has no room; see `CacheLayout.fits`.
        """
        if schedule.parts != 1 or attention.queries != 1 or not attention.positioned:
            raise UnsupportedOpError(
                f"'{region}': PIM computes attention of one token at once, in one part, over a cache that "
                "stays where it is"
            )
        made = {"attention": attention, "pim": pim, "dtype": dtype, "channels": channels}
        of_keys, of_values = schedule.keys, schedule.values
        keys = KeyLayout(**made, spread=of_keys.spread, lanes=of_keys.lanes, row_begin=row_begin)
        behind = row_begin + keys.rows
        values = ValueLayout(**made, spread=of_values.spread, lanes=of_values.lanes, row_begin=behind)
        keys.fits()
        values.fits()
        return cls(region=region, schedule=schedule, keys=keys, values=values)

    def to_json(self) -> str:
        """What `from_json` reads."""
        text = json.dumps(
            {
                "region": self.region,
                "schedule": str(self.schedule),
                "attention": self.keys.attention.to_json(),
                "pim": self.keys.pim.to_json(),
                "dtype": self.keys.dtype,
                "channels": self.keys.channels,
                "row_begin": self.keys.row_begin,
            }
        )
        _PRINTED[text] = self
        return text

    @classmethod
    def from_json(cls, text: str) -> CachedAttention:
        """What `to_json` printed, with the programs that it has made already if it still lives."""
        printed = _PRINTED.get(text)
        if printed is not None:
            return printed
        tree = json.loads(text)
        return cls.of(
            Attention.from_json(tree["attention"]),
            CacheSchedule.parse(tree["schedule"]),
            PimSpec.from_json(tree["pim"]),
            tree["dtype"],
            channels=tree["channels"],
            region=tree["region"],
            row_begin=tree["row_begin"],
        )

    @functools.cached_property
    def scores(self) -> Step:
        """Queries times the keys of the whole context."""
        return scores(self.keys, self.keys.attention.keys, self.schedule.keys.order)

    @functools.cached_property
    def mix(self) -> Step:
        """Probabilities times the values of the whole context."""
        values = self.schedule.values
        return mix(self.values, self.values.attention.keys, values.order, values.accumulate)

    @functools.cached_property
    def places(self) -> tuple[PimProgram, PimProgram]:
        """What writes every place of the keys, and of the values; see `every_place`."""
        return every_place(self.keys), every_place(self.values)

    def step(self, product: str) -> Step:
        """`SCORES` or `VALUES`."""
        return self.scores if product == SCORES else self.mix

    def programs_of(self, product: str) -> dict[str, PimProgram]:
        """Programs of a product by the names of their parts, in order."""
        made = enumerate(self.step(product).programs)
        return dict(self._named(f"{product}{number + 1 if number else ''}", each) for number, each in made)

    @functools.cached_property
    def programs(self) -> dict[str, PimProgram]:
        """All programs of a step by the names of their parts, in order; its token is the context's last."""
        last = self.keys.attention.keys - 1
        return {
            **dict([self._named("new_keys", append_keys(self.keys, last))]),
            **self.programs_of(SCORES),
            **dict([self._named("new_values", append_values(self.values, last))]),
            **self.programs_of(VALUES),
        }

    def _named(self, part: str, program: PimProgram) -> tuple[str, PimProgram]:
        name = part_name(self.region, part)
        return name, replace(program, region=name)


_PRINTED: weakref.WeakValueDictionary[str, CachedAttention] = weakref.WeakValueDictionary()


def table(layout: KeyLayout | ValueLayout) -> np.ndarray:
    """Pages of a cache alone, int32 [channels, rows]."""
    return np.arange(layout.channels * layout.rows, dtype=np.int32).reshape(layout.channels, layout.rows)
