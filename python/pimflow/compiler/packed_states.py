"""Caches that a build takes and gives as they lie in the banks of PIM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pimflow.hardware import PimSpec
from pimflow.pim_backend.programs.packed_cache import PackedCache


@dataclass(frozen=True, kw_only=True)
class PackedStates:
    """Which inputs and outputs lie so, and how.

    Attributes
    ----------
    inputs : dict of str to PackedCache
        By name.
    outputs : dict of int to str
        By number: the input that it is, after the step.
    """

    inputs: dict[str, PackedCache] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)

    def types(
        self, inputs: Mapping[str, tuple[tuple[int, ...], str]]
    ) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of `inputs` as the build takes them."""
        return {
            name: (cache.shape, cache.dtype.name) if (cache := self.inputs.get(name)) else kind
            for name, kind in inputs.items()
        }

    def packed(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """`inputs` of the network as the build takes them."""
        return {name: self.packed_input(name, value) for name, value in inputs.items()}

    def packed_input(self, name: str, value: np.ndarray) -> np.ndarray:
        """One of `packed`."""
        return self.inputs[name].packed(value) if name in self.inputs else value

    def unpacked(self, outputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Outputs of the build as the network knows them."""
        packed = {index: self.inputs[name] for index, name in self.outputs.items()}
        return [packed[i].unpacked(value) if i in packed else value for i, value in enumerate(outputs)]

    def to_table(self) -> dict[str, Any]:
        """What ``interface.json`` has of them: by input, how it lies."""
        return {name: cache.to_table() for name, cache in self.inputs.items()}

    @classmethod
    def from_table(cls, table: Mapping[str, Any], pim: PimSpec) -> PackedStates:
        """From `artifact.Interface.states`, for the device of the directory."""
        packed = {name: each for name, each in table.items() if "layout" in each}
        return cls(
            inputs={name: PackedCache.from_table(each["layout"], pim) for name, each in packed.items()},
            outputs={each["output"]: name for name, each in packed.items()},
        )
