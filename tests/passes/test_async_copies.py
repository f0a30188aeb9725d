"""Are copies to shared memory asynchronous from sm_80 on, and is a read that does not wait for them found?"""

from dataclasses import replace

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx

import pimflow
from pimflow import frontend
from pimflow.compiler.kernel_checks.async_copies import WAIT
from pimflow.compiler.kernel_checks.check import check_kernel
from pimflow.compiler.kernel_checks.findings import Fault
from pimflow.compiler.kernel_checks.kernels import PlainKernels
from pimflow.compiler.kernel_checks.resources import launch_resources
from pimflow.core.product_tiles import BlockTile
from pimflow.pim_backend.runtime.cuda_binary import cuda_compiler
from pimflow.relay_passes.schedules.schedule_tensor_cores import PRODUCT_TILE

ARCHITECTURES = ("sm_80", "sm_86", "sm_90")


def convolutions(arch, channels=64):
    """The kernels of two convolutions, for an architecture: the second one's operands lie in fp16."""
    builder, rng = relax.BlockBuilder(), np.random.default_rng(0)
    x = relax.Var("x", relax.TensorType((1, 16, 9, 9), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y: relax.Expr = x
            for into, out in ((16, channels), (channels, 64)):
                weights = rng.uniform(-1, 1, (out, into, 3, 3)).astype("float32")
                y = builder.emit(relax.op.nn.conv2d(y, relax.const(weights), padding=1))
            y = builder.emit_output(relax.op.nn.relu(y))
        builder.emit_func_output(y)
    plain = PlainKernels.from_network(frontend.load(builder.get()).module, pimflow.system())
    return replace(plain, target=tvm.target.Target({**dict(plain.target.export()), "arch": arch}))


def scheduled(arch, channels=64):
    """The second convolution."""
    kernels = convolutions(arch, channels).schedule()
    (kernel,) = (k for k in kernels if int(k.lowered.params[0].shape[-1]) == channels)
    return kernel


@pytest.fixture(scope="module")
def kernel():
    return scheduled("sm_80")


def with_waits(kernel, change):
    """A kernel whose waits leave another number of copies under way."""
    rules = [
        (
            tirx.AttrStmt,
            lambda stmt: (
                tirx.AttrStmt(stmt.node, WAIT, change(stmt.value), stmt.body)
                if stmt.attr_key == WAIT
                else stmt
            ),
        )
    ]
    return replace(
        kernel, lowered=kernel.lowered.with_body(tvm_ffi.structural_map(kernel.lowered.body, rules))
    )


def test_copies_are_asynchronous_and_hold(kernel):
    tile = BlockTile.from_text(kernel.lowered.attrs[PRODUCT_TILE])
    assert tile.stages > 2 and "cp_async" in kernel.lowered.script()
    check = check_kernel(kernel)
    assert check.holds and check.compared


@pytest.mark.parametrize(("arch", "channels"), [("sm_75", 64), ("sm_80", 3)])
def test_other_copies_are_waited_for(arch, channels):
    """Before sm_80, and of an odd number of halves, of which an asynchronous copy cannot be."""
    kernel = scheduled(arch, channels)
    assert BlockTile.from_text(kernel.lowered.attrs[PRODUCT_TILE]).stages == 2
    assert "cp_async" not in kernel.lowered.script()


def test_a_read_before_its_copy_is_finished_is_found(kernel):
    waiting_less = with_waits(kernel, lambda count: count + 1)
    assert Fault.UNFINISHED_COPY in {finding.fault for finding in check_kernel(waiting_less).findings}
    assert check_kernel(with_waits(kernel, lambda count: count)).holds


def test_a_copy_needs_a_barrier_after_its_wait(kernel):
    """Its own thread has waited for it, but not the others that read it."""
    nothing = tirx.Evaluate(tirx.IntImm("int32", 0))
    rules = [(tirx.Evaluate, lambda s: nothing if "tvm_storage_sync" in str(getattr(s, "value", "")) else s)]
    body = tvm_ffi.structural_map(kernel.lowered.body, rules)
    findings = check_kernel(replace(kernel, lowered=kernel.lowered.with_body(body))).findings
    assert Fault.THREADS_RACE in {finding.fault for finding in findings}


@pytest.mark.long
@pytest.mark.skipif(not cuda_compiler(), reason="no CUDA compiler")
def test_kernels_with_copies_compile():
    resources = launch_resources(convolutions("sm_80"), ARCHITECTURES)
    assert {row.architecture for row in resources} == {*ARCHITECTURES}
    assert not any(row.kernel.local_bytes or row.problems([]) for row in resources)
