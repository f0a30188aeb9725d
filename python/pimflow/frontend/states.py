"""Decoders with caches that are updated in place: module, inputs and references."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import tvm

from pimflow.core.state import State
from pimflow.errors import UsageError
from pimflow.frontend import relax_module
from pimflow.frontend.reference import Fp16Storage, Perturbed, Reference, Run
from pimflow.relay_passes.canonical.keep_states import POSITION, KeepStates

Inputs = dict[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True, kw_only=True)
class StatefulDecoder:
    """A decoder with caches that are updated in place.

    Attributes
    ----------
    module : IRModule
    inputs : dict of str to (tuple of int, str)
    states : tuple of State
    original_inputs : dict of str to (tuple of int, str)
        Inputs of the original network; its caches are shorter if they grow.
    """

    module: tvm.IRModule
    inputs: Inputs
    states: tuple[State, ...]
    original_inputs: Inputs

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
        return cls(module=new_module, inputs=inputs, states=states, original_inputs=original_inputs)

    @property
    def free_places(self) -> int:
        """Number of places in a cache where the tokens of a step may begin."""
        lengths = [self.original_inputs[state.name][0][2] - (not state.grown) for state in self.states]
        return min(lengths) + 1

    def reference(self, original: Reference) -> Reference:
        """The original reference, for caches that are full up to the tokens of the step.

        Places after those that the step reads do not change.
        """
        return replace(
            original, prepared=lambda: _adapt_run(self.states, self.original_inputs, original.prepared())
        )

    def reference_with_roundings(self, original: Perturbed) -> Perturbed:
        """The same for a reference with random roundings; it does not keep weights alive."""
        states, original_inputs = self.states, self.original_inputs

        def prepare(stored: Fp16Storage) -> Run:
            return _adapt_run(states, original_inputs, original(stored))

        return prepare


def _adapt_run(states: tuple[State, ...], original_inputs: Inputs, run: Run) -> Run:
    """Adapt `run` of the original network to caches that are updated in place."""
    places = {state.name: original_inputs[state.name][0][2] for state in states}

    def run_original(values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Results of the original network, whose caches are operands and results."""
        if POSITION not in original_inputs and POSITION in values:
            full = min(places.values())
            if not (values[POSITION] == full).all():
                raise UsageError(
                    f"input '{POSITION}': the reference has no cache with free places; give {full}"
                )
        cut = {name: values[name][:, :, :length] for name, length in places.items()}
        outputs = list(run({name: cut.get(name, values[name]) for name in original_inputs}))
        for state in states:
            later_places = values[state.name][:, :, outputs[state.result].shape[2] :]
            if later_places.size:
                outputs[state.result] = np.concatenate([outputs[state.result], later_places], axis=2)
        return outputs

    return run_original


def full_caches(table_rows: Mapping[str, int], inputs: dict[str, np.ndarray]) -> None:
    """Set positions and masks in `inputs` so that caches are full up to the tokens of the step, in place."""
    if POSITION in table_rows:
        inputs[POSITION][...] = table_rows[POSITION] - 1
    for name in inputs:
        if "mask" in name:
            inputs[name] = np.ones_like(inputs[name])
