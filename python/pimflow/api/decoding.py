"""Steps of a language model, compiled by the normal path, and run with their cache from one to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Some tokens after a cache, searched and built.

    Attributes
    ----------
    context, tokens, batch : int
        Tokens that the last one attends to, tokens of the step, and sequences at once.
    network : Network
        As it was searched; `reference` has what computes its outputs otherwise.
    outputs : tuple of str
        Names of its results, in order.
    """

    context: int
    tokens: int
    batch: int
    network: Network
    reference: Network
    outputs: tuple[str, ...]
    searched: Searched
    built: Build

    @property
    def layers_on_pim(self) -> frozenset[str]:
        """Layers that PIM does, or a part of."""
        return frozenset(whole_name(program.region) for program in self.built.programs.values())

    def inputs(self, tokens: np.ndarray, cache: Cache) -> dict[str, np.ndarray]:
        """Of tokens [batch, tokens] after what `cache` holds, by name."""
        return step_inputs(self.reference.inputs, tokens, cache)

    def kept(self, outputs: Sequence[np.ndarray], cache: Cache) -> np.ndarray:
        """Logits of the last token, [batch, vocabulary]; `cache` has what the step gave back."""
        named = dict(zip(self.outputs, outputs, strict=True))
        cache.keep(named, self.tokens)
        return named["logits"][:, -1]

    def checked(self, tokens: np.ndarray, cache: Cache) -> Verification:
        """`verified`, on the inputs of a step that is to come."""
        return self.verified(self.inputs(tokens, cache))

    def verified(self, inputs: Mapping[str, np.ndarray]) -> Verification:
        """Every PIM region, all outputs, commands and their times; raises `VerificationError`."""
        expected = self.reference.reference(inputs)
        require_finite(expected)
        verification = verify(self.network, self.built, self.searched.system, inputs, expected)
        verification.require()
        return verification

    def logits_bound(self, verification: Verification) -> float:
        """How far logits may be from a reference, over its largest."""
        return verification.outputs[self.outputs.index("logits")].bound

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
        tokens = np.tile(tokens, (self.step.batch, 1))
        for name, value in self.step.inputs(tokens, cache).items():
            self._executor["set_input"](name, tvm.runtime.tensor(np.asarray(value, order="C")))
        self._executor["run"]()
        outputs = [self._executor["get_output"](i).numpy() for i in range(len(self.step.outputs))]
        return self.step.kept(outputs, cache)


def compiled_step(graph: onnx.ModelProto, question: Question, context: int, tokens: int, batch: int) -> Step:
    """A step of a decoder, searched and built for the CPU that stands in for the GPU."""
    network, prepared, searched = placed_step(graph, question)
    return Step(
        context=context,
        tokens=tokens,
        batch=batch,
        network=prepared,
        reference=network,
        outputs=tuple(output.name for output in graph.graph.output),
        searched=searched,
        built=build.build(prepared, searched, targets.named_target(question.target)),
    )


def placed_step(graph: onnx.ModelProto, question: Question) -> tuple[Network, Network, Searched]:
    """The network of a graph, the same as it is searched, and its plan."""
    network = prepare.load(graph, question.options)
    prepared = question.prepared(network)
    searched, _ = question.placed(prepared)
    return network, prepared.network, searched
