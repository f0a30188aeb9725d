"""Convolution primitives as data: no TVM. `pimflow.primitive_kernels` has their code."""

from pimflow.primitives.catalogue import PRIMITIVES, primitive
from pimflow.primitives.primitive import Extents, Primitive

__all__ = ["PRIMITIVES", "Extents", "Primitive", "primitive"]
