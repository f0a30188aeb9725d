"""Open language models of all sources: steps as networks, a reference, and a tokenizer."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Protocol, TypeVar, cast

import numpy as np
import onnx

from pimflow import zoo
from pimflow.commands.generate.decoding import OWN_NAMES, StepInterface
from pimflow.commands.generate.options import WeightOptions
from pimflow.compiler.conditioning import RUNS
from pimflow.errors import UnknownNameError, UsageError, is_utf8
from pimflow.frontend import onnx_decoder, torch_decoder
from pimflow.frontend.exported_decoder import PLACES, ExportedDecoder, ExportedReference
from pimflow.frontend.onnx_runtime import reference_with_roundings
from pimflow.frontend.reference import Fp16Storage
from pimflow.frontend.torch_program import TorchProgram
from pimflow.zoo.language import graph, hf_tokens
from pimflow.zoo.language.chat_template import ChatTemplate, folder_template
from pimflow.zoo.language.decoder import Decoder
from pimflow.zoo.language.decoder_files import is_decoder_file, read_decoder, read_tokenizer, storage_types
from pimflow.zoo.language.reference import ReferenceDecoder
from pimflow.zoo.language.tokens import ByteTokens, Tokenizer


class TokenReference(Protocol):
    """Reference logits of one sequence, computed by code that shares nothing with pimflow's."""

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Append tokens [n] to the sequence; returns their logits [n, vocabulary]."""


PerturbedLogits = Callable[[frozenset[str], np.ndarray], Iterator[np.ndarray]]
StepGraphFunction = Callable[[int, int, int], onnx.ModelProto | TorchProgram]


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """A decoder that can be compiled, run token by token, and verified.

    Attributes
    ----------
    max_context : int or None
        Longest context that it supports; None if unknown.
    uses : int
        Query heads that read an element of the cache.
    step : callable
        Gives the network of a step, for the tokens that its last token attends to, the tokens of each
        sequence, and the number of sequences.
    reference : callable
        Creates a `TokenReference`; references in use share their weights.
    perturbed_logits : callable
        For names of layers on PIM and a sequence of tokens: yields the logits after each token several times,
        each time with other roundings of the layers' results.
    tokenizer : Tokenizer, optional
        None where tokens stand for themselves.
    chat_template : ChatTemplate, optional
        What it reads around what a user says.
    weights : str
        Source of its weights, and their storage type.
    interface : StepInterface
        The names of inputs and results of a step.
    decoder : Decoder, optional
        The model as data, where it has that form.
    by_token : bool
        Whether the graph of a step takes one token only: then prompts run token by token.
    fixed_context : int, optional
        Of a model whose cache has a fixed length: that length, and the step's token.
    max_batch : int or None
        Largest number of sequences; None if any.
    min_cache : int
        Smallest number of cache places, in use or not, that a step needs.
    error_hint : str
        Hint for the message of an error: a possible reason of wrong logits.
    """

    name: str
    vocabulary: int
    max_context: int | None
    kv_elements: int
    uses: int
    step: StepGraphFunction
    reference: Callable[[], TokenReference]
    perturbed_logits: PerturbedLogits
    tokenizer: Tokenizer | None
    weights: str
    interface: StepInterface = OWN_NAMES
    chat_template: ChatTemplate | None = None
    ends: frozenset[int] = frozenset()
    decoder: Decoder | None = None
    by_token: bool = False
    fixed_context: int | None = None
    max_batch: int | None = None
    min_cache: int = 0
    error_hint: str = ""

    def kv_bytes(self, element_bytes: int) -> int:
        """Bytes of a token in the cache, on a system whose elements have so many."""
        if self.decoder is not None:
            return self.decoder.kv_bytes_per_token(element_bytes)
        return self.kv_elements * element_bytes

    def tokenize_prompts(
        self,
        prompt: str | Sequence[str] | None,
        tokens: Sequence[int] | Sequence[Sequence[int]] | None,
        chat: bool = False,
    ) -> list[list[int]]:
        """Tokenize one prompt or several, through the chat template if `chat`; raises as `tokenize`."""
        prompts = [prompt] if prompt is None or isinstance(prompt, str) else list(prompt) or [""]
        is_batch = tokens is not None and len(tokens) > 0 and not isinstance(tokens[0], Integral)
        ids = cast("Sequence[Sequence[int] | None]", tokens if is_batch else [tokens])
        if len(prompts) > 1 and tokens is not None:
            return [self.tokenize(prompts[0], ids[0])]  # raises, since both are given
        return [self.tokenize(text, numbers, chat) for text in prompts for numbers in ids]

    def require_stops(self, stop: str | Sequence[str] | None) -> tuple[str, ...]:
        """The texts before which a text ends; raises `UsageError` for an empty one or no tokenizer."""
        stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
        if stops and self.tokenizer is None:
            raise UsageError(f"--stop {stops[0]}: '{self.name}' comes without a tokenizer; give --tokenizer")
        if "" in stops:
            raise UsageError("--stop: give a text that is not empty")
        return stops

    def tokenize(self, prompt: str | None, tokens: Sequence[int] | None, chat: bool = False) -> list[int]:
        """Tokenize a prompt, or check its tokens.

        Raises
        ------
        UsageError
            If there is no prompt or both forms of it, text for a model without a tokenizer, or an unknown
            token.
        """
        if (prompt is None) == (tokens is None):
            raise UsageError("give a prompt: --prompt TEXT, or --tokens with the numbers of its tokens")
        if prompt is not None and self.tokenizer is None:
            raise UsageError(
                f"'{self.name}' comes without a tokenizer: give --tokens instead of --prompt, or --tokenizer"
            )
        if chat and (prompt is None or self.chat_template is None):
            what = f"'{self.name}' has no chat template" if prompt is not None else "what a user says is text"
            raise UsageError(f"--chat: {what}; {'leave it out' if prompt is not None else 'give --prompt'}")
        if prompt is not None:
            assert self.tokenizer is not None
            if not is_utf8(prompt):
                raise UsageError(f"--prompt {prompt!a}: is no text in UTF-8")
            if chat:
                assert self.chat_template is not None
                ids = self.tokenizer.encode(self.chat_template.render(prompt), special=False)
            else:
                ids = self.tokenizer.encode(prompt)
        else:
            ids = [int(token) for token in tokens or ()]
        if not ids:
            raise UsageError("the prompt is empty; give at least one token")
        for token in ids:
            if not 0 <= token < self.vocabulary:
                raise UsageError(
                    f"token {token} is none of '{self.name}', which has 0 to {self.vocabulary - 1}"
                )
        return ids


def open_language_model(
    model: str | os.PathLike[str] | onnx.ModelProto,
    tokenizer: str | os.PathLike[str] | None = None,
    types: WeightOptions | None = None,
) -> LanguageModel:
    """Open a language model of the zoo, of an ONNX, PyTorch or GGUF file, or of a folder of Hugging Face's.

    Parameters
    ----------
    tokenizer : path, optional
        A ``tokenizer.json``, or the folder with it, in place of the model's own or of the one beside it.
    types : WeightOptions, optional
        In which weights of the zoo, inputs of products and caches are stored; by default those of the system.

    Raises
    ------
    UnknownNameError
        If there is none of that name.
    UsageError
        If a weight is not of whole blocks of the type, or a file is given one.
        If it is a network of the zoo that is no language model, or tokenizers cannot be read here.
    ModelError
        If the file cannot be read, or has no cache.
    """
    language = _open_model(model, types or WeightOptions())
    if tokenizer is not None:
        return _with_tokenizer(language, Path(tokenizer), required=True)
    is_file = not isinstance(model, onnx.ModelProto) and Path(model).suffix in (".onnx", ".pt2")
    beside = Path(str(model)).parent / hf_tokens.FILE if is_file else None
    return _with_tokenizer(language, beside) if beside and beside.is_file() else language


def _with_tokenizer(language: LanguageModel, path: Path, *, required: bool = False) -> LanguageModel:
    """`language` with a tokenizer of Hugging Face's, and what the files beside that say of chats and ends."""
    path = path / hf_tokens.FILE if path.is_dir() else path
    tokenizer = hf_tokens.read_tokens(path, language.vocabulary)
    if tokenizer is None and required:
        reason = (
            "no such file" if not path.is_file() else "needs the library tokenizers: pip install tokenizers"
        )
        raise UsageError(f"--tokenizer {path}: {reason}")
    return replace(
        language,
        tokenizer=tokenizer,
        chat_template=folder_template(path.parent),
        ends=hf_tokens.end_tokens(path.parent, language.vocabulary),
    )


def _open_model(model: str | os.PathLike[str] | onnx.ModelProto, types: WeightOptions) -> LanguageModel:
    cache_type = types.kv_cache_dtype
    for flag, kind in (("--weight-type", types.weight_type), ("--activation-type", types.activation_type)):
        if kind != "fp16" and not (isinstance(model, str) and model in zoo.all_names()):
            raise UsageError(f"{flag} {kind}: a file keeps its own types of weights; leave it out")
    if not isinstance(model, onnx.ModelProto) and is_decoder_file(Path(model)):
        return _from_file(Path(model), cache_type)
    if isinstance(model, str) and model in zoo.decoder_names():
        return _from_zoo(zoo.decoder(model).with_types(types.weight_type, types.activation_type, cache_type))
    if cache_type != "fp16":
        raise UsageError(
            f"--kv-cache-dtype {cache_type}: give a language model of the zoo, a .gguf file or a folder; an "
            "exported decoder keeps its caches"
        )
    if isinstance(model, onnx.ModelProto) or Path(model).suffix == ".onnx":
        return _from_exported(onnx_decoder.open_decoder(model))
    if Path(model).suffix == ".pt2":
        return _from_exported(torch_decoder.open_decoder(model))
    if isinstance(model, str) and model in zoo.names():
        decoders = ", ".join(zoo.decoder_names())
        raise UsageError(f"'{model}' is no language model; those of the zoo are {decoders}")
    if Path(model).is_dir():
        raise UsageError(
            f"'{model}' is a directory without a config.json; give one, a file, or a name of the zoo"
        )
    raise UnknownNameError("language model", str(model), zoo.decoder_names())


_Reference = TypeVar("_Reference", bound=TokenReference)


def _share_weights(begin: Callable[[_Reference | None], _Reference]) -> Callable[[], TokenReference]:
    """Return a function that creates references, each with the weights of one that is still in use."""
    references: list[weakref.ref[_Reference]] = []

    def begin_reference() -> _Reference:
        """Create a reference."""
        reference = begin(references[0]() if references else None)
        references[:] = [weakref.ref(reference)]
        return reference

    return begin_reference


def _from_zoo(decoder: Decoder) -> LanguageModel:
    tokenizer = ByteTokens() if decoder.text == "bytes" else None
    source = "trained" if decoder.trained else "drawn"
    types = ", ".join(dict.fromkeys(decoder.weight_types.values()))
    types += f" times {decoder.activations}" if decoder.activations else ""
    return _from_decoder(decoder, tokenizer, f"{source}, {types}" if types else source)


def _from_file(path: Path, cache_type: str) -> LanguageModel:
    decoder = read_decoder(path).with_types(kv_cache_dtype=cache_type)
    tokenizer, ends, template = read_tokenizer(path, decoder.vocabulary)
    weights = storage_types(decoder.file) + ("" if decoder.weight_types else ", widened")
    language = _from_decoder(decoder, tokenizer, weights)
    return replace(language, ends=ends, chat_template=template)


def _from_decoder(decoder: Decoder, tokenizer: Tokenizer | None, weights: str) -> LanguageModel:
    def step(context: int, tokens: int, batch: int) -> onnx.ModelProto:
        return graph.step_graph(decoder, context, tokens=tokens, batch=batch)

    def reference(previous: ReferenceDecoder | None) -> ReferenceDecoder:
        return ReferenceDecoder(decoder, previous.weights if previous else zoo.decoder_weights(decoder))

    return LanguageModel(
        name=decoder.name,
        vocabulary=decoder.vocabulary,
        max_context=decoder.max_context,
        kv_elements=decoder.kv_elements_per_token,
        uses=decoder.group,
        step=step,
        reference=_share_weights(reference),
        perturbed_logits=lambda layers, tokens: _single_step_logits(step, layers, tokens, 0),
        tokenizer=tokenizer,
        weights=weights,
        decoder=decoder,
    )


def _from_exported(decoder: ExportedDecoder) -> LanguageModel:
    def stepwise_logits(layers: frozenset[str], tokens: np.ndarray) -> Iterator[np.ndarray]:
        """Logits after each of `tokens`, computed token by token, with random roundings."""
        begin = decoder.reference_with_roundings(tokens.size, layers)
        for _ in range(RUNS):
            yield begin().step(tokens)

    def reference(previous: ExportedReference | None) -> ExportedReference:
        return ExportedReference(decoder, previous.run if previous else decoder.run())

    def single_step_logits(layers: frozenset[str], tokens: np.ndarray) -> Iterator[np.ndarray]:
        return _single_step_logits(decoder.step, layers, tokens, 1)

    has_positions = PLACES in decoder.roles.values() or decoder.counted
    return LanguageModel(
        name=decoder.name,
        vocabulary=decoder.vocabulary,
        max_context=decoder.context,
        fixed_context=decoder.context,
        kv_elements=decoder.kv_elements,
        uses=decoder.uses,
        step=decoder.step,
        reference=_share_weights(reference),
        perturbed_logits=stepwise_logits if decoder.tokens == 1 else single_step_logits,
        by_token=decoder.tokens == 1,
        tokenizer=None,
        weights="of the file",
        interface=StepInterface(roles=decoder.roles, logits=decoder.logits),
        max_batch=decoder.max_batch,
        min_cache=1,
        error_hint=""
        if has_positions
        else f"; if it works out positions from lengths, export it with '{PLACES}'",
    )


def _single_step_logits(
    step: StepGraphFunction, layers: frozenset[str], tokens: np.ndarray, min_cache: int
) -> Iterator[np.ndarray]:
    """Logits after each of `tokens`, computed in one step without a cache, with random roundings."""
    n = tokens.size
    graph = step(n + min_cache, n, 1)
    assert isinstance(graph, onnx.ModelProto)  # a program of PyTorch draws roundings by itself
    model = zoo.load_model(graph, seed=None)
    inputs = {
        "input_ids": tokens[None],
        "attention_mask": (np.arange(n + min_cache) >= min_cache)[None],
        "position_ids": np.arange(n)[None],
    }
    values = {
        name: np.asarray(inputs.get(name, np.zeros(shape)), dtype)
        for name, (shape, dtype) in zoo.input_types(model).items()
    }
    logits = [output.name for output in model.graph.output].index("logits")
    run = reference_with_roundings(lambda: model, Fp16Storage(layers=layers))
    for _ in range(RUNS):
        yield run(values)[logits][0]
