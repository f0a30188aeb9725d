"""Replay the copies of weights of a network on a CUDA device that only records: ``replay_copies.py LIBRARY``.

Prints, as JSON, what `recording_device.cc` counts and the weights that kernels did not read as they are, by
how far ahead copies begin and by whether the device is eager.
"""

import ctypes
import json
import sys

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

from pimflow import frontend
from pimflow.compiler import phases
from pimflow.hardware import system
from pimflow.relay_passes.memory.stream_weights import AWAIT_COPY, COPY, weight_copy

MARK = 0xA5  # what kernels write all over their results
COUNTS = ("streams", "copies", "pageable", "among_kernels")
double = ctypes.CDLL(sys.argv[1])
double.device_api.restype = ctypes.c_void_p
device_api = ctypes.c_void_p(double.device_api())
for kind in ("cuda", "cuda_host"):
    tvm_ffi.register_global_func(f"device_api.{kind}", lambda: device_api, override=True)


def wrong_reads(module: tvm.IRModule) -> list[int]:
    """Indices of weights that a kernel of a lowered `module` does not read as they are."""
    weights_module = module.attrs["external_mods"][0]
    storage = tvm.runtime.empty((1 << 20,), "uint8", tvm.cuda(0))
    places: dict[relax.Var, tvm.runtime.Tensor] = {}
    copied: dict[relax.Var, int] = {}
    reads: list[tuple[np.ndarray, np.ndarray]] = []
    for binding in (b for block in module["main"].body.blocks for b in block.bindings):
        call = binding.value
        name, args = str(getattr(call.op, "name", "")), list(call.args)
        if name == "relax.vm.alloc_tensor":
            dims, dtype = [int(extent) for extent in args[2]], str(args[3].value)
            places[binding.var] = storage._create_view(dims, dtype, int(args[1].value))
        elif str(getattr(call.op, "global_symbol", "")) == "vm.builtin.ensure_zero_offset":
            places[binding.var] = places[args[0]]
        elif weight_copy(call) == AWAIT_COPY:
            weights_module[AWAIT_COPY](places[args[0]])
        elif weight_copy(call):
            copied[args[1]] = int(args[0].value)
            weights_module[weight_copy(call)](copied[args[1]], places[args[1]])
        elif isinstance(call.op, tvm.ir.GlobalVar):
            for weight in (arg for arg in args if arg in copied):
                expected = tvm.runtime.empty(places[weight].shape, str(places[weight].dtype))
                weights_module[COPY](copied[weight], expected)
                actual = np.zeros_like(expected.numpy())
                double.read(*_memory(places[weight]), ctypes.c_void_p(actual.ctypes.data))
                reads.append((actual, expected.numpy()))
            if args[-1] in places:
                double.fill(*_memory(places[args[-1]]), MARK)
    double.run()
    if not reads:
        raise AssertionError("no kernel reads a weight")
    return [number for number, (actual, expected) in enumerate(reads) if not np.array_equal(actual, expected)]


def _memory(tensor: tvm.runtime.Tensor) -> tuple[ctypes.c_void_p, ctypes.c_int64]:
    """Address and bytes of a tensor."""
    bytes_each = np.dtype(str(tensor.dtype)).itemsize
    return ctypes.c_void_p(tensor.data_ptr()), ctypes.c_int64(int(np.prod(tensor.shape)) * bytes_each)


network, results = frontend.load("toy").module, []
for ahead in (0, 2):
    lowered = phases.lower(network, tvm.target.Target("cuda"), system(weights="streamed", copy_ahead=ahead))
    for eager in (False, True):
        double.set_eager(eager)
        before = [double.count(number) for number in range(len(COUNTS))]
        wrong = wrong_reads(lowered)
        after = [double.count(number) for number in range(len(COUNTS))]
        counts = {name: b - a for name, a, b in zip(COUNTS, before, after, strict=True)}
        results.append({"ahead": ahead, "eager": eager, "wrong": wrong, **counts})
print(json.dumps(results))
