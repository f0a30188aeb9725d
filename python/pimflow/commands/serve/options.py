"""Options of `serve_sim` beside those of its search."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from pimflow.commands.generate.options import WeightOptions
from pimflow.core.keywords import check_keywords
from pimflow.core.options import option
from pimflow.errors import UsageError

MAX_TOKENS = 1 << 27  # of all requests: a server of a few minutes of work


def _parse_lengths(text: str, flag: str) -> tuple[int, ...]:
    """Read two numbers of tokens."""
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise UsageError(f"{flag} {text}: give the tokens of a prompt and new ones, such as 512,128")
    return tuple(int(part) for part in parts)


@check_keywords
@dataclass(frozen=True, kw_only=True)
class ServeOptions(WeightOptions, group="network"):
    """What is served, and how; see `pimflow.serve_sim`."""

    trace: str | os.PathLike[str] | None = option(
        None,
        "--trace FILE.csv",
        "requests with the columns TIMESTAMP, ContextTokens, GeneratedTokens, as the Azure traces have them",
    )
    rate: float | None = option(
        None, "--rate R", "draw arrivals, R a second on average (Poisson), also in place of those of a trace"
    )
    requests: int | None = option(
        None, "--requests N", "how many requests: drawn ones, or the first ones of a trace"
    )
    lengths: Sequence[int] | None = option(
        None,
        "--lengths P,N",
        "draw lengths: P tokens of a prompt and N new ones on average (geometric distributions)",
        parse=_parse_lengths,
    )
    seed: int = option(
        0, "--seed S", "of what is drawn (default: %(default)s); the same seed, the same bytes"
    )
    context: int | None = option(
        None, "--context N", "most tokens of a request (default: as the longest needs, up to the model's)"
    )
    max_batch: int = option(32, "--max-batch B", "requests served at once (default: %(default)s)")
    chunk_tokens: int = option(
        256, "--chunk-tokens N", "tokens of a prompt in one step (default: %(default)s)"
    )
    page_tokens: int = option(16, "--page-tokens N", "tokens of a page of the caches (default: %(default)s)")
    cache_tokens: int | None = option(
        None, "--cache-tokens N", "tokens that the caches hold (default: what the PIM channels have room for)"
    )
    steps: str | os.PathLike[str] | None = option(
        None,
        "--steps FILE",
        "costs of steps that --save-steps wrote for this model and system: nothing is searched",
    )
    random_points: int = option(
        0,
        "--random-points N",
        "search N random steps of either kind more, to judge the table of steps by them",
    )
    ttft_limit_ms: float = option(
        2000.0,
        "--ttft-limit MS",
        "longest time to the first token of a request that counts as goodput (default: %(default)g, as "
        "MLPerf Inference has it for Llama 2 70B in its server scenario)",
    )
    tpot_limit_ms: float = option(
        200.0,
        "--tpot-limit MS",
        "longest mean time of a further token of such a request (default: %(default)g, from there too)",
    )
    assume_room: bool = option(
        False,
        "--assume-room",
        "time a model that does not fit the PIM channels as if banks had as many rows as it needs",
    )

    def validate(self) -> ServeOptions:
        """Return these options; raises `UsageError` for values or combinations that mean nothing."""
        for name in ("requests", "context", "max_batch", "chunk_tokens", "page_tokens", "cache_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} {value}: give 1 or more")
        for name in ("rate", "ttft_limit_ms", "tpot_limit_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"--{name.replace('_', '-').removesuffix('-ms')} {value}: give more than 0")
        for name in ("seed", "random_points"):
            if getattr(self, name) < 0:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: give 0 or more")
        if self.steps is not None and self.random_points:
            raise UsageError("--random-points: nothing is searched with --steps; leave one of them out")
        if self.trace is None:
            if None in (self.rate, self.requests, self.lengths):
                raise UsageError("give requests: --trace FILE.csv, or --rate, --requests and --lengths")
        elif self.lengths is not None:
            raise UsageError("--lengths: the trace has the lengths of its requests; leave it out")
        if self.lengths is not None and (len(self.lengths) != 2 or min(self.lengths) < 1):
            raise UsageError("--lengths: give the tokens of a prompt and new ones, each 1 or more")
        return self
