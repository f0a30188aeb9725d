"""Options of `generate` beside those of its search."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from pimflow.commands.generate.devices import PARALLEL
from pimflow.core.keywords import check_keywords
from pimflow.core.options import OptionSet, option
from pimflow.errors import UsageError
from pimflow.weight_types import CACHE_TYPES, WRITTEN_TYPES

_REPEAT = "; repeat it for several at once, of any lengths"


def _parse_tokens(text: str, flag: str) -> list[int]:
    """Read numbers of tokens."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"{flag} {text}: give numbers, such as 84,104,101")
    return [int(part) for part in parts]


@dataclass(frozen=True, kw_only=True)
class WeightOptions(OptionSet, group="network"):
    """How weights and caches of a language model of the zoo are stored."""

    weight_type: str = option(
        "fp16",
        "--weight-type TYPE",
        "type in which the GPU, and PIM that takes it, store the weights of a language model of the zoo: "
        "{choices}; a file has types of its own",
        choices=WRITTEN_TYPES,
    )
    activation_type: str = option(
        "fp16",
        "--activation-type TYPE",
        "type to which inputs of products with such weights are quantised, with a scale for each token: "
        "{choices}; int8 with weights of int8 is W8A8, of int4 W4A8",
        choices=("fp16", "int8"),
    )
    kv_cache_dtype: str = option(
        "fp16",
        "--kv-cache-dtype TYPE",
        "type of the caches of such a model, quantised as they are appended, with a scale for each token "
        "and head: {choices}; fp16 for that of the system",
        choices=("fp16", *CACHE_TYPES),
    )


@check_keywords
@dataclass(frozen=True, kw_only=True)
class GenerateOptions(WeightOptions, group="network"):
    """What is generated; see `pimflow.generate`."""

    prompt: str | Sequence[str] | None = option(None, "--prompt TEXT", f"what comes first, as text{_REPEAT}")
    tokens: Sequence[int] | Sequence[Sequence[int]] | None = option(
        None, "--tokens ID,…", f"the same as numbers of tokens{_REPEAT}", parse=_parse_tokens
    )
    n: int = option(
        syntax="-n N",
        help="how many new tokens; text is printed before its last check: exit code 5 says that it is wrong",
    )
    context: int | None = option(
        None,
        "--context N",
        "tokens that the caches have room for (default: the longest prompt's and the new ones)",
    )
    batch: int = option(1, "--batch B", "sequences at once, from the same prompt")
    temperature: float = option(
        0.0,
        "--temperature T",
        "draw each token by its probability at this temperature (default: 0, always the largest logit)",
    )
    top_k: int | None = option(None, "--top-k K", "draw among the K most likely tokens")
    top_p: float | None = option(
        None, "--top-p P", "draw among the fewest tokens whose probabilities sum to P"
    )
    seed: int | None = option(
        None, "--seed S", "of the draws (default: 0); the same seed gives the same text"
    )
    stop: str | Sequence[str] | None = option(
        None, "--stop TEXT", "end a text before this; repeat it for several"
    )
    chat: bool = option(
        False, "--chat", "write prompts as what a user says, by the model's chat template, and answer"
    )
    tokenizer: str | os.PathLike[str] | None = option(
        None,
        "--tokenizer FILE",
        "tokenizer.json, or the folder with it (default: the model's own, or what is beside the model)",
    )
    devices: int = option(
        1, "--devices N", "share a shape of the zoo among N devices, each a GPU with its PIM channels"
    )
    parallel: str = option(
        PARALLEL[0],
        "--parallel HOW",
        "how devices share a model, by blocks, or by the parts of each: {choices}",
        choices=PARALLEL,
    )
    link: str | os.PathLike[str] = option(
        "nvlink-dgx", "--link NAME|FILE", "link between devices, with --devices (default: %(default)s)"
    )
    assume_room: bool = option(
        False,
        "--assume-room",
        "time a shape whose blocks do not all fit the PIM channels as if banks had as many rows as they need",
    )
