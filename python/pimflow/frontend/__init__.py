"""ONNX, PyTorch programs and Relax modules as networks in canonical form."""

from typing import TYPE_CHECKING

from pimflow.frontend.network import Network, load, with_values

if TYPE_CHECKING:
    from pimflow.frontend.network import Model

__all__ = ["Model", "Network", "load", "with_values"]
