"""Generate text with a language model, token by token; PIM's products run by their commands."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx

from pimflow.commands.generate.decode_step import DecodeStep
from pimflow.commands.generate.decoding import (
    Lengths,
    StepRunner,
    bound_ns,
    compile_step,
    place_step,
    shared_regions,
    verification_inputs,
    weights_bound_ns,
)
from pimflow.commands.generate.generation import Completion, DecodeCostModel, Generation, StepCosts
from pimflow.commands.generate.language import LanguageModel, open_language_model
from pimflow.commands.generate.requests import GenerationRequest
from pimflow.commands.shared.search import SearchRequest
from pimflow.compiler.verification import Verification
from pimflow.core.region import ELEMENT_BYTES
from pimflow.errors import UsageError
from pimflow.frontend import Network
from pimflow.hardware import System
from pimflow.host.garbage_collection import release_memory
from pimflow.placement import SearchResult
from pimflow.placement.plan_application import Charges
from pimflow.placement.solvers.capacity import weight_row_bytes
from pimflow.zoo.language import graph as decoder_graph
from pimflow.zoo.language.decoder import Decoder

if TYPE_CHECKING:
    from typing import TypedDict

    from typing_extensions import Unpack

    from pimflow.commands.shared.options import GoalKeywords
    from pimflow.placement import Goal, Profiling

    class _Keywords(GoalKeywords, total=False):
        goal: Goal | None
        profiling: Profiling | None

    class _Figures(TypedDict):
        prompt_tokens: int
        context: int
        requests: tuple[Completion, ...]
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
    **keywords: Unpack[_Keywords],
) -> Generation:
    """Compile the steps of a language model, run them, and report their times and energies.

    A prompt is one step, and each new token another. The step of a token is compiled once: it writes keys and
    values into resident caches, at the next place of each sequence, and attends to the tokens so far; its
    time and energy are charged for these (`commands.generate.decode_step`). If the model is a graph of
    one token, prompts run token by token. Regions on PIM run by their commands. Each token is the one of
    the largest logit (greedy). Of a model whose weights the zoo does not have, one block runs on random
    values, and figures are those of all blocks and the output layer.

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
    target_system, **keywords
        As for `pimflow.search`.

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
    prompts = language.tokenize_prompts(prompt, tokens)
    context = _context(language, max(map(len, prompts)), n, context)
    batch = _sequences(len(prompts), batch)
    search_request = SearchRequest.from_arguments(target_system, **keywords).validate()
    search_request.system.require_network_dtype()
    if language.decoder is not None and not language.decoder.has_weights:
        return _estimate_tokens(
            language, language.decoder, search_request, prompts, n, context, batch, progress
        )
    return _generate_tokens(language, search_request, prompts, n, context, batch, on_text, progress)


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
    if language.max_context is not None and context > language.max_context:
        raise UsageError(f"'{language.name}' was made for {language.max_context} tokens, not for {context}")
    return context


def _generate_tokens(
    language: LanguageModel,
    search_request: SearchRequest,
    prompts: list[list[int]],
    n: int,
    context: int,
    batch: int,
    on_text: Callable[[str], None],
    progress: Progress,
) -> Generation:
    """Generate with a model that has weights: every token runs, and its logits are verified."""
    requests = [
        GenerationRequest(
            language, ids, search_request.system.dtype, n, (lambda _: None) if number else on_text
        )
        for number, ids in enumerate(prompts)
    ]
    copies, longest = batch // len(requests), max(map(len, prompts))
    is_single_step = not language.by_token and longest > 1
    step_lengths = [longest + number for number in range(1, max(n, 2))]
    prompt_lengths = [] if is_single_step else list(range(1, longest + 1))

    def bind_inputs(
        caches: Mapping[str, np.ndarray], tokens: np.ndarray
    ) -> Callable[[Network], Mapping[str, np.ndarray]]:
        return functools.partial(
            verification_inputs, tokens=tokens, past_lengths=past_lengths(), caches=caches
        )

    def past_lengths() -> np.ndarray:
        return np.array([request.past_length for request in requests for _ in range(copies)])

    def next_tokens(count: int) -> np.ndarray:
        return _rows([request.next_tokens(count) for request in requests], copies)

    ttft, checks, caches = None, [], {}
    if is_single_step:
        progress("compiling the prompt's step")
        attended = longest + language.min_cache
        lengths = Lengths(attended=attended, tokens=longest, batch=batch)
        graph = language.step(attended, longest, batch)
        first = compile_step(graph, search_request, lengths, bind_inputs({}, next_tokens(longest)), progress)
        for number, request in enumerate(requests):
            rows = first.logits[number * copies : (number + 1) * copies]
            request.record_step(
                request.pending_tokens, rows[:, len(request.pending_tokens) - 1].copy(), first
            )
        caches, ttft = first.caches(), StepCosts.from_search(first.search_result)
        checks.append(first.verification)
        del first
        release_memory()  # its weights
    decode = DecodeStep(
        lambda attended: language.step(attended, 1, batch),
        search_request,
        context,
        batch,
        grows=language.fixed_context is None,
    )
    progress("placing the step of a token")
    search_result = decode.search_result
    progress("compiling the step of a token")
    for request in requests:
        # compilation needs the memory that the weights of references take
        request.verifier.release_reference()
    step = decode.compile(bind_inputs(caches, next_tokens(1)), progress)
    checks.append(step.verification)
    runner = StepRunner(step, caches)
    progress("generating")
    for request in requests:
        request.verify()
    while not all(request.is_done for request in requests):
        logits = runner(next_tokens(1), past_lengths())
        for number, request in enumerate(requests):
            if not request.is_done:
                rows = logits[number * copies : (number + 1) * copies]
                request.record_step(request.pending_tokens[:1], rows[:, -1], step)
                request.verify()
    regions, pim_regions = len(step.search_result.graph.regions), step.regions_on_pim
    verifiers = [request.verifier for request in requests]
    for verifier in verifiers:
        # in a loop of its own, since all judges share the weights of one reference
        verifier.release_reference()
    del step, runner
    release_memory()
    progress("judging logits")
    for verifier in verifiers:
        verifier.verify()
    cost_model = DecodeCostModel(
        step_costs=lambda tokens: StepCosts.from_search(decode.charges(tokens)),
        bound_ns=lambda tokens: bound_ns(
            search_result, decode.lengths(tokens), language.kv_elements, language.uses
        ),
        context=context,
        batch=batch,
        step_lengths=step_lengths,
    )
    return _report(
        language,
        search_request,
        prompt_tokens=longest,
        context=context,
        batch=batch,
        requests=tuple(request.completion() for request in requests),
        ttft=ttft or cost_model.total(prompt_lengths),
        cost_model=cost_model,
        held_bytes=_resident_bytes(search_result),
        regions=regions,
        regions_on_pim=pim_regions,
        blocks=0 if language.decoder is None else language.decoder.layers,
        compiled_blocks=0 if language.decoder is None else language.decoder.layers,
        max_relative_error=max(verifier.max_error for verifier in verifiers),
        bound=max(verifier.bound for verifier in verifiers),
        sure_tokens=sum(verifier.certain_tokens for verifier in verifiers),
        timing_violations=_violations(checks),
    )


def _rows(tokens: Sequence[Sequence[int]], copies: int) -> np.ndarray:
    """Tokens of a step, [batch, n], with each sequence repeated `copies` times."""
    return np.repeat(np.array(tokens), copies, axis=0)


def _estimate_tokens(
    language: LanguageModel,
    decoder: Decoder,
    search_request: SearchRequest,
    prompts: list[list[int]],
    n: int,
    context: int,
    batch: int,
    progress: Progress,
) -> Generation:
    """Estimate a model without weights: verify one block, and multiply its costs by the number of blocks."""
    prompt = max(map(len, prompts))
    step_lengths = [prompt + number for number in range(1, max(n, 2))]
    progress("compiling a block for the prompt")
    graph = decoder_graph.block_graph(decoder, prompt, tokens=prompt, batch=batch)
    lengths = Lengths(attended=prompt, tokens=prompt, batch=batch)
    first = compile_step(graph, search_request, lengths, _random_inputs, progress)
    decode = DecodeStep(
        lambda attended: decoder_graph.block_graph(decoder, attended, batch=batch),
        search_request,
        context,
        batch,
    )
    progress("compiling a block for a token")
    step = decode.compile(_random_inputs, progress)
    checks = [first.verification, step.verification]
    progress("searching the output")
    _, _, head = place_step(
        decoder_graph.head_graph(decoder, batch=batch), search_request, Lengths(attended=1, batch=batch)
    )
    output = StepCosts.from_search(head)

    def model_costs(search_result: SearchResult | Charges) -> StepCosts:
        return (
            StepCosts.from_search(search_result, decoder.layers, shared_regions(search_result.graph)) + output
        )

    search_result, kv_elements = decode.search_result, language.kv_elements / decoder.layers
    cost_model = DecodeCostModel(
        step_costs=lambda tokens: model_costs(decode.charges(tokens)),
        bound_ns=lambda tokens: (
            decoder.layers * bound_ns(search_result, decode.lengths(tokens), kv_elements, language.uses)
            + weights_bound_ns(head, batch)
        ),
        context=context,
        batch=batch,
        step_lengths=step_lengths,
    )
    return _report(
        language,
        search_request,
        prompt_tokens=prompt,
        context=context,
        batch=batch,
        requests=tuple(Completion(prompt_tokens=len(ids), tokens=None, text=None) for ids in prompts),
        ttft=model_costs(first.search_result),
        cost_model=cost_model,
        held_bytes=decoder.layers * _resident_bytes(search_result) + _resident_bytes(head),
        regions=len(step.search_result.graph.regions),
        regions_on_pim=step.regions_on_pim,
        blocks=decoder.layers,
        compiled_blocks=1,
        max_relative_error=max(check.max_relative_error for check in checks),
        bound=max(check.bound for check in checks),
        sure_tokens=0,
        timing_violations=_violations(checks),
    )


def _resident_bytes(search_result: SearchResult) -> int:
    return weight_row_bytes(search_result.system, search_result.candidates)


def _random_inputs(network: Network) -> dict[str, np.ndarray]:
    """Random inputs of a block, with a mask that hides no token."""
    inputs = network.example_inputs()
    return inputs | {"attention_mask": np.ones_like(inputs["attention_mask"])}


def _violations(checks: Sequence[Verification]) -> int | None:
    """Timing violations of all steps together; None if one step has unknown clocks."""
    counts = [check.timing_violations for check in checks]
    return None if None in counts else sum(count or 0 for count in counts)


def _report(
    language: LanguageModel,
    search_request: SearchRequest,
    *,
    batch: int,
    ttft: StepCosts,
    cost_model: DecodeCostModel,
    **figures: Unpack[_Figures],
) -> Generation:
    """The report, with the figures that follow from the times."""
    system = search_request.system
    first: Completion = figures["requests"][0]
    mean = cost_model.mean
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
        lengths=cost_model.lengths,
        full_cache=cost_model.full_step(cost_model.context),
        kv_bytes_per_token=language.kv_elements * ELEMENT_BYTES[system.dtype],
        room_bytes=system.pim.bytes_per_channel * system.pim_channels,
        verified=True,  # else an error was raised
        **figures,
    )
