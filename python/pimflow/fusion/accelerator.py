"""The accelerator that layers are fused for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from pimflow.core.kernel import ELEMENT_BYTES
from pimflow.core.options import OptionSet, option
from pimflow.core.quantities import parse_bandwidth, parse_bytes, parse_compute_rate
from pimflow.errors import UnknownNameError, UsageError
from pimflow.hardware.accelerator import AcceleratorEnergy

Quantity = TypeVar("Quantity", float, np.ndarray)


@dataclass(frozen=True, kw_only=True)
class Accelerator(OptionSet, group="system"):
    """One level of on-chip memory between DRAM and the arithmetic. Defaults: Deep Fusion, section 4.1.

    Attributes
    ----------
    on_chip_bytes : int
        Memory for tiles and weights; the paper's "768 KB" read as KiB.
    operations_per_second : float
        Rate of arithmetic; a multiply-accumulate is two operations.
    dtype : str
        One of `ELEMENT_BYTES`.
    energy : AcceleratorEnergy
        By default the embedded ``deep-fusion``, whose values are assumed.
    """

    on_chip_bytes: int = option(
        768 * 2**10, "--on-chip BYTES", "size of on-chip memory (default: 768KiB)", parse=parse_bytes
    )
    bytes_per_second: float = option(
        1.5e9, "--bandwidth RATE", "bandwidth of DRAM (default: 1.5GB/s)", parse=parse_bandwidth
    )
    operations_per_second: float = option(
        200e9, "--compute RATE", "peak rate of arithmetic (default: 200GFLOPS)", parse=parse_compute_rate
    )
    dtype: str = option(
        "fp32",
        "--dtype TYPE",
        "storage type: fp32, fp16, int8 (default: %(default)s)",
        choices=tuple(ELEMENT_BYTES),
    )
    energy: AcceleratorEnergy = option(
        syntax="--energy NAME|FILE",
        help="energy of an access and of an operation (default: deep-fusion, assumed)",
        default_factory=lambda: AcceleratorEnergy.load("deep-fusion"),
        parse=lambda text, _: AcceleratorEnergy.load(text),
    )

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
