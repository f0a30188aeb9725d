"""Which operators run as one kernel: the one rule for regions, costs and compiled code."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import tvm
from tvm import relax

from pimflow.relay_passes.flat import main_bindings, operator, uses
from pimflow.relay_passes.sink_layout import BINARY, UNARY

MOVES = ("reshape", "permute_dims", "expand_dims", "squeeze", "broadcast_to", "astype", "nn.pad")
GATHERS = ("concat", "strided_slice")
# What TVM lowers to kernels that its fusion cannot look into.
OPAQUE = ("scatter_nd", "scatter_elements", "topk", "sort", "argsort", "cumsum", "cumprod", "bucketize")
WEIGHTED = ("nn.conv2d", "matmul")
_AUTOMATIC = re.compile(r"(lv|gv)\d*(_nchw\d*)?$")


@dataclass
class KernelGroup:
    """Bindings that become one kernel.

    Attributes
    ----------
    bindings : list of VarBinding
        In order.
    anchor : VarBinding or None
        The operator that is not elementwise, if there is one.
    fusible : bool
        False for calls of other functions and `OPAQUE` operators, which stay by themselves.
    kept : list of Var
        Results of absorbed operators that other kernels read too: outputs beside the last one.
    """

    bindings: list[relax.VarBinding] = field(default_factory=list)
    anchor: relax.VarBinding | None = None
    fusible: bool = True
    kept: list[relax.Var] = field(default_factory=list)

    @property
    def result(self) -> relax.Var:
        return self.bindings[-1].var

    @property
    def title(self) -> relax.Var:
        """The variable it is named by: an anchor with weights, since PIM programs find their product by it;
        else the anchor, if its name is not automatic; else the first such.
        """
        anchors = [] if self.anchor is None else [self.anchor]
        named = (b for b in anchors + self.bindings if not _AUTOMATIC.match(b.var.name))
        weighted = (b for b in anchors if operator(b.value) in WEIGHTED)
        return next(weighted, next(named, (anchors or self.bindings)[-1])).var


def kernel_groups(mod: tvm.IRModule) -> list[KernelGroup]:
    """Kernels of ``main``, in the order in which their results appear.

    An elementwise operator joins the kernel that made its operand, if nothing else uses that. What
    cannot join (it follows a call, a graph input, or a tensor used twice) goes into the kernel of the
    first operator with an anchor that reads it; if others read it too, that kernel also stores it.
    What is left is a kernel of its own.
    """
    counts = uses(mod)
    groups: list[KernelGroup] = []
    made: dict[relax.Var, KernelGroup] = {}
    read: set[relax.Var] = set()  # by a kernel other than the one that made it

    def sole(var: relax.Var) -> bool:
        return counts.get(var, 0) == 1

    for binding in main_bindings(mod):
        kind = operator(binding.value)
        operands = [v for v in relax.analysis.free_vars(binding.value) if v in made]
        if kind in UNARY + BINARY + MOVES + GATHERS:
            hosts = [
                made[v]
                for v in operands
                if kind not in GATHERS
                and sole(v)
                and made[v].fusible
                # others wait for what it keeps: it cannot wait for them
                and read.isdisjoint(made[v].kept)
            ]
            if hosts:
                group = max(hosts, key=groups.index)
            else:
                group = KernelGroup()
                groups.append(group)
        else:
            single = kind not in ("", "call_dps_packed", *OPAQUE) and isinstance(
                binding.var.ty, relax.TensorType
            )
            group = KernelGroup(anchor=binding, fusible=single)
            for var in operands if single else ():
                before = made[var]
                floats = before.anchor is None and before.fusible and var == before.result
                if floats and before in groups and var not in read:
                    group.bindings += before.bindings
                    group.kept += [] if sole(var) else [var]
                    groups.remove(before)
            groups.append(group)
        group.bindings.append(binding)
        groups.remove(group)
        groups.append(group)
        made.update((b.var, group) for b in group.bindings)
        read.update(v for v in operands if made[v] is not group)
    return groups
