"""What a network should give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Run = Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]


@dataclass(frozen=True)
class Reference:
    """Outputs of a network, computed by what shares no code with ours.

    Attributes
    ----------
    prepared : callable
        Reads or compiles the network, which takes memory for as long as what it returns is kept: a function
        from inputs by name to outputs.
    """

    prepared: Callable[[], Run]

    def __call__(self, values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Once, and nothing is kept."""
        return self.prepared()(values)
