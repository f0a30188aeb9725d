"""Decoders with caches that are updated in place: module, inputs and references."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import tvm

from pimflow.core.state import State
from pimflow.errors import UsageError
from pimflow.frontend import relax_module
from pimflow.frontend.reference import Perturbed, Reference, Run, Stored
from pimflow.relay_passes.canonical.keep_states import POSITION, KeepStates

Inputs = dict[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A decoder with caches that are updated in place.

    Attributes
    ----------
    module : IRModule
    inputs : dict of str to (tuple of int, str)
    states : tuple of State
    taken : dict of str to (tuple of int, str)
        Inputs of the original network; its caches are shorter if they grow.
    """

    module: tvm.IRModule
    inputs: Inputs
    states: tuple[State, ...]
    taken: Inputs

    @classmethod
    def of(
        cls, module: tvm.IRModule, taken: Inputs, pairs: Mapping[str, int], places: int | None = None
    ) -> Kept:
        """Apply `KeepStates` to a canonical module, with its `pairs` and `places`; raises its errors."""
        results = relax_module.output_shapes(module)
        kept = KeepStates(pairs, places)(module)
        inputs = relax_module.inputs(kept)
        states = tuple(
            State(name=name, result=index, grown=results[index][2] - taken[name][0][2])
            for name, index in pairs.items()
        )
        return cls(module=kept, inputs=inputs, states=states, taken=taken)

    @property
    def free_places(self) -> int:
        """Number of places in a cache where the tokens of a step may begin."""
        lengths = [self.taken[state.name][0][2] - (not state.grown) for state in self.states]
        return min(lengths) + 1

    def reference(self, given: Reference) -> Reference:
        """The original reference, for caches that are full up to the tokens of the step.

        Places after those that the step reads do not change.
        """
        return replace(given, prepared=lambda: _shortened(self.states, self.taken, given.prepared()))

    def perturbed(self, given: Perturbed) -> Perturbed:
        """The same for a reference with random roundings; it does not keep weights alive."""
        states, taken = self.states, self.taken

        def perturbed(stored: Stored) -> Run:
            return _shortened(states, taken, given(stored))

        return perturbed


def _shortened(states: tuple[State, ...], taken: Inputs, run: Run) -> Run:
    """Adapt `run` of the original network to caches that are updated in place."""
    places = {state.name: taken[state.name][0][2] for state in states}

    def shortened(values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        if POSITION not in taken and POSITION in values:
            full = min(places.values())
            if not (values[POSITION] == full).all():
                raise UsageError(
                    f"input '{POSITION}': the reference has no cache with free places; give {full}"
                )
        cut = {name: values[name][:, :, :length] for name, length in places.items()}
        found = list(run({name: cut.get(name, values[name]) for name in taken}))
        for state in states:
            behind = values[state.name][:, :, found[state.result].shape[2] :]
            if behind.size:
                found[state.result] = np.concatenate([found[state.result], behind], axis=2)
        return found

    return shortened


def full_caches(table_rows: Mapping[str, int], drawn: dict[str, np.ndarray]) -> None:
    """Set positions and masks in `drawn` so that caches are full up to the tokens of the step, in place."""
    if POSITION in table_rows:
        drawn[POSITION][...] = table_rows[POSITION] - 1
    for name in drawn:
        if "mask" in name:
            drawn[name] = np.ones_like(drawn[name])
