"""What a kernel computes before its schedule, on this CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import tvm
from tvm import ir, relax, tirx

from pimflow.relay_passes import grid_sample, integer_division, keep_nan
from pimflow.relay_passes.kernels import round_bf16
from pimflow.relay_passes.schedules.schedule_cpu import ScheduleCpu
from pimflow.relay_passes.schedules.widen_half import WidenHalf

# `group_norm.LEGAL` is judged by TVM's.
_LEGAL = keep_nan.LEGAL | round_bf16.LEGAL | grid_sample.LEGAL | integer_division.LEGAL

Arrays = Mapping[ir.Var, npt.NDArray[Any]]


def plain_results(
    plain: tirx.PrimFunc | relax.Function, arrays: Arrays, results: Sequence[ir.Var]
) -> dict[ir.Var, npt.NDArray[Any]]:
    """What a plain kernel writes.

    Parameters
    ----------
    arrays : mapping of Var to ndarray
        By parameter of the scheduled kernel, in its order, flat.
    results : sequence of Var
        The parameters that are written.
    """
    if isinstance(plain, relax.Function):
        (result,) = results
        return {result: _layers(plain, list(arrays.values()))}
    tensors = [
        tvm.runtime.tensor(array.reshape([int(extent) for extent in variable.shape]))
        for variable, array in arrays.items()
    ]
    _loops(plain)(*tensors)
    return {
        variable: tensor.numpy().reshape(-1)
        for variable, tensor in zip(arrays, tensors)
        if variable in results
    }


def _loops(plain: tirx.PrimFunc) -> Any:
    """A function of loops, compiled."""
    target = tvm.target.Target("llvm")
    with target:
        module = tvm.IRModule({"main": plain.with_attr("global_symbol", "main")})
        scheduled = tvm.transform.Sequential([WidenHalf(), ScheduleCpu()])(module)
        return tvm.compile(scheduled, target)["main"]


def _layers(plain: relax.Function, arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """The result of the layers of a group, whose operands are the first of `arrays`."""
    target = tvm.target.Target("llvm")
    function = relax.Function(plain.params, plain.body, plain.ret_ty).with_attr("global_symbol", "main")
    phases = [relax.transform.LegalizeOps(_LEGAL), WidenHalf()]
    module = tvm.transform.Sequential(phases)(tvm.IRModule({"main": function}))
    machine = relax.VirtualMachine(tvm.compile(module, target), tvm.cpu())
    operands = [
        tvm.runtime.tensor(array.reshape([int(extent) for extent in parameter.ty.shape]))
        for parameter, array in zip(plain.params, arrays)
    ]
    result: npt.NDArray[Any] = machine["main"](*operands).numpy()
    return result.reshape(-1)
