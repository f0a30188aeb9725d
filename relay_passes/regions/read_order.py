"""The order in which the operators of a module read its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from tvm import relax

from pimflow.core.region import GATHERS
from pimflow.relay_passes.attention import operator_kind
from pimflow.relay_passes.flat import main_bindings
from pimflow.relay_passes.operators import ELEMENTWISE


class ReadOrder:
    """Says which operator reads a tensor first.

    Parameters
    ----------
    counts : mapping of Var to int
        How many `uses` each variable has.
    """

    def __init__(self, mod: tvm.IRModule, counts: Mapping[relax.Var, int]):
        self._counts = counts
        self._readers: dict[relax.Var, list[relax.Var]] = {}
        self._places: dict[relax.Var, int] = {}
        self._elementwise: set[relax.Var] = set()
        for place, binding in enumerate(main_bindings(mod)):
            self._places[binding.var] = place
            kind = operator_kind(mod, binding.value)
            self._elementwise |= {binding.var} if kind in ELEMENTWISE and kind not in GATHERS else set()
            for var in relax.analysis.free_vars(binding.value)[:]:
                self._readers.setdefault(var, []).append(binding.var)

    def is_overtaken(self, anchor: relax.Var, inside: Sequence[relax.Var], var: relax.Var) -> bool:
        """Whether another kernel reads `var` before the last operator of the epilogue of `anchor`.

        The epilogue is the chain of elementwise operators behind the anchor, each the only reader of the one
        before. Bindings of `inside` belong to the kernel of the anchor too.
        """
        kernel = [anchor]
        while self._counts.get(kernel[-1], 0) == 1:
            read_by = self._readers.get(kernel[-1], [])
            if not self._elementwise.issuperset(read_by) or not read_by:
                break
            kernel += read_by
        end = self._places[kernel[-1]]
        return any(
            self._places[reader] < end for reader in self._readers[var] if reader not in (*inside, *kernel)
        )
