"""Requests of a server: read from a trace, or drawn."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TextIO

import numpy as np

from pimflow.commands.serve.options import MAX_TOKENS, ServeOptions
from pimflow.errors import TraceError, UsageError
from pimflow.simulators.serving.scheduler import RequestTrace

# Of the traces of language models of github.com/Azure/AzurePublicDataset, AzureLLMInferenceTrace_*.csv.
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MAX_REQUESTS = 4_000_000  # each takes about a kilobyte while it is served
_MAX_LINE = 4096  # characters; a line of the trace has about 40
_PS_PER_SECOND = 10**12
_SHOWN_CHARACTERS = 60


def requests_from_options(options: ServeOptions) -> RequestTrace:
    """The requests that the options describe, in the order of arrival.

    Raises
    ------
    TraceError
        If the trace cannot be read, with file and line.
    UsageError
        If all requests together have more tokens than can be simulated.
    """
    rng = np.random.default_rng(options.seed)
    if options.trace is not None:
        requests = read_trace(options.trace, options.requests)
    else:
        assert options.requests is not None and options.lengths is not None
        if options.requests > MAX_REQUESTS:
            raise UsageError(f"--requests {options.requests}: give {MAX_REQUESTS} at most")
        if (mean_tokens := options.requests * sum(options.lengths)) > 2 * MAX_TOKENS:
            raise UsageError(_token_limit_text(mean_tokens))
        prompt, new = (rng.geometric(1 / mean, options.requests) for mean in options.lengths)
        zeros = np.zeros(options.requests, np.int64)
        requests = RequestTrace(arrival_ps=zeros, prompt_tokens=prompt, new_tokens=new)
    if options.rate is not None:
        gaps_s = rng.exponential(1 / options.rate, len(requests))
        arrival_ps = np.rint(np.cumsum(gaps_s) * _PS_PER_SECOND)
        if arrival_ps[-1] >= 2.0**62:
            raise UsageError(f"--rate {options.rate:g}: so few requests a second take too long")
        requests = replace(requests, arrival_ps=arrival_ps.astype(np.int64))
    tokens = int(requests.prompt_tokens.sum() + requests.new_tokens.sum())
    if tokens > MAX_TOKENS:
        raise UsageError(_token_limit_text(tokens))
    return requests


def _token_limit_text(tokens: int) -> str:
    return f"the requests have {tokens} tokens; give at most {MAX_TOKENS}, by --requests"


def read_trace(path: str | os.PathLike[str], limit: int | None = None) -> RequestTrace:
    """Read the requests of a CSV file, the first `limit` of them.

    The header is `COLUMNS`; a time is ``2023-11-16 18:15:46.6805900``, with up to seven digits of a second,
    and ``+00:00`` behind it in the traces of 2024. Requests may stand in any order; arrivals count from the
    earliest one.

    Raises
    ------
    TraceError
        For a file that cannot be read, or has another form; it names file and line.
    """
    rows = []
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            for number, fields in _lines(file, str(path)):
                rows.append(_request(fields, f"{path}:{number}"))
                if len(rows) == limit:
                    break
                if len(rows) > MAX_REQUESTS:
                    raise TraceError(f"{path}: more than {MAX_REQUESTS} requests; give --requests")
    except (OSError, UnicodeDecodeError) as error:
        reason = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)
        raise TraceError(f"{path}: {reason}") from None
    if not rows:
        raise TraceError(f"{path}: has no request after its header {','.join(COLUMNS)}")
    columns = np.array(rows, np.int64)
    columns = columns[np.argsort(columns[:, 0], kind="stable")]
    return RequestTrace(
        arrival_ps=(columns[:, 0] - columns[0, 0]) * (_PS_PER_SECOND // 10**7),
        prompt_tokens=columns[:, 1],
        new_tokens=columns[:, 2],
    )


def _lines(file: TextIO, path: str) -> Iterator[tuple[int, list[str]]]:
    """Number and fields of each line after the header; raises `TraceError` for another header."""
    number = 0
    while line := file.readline(_MAX_LINE + 1):
        number += 1
        if len(line) > _MAX_LINE:
            raise TraceError(f"{path}:{number}: the line is longer than {_MAX_LINE} characters")
        fields = next(csv.reader([line]), [])
        if number == 1:
            if tuple(field.strip() for field in fields) != COLUMNS:
                shown = ascii(line.strip()[:_SHOWN_CHARACTERS])
                raise TraceError(f"{path}:1: the header is not {','.join(COLUMNS)}, but {shown}")
        elif line.strip():
            yield number, fields


def _request(fields: list[str], where: str) -> tuple[int, int, int]:
    """Time in 100 ns, and tokens of a prompt and of its answer."""
    if len(fields) != len(COLUMNS):
        raise TraceError(f"{where}: has {len(fields)} fields, not {', '.join(COLUMNS)}")
    counts = []
    for column, text in zip(COLUMNS[1:], fields[1:]):
        digits = text.strip()
        if not (digits.isascii() and digits.isdecimal() and 1 <= int(digits[:12]) <= MAX_TOKENS):
            shown = ascii(text[:_SHOWN_CHARACTERS])
            raise TraceError(f"{where}: {column} is {shown}, not a number from 1 to {MAX_TOKENS}")
        counts.append(int(digits[:12]))
    return _time(fields[0], where), counts[0], counts[1]


def _time(text: str, where: str) -> int:
    """A time in 100 ns since 1970."""
    seconds, _, fraction = text.strip().removesuffix("+00:00").partition(".")
    try:
        if not (len(fraction) <= 7 and (not fraction or (fraction.isascii() and fraction.isdecimal()))):
            raise ValueError(fraction)
        since_epoch = datetime.fromisoformat(seconds) - datetime(1970, 1, 1)
    except (ValueError, TypeError, OverflowError):
        shown = ascii(text[:_SHOWN_CHARACTERS])
        raise TraceError(f"{where}: TIMESTAMP is {shown}, not such as 2023-11-16 18:15:46.6805900") from None
    return (since_epoch.days * 86400 + since_epoch.seconds) * 10**7 + int(fraction.ljust(7, "0") or 0)
