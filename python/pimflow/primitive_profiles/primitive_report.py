"""Lines of a compilation's table about convolution primitives and C."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pimflow.primitive_profiles.primitive_profile import network_text


def primitives_text(chosen: Mapping[str, Any]) -> list[str]:
    """Of what `primitive_selection.summary` says."""
    line = (
        f"primitives of {len(chosen['choices'])} layers for {chosen['device']}: "
        f"{chosen['time_ns'] / 1e6:.3f} ms by themselves, {chosen['status']}"
    )
    whole = chosen.get("network_time")
    return [line, network_text(whole)] if whole else [line]


def c_text(part: Mapping[str, Any]) -> str:
    """Of what `CNetwork.summary` says."""
    sizes = f"pool {part['pool_bytes']} B, weights {part['weight_bytes']} B"
    if part["flaw"]:
        return f"C         not built: {part['flaw']}; {sizes}"
    parallel = f", {part['parallel_ns'] / 1e6:.3f} ms on {part['threads']}" if part["parallel_ns"] else ""
    return (
        f"C         {part['measured_ns'] / 1e6:.3f} ms on one core{parallel} by {part['compiler']}, outputs "
        f"match (max rel {part['max_relative_error']:.1e}); {sizes}"
    )
