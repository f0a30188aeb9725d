"""Numbers with units in text, as the command line takes them."""

from __future__ import annotations

import math
import re

from pimflow.errors import UsageError

LATENCY_UNITS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
ENERGY_UNITS = {"pJ": 1.0, "nJ": 1e3, "uJ": 1e6, "mJ": 1e9, "J": 1e12}
_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_PREFIXES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def quantity(text: str, units: dict[str, float], quantity_name: str) -> float:
    """Read a number above zero, with or without one of `units`, and convert it to the first of them.

    Raises
    ------
    UsageError
        Naming `quantity_name` and the units.
    """
    value, (first, *_) = math.nan, units
    match = re.fullmatch(rf"\s*([-+.eE\d]+)\s*({'|'.join(units)})?\s*", text)
    if match:
        try:
            value = float(match[1]) * units[match[2] or first]
        except ValueError:
            value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(
            f"{quantity_name} '{text}' is no number above zero in {', '.join(units)} ({first} if it has none)"
        )
    return value


def parse_latency(text: str, option: str) -> float:
    """Read a time in ns, such as ``12ms``."""
    return quantity(text, LATENCY_UNITS, option)


def parse_energy(text: str, option: str) -> float:
    """Read an energy in pJ, such as ``3mJ``."""
    return quantity(text, ENERGY_UNITS, option)


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


def parse_bandwidth(text: str, option: str) -> float:
    """Read ``1.5GB/s``, in bytes per second; raises `UsageError` for other units."""
    return _parse(text, option, ("B/s",), "1.5GB/s")


def parse_compute_rate(text: str, option: str) -> float:
    """Read ``200GFLOPS``, in operations per second; raises `UsageError` for other units."""
    return _parse(text, option, ("FLOPS", "OPS"), "200GFLOPS")


def _parse(text: str, option: str, units: tuple[str, ...], example: str) -> float:
    match = re.fullmatch(r"\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*([A-Za-z/]*)\s*", text)
    scales = {prefix + unit: scale for unit in units for prefix, scale in _PREFIXES.items()}
    try:
        value = float(match[1]) * scales[match[2]] if match else math.nan
    except (ValueError, KeyError):
        value = math.nan
    if math.isnan(value):
        raise UsageError(f"{option} {text}: unknown number or unit; write it as {example}")
    if not 0 < value < math.inf:
        raise UsageError(f"{option} {text}: give a positive number")
    return value
