"""Decoders with caches that are updated in place: module, inputs and references."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import tvm

from pimflow.core.state import State
from pimflow.errors import UsageError
from pimflow.frontend import relax_module
from pimflow.frontend.reference import Perturbed, Reference, Run
from pimflow.relay_passes.canonical.keep_states import KeepStates

Inputs = dict[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True, kw_only=True)
class StatefulDecoder:
    """A decoder with caches that are updated in place.

    Attributes
    ----------
    original_inputs : dict of str to (tuple of int, str)
        Inputs of the original network; its caches are shorter if they grow.
    position : str
        Name of the added input that says how many tokens are in the caches; empty if the original network has
        one of its own.
    """

    module: tvm.IRModule
    inputs: Inputs
    states: tuple[State, ...]
    original_inputs: Inputs
    position: str

    @classmethod
    def from_module(
        cls,
        module: tvm.IRModule,
        original_inputs: Inputs,
        pairs: Mapping[str, int],
        places: int | None = None,
    ) -> StatefulDecoder:
        """Apply `KeepStates` to a canonical module, with its `pairs` and `places`; raises its errors."""
        results = relax_module.output_shapes(module)
        new_module = KeepStates(pairs, places)(module)
        inputs = relax_module.inputs(new_module)
        states = tuple(
            State(name=name, result=index, grown=results[index][2] - original_inputs[name][0][2])
            for name, index in pairs.items()
        )
        position = next(iter(inputs.keys() - original_inputs.keys()), "")
        return cls(
            module=new_module,
            inputs=inputs,
            states=states,
            original_inputs=original_inputs,
            position=position,
        )

    @property
    def free_places(self) -> int:
        """Number of places in a cache where the tokens of a step may begin."""
        lengths = [self.original_inputs[state.name][0][2] - (not state.grown) for state in self.states]
        return min(lengths) + 1

    def reference(self, original: Reference) -> Reference:
        """The original reference, for caches that are full up to the tokens of the step.

        Places after those that the step reads do not change.
        """
        adapt = functools.partial(_adapt_run, self.states, self.original_inputs, self.position)
        return replace(original, prepared=lambda: adapt(original.prepared()))

    def reference_with_roundings(self, original: Perturbed) -> Perturbed:
        """The same for a reference with random roundings; it does not keep weights alive."""
        adapt = functools.partial(_adapt_run, self.states, self.original_inputs, self.position)
        return lambda stored: adapt(original(stored))


def _adapt_run(states: tuple[State, ...], original_inputs: Inputs, position: str, run: Run) -> Run:
    """Adapt `run` of the original network to caches that are updated in place."""
    places = {state.name: original_inputs[state.name][0][2] for state in states}

    def run_original(values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Results of the original network, whose caches are operands and results."""
        if position in values:
            full = min(places.values())
            if not (values[position] == full).all():
                raise UsageError(
                    f"input '{position}': the reference has no cache with free places; give {full}"
                )
        cut = {name: values[name][:, :, :length] for name, length in places.items()}
        outputs = list(run({name: cut.get(name, values[name]) for name in original_inputs}))
        for state in states:
            later_places = values[state.name][:, :, outputs[state.result].shape[2] :]
            if later_places.size:
                outputs[state.result] = np.concatenate([outputs[state.result], later_places], axis=2)
        return outputs

    return run_original


def fill_caches(position: str, free_places: int, inputs: dict[str, np.ndarray]) -> None:
    """Set position and masks in `inputs` so that caches are full up to the tokens of the step, in place."""
    if position:
        inputs[position][...] = free_places - 1
    for name in inputs:
        if "mask" in name:
            inputs[name] = np.ones_like(inputs[name])
