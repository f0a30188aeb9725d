"""Options of `fuse`, of a network and of how its layers are fused."""

from __future__ import annotations

from dataclasses import dataclass

from pimflow.commands.shared.options import ShapeOptions
from pimflow.core.options import option
from pimflow.fusion import FusionRules

BASELINES = ("unfolded", "folded")


@dataclass(frozen=True, kw_only=True)
class FuseOptions(FusionRules, ShapeOptions, group="search"):
    """How the layers of a network are fused; see `fuse` and `fusion.FusionRules`."""

    baseline: str = option(
        "unfolded",
        "--baseline LAYERS",
        "layers that are fused: unfolded, with batch norm, scale and ReLU apart, or folded, as compiled "
        "(default: %(default)s)",
        group="network",
        choices=BASELINES,
    )
