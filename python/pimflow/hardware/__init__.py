"""Devices as data: each device is one TOML file, with the unit and source of every value."""

from pimflow.hardware.gpu import GpuSpec
from pimflow.hardware.pim import Constraint, PimSpec
from pimflow.hardware.reader import spec_names
from pimflow.hardware.systems import System, system

__all__ = ["Constraint", "GpuSpec", "PimSpec", "System", "spec_names", "system"]
