"""Text from a language model, token by token, with its products on PIM done by their commands."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx

from pimflow.api.decoding import Cache, Runner, compiled_step, placed_step, weights_bound_ns
from pimflow.api.generation import Generation, Times
from pimflow.api.language import LanguageModel, open_language_model
from pimflow.api.search import Question
from pimflow.api.token_judge import Judge
from pimflow.compiler.verification import Verification
from pimflow.core.region import ELEMENT_BYTES
from pimflow.errors import UsageError
from pimflow.hardware import System
from pimflow.zoo.language import graph as decoder_graph
from pimflow.zoo.language.decoder import Decoder

if TYPE_CHECKING:
    from typing import TypedDict

    from typing_extensions import Unpack

    from pimflow.api.options import GoalKeywords
    from pimflow.placement import Goal, Profiling

    class _Keywords(GoalKeywords, total=False):
        goal: Goal | None
        profiling: Profiling | None

    class _Figures(TypedDict):
        prompt_tokens: int
        context: int
        tokens: tuple[int, ...] | None
        text: str | None
        regions: int
        regions_on_pim: int
        blocks: int
        compiled_blocks: int
        max_relative_error: float
        bound: float
        sure_tokens: int
        timing_violations: int | None


Progress = Callable[[str], None]


# The signature and what it says of each argument take the most of its lines.
def generate(
    model: str | os.PathLike[str] | onnx.ModelProto,
    *,
    n: int,
    prompt: str | None = None,
    tokens: Sequence[int] | None = None,
    context: int | None = None,
    batch: int = 1,
    target_system: System | None = None,
    on_text: Callable[[str], None] = lambda _: None,
    progress: Progress = lambda _: None,
    **question: Unpack[_Keywords],
) -> Generation:
    """Compile the steps of a language model, run them, and say what they take.

    The prompt is one step, each further token another; keys and values go from one to the next. Where the
    model is a step of one token, the prompt goes token by token. What a plan gives to PIM runs by its
    commands. Tokens are greedy: the largest logit. A model of which the zoo has the shape alone runs one
    block on drawn values, and figures are of as many blocks as it has, and its output.

    Parameters
    ----------
    model : str, path or ModelProto
        Name of a language model of the zoo, or an ONNX decoder with its cache, called as Optimum does
        (`frontend.onnx_decoder`), or a GGUF file of the Llama family (`zoo.language.gguf_file`).
    n : int
        New tokens; fewer if the model ends its text.
    prompt, tokens : str, sequence of int
        One of both: what comes first.
    context : int, optional
        Tokens that a step attends to: room for the prompt and the new ones, which is the default. Times are
        those of a full cache.
    batch : int
        Sequences at once.
    on_text : callable
        Told the text as it comes, if the model has a tokenizer; else each token's number.
    target_system, **question
        As `api.search.search` takes them.

    Raises
    ------
    UnknownNameError, UsageError
        If there is no such model; for an empty prompt, tokens that it does not have, or more than `context`.
    VerificationError
        If logits are further from the reference than they may be, or a token is another.
    """
    language = open_language_model(model)
    ids = language.tokens_of(prompt, tokens)
    context = _context(language, len(ids), n, context)
    if batch < 1:
        raise UsageError(f"--batch {batch}: give 1 or more")
    asked_for = Question.of(target_system, **question).checked()
    asked_for.system.require_network_dtype()
    if language.decoder is not None and not language.decoder.has_weights:
        return _estimated(language, language.decoder, asked_for, len(ids), context, batch, progress)
    return _generated(language, asked_for, ids, n, context, batch, on_text, progress)


def _context(language: LanguageModel, prompt: int, n: int, context: int | None) -> int:
    """Tokens of a step; raises `UsageError` if what is asked for does not fit."""
    if n < 1:
        raise UsageError(f"-n {n}: give 1 or more new tokens")
    needed, fixed = prompt + n, language.fixed_context
    if fixed is not None and context not in (None, fixed):
        raise UsageError(
            f"'{language.name}' attends to {fixed} tokens, not to --context {context}; leave it out"
        )
    context = fixed or context or needed
    if needed > context:
        raise UsageError(
            f"{prompt} tokens of the prompt and {n} new ones are more than the {context} that it "
            f"attends to{'' if fixed else f'; give --context {needed} or more'}"
        )
    if language.most_context is not None and context > language.most_context:
        raise UsageError(f"'{language.name}' was made for {language.most_context} tokens, not for {context}")
    return context


def _generated(
    language: LanguageModel,
    question: Question,
    ids: list[int],
    n: int,
    context: int,
    batch: int,
    on_text: Callable[[str], None],
    progress: Progress,
) -> Generation:
    cache, told, judge = Cache(), _Told(language, on_text, n), Judge(language, question.system.dtype)
    checks, ttft, parts = [], None, [np.array([token]) for token in ids]
    if language.fixed_context is None and len(ids) > 1:
        progress("compiling the prompt's step")
        token, check, ttft = _prompt(language, question, np.array(ids), batch, cache, judge)
        told.add(token)
        checks, parts = [check], []
    progress("compiling a token's step")
    step = compiled_step(language.step(context, 1, batch), question, context, 1, batch)
    progress("verifying")
    checks.append(step.checked(np.full((batch, 1), ids[0] if parts else token), cache))
    runner = Runner(step)
    for part in parts:
        token = judge.token(part, runner(part, cache), step, told=part is parts[-1])
    if parts:
        told.add(token)
    progress("generating")
    while len(told.tokens) < n and token != language.end:
        given = np.array([token])
        token = judge.token(given, runner(given, cache), step, told=True)
        told.add(token)
    return _report(
        language,
        question,
        prompt_tokens=len(ids),
        context=context,
        batch=batch,
        tokens=tuple(told.tokens),
        text=told.text,
        ttft=ttft or Times.of(step.searched, len(ids)),
        tpot=Times.of(step.searched),
        bound_ns=step.bound_ns(language.kv_elements, language.uses),
        regions=len(step.searched.graph.regions),
        regions_on_pim=len(checks[-1].regions),
        blocks=0 if language.decoder is None else language.decoder.layers,
        compiled_blocks=0 if language.decoder is None else language.decoder.layers,
        max_relative_error=judge.worst,
        bound=judge.bound,
        sure_tokens=judge.sure,
        timing_violations=_violations(checks),
    )


def _prompt(
    language: LanguageModel, question: Question, ids: np.ndarray, batch: int, cache: Cache, judge: Judge
) -> tuple[int, Verification, Times]:
    """The first token, by a step of the whole prompt; what was built for that is given up."""
    length = ids.size + language.least_cache
    step = compiled_step(language.step(length, ids.size, batch), question, length, ids.size, batch)
    check = step.checked(np.tile(ids, (batch, 1)), cache)
    token = judge.token(ids, Runner(step)(ids, cache), step, told=True)
    return token, check, Times.of(step.searched)


class _Told:
    """New tokens, told as they come."""

    def __init__(self, language: LanguageModel, on_text: Callable[[str], None], n: int) -> None:
        self.tokens: list[int] = []
        self._parts: list[str] = []
        self._decoder = language.tokenizer.decoder() if language.tokenizer else None
        self._on_text, self._n = on_text, n

    @property
    def text(self) -> str | None:
        return "".join(self._parts) if self._decoder else None

    def add(self, token: int) -> None:
        """The next token."""
        self.tokens.append(token)
        if self._decoder:
            self._parts.append(self._decoder.text(token, len(self.tokens) == self._n))
        self._on_text(self._parts[-1] if self._decoder else f"{token} ")


def _estimated(
    language: LanguageModel,
    decoder: Decoder,
    question: Question,
    prompt: int,
    context: int,
    batch: int,
    progress: Progress,
) -> Generation:
    """Of a model with drawn weights: one block is compiled and verified, and counted as often as it is."""
    steps, checks = [], []
    for length, count, what in ((prompt, prompt, "the prompt"), (context, 1, "a token")):
        progress(f"compiling a block for {what}")
        graph = decoder_graph.block_graph(decoder, length, tokens=count, batch=batch)
        step = compiled_step(graph, question, length, count, batch)
        progress("verifying")
        inputs = step.reference.example_inputs()
        inputs["attention_mask"] = np.ones((batch, length), np.int64)
        checks.append(step.verified(inputs))
        steps.append(step)
    progress("searching the output")
    _, _, head = placed_step(decoder_graph.head_graph(decoder, batch=batch), question)
    first, further = steps
    output = Times.of(head)
    bound_ns = decoder.layers * further.bound_ns(language.kv_elements / decoder.layers, language.uses)
    bound_ns += weights_bound_ns(head, batch)
    return _report(
        language,
        question,
        prompt_tokens=prompt,
        context=context,
        batch=batch,
        tokens=None,
        text=None,
        ttft=Times.of(first.searched, decoder.layers) + output,
        tpot=Times.of(further.searched, decoder.layers) + output,
        bound_ns=bound_ns,
        regions=len(further.searched.graph.regions),
        regions_on_pim=len(checks[1].regions),
        blocks=decoder.layers,
        compiled_blocks=1,
        max_relative_error=max(check.max_relative_error for check in checks),
        bound=max(check.bound for check in checks),
        sure_tokens=0,
        timing_violations=_violations(checks),
    )


def _violations(checks: Sequence[Verification]) -> int | None:
    """Of all steps together; None if the clocks of one could not be judged."""
    found = [check.timing_violations for check in checks]
    return None if None in found else sum(each or 0 for each in found)


def _report(
    language: LanguageModel,
    question: Question,
    *,
    batch: int,
    ttft: Times,
    tpot: Times,
    bound_ns: float,
    **figures: Unpack[_Figures],
) -> Generation:
    """With what follows from the times."""
    system = question.system
    return Generation(
        model=language.name,
        weights=f"{language.weights} to {system.dtype}"
        if "widened" in language.weights
        else language.weights,
        system=system.name,
        gpu=system.gpu.name,
        pim=system.pim.name,
        dtype=system.dtype,
        batch=batch,
        ttft_ns=ttft.ns,
        ttft_ns_gpu_only=ttft.ns_gpu_only,
        tpot_ns=tpot.ns,
        tpot_ns_gpu_only=tpot.ns_gpu_only,
        tokens_per_s=batch / tpot.ns * 1e9,
        tokens_per_s_gpu_only=batch / tpot.ns_gpu_only * 1e9,
        energy_per_token_pj=tpot.pj / batch,
        energy_per_token_pj_gpu_only=tpot.pj_gpu_only / batch,
        fraction_of_bound=bound_ns / tpot.ns,
        kv_bytes_per_token=language.kv_elements * ELEMENT_BYTES[system.dtype],
        verified=True,  # else an error was raised
        **figures,
    )
