"""Lower bounds of what is live at once, without kernels: rewrites that cost more are dropped early."""

from __future__ import annotations

import functools
import itertools
import math

import tvm
from tvm import relax

from pimflow.relay_passes.flat import main_bindings, operator, shape, use_counts
from pimflow.relay_passes.operators import BINARY, ELEMENTWISE, OPERAND_USES, UNARY
from pimflow.relay_passes.regions.kernel_groups import MAX_TERMS


class LiveBound:
    """Lower bounds of the elements of live tensors of a flat module, whatever runs become one kernel.

    Only tensors count that are the result of a kernel for sure: computed by an operator that is not
    elementwise, or by elementwise operators that join its kernel, and read by a concatenation, or by several
    kernels. A kernel runs where its last operator stands, so such a tensor is live from its own place to that
    of its last reader.
    """

    def __init__(self, mod: tvm.IRModule):
        bindings = main_bindings(mod)
        self._variables = [binding.var for binding in bindings]
        self._place_by_var = {var: place for place, var in enumerate(self._variables)}
        self._kinds = [operator(binding.value) for binding in bindings]
        self._operands = [
            [var for var in relax.analysis.free_vars(binding.value) if var in self._place_by_var]
            for binding in bindings
        ]
        self._counts = use_counts(mod)

    @functools.cached_property
    def _results(self) -> set[relax.Var]:
        """Results of operators that are not elementwise, and of elementwise ones that join their kernels."""
        terms: dict[relax.Var, int] = {}  # of the expression of each
        for var, kind, operands in zip(self._variables, self._kinds, self._operands, strict=True):
            if not kind or not isinstance(var.ty, relax.TensorType):
                continue
            if kind not in ELEMENTWISE:
                terms[var] = 1
            elif kind in UNARY + BINARY and any(self._has_one_reader_like(var, v, terms) for v in operands):
                count = OPERAND_USES.get(kind, 1) * (1 + sum(terms.get(v, 1) for v in operands))
                terms |= {var: count} if count <= MAX_TERMS else {}
        return set(terms)

    def _has_one_reader_like(self, reader: relax.Var, var: relax.Var, results: dict[relax.Var, int]) -> bool:
        """Whether `var`, one of `results`, is read by `reader` alone, and has its shape."""
        return self._counts[var] == 1 and var in results and shape(var) == shape(reader)

    def concat_elements(self, parts: list[relax.Var]) -> int:
        """Elements that are live where `parts` are concatenated."""
        return sum(math.prod(shape(part)) for part in dict.fromkeys(parts) if part in self._results)

    def peak(self) -> int:
        """Elements that are live at once somewhere."""
        ends = [0] * len(self._kinds)  # by place, twice that of the last reader; one more if it concatenates
        # By place, up to two places of operators that are not elementwise and depend on the result.
        kernels: list[set[int]] = [set() for _ in ends]
        changes: dict[int, int] = {}  # by twice the place, elements that become live
        for place in range(len(ends) - 1, -1, -1):
            kind = self._kinds[place]
            if self._variables[place] in self._results and (len(kernels[place]) > 1 or ends[place] % 2):
                elements = math.prod(shape(self._variables[place]))
                changes[2 * place] = changes.get(2 * place, 0) + elements
                changes[ends[place]] = changes.get(ends[place], 0) - elements
            for var in self._operands[place]:
                source = self._place_by_var[var]
                ends[source] = max(ends[source], 2 * place + (kind == "concat"))
                if len(kernels[source]) < 2:
                    kernels[source] |= kernels[place] if kind in UNARY + BINARY else {place}
        return max(itertools.accumulate(changes[time] for time in sorted(changes)), default=0)
