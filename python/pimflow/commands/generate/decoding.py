"""Steps of a language model: compiled like other networks, and run with resident caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import onnx
import tvm

from pimflow import frontend
from pimflow.commands.generate.step_bound import ReadTimes, cache_times, weight_times
from pimflow.commands.shared.search import SearchRequest
from pimflow.compiler import build
from pimflow.compiler.build import Build
from pimflow.compiler.conditioning import OutputReference
from pimflow.compiler.verification import Verification, observe, require_finite
from pimflow.core.region_graph import RegionGraph
from pimflow.core.stages import whole_name
from pimflow.core.state import State
from pimflow.frontend import Network
from pimflow.frontend.exported_decoder import LOGITS, MASK, PLACES, TOKENS, UNREAD
from pimflow.frontend.torch_program import TorchProgram
from pimflow.host.garbage_collection import release_memory
from pimflow.pim_backend.runtime import targets
from pimflow.placement import SearchResult
from pimflow.relay_passes.canonical.keep_states import POSITION

PAST, PRESENT = "past_key_values.", "present."
StepGraph: TypeAlias = onnx.ModelProto | TorchProgram
InputTypes = Mapping[str, tuple[tuple[int, ...], str]]
Caches = Mapping[str, np.ndarray]


def step_inputs(
    input_types: InputTypes,
    roles: Mapping[str, str],
    tokens: np.ndarray,
    past_lengths: np.ndarray,
    begin: np.ndarray,
) -> dict[str, np.ndarray]:
    """Inputs of a step by name, of the shapes and types in `input_types`, but for caches.

    Parameters
    ----------
    roles : mapping of str to str
        By name of an input, what it is for, if it is not called so; see `ExportedDecoder`.
    tokens : ndarray, [batch, n]
        The tokens of the step.
    past_lengths : ndarray, [batch]
        Number of earlier tokens of each sequence, which are in the cache.
    begin : ndarray, [batch]
        Place in the cache of the step's first token; the earlier tokens end before it.
    """
    new, first = np.arange(tokens.shape[1]), (begin - past_lengths)[:, None]
    inputs = {}
    for name, (shape, dtype) in input_types.items():
        role = roles.get(name, name)
        if role == TOKENS:
            value = tokens
        elif role == MASK:
            places = np.arange(shape[-1])
            value = (places >= first) & (places <= begin[:, None] + new[-1])
        elif role == PLACES:
            value = past_lengths[:, None] + new
        elif role == POSITION:
            value = begin
        elif role == UNREAD:
            value = np.zeros(shape)
        else:
            continue
        inputs[name] = value.reshape(shape).astype(dtype)
    return inputs


def cache_inputs(
    input_types: InputTypes, caches: Caches, past_lengths: np.ndarray, begin: np.ndarray
) -> dict[str, np.ndarray]:
    """Contents of caches before a step, by input: `caches` at the places before `begin`, and zeros.

    Parameters
    ----------
    caches : mapping of str to ndarray
        Keys and values of the earlier tokens, by input, [batch, heads, at least held, head_size].
    """
    inputs = {}
    for name, values in caches.items():
        shape, dtype = input_types[name]
        inputs[name] = np.zeros(shape, dtype)
        for row, count in enumerate(past_lengths):
            start = begin[row] - count
            inputs[name][row, :, start : start + count] = values[row, :, :count]
    return inputs


def verification_inputs(
    network: Network,
    tokens: np.ndarray,
    past_lengths: np.ndarray,
    caches: Caches,
    roles: Mapping[str, str] | None = None,
) -> dict[str, np.ndarray]:
    """Inputs for the verification of a step, with tokens where its reference reads them.

    The reference of a step whose caches grow takes full caches only: their tokens end at the last place.
    """
    roles = step_roles(network, roles or {})
    begin = past_lengths
    if network.position:
        begin = np.full(len(past_lengths), network.table_rows[network.position] - 1)
    elif not network.states:
        begin = np.full(len(past_lengths), _places(network.inputs, roles) - tokens.shape[1])
    inputs = step_inputs(network.inputs, roles, tokens, past_lengths, begin)
    others = network.inputs.keys() - inputs.keys()
    filled = {name: caches.get(name, np.zeros((*network.inputs[name][0][:2], 0, 1))) for name in others}
    return inputs | cache_inputs(network.inputs, filled, past_lengths if caches else 0 * begin, begin)


def step_roles(network: Network, roles: Mapping[str, str]) -> dict[str, str]:
    """What inputs of a step are for, that of an added position too."""
    return {**roles, **({network.position: POSITION} if network.position else {})}


def _places(input_types: InputTypes, roles: Mapping[str, str]) -> int:
    """Places that a step without resident caches attends to."""
    return next(shape[-1] for name, (shape, _) in input_types.items() if roles.get(name, name) == MASK)


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """The lengths of a step.

    Attributes
    ----------
    attended : int
        Tokens that its last token attends to, itself included: the first places of the cache.
    places : int
        Places of the resident cache that it writes into; 0 without one.
    """

    attended: int
    tokens: int = 1
    batch: int = 1
    places: int = 0


@dataclass(frozen=True, kw_only=True)
class StepInterface:
    """The names of inputs and results of a step.

    Attributes
    ----------
    roles : mapping of str to str
        By input, what it is for, if it is not called so; see `ExportedDecoder`.
    logits : str
        The result with logits.
    """

    roles: Mapping[str, str] = field(default_factory=dict)
    logits: str = LOGITS


OWN_NAMES = StepInterface()  # of the graphs that pimflow writes


@dataclass(frozen=True)
class StepRequest:
    """A step of a decoder that is requested: its graph, how to search it, and its lengths."""

    graph: StepGraph
    search_request: SearchRequest
    lengths: Lengths

    def place(self, search_result: SearchResult | None = None) -> tuple[Network, Network, SearchResult]:
        """Load, prepare and search it; returns the loaded network, the prepared one, and the result.

        Caches are resident if the step has places for them. A plan in `search_request` is applied in place of
        a search; `search_result` is returned as it is.
        """
        network = self._load()
        prepared = self.search_request.prepare_network(network)
        if search_result is None:
            search_result, _ = self.search_request.place_network(prepared, bounded=False)
        return network, prepared.network, search_result

    def regions(self) -> RegionGraph:
        """The regions that a search of it places."""
        return self.search_request.prepare_network(self._load()).regions

    def _load(self) -> Network:
        places = self.lengths.places or None
        return frontend.load(self.graph, context=places and self.lengths.attended, places=places)


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A step of one or several tokens after a cache, searched, built and verified.

    Attributes
    ----------
    states : tuple of State
        Resident caches. Without them the step returns the caches that it was given, with its tokens added.
    roles : mapping of str to str
        What inputs are for; see `step_inputs`.
    verification : Verification
        Of one run: every PIM region, all outputs, commands and their times.
    results : tuple of ndarray
        Outputs of that run if it has no resident caches: the step of a prompt does not run again.
    """

    lengths: Lengths
    input_types: dict[str, tuple[tuple[int, ...], str]]
    states: tuple[State, ...]
    outputs: tuple[str, ...]
    roles: Mapping[str, str]
    logits_index: int
    search_result: SearchResult
    build: Build
    verification: Verification
    results: tuple[np.ndarray, ...] = ()

    @property
    def logits(self) -> np.ndarray:
        """The logits in `results`, [batch, tokens, vocabulary]."""
        return self.results[self.logits_index]

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
            whole_name(program.region, self.search_result.candidate_by_region)
            for program in self.build.programs.values()
        )

    @property
    def regions(self) -> int:
        """Number of regions."""
        return len(self.search_result.graph.regions)

    @property
    def regions_on_pim(self) -> int:
        """Number of regions that PIM computes, wholly or in part, appends to caches included."""
        return sum(len(candidate.pim_regions) for candidate in self.search_result.candidates)


def shared_regions(graph: RegionGraph) -> frozenset[str]:
    """Regions that all blocks of a decoder share: those that depend on positions and mask only."""
    names = {f"%{name}" for name in ("attention_mask", "position_ids", POSITION)}
    for region in graph.regions:
        if region.inputs and names.issuperset(region.inputs):
            names.add(region.name)
    return frozenset(region.name for region in graph.regions if region.name in names)


def step_times(
    search_result: SearchResult, lengths: Lengths, kv_elements: float, uses: int
) -> list[ReadTimes]:
    """Least times of both devices for a step's products: with weights, and with the cache.

    Each element of the cache is used `uses` times; it has `kv_elements` for each token and sequence.
    """
    system, graph = search_result.system, search_result.graph
    elements = kv_elements * lengths.attended * lengths.batch
    attentions = [region.attention for region in graph.regions if region.attention is not None]
    kernels = 2 * max(1, len(attentions))
    kind = attentions[0].cache_type if attentions else None
    return [
        *weight_times(graph, lengths.batch * lengths.tokens, system),
        cache_times(elements, uses * lengths.tokens, kernels, system, kind),
    ]


class StepRunner:
    """Runs a step with resident caches repeatedly; the executable stays loaded.

    Parameters
    ----------
    caches : mapping of str to ndarray, optional
        Initial contents of the caches, as `step_inputs` takes them.
    cache_tensors : mapping of str to GgufTensor, optional
        `cache_tensors` of a runner of another step, to share its cache tensors.
    """

    def __init__(
        self,
        step: CompiledStep,
        caches: Caches | None = None,
        cache_tensors: Mapping[str, tvm.runtime.Tensor] | None = None,
    ) -> None:
        self.step, self._states = step, step.build.states
        self._executor = step.build.module["default"](step.build.device)
        for state in step.states:
            if cache_tensors:
                self._executor["set_input_zero_copy"](state.name, cache_tensors[state.name])
                continue
            shape, dtype = step.input_types[state.name]
            places = np.zeros(shape, dtype)
            if caches:
                places[:, :, : caches[state.name].shape[2]] = caches[state.name]
            self._set(state.name, places)

    def cache_tensors(self) -> dict[str, tvm.runtime.Tensor]:
        """The tensors of the caches, in their packed layout, by input."""
        return {state.name: self._executor["get_input"](state.name) for state in self.step.states}

    def caches(self) -> dict[str, np.ndarray]:
        """The contents of the caches, as `step_inputs` takes them."""
        packed_inputs = self._states.inputs
        arrays = {name: tensor.numpy() for name, tensor in self.cache_tensors().items()}
        return {
            name: packed_inputs[name].unpack(array) if name in packed_inputs else array
            for name, array in arrays.items()
        }

    def _set(self, name: str, value: np.ndarray) -> None:
        packed = self._states.pack_input(name, value)
        self._executor["set_input"](name, tvm.runtime.tensor(np.asarray(packed, order="C")))

    def __call__(self, tokens: np.ndarray, past_lengths: np.ndarray) -> np.ndarray:
        """Logits [batch, n, vocabulary] of `tokens` [batch, n], after `past_lengths` [batch] tokens a
        sequence.
        """
        step = self.step
        inputs = step_inputs(step.input_types, step.roles, tokens, past_lengths, past_lengths)
        for name, value in inputs.items():
            self._set(name, value)
        self._executor["run"]()
        logits: np.ndarray = self._executor["get_output"](self.step.logits_index).numpy()
        return logits


def compile_step(
    request: StepRequest,
    inputs: Callable[[Network], Mapping[str, np.ndarray]],
    progress: Callable[[str], None],
    search_result: SearchResult | None = None,
    *,
    interface: StepInterface = OWN_NAMES,
) -> CompiledStep:
    """Search a step of a decoder, build it for the CPU that stands in for the GPU, and verify it.

    Parameters
    ----------
    inputs : callable
        Gives the inputs of the verification for a network.
    search_result : SearchResult, optional
        The result of `StepRequest.place`, if it is known.

    Raises
    ------
    UnsupportedOpError
        If a cache cannot be resident.
    VerificationError
        If results are wrong.
    """
    network, prepared, search_result = request.place(search_result)
    arrays = inputs(network)
    expected = network.reference(arrays)
    require_finite(expected)
    input_types, states, outputs = network.inputs, network.states, network.output_names
    reference = OutputReference(
        expected=expected, perturbed=prepared.perturbed, rounded=network.rounded_outputs
    )
    roles = step_roles(network, interface.roles)
    del network  # its weights take as much memory as those of the build
    target = targets.target_by_name(request.search_request.target)
    step_build = build.build(prepared, search_result, target)
    release_memory()
    progress("verifying")
    observation = observe(prepared, step_build, search_result.system, arrays)
    del prepared
    release_memory()
    verification = observation.verify_outputs(reference)
    verification.require()
    return CompiledStep(
        lengths=request.lengths,
        input_types=input_types,
        states=states,
        outputs=outputs,
        roles=roles,
        logits_index=outputs.index(interface.logits) if interface.logits in outputs else 0,
        search_result=search_result,
        build=step_build,
        verification=verification,
        results=() if states else tuple(observation.outputs),
    )
