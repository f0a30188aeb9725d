"""Deep Fusion (Zhuang et al.): many layers in one pass over on-chip memory; without TVM.

`unfolded` and `folded` read the layers of an ONNX network and of a `RegionGraph`, `fuse_layers` cuts them
into groups; `place` and `replay` say where a group's tiles lie, and run it element by element.
"""

from pimflow.deep_fusion.accelerator import Accelerator, parse_bytes, parse_rate
from pimflow.deep_fusion.candidates import Candidates
from pimflow.deep_fusion.group import REUSES, Group, Placement, place
from pimflow.deep_fusion.growing import Growing
from pimflow.deep_fusion.layers import KINDS, Layer, LayerGraph
from pimflow.deep_fusion.onnx_layers import unfolded
from pimflow.deep_fusion.overlap import Overlap, overlap
from pimflow.deep_fusion.plan import FusionPlan
from pimflow.deep_fusion.region_layers import folded
from pimflow.deep_fusion.replay import replay
from pimflow.deep_fusion.search import HALOS, OBJECTIVES, SEARCHES, fuse_layers
from pimflow.deep_fusion.tiling import TILES, Tiling

__all__ = [
    "HALOS",
    "KINDS",
    "OBJECTIVES",
    "REUSES",
    "SEARCHES",
    "TILES",
    "Accelerator",
    "Candidates",
    "FusionPlan",
    "Group",
    "Growing",
    "Layer",
    "LayerGraph",
    "Overlap",
    "Placement",
    "Tiling",
    "folded",
    "fuse_layers",
    "overlap",
    "parse_bytes",
    "parse_rate",
    "place",
    "replay",
    "unfolded",
]
