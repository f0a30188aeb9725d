"""Steps of a language model, compiled by the normal path, and run with their cache from one to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import tvm

from pimflow.api import prepare
from pimflow.api.search import Question
from pimflow.compiler import build
from pimflow.compiler.build import Build
from pimflow.compiler.verification import Verification, require_finite, verify
from pimflow.core.region import ELEMENT_BYTES
from pimflow.core.stages import whole_name
from pimflow.frontend import Network
from pimflow.pim_backend.runtime import targets
from pimflow.placement import Searched
from pimflow.simulators.pim.bound import row_limited_ns

PAST, PRESENT = "past_key_values.", "present."


class Cache:
    """Keys and values of a number of sequences, in the order of their tokens.

    What a step gives back becomes what the next one takes: its last tokens, with zeros before them where
    there are fewer.

    Attributes
    ----------
    length : int
        Tokens that it holds.
    """

    def __init__(self) -> None:
        self.length = 0
        self._present: dict[str, np.ndarray] = {}

    def past(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """What a step reads as input `name` of `shape`, [batch, heads, tokens, head_size]."""
        found = self._present.get(name)
        have = 0 if found is None else found.shape[2]
        wanted = shape[2]
        if found is not None and have >= wanted:
            return np.ascontiguousarray(found[:, :, have - wanted :])
        padded = np.zeros(shape, np.float32)
        if found is not None:
            padded[:, :, wanted - have :] = found
        return padded

    def keep(self, outputs: Mapping[str, np.ndarray], tokens: int) -> None:
        """What a step of so many tokens gave back, by name."""
        self._present = {
            PAST + name.removeprefix(PRESENT): value
            for name, value in outputs.items()
            if name.startswith(PRESENT)
        }
        self.length += tokens


def step_inputs(
    kinds: Mapping[str, tuple[tuple[int, ...], str]], tokens: np.ndarray, cache: Cache
) -> dict[str, np.ndarray]:
    """Inputs of a step by name, as `kinds` has their shapes and types, of tokens [batch, n] after `cache`."""
    held, (batch, new) = cache.length, tokens.shape
    mask = np.zeros((batch, kinds["attention_mask"][0][1]), np.int64)
    mask[:, mask.shape[1] - held - new :] = 1
    places = np.tile(np.arange(held, held + new), (batch, 1))
    own = {"input_ids": tokens, "attention_mask": mask, "position_ids": places}
    return {
        name: cache.past(name, shape) if name.startswith(PAST) else own[name].astype(dtype)
        for name, (shape, dtype) in kinds.items()
    }


@dataclass(frozen=True, kw_only=True)
class Step:
    """Some tokens after a cache, searched, built and verified.

    Attributes
    ----------
    context, tokens, batch : int
        Tokens that the last one attends to, tokens of the step, and sequences at once.
    kinds : dict of str to (tuple of int, str)
        Shape and dtype of every input.
    outputs : tuple of str
        Names of its results, in order.
    verification : Verification
        Of one run: every PIM region, all outputs, commands and their times.
    """

    context: int
    tokens: int
    batch: int
    kinds: dict[str, tuple[tuple[int, ...], str]]
    outputs: tuple[str, ...]
    searched: Searched
    built: Build
    verification: Verification

    @property
    def layers_on_pim(self) -> frozenset[str]:
        """Layers that PIM does, or a part of."""
        return frozenset(whole_name(program.region) for program in self.built.programs.values())

    def bound_ns(self, kv_elements: float, uses: int) -> float:
        """Least time of PIM for the step: its products with weights, and `uses` of each element of the cache.

        The cache has `kv_elements` for each token of the context and each sequence.
        """
        system = self.searched.system
        cache_bytes = kv_elements * ELEMENT_BYTES[system.dtype] * self.context * self.batch
        cached = row_limited_ns(cache_bytes, uses * self.tokens, system.pim, system.pim_channels)
        return weights_bound_ns(self.searched, self.batch * self.tokens) + cached


def weights_bound_ns(searched: Searched, uses: int) -> float:
    """Least time of PIM for a network's products with weights, of which each is used so often."""
    system = searched.system
    geometries = [region.geometry for region in searched.graph.regions if region.geometry]
    weight_bytes = sum(g.oc * g.reduction for g in geometries) * ELEMENT_BYTES[system.dtype]
    return row_limited_ns(weight_bytes, uses, system.pim, system.pim_channels)


class Runner:
    """Runs a step again and again: what it was compiled to stays loaded."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self._executor = step.built.module["default"](step.built.device)

    def __call__(self, tokens: np.ndarray, cache: Cache) -> np.ndarray:
        """Logits of the last of `tokens`, [batch, vocabulary]: of the same ones in each sequence.

        They are in `cache` then.
        """
        step = self.step
        given = step_inputs(step.kinds, np.tile(tokens, (step.batch, 1)), cache)
        for name, value in given.items():
            self._executor["set_input"](name, tvm.runtime.tensor(np.asarray(value, order="C")))
        self._executor["run"]()
        named = {name: self._executor["get_output"](i).numpy() for i, name in enumerate(step.outputs)}
        cache.keep(named, step.tokens)
        logits: np.ndarray = named["logits"][:, -1]
        return logits


def compiled_step(
    graph: onnx.ModelProto,
    question: Question,
    lengths: tuple[int, int, int],
    inputs: Callable[[Network], Mapping[str, np.ndarray]],
    progress: Callable[[str], None],
) -> Step:
    """A step of a decoder, searched and built for the CPU that stands in for the GPU, and verified.

    Parameters
    ----------
    lengths : tuple of int
        `Step.context`, `tokens` and `batch`.
    inputs : callable
        What it is verified on.

    Raises
    ------
    VerificationError
        If it does not compute what it should.
    """
    network, prepared, searched = placed_step(graph, question)
    built = build.build(prepared, searched, targets.named_target(question.target))
    progress("verifying")
    given = inputs(network)
    expected = network.reference(given)
    require_finite(expected)
    verification = verify(prepared, built, searched.system, given, expected)
    verification.require()
    context, tokens, batch = lengths
    return Step(
        context=context,
        tokens=tokens,
        batch=batch,
        kinds=network.inputs,
        outputs=tuple(output.name for output in graph.graph.output),
        searched=searched,
        built=built,
        verification=verification,
    )


def placed_step(graph: onnx.ModelProto, question: Question) -> tuple[Network, Network, Searched]:
    """The network of a graph, the same as it is searched, and its plan."""
    network = prepare.load(graph, question.options)
    prepared = question.prepared(network)
    searched, _ = question.placed(prepared)
    return network, prepared.network, searched
