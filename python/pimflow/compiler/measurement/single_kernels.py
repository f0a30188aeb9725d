"""Single GPU kernels for measurements, from the same passes as a network's kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import tvm
from tvm import relax, te, tirx

from pimflow.compiler import phases
from pimflow.core.blocks import KernelLimits
from pimflow.core.kernel import ELEMENT_BYTES, ConvGeometry, Kernel, convolution_kernel
from pimflow.errors import ProfilerError
from pimflow.pim_backend.runtime.cuda_binary import compile_kernels
from pimflow.primitives import PRIMITIVES
from pimflow.primitives.kernels.prim_func import kernel as primitive_kernel
from pimflow.relay_passes.schedules.schedule_gpu import ScheduleGpu

NAME = "measured"  # the variable, and so a part of the kernel's name, that is searched in a network
UNROLLED = 8  # largest number of operands of an elementwise kernel; more become a reduction
READ_RESULTS = 4096  # results of a kernel that only reads: so few that they cost nothing


def is_gpu(target: tvm.target.Target) -> bool:
    """Whether kernels for `target` have threads and store the dtype of the system; a CPU stores fp32."""
    return "gpu" in list(target.keys)


def primitive(kernel: Kernel, dtype: str, target: tvm.target.Target, limits: KernelLimits) -> tirx.PrimFunc:
    """Lower and schedule `kernel` as the pipeline does.

    A convolution or FC is followed by a bias, the residuals that it is charged for, and a ReLU. Other
    kernels produce its operands and read its result, so that all have the storage type. Any other kernel is
    replaced by one that touches as many bytes: elementwise with up to `UNROLLED` operands, else a sum along
    an axis. A launch of a convolution primitive is replaced by all launches of that primitive.

    Parameters
    ----------
    dtype : str
        ``fp16`` or ``fp32``.
    limits : KernelLimits
        Those of the GPU, on which the choice of tiles depends.

    Returns
    -------
    PrimFunc
        Parameters are the operands and, last, the result.
    """
    if kernel.layers > 1:
        raise ProfilerError(f"a kernel of {kernel.layers} layers in tiles is not measured by itself")
    with target:
        if kernel.primitive and kernel.geometry:
            func = primitive_kernel(PRIMITIVES[kernel.primitive], kernel.geometry)
        else:
            func = (
                _convolution(kernel, kernel.geometry, dtype, target)
                if kernel.geometry
                else _stream(kernel, dtype, target)
            )
        func = func.with_attr("global_symbol", NAME)
        mod = tvm.IRModule({NAME: func})
        phases_after = [ScheduleGpu(limits)] if is_gpu(target) else []
        return tvm.transform.Sequential(phases_after)(mod)[NAME]


def _convolution(
    kernel: Kernel, geometry: ConvGeometry, dtype: str, target: tvm.target.Target
) -> tirx.PrimFunc:
    mod = convolution_network(geometry, residual_count(kernel, geometry, dtype))
    mod = tvm.transform.Sequential(phases.kernel_phases(target, dtype))(mod)
    functions = [
        f for gv, f in mod.functions_items() if isinstance(f, tirx.PrimFunc) and NAME in gv.name_hint
    ]
    if len(functions) != 1:
        raise ProfilerError(f"the pipeline made {len(functions)} kernels of {geometry}, not one")
    return functions[0]


def is_fc(geometry: ConvGeometry) -> bool:
    """Whether a convolution is a matrix product of rows: a 1x1 map under a 1x1 window."""
    return (geometry.h, geometry.w, geometry.kh, geometry.kw, geometry.groups) == (1, 1, 1, 1, 1)


def residual_count(kernel: Kernel, geometry: ConvGeometry, dtype: str) -> int:
    """Number of fused operands of the result's size; smaller ones, such as a scale a channel, are ignored."""
    bare_kernel = convolution_kernel(geometry, dtype)
    return (kernel.input_bytes - bare_kernel.input_bytes) // bare_kernel.output_bytes


def convolution_network(geometry: ConvGeometry, residuals: int) -> tvm.IRModule:
    """A canonical network: a kernel, the convolution with bias, `residuals` residuals and ReLU, and a
    kernel.
    """
    g, fc = geometry, is_fc(geometry)
    shape = [g.n, g.c] if fc else [g.n, g.h, g.w, g.c]
    result = [g.n, g.oc] if fc else [g.n, g.oh, g.ow, g.oc]
    filters = [g.c, g.oc] if fc else [g.oc, g.kh, g.kw, g.c // g.groups]
    params = [relax.Var("x", relax.TensorType(shape, "float32"))]
    params += [relax.Var(f"r{i}", relax.TensorType(result, "float32")) for i in range(residuals)]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            x, *residual_vars = [builder.emit(_separate_kernel(param)) for param in params]
            constant = relax.const(np.zeros(filters, np.float32))
            if fc:
                y = builder.emit(relax.op.matmul(x, constant), NAME)
            else:
                attrs = {"strides": g.stride, "padding": g.padding, "dilation": g.dilation}
                layouts = {"data_layout": "NHWC", "kernel_layout": "OHWI", "out_layout": "NHWC"}
                conv = relax.op.nn.conv2d(x, constant, **attrs, groups=g.groups, **layouts)
                y = builder.emit(conv, NAME)
            y = builder.emit(relax.op.add(y, relax.const(np.zeros(g.oc, np.float32))))
            for residual in residual_vars:
                y = builder.emit(relax.op.add(y, residual))
            y = builder.emit(relax.op.nn.relu(y))
            output = builder.emit_output(_separate_kernel(y))
        builder.emit_func_output(output)
    return builder.get()


def _separate_kernel(x: relax.Expr) -> relax.Expr:
    """An operator on `x` that has a kernel of its own: convolutions and products are not fused with it."""
    if len(x.ty.shape) == 2:
        return relax.op.nn.softmax(x)
    return relax.op.nn.max_pool2d(x, pool_size=(1, 1), layout="NHWC")


def _stream(kernel: Kernel, dtype: str, target: tvm.target.Target) -> tirx.PrimFunc:
    stored = "float16" if dtype == "fp16" and is_gpu(target) else "float32"
    element = ELEMENT_BYTES[dtype]
    operands = (kernel.input_bytes + kernel.weight_bytes) // element
    results = kernel.output_bytes // element or min(operands, READ_RESULTS) or 1
    if not operands:
        return te.create_prim_func([te.compute((results,), lambda i: tirx.const(0.0, stored), NAME)])
    repeats, rest = divmod(operands, results)
    if repeats > UNROLLED:
        return _sum(round(operands / results), results, stored)
    x = te.placeholder((operands,), stored, "x")

    def rectified_sum(i: tirx.Var) -> tirx.PrimExpr:
        """The element at `i` of the result."""
        terms = [x[j * results + i] for j in range(repeats)]
        terms += [x[repeats * results + i % rest]] if rest else []
        total = sum((t.astype("float32") for t in terms[1:]), terms[0].astype("float32"))
        return te.max(total, tirx.const(0.0, "float32")).astype(stored)

    return te.create_prim_func([x, te.compute((results,), rectified_sum, NAME)])


def _sum(rows: int, results: int, stored: str) -> tirx.PrimFunc:
    x = te.placeholder((rows, results), stored, "x")
    j = te.reduce_axis((0, rows), "j")
    total = te.compute((results,), lambda i: te.sum(x[j, i].astype("float32"), axis=j), "total")
    return te.create_prim_func([x, te.compute((results,), lambda i: total[i].astype(stored), NAME)])


def compile_primitives(
    functions: Mapping[str, tirx.PrimFunc], target: tvm.target.Target
) -> tvm.runtime.Module:
    """Compile all `functions` to one module, in which they have their names.

    Raises
    ------
    ProfilerError
        If the compiler of the target fails.
    """
    functions_by_symbol = {name: func.with_attr("global_symbol", name) for name, func in functions.items()}
    built, kernels = compile_kernels(lambda: tvm.compile(tvm.IRModule(functions_by_symbol), target), target)
    if kernels.problem:
        raise ProfilerError(kernels.problem)
    return built.mod


def arguments(func: tirx.PrimFunc, device: tvm.runtime.Device, seed: int = 0) -> list[tvm.runtime.Tensor]:
    """Random tensors for all parameters of `func`, in (-1, 1).

    Zeros would not do: a chip takes less power with them, and may clock higher.
    """
    rng = np.random.default_rng(seed)
    tensors = []
    for param in func.params:
        shape, dtype = [int(extent) for extent in param.shape], str(param.dtype)
        block = rng.uniform(-1, 1, min(math.prod(shape), 1 << 20)).astype(dtype)
        tensors.append(tvm.runtime.tensor(np.resize(block, shape), device))
    return tensors
