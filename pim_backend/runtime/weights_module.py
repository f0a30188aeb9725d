"""Runtime module of weights in host memory, which a network copies to its pool while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import tvm

from pimflow.host import native

_KIND = "pimflow_weights"
_create_weights = native.get("pimflow.runtime.create_weights")
_store_weights_apart = native.get("pimflow.runtime.store_weights_apart")


def create_weights(weights: Sequence[tvm.runtime.Tensor]) -> tvm.runtime.Module:
    """A module that holds `weights`, on the CPU; its functions take the index of one and its place."""
    return _create_weights(list(weights))


@contextlib.contextmanager
def weights_apart(network: tvm.runtime.Module, path: Path) -> Iterator[str]:
    """Write the values of the weights of a packed network to `path`; within the block it is stored without.

    Gives the symbol under which a library has to have the contents of `path`, so that they are read where it
    is mapped; empty if the network streams no weights.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    module = next((module for module in network.imports[0].imports if module.kind == _KIND), None)
    if module is None:
        yield ""
        return
    symbol = _store_weights_apart(module, str(path))
    if not symbol:
        raise OSError(f"{path}: weights cannot be written")
    try:
        yield str(symbol)
    finally:
        _store_weights_apart(module, "")
