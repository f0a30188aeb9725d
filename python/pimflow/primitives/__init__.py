"""Convolution primitives (TASO) as data; only their code in `kernels` imports TVM."""

from pimflow.primitives.catalogue import PRIMITIVES, get_primitive
from pimflow.primitives.primitive import Extents, Primitive

__all__ = ["PRIMITIVES", "Extents", "Primitive", "get_primitive"]
