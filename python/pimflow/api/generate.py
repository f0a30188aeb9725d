"""Text from a language model, token by token, with its products on PIM done by their commands."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx

from pimflow.api.decoding import (
    Runner,
    Step,
    compiled_step,
    done_once,
    placed_step,
    verified_inputs,
    weights_bound_ns,
)
from pimflow.api.generation import Generation, Times, Written
from pimflow.api.language import LanguageModel, open_language_model
from pimflow.api.requests import Request
from pimflow.api.search import Question
from pimflow.compiler.verification import Verification
from pimflow.core.region import ELEMENT_BYTES
from pimflow.errors import UsageError
from pimflow.frontend import Network
from pimflow.hardware import System
from pimflow.host.garbage_collection import give_back
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
        requests: tuple[Written, ...]
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
    prompt: str | Sequence[str] | None = None,
    tokens: Sequence[int] | Sequence[Sequence[int]] | None = None,
    context: int | None = None,
    batch: int = 1,
    target_system: System | None = None,
    on_text: Callable[[str], None] = lambda _: None,
    progress: Progress = lambda _: None,
    **question: Unpack[_Keywords],
) -> Generation:
    """Compile the steps of a language model, run them, and say what they take.

    Prompts are one step, each further token another. Keys and values lie in caches that this step writes its
    own into, at each sequence's own place, so that one compilation serves every length. Where the model is a
    step of one token, prompts go token by token. What a plan gives to PIM runs by its commands. Tokens are
    greedy: the largest logit. A model of which the zoo has the shape alone runs one block on drawn values,
    and figures are of as many blocks as it has, and its output.

    Parameters
    ----------
    model : str, path or ModelProto
        Name of a language model of the zoo, or an ONNX decoder with its cache, called as Optimum does
        (`frontend.onnx_decoder`), or a GGUF file of the Llama family (`zoo.language.gguf_file`).
    n : int
        New tokens; fewer if the model ends its text.
    prompt, tokens : str, sequence of int
        One of both: what comes first. Or several of one kind, of any lengths, which are run at once.
    context : int, optional
        Tokens that a step attends to: room for the longest prompt and the new ones, which is the default.
        Times are those of a full cache.
    batch : int
        Sequences at once, all from one prompt; of several prompts each is one.
    on_text : callable
        Told the text of the first sequence as it comes, if the model has a tokenizer; else each token's
        number.
    target_system, **question
        As `api.search.search` takes them.

    Raises
    ------
    UnknownNameError, UsageError
        If there is no such model; for an empty prompt, tokens that it does not have, or more than `context`.
    UnsupportedOpError
        If a cache cannot stay where it is; see `relay_passes.canonical.keep_states`.
    VerificationError
        If logits are further from the reference than they may be, or a token is another.
    """
    language = open_language_model(model)
    prompts = language.prompts_of(prompt, tokens)
    context = _context(language, max(map(len, prompts)), n, context)
    batch = _sequences(len(prompts), batch)
    asked_for = Question.of(target_system, **question).checked()
    asked_for.system.require_network_dtype()
    if language.decoder is not None and not language.decoder.has_weights:
        return _estimated(language, language.decoder, asked_for, prompts, context, batch, progress)
    return _generated(language, asked_for, prompts, n, context, batch, on_text, progress)


def _sequences(prompts: int, batch: int) -> int:
    """How many sequences go at once; raises `UsageError` for a number that is none."""
    if batch < 1:
        raise UsageError(f"--batch {batch}: give 1 or more")
    if prompts > 1 and batch not in (1, prompts):
        raise UsageError(f"--batch {batch}: each of {prompts} prompts is one sequence; leave it out")
    return max(prompts, batch)


def _context(language: LanguageModel, prompt: int, n: int, context: int | None) -> int:
    """Tokens of a step; raises `UsageError` if what is asked for does not fit."""
    if n < 1:
        raise UsageError(f"-n {n}: give 1 or more new tokens")
    needed, fixed = prompt + n, language.fixed_context
    if fixed is not None and context not in (None, fixed):
        raise UsageError(
            f"'{language.name}' attends to {fixed} tokens, not to --context {context}; leave it out"
        )
    context = fixed or (needed if context is None else context)
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
    prompts: list[list[int]],
    n: int,
    context: int,
    batch: int,
    on_text: Callable[[str], None],
    progress: Progress,
) -> Generation:
    requests = [
        Request(language, ids, question.system.dtype, n, (lambda _: None) if number else on_text)
        for number, ids in enumerate(prompts)
    ]
    copies, longest = batch // len(requests), max(map(len, prompts))

    def compiled(step_context: int, tokens: np.ndarray, caches: Mapping[str, np.ndarray]) -> Step:
        held = np.array([request.held for request in requests for _ in range(copies)])
        lengths = (step_context, tokens.shape[1], batch)
        verified = functools.partial(verified_inputs, tokens=tokens, held=held, caches=caches)
        return compiled_step(language.step(*lengths), question, lengths, verified, progress)

    ttft, checks, caches = None, [], {}
    if not language.by_token and longest > 1:
        progress("compiling the prompt's step")
        tokens = _rows([request.padded(longest) for request in requests], copies)
        first = compiled(longest + language.least_cache, tokens, {})
        for number, request in enumerate(requests):
            rows = first.logits[number * copies : (number + 1) * copies]
            request.take(request.pending, rows[:, len(request.pending) - 1].copy(), first)
        caches, ttft = first.caches(), Times.of(first.searched)
        checks.append(first.verification)
        del first
        give_back()  # its weights
    progress("compiling a token's step")
    step = compiled(context, _rows([request.padded(1) for request in requests], copies), caches)
    checks.append(step.verification)
    runner = Runner(step, caches)
    bound_ns, tpot = step.bound_ns(language.kv_elements, language.uses), Times.of(step.searched)
    progress("generating")
    for request in requests:
        request.compare()
    while not all(request.done for request in requests):
        held = np.array([request.held for request in requests for _ in range(copies)])
        logits = runner(_rows([request.padded(1) for request in requests], copies), held)
        for number, request in enumerate(requests):
            if not request.done:
                rows = logits[number * copies : (number + 1) * copies]
                request.take(request.pending[:1], rows[:, -1], step)
                request.compare()
    regions, on_pim = len(step.searched.graph.regions), step.regions_on_pim
    judges = [request.judge for request in requests]
    for judge in judges:
        judge.end()  # all at once: until then they share the weights of one reference
    del step, runner
    give_back()
    progress("judging logits")
    for judge in judges:
        judge.settle()
    return _report(
        language,
        question,
        prompt_tokens=longest,
        context=context,
        batch=batch,
        requests=tuple(request.written() for request in requests),
        ttft=ttft or tpot.of_times(longest),
        tpot=tpot,
        bound_ns=bound_ns,
        regions=regions,
        regions_on_pim=on_pim,
        blocks=0 if language.decoder is None else language.decoder.layers,
        compiled_blocks=0 if language.decoder is None else language.decoder.layers,
        max_relative_error=max(judge.worst for judge in judges),
        bound=max(judge.bound for judge in judges),
        sure_tokens=sum(judge.sure for judge in judges),
        timing_violations=_violations(checks),
    )


def _rows(tokens: Sequence[Sequence[int]], copies: int) -> np.ndarray:
    """Tokens of a step, [batch, n], of which each sequence is so often the same."""
    return np.repeat(np.array(tokens), copies, axis=0)


def _estimated(
    language: LanguageModel,
    decoder: Decoder,
    question: Question,
    prompts: list[list[int]],
    context: int,
    batch: int,
    progress: Progress,
) -> Generation:
    """Of a model with drawn weights: one block is compiled and verified, and counted as often as it is."""
    steps, prompt = [], max(map(len, prompts))
    for length, count, what in ((prompt, prompt, "the prompt"), (context, 1, "a token")):
        progress(f"compiling a block for {what}")
        graph = decoder_graph.block_graph(decoder, length, tokens=count, batch=batch)
        steps.append(compiled_step(graph, question, (length, count, batch), _drawn, progress))
    checks = [step.verification for step in steps]
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
        requests=tuple(Written(prompt_tokens=len(ids), tokens=None, text=None) for ids in prompts),
        ttft=Times.of(first.searched, decoder.layers, done_once(first.searched.graph)) + output,
        tpot=Times.of(further.searched, decoder.layers, done_once(further.searched.graph)) + output,
        bound_ns=bound_ns,
        regions=len(further.searched.graph.regions),
        regions_on_pim=further.regions_on_pim,
        blocks=decoder.layers,
        compiled_blocks=1,
        max_relative_error=max(check.max_relative_error for check in checks),
        bound=max(check.bound for check in checks),
        sure_tokens=0,
        timing_violations=_violations(checks),
    )


def _drawn(network: Network) -> dict[str, np.ndarray]:
    """Inputs of a block: drawn, and nothing of the cache is hidden."""
    inputs = network.example_inputs()
    return inputs | {"attention_mask": np.ones_like(inputs["attention_mask"])}


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
    first: Written = figures["requests"][0]
    return Generation(
        model=language.name,
        tokens=first.tokens,
        text=first.text,
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
