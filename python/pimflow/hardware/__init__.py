"""Devices as data: every number of a device lives in one TOML file, with its unit and its source."""

from pimflow.hardware.gpu import GpuSpec
from pimflow.hardware.pim import Constraint, PimSpec
from pimflow.hardware.reader import spec_names
from pimflow.hardware.systems import System, system

__all__ = ["Constraint", "GpuSpec", "PimSpec", "System", "spec_names", "system"]
