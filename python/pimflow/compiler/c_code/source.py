"""A network as C source that needs only a compiler and the mathematical library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tvm
from tvm import relax, tirx

from pimflow import memory
from pimflow.compiler import phases as pipeline
from pimflow.compiler.c_code.kernels import ALIGNMENT_BYTES, HALF, TARGET, c_type, kernel_source
from pimflow.core.liveness import Liveness
from pimflow.errors import UnsupportedOpError, one_line
from pimflow.frontend import relax_module
from pimflow.hardware import System
from pimflow.relay_passes.memory.plan_pool import PlanPool
from pimflow.relay_passes.memory.stream_weights import AWAIT_COPY, weight_copy

FILES = ("network.c", "network.h", "main.c", "weights.bin")
Tensors = tuple[tuple[tuple[int, ...], str], ...]  # shapes and dtypes


@dataclass(frozen=True, kw_only=True)
class CSource:
    """A network in C.

    Attributes
    ----------
    code, header, main : str
        ``network.c`` with ``pimflow_run``, ``network.h`` that declares it, and ``main.c``: a program that
        reads weights and inputs from files and writes outputs.
    weights : bytes
        Constants; filters in the order that primitives read.
    pool_bytes : int
        Size of the memory that a caller gives ``pimflow_run`` for all intermediate tensors.
    """

    code: str
    header: str
    main: str
    weights: bytes
    pool_bytes: int
    inputs: Tensors
    outputs: Tensors

    def files(self) -> dict[str, bytes]:
        """Contents by file name."""
        texts = [text.encode() for text in (self.code, self.header, self.main)]
        return dict(zip(FILES, [*texts, self.weights], strict=True))

    @classmethod
    def load(cls, directory: Path, inputs: Tensors, outputs: Tensors, pool_bytes: int) -> CSource:
        """Read the files of `files` from a directory."""
        *texts, weights = [(directory / name).read_bytes() for name in FILES]
        code, header, main = (text.decode() for text in texts)
        return cls(
            code=code,
            header=header,
            main=main,
            weights=weights,
            pool_bytes=pool_bytes,
            inputs=inputs,
            outputs=outputs,
        )


def source(mod: tvm.IRModule, system: System, name: str) -> CSource:
    """Write C for a canonical module without parts on PIM; its convolutions may be primitives.

    Raises
    ------
    UnsupportedOpError
        For an operator that a function of TVM's runtime computes, and for types that C does not have.
    """
    target = tvm.target.Target(TARGET)
    pools: list[int] = []

    def plan_memory(liveness: Liveness) -> memory.MemoryPlan:
        """Plan the pool, and record its size."""
        plan = memory.plan(liveness.lifetimes)
        pools.append(plan.pool_bytes)
        return plan

    phases = [
        *pipeline.allocating_phases(target, system),
        PlanPool(plan_memory),
        relax.transform.CanonicalizeBindings(),
        relax.transform.DeadCodeElimination(["main"]),
    ]
    with target:
        planned_module = tvm.transform.Sequential(phases)(mod)
    statements = _CStatements(planned_module)
    inputs = tuple(relax_module.inputs(mod).values())
    outputs = tuple((statements.shapes[result], statements.dtypes[result]) for result in statements.results)
    signature = _signature(inputs, outputs)
    kernels = kernel_source({gv.name_hint: planned_module[gv] for gv in statements.kernels}, target)
    copies = [
        f"  memcpy(output{n}, {statements.addresses[result]}, {_bytes(*outputs[n])});"
        for n, result in enumerate(statements.results)
    ]
    body = "\n".join([*statements.calls, *copies])
    head = head_comment(name)
    return CSource(
        code=f'{head}#include "network.h"\n\n{kernels}\n{signature} {{\n{body}\n}}\n',
        header=_header(head, signature, pools[-1], len(statements.weights)),
        main=_main(inputs, outputs),
        weights=bytes(statements.weights),
        pool_bytes=pools[-1],
        inputs=inputs,
        outputs=outputs,
    )


def head_comment(name: str) -> str:
    """First line of a file: a comment that no name of a network can end, not even by joined lines."""
    aligned = f"Tensors are contiguous; memory is aligned to {ALIGNMENT_BYTES} bytes."
    return f"/* {one_line(name).replace('*/', '* /')}, made by pimflow. {aligned} */\n"


class _CStatements:
    """The bindings of ``main`` as C statements.

    Attributes
    ----------
    kernels : list of GlobalVar
        All called kernels, each once.
    addresses : dict of Var to str
        C expression of the pointer to each tensor.
    """

    def __init__(self, mod: tvm.IRModule):
        self.calls: list[str] = []
        self.kernels: list[tvm.ir.GlobalVar] = []
        self.addresses: dict[relax.Var, str] = {}
        self.shapes: dict[relax.Var, tuple[int, ...]] = {}
        self.dtypes: dict[relax.Var, str] = {}
        self.weights = bytearray()
        self._constants: list[tuple[tvm.ir.GenericConst, str]] = []
        self._tuples: dict[relax.Var, list[relax.Expr]] = {}
        main = mod["main"]
        for number, param in enumerate(main.params):
            self._add_tensor(param, f"input{number}")
        for binding in (b for block in main.body.blocks for b in block.bindings):
            self._add_binding(binding.var, binding.value)
        result = main.body.body
        self.results = (
            list(result.fields) if isinstance(result, relax.Tuple) else self._tuples.get(result, [result])
        )

    def _add_tensor(self, var: relax.Var, address: str) -> None:
        self.addresses[var] = address
        self.shapes[var] = tuple(int(extent) for extent in var.ty.shape)
        self.dtypes[var] = str(var.ty.dtype)

    def _add_binding(self, var: relax.Var, value: relax.Expr) -> None:
        op = value.op if isinstance(value, relax.Call) else None
        name = getattr(op, "name", "")
        if isinstance(op, tvm.ir.GlobalVar):
            self._add_call(op, value.args)
        elif copy := weight_copy(value):
            if copy != AWAIT_COPY:  # copies are made in order
                weight, tensor = value.args
                size_bytes = _bytes(self.shapes[tensor], self.dtypes[tensor])
                self.calls.append(
                    f"  memcpy({self._address(tensor)}, {self._address(weight)}, {size_bytes});"
                )
        elif name == "relax.null_value":
            return  # an argument that a view leaves out
        elif name == "relax.memory.alloc_storage":
            self.addresses[var] = "pool"
        elif name == "relax.memory.alloc_tensor":
            self._add_tensor(var, f"pool + {int(value.args[1].value)}")
        elif name == "relax.memory.view":
            offset = value.args[3]
            offset_bytes = int(offset.value) if isinstance(offset, tirx.IntImm) else 0
            self._add_tensor(var, f"{self._address(value.args[0])} + {offset_bytes}")
        elif name in ("relax.memory.ensure_zero_offset", "relax.reshape"):
            self._add_tensor(var, self._address(value.args[0]))
        elif isinstance(value, relax.Tuple):
            self._tuples[var] = list(value.fields)
        elif isinstance(value, relax.TupleGetItem):
            self._add_tensor(var, self._address(self._tuples[value.tuple_value][value.index]))
        elif isinstance(value, relax.Var | tvm.ir.GenericConst):
            self._add_tensor(var, self._address(value))
        else:
            callee = name or getattr(op, "global_symbol", type(value).__name__)
            raise UnsupportedOpError(f"target c: '{var.name}' is computed by TVM's runtime ({callee})")

    def _address(self, tensor: relax.Expr) -> str:
        if isinstance(tensor, relax.Var):
            return self.addresses[tensor]
        for constant, address in self._constants:
            if constant.same_as(tensor):
                return address
        self.weights += bytes(-len(self.weights) % ALIGNMENT_BYTES)
        address = f"weights + {len(self.weights)}"
        self.weights += np.ascontiguousarray(np.from_dlpack(tensor.value)).tobytes()
        self._constants.append((tensor, address))
        return address

    def _add_call(self, kernel: tvm.ir.GlobalVar, args: list[relax.Expr]) -> None:
        if not any(kernel.same_as(declared_kernel) for declared_kernel in self.kernels):
            self.kernels.append(kernel)
        arguments = [f"(void *)({self._address(arg)})" for arg in args]
        self.calls.append(f"  {kernel.name_hint}({', '.join(arguments)});")


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize


def _signature(inputs: Tensors, outputs: Tensors) -> str:
    input_parameters = [f"const {c_type(dtype)} *input{n}" for n, (_, dtype) in enumerate(inputs)]
    output_parameters = [f"{c_type(dtype)} *output{n}" for n, (_, dtype) in enumerate(outputs)]
    fixed = ["const unsigned char *weights", "unsigned char *pool"]
    return f"void pimflow_run({', '.join([*fixed, *input_parameters, *output_parameters])})"


def _header(head: str, signature: str, pool_bytes: int, weight_bytes: int) -> str:
    half = HALF if "half *" in signature else ""
    return (
        f"{head}#ifndef PIMFLOW_NETWORK_H\n#define PIMFLOW_NETWORK_H\n"
        f"#include <stdbool.h>\n#include <stdint.h>\n{half}\n"
        f"#define PIMFLOW_ALIGNMENT_BYTES {ALIGNMENT_BYTES}\n"
        f"#define PIMFLOW_POOL_BYTES {max(pool_bytes, ALIGNMENT_BYTES)}\n"
        f"#define PIMFLOW_WEIGHT_BYTES {max(weight_bytes, ALIGNMENT_BYTES)}\n\n"
        f"{signature};\n\n#endif\n"
    )


def _main(inputs: Tensors, outputs: Tensors) -> str:
    """C program that reads weights and inputs from raw files, and writes outputs to raw files."""
    loads = [
        f"  void *input{n} = filled(argv[{n + 2}], {_bytes(*tensor)});" for n, tensor in enumerate(inputs)
    ]
    allocations = [f"  void *output{n} = room({_bytes(*tensor)});" for n, tensor in enumerate(outputs)]
    names = [f"input{n}" for n in range(len(inputs))] + [f"output{n}" for n in range(len(outputs))]
    first = len(inputs) + 2
    stores = [
        f"  store(argv[{first + n}], output{n}, {_bytes(*tensor)});" for n, tensor in enumerate(outputs)
    ]
    usage = " ".join(["weights.bin", *(f"{name}.bin" for name in names)])
    lines = [
        MAIN,
        "int main(int argc, char **argv) {",
        f"  if (argc != {first + len(outputs)}) {{",
        f'    fprintf(stderr, "usage: %s {usage}\\n", argv[0]);',
        "    return 2;",
        "  }",
        "  void *weights = filled(argv[1], PIMFLOW_WEIGHT_BYTES);",
        "  void *pool = room(PIMFLOW_POOL_BYTES);",
        *loads,
        *allocations,
        f"  pimflow_run({', '.join(['weights', 'pool', *names])});",
        *stores,
        "  return 0;",
        "}",
    ]
    return "\n".join(lines) + "\n"


MAIN = """#include "network.h"

#include <stdio.h>
#include <stdlib.h>

static void *room(size_t bytes) {
  size_t whole = (bytes + PIMFLOW_ALIGNMENT_BYTES - 1) / PIMFLOW_ALIGNMENT_BYTES * PIMFLOW_ALIGNMENT_BYTES;
  void *found = aligned_alloc(PIMFLOW_ALIGNMENT_BYTES, whole);
  if (!found) {
    fprintf(stderr, "no memory for %zu bytes\\n", bytes);
    exit(4);
  }
  return found;
}

static void *filled(const char *path, size_t bytes) {
  void *found = room(bytes);
  FILE *file = fopen(path, "rb");
  if (!file || fread(found, 1, bytes, file) != bytes) {
    fprintf(stderr, "%s: cannot be read, or has fewer than %zu bytes\\n", path, bytes);
    exit(3);
  }
  fclose(file);
  return found;
}

static void store(const char *path, const void *from, size_t bytes) {
  FILE *file = fopen(path, "wb");
  if (!file || fwrite(from, 1, bytes, file) != bytes || fclose(file)) {
    fprintf(stderr, "%s: cannot be written\\n", path);
    exit(3);
  }
}
"""
