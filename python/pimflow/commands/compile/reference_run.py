"""What a build is verified against: inputs, and the outputs of the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pimflow import zoo
from pimflow.compiler.interface import Interface
from pimflow.compiler.verification import is_constant, nan_count, require_finite
from pimflow.decomposition.calibration import Calibration, agreement
from pimflow.decomposition.network import DecomposedNetwork
from pimflow.decomposition.report import DecompositionReport
from pimflow.frontend import Network

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Inputs that are drawn in a range of their own, with what the reference computes from them."""

    kind: str
    draws: Mapping[str, zoo.Draw]
    samples: tuple[Mapping[str, np.ndarray], ...]
    expected: tuple[Sequence[np.ndarray], ...]


@dataclass(kw_only=True)
class ReferenceRun:
    """What the build is verified against: inputs, and the outputs of the reference.

    `prepare` calls `inspect` once layers are decomposed, which computes the outputs.

    Attributes
    ----------
    samples : tuple of mappings of str to ndarray
        The inputs of each run of the verification.
    expected : tuple of sequences of ndarray
        The outputs of the reference for each sample.
    calibration : Calibration, optional
        None once the networks were compared on it.
    is_drawn : bool
        Whether all inputs are drawn; then others may be drawn for which the reference is defined.
    states : mapping of str to int
        By input that is a resident cache, the index of the output that is its content after a step.
    decomposition : DecompositionReport, optional
        The decomposed layers, and the difference of these outputs from the original's.
    input_range : str, optional
        The range that inputs are drawn in, and why, if it was found by trying.
    """

    interface: Interface
    samples: tuple[Mapping[str, np.ndarray], ...]
    calibration: Calibration | None
    progress: Progress
    states: Mapping[str, int]
    is_drawn: bool = False
    expected: tuple[Sequence[np.ndarray], ...] = ()
    decomposition: DecompositionReport | None = None
    input_range: str | None = None

    @property
    def inputs(self) -> Mapping[str, np.ndarray]:
        """The inputs of the first sample, on which times are taken."""
        return self.samples[0]

    def inspect(self, network: Network, change: DecomposedNetwork | None) -> None:
        """Compute the outputs of `network`, and compare a decomposed network with its original."""
        self.progress("computing the reference")
        self.expected = network.reference.outputs(self.samples)
        if self.is_drawn and any(map(nan_count, self.expected)):
            self._draw_positive(network)
        if self.is_drawn and all(map(is_constant, self.expected)):
            self._draw_in_ranges(network)
        for outputs in self.expected:
            require_finite(outputs)
        if change is None:
            return
        self.decomposition = change.summary(self.samples, self.expected)
        if self.calibration is not None:
            self.progress(f"comparing {self.calibration.samples} samples")
            calibration = agreement(self.calibration, change)
            self.decomposition = replace(self.decomposition, calibration=calibration)
            self.calibration = None

    def _draw_positive(self, network: Network) -> None:
        """Draw positive inputs instead, if the reference has fewer NaN for them."""
        draws = zoo.positive_draws(network.inputs, {*network.draws, *network.table_rows})
        samples = (network.example_inputs(draws),)
        expected = network.reference.outputs(samples)
        if draws and sum(map(nan_count, expected)) < sum(map(nan_count, self.expected)):
            self._take(draws, samples, expected)

    def _draw_in_ranges(self, network: Network) -> None:
        """Draw inputs of the first range of `zoo.RANGES` for which outputs are not constant, if there is one.

        Outputs that no input changes say nothing of the build. Networks for samples of 8 or 16 bits have
        such for values about 1, which are silence to them.
        """
        trial = next(self._trials(network, zoo.RANGES), None)
        if trial is not None:
            self.take_range(trial, "outputs are constant for smaller ones")

    def _trials(self, network: Network, ranges: Mapping[str, zoo.Draw]) -> Iterator[Trial]:
        """Inputs of these ranges, with the reference's outputs, where these are numbers and not constant."""
        known = {*network.draws, *network.table_rows}
        for kind, draws in zoo.ranged_draws(network.inputs, known, ranges).items():
            samples = (network.example_inputs(draws),)
            expected = network.reference.outputs(samples)
            if not any(is_constant(outputs) or nan_count(outputs) for outputs in expected):
                yield Trial(kind=kind, draws=draws, samples=samples, expected=expected)

    def smaller_trials(self, network: Network) -> Iterator[Trial]:
        """Inputs of `zoo.SMALL_RANGES`, for a network whose values leave fp16 for the drawn ones."""
        return self._trials(network, zoo.SMALL_RANGES)

    def take_range(self, trial: Trial, reason: str) -> None:
        """Take the inputs of a trial, and say why."""
        self._take(trial.draws, trial.samples, trial.expected)
        name, draw = next(iter(trial.draws.items()))
        self.input_range = f"drawn as {trial.kind}, {draw}: {reason}; --input {name}=… draws others"

    def _take(
        self,
        draws: Mapping[str, zoo.Draw],
        samples: tuple[Mapping[str, np.ndarray], ...],
        expected: tuple[Sequence[np.ndarray], ...],
    ) -> None:
        self.samples, self.expected = samples, expected
        texts = {name: str(draw) for name, draw in draws.items()}
        self.interface = replace(self.interface, draws=self.interface.draws | texts)
