"""A link between devices: the time of a message."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from pimflow.core.keywords import check_keywords
from pimflow.hardware.reader import build, read_toml, require_not_negative, require_positive


@check_keywords
@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """A link, on which each device sends and receives at once.

    Attributes
    ----------
    latency_ns : float
        Time of a message without bytes, from one device to another.
    bytes_per_ns : float
        Bandwidth in each direction.
    """

    name: str
    description: str
    latency_ns: float
    bytes_per_ns: float
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_not_negative(latency_ns=self.latency_ns)
        require_positive(bytes_per_ns=self.bytes_per_ns)

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> LinkSpec:
        """The embedded link of that name, or that of a TOML file; raises as `PimSpec.load`."""
        stem, table = read_toml("link", name_or_path)
        return build(cls, table, f"link '{stem}'", name=stem)

    def message_ns(self, message_bytes: float) -> float:
        """Time of a message."""
        return self.latency_ns + message_bytes / self.bytes_per_ns

    def all_reduce_ns(self, message_bytes: float, devices: int) -> float:
        """Time in which all devices have the sum of their tensors: a ring, or doubling, whichever is faster.

        A ring sends a part of the tensor in each of ``2 (devices - 1)`` steps, recursive doubling the whole
        tensor in each of ``log2 devices`` (Thakur, Rabenseifner, Gropp, IJHPCA 2005).
        """
        ring_ns = 2 * (devices - 1) * self.message_ns(message_bytes / devices)
        return min(ring_ns, (devices - 1).bit_length() * self.message_ns(message_bytes))

    def all_gather_ns(self, message_bytes: float, devices: int) -> float:
        """Time in which all devices have the parts of a tensor, as large as `message_bytes` together.

        A ring sends a part in each step; recursive doubling sends twice as much in each of ``log2 devices``.
        """
        parts_ns = (devices - 1) / devices * message_bytes / self.bytes_per_ns
        return (devices - 1).bit_length() * self.latency_ns + parts_ns
