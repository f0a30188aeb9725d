"""Is what kernels exchange fp16, what they compute fp32, and nothing else changed?"""

import numpy as np
import pytest
import tvm
from graphs import as_module, conv2d_nhwc, inline_functions, inputs, run
from length import long_but
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from pimflow import frontend
from pimflow.compiler import phases
from pimflow.core.program import PimProgram
from pimflow.core.split import Split
from pimflow.hardware import PimSpec
from pimflow.pim_backend.programs.lowering import ProgramRequest, lower
from pimflow.pim_backend.programs.schedule import schedules
from pimflow.relay_passes.flat import main_bindings, operator
from pimflow.relay_passes.kernels.group_kernels import GroupKernels
from pimflow.relay_passes.kernels.store_half import StoreHalf
from pimflow.relay_passes.regions.extract_regions import extract_regions
from pimflow.relay_passes.regions.kernel_groups import kernel_groups

RNG = np.random.default_rng(0)
FILTERS = RNG.standard_normal((2, 1, 1, 2), np.float32)
TAPS = RNG.standard_normal((2, 3, 3, 1), np.float32)
BIAS = RNG.standard_normal(2, np.float32)
INDICES = np.array([1, 0, 1], np.int64)
TABLE = RNG.standard_normal((2, 4), np.float32)
TOY = frontend.load("toy").module


def halve(mod: tvm.IRModule) -> tvm.IRModule:
    return StoreHalf()(GroupKernels()(mod))


def launches(mod: tvm.IRModule) -> int:
    return sum(isinstance(b.value, relax.Call) for b in main_bindings(mod))


def types(mod: tvm.IRModule) -> list[str]:
    """Of the tensors that the kernels of ``main`` store, in order."""
    variables = [b.var for b in main_bindings(mod)]
    return [str(v.ty.dtype) for v in variables if isinstance(v.ty, relax.TensorType)]


def close(result: np.ndarray, right: np.ndarray) -> bool:
    return result.dtype == right.dtype and bool(np.abs(result - right).max() <= 2e-3 * np.abs(right).max())


# ---- the rewrite ----


@as_module
def StoredHalfBefore(x: R.Tensor((1, 4, 4, 2), "float32")):
    conv = conv2d_nhwc(x, FILTERS)
    sum = R.add(conv, R.const(BIAS))
    pool = R.nn.max_pool2d(sum, layout="NHWC")
    depth = conv2d_nhwc(pool, TAPS, padding=1, groups=2)
    y = R.add(depth, pool)
    return y


@I.ir_module
class StoredHalfExpected:
    @R.function(private=True)
    def fused_conv(
        x0: R.Tensor((1, 4, 4, 2), "float32"),
        x1: R.Tensor((2, 1, 1, 2), "float16"),
        x2: R.Tensor((2,), "float32"),
    ) -> R.Tensor((1, 4, 4, 2), "float16"):
        R.func_attr({"Primitive": True})
        with R.dataflow():
            a = R.astype(x0, "float16")
            b = R.nn.conv2d(a, x1, data_layout="NHWC", kernel_layout="OHWI", out_dtype="float32")
            c = R.add(b, x2)
            d = R.astype(c, "float16")
            R.output(d)
        return d

    @R.function(private=True)
    def fused_pool(x0: R.Tensor((1, 4, 4, 2), "float16")) -> R.Tensor((1, 4, 4, 2), "float16"):
        R.func_attr({"Primitive": True})
        with R.dataflow():
            a = R.nn.max_pool2d(x0, layout="NHWC")
            R.output(a)
        return a

    @R.function(private=True)
    def fused_depth(x0: R.Tensor((1, 4, 4, 2), "float16"), x1: R.Tensor((1, 3, 3, 2), "float16")) -> R.Tensor(
        (1, 4, 4, 2), "float32"
    ):
        R.func_attr({"Primitive": True})
        with R.dataflow():
            a = R.nn.conv2d(
                x0, x1, padding=1, groups=2, data_layout="NHWC", kernel_layout="IHWO", out_dtype="float32"
            )
            b = R.astype(x0, "float32")
            c = R.add(a, b)
            R.output(c)
        return c

    @R.function
    def main(x: R.Tensor((1, 4, 4, 2), "float32")):
        cls = StoredHalfExpected
        with R.dataflow():
            sum: R.Tensor((1, 4, 4, 2), "float16") = cls.fused_conv(
                x, R.const(FILTERS.astype(np.float16)), R.const(BIAS)
            )
            pool: R.Tensor((1, 4, 4, 2), "float16") = cls.fused_pool(sum)
            y: R.Tensor((1, 4, 4, 2), "float32") = cls.fused_depth(
                pool, R.const(TAPS.transpose(3, 1, 2, 0).astype(np.float16))
            )
            R.output(y)
        return y


@pytest.mark.long
def test_rewrite():
    after = halve(StoredHalfBefore)
    tvm.ir.assert_structural_equal(after, StoredHalfExpected)
    tvm.ir.assert_structural_equal(StoreHalf()(after), after)
    operands = inputs(StoredHalfBefore)
    assert close(run(after, *operands)[0], run(StoredHalfBefore, *operands)[0])


@as_module
def HalfIntegers(x: R.Tensor((2, 3), "int32"), y: R.Tensor((2, 3), "float64")):
    a = R.add(x, x)
    b = R.max(a, axis=1)
    c = R.nn.softmax(y)
    results = (b, c)
    return results


@pytest.mark.parametrize("mod", [HalfIntegers, GroupKernels()(HalfIntegers)], ids=["flat", "grouped"])
def test_other_types_stay(mod):
    tvm.ir.assert_structural_equal(StoreHalf()(mod), mod)


# ---- what is stored how ----


# The first kernel stores two tensors, one of them a result of ``main``.
@as_module
def HalfResidual(x: R.Tensor((1, 4, 4, 2), "float32"), y: R.Tensor((1, 4, 4, 2), "float32")):
    sum = R.add(x, y)
    pool = R.nn.avg_pool2d(sum, (3, 3), padding=(1, 1, 1, 1), layout="NHWC")
    mean = R.mean(pool, axis=[1, 2], keepdims=True)
    last = R.add(sum, mean)
    return (last, sum)


# Indices and the place of the largest stay integers; the table is stored in fp16.
@as_module
def HalfGather(x: R.Tensor((3, 4), "float32")):
    rows = R.take(R.const(TABLE), R.const(INDICES), axis=0)
    given = R.add(x, rows)
    near = R.nn.softmax(given)
    place = R.argmax(near, axis=1)
    return (near, place)


# Nothing is known of the function that is called.
@as_module
def Foreign(x: R.Tensor((1, 4, 4, 2), "float32")):
    before = R.nn.max_pool2d(x, layout="NHWC")
    called = R.call_dps_packed("foreign", (before,), out_ty=R.Tensor((1, 4, 4, 2), "float32"))
    soft = R.nn.softmax(called)
    last = R.nn.max_pool2d(soft, layout="NHWC")
    return last


@pytest.mark.long
@pytest.mark.parametrize(
    ("mod", "expected"),
    [
        (HalfResidual, ["float32", "float16", "float32"]),  # sum, pool, last
        (HalfGather, ["float16", "float32", "int64"]),  # given, near, place
        (Foreign, ["float32", "float32", "float16", "float32"]),  # before, called, soft, last
    ],
    ids=["results", "integers", "foreign"],
)
def test_types_between_kernels(mod, expected):
    after = halve(mod)
    assert types(after) == expected
    tvm.ir.assert_structural_equal(after["main"].ret_ty, mod["main"].ret_ty)
    tvm.ir.assert_structural_equal(StoreHalf()(after), after)
    if mod is not Foreign:
        operands = inputs(mod)
        for result, expected_result in zip(run(after, *operands), run(mod, *operands), strict=True):
            assert close(result, expected_result)


# ---- networks ----


@pytest.mark.long
@pytest.mark.parametrize("name", long_but(["toy"], ["toy", "squeezenet-1.1"]))
def test_networks_keep_their_values_and_kernels(name):
    mod = frontend.load(name).module
    after = halve(mod)
    assert launches(after) == len(kernel_groups(mod))
    assert set(types(after)[:-1]) == {"float16"}
    assert after["main"].ty.params == mod["main"].ty.params
    tvm.ir.assert_structural_equal(after["main"].ret_ty, mod["main"].ret_ty)
    (x,) = inputs(mod)
    machines = [relax.VirtualMachine(phases.build(m), tvm.cpu()) for m in (mod, after)]
    expected, result = (m["main"](tvm.runtime.tensor(x)).numpy() for m in machines)
    assert close(result, expected)


def plan_on_pim() -> tvm.IRModule:
    """Layers of the toy network on PIM, one of them split."""
    newton, mod = PimSpec.load("newton-gddr6"), TOY
    geometries = {region.name: region.geometry for region in extract_regions(mod).regions}

    def program(name: str, rows: int) -> PimProgram:
        g = geometries[name]
        schedule = schedules(g, newton, "fp16")[0]
        begin = rows * g.ow
        return lower(ProgramRequest(name, g, schedule, pixel_begin=begin), newton, dtype="fp16", channels=2)

    rows = {"stem.conv": 0, "block.expand.conv": 0, "down.conv": 4, "fc": 0}
    programs = {name: program(name, begin) for name, begin in rows.items()}
    splits = {name: Split("rows", begin) for name, begin in rows.items() if begin}
    return phases.apply_plan(mod, phases.PlanRewrites(splits=splits, programs=programs))


@pytest.mark.long
def test_pim_takes_and_gives_half():
    before = plan_on_pim()
    after = halve(before)
    assert launches(after) == len(kernel_groups(before))
    outlined = [f for _, f in after.functions_items() if "Codegen" in (f.attrs or {})]
    assert len(outlined) == 4
    for function in outlined:
        assert str(function.params[0].ty.dtype) == str(function.ret_ty.dtype) == "float16"
        (product,) = (b.value for b in function.body.blocks[0].bindings if operator(b.value) == "matmul")
        assert str(product.args[1].ty.dtype) == "float16"
    tvm.ir.assert_structural_equal(StoreHalf()(after), after)
    (x,) = inputs(TOY)
    assert close(run(inline_functions(after), x)[0], run(TOY, x)[0])
