"""The accelerator that layers are fused for, and the parser of sizes and rates with units."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from pimflow.core.region import ELEMENT_BYTES
from pimflow.errors import UnknownNameError, UsageError
from pimflow.hardware.accelerator import AcceleratorEnergy

_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_PREFIXES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
Quantity = TypeVar("Quantity", float, np.ndarray)


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One level of on-chip memory between DRAM and the arithmetic. Defaults: Deep Fusion, section 4.1.

    Attributes
    ----------
    on_chip_bytes : int
        Memory for tiles and weights; the paper's "768 KB" read as KiB.
    bytes_per_second : float
        Bandwidth between DRAM and on-chip memory.
    operations_per_second : float
        Rate of arithmetic; a multiply-accumulate is two operations.
    dtype : str
        One of `ELEMENT_BYTES`.
    energy : AcceleratorEnergy
        By default the embedded ``deep-fusion``, whose values are assumed.
    """

    on_chip_bytes: int = 768 * 2**10
    bytes_per_second: float = 1.5e9
    operations_per_second: float = 200e9
    dtype: str = "fp32"
    energy: AcceleratorEnergy = field(default_factory=lambda: AcceleratorEnergy.load("deep-fusion"))

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise UnknownNameError("dtype", self.dtype, ELEMENT_BYTES)
        for name in ("on_chip_bytes", "bytes_per_second", "operations_per_second"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise UsageError(f"{name} {value:g}: give a positive number")

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of `dtype`."""
        return ELEMENT_BYTES[self.dtype]

    def memory_ns(self, traffic_bytes: Quantity) -> Quantity:
        """Time to move bytes between DRAM and on-chip memory."""
        return traffic_bytes / self.bytes_per_second * 1e9

    def compute_ns(self, operations: Quantity) -> Quantity:
        """Time of arithmetic."""
        return operations / self.operations_per_second * 1e9

    def energy_pj(self, traffic_bytes: Quantity, operations: Quantity) -> Quantity:
        """Energy of DRAM traffic and arithmetic; an operation is half a MAC, on-chip memory is free."""
        prices = self.energy.energy
        return traffic_bytes * prices["dram_pj_per_byte"] + operations / 2 * prices[f"mac_{self.dtype}_pj"]


def parse_bytes(text: str, option: str) -> int:
    """Read ``768KiB``: a number with B, kB, KiB, MB, MiB, GB or GiB.

    Raises
    ------
    UsageError
        For another unit, and for anything but a positive integer number of bytes.
    """
    value = _parse(text, option, ("B",), "768KiB or 1MB")
    if value != int(value):
        raise UsageError(f"{option} {text}: is no whole number of bytes")
    return int(value)


def parse_rate(text: str, option: str, units: tuple[str, ...], example: str) -> float:
    """Read ``1.5GB/s`` or ``200GFLOPS``, per second; raises `UsageError` for other units."""
    return _parse(text, option, units, example)


def _parse(text: str, option: str, units: tuple[str, ...], example: str) -> float:
    match = re.fullmatch(r"\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*([A-Za-z/]*)\s*", text)
    scales = {prefix + unit: scale for unit in units for prefix, scale in _PREFIXES.items()}
    number, unit = match.groups() if match else ("", "")
    try:
        value: float = float(number) * scales[unit]
    except (KeyError, ValueError):
        raise UsageError(f"{option} {text}: unknown number or unit; write it as {example}") from None
    if not 0 < value < math.inf:
        raise UsageError(f"{option} {text}: give a positive number")
    return value
