"""Do networks of chosen primitives give the same values, in one pool, without needless changes of layout?"""

import numpy as np
import pytest
import tvm
from graphs import outputs, run
from kernel_graphs import constant, convolution, graph
from length import long_but
from test_lift_workspaces import hides_memory
from test_schedule_gpu import one_after_the_other
from tvm import relax, tirx
from tvm.relax import op

from pimflow.compiler import phases as pipeline
from pimflow.compiler.build import LayerPrimitives, with_primitives
from pimflow.errors import UsageError
from pimflow.pim_backend.runtime.targets import target_by_name
from pimflow.primitives import PRIMITIVES, get_primitive
from pimflow.relay_passes.canonical.sink_layout import SinkLayout
from pimflow.relay_passes.flat import layer_name, main_bindings, operator, shape
from pimflow.relay_passes.kernels.select_primitives import SelectPrimitives
from pimflow.relay_passes.regions.extract_regions import layer_geometry
from pimflow.relay_passes.schedules.schedule_gpu import ScheduleGpu


def network(emit, x):
    """A window, a residual, a depthwise and a 1x1 layer, and a product."""
    y = emit(convolution(x, constant(32, 3, 3, 16), padding=1))
    y = emit(op.nn.relu(emit(op.add(y, constant(1, 1, 1, 32)))))
    z = emit(convolution(y, constant(32, 3, 3, 32), padding=1))
    z = emit(op.clip(emit(op.add(z, y)), 0, 6))
    z = emit(convolution(z, constant(32, 3, 3, 1), padding=1, groups=32, strides=2))
    z = emit(convolution(emit(op.nn.relu(z)), constant(24, 1, 1, 32)))
    flat = emit(op.reshape(z, (1, 24 * 49)))
    return emit(op.matmul(flat, constant(24 * 49, 10)))


def layers(mod: tvm.IRModule) -> dict:
    geometries = {layer_name(mod, b.var): layer_geometry(b.var.name, b.value) for b in main_bindings(mod)}
    return {name: layer for name, layer in geometries.items() if layer is not None}


def choose_primitives(mod: tvm.IRModule, *preferred: str) -> dict:
    """For each layer the first primitive that applies, of the preferred first."""
    names = [name for start in preferred for name in PRIMITIVES if name.startswith(start)]
    candidates = [PRIMITIVES[name] for name in [*names, *PRIMITIVES]]
    return {name: next(p for p in candidates if p.applies(layer)) for name, layer in layers(mod).items()}


PREFERENCES = {
    "hwc": ("direct-hwc-7x32", "depthwise-hwc"),
    "chw": ("direct-chw-7x32", "depthwise-chw-1x16", "direct-chw"),
    "blocked": ("direct-chwc16", "depthwise-hwc-7x16"),
    "windows": ("im2row", "depthwise-hwc-4x32"),
    "products": ("mec", "pointwise-hwc"),
    "winograd": ("winograd-2d-f4-hwc", "pointwise-chw"),
    "one by one": ("kn2col-accumulating", "direct-hwc-1x64"),
}


@pytest.mark.long
@pytest.mark.parametrize("preferred", long_but(["winograd"], PREFERENCES))
def test_values_and_memory(preferred):
    mod = graph(network, (1, 14, 14, 16))
    after = SinkLayout()(SelectPrimitives(choose_primitives(mod, *preferred))(mod))
    assert [operator(b.value) for b in main_bindings(after)].count("call_tir") == 5
    x = np.random.default_rng(0).standard_normal((1, 14, 14, 16), np.float32)
    (expected,), (result,) = run(mod, x), outputs(after, [x])
    bound = 1e-4 if "winograd-2d-f4-hwc" in preferred else 1e-5  # F(4, 3) adds and subtracts larger numbers
    assert np.abs(result - expected).max() <= bound * np.abs(expected).max()
    assert not hides_memory(pipeline.build(after))
    tvm.ir.assert_structural_equal(SelectPrimitives(choose_primitives(mod, *preferred))(after), after)


def test_layouts_change_once():
    """Between layers of one layout nothing is transformed, elementwise operators included."""
    mod = graph(network, (1, 14, 14, 16))
    after = with_primitives(mod, LayerPrimitives(choose_primitives(mod, *PREFERENCES["chw"])))
    moved = [b for b in main_bindings(after) if operator(b.value) == "permute_dims"]
    assert len(moved) <= 4  # into CHW, out of it before the map is flattened; the vector of the product twice


@pytest.mark.long
def test_blocks_stay_between_layers():
    """Through a bias, a residual and clamps; the depthwise layer has no primitive in blocks."""

    def blocks(emit, x):
        y = emit(convolution(x, constant(32, 3, 3, 16), padding=1))
        y = emit(op.nn.relu(emit(op.add(y, constant(1, 1, 1, 32)))))
        z = emit(op.add(emit(convolution(y, constant(32, 1, 1, 32))), y))
        return emit(convolution(emit(op.clip(z, 0, 6)), constant(16, 1, 1, 32)))

    mod = graph(blocks, (1, 7, 7, 16))
    choices = choose_primitives(mod, "direct-chwc16")
    after = with_primitives(mod, LayerPrimitives(choices))
    kinds = [operator(b.value) for b in main_bindings(after)]
    assert kinds.count("call_tir") == 3 and kinds.count("permute_dims") == 2  # of the input, and the result
    x = np.random.default_rng(0).standard_normal((1, 7, 7, 16), np.float32)
    (expected,), (result,) = outputs(mod, [x]), outputs(after, [x])
    assert np.abs(result - expected).max() <= 1e-5 * np.abs(expected).max()


def test_what_is_not_chosen_stays():
    mod = graph(network, (1, 14, 14, 16))
    same = SelectPrimitives({})(mod)
    kinds = [[operator(b.value) for b in main_bindings(m) if operator(b.value)] for m in (mod, same)]
    assert kinds[0] == kinds[1]
    name, _ = next(iter(layers(mod).items()))
    after = SelectPrimitives({name: get_primitive("im2row-hwc-7x32")})(mod)
    kinds = [operator(b.value) for b in main_bindings(after)]
    assert [kinds.count(kind) for kind in ("call_tir", "nn.conv2d", "matmul")] == [1, 3, 1]
    assert shape(after["main"].body.body) == shape(mod["main"].body.body)


@pytest.mark.parametrize(
    "first", long_but([], ["winograd-2d-f2", "winograd-2d-f4", "implicit-gemm", "im2row", "direct"])
)
def test_kernels_for_a_gpu(first):
    """Values with the threads one after the other; what is fused behind a primitive is in its last launch."""
    mod, cuda = graph(network, (1, 14, 14, 16)), target_by_name("cuda+pim")
    preferred = [f"{first}-cuda", "pointwise-cuda", "depthwise-cuda", "implicit-gemm-cuda"]
    phases = [SelectPrimitives(choose_primitives(mod, *preferred))]
    phases += [*pipeline.kernel_phases(cuda, "fp32"), ScheduleGpu()]
    with cuda:
        after = tvm.transform.Sequential(phases)(mod)
    kernels = {gv: f for gv, f in after.functions_items() if isinstance(f, tirx.PrimFunc)}
    for gv, function in kernels.items():
        after[gv] = one_after_the_other(function.with_attr("global_symbol", gv.name_hint))
    x = np.random.default_rng(0).standard_normal((1, 14, 14, 16), np.float32)
    got = relax.VirtualMachine(tvm.compile(after, "llvm"), tvm.cpu())["main"](tvm.runtime.tensor(x)).numpy()
    (expected,) = run(mod, x)
    assert len(kernels) == 5
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()


def test_an_operator_of_a_gpu_stays_one():
    mod = graph(network, (1, 14, 14, 16))
    operators = dict.fromkeys(layers(mod), get_primitive("operator-cuda-hwc"))
    kinds = [[operator(b.value) for b in main_bindings(m)] for m in (mod, SelectPrimitives(operators)(mod))]
    assert kinds[1].count("call_tir") == 0 and kinds[1].count("nn.conv2d") == kinds[0].count("nn.conv2d")


def test_a_primitive_that_does_not_apply():
    mod = graph(network, (1, 14, 14, 16))
    name = next(name for name, layer in layers(mod).items() if layer.groups > 1)
    with pytest.raises(UsageError, match=f"'winograd-2d-f2-hwc-7x32' does not apply to layer '{name}'"):
        SelectPrimitives({name: get_primitive("winograd-2d-f2-hwc-7x32")})(mod)
