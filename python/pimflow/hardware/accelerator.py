"""Energies of an accelerator with on-chip memory and DRAM."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from pimflow.core.kernel import ELEMENT_BYTES
from pimflow.errors import SpecError, hint
from pimflow.hardware.reader import build, read_toml, require_not_negative

ENERGY = ("dram_pj_per_byte", *(f"mac_{dtype}_pj" for dtype in ELEMENT_BYTES))


@dataclass(frozen=True, kw_only=True)
class AcceleratorEnergy:
    """Energies of data movement and computation.

    Attributes
    ----------
    energy : dict of str to float
        ``dram_pj_per_byte``, and ``mac_<dtype>_pj`` per multiply-accumulate.
    """

    name: str
    description: str
    energy: dict[str, float]
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_not_negative(**{f"energy.{key}": value for key, value in self.energy.items()})

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> AcceleratorEnergy:
        """The embedded accelerator of that name, or that of a TOML file."""
        stem, table = read_toml("accelerator", name_or_path)
        accelerator = build(cls, table, f"accelerator '{stem}'", name=stem)
        for key in sorted(accelerator.energy.keys() - set(ENERGY)):
            raise SpecError(f"accelerator '{stem}': unknown field 'energy.{key}'; {hint(key, ENERGY)}")
        for key in sorted(set(ENERGY) - accelerator.energy.keys()):
            raise SpecError(f"accelerator '{stem}': missing field 'energy.{key}'")
        return accelerator
