"""Deep Fusion (Zhuang et al.): many layers in one pass over on-chip memory; without TVM.

`unfolded` and `folded` read the layers of an ONNX network and of a `RegionGraph`, `fuse_layers` cuts them
into groups, and `place` finds the offsets of a group's tiles.
"""

from pimflow.fusion.accelerator import Accelerator
from pimflow.fusion.group import REUSES, Group, Placement, place, tile_group
from pimflow.fusion.growing import GrowingGroup
from pimflow.fusion.layers import KINDS, Layer, LayerGraph
from pimflow.fusion.onnx_layers import layers_from_onnx
from pimflow.fusion.plan import FusionPlan, GroupReport
from pimflow.fusion.region_layers import layers_from_regions
from pimflow.fusion.search import OBJECTIVES, SEARCHES, FusionRules, fuse_layers
from pimflow.fusion.tiling import GroupTiling
from pimflow.fusion.tiling_candidates import TilingCandidates

__all__ = [
    "KINDS",
    "OBJECTIVES",
    "REUSES",
    "SEARCHES",
    "Accelerator",
    "FusionPlan",
    "FusionRules",
    "Group",
    "GroupReport",
    "GroupTiling",
    "GrowingGroup",
    "Layer",
    "LayerGraph",
    "Placement",
    "TilingCandidates",
    "layers_from_regions",
    "fuse_layers",
    "place",
    "tile_group",
    "layers_from_onnx",
]
