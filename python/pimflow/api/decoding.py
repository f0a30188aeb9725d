"""Steps of a language model: compiled like other networks, and run with resident caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import tvm

from pimflow import frontend
from pimflow.api.search import Question
from pimflow.compiler import build
from pimflow.compiler.build import Build
from pimflow.compiler.verification import Verification, observe, require_finite
from pimflow.core.region import ELEMENT_BYTES, RegionGraph
from pimflow.core.stages import whole_name
from pimflow.core.state import State
from pimflow.frontend import Network
from pimflow.host.garbage_collection import give_back
from pimflow.pim_backend.runtime import targets
from pimflow.placement import Searched
from pimflow.relay_passes.canonical.keep_states import POSITION
from pimflow.simulators.pim.bound import row_limited_ns

PAST, PRESENT = "past_key_values.", "present."
Kinds = Mapping[str, tuple[tuple[int, ...], str]]
Caches = Mapping[str, np.ndarray]


def step_inputs(
    kinds: Kinds, tokens: np.ndarray, held: np.ndarray, begin: np.ndarray, caches: Caches | None = None
) -> dict[str, np.ndarray]:
    """Inputs of a step by name, of the shapes and types in `kinds`.

    Parameters
    ----------
    tokens : ndarray, [batch, n]
        The tokens of the step.
    held : ndarray, [batch]
        Number of earlier tokens of each sequence, which are in the cache.
    begin : ndarray, [batch]
        Place in the cache of the step's first token; the earlier tokens end before it.
    caches : mapping of str to ndarray, optional
        Keys and values of the earlier tokens, by input, [batch, heads, at least held, head_size]; without
        them the result has no caches.
    """
    new, first = np.arange(tokens.shape[1]), (begin - held)[:, None]
    places = np.arange(kinds["attention_mask"][0][1])
    own = {
        "input_ids": tokens,
        "attention_mask": (places >= first) & (places <= begin[:, None] + new[-1]),
        "position_ids": held[:, None] + new,
        POSITION: begin,
    }
    given = {name: own[name].astype(dtype) for name, (_, dtype) in kinds.items() if name in own}
    for name, (shape, dtype) in kinds.items():
        if caches is not None and name.startswith(PAST):
            given[name] = np.zeros(shape, dtype)
            for row, (at, count) in enumerate(zip(first[:, 0], held)):
                if count:
                    given[name][row, :, at : at + count] = caches[name][row, :, :count]
    return given


def verified_inputs(
    network: Network, tokens: np.ndarray, held: np.ndarray, caches: Caches
) -> dict[str, np.ndarray]:
    """Inputs for the verification of a step: as `step_inputs`, with tokens where its reference reads them.

    The reference of a step whose caches grow takes full caches only: their tokens end at the last place.
    """
    places = network.inputs["attention_mask"][0][1]
    kept = network.states and POSITION not in network.inputs
    begin = held if kept else np.full(len(held), places - tokens.shape[1])
    return step_inputs(network.inputs, tokens, held, begin, caches)


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """The lengths of a step.

    Attributes
    ----------
    attended : int
        Tokens that its last token attends to, itself included: the first places of the cache.
    tokens, batch : int
        Tokens of each sequence in the step, and number of sequences.
    places : int
        Places of the resident cache that it writes into; 0 without one.
    """

    attended: int
    tokens: int = 1
    batch: int = 1
    places: int = 0


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of one or several tokens after a cache, searched, built and verified.

    Attributes
    ----------
    lengths : Lengths
    kinds : dict of str to (tuple of int, str)
        Shape and dtype of every input.
    states : tuple of State
        Resident caches. Without them the step returns the caches that it was given, with its tokens added.
    outputs : tuple of str
        Names of its results, in order.
    verification : Verification
        Of one run: every PIM region, all outputs, commands and their times.
    results : tuple of ndarray
        Outputs of that run if it has no resident caches: the step of a prompt does not run again.
    """

    lengths: Lengths
    kinds: dict[str, tuple[tuple[int, ...], str]]
    states: tuple[State, ...]
    outputs: tuple[str, ...]
    searched: Searched
    built: Build
    verification: Verification
    results: tuple[np.ndarray, ...] = ()

    @property
    def logits(self) -> np.ndarray:
        """The logits in `results`, [batch, tokens, vocabulary]."""
        return self.results[self.outputs.index("logits")]

    def caches(self) -> dict[str, np.ndarray]:
        """Keys and values of the step's own tokens in `results`, as `step_inputs` takes them."""
        return {
            PAST + name.removeprefix(PRESENT): value[:, :, -self.lengths.tokens :]
            for name, value in zip(self.outputs, self.results)
            if name.startswith(PRESENT)
        }

    @property
    def layers_on_pim(self) -> frozenset[str]:
        """Layers that PIM computes, wholly or in part."""
        return frozenset(
            whole_name(each.region, self.searched.doing) for each in self.built.programs.values()
        )

    @property
    def regions_on_pim(self) -> int:
        """Number of regions that PIM computes, wholly or in part, appends to caches included."""
        return sum(len(candidate.pim_regions) for candidate in self.searched.candidates)


def done_once(graph: RegionGraph) -> frozenset[str]:
    """Regions that all blocks of a decoder share: those that depend on positions and mask only."""
    found = {f"%{name}" for name in ("attention_mask", "position_ids", POSITION)}
    for region in graph.regions:
        if region.inputs and found.issuperset(region.inputs):
            found.add(region.name)
    return frozenset(region.name for region in graph.regions if region.name in found)


def bound_ns(searched: Searched, lengths: Lengths, kv_elements: float, uses: int) -> float:
    """Lower bound of PIM's time for a step: products with weights, and with the cache.

    Each element of the cache is used `uses` times; it has `kv_elements` for each token and sequence.
    """
    system = searched.system
    cache_bytes = kv_elements * ELEMENT_BYTES[system.dtype] * lengths.attended * lengths.batch
    cached = row_limited_ns(cache_bytes, uses * lengths.tokens, system.pim, system.pim_channels)
    return weights_bound_ns(searched, lengths.batch * lengths.tokens) + cached


def weights_bound_ns(searched: Searched, uses: int) -> float:
    """Lower bound of PIM's time for a network's products with weights, each weight used `uses` times."""
    system = searched.system
    geometries = [region.geometry for region in searched.graph.regions if region.geometry]
    weight_bytes = sum(g.oc * g.reduction for g in geometries) * ELEMENT_BYTES[system.dtype]
    return row_limited_ns(weight_bytes, uses, system.pim, system.pim_channels)


class Runner:
    """Runs a step with resident caches repeatedly; the executable stays loaded.

    Parameters
    ----------
    caches : mapping of str to ndarray, optional
        Initial contents of the caches, as `step_inputs` takes them.
    bound : mapping of str to Tensor, optional
        `bound` of a runner of another step, to share its cache tensors.
    """

    def __init__(
        self,
        step: Step,
        caches: Caches | None = None,
        bound: Mapping[str, tvm.runtime.Tensor] | None = None,
    ) -> None:
        self.step = step
        self._executor = step.built.module["default"](step.built.device)
        for state in step.states:
            if bound:
                self._executor["set_input_zero_copy"](state.name, bound[state.name])
                continue
            shape, dtype = step.kinds[state.name]
            places = np.zeros(shape, dtype)
            if caches:
                places[:, :, : caches[state.name].shape[2]] = caches[state.name]
            self._set(state.name, places)

    def bound(self) -> dict[str, tvm.runtime.Tensor]:
        """The tensors of the caches, in their packed layout, by input."""
        return {state.name: self._executor["get_input"](state.name) for state in self.step.states}

    def caches(self) -> dict[str, np.ndarray]:
        """The contents of the caches, as `step_inputs` takes them."""
        lying = self.step.built.states.inputs
        found = {name: tensor.numpy() for name, tensor in self.bound().items()}
        return {name: lying[name].unpacked(each) if name in lying else each for name, each in found.items()}

    def _set(self, name: str, value: np.ndarray) -> None:
        packed = self.step.built.states.packed_input(name, value)
        self._executor["set_input"](name, tvm.runtime.tensor(np.asarray(packed, order="C")))

    def __call__(self, tokens: np.ndarray, held: np.ndarray) -> np.ndarray:
        """Logits [batch, n, vocabulary] of `tokens` [batch, n], after `held` [batch] tokens a sequence."""
        for name, value in step_inputs(self.step.kinds, tokens, held, held).items():
            self._set(name, value)
        self._executor["run"]()
        logits: np.ndarray = self._executor["get_output"](self.step.outputs.index("logits")).numpy()
        return logits


def compiled_step(
    graph: onnx.ModelProto,
    question: Question,
    lengths: Lengths,
    inputs: Callable[[Network], Mapping[str, np.ndarray]],
    progress: Callable[[str], None],
    searched: Searched | None = None,
) -> Step:
    """Search a step of a decoder, build it for the CPU that stands in for the GPU, and verify it.

    Parameters
    ----------
    inputs : callable
        Gives the inputs of the verification for a network.
    searched : Searched, optional
        The result of `placed_step` for this step, if it is known.

    Raises
    ------
    UnsupportedOpError
        If a cache cannot be resident.
    VerificationError
        If results are wrong.
    """
    network, prepared, searched = placed_step(graph, question, lengths, searched)
    given, perturbed = inputs(network), prepared.perturbed
    expected = network.reference(given)
    require_finite(expected)
    kinds, states = network.inputs, network.states
    del network  # its weights take as much memory as those of the build
    built = build.build(prepared, searched, targets.named_target(question.target))
    give_back()
    progress("verifying")
    observed = observe(prepared, built, searched.system, given)
    del prepared
    give_back()
    verification = observed.judged(perturbed, expected)
    verification.require()
    return Step(
        lengths=lengths,
        kinds=kinds,
        states=states,
        outputs=tuple(output.name for output in graph.graph.output),
        searched=searched,
        built=built,
        verification=verification,
        results=() if states else tuple(observed.outputs),
    )


def placed_step(
    graph: onnx.ModelProto, question: Question, lengths: Lengths, searched: Searched | None = None
) -> tuple[Network, Network, Searched]:
    """Load, prepare and search a step; returns the loaded network, the prepared one, and the result.

    Caches are resident if the step has places for them. A plan in `question` is applied in place of a
    search; `searched` is returned as it is.
    """
    network = _network(graph, lengths)
    prepared = question.prepared(network)
    if searched is None:
        searched, _ = question.placed(prepared, bounded=False)
    return network, prepared.network, searched


def regions_of(graph: onnx.ModelProto, question: Question, lengths: Lengths) -> RegionGraph:
    """The regions that a search of a step places."""
    return question.prepared(_network(graph, lengths)).regions


def _network(graph: onnx.ModelProto, lengths: Lengths) -> Network:
    places = lengths.places or None
    return frontend.load(graph, context=places and lengths.attended, places=places)
