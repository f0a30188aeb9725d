"""Kernels as C functions: for a network in C, and for TVM's runtime, which times them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

import tvm
from tvm import tirx
from tvm.s_tir.pipeline import default_s_tir_pipeline

from pimflow.compiler.c_code import vectors
from pimflow.errors import UnsupportedOpError
from pimflow.relay_passes.c_kernels.plain_c import (
    PARALLEL,
    MarkParallel,
    PlainLoops,
    PlainMagnitudes,
    PlainRegisters,
)
from pimflow.relay_passes.c_kernels.vector_calls import VectorCalls, has_vectors
from pimflow.relay_passes.memory.lift_workspaces import WORKSPACES, with_workspaces
from pimflow.relay_passes.schedules.loops import nodes
from pimflow.relay_passes.schedules.widen_half import WidenHalf
from pimflow.relay_passes.schedules.wrap_narrow import WrapNarrow

TARGET = {"kind": "c", "host": {"kind": "c"}}
ALIGNMENT_BYTES = 64
TYPES = {
    **{
        "float16": "half",
        "float32": "float",
        "float64": "double",
        "bfloat16": "uint16_t",  # the bits; arithmetic is fp32
        "bool": "bool",
    },
    **{f"{sign}int{bits}": f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
SYMBOL = "__tvm_ffi_"  # begins the names that TVM's runtime looks for
COMPUTE_SCOPE = "compute_scope"  # marks the body inside the checks of TVM's calling convention
# Strict C has no such type, but compilers do.
HALF = "#ifndef PIMFLOW_HALF\n#define PIMFLOW_HALF\n__extension__ typedef _Float16 half;\n#endif\n"
# TVM writes infinity in fp32 as ``inff``. GCC at -O3 swaps the loops over channels and pixels of a register
# tile, which then is not in registers.
PRELUDE = """#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define inff INFINITY

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-loop-interchange")
#endif
#if defined(__GNUC__)
#define PIMFLOW_RESTRICT __restrict__
#define PIMFLOW_KERNEL static __attribute__((noinline))
#else
#define PIMFLOW_RESTRICT restrict
#define PIMFLOW_KERNEL static
#endif
#if defined(_OPENMP)
#define PIMFLOW_PARALLEL _Pragma("omp parallel for")
#else
#define PIMFLOW_PARALLEL
#endif
"""


def kernel_source(functions: Mapping[str, tirx.PrimFunc], target: tvm.target.Target) -> str:
    """C functions of scheduled kernels, which take pointers to tensors, with all definitions that they need.

    Raises
    ------
    UnsupportedOpError
        For a kernel that needs TVM's runtime.
    """
    for name, function in functions.items():
        _require_no_runtime(name, function)
    kernels = {name: f.with_attr("global_symbol", name) for name, f in functions.items()}
    lowered = _lower(kernels, target)
    # Kernels with vectors that the C code does not define are lowered again, without vectors.
    plain_kernels = {name: kernels[name] for name, f in lowered.items() if has_vectors(f)}
    with target:
        serial = tvm.transform.Sequential([PlainLoops()])(tvm.IRModule(plain_kernels))
    lowered |= _lower({gv.name_hint: f for gv, f in serial.functions_items()}, target)
    generated = tvm.get_global_func("target.build.c")(tvm.IRModule(lowered), target).inspect_source()
    assert "TVMBackend" not in generated, "kernels allocate nothing"
    code = _strip_runtime(generated).replace(f"{PARALLEL}();", "PIMFLOW_PARALLEL")
    for name, function in functions.items():
        if (function.attrs or {}).get("tirx.noalias"):
            code = _add_restrict(code, name)
    half = HALF if re.search(r"\bhalf\b", code) else ""
    return f"{PRELUDE}{half}{vectors.prelude(code)}\n{code}"


def _add_restrict(code: str, name: str) -> str:
    """`code` with ``restrict`` pointers in function `name`, whose tensors do not overlap."""
    head = re.search(rf"^PIMFLOW_KERNEL void {name}\(.*\) {{$", code, re.MULTILINE)
    assert head is not None, "every kernel is in the code"
    return code[: head.start()] + head[0].replace("* ", "* PIMFLOW_RESTRICT ") + code[head.end() :]


def c_type(dtype: str) -> str:
    """The C type of `dtype`; raises `UnsupportedOpError` if C has none."""
    if dtype not in TYPES:
        raise UnsupportedOpError(f"target c: C has no type for {dtype}")
    return TYPES[dtype]


def _lower(kernels: Mapping[str, tirx.PrimFunc], target: tvm.target.Target) -> dict[str, tirx.PrimFunc]:
    phases, _, _ = default_s_tir_pipeline()
    with target:
        wrapped = phases(tirx.transform.BindTarget(target)(tvm.IRModule(dict(kernels))))
    bare = {gv: _strip_wrapper(f, kernels[_plain(gv.name_hint)]) for gv, f in wrapped.functions_items()}
    host = [
        WrapNarrow(),
        PlainRegisters(),
        WidenHalf(),
        PlainMagnitudes(),
        tirx.transform.LowerTVMBuiltin(),
        tirx.transform.LowerIntrin(),
    ]
    stored = [tirx.transform.BF16StorageLegalize(), VectorCalls(), MarkParallel()]
    lowered = tvm.transform.Sequential([*host, *stored])(tvm.IRModule(bare))
    return {_plain(gv.name_hint): f for gv, f in lowered.functions_items()}


def _require_no_runtime(name: str, function: tirx.PrimFunc) -> None:
    """Raise for a kernel that calls a function of TVM's runtime, or holds a type that C does not have."""
    for call in nodes(function.body, tvm.ir.Call):
        if "packed" in getattr(call.op, "name", ""):
            raise UnsupportedOpError(f"target c: '{name}' is computed by TVM's runtime ({call.args[0]})")
    for param in function.params:
        c_type(str(param.dtype))


def _plain(symbol: str) -> str:
    return symbol.removeprefix(SYMBOL)


def _strip_wrapper(wrapped: tirx.PrimFunc, kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """The body of `wrapped` as a function of pointers, without TVM's calling convention."""
    # The first declarations are those of the operands, in order.
    operands = [node.buffer for node in nodes(wrapped.body, tirx.DeclBuffer)[: len(kernel.params)]]
    body = next(node.body for node in nodes(wrapped.body, tirx.AttrStmt) if node.attr_key == COMPUTE_SCOPE)
    params: list[tirx.Var] = []
    for operand in reversed(operands):
        pointer = tirx.Var(
            f"{operand.name}_data", tvm.ir.PointerType(tvm.ir.PrimType(operand.dtype), "global")
        )
        params.insert(0, pointer)
        body = tirx.SeqStmt([tirx.DeclBuffer(operand, data=pointer), body])
    function = tirx.PrimFunc(params, body)
    attrs = {"global_symbol": _plain(str(wrapped.attrs["global_symbol"])), "target": wrapped.attrs["target"]}
    return function.with_attrs(attrs)


def _strip_runtime(generated: str) -> str:
    """Functions of the generated file, without declarations of TVM's runtime."""
    begin = generated.index("void* __tvm_ffi__library_ctx")
    declared = re.sub(r'#ifdef __cplusplus\nextern "C"\n#endif\n', "", generated[begin:].split("\n", 1)[1])
    library = re.compile(r"^(?:TVM_DLL|extern) \w+ (\w+)\([\w, *]*\);\n", re.MULTILINE)
    # If GCC inlined them, it would lose the ``restrict`` of the signature.
    return re.sub(r"^TVM_DLL ", "PIMFLOW_KERNEL ", library.sub("", declared), flags=re.MULTILINE)


def callable_source(functions: Mapping[str, tirx.PrimFunc]) -> str:
    """C source of scheduled kernels that TVM's runtime can call, for any compiler.

    It declares TVM's calling convention itself, so that no machine needs TVM's headers.
    Workspaces are static, so that a kernel allocates nothing.
    """
    lifted = {name: with_workspaces(f) for name, f in functions.items()}
    # A prefix, since a kernel may be called `main`.
    code = kernel_source({f"kernel_{name}": f for name, f in lifted.items()}, tvm.target.Target(TARGET))
    return code + CONVENTION + "\n".join(_entry_point(name, f) for name, f in lifted.items())


def _entry_point(name: str, function: tirx.PrimFunc) -> str:
    """The entry point for TVM's runtime: it unpacks the tensors, calls `function` and returns 0."""
    count = int((function.attrs or {}).get(WORKSPACES, 0))
    spaces = function.params[len(function.params) - count :]
    operand_count = len(function.params) - count
    types = [c_type(str(param.dtype)) for param in function.params]
    declarations = [
        f"  static {c_type(str(b.dtype))} space{n}[{prod(map(int, b.shape))}] PIMFLOW_ALIGNED;"
        for n, b in enumerate(spaces)
    ]
    operands = [f"({types[n]} *)operand(given + {n})" for n in range(operand_count)]
    arguments = ", ".join([*operands, *(f"space{n}" for n in range(count))])
    return "\n".join(
        [
            f"PIMFLOW_EXPORT int {SYMBOL}{name}(void *self, const Any *given, int32_t count, void *made) {{",
            *declarations,
            "  (void)self, (void)count, (void)made;",
            f"  kernel_{name}({arguments});",
            "  return 0;",
            "}\n",
        ]
    )


# From tvm-ffi's c_api.h: an argument is a DLTensor, or an object that begins with a header of 24 bytes.
CONVENTION = """
typedef struct {
  int32_t type_index;
  uint32_t padding;
  union {
    int64_t number;
    void *pointer;
  } value;
} Any;

typedef struct {
  void *data;
  int32_t device_type, device_id, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} Tensor;

#ifdef __cplusplus
#define PIMFLOW_EXPORT extern "C"
#else
#define PIMFLOW_EXPORT
#endif
#if defined(__GNUC__)
#define PIMFLOW_ALIGNED __attribute__((aligned(64)))
#else
#define PIMFLOW_ALIGNED
#endif

static void *operand(const Any *argument) {
  const char *at = (const char *)argument->value.pointer + (argument->type_index == 70 ? 24 : 0);
  const Tensor *tensor = (const Tensor *)(const void *)at;
  return (char *)tensor->data + tensor->byte_offset;
}

"""
