"""Does the function handed to PIM take just the layer's input, and compute just the layer?"""

from dataclasses import replace

import numpy as np
import pytest
import tvm
from graphs import as_module, conv2d_nhwc, inline_functions, inputs, main_module, operators, run, same_bits
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from pimflow.compiler import phases
from pimflow.core.kernel import ConvGeometry
from pimflow.core.program import PimProgram
from pimflow.errors import PimflowError, PlanError
from pimflow.hardware import PimSpec
from pimflow.pim_backend.programs.lowering import ProgramRequest, lower
from pimflow.pim_backend.programs.schedule import schedules
from pimflow.relay_passes.flat import main_bindings, operator
from pimflow.relay_passes.pim.decompose_to_matrix_vector import DecomposeToMatrixVector
from pimflow.relay_passes.pim.outline_pim import PROGRAM_ATTR, OutlinePim
from pimflow.relay_passes.splits.split_mddp import SplitMdDp

NEWTON = PimSpec.load("newton-gddr6")
FILTERS = np.random.default_rng(0).standard_normal((4, 3, 3, 8), np.float32)
MATRIX = np.ascontiguousarray(FILTERS.reshape(4, -1)[:, :8].T)
BIAS = np.arange(4, dtype=np.float32)


def program(geometry: ConvGeometry, gpu_rows: int = 0) -> PimProgram:
    order = schedules(geometry, NEWTON, "fp32")[0]
    request = ProgramRequest("conv", geometry, order, pixel_begin=gpu_rows * geometry.ow)
    return lower(request, NEWTON, dtype="fp32", channels=2)


FC = program(ConvGeometry(n=2, h=1, w=1, c=8, oc=4))


@as_module
def OutlinedPimBefore(x: R.Tensor((2, 8), "float32")):
    a = R.nn.relu(x)
    fc = R.matmul(a, R.const(MATRIX))
    y = R.add(fc, R.const(1.0))
    return y


@I.ir_module
class OutlinedPimExpected:
    @R.function
    def pim_fc(x: R.Tensor((2, 8), "float32")) -> R.Tensor((2, 4), "float32"):
        R.func_attr({"Codegen": "pim", PROGRAM_ATTR: FC.to_json()})
        with R.dataflow():
            fc = R.matmul(x, R.const(MATRIX))
            R.output(fc)
        return fc

    @R.function
    def main(x: R.Tensor((2, 8), "float32")):
        cls = OutlinedPimExpected
        with R.dataflow():
            a = R.nn.relu(x)
            fc = cls.pim_fc(a)
            y = R.add(fc, R.const(1.0))
            R.output(y)
        return y


def test_rewrite():
    after = OutlinePim({"fc": FC})(OutlinedPimBefore)
    tvm.ir.assert_structural_equal(after, OutlinedPimExpected)
    # Relax runs the function as it stands, when nobody generates code for it.
    assert same_bits(OutlinedPimBefore, inline_functions(after))
    tvm.ir.assert_structural_equal(OutlinePim({"fc": FC})(after), after)


@pytest.mark.parametrize("names", [{}, {"absent": FC}, {"a": FC}])
def test_what_is_not_named_stays(names):
    tvm.ir.assert_structural_equal(OutlinePim(names)(OutlinedPimBefore), OutlinedPimBefore)


GEOMETRY = ConvGeometry(n=1, h=7, w=6, c=8, oc=4, kh=3, kw=3, padding=(1, 1, 1, 1))


def network(producer, geometry: ConvGeometry) -> tvm.IRModule:
    """Two inputs, an operator of the network's own that moves data, and a convolution of its result."""
    x, y = (relax.Var(name, relax.TensorType((1, 7, 6, 4), "float32")) for name in "xy")
    weights = np.ascontiguousarray(FILTERS[:, : geometry.kh, : geometry.kw, : geometry.c])
    attributes = {name: getattr(geometry, name) for name in ("padding", "dilation")}

    def layer(builder):
        moved = builder.emit(producer(x, y), name_hint="moved")
        conv = conv2d_nhwc(moved, weights, strides=geometry.stride, **attributes)
        return relax.op.nn.relu(builder.emit(conv, name_hint="conv"))

    return main_module([x, y], layer)


def concatenation(x, y):
    return relax.op.concat([x, y], axis=3)


def padding(x, y):
    return relax.op.nn.pad(x, [0, 0, 2, 1, 0, 3, 2, 2])


def row_slice(x, y):
    return relax.op.strided_slice(x, [1], [1], [6], assume_inbound=True)


WINDOWS = {
    "1x1": {},
    "1x1, strided": {"stride": (2, 2)},
    "1x1, padded": {"padding": (0, 0, 1, 2)},
    "3x3": {"kh": 3, "kw": 3},
    "3x3, same": {"kh": 3, "kw": 3, "padding": (1, 1, 1, 1)},
    "3x3, padding never read": {"kh": 3, "kw": 3, "stride": (2, 2), "padding": (0, 0, 1, 1)},
    "1x3, dilated": {"kw": 3, "dilation": (1, 2), "padding": (0, 2, 0, 2)},
}
PRODUCERS = {"concat": (concatenation, 7, 6, 8), "pad": (padding, 10, 9, 8), "slice": (row_slice, 5, 6, 4)}


# A split slices the layer's input before the function: a few windows test all of it.
@pytest.mark.parametrize(
    ("window", "gpu_rows"),
    [
        *((WINDOWS["1x3, dilated"], rows) for rows in (0, 1)),
        *(
            pytest.param(WINDOWS[name], rows, marks=pytest.mark.long)
            for name in WINDOWS
            for rows in ((0, 1) if name == "3x3, padding never read" else (0,))
            if name != "1x3, dilated"
        ),
    ],
)
@pytest.mark.parametrize(("producer", "h", "w", "c"), PRODUCERS.values(), ids=PRODUCERS)
def test_the_function_takes_the_layers_input(producer, h, w, c, window, gpu_rows):
    """Not less, though the network too pads, slices and joins; not more."""
    geometry = ConvGeometry(n=1, h=h, w=w, c=c, oc=4, **window)
    before = network(producer, geometry)
    name = "conv__pim" if gpu_rows else "conv"
    splits = {"conv": gpu_rows} if gpu_rows else {}
    after = SplitMdDp(splits)(before)
    after = OutlinePim({name: program(geometry, gpu_rows)})(DecomposeToMatrixVector([name])(after))
    (conv,) = (b.value for b in main_bindings(after) if b.var.name == name)
    assert isinstance(conv.op, tvm.ir.GlobalVar)
    assert [arg.name for arg in conv.args] == ["moved"]
    assert operators(after).count("matmul") == 0

    operands = inputs(before)
    (expected,) = run(before, *operands)
    machine = relax.VirtualMachine(phases.build(after), tvm.cpu())
    got = machine["main"](*(tvm.runtime.tensor(x) for x in operands)).numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_errors_inside_a_pass_keep_their_type():
    """A pass runs below TVM, which hands on only the errors that it knows."""
    with pytest.raises(PimflowError, match="a split needs"):
        SplitMdDp({"conv": 99})(network(concatenation, GEOMETRY))


# ---- what is added to a product goes into the latches ----

LATCHED = replace(FC, initial="bias")
ADDED = replace(FC, initial="add")
JOINED = replace(FC, geometry=FC.geometry.with_added_channels, added_channels=4)
BOTH = replace(JOINED, initial="bias")
ACTIVATED = replace(ADDED, activation="relu")
CLIPPED = replace(FC, activation="relu6")


@as_module
def BeforeResidual(x: R.Tensor((2, 8), "float32"), z: R.Tensor((2, 4), "float32")):
    other = R.matmul(x, R.const(MATRIX))
    fc = R.matmul(x, R.const(MATRIX))
    y = R.add(z, fc)
    w = R.add(y, other)
    return w


@as_module
def BeforeActivated(x: R.Tensor((2, 8), "float32"), z: R.Tensor((2, 4), "float32")):
    fc = R.matmul(x, R.const(MATRIX))
    y = R.add(z, fc)
    w = R.nn.relu(y)
    v = R.nn.relu(w)
    return v


@as_module
def BeforeClipped(x: R.Tensor((2, 8), "float32")):
    fc = R.matmul(x, R.const(MATRIX))
    y = R.clip(fc, 0, 6)
    return y


@as_module
def BeforeBoth(x: R.Tensor((2, 8), "float32"), z: R.Tensor((2, 4), "float32")):
    fc = R.matmul(x, R.const(MATRIX))
    y = R.add(fc, R.const(BIAS))
    w = R.add(z, y)
    return w


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "fc", "inside", "operands", "outside"),
    [
        (OutlinedPimBefore, LATCHED, ["matmul", "add"], ["a"], ["nn.relu"]),
        (BeforeResidual, ADDED, ["matmul", "add"], ["x", "z"], ["matmul", "add"]),
        (BeforeResidual, JOINED, ["matmul", "add"], ["x", "z"], ["matmul", "add"]),
        (BeforeBoth, BOTH, ["matmul", "add", "add"], ["x", "z"], []),
        (BeforeActivated, ACTIVATED, ["matmul", "add", "nn.relu"], ["x", "z"], ["nn.relu"]),
        (BeforeClipped, CLIPPED, ["matmul", "clip"], ["x"], []),
    ],
    ids=["bias", "residual", "residual as channels", "both", "activated", "clipped"],
)
def test_what_the_program_does_goes_into_the_function(before, fc, inside, operands, outside):
    after = OutlinePim({"fc": fc})(before)
    (function,) = (f for f in after.functions.values() if "Codegen" in (f.attrs or {}))
    assert (function.attrs["Codegen"], function.attrs[PROGRAM_ATTR]) == ("pim", fc.to_json())
    assert [operator(b.value) for b in function.body.blocks[0].bindings] == inside
    (call,) = (b.value for b in main_bindings(after) if isinstance(b.value.op, tvm.ir.GlobalVar))
    assert [operand.name for operand in call.args] == operands
    assert [kind for kind in operators(after) if kind] == outside
    assert same_bits(before, inline_functions(after))
    tvm.ir.assert_structural_equal(OutlinePim({"fc": fc})(after), after)


@as_module
def ReadTwice(x: R.Tensor((2, 8), "float32")):
    fc = R.matmul(x, R.const(MATRIX))
    y = R.add(fc, R.const(1.0))
    z = R.multiply(fc, y)
    return z


@pytest.mark.parametrize(
    ("before", "fc"),
    [
        (ReadTwice, LATCHED),
        (ReadTwice, JOINED),
        (OutlinedPimBefore, BOTH),
        (OutlinedPimBefore, ACTIVATED),
        (BeforeActivated, CLIPPED),
    ],
)
def test_a_product_that_others_read_too_keeps_its_addition(before, fc):
    with pytest.raises(PlanError, match=r"'fc': its program does .* after it, but the network does not"):
        OutlinePim({"fc": fc})(before)


@pytest.mark.parametrize(("before", "initial"), [(BeforeResidual, ""), (BeforeBoth, "bias")])
def test_a_region_that_adds_a_tensor_gives_the_networks_values(before, initial):
    geometry = FC.geometry.with_added_channels
    pim = PimSpec.load("aim-gddr6") if initial else NEWTON
    order = schedules(geometry, pim, "fp16")[0]
    request = ProgramRequest("fc", geometry, order, initial=initial, added_channels=4)
    joined = lower(request, pim, dtype="fp16", channels=2)
    operands = inputs(before)
    (expected,) = run(before, *operands)
    machine = relax.VirtualMachine(phases.build(OutlinePim({"fc": joined})(before)), tvm.cpu())
    got = machine["main"](*(tvm.runtime.tensor(x) for x in operands)).numpy()
    np.testing.assert_allclose(got, expected, rtol=5e-3, atol=5e-3)
