"""Lifetimes of the results of layers of a flat module, each stored separately."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import tvm
from tvm import relax

from pimflow.core.liveness import ALIGNMENT_BYTES, Liveness
from pimflow.core.region import MOVES
from pimflow.relay_passes.flat import main_bindings, operator, use_counts

_NAMES = tuple(kind for kind in MOVES if kind not in ("astype", "nn.pad", "broadcast_to"))
_CHANNELWISE = ("add", "subtract", "multiply", "divide")


def operator_liveness(mod: tvm.IRModule, element_bytes: int = 4) -> Liveness:
    """Lifetimes over the layers of `mod`, each with a separate result, as in eager frameworks.

    Activations are out of place (TeMCO, equations 3 and 4). A convolution or product includes its bias,
    a batch norm is one layer, a transposed convolution is one too, and a change of layout is none.
    """
    account, counts = _Account(mod, element_bytes), use_counts(mod)
    adjusted: set[relax.Var] = set()  # variables to which a bias or shift may be added in place
    for binding in main_bindings(mod):
        var, value = binding.var, binding.value
        reads = relax.analysis.free_vars(value)
        kind = operator(value)
        constant = kind in _CHANNELWISE and len(reads) == 1 and isinstance(value.args[1], tvm.ir.GenericConst)
        if kind in _NAMES or kind == "":
            account.rename(var, reads)
            adjusted |= {var} if reads and reads[0] in adjusted and counts[reads[0]] == 1 else set()
            continue
        if constant and reads[0] in adjusted and counts[reads[0]] == 1:
            account.rename(var, reads)
        else:
            account.step(reads, var)
        adjusted |= {var} if constant or kind in ("nn.conv2d", "matmul") else set()
    return account.liveness()


class _Account:
    """Collects steps, and which tensors each variable names."""

    def __init__(self, mod: tvm.IRModule, element_bytes: int):
        self.mod, self.element_bytes = mod, element_bytes
        self.tensor_names: dict[relax.Var, tuple[str, ...]] = {param: () for param in mod["main"].params}
        self.steps: list[tuple[list[str], list[str]]] = []
        self.size_bytes: dict[str, int] = {}

    def rename(self, var: relax.Var, reads: Iterable[relax.Var]) -> None:
        """Record that `var` is an alias of `reads`."""
        self.tensor_names[var] = tuple(dict.fromkeys(name for v in reads for name in self.tensor_names[v]))

    def step(self, reads: Iterable[relax.Var], result: relax.Var) -> None:
        """Record a layer that computes `result` from `reads`."""
        input_names = dict.fromkeys(name for v in reads for name in self.tensor_names[v])
        self.size_bytes[result.name] = _value_bytes(result, self.element_bytes)
        self.tensor_names[result] = (result.name,)
        self.steps.append((list(input_names), [result.name]))

    def liveness(self) -> Liveness:
        """Lifetimes of all recorded results."""
        returned = relax.analysis.free_vars(self.mod["main"].body.body)
        outputs = dict.fromkeys(name for v in returned for name in self.tensor_names[v])
        live = Liveness.from_steps(self.steps, self.size_bytes, outputs=outputs)
        aligned = tuple(replace(life, alignment_bytes=ALIGNMENT_BYTES) for life in live.lifetimes)
        return replace(live, lifetimes=aligned)


def _value_bytes(var: relax.Var, element_bytes: int) -> int:
    """Bytes of a tensor, or of a tuple of tensors, with floats of `element_bytes`.

    Other values count as 0 bytes, and so do tensors of unknown size, with which no network is compiled.
    """
    fields = var.ty.fields if isinstance(var.ty, relax.TupleType) else [var.ty]
    total = 0
    for ty in fields:
        dims = getattr(ty.shape, "values", None) if isinstance(ty, relax.TensorType) else None
        if dims is not None and all(isinstance(dim, int | tvm.tirx.IntImm) for dim in dims):
            dtype = tvm.DataType(str(ty.dtype))
            bytes_each = element_bytes if str(ty.dtype).startswith("float") else (dtype.bits + 7) // 8
            total += math.prod(map(int, dims)) * bytes_each
    return total
