"""Convolution primitives (TASO) as data; without TVM, but for their code in `kernels`."""

from pimflow.primitives.catalogue import PRIMITIVES, named
from pimflow.primitives.primitive import Extents, Primitive

__all__ = ["PRIMITIVES", "Extents", "Primitive", "named"]
