"""Export figures of a model on a PIM device in the file formats of other tools."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pimflow.commands.generate.language import open_language_model
from pimflow.commands.shared.search_arguments import as_system
from pimflow.core.attention import Attention
from pimflow.core.json_form import Json, json_form, report_from
from pimflow.errors import UsageError
from pimflow.hardware import System
from pimflow.pim_backend.programs.cache_schedule import KEYS, VALUES
from pimflow.placement import Costs, Profiling
from pimflow.placement.costs.attention_runs import CacheWork
from pimflow.simulators.exports.llmservingsim import AttentionLine
from pimflow.zoo.language.decoder import Decoder

LENGTHS = (128, 256, 512, 1024, 1536, 2048)
ATTENTION_COLUMNS = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us", "source")
BATCHES = (1, 2, 4, 8, 16)  # requests at once, of the table
SHARES = (1, 2, 4)  # devices that share the heads, of the table


@dataclass(frozen=True, kw_only=True)
class AttentionRow:
    """The time of a layer's attention in PIM for some requests at once.

    Attributes
    ----------
    batch, tokens : int
        Requests, and the tokens of each in the cache.
    source : str
        How the time was made.
    """

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    channels: int
    ns: float
    source: str


@dataclass(frozen=True, kw_only=True)
class ServingAttention:
    """Times of a layer's attention in PIM, for one request, as LLMServingSim takes them.

    Attributes
    ----------
    channels : int
        Channels for the request: all PIM channels, or one for each KV head if these are fewer.
    line : AttentionLine
        Times in ns on these channels.
    rows : tuple of AttentionRow
        Times over requests at once, tokens and heads, on all channels that they can use.
    """

    model: str
    pim: str
    dtype: str
    timing: str
    heads: int
    kv_heads: int
    head_size: int
    channels: int
    schedules: dict[str, str]
    line: AttentionLine
    rows: tuple[AttentionRow, ...]

    @property
    def entry(self) -> dict[str, float]:
        """The entry of the simulator's table for this device."""
        return self.line.coefficients(self.heads, self.kv_heads, self.head_size, self.channels)

    def to_json(self) -> dict[str, Json]:
        """The contents of the file."""
        products = " and ".join(f"{name} {schedule}" for name, schedule in self.schedules.items())
        return {
            "attn_model": {
                f"{self.pim}_pim": {name: coefficient for name, coefficient in self.entry.items()}
            },
            "for": {
                "model": self.model,
                "n_head": self.heads,
                "kv_head": self.kv_heads,
                "head_dim": self.head_size,
                "channel_split": self.channels,
                "dtype": self.dtype,
            },
            "line": {
                "slope_ns": self.line.slope_ns,
                "intercept_ns": self.line.intercept_ns,
                "max_relative_error": self.line.residual,
            },
            "points_ns": {str(tokens): time for tokens, time in self.line.points.items()},
            "table": [json_form(row) for row in self.rows],
            "made": [
                f"pimflow's PIM programs for one request's attention in one layer on {self.pim}, timed with "
                f"'{self.timing}' rules, refresh included",
                f"both products over a cache of {max(self.line.points)} places of which so many are in use, "
                f"and the append of a token; schedules: {products}; no softmax, no launch",
                "the line has the least squares of relative errors at these points; slope and intercept of "
                "attn_model are those of the line times channel_split, over the factors by which "
                "estimate_with_linear scales from 32 heads on 8 of keys, 128 each: they hold for this model",
            ],
        }

    def attention_csv(self, devices: int) -> str:
        """The table as the simulator's ``attention.csv``, for one of `devices` that share the heads.

        Its folders ``tp1``, ``tp2``, … have one each (docs/profiler/output-bundle.md there). Rows are of
        decoding: ``n_decode`` requests over ``kv_decode`` tokens. Its reader ignores the last column, the
        source.
        """
        rows = [row for row in self.rows if row.kv_heads * devices == self.kv_heads]
        lines = [",".join(ATTENTION_COLUMNS)]
        lines += [f'0,0,{row.batch},{row.tokens},{row.ns / 1e3:.4f},"{row.source}"' for row in rows]
        return "\n".join([*lines, ""])

    def text(self) -> str:
        """The entry as text."""
        entry = self.entry
        return "\n".join(
            [
                f"model     {self.model}: {self.heads} heads on {self.kv_heads} of keys, "
                f"{self.head_size} each, {self.dtype}",
                f"device    {self.pim}, {self.channels} channels for a request, timing {self.timing}",
                f"line      {self.line.slope_ns:.4f} ns a token + {self.line.intercept_ns:.1f} ns, within "
                f"{self.line.residual:.1%} at {', '.join(map(str, self.line.points))} tokens",
                f'entry     "{self.pim}_pim": {{"slope": {entry["slope"]:.4f}, '
                f'"intercept": {entry["intercept"]:.4f}}}',
                f"table     {len(self.rows)} rows over requests at once, tokens and heads, with sources",
            ]
        )


def decode_attention(heads: int, kv_heads: int, head_size: int, *, places: int, batch: int = 1) -> Attention:
    """Attention of one layer and one new token of each sequence over a cache of so many places."""
    return Attention(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        value_size=head_size,
        queries=1,
        keys=places,
        scale=head_size**-0.5,
        causal=True,
        positioned=True,
    )


def llmservingsim(
    model: str | os.PathLike[str],
    target_system: System | None = None,
    *,
    lengths: Sequence[int] = LENGTHS,
    devices: int = 1,
    profiling: Profiling | None = None,
) -> ServingAttention:
    """Time attention of a model in PIM, and fit the line over tokens that LLMServingSim takes.

    Parameters
    ----------
    model : str or path
        A language model of the zoo, or a GGUF file.
    target_system : System, optional
        Gives PIM device, channels, timing and storage type.
    lengths : sequence of int
        Numbers of tokens in the cache to time, two at least; the largest is the size of the cache.
    devices : int
        Of how many devices that share the heads the table has to have rows; see `attention_csv`.

    Raises
    ------
    UnknownNameError, ModelError, UsageError
        If there is no such model, its heads are not known or not shared by so many devices, there are fewer
        than two lengths, or the system has no PIM channels.
    UnsupportedOpError, InfeasibleError
        If PIM cannot store its cache.
    """
    decoder = open_language_model(model).decoder
    if decoder is None:
        raise UsageError(
            f"'{model}': heads of ONNX files are not known; give a model of the zoo or a .gguf file"
        )
    if len(set(lengths)) < 2 or min(lengths) < 1:
        raise UsageError("a line needs two lengths of a cache, each of 1 token or more")
    shares = [share for share in SHARES if decoder.kv_heads % share == 0]
    if devices not in shares:
        known = ", ".join(map(str, shares))
        raise UsageError(f"--devices {devices}: the heads of '{decoder.name}' are shared by {known}")
    system = as_system(target_system)
    if not system.pim_channels:
        raise UsageError("the system has no PIM channels; give --pim-channels 1 or more")
    rows = _attention_rows(system, decoder, shares, lengths, profiling or Profiling())
    system = replace(system, pim_channels=min(system.pim_channels, decoder.kv_heads))
    costs = Costs(system, profiling or Profiling())
    heads = decoder.heads, decoder.kv_heads, decoder.head_size
    schedules, points = _points(costs, decode_attention(*heads, places=max(lengths)), lengths)
    return report_from(
        ServingAttention,
        decoder,
        model=decoder.name,
        pim=system.pim.name,
        dtype=system.dtype,
        timing=system.timing,
        channels=system.pim_channels,
        schedules=schedules,
        line=AttentionLine.fit(points),
        rows=tuple(rows),
    )


def _attention_rows(
    system: System, decoder: Decoder, shares: Sequence[int], lengths: Sequence[int], profiling: Profiling
) -> Iterator[AttentionRow]:
    """Times for `BATCHES` requests, all lengths, and the heads of a device that shares them with others."""
    for share in shares:
        heads, kv_heads = decoder.heads // share, decoder.kv_heads // share
        for batch in BATCHES:
            channels = min(system.pim_channels, batch * kv_heads)
            costs = Costs(replace(system, pim_channels=channels), profiling)
            attention = decode_attention(heads, kv_heads, decoder.head_size, places=max(lengths), batch=batch)
            schedules, points = _points(costs, attention, lengths)
            products = " and ".join(f"{name} {schedule}" for name, schedule in schedules.items())
            for tokens, time_ns in points.items():
                yield AttentionRow(
                    batch=batch,
                    tokens=tokens,
                    heads=heads,
                    kv_heads=kv_heads,
                    head_dim=decoder.head_size,
                    channels=channels,
                    ns=time_ns,
                    source=f"simulated: PIM programs of pimflow on {system.pim.name}, '{system.timing}' "
                    f"rules, schedules {products}; no softmax, no launch",
                )


def _points(
    costs: Costs, attention: Attention, lengths: Sequence[int]
) -> tuple[dict[str, str], dict[int, float]]:
    """The schedule of each product that is the fastest over all places, and its times by tokens."""
    fastest = {product: ranked[0].schedule for product, ranked in costs.attention_costs(attention).items()}
    points = {}
    for tokens in sorted(set(lengths)):
        work = [
            CacheWork.from_attention(costs.pim_target, attention, product, tokens)
            for product in (KEYS, VALUES)
        ]
        points[tokens] = sum(entry.cost(fastest[entry.product]).total_ns for entry in work)
    schedules = {name: str(schedule) for name, schedule in fastest.items()}
    return schedules, points
