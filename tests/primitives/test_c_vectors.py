"""Do vectors in C compute what numpy does, however wide the processor's are, and which become calls?"""

import ctypes

import numpy as np
import pytest
import tvm
from conv_layers import layers_for
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from length import long_but
from tvm.script import ir as I
from tvm.script import tirx as T

from pimflow.compiler.c_code import builds, kernels, vectors
from pimflow.primitives import PRIMITIVES
from pimflow.primitives.kernels.prim_func import kernel
from pimflow.relay_passes.c_kernels.plain_c import PARALLEL, MarkParallel, PlainLoops
from pimflow.relay_passes.c_kernels.vector_calls import LANES, VectorCalls, has_vectors
from pimflow.relay_passes.schedules.schedule_cpu import ScheduleCpu

needs_compiler = pytest.mark.skipif(not builds.local_compiler(), reason="needs a C compiler")
C = tvm.target.Target(kernels.TARGET)
OF_NUMPY = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide},
    **{"max": lambda a, b: np.where(a > b, a, b), "min": lambda a, b: np.where(a < b, a, b)},
    **{"splat": lambda a: np.full_like(a, a[0]), "vsqrt": np.sqrt, "vfloor": np.floor, "vfabs": np.abs},
    **{
        name: lambda a, b, c, d, chosen=chosen: np.where(chosen(a, b), c, d)
        for name, chosen in {
            **{"gt": np.greater, "ge": np.greater_equal, "lt": np.less, "le": np.less_equal},
            **{"eq": np.equal, "ne": np.not_equal},
        }.items()
    },
}


OPERANDS = {1: ("splat", "vsqrt", "vfloor", "vfabs"), 4: ("gt", "ge", "lt", "le", "eq", "ne")}
COUNT = dict.fromkeys(OF_NUMPY, 2) | {name: n for n, names in OPERANDS.items() for name in names}


def caller_source(name, lanes):
    """A C function of arrays that calls one of vectors."""
    operands = ", ".join(f"load{lanes}({p})" for p in "abcd"[: COUNT[name]]) if name != "splat" else "*a"
    return (
        f"void {name}_{lanes}(const float *a, const float *b, const float *c, const float *d, float *to) "
        f"{{ (void)a, (void)b, (void)c, (void)d; store{lanes}(to, {name}{lanes}({operands})); }}\n"
    )


@pytest.fixture(scope="module", params=long_but([4], [1, 4, 8, 16]))
def library(request, tmp_path_factory):
    """Every function, where the processor's vectors have so many lanes."""
    folder = tmp_path_factory.mktemp("vectors")
    calls = "".join(caller_source(name, lanes) for name in OF_NUMPY for lanes in LANES)
    calls += "".join(
        f"void strided_{n}(const float *a, float *to) {{ scatter{n}(to + 63, -2, gather{n}(a, 3)); }}\n"
        for n in LANES
    )
    (folder / "v.c").write_text("#include <math.h>\n#include <stdint.h>\n" + vectors.prelude(calls) + calls)
    here = builds.require_compiler()
    options = [*builds.SHARED, "-Wall", "-Wextra", "-pedantic", "-Werror", "-Wno-psabi"]
    here.build([folder / "v.c"], folder / "v.so", [*options, f"-DPIMFLOW_LANES={request.param}"])
    return ctypes.CDLL(str(folder / "v.so"))


@needs_compiler
def test_elements_with_a_stride_between_them(library):
    x = np.arange(64, dtype=np.float32)
    for lanes in LANES:
        y = np.full(64, -1, np.float32)
        library[f"strided_{lanes}"](*(ctypes.c_void_p(a.ctypes.data) for a in (x, y)))
        expected = np.full(64, -1, np.float32)
        expected[63 : 63 - 2 * lanes : -2] = x[: 3 * lanes : 3]
        np.testing.assert_array_equal(y, expected)


@needs_compiler
@given(
    operands=st.lists(arrays(np.float32, 16, elements=st.floats(width=32)), min_size=4, max_size=4),
    equal=st.booleans(),
)
def test_functions_of_vectors_are_those_of_numpy(library, operands, equal):
    operands = [operands[0], operands[0].copy() if equal else operands[1], *operands[2:]]
    for name, of_numpy in OF_NUMPY.items():
        for lanes in LANES:
            actual = np.full(18, 7, np.float32)
            pointers = [ctypes.c_void_p(x.ctypes.data) for x in (*operands, actual)]
            pointers[-1] = ctypes.c_void_p(actual.ctypes.data + 4)  # not aligned, nothing written beyond
            library[f"{name}_{lanes}"](*pointers)
            with np.errstate(all="ignore"):
                expected = of_numpy(*(x[:lanes] for x in operands[: COUNT[name]]))
            np.testing.assert_array_equal(actual[1 : lanes + 1], expected, err_msg=f"{name}{lanes}")
            assert (actual[lanes + 1 :] == 7).all() and actual[0] == 7


@I.ir_module
class VectorStatements:
    @T.prim_func
    def f(x: T.handle("float32", "global"), y: T.handle("float32", "global")):
        a = T.decl_buffer((64,), data=x)
        b = T.decl_buffer((64,), data=y)
        for i in T.parallel(4):
            b[T.Ramp(i * 16, 1, 16)] = b[T.Ramp(i * 16, 1, 16)] + a[T.Ramp(i * 16, 1, 16)] * T.Broadcast(
                a[i], 16
            )


@I.ir_module
class VectorCallStatements:
    @T.prim_func
    def f(x: T.handle("float32", "global"), y: T.handle("float32", "global")):
        a = T.decl_buffer((64,), data=x)
        b = T.decl_buffer((64,), data=y)
        for i in T.parallel(4):
            T.call_extern(
                "void",
                "store16",
                T.address_of(b[i * 16]),
                T.call_pure_extern(
                    "float32x16",
                    "muladd16",
                    T.call_pure_extern("float32x16", "load16", T.address_of(b[i * 16])),
                    T.call_pure_extern("float32x16", "load16", T.address_of(a[i * 16])),
                    T.call_pure_extern("float32x16", "splat16", a[i]),
                ),
            )


def test_vectors_become_calls():
    after = VectorCalls()(VectorStatements)
    tvm.ir.assert_structural_equal(after, VectorCallStatements)
    tvm.ir.assert_structural_equal(VectorCalls()(after), after)
    assert has_vectors(VectorStatements["f"]) and not has_vectors(after["f"])


def test_parallel_loops_are_marked():
    after = MarkParallel()(VectorCallStatements)
    assert f'"{PARALLEL}")' in after.script() and "T.parallel" not in after.script()
    tvm.ir.assert_structural_equal(MarkParallel()(after), after)


def test_loops_become_serial():
    primitive = PRIMITIVES["direct-hwc-7x32"]
    layer = layers_for(primitive, 1)[0]
    before = ScheduleCpu()(tvm.IRModule({"k": kernel(primitive, layer)}))
    after = PlainLoops()(before)
    assert "vectorized" in before.script() and "unroll" in before.script()
    assert "vectorized" not in after.script() and "unroll" not in after.script()
    assert before.script().count("T.parallel") == after.script().count("T.parallel") > 0
    tvm.ir.assert_structural_equal(PlainLoops()(after), after)
    plain = tvm.IRModule({"k": kernel(PRIMITIVES["direct-hwc-loops"], layer)})
    tvm.ir.assert_structural_equal(PlainLoops()(plain), plain)


@I.ir_module
class NarrowingCast:
    @T.prim_func(s_tir=True)
    def f(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "int32")):
        for i in T.parallel(4):
            for j in T.vectorized(16):
                with T.sblock("y"):
                    k = T.axis.spatial(64, i * 16 + j)
                    y[k] = T.Cast("int32", x[k])


@needs_compiler
def test_other_vectors_are_left_to_the_compiler():
    built = builds.load_module(kernels.callable_source({"f": NarrowingCast["f"]}))
    x = np.arange(64, dtype=np.float32) * 1.5
    y = tvm.runtime.tensor(np.zeros(64, np.int32))
    built["f"](tvm.runtime.tensor(x), y)
    np.testing.assert_array_equal(y.numpy(), x.astype(np.int32))
