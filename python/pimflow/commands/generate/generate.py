"""Generate text with a language model, token by token; PIM's products run by their commands."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from pimflow import zoo
from pimflow.commands.generate.decode_step import DecodeStep
from pimflow.commands.generate.decoding import (
    Caches,
    CompiledStep,
    Lengths,
    StepRequest,
    StepRunner,
    compile_step,
    shared_regions,
    step_times,
    verification_inputs,
)
from pimflow.commands.generate.devices import TENSOR, DeviceGroup, min_devices
from pimflow.commands.generate.generation import Completion, DecodeCostModel, Generation, StepCosts
from pimflow.commands.generate.language import LanguageModel, open_language_model
from pimflow.commands.generate.options import GenerateOptions
from pimflow.commands.generate.requests import Continuation, GenerationRequest
from pimflow.commands.generate.sampling import Sampler
from pimflow.commands.generate.step_bound import pim_share, shared_bound_ns, weight_times
from pimflow.commands.shared.arguments import public
from pimflow.commands.shared.published_decode import PublishedDecode
from pimflow.commands.shared.search import SearchRequest
from pimflow.commands.shared.search_arguments import SearchArguments
from pimflow.compiler.verification import Verification
from pimflow.core.goal import GoalOptions
from pimflow.core.kernel import ELEMENT_BYTES
from pimflow.errors import InfeasibleError, UsageError
from pimflow.frontend import Network
from pimflow.hardware import System
from pimflow.hardware.link import LinkSpec
from pimflow.host.garbage_collection import release_memory
from pimflow.placement import SearchResult
from pimflow.placement.plan_application import Charges
from pimflow.placement.solvers.capacity import weight_row_bytes
from pimflow.simulators.pim.timing import STRICT
from pimflow.weight_types import plain_type
from pimflow.zoo.language import graph as decoder_graph
from pimflow.zoo.language.decoder import Decoder

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class GenerationJob:
    """What is generated, with checked sizes.

    Attributes
    ----------
    context : int
        Tokens that the caches have room for.
    assume_room : bool
        Whether a shape may take more than the PIM channels have.
    """

    language: LanguageModel
    search_request: SearchRequest
    prompts: list[list[int]]
    continuation: Continuation
    context: int
    batch: int
    assume_room: bool
    group: DeviceGroup
    on_text: Callable[[str], None]
    progress: Progress

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts))

    @property
    def step_lengths(self) -> list[int]:
        """The tokens that each step of a new token attends to."""
        return [self.longest_prompt + number for number in range(1, max(self.continuation.n, 2))]


@public(GenerateOptions, SearchArguments, GoalOptions, without=("target", "plan", "options", "select"))
def generate(
    model: str | os.PathLike[str] | onnx.ModelProto,
    *,
    system: System | None = None,
    on_text: Callable[[str], None] = lambda _: None,
    progress: Progress = lambda _: None,
    **keywords: Any,
) -> Generation:
    """Compile the steps of a language model, run them, and report their times and energies.

    A prompt is one step, and each new token another. The step of a token is compiled once: it writes keys and
    values into resident caches, at the next place of each sequence, and attends to the tokens so far; its
    time and energy are charged for these (`commands.generate.decode_step`). If the model is a graph of
    one token, prompts run token by token. Regions on PIM run by their commands. Each token is the one of
    the largest logit (greedy) unless there is a temperature; see `Sampler`. Of a model whose weights the zoo
    does not have, one block runs on random values, and figures are those of all blocks and the output layer.

    Parameters
    ----------
    model : str, path or ModelProto
        Name of a language model of the zoo, an ONNX decoder with a cache whose inputs have Optimum's names
        (`frontend.onnx_decoder`), a program of PyTorch (`frontend.torch_decoder`), a GGUF file
        (`zoo.language.gguf_decoder`), or a folder of Hugging Face's (`zoo.language.hf_decoder`).
    temperature, top_k, top_p, seed
        How tokens are drawn; see `Sampler`.
    devices, parallel, link
        How many devices share a shape, and how; see `commands.generate.devices.DeviceGroup`.
    on_text : callable
        Called with each new piece of the first sequence's text, or with token numbers if the model has no
        tokenizer.
    system, **keywords
        As for `pimflow.search`.

    Raises
    ------
    UnknownNameError, UsageError
        If there is no such model; for an empty prompt, unknown tokens, or more tokens than `context`.
    InfeasibleError
        If weights and caches of all blocks of a shape do not fit the PIM channels.
    UnsupportedOpError
        If a cache cannot be resident; see `relay_passes.canonical.keep_states`.
    VerificationError
        If logits differ from the reference by more than their bound, or a token differs.
    """
    options = GenerateOptions.pop_from(keywords)
    sampler = Sampler.from_options(options.temperature, options.top_k, options.top_p, options.seed)
    language = open_language_model(model, options.tokenizer, options)
    prompts = language.tokenize_prompts(options.prompt, options.tokens, options.chat)
    continuation = Continuation(options.n, sampler, language.require_stops(options.stop))
    context = _context(language, max(map(len, prompts)), options.n, options.context)
    batch = _sequences(language, len(prompts), options.batch)
    search_request = SearchRequest.from_arguments(system, **keywords).validate()
    search_request.system.require_network_dtype()
    job = GenerationJob(
        language=language,
        search_request=search_request,
        prompts=prompts,
        continuation=continuation,
        context=context,
        batch=batch,
        assume_room=options.assume_room,
        group=DeviceGroup(count=options.devices, parallel=options.parallel, link=LinkSpec.load(options.link)),
        on_text=on_text,
        progress=progress,
    )
    if language.decoder is not None and not language.decoder.has_weights:
        return _estimate_tokens(job, language.decoder)
    if options.devices > 1:
        raise UsageError(f"--devices {options.devices}: only shapes without weights are shared; leave it out")
    if options.assume_room:
        raise UsageError("--assume-room has no effect on a model with weights, which must fit; leave it out")
    return _TokenGenerator(job).generate()


def _sequences(language: LanguageModel, prompts: int, batch: int) -> int:
    """Number of sequences in a batch; raises `UsageError` if prompts, batch and model do not fit."""
    if batch < 1:
        raise UsageError(f"--batch {batch}: give 1 or more")
    if prompts > 1 and batch not in (1, prompts):
        raise UsageError(f"--batch {batch}: each of {prompts} prompts is one sequence; leave it out")
    sequences = max(prompts, batch)
    if language.max_batch is not None and sequences > language.max_batch:
        raise UsageError(
            f"'{language.name}' is a step of {language.max_batch} sequence: give one prompt, and no --batch"
        )
    return sequences


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


class _TokenGenerator:
    """Generates with a model that has weights: every token runs, and its logits are verified."""

    def __init__(self, job: GenerationJob) -> None:
        language, batch, system = job.language, job.batch, job.search_request.system
        self.job = job
        self.requests = [
            GenerationRequest(
                language,
                ids,
                system.dtype,
                job.continuation.with_request(number),
                (lambda _: None) if number else job.on_text,
            )
            for number, ids in enumerate(job.prompts)
        ]
        self.copies = batch // len(self.requests)  # sequences of each request
        self.decode = DecodeStep(
            lambda attended: language.step(attended, 1, batch),
            job.search_request,
            job.context,
            batch,
            language.interface,
            grows=language.fixed_context is None,
        )
        self.checks: list[Verification] = []

    def generate(self) -> Generation:
        """Run the prompt's step and those of all tokens, and verify them."""
        job, language = self.job, self.job.language
        is_single_step = not language.by_token and job.longest_prompt > 1
        caches, ttft = self._run_prompt() if is_single_step else ({}, None)
        step = self._compile_step(caches)
        self._run_steps(step, caches)
        regions, pim_regions = step.regions, step.regions_on_pim
        verifiers = [request.verifier for request in self.requests]
        for verifier in verifiers:
            # in a loop of its own, since all judges share the weights of one reference
            verifier.release_reference()
        del step
        release_memory()
        job.progress("judging logits")
        for verifier in verifiers:
            verifier.verify()
        cost_model = self._cost_model()
        blocks = 0 if language.decoder is None else language.decoder.layers
        return _report(
            job,
            ttft=ttft or cost_model.total(range(1, job.longest_prompt + 1)),
            cost_model=cost_model,
            requests=tuple(request.completion() for request in self.requests),
            held_bytes=_resident_bytes(self.decode.search_result),
            regions=regions,
            regions_on_pim=pim_regions,
            blocks=blocks,
            compiled_blocks=blocks,
            max_relative_error=max(verifier.max_error for verifier in verifiers),
            bound=max(verifier.bound for verifier in verifiers),
            sure_tokens=sum(verifier.certain_tokens for verifier in verifiers),
            timing_violations=_violations(self.checks),
        )

    def _run_prompt(self) -> tuple[Caches, StepCosts]:
        """Run the prompts as one step; returns the caches after it, and its costs."""
        job, longest = self.job, self.job.longest_prompt
        job.progress("compiling the prompt's step")
        attended = longest + job.language.min_cache
        first = compile_step(
            StepRequest(
                job.language.step(attended, longest, job.batch),
                job.search_request,
                Lengths(attended=attended, tokens=longest, batch=job.batch),
            ),
            self._bind_inputs({}, self._next_tokens(longest)),
            job.progress,
            interface=job.language.interface,
        )
        for number, request in enumerate(self.requests):
            logits = self._rows(first.logits, number)[:, len(request.pending_tokens) - 1]
            request.record_step(request.pending_tokens, logits.copy(), first)
        caches, costs = first.caches(), StepCosts.from_search(first.search_result)
        self.checks.append(first.verification)
        del first
        release_memory()  # its weights
        return caches, costs

    def _compile_step(self, caches: Caches) -> CompiledStep:
        """Compile the step of a token."""
        self.job.progress("compiling the step of a token")
        for request in self.requests:
            # compilation needs the memory that the weights of references take
            request.verifier.release_reference()
        step = self.decode.compile(self._bind_inputs(caches, self._next_tokens(1)), self.job.progress)
        self.checks.append(step.verification)
        return step

    def _run_steps(self, step: CompiledStep, caches: Caches) -> None:
        """Run a step for each token, until every request has its tokens."""
        runner = StepRunner(step, caches)
        self.job.progress("generating")
        for request in self.requests:
            request.verify()
        while not all(request.is_done for request in self.requests):
            logits = runner(self._next_tokens(1), self._past_lengths())
            for number, request in enumerate(self.requests):
                if not request.is_done:
                    rows = self._rows(logits, number)[:, -1]
                    request.record_step(request.pending_tokens[:1], rows, step)
                    request.verify()

    def _cost_model(self) -> DecodeCostModel:
        decode, language = self.decode, self.job.language
        return DecodeCostModel(
            step_costs=lambda tokens: StepCosts.from_search(decode.charges(tokens)),
            bound_ns=lambda tokens: shared_bound_ns(
                step_times(decode.search_result, decode.lengths(tokens), language.kv_elements, language.uses),
                pim_share(decode.search_result.system),
            ),
            published=_published(self.job),
            context=self.job.context,
            batch=self.job.batch,
            step_lengths=self.job.step_lengths,
        )

    def _bind_inputs(
        self, caches: Caches, tokens: np.ndarray
    ) -> Callable[[Network], Mapping[str, np.ndarray]]:
        return functools.partial(
            verification_inputs,
            tokens=tokens,
            past_lengths=self._past_lengths(),
            caches=caches,
            roles=self.job.language.interface.roles,
        )

    def _past_lengths(self) -> np.ndarray:
        """Tokens in the cache of each sequence."""
        return np.repeat([request.past_length for request in self.requests], self.copies)

    def _next_tokens(self, count: int) -> np.ndarray:
        """Tokens of a step, [batch, count], with each request's repeated for its sequences."""
        return np.repeat([request.next_tokens(count) for request in self.requests], self.copies, axis=0)

    def _rows(self, values: np.ndarray, number: int) -> np.ndarray:
        """The part of an array, [batch, ...], of one request's sequences."""
        return values[number * self.copies : (number + 1) * self.copies]


def _estimate_tokens(job: GenerationJob, decoder: Decoder) -> Generation:
    """Estimate a model without weights: verify one block, and multiply its costs by the number of blocks."""
    prompt, batch, search_request = job.longest_prompt, job.batch, job.search_request
    model, decoder = decoder, job.group.device_part(decoder)
    job.progress("searching the output")
    head_graph = zoo.blank_matrices(decoder_graph.head_graph(decoder, batch=batch))
    _, _, head = StepRequest(head_graph, search_request, Lengths(attended=1, batch=batch)).place()
    job.progress("searching a block for a token")
    decode = DecodeStep(
        lambda attended: decoder_graph.block_graph(decoder, attended, batch=batch),
        search_request,
        job.context,
        batch,
    )
    block_bytes, output_bytes = _resident_bytes(decode.search_result), _resident_bytes(head)
    held_bytes = job.group.held_bytes(decoder.layers, block_bytes, output_bytes)
    if not job.assume_room and held_bytes > search_request.system.pim_bytes:
        whole = job.group.count if job.group.parallel == TENSOR else 1
        raise _no_room(job, model, held_bytes, whole * block_bytes, whole * output_bytes)
    job.progress("compiling a block for the prompt")
    graph = decoder_graph.block_graph(decoder, prompt, tokens=prompt, batch=batch)
    lengths = Lengths(attended=prompt, tokens=prompt, batch=batch)
    first = compile_step(StepRequest(graph, search_request, lengths), _random_inputs, job.progress)
    job.progress("compiling a block for a token")
    step = decode.compile(_random_inputs, job.progress)
    checks = [first.verification, step.verification]
    model_costs = functools.partial(_model_costs, job, model, StepCosts.from_search(head))
    return _report(
        job,
        ttft=model_costs(first.search_result, rows=prompt * batch),
        cost_model=DecodeCostModel(
            step_costs=lambda tokens: model_costs(decode.charges(tokens), rows=batch),
            bound_ns=functools.partial(_model_bound_ns, job, decoder, decode, head),
            published=_published(job),
            context=job.context,
            batch=batch,
            step_lengths=job.step_lengths,
        ),
        requests=tuple(Completion(prompt_tokens=len(ids), tokens=None, text=None) for ids in job.prompts),
        held_bytes=held_bytes,
        regions=step.regions,
        regions_on_pim=step.regions_on_pim,
        blocks=decoder.layers,
        compiled_blocks=1,
        max_relative_error=max(check.max_relative_error for check in checks),
        bound=max(check.bound for check in checks),
        sure_tokens=0,
        timing_violations=_violations(checks),
    )


def _no_room(
    job: GenerationJob, model: Decoder, held_bytes: int, block_bytes: int, output_bytes: int
) -> InfeasibleError:
    """The error that weights and caches of all blocks do not fit the PIM channels of a device.

    A block and the output layer take so many bytes on one device.
    """
    room_bytes = job.search_request.system.pim_bytes
    count = min_devices(model, block_bytes, output_bytes, room_bytes)
    levers = ["--assume-room, which times banks with as many rows as that takes"]
    if count is not None:
        levers.insert(0, f"--devices {count}, which share the blocks")
    return InfeasibleError(
        f"weights and caches of all blocks of '{job.language.name}' in the PIM channels",
        held_bytes,
        room_bytes,
        "B",
        levers,
    )


def _model_costs(
    job: GenerationJob, model: Decoder, output: StepCosts, block: SearchResult | Charges, rows: int
) -> StepCosts:
    """The costs of a whole model: those of a block for every layer, of the output, and of links.

    Devices that wait have no energy; nor have links, since no source has one.
    """
    device = StepCosts.from_search(block, model.layers, shared_regions(block.graph)) + output
    link_ns = job.group.link_ns(model, rows, ELEMENT_BYTES[job.search_request.system.dtype])
    busy = job.group.count if job.group.parallel == TENSOR else 1  # devices that work at a time
    return StepCosts(
        ns=device.ns + link_ns,
        ns_gpu_only=device.ns_gpu_only + link_ns,
        pj=device.pj * busy,
        pj_gpu_only=device.pj_gpu_only * busy,
    )


def _model_bound_ns(
    job: GenerationJob, decoder: Decoder, decode: DecodeStep, head: SearchResult, tokens: int
) -> float:
    """The lower bound of the time of a step of a whole model."""
    kv_elements = decoder.kv_elements_per_token / decoder.layers
    block = step_times(decode.search_result, decode.lengths(tokens), kv_elements, job.language.uses)
    output = weight_times(head.graph, job.batch, head.system)
    parts = [*(part.scale(decoder.layers) for part in block), *output]
    return shared_bound_ns(parts, pim_share(head.system))


def _resident_bytes(search_result: SearchResult) -> int:
    return weight_row_bytes(search_result.system, search_result.candidates)


def _random_inputs(network: Network) -> dict[str, np.ndarray]:
    """Random inputs of a block, with a mask that hides no token."""
    inputs = network.example_inputs()
    return inputs | {"attention_mask": np.ones_like(inputs["attention_mask"])}


def _weights_in_pim(language: LanguageModel, system: System) -> str | None:
    """How PIM stores weights of narrow types; None if there are none."""
    kinds = dict.fromkeys(language.decoder.weight_types.values()) if language.decoder else {}
    if not kinds:
        return None
    vectors = (language.decoder and language.decoder.activations) or system.dtype
    narrow = [kind for kind in kinds if system.pim.takes(kind, vectors) and system.timing == STRICT]
    widened = ", ".join(kind for kind in kinds if kind not in narrow)
    parts = [f"PIM stores {', '.join(narrow)} as they are"] * bool(narrow)
    parts += [f"PIM stores {widened} widened to {system.dtype}, which its multipliers take"] * bool(widened)
    return "; ".join(parts)


def _violations(checks: Sequence[Verification]) -> int | None:
    """Timing violations of all steps together; None if one step has unknown clocks."""
    counts = [check.timing_violations for check in checks]
    return None if None in counts else sum(count or 0 for count in counts)


def _published(job: GenerationJob) -> PublishedDecode | None:
    """The second baseline; none for several devices, of which nothing is published here."""
    if job.group.count > 1:
        return None
    return PublishedDecode.from_decoder(job.language.decoder, job.search_request.system)


def _cache_in_pim(language: LanguageModel, system: System) -> str | None:
    """How PIM stores caches of a narrow type; None if there are none."""
    kind = language.decoder.cache_type if language.decoder else ""
    if not kind:
        return None
    if system.pim.takes(plain_type(kind), system.dtype) and system.timing == STRICT:
        return f"PIM stores {kind} as it is"
    return f"PIM stores {kind} widened to {system.dtype}, which its multipliers take"


def _report(
    job: GenerationJob, *, ttft: StepCosts, cost_model: DecodeCostModel, **figures: Any
) -> Generation:
    """The report: `figures` are fields of it, and others follow from the times."""
    language, system, group = job.language, job.search_request.system, job.group
    first: Completion = figures["requests"][0]
    mean = cost_model.mean
    return Generation(
        model=language.name,
        tokens=first.tokens,
        text=first.text,
        weights=language.weights + f" to {system.dtype}" * ("widened" in language.weights),
        weights_in_pim=_weights_in_pim(language, system),
        cache=(language.decoder.cache_type if language.decoder else "") or None,
        cache_in_pim=_cache_in_pim(language, system),
        system=system.name,
        gpu=system.gpu.name,
        pim=system.pim.name,
        dtype=system.dtype,
        prompt_tokens=job.longest_prompt,
        context=job.context,
        batch=job.batch,
        ttft_ns=ttft.ns,
        ttft_ns_gpu_only=ttft.ns_gpu_only,
        **vars(mean),
        gpu_published=None if cost_model.published is None else cost_model.published.source,
        tokens_per_s=job.batch / mean.tpot_ns * 1e9,
        tokens_per_s_gpu_only=job.batch / mean.tpot_ns_gpu_only * 1e9,
        lengths=cost_model.lengths,
        full_cache=cost_model.full_step(cost_model.context),
        kv_bytes_per_token=language.kv_bytes(ELEMENT_BYTES[system.dtype]),
        room_bytes=system.pim_bytes,
        devices=f"{group.count} in {group.parallel}, over {group.link.name}" if group.count > 1 else None,
        verified=True,  # else an error was raised
        **figures,
    )
