"""Is every tensor that a kernel would allocate a tensor of the graph?"""

from unittest.mock import patch

import numpy as np
import pytest
import tvm
from kernel_graphs import OPERATORS, constant, convolution, graph, kernels
from length import long_but
from tvm import relax
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from pimflow import frontend
from pimflow.compiler import phases
from pimflow.pim_backend.runtime.targets import target_by_name
from pimflow.primitives.primitive import STACK_BYTES
from pimflow.relay_passes.flat import main_bindings, operator
from pimflow.relay_passes.memory.lift_workspaces import WORKSPACES, LiftWorkspaces

CPU, GPU = target_by_name("llvm+pim"), target_by_name("cuda+pim")


def lift_workspaces(mod: tvm.IRModule, target: tvm.target.Target = CPU) -> tvm.IRModule:
    with target:
        return LiftWorkspaces()(mod)


def workspaces(mod: tvm.IRModule) -> list[tuple[str, list[int]]]:
    """Shapes of the workspaces in ``main``, with the kernels that they belong to."""
    shapes = []
    for call in (b.value for b in main_bindings(mod) if operator(b.value) == "call_tir"):
        kernel = call.args[0]
        count = int((mod[kernel].attrs or {}).get(WORKSPACES, 0))
        types = call.ty_args[0].fields[-count:] if count else []
        shapes += [(kernel.name_hint, [int(d) for d in ty.shape]) for ty in types]
    return shapes


# ---- nothing is hidden ----

MORE = {
    "convolution": lambda emit, x: emit(
        op.nn.relu(emit(op.add(emit(convolution(x, constant(24, 3, 3, 16), padding=1)), constant(24))))
    ),
    "exp first": lambda emit, x: emit(convolution(emit(op.exp(x)), constant(8, 3, 3, 16), padding=1)),
    "groups": lambda emit, x: emit(convolution(x, constant(24, 3, 3, 4), groups=4)),
    "transposed": lambda emit, x: emit(op.nn.conv2d_transpose(x, constant(14, 5, 3, 3), strides=(2, 2))),
    "max pool": lambda emit, x: emit(op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1), layout="NHWC")),
    "average pool": lambda emit, x: emit(op.nn.avg_pool2d(x, (3, 3), (2, 2), (1, 1), layout="NHWC")),
    "attention": lambda emit, x: emit(
        op.nn.softmax(emit(op.matmul(x, emit(op.permute_dims(x, [0, 1, 3, 2])))))
    ),
    "gelu": lambda emit, x: emit(op.nn.gelu(emit(op.matmul(x, constant(16, 40))))),
    "variance": lambda emit, x: emit(op.variance(x, [1, 2])),
    "argsort": lambda emit, x: emit(op.argsort(x)),
    "top k": lambda emit, x: emit(relax.TupleGetItem(emit(op.topk(x, 3)), 0)),
    "cumulative sum": lambda emit, x: emit(op.cumsum(x, 2)),
    "scatter": lambda emit, x: emit(
        op.scatter_elements(x, relax.const(np.zeros((1, 14, 14, 16), "int64")), emit(op.exp(x)), 2)
    ),
    "resize": lambda emit, x: emit(op.image.resize2d(x, (28, 28), layout="NHWC")),
    "unknown to TVM": lambda emit, x: emit(op.image.resize2d(emit(op.sort(x)), (7, 7), layout="NHWC")),
}
EVERY_KIND = OPERATORS | MORE


def hides_memory(executable: relax.VMExecutable) -> bool:
    """Whether kernels, or on a GPU the code that launches them, allocate what nobody planned."""
    hosts = [m for m in (executable.mod, *executable.mod.imports) if m.kind == "llvm"]
    assert hosts
    return any("TVMBackendAllocWorkspace" in m.inspect_source("ll") for m in hosts)


@pytest.mark.long
@pytest.mark.parametrize("network", EVERY_KIND.values(), ids=EVERY_KIND)
def test_no_kernel_allocates(network):
    assert not hides_memory(phases.build(graph(network, (1, 14, 14, 16)), CPU))


@pytest.mark.long
@pytest.mark.parametrize("name", long_but(["toy"], ["toy", "mobilenet-v2"]))
def test_no_network_allocates_inside_kernels(name):
    assert not hides_memory(phases.build(frontend.load(name).module, CPU))


@pytest.mark.long
@pytest.mark.parametrize("name", ["sort", "argsort", "top k", "squeeze-excite"])
def test_no_launch_allocates_on_a_gpu(name):
    assert not hides_memory(phases.build(graph(EVERY_KIND[name], (1, 14, 14, 16)), GPU))


@pytest.mark.long
@pytest.mark.parametrize(("name", "target"), [("exp first", CPU), ("argsort", GPU)])
def test_hidden_memory_is_seen(name, target):
    nothing = tvm.transform.module_pass(lambda mod, _: mod, opt_level=0)
    with patch.object(phases, "LiftWorkspaces", lambda: nothing):
        assert hides_memory(phases.build(graph(EVERY_KIND[name], (1, 14, 14, 16)), target))


# ---- the pass ----


@T.inline
def reverse_vector(x, y, large, small):
    for i in range(300):
        with T.sblock("large"):
            v = T.axis.spatial(300, i)
            large[v] = T.exp(x[v])
    for i in range(255):
        with T.sblock("small"):
            v = T.axis.spatial(255, i)
            small[v] = large[v]
    for i in range(300):
        with T.sblock("turned"):
            v = T.axis.spatial(300, i)
            y[v] = large[299 - v] * small[v % 255]


@I.ir_module
class LiftedWorkspaceBefore:
    @T.prim_func(private=True, s_tir=True)
    def kernel(x: T.Buffer((300,), "float32"), y: T.Buffer((300,), "float32")):
        large = T.sblock_alloc_buffer((300,))
        small = T.sblock_alloc_buffer((255,))
        reverse_vector(x, y, large, small)

    @R.function
    def main(x: R.Tensor((300,), dtype="float32")) -> R.Tensor((300,), dtype="float32"):
        cls = LiftedWorkspaceBefore
        with R.dataflow():
            y = R.call_tir(cls.kernel, (x,), out_ty=R.Tensor((300,), dtype="float32"))
            z = R.call_tir(cls.kernel, (y,), out_ty=R.Tensor((300,), dtype="float32"))
            R.output(z)
        return z


@I.ir_module
class LiftedWorkspaceExpected:
    @T.prim_func(private=True, s_tir=True)
    def kernel(
        x: T.Buffer((300,), "float32"), y: T.Buffer((300,), "float32"), large: T.Buffer((300,), "float32")
    ):
        T.func_attr({"pimflow.workspaces": 1})
        small = T.sblock_alloc_buffer((255,))
        reverse_vector(x, y, large, small)

    @R.function
    def main(x: R.Tensor((300,), dtype="float32")) -> R.Tensor((300,), dtype="float32"):
        cls = LiftedWorkspaceExpected
        with R.dataflow():
            first = R.call_tir(
                cls.kernel,
                (x,),
                out_ty=[R.Tensor((300,), dtype="float32"), R.Tensor((300,), dtype="float32")],
            )
            y = first[0]
            second = R.call_tir(
                cls.kernel,
                (y,),
                out_ty=[R.Tensor((300,), dtype="float32"), R.Tensor((300,), dtype="float32")],
            )
            z = second[0]
            R.output(z)
        return z


def test_rewrite():
    after = lift_workspaces(LiftedWorkspaceBefore)
    tvm.ir.assert_structural_equal(after, LiftedWorkspaceExpected, map_free_vars=True)
    tvm.ir.assert_structural_equal(lift_workspaces(after), after)
    x = tvm.runtime.tensor(np.random.default_rng(3).standard_normal(300, np.float32))
    results = [
        relax.VirtualMachine(tvm.compile(m, CPU), tvm.cpu())["main"](x)
        for m in (LiftedWorkspaceBefore, after)
    ]
    assert results[0].numpy().tobytes() == results[1].numpy().tobytes()


def test_what_needs_no_memory_stays():
    """What fits on the stack of a CPU, is in registers, or is declared in a loop."""
    source = """
@I.ir_module
class Module:
    @T.prim_func(private=True, s_tir=True)
    def kernel(x: T.Buffer((1024,), "float32"), y: T.Buffer((1024,), "float32")):
        stack = T.sblock_alloc_buffer(({elements},))
        local = T.sblock_alloc_buffer((1024,), scope="local")
        for i in range(1024):
            with T.sblock("tile"):
                v = T.axis.spatial(1024, i)
                tile = T.sblock_alloc_buffer((1024,))
                tile[v] = x[v]
                local[v] = tile[v]
                stack[v % {elements}] = local[v]
                y[v] = stack[v % {elements}]

    @R.function
    def main(x: R.Tensor((1024,), dtype="float32")) -> R.Tensor((1024,), dtype="float32"):
        cls = Module
        with R.dataflow():
            y = R.call_tir(cls.kernel, (x,), out_ty=R.Tensor((1024,), dtype="float32"))
            R.output(y)
        return y
"""
    fits = tvm.script.from_source(source.format(elements=STACK_BYTES // 4 - 1))
    tvm.ir.assert_structural_equal(lift_workspaces(fits), fits)
    assert workspaces(lift_workspaces(fits, GPU)) == [("kernel", [STACK_BYTES // 4 - 1])]
    exceeds = tvm.script.from_source(source.format(elements=STACK_BYTES // 4))
    assert workspaces(lift_workspaces(exceeds)) == [("kernel", [STACK_BYTES // 4])]


@pytest.mark.long
def test_a_shape_is_that_of_the_call():
    """TVM's sum over a GPU has buffers of its operand's shape, whatever that is."""
    mod = graph(lambda emit, x: emit(op.cumsum(x, 1)), (3, 700))
    with GPU:
        mod = tvm.transform.Sequential(phases.kernel_phases(GPU, "fp32"))(mod)
    assert [shape for _, shape in workspaces(lift_workspaces(mod, GPU))] == [[3, 700]]
    assert all("T.alloc_buffer" not in f.script() for f in kernels(lift_workspaces(mod, GPU)).values())


def test_kernels_of_several_results_keep_them():
    mod = graph(lambda emit, x: emit(relax.TupleGetItem(emit(op.topk(x, 3)), 1)), (4, 700))
    with GPU:
        mod = tvm.transform.Sequential(phases.kernel_phases(GPU, "fp32"))(mod)
    after = lift_workspaces(mod, GPU)
    assert workspaces(after)
    assert after["main"].ret_ty.dtype == "int32"
