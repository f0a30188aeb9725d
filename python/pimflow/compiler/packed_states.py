"""Caches that are inputs and outputs of a build in the layout of the banks of PIM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pimflow.hardware import PimSpec
from pimflow.pim_backend.programs.packed_cache import PackedCache


@dataclass(frozen=True, kw_only=True)
class PackedStates:
    """Inputs and outputs in the layout of the banks.

    Attributes
    ----------
    outputs : dict of int to str
        By number of the output, the input whose new value it is.
    """

    inputs: dict[str, PackedCache] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)

    def types(
        self, inputs: Mapping[str, tuple[tuple[int, ...], str]]
    ) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of `inputs` in the layouts of the build."""
        return {
            name: (cache.shape, cache.dtype.name) if (cache := self.inputs.get(name)) else kind
            for name, kind in inputs.items()
        }

    def pack(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Convert `inputs` of the network to the layouts of the build."""
        return {name: self.pack_input(name, value) for name, value in inputs.items()}

    def pack_input(self, name: str, value: np.ndarray) -> np.ndarray:
        """Convert one input of the network to the layout of the build."""
        return self.inputs[name].pack(value) if name in self.inputs else value

    def unpack(self, outputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Convert outputs of the build to the layouts of the network."""
        packed = {index: self.inputs[name] for index, name in self.outputs.items()}
        return [packed[i].unpack(value) if i in packed else value for i, value in enumerate(outputs)]

    def to_table(self) -> dict[str, Any]:
        """By input, its layout as in ``interface.json``."""
        return {name: cache.to_table() for name, cache in self.inputs.items()}

    @classmethod
    def from_table(cls, table: Mapping[str, Any], pim: PimSpec) -> PackedStates:
        """Read `interface.Interface.states` for the device of the directory."""
        packed = {name: entry for name, entry in table.items() if "layout" in entry}
        return cls(
            inputs={name: PackedCache.from_table(entry["layout"], pim) for name, entry in packed.items()},
            outputs={entry["output"]: name for name, entry in packed.items()},
        )
