"""Attention of one network over a cache in PIM: layouts of its caches, and all its programs."""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pimflow.core.attention import SCORES, VALUES, Attention
from pimflow.core.program import PimProgram
from pimflow.core.stages import part_name
from pimflow.errors import UnsupportedOpError
from pimflow.hardware import PimSpec
from pimflow.pim_backend.programs.attention import AttentionProduct
from pimflow.pim_backend.programs.cache_appends import append_keys, append_values
from pimflow.pim_backend.programs.cache_layout import KeyLayout, ValueLayout
from pimflow.pim_backend.programs.cache_schedule import CacheSchedule
from pimflow.pim_backend.programs.dynamic_product import DynamicProduct
from pimflow.pim_backend.programs.packed_cache import PackedCache


@dataclass(frozen=True, kw_only=True)
class CachedGroup:
    """A group of matrices (requests and KV heads) that are computed together.

    Attributes
    ----------
    keys, values : KeyLayout, ValueLayout
        Layouts of their caches, whatever number of places is read.
    scores, mix : Step
        Products of queries with keys, and of probabilities with values, over all places that are read.
    """

    attention: Attention
    keys: KeyLayout
    values: ValueLayout
    scores: AttentionProduct
    mix: AttentionProduct

    def attention_product(self, product: str) -> AttentionProduct:
        """The product of a kind: `SCORES` or `VALUES`."""
        return self.scores if product == SCORES else self.mix

    def dynamic_product(self, product: str, schedule: CacheSchedule) -> DynamicProduct:
        """A product (`SCORES` or `VALUES`) over a number of tokens that is known only when it runs."""
        if product == SCORES:
            return DynamicProduct.from_layout(self.keys, schedule.keys, self.attention.extent)
        return DynamicProduct.from_layout(self.values, schedule.values, self.attention.extent)

    def append_programs(self, position: int) -> tuple[PimProgram, PimProgram]:
        """The programs that write a key, and a value, of each matrix at a position."""
        return append_keys(self.keys, position), append_values(self.values, position)


@dataclass(frozen=True, kw_only=True)
class CachedAttention:
    """A region of attention over a cache, computed in PIM.

    Attributes
    ----------
    groups : tuple of CachedGroup
        One for each part of the schedule, in the order of their matrices.
    """

    region: str
    attention: Attention
    schedule: CacheSchedule
    groups: tuple[CachedGroup, ...]

    @classmethod
    def from_layouts(
        cls,
        region: str,
        attention: Attention,
        schedule: CacheSchedule,
        layouts: Sequence[tuple[KeyLayout, ValueLayout]],
    ) -> CachedAttention:
        """Attention by `schedule`, whose caches lie as `CacheSchedule.layouts` says.

        Raises
        ------
        UnsupportedOpError, InfeasibleError
            If the device cannot compute it, or has no room for it; see `CacheLayout.check_fit`.
        """
        if attention.queries != 1 or not attention.positioned:
            raise UnsupportedOpError(
                f"'{region}': PIM computes attention of one token at once, over a cache that stays in place"
            )
        group, groups = schedule.group(attention), []
        for keys, values in layouts:
            scores = schedule.keys.attention_product(keys, attention.extent)
            mix = schedule.values.attention_product(values, attention.extent)
            groups.append(CachedGroup(attention=group, keys=keys, values=values, scores=scores, mix=mix))
        return cls(region=region, attention=attention, schedule=schedule, groups=tuple(groups))

    @functools.cached_property
    def keys(self) -> PackedCache:
        """All keys."""
        return self._cache_from_groups(tuple(group.keys for group in self.groups))

    @functools.cached_property
    def values(self) -> PackedCache:
        """All values."""
        return self._cache_from_groups(tuple(group.values for group in self.groups))

    def _cache_from_groups(self, groups: tuple[KeyLayout, ...] | tuple[ValueLayout, ...]) -> PackedCache:
        return PackedCache(attention=self.attention.with_full_cache(), groups=groups)

    @property
    def terms(self) -> int:
        """Number of partial sums for each element of the product with values."""
        return len(self.groups[0].mix.result_indices)

    def with_tokens(self, tokens: int) -> CachedAttention:
        """The same attention with programs for exactly `tokens` tokens, as a step executes it."""
        attention = replace(self.attention, read=tokens % self.attention.keys)
        layouts = [(group.keys, group.values) for group in self.groups]
        return CachedAttention.from_layouts(self.region, attention, self.schedule, layouts)

    def product_part(self, product: str, group: int) -> str:
        """Name of a product of a group among the parts of the region."""
        return product + (f"_g{group + 1}" if len(self.groups) > 1 else "")

    def product_programs(self, product: str, group: int) -> dict[str, PimProgram]:
        """Programs of a product of a group, by part name, in order."""
        programs = enumerate(self.groups[group].attention_product(product).programs)
        numbered = ((f"{product}{number + 1 if number else ''}", program) for number, program in programs)
        return dict(self._name_part(part, group, program) for part, program in numbered)

    @functools.cached_property
    def programs(self) -> dict[str, PimProgram]:
        """Programs of a step that reads all places, by part name; see `with_tokens` for fewer."""
        return dict(self._programs())

    def _programs(self) -> Iterator[tuple[str, PimProgram]]:
        for number, group in enumerate(self.groups):
            new_keys, new_values = group.append_programs(self.attention.extent - 1)
            yield self._name_part("new_keys", number, new_keys)
            yield from self.product_programs(SCORES, number).items()
            yield self._name_part("new_values", number, new_values)
            yield from self.product_programs(VALUES, number).items()

    def append_part(self, kind: str, group: int) -> str:
        """Name of the program that appends ``keys`` or ``values`` of a group."""
        return part_name(self.region, self.product_part(f"new_{kind}", group))

    def _name_part(self, part: str, group: int, program: PimProgram) -> tuple[str, PimProgram]:
        name = part_name(self.region, self.product_part(part, group))
        return name, replace(program, region=name)

    def to_json(self) -> str:
        """JSON text that `from_json` reads."""
        first = self.groups[0].keys
        text = json.dumps(
            {
                "region": self.region,
                "schedule": str(self.schedule),
                "attention": self.attention.to_json(),
                "pim": first.pim.to_json(),
                "dtype": first.dtype,
                "channels": first.channels,
                "row_begin": first.row_begin,
            }
        )
        _LIVE_BY_TEXT[text] = self
        return text

    @classmethod
    def from_json(cls, text: str) -> CachedAttention:
        """The inverse of `to_json`: the same object with its programs, if it still exists, else a new one."""
        live = _LIVE_BY_TEXT.get(text)
        if live is not None:
            return live
        tree = json.loads(text)
        attention, schedule = Attention.from_json(tree["attention"]), CacheSchedule.parse(tree["schedule"])
        layouts = schedule.layouts(
            attention, PimSpec.from_json(tree["pim"]), tree["dtype"], tree["channels"], tree["row_begin"]
        )
        return cls.from_layouts(tree["region"], attention, schedule, layouts)


_LIVE_BY_TEXT: weakref.WeakValueDictionary[str, CachedAttention] = weakref.WeakValueDictionary()
