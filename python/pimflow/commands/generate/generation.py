"""Results of text generation: figures, JSON and text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pimflow.commands.shared.published_decode import PublishedDecode
from pimflow.core.frames import Tabular
from pimflow.core.json_form import OMITTED, Json, fields_form
from pimflow.placement import SearchResult
from pimflow.placement.plan_application import Charges
from pimflow.placement.solvers.evaluate import STATIC, Evaluation

MAX_TIMED_LENGTHS = 32  # largest number of step lengths to time: each takes a tenth of a second or more


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Latency and energy of a step, as planned and on the GPU alone."""

    ns: float
    ns_gpu_only: float
    pj: float
    pj_gpu_only: float

    @classmethod
    def from_search(
        cls, search_result: SearchResult | Charges, times: int = 1, single_regions: Collection[str] = ()
    ) -> StepCosts:
        """Costs of a network that runs `step_costs` times, with the regions of `single_regions` only
        the first time.
        """
        plan, gpu_only = (
            _repeated_cost(evaluation, times, single_regions)
            for evaluation in (search_result.evaluation, search_result.baseline)
        )
        return cls(ns=plan[0], ns_gpu_only=gpu_only[0], pj=plan[1], pj_gpu_only=gpu_only[1])

    def scale(self, factor: float) -> StepCosts:
        """Multiply all costs by a factor."""
        return StepCosts(**{name: factor * cost for name, cost in vars(self).items()})

    def __add__(self, step: StepCosts) -> StepCosts:
        """The sum: two steps, one after the other."""
        return StepCosts(**{name: cost + getattr(step, name) for name, cost in vars(self).items()})


def _repeated_cost(
    evaluation: Evaluation, times: int, single_regions: Collection[str]
) -> tuple[float, float]:
    """Latency (ns) and energy (pJ) of repeated runs, constant power included; see `Times.from_search`."""
    by_region = evaluation.region_times
    once_ns = sum(by_region[name].latency_ns for name in single_regions if name in by_region)
    static_pj = sum(evaluation.energies_pj.get(part, 0.0) for part in STATIC)
    once_pj = sum(evaluation.region_pj.get(name, 0.0) for name in single_regions)
    once_pj += static_pj * once_ns / evaluation.latency_ns
    repeats = times - 1
    return (
        times * evaluation.latency_ns - repeats * once_ns,
        times * evaluation.energy_pj - repeats * once_pj,
    )


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Figures of a step of one token for each sequence; fields as in `Generation`."""

    tpot_ns: float
    tpot_ns_gpu_only: float
    tpot_ns_gpu_published: float | None = field(metadata=OMITTED)
    energy_per_token_pj: float
    energy_per_token_pj_gpu_only: float
    fraction_of_bound: float


@dataclass(frozen=True, kw_only=True)
class StepOver(StepFigures):
    """Figures of a step that attends to `tokens` tokens, its own included."""

    tokens: int


@dataclass(frozen=True, kw_only=True)
class DecodeCostModel:
    """The costs of the steps of one token, by their lengths.

    Attributes
    ----------
    step_costs : callable
        Gives the `StepCosts` of a step that attends to so many tokens.
    bound_ns : callable
        Gives the lower bound of the time of such a step.
    published : PublishedDecode, optional
        Gives its time on a GPU that decodes as the best published one does.
    context : int
        Tokens that the caches have room for.
    step_lengths : sequence of int
        Lengths of the requested steps: the tokens that each attends to.
    """

    step_costs: Callable[[int], StepCosts]
    bound_ns: Callable[[int], float]
    published: PublishedDecode | None
    context: int
    batch: int
    step_lengths: Sequence[int]

    def total(self, tokens: Sequence[int]) -> StepCosts:
        """Total costs of steps of these lengths."""
        parts = (self.step_costs(length).scale(steps) for length, steps in length_weights(tokens).items())
        return functools.reduce(StepCosts.__add__, parts)

    @property
    def mean(self) -> StepFigures:
        """The mean of the requested steps."""
        steps = len(self.step_lengths)
        bound_ns = sum(
            self.bound_ns(length) * count for length, count in length_weights(self.step_lengths).items()
        )
        total = self.total(self.step_lengths)
        return StepFigures(
            **self._figures(total.scale(1 / steps), bound_ns / steps),
            tpot_ns_gpu_published=self._published_ns(length_weights(self.step_lengths)),
        )

    @property
    def lengths(self) -> tuple[StepOver, ...]:
        """Figures of those of the requested lengths that were timed."""
        return tuple(map(self.full_step, length_weights(self.step_lengths)))

    def full_step(self, length: int) -> StepOver:
        """Figures of a step of any length."""
        return StepOver(
            tokens=length,
            **self._figures(self.step_costs(length), self.bound_ns(length)),
            tpot_ns_gpu_published=self._published_ns({length: 1.0}),
        )

    def _published_ns(self, weights: Mapping[int, float]) -> float | None:
        """The mean time of steps of these lengths on a GPU that decodes as published."""
        if self.published is None:
            return None
        times = (self.published.step_ns(length, self.batch) * count for length, count in weights.items())
        return sum(times) / sum(weights.values())

    def _figures(self, costs: StepCosts, bound_ns: float) -> dict[str, float]:
        return {
            "tpot_ns": costs.ns,
            "tpot_ns_gpu_only": costs.ns_gpu_only,
            "energy_per_token_pj": costs.pj / self.batch,
            "energy_per_token_pj_gpu_only": costs.pj_gpu_only / self.batch,
            "fraction_of_bound": bound_ns / costs.ns,
        }


def length_weights(tokens: Sequence[int]) -> dict[int, float]:
    """Weights of the lengths to time, rising, whose weighted sum stands for steps of all lengths in `tokens`.

    Of up to `MAX_TIMED_LENGTHS` lengths, each has its count. Of more, `MAX_TIMED_LENGTHS` evenly spread ones
    are timed, and those between are interpolated linearly.
    """
    lengths = np.unique(np.asarray(tokens))
    indices = np.linspace(0, len(lengths) - 1, min(len(lengths), MAX_TIMED_LENGTHS)).round().astype(int)
    timed = lengths[indices]
    positions = np.interp(tokens, timed, np.arange(len(timed)))
    below = np.floor(positions).astype(int)
    above = np.minimum(below + 1, len(timed) - 1)
    counts = np.bincount(below, 1 - (positions - below), len(timed)) + np.bincount(
        above, positions - below, len(timed)
    )
    return {int(length): float(count) for length, count in zip(timed, counts)}


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The text that follows a prompt.

    Attributes
    ----------
    tokens : tuple of int or None
        New tokens; None of a model without weights.
    text : str or None
        The same as text, if the model has a tokenizer.
    """

    prompt_tokens: int
    tokens: tuple[int, ...] | None
    text: str | None


@dataclass(frozen=True, kw_only=True)
class Generation(Tabular, rows="requests"):
    """The text of a language model, and the times and energies of its steps on a system.

    Attributes
    ----------
    model, weights, system, gpu, pim, dtype : str
        `weights` names their source and the types in which they are stored.
    weights_in_pim : str
        How PIM stores weights of narrow types: as they are, or widened to the storage type, since the
        device's multipliers do not take them. Omitted if all weights are of the storage type.
    cache, cache_in_pim : str
        Type of the integers in the caches, one scale a token and head; and how PIM stores them. Omitted if
        caches are of the storage type.
    prompt_tokens, context, batch : int
        Tokens of the longest prompt; tokens that the caches have room for; number of sequences, one for each
        prompt or all from one.
    tokens, text
        Of the first request; see `Completion`.
    ttft_ns, tpot_ns : float
        Modelled time of the prompt's step, and mean time of the requested steps of one token for each
        sequence; ``_gpu_only`` on the GPU with all memory channels, by its model; ``_gpu_published`` if it
        reads weights and caches at the share of the peak bandwidth of the best published decoding, as
        `gpu_published` says (`published_decode`); omitted where no source has one.
    tokens_per_s : float
        Of all sequences together, while decoding.
    energy_per_token_pj : float
        Of a token of one sequence, while decoding.
    lengths : tuple of StepOver
        Figures by length, rising: of the shortest and the longest requested step, and of those between that
        were timed.
    full_cache : StepOver
        Figures of a step that attends to the whole context.
    fraction_of_bound : float
        Lower bound of the time of a step, in which PIM or the GPU reads each weight and each element of the
        caches (`step_bound.shared_bound_ns`), over `tpot_ns`.
    held_bytes, room_bytes : int
        Bytes of PIM's rows that weights and caches of all blocks take, and capacity of all PIM channels. If
        they do not fit, times are those of banks with as many rows as they need. Of several devices, of the
        fullest.
    devices : str
        How several devices share the model; omitted for one.
    regions, regions_on_pim : int
        Regions of a step of one token for each sequence, and those of them that PIM computes.
    blocks, compiled_blocks : int
        Blocks of the model, and number of those that were compiled and verified; times are of all blocks. 0
        if the model does not say.
    verified : bool
        True if each PIM region of the prompt's step and of the first decoding step matches its reference, and
        the logits of each step are within `bound` of a reference that shares no code; tokens must be equal
        where the reference's largest logit leads by more than twice the bound.
    max_relative_error, bound : float
        Error of the logits over the reference's largest logit, and its bound.
    sure_tokens : int
        New tokens that must equal the reference's, whose largest logit leads by more than twice the bound.
    timing_violations : int or None
        Commands issued too early; None under the published timing.
    """

    model: str
    weights: str
    system: str
    gpu: str
    pim: str
    dtype: str
    weights_in_pim: str | None = field(metadata=OMITTED)
    cache: str | None = field(metadata=OMITTED)
    cache_in_pim: str | None = field(metadata=OMITTED)
    prompt_tokens: int
    context: int
    batch: int
    tokens: tuple[int, ...] | None
    text: str | None
    requests: tuple[Completion, ...]
    ttft_ns: float
    ttft_ns_gpu_only: float
    tpot_ns: float
    tpot_ns_gpu_only: float
    tpot_ns_gpu_published: float | None = field(metadata=OMITTED)
    gpu_published: str | None = field(metadata=OMITTED)
    tokens_per_s: float
    tokens_per_s_gpu_only: float
    energy_per_token_pj: float
    energy_per_token_pj_gpu_only: float
    fraction_of_bound: float
    lengths: tuple[StepOver, ...]
    full_cache: StepOver
    kv_bytes_per_token: int
    held_bytes: int
    room_bytes: int
    devices: str | None = field(default=None, metadata=OMITTED)
    regions: int
    regions_on_pim: int
    blocks: int
    compiled_blocks: int
    verified: bool
    max_relative_error: float
    bound: float
    sure_tokens: int
    timing_violations: int | None

    def to_json(self) -> dict[str, Json]:
        """The tree that ``pimflow generate --json`` prints."""
        return fields_form(self)

    def table(self) -> str:
        """The figures as text."""
        violations, full = self.timing_violations, self.full_cache
        ends = dict.fromkeys(str(self.lengths[end].tokens) for end in (0, -1))
        blocks = f", {self.compiled_blocks} of {self.blocks} blocks compiled" if self.blocks else ""
        rows = (
            ("first token", "ms", self.ttft_ns_gpu_only / 1e6, self.ttft_ns / 1e6),
            ("each further", "ms", self.tpot_ns_gpu_only / 1e6, self.tpot_ns / 1e6),
            ("tokens a second", "", self.tokens_per_s_gpu_only, self.tokens_per_s),
            ("with full caches", "ms", full.tpot_ns_gpu_only / 1e6, full.tpot_ns / 1e6),
            ("energy a token", "mJ", self.energy_per_token_pj_gpu_only / 1e9, self.energy_per_token_pj / 1e9),
        )
        room = "" if self.held_bytes <= self.room_bytes else ": there is no room for all blocks"
        token_text = f", {self.sure_tokens} tokens had to be the same and are" if self.tokens else ""
        return "\n".join(
            [
                f"system    {self.gpu} + {self.pim}, {self.dtype}; modelled times, with caches of "
                f"{self.context} tokens and {self.batch} at once",
                f"steps     each of a token, over {' to '.join(ends)} tokens",
                *([f"devices   {self.devices}; memory is of the fullest"] if self.devices else []),
                f"model     {self.model}: {self.regions_on_pim} of {self.regions} regions of a step on PIM"
                f"{blocks}",
                f"weights   {self.weights}" + (f"; {self.weights_in_pim}" if self.weights_in_pim else ""),
                *(
                    [f"caches    {self.cache}, a scale a token and head; {self.cache_in_pim}"]
                    if self.cache
                    else []
                ),
                f"          {'':<16} {'GPU alone':>12} {'plan':>12}",
                *(
                    f"          {label:<16} {gpu:>12.4f} {plan:>12.4f} {unit}".rstrip()
                    for label, unit, gpu, plan in rows
                ),
                *self._published_lines(),
                f"bound     {self.fraction_of_bound:.1%} of what the reads of both devices allow; the cache "
                f"takes {self.kv_bytes_per_token} bytes a token",
                f"memory    {_size(self.held_bytes)} of weights and caches in PIM channels, which have "
                f"{_size(self.room_bytes)}{room}",
                f"check     within {self.max_relative_error:.1e} of the reference (bound {self.bound:.0e})"
                f"{token_text}; "
                + ("timing not checked" if violations is None else f"{violations} timing violations"),
            ]
        )

    def _published_lines(self) -> list[str]:
        """The line of the second baseline, if there is one."""
        if self.tpot_ns_gpu_published is None:
            return []
        return [
            f"best GPU  {self.tpot_ns_gpu_published / 1e6:.4f} ms each further, of which the plan is "
            f"{self.tpot_ns_gpu_published / self.tpot_ns:.2f}x: bytes of a step at {self.gpu_published}"
        ]


def _size(count: int) -> str:
    """A number of bytes as text, in MiB or GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
