"""What a grouped convolution would take on PIM at best if a device multiplied it element by element.

Every way below is a lower bound. None is lowered, as dense products are. Beside what the GPU takes, the
bound says what a lowering could gain at most, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pimflow.core.region import ConvGeometry, Region
from pimflow.hardware import System


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to compute it, and the least time that it takes, launches included."""

    how: str
    least_ns: float


def ways(region: Region, system: System, submission_ns: float) -> list[Way]:
    """Ways that are no candidates to compute a grouped convolution on PIM; none for other regions."""
    g = region.geometry
    if g is None or g.groups == 1 or not system.pim_channels:
        return []
    return [Way(how=how, least_ns=submission_ns + ns) for how, ns in _least_ns(g, system)]


def _least_ns(g: ConvGeometry, system: System) -> Iterator[tuple[str, float]]:
    pim, channels = system.pim, system.pim_channels
    if not pim.elementwise_multiply:
        return
    elements = pim.elements_per_column(system.dtype)
    read, written = g.pixels * g.oc / elements, g.n * g.h * g.w * g.c / elements
    if pim.result_lanes > 1:
        # A column of an input meets as many banks as outputs use it; each lane of a bank adds up its own sum.
        used = max(1, min(pim.banks, g.reduction // (g.stride[0] * g.stride[1])))
        comps = g.reduction * read / used
        cycles = max(comps * pim.timing["nCCDS"], (read + written) * pim.timing["nBL"])
        yield "by lanes, which nothing lowers", cycles * pim.tCK_ns / channels
    else:
        # No adder sums what is multiplied element by element: all products go to the GPU.
        cycles = (written + g.reduction * read) * pim.timing["nBL"]
        launch_ns = system.gpu.launch_ns
        yield "by elementwise products, which the GPU adds", cycles * pim.tCK_ns / channels + launch_ns
