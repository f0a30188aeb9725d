"""Does a GPU kernel read each element of an operand that it overwrites in one thread, before it writes it?"""

import numpy as np
import pytest
from graphs import main_module
from length import long_but
from tvm import relax

from pimflow import frontend, system
from pimflow.compiler.kernel_checks.kernels import PlainKernels
from pimflow.compiler.kernel_checks.lanes import KernelExecution
from pimflow.compiler.kernel_checks.parameter_values import parameter_values
from pimflow.compiler.kernel_checks.plain import plain_results
from pimflow.relay_passes.memory.overwriting import can_overwrite

# By name: rows and columns of the map, channels of the input and of the result, and of the window.
CONVOLUTIONS = {
    "pointwise": (12, 12, 64, 64, 1),
    "small, so that blocks share sums": (4, 4, 512, 64, 1),
    "columns that are no multiple of a tile": (5, 5, 48, 40, 3),
}


def residual_module(rows, columns, channels, filters, window):
    """A convolution to which a map that another computes is added, and what reads the sum."""
    rng = np.random.default_rng(0)
    x = relax.Var("x", relax.TensorType((1, rows, columns, 8), "float32"))

    def result(builder):
        def convolution(data, count, extent):
            shape = (count, extent, extent, int(data.ty.shape[-1]))
            weights = relax.const(rng.standard_normal(shape, np.float32) / 8)
            layouts = {"data_layout": "NHWC", "kernel_layout": "OHWI"}
            return builder.emit(relax.op.nn.conv2d(data, weights, padding=extent // 2, **layouts))

        skip = convolution(x, filters, 1)
        product = convolution(convolution(x, channels, 3), filters, window)
        total = builder.emit(relax.op.nn.relu(builder.emit(relax.op.add(product, skip))))
        return builder.emit(relax.op.nn.max_pool2d(total, (3, 3), padding=(1, 1), layout="NHWC"))

    return main_module([x], result)


class OverwritingExecution(KernelExecution):
    """Runs a kernel whose result lies in the memory of an operand: accesses of both count as one memory's."""

    def _host(self, stmt):
        operand, result = self.one_memory
        self._memories[result] = self._memories[operand]
        super()._host(stmt)


CASES = [(name, dtype) for name in CONVOLUTIONS for dtype in ("fp16", "fp32")]


@pytest.mark.parametrize("case", long_but([("small, so that blocks share sums", "fp16")], CASES))
def test_results_over_their_operand_are_the_same(case):
    name, dtype = case
    network = frontend.load(residual_module(*CONVOLUTIONS[name]))
    kernels = PlainKernels.from_network(network.module, system(dtype=dtype))
    scheduled = {gv.name_hint: func for gv, func in kernels.scheduled_module().functions_items()}
    overwriting = 0
    for kernel in kernels.schedule():
        *operands, result = kernel.lowered.params
        for position, operand in enumerate(operands):
            if not can_overwrite(scheduled[kernel.name], position, len(operands)):
                continue
            overwriting += 1
            arrays = parameter_values(kernel, [result], 0)
            expected = plain_results(kernel.plain, arrays, [result])[result]
            faults = []
            execution = OverwritingExecution(
                kernel.lowered,
                arrays,
                lambda launch, _: np.arange(launch.blocks),
                lambda *fault, faults=faults: faults.append(fault),
            )
            execution.one_memory = operand, result
            execution.run()
            assert faults == []
            np.testing.assert_allclose(arrays[operand], expected, rtol=2e-3, atol=2e-2)
    assert overwriting == 1
