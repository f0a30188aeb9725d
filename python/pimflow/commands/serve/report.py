"""What a server under load gives: times at percentiles, throughput, goodput, energy, and its caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pimflow.commands.serve.step_table import StepTable
from pimflow.core.json_form import FLAT, OMITTED, Json, JsonTree, fields_form
from pimflow.simulators.serving.scheduler import RequestTrace, Schedule, ServingLimits

GPU_ONLY, GPU_PUBLISHED = "_gpu_only", "_gpu_published"
_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """The value that a share of all does not exceed: one of the values, of the nearest rank."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def from_ps(cls, values_ps: np.ndarray, counts: np.ndarray | None = None) -> Percentiles | None:
        """Percentiles in ns of rising values in ps, each of which is there so often; None without any."""
        if not len(values_ps):
            return None
        ranks = np.cumsum(np.ones(len(values_ps), np.int64) if counts is None else counts)
        # Of whole numbers, so that no rounding moves a rank.
        needed = [-(-int(ranks[-1]) * share // 100) for share in _PERCENTILES]
        values = [int(values_ps[np.searchsorted(ranks, rank)]) / 1000 for rank in needed]
        return cls(p50=values[0], p90=values[1], p99=values[2])


@dataclass(frozen=True, kw_only=True)
class ServedFigures:
    """Figures of a server over all requests that it served.

    Attributes
    ----------
    ttft_ns : Percentiles
        Time of requests from arrival to first token.
    tpot_ns : Percentiles, optional
        Mean time of a request's further tokens; None if no request has any.
    itl_ns : Percentiles, optional
        Time between two tokens of a request, over all tokens.
    tokens_per_s, requests_per_s : float
        From the first arrival to the last token.
    goodput_per_s, goodput_share : float
        Requests within both limits a second, and their share of all, refused ones included.
    energy_per_token_pj : float
        Of all steps, over all new tokens: prompts are included, idle time is not.
    mean_batch : float
        Requests that get a token in a step, on average over steps with any.
    mean_cache_share, max_cache_share : float
        Pages in use: on average over time, and at most.
    preemptions : int
        How often a request gave up its pages.
    duration_ns : float
        From the first arrival to the last token.
    """

    ttft_ns: Percentiles
    tpot_ns: Percentiles | None
    itl_ns: Percentiles | None
    tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float
    goodput_share: float
    energy_per_token_pj: float
    busy_share: float
    mean_batch: float
    mean_cache_share: float
    max_cache_share: float
    preemptions: int
    duration_ns: float


@dataclass(frozen=True, kw_only=True)
class LatencyLimits:
    """Longest time to the first token, and longest mean time of further tokens, of goodput."""

    ttft_limit_ns: float
    tpot_limit_ns: float


def serving_figures(
    requests: RequestTrace, limits: ServingLimits, latency: LatencyLimits, schedule: Schedule, refused: int
) -> ServedFigures:
    """The figures of a schedule; of `refused` further requests there is nothing else in it."""
    spans = schedule.spans
    ttft_ps = schedule.first_token_ps - requests.arrival_ps
    further = requests.new_tokens - 1
    has_further = further > 0
    decode_ps = schedule.finish_ps - schedule.first_token_ps
    tpot_ps = decode_ps[has_further] // further[has_further]
    is_good = ttft_ps <= latency.ttft_limit_ns * 1000
    is_good &= decode_ps <= latency.tpot_limit_ns * 1000 * further
    start_ps, end_ps = int(requests.arrival_ps[0]), int(schedule.finish_ps.max())
    duration_s = (end_ps - start_ps) / 1e12
    lasting_ps = spans["end_ps"] - spans["start_ps"]
    decode_steps = int(spans["steps"][spans["decoding"] > 0].sum())
    pages_ps = float((spans["pages"] * lasting_ps.astype(float)).sum())
    return ServedFigures(
        ttft_ns=_present(Percentiles.from_ps(np.sort(ttft_ps))),
        tpot_ns=Percentiles.from_ps(np.sort(tpot_ps)),
        itl_ns=Percentiles.from_ps(schedule.gaps[:, 0], schedule.gaps[:, 1]),
        tokens_per_s=int(requests.new_tokens.sum()) / duration_s,
        requests_per_s=len(requests) / duration_s,
        goodput_per_s=int(is_good.sum()) / duration_s,
        goodput_share=int(is_good.sum()) / (len(requests) + refused),
        energy_per_token_pj=int(spans["energy_pj"].sum()) / int(requests.new_tokens.sum()),
        busy_share=int(lasting_ps.sum()) / (end_ps - start_ps),
        mean_batch=int((spans["decoding"] * spans["steps"]).sum()) / max(decode_steps, 1),
        mean_cache_share=pages_ps / limits.pages / (end_ps - start_ps),
        max_cache_share=int(spans["pages"].max()) / limits.pages,
        preemptions=int(schedule.preemptions.sum()),
        duration_ns=(end_ps - start_ps) / 1000,
    )


def _present(percentiles: Percentiles | None) -> Percentiles:
    assert percentiles is not None  # every request has a first token
    return percentiles


@dataclass(frozen=True, kw_only=True)
class StepTableReport:
    """The table of step costs: its points, and its errors where it was compared with further searches.

    Attributes
    ----------
    decode_batches, decode_tokens, chunk_tokens, chunk_numbers : list of int
        Points of the two grids: requests at once and attended tokens, tokens of a chunk and chunks before it.
    held_out_points : int
        Points that were searched to be compared with what the grids say between their points.
    max_relative_error : float
        The largest relative error there, of times and energies, by the plan and on the GPU alone.
    """

    decode_batches: list[int]
    decode_tokens: list[int]
    chunk_tokens: list[int]
    chunk_numbers: list[int]
    held_out_points: int
    max_relative_error: float

    @classmethod
    def from_table(cls, table: StepTable) -> StepTableReport:
        """What a table of steps is made of, and how far it is off."""
        return cls(
            decode_batches=list(table.decode.sizes),
            decode_tokens=list(table.decode.lengths),
            chunk_tokens=list(table.chunks.sizes),
            chunk_numbers=list(table.chunks.lengths),
            held_out_points=len(table.held_out),
            max_relative_error=max((step.relative_error for step in table.held_out), default=0.0),
        )


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A request that can never be served: its number, from 1 on in the order of arrival, and why."""

    request: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Serving(JsonTree):
    """A server of a language model under load, as planned and on the GPU alone.

    Attributes
    ----------
    refused : int
        Requests that can never be served; `refusals` has the first ones.
    cache_tokens, kv_bytes_per_token : int
        What the caches hold.
    held_bytes, room_bytes : int
        What weights, in the plan that takes the most, and full caches take of the PIM channels, and what
        these have.
    assumes_room : bool
        Whether that is more than they have, and was allowed.
    steps : StepTable
        The costs of steps; not part of the JSON object.
    planned, gpu_only, gpu_published : ServedFigures
        The last on a GPU that decodes as the best published one does, without energy; None where no source
        has one (`commands.shared.published_decode`). Its prompts are those of the GPU's model.
    """

    model: str
    system: str
    gpu: str
    pim: str
    dtype: str
    weights: str
    requests: int
    prompt_tokens: int
    new_tokens: int
    refused: int
    refusals: tuple[Refusal, ...]
    offered_per_s: float | None
    context: int
    max_batch: int
    chunk_tokens: int
    page_tokens: int
    cache_tokens: int
    kv_bytes_per_token: int
    held_bytes: int
    room_bytes: int
    assumes_room: bool
    latency_limits: LatencyLimits = field(metadata=FLAT)
    step_table: StepTableReport
    steps: StepTable = field(repr=False)
    planned: ServedFigures
    gpu_only: ServedFigures
    gpu_published: ServedFigures | None
    gpu_published_source: str | None = field(metadata=OMITTED)

    def to_json(self) -> dict[str, Json]:
        """The JSON object: each figure of the plan with that of the GPU alone beside it."""
        row = fields_form(self)
        for name in ("steps", "planned", "gpu_only", "gpu_published"):
            row.pop(name)
        planned, gpu_only = fields_form(self.planned), fields_form(self.gpu_only)
        published = fields_form(self.gpu_published) if self.gpu_published else {}
        published.pop(_ENERGY, None)
        for name, value in planned.items():
            row |= {name: value, f"{name}{GPU_ONLY}": gpu_only[name]}
            if name in published:
                row[f"{name}{GPU_PUBLISHED}"] = published[name]
        return row

    def text(self) -> str:
        """The lines that the command prints."""
        table = self.step_table
        offered = "all at once" if self.offered_per_s is None else f"{self.offered_per_s:.4g} a second"
        lines = [
            f"model     {self.model}: {self.requests} requests, {offered}; {self.prompt_tokens} tokens of "
            f"prompts, {self.new_tokens} new ones",
            f"system    {self.system}, {self.dtype}, weights {self.weights}; modelled times",
            f"server    up to {self.max_batch} at once, prompts in chunks of {self.chunk_tokens} tokens, "
            f"caches of {self.cache_tokens} tokens in pages of {self.page_tokens}",
        ]
        lines += [f"refused   request {entry.request}: {entry.reason}" for entry in self.refusals]
        if self.refused > len(self.refusals):
            lines.append(f"refused   {self.refused - len(self.refusals)} more")
        titles = ("best GPU", "GPU alone", "plan") if self.gpu_published else ("GPU alone", "plan")
        lines.append(f"{'':<26}{''.join(f'{title:>12}' for title in titles)}")
        lines += [
            f"  {name:<24}{''.join(f'{value:>12}' for value in values)} {unit}".rstrip()
            for name, values, unit in self._rows()
        ]
        if self.gpu_published_source:
            lines.append(f"best GPU  its decoding moves bytes at {self.gpu_published_source}")
        held, room = self.held_bytes / 2**30, self.room_bytes / 2**30
        lines.append(
            f"memory    {held:.1f} GiB of weights and caches, PIM channels have {room:.1f} GiB"
            + ("; assumed to fit" if self.assumes_room else "")
        )
        lines.append(
            f"steps     of plans for {_numbers(table.decode_batches)} requests at once and "
            f"{_numbers(table.chunk_tokens)} tokens of a prompt; within {table.max_relative_error:.1%} at "
            f"{table.held_out_points} held-out points"
        )
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, list[str], str]]:
        """Name, values and unit of each line of the table."""
        servers = [*([self.gpu_published] if self.gpu_published else []), self.gpu_only, self.planned]
        rows = []
        for name, title in (
            ("ttft_ns", "first token"),
            ("tpot_ns", "a further token"),
            ("itl_ns", "between tokens"),
        ):
            for share in _PERCENTILES:
                values = [_percentile(figures, name, share) for figures in servers]
                rows.append((f"{title}, p{share}", values, "ms"))
        for name, title, factor, digits, unit in _LINES:
            values = [
                "-"
                if name == _ENERGY and figures is self.gpu_published
                else f"{getattr(figures, name) * factor:.{digits}f}"
                for figures in servers
            ]
            rows.append((title, values, unit))
        return rows


_ENERGY = "energy_per_token_pj"
_LINES = (
    ("tokens_per_s", "tokens a second", 1, 1, ""),
    ("requests_per_s", "requests a second", 1, 4, ""),
    ("goodput_per_s", "goodput", 1, 4, "requests a second"),
    ("goodput_share", "requests within limits", 100, 1, "%"),
    (_ENERGY, "energy a new token", 1e-9, 3, "mJ"),
    ("mean_batch", "requests a step", 1, 2, ""),
    ("mean_cache_share", "caches in use, mean", 100, 1, "%"),
    ("max_cache_share", "caches in use, most", 100, 1, "%"),
    ("busy_share", "busy", 100, 1, "%"),
    ("preemptions", "preemptions", 1, 0, ""),
)


def _percentile(figures: ServedFigures, name: str, share: int) -> str:
    percentiles: Percentiles | None = getattr(figures, name)
    return "-" if percentiles is None else f"{getattr(percentiles, f'p{share}') / 1e6:.3f}"


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
