"""Caches that a build takes and gives as they lie in the banks of PIM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pimflow.core.attention import Attention
from pimflow.hardware import PimSpec
from pimflow.pim_backend.programs.cache_layout import KeyLayout, ValueLayout
from pimflow.pim_backend.programs.layout import NUMPY_DTYPE
from pimflow.pim_backend.programs.packed_cache import cache_shape, packed, packed_shape, unpacked

KINDS = {"keys": KeyLayout, "values": ValueLayout}


@dataclass(frozen=True, kw_only=True)
class PackedStates:
    """Which inputs and outputs lie so, and how.

    Attributes
    ----------
    inputs : dict of str to KeyLayout or ValueLayout
        By name.
    outputs : dict of int to KeyLayout or ValueLayout
        By number: the same after the step.
    """

    inputs: dict[str, KeyLayout | ValueLayout] = field(default_factory=dict)
    outputs: dict[int, KeyLayout | ValueLayout] = field(default_factory=dict)

    def types(
        self, inputs: Mapping[str, tuple[tuple[int, ...], str]]
    ) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of `inputs` as the build takes them."""
        return {
            name: (packed_shape(layout), np.dtype(NUMPY_DTYPE[layout.dtype]).name)
            if (layout := self.inputs.get(name))
            else kind
            for name, kind in inputs.items()
        }

    def packed(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """`inputs` of the network as the build takes them; caches that are packed already stay."""
        return {name: self.packed_input(name, value) for name, value in inputs.items()}

    def packed_input(self, name: str, value: np.ndarray) -> np.ndarray:
        """One of `packed`."""
        layout = self.inputs.get(name)
        if layout is None or value.shape == packed_shape(layout) != cache_shape(layout):
            return value
        return packed(layout, value)

    def unpacked(self, outputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Outputs of the build as the network knows them."""
        return [
            unpacked(layout, value) if (layout := self.outputs.get(index)) else value
            for index, value in enumerate(outputs)
        ]

    def to_table(self) -> dict[str, Any]:
        """What `interface.json` has: by input, its layout and the output that it becomes."""
        numbers = {id(layout): index for index, layout in self.outputs.items()}
        return {
            name: {
                "layout": "keys" if isinstance(layout, KeyLayout) else "values",
                "output": numbers.get(id(layout), -1),
                "attention": layout.attention.to_json(),
                "dtype": layout.dtype,
                "channels": layout.channels,
                "spread": layout.spread,
                "lanes": layout.lanes,
                "row_begin": layout.row_begin,
            }
            for name, layout in self.inputs.items()
        }

    @classmethod
    def from_table(cls, table: Mapping[str, Any], pim: PimSpec) -> PackedStates:
        """The inverse, for the device of the directory."""
        inputs, outputs = {}, {}
        for name, entry in table.items():
            fields = dict(entry)
            kind, output = KINDS[fields.pop("layout")], fields.pop("output")
            layout = kind(pim=pim, **fields | {"attention": Attention.from_json(fields["attention"])})
            inputs[name] = layout
            if output >= 0:
                outputs[output] = layout
        return cls(inputs=inputs, outputs=outputs)
