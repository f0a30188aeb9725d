"""A device of the catalogue whose controller serves no refresh ahead, as tests of refreshes want it."""

from dataclasses import replace

from pimflow.hardware.pim import PimSpec


def when_due(pim: PimSpec) -> PimSpec:
    """`pim` that serves every refresh when it is due."""
    return replace(pim, refreshes_ahead=0)
