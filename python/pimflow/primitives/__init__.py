"""Convolution primitives as data: no TVM. `pimflow.primitives.kernels` has their code."""

from pimflow.primitives.catalogue import PRIMITIVES, primitive
from pimflow.primitives.primitive import Extents, Primitive

__all__ = ["PRIMITIVES", "Extents", "Primitive", "primitive"]
