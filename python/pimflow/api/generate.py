"""Generate text with a language model, token by token; PIM's products run by their commands."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx

from pimflow.api.decode_step import DecodeStep
from pimflow.api.decoding import (
    Lengths,
    Runner,
    bound_ns,
    compiled_step,
    done_once,
    placed_step,
    verified_inputs,
    weights_bound_ns,
)
from pimflow.api.generation import Charged, Generation, Times, Written
from pimflow.api.language import LanguageModel, open_language_model
from pimflow.api.requests import Request
from pimflow.api.search import Question
from pimflow.compiler.verification import Verification
from pimflow.core.region import ELEMENT_BYTES
from pimflow.errors import UsageError
from pimflow.frontend import Network
from pimflow.hardware import System
from pimflow.host.garbage_collection import give_back
from pimflow.placement import Searched
from pimflow.placement.given_plan import Charges
from pimflow.placement.solvers.capacity import held_bytes
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
        held_bytes: int
        regions: int
        regions_on_pim: int
        blocks: int
        compiled_blocks: int
        max_relative_error: float
        bound: float
        sure_tokens: int
        timing_violations: int | None


Progress = Callable[[str], None]


# Most of its lines are the signature and the description of each argument.
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
    """Compile the steps of a language model, run them, and report their times and energies.

    A prompt is one step, and each new token another. The step of a token is compiled once: it writes keys and
    values into resident caches, at the next place of each sequence, and attends to the tokens so far; its
    time and energy are charged for these (`api.decode_step`). If the model is a graph of one token, prompts
    run token by token. Regions on PIM run by their commands. Each token is the one of the largest logit
    (greedy). Of a model whose weights the zoo does not have, one block runs on random values, and figures are
    those of all blocks and the output layer.

    Parameters
    ----------
    model : str, path or ModelProto
        Name of a language model of the zoo, an ONNX decoder with a cache whose inputs have Optimum's names
        (`frontend.onnx_decoder`), or a GGUF file of the Llama family (`zoo.language.gguf_file`).
    n : int
        Number of new tokens; fewer if the model ends its text.
    prompt, tokens : str, sequence of int
        The prompt, as text or as tokens. Or several prompts of one kind, of any lengths, run as a batch.
    context : int, optional
        Tokens that the caches have room for: the longest prompt and the new ones by default.
    batch : int
        Number of sequences, all from one prompt; of several prompts each is a sequence.
    on_text : callable
        Called with each new piece of the first sequence's text, or with token numbers if the model has no
        tokenizer.
    target_system, **question
        As for `api.search.search`.

    Raises
    ------
    UnknownNameError, UsageError
        If there is no such model; for an empty prompt, unknown tokens, or more tokens than `context`.
    UnsupportedOpError
        If a cache cannot be resident; see `relay_passes.canonical.keep_states`.
    VerificationError
        If logits differ from the reference by more than their bound, or a token differs.
    """
    language = open_language_model(model)
    prompts = language.prompts_of(prompt, tokens)
    context = _context(language, max(map(len, prompts)), n, context)
    batch = _sequences(len(prompts), batch)
    asked_for = Question.of(target_system, **question).checked()
    asked_for.system.require_network_dtype()
    if language.decoder is not None and not language.decoder.has_weights:
        return _estimated(language, language.decoder, asked_for, prompts, n, context, batch, progress)
    return _generated(language, asked_for, prompts, n, context, batch, on_text, progress)


def _sequences(prompts: int, batch: int) -> int:
    """Number of sequences in a batch; raises `UsageError` if prompts and batch do not fit."""
    if batch < 1:
        raise UsageError(f"--batch {batch}: give 1 or more")
    if prompts > 1 and batch not in (1, prompts):
        raise UsageError(f"--batch {batch}: each of {prompts} prompts is one sequence; leave it out")
    return max(prompts, batch)


def _context(language: LanguageModel, prompt: int, n: int, context: int | None) -> int:
    """Places of the caches; raises `UsageError` if prompt and new tokens do not fit."""
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
    """Generate with a model that has weights: every token runs, and its logits are verified."""
    requests = [
        Request(language, ids, question.system.dtype, n, (lambda _: None) if number else on_text)
        for number, ids in enumerate(prompts)
    ]
    copies, longest = batch // len(requests), max(map(len, prompts))
    at_once = not language.by_token and longest > 1
    further = [longest + number for number in range(1, max(n, 2))]
    alone = [] if at_once else list(range(1, longest + 1))

    def verified(
        caches: Mapping[str, np.ndarray], tokens: np.ndarray
    ) -> Callable[[Network], Mapping[str, np.ndarray]]:
        return functools.partial(verified_inputs, tokens=tokens, held=held(), caches=caches)

    def held() -> np.ndarray:
        return np.array([request.held for request in requests for _ in range(copies)])

    def padded(count: int) -> np.ndarray:
        return _rows([request.padded(count) for request in requests], copies)

    ttft, checks, caches = None, [], {}
    if at_once:
        progress("compiling the prompt's step")
        attended = longest + language.least_cache
        lengths = Lengths(attended=attended, tokens=longest, batch=batch)
        graph = language.step(attended, longest, batch)
        first = compiled_step(graph, question, lengths, verified({}, padded(longest)), progress)
        for number, request in enumerate(requests):
            rows = first.logits[number * copies : (number + 1) * copies]
            request.take(request.pending, rows[:, len(request.pending) - 1].copy(), first)
        caches, ttft = first.caches(), Times.of(first.searched)
        checks.append(first.verification)
        del first
        give_back()  # its weights
    decode = DecodeStep(
        lambda attended: language.step(attended, 1, batch),
        question,
        context,
        batch,
        grows=language.fixed_context is None,
    )
    progress("placing the step of a token")
    searched = decode.searched
    progress("compiling the step of a token")
    for request in requests:
        request.judge.rest()  # compilation needs the memory that the weights of references take
    step = decode.compiled(verified(caches, padded(1)), progress)
    checks.append(step.verification)
    runner = Runner(step, caches)
    progress("generating")
    for request in requests:
        request.compare()
    while not all(request.done for request in requests):
        logits = runner(padded(1), held())
        for number, request in enumerate(requests):
            if not request.done:
                rows = logits[number * copies : (number + 1) * copies]
                request.take(request.pending[:1], rows[:, -1], step)
                request.compare()
    regions, on_pim = len(step.searched.graph.regions), step.regions_on_pim
    judges = [request.judge for request in requests]
    for judge in judges:
        judge.rest()  # in a loop of its own, since all judges share the weights of one reference
    del step, runner
    give_back()
    progress("judging logits")
    for judge in judges:
        judge.settle()
    charged = Charged(
        times=lambda tokens: Times.of(decode.charges(tokens)),
        bound_ns=lambda tokens: bound_ns(
            searched, decode.lengths(tokens), language.kv_elements, language.uses
        ),
        context=context,
        batch=batch,
        further=further,
    )
    return _report(
        language,
        question,
        prompt_tokens=longest,
        context=context,
        batch=batch,
        requests=tuple(request.written() for request in requests),
        ttft=ttft or charged.together(alone),
        charged=charged,
        held_bytes=_held_bytes(searched),
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
    """Tokens of a step, [batch, n], with each sequence repeated `copies` times."""
    return np.repeat(np.array(tokens), copies, axis=0)


def _estimated(
    language: LanguageModel,
    decoder: Decoder,
    question: Question,
    prompts: list[list[int]],
    n: int,
    context: int,
    batch: int,
    progress: Progress,
) -> Generation:
    """Estimate a model without weights: verify one block, and multiply its costs by the number of blocks."""
    prompt = max(map(len, prompts))
    further = [prompt + number for number in range(1, max(n, 2))]
    progress("compiling a block for the prompt")
    graph = decoder_graph.block_graph(decoder, prompt, tokens=prompt, batch=batch)
    lengths = Lengths(attended=prompt, tokens=prompt, batch=batch)
    first = compiled_step(graph, question, lengths, _drawn, progress)
    decode = DecodeStep(
        lambda attended: decoder_graph.block_graph(decoder, attended, batch=batch), question, context, batch
    )
    progress("compiling a block for a token")
    step = decode.compiled(_drawn, progress)
    checks = [first.verification, step.verification]
    progress("searching the output")
    _, _, head = placed_step(
        decoder_graph.head_graph(decoder, batch=batch), question, Lengths(attended=1, batch=batch)
    )
    output = Times.of(head)

    def whole(searched: Searched | Charges) -> Times:
        return Times.of(searched, decoder.layers, done_once(searched.graph)) + output

    searched, kv_elements = decode.searched, language.kv_elements / decoder.layers
    charged = Charged(
        times=lambda tokens: whole(decode.charges(tokens)),
        bound_ns=lambda tokens: (
            decoder.layers * bound_ns(searched, decode.lengths(tokens), kv_elements, language.uses)
            + weights_bound_ns(head, batch)
        ),
        context=context,
        batch=batch,
        further=further,
    )
    return _report(
        language,
        question,
        prompt_tokens=prompt,
        context=context,
        batch=batch,
        requests=tuple(Written(prompt_tokens=len(ids), tokens=None, text=None) for ids in prompts),
        ttft=whole(first.searched),
        charged=charged,
        held_bytes=decoder.layers * _held_bytes(searched) + _held_bytes(head),
        regions=len(step.searched.graph.regions),
        regions_on_pim=step.regions_on_pim,
        blocks=decoder.layers,
        compiled_blocks=1,
        max_relative_error=max(check.max_relative_error for check in checks),
        bound=max(check.bound for check in checks),
        sure_tokens=0,
        timing_violations=_violations(checks),
    )


def _held_bytes(searched: Searched) -> int:
    return held_bytes(searched.system, searched.candidates)


def _drawn(network: Network) -> dict[str, np.ndarray]:
    """Random inputs of a block, with a mask that hides no token."""
    inputs = network.example_inputs()
    return inputs | {"attention_mask": np.ones_like(inputs["attention_mask"])}


def _violations(checks: Sequence[Verification]) -> int | None:
    """Timing violations of all steps together; None if one step has unknown clocks."""
    found = [check.timing_violations for check in checks]
    return None if None in found else sum(each or 0 for each in found)


def _report(
    language: LanguageModel,
    question: Question,
    *,
    batch: int,
    ttft: Times,
    charged: Charged,
    **figures: Unpack[_Figures],
) -> Generation:
    """The report, with the figures that follow from the times."""
    system = question.system
    first: Written = figures["requests"][0]
    mean = charged.mean
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
        **vars(mean),
        tokens_per_s=batch / mean.tpot_ns * 1e9,
        tokens_per_s_gpu_only=batch / mean.tpot_ns_gpu_only * 1e9,
        lengths=charged.lengths,
        full_cache=charged.over(charged.context),
        kv_bytes_per_token=language.kv_elements * ELEMENT_BYTES[system.dtype],
        room_bytes=system.pim.bytes_per_channel * system.pim_channels,
        verified=True,  # else an error was raised
        **figures,
    )
