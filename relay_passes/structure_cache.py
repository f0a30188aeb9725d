"""Results by the structure of TVM's nodes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import tvm_ffi

Result = TypeVar("Result")


class StructureCache:
    """Results of a computation on TVM's nodes, by their structure.

    A result has the names of variables of the first node with that structure: good to measure, not to build.
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, list[tuple[tvm_ffi.Object, Any]]] = {}

    def result(self, key: Hashable, node: tvm_ffi.Object, compute: Callable[[Any], Result]) -> Result:
        """``compute(node)``, computed once for each `key` and structure."""
        results = self._results.setdefault((key, tvm_ffi.structural_hash(node)), [])
        for other, result in results:
            if tvm_ffi.structural_equal(other, node):
                return result
        results.append((node, compute(node)))
        return results[-1][1]
