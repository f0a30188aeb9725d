"""Does the runtime module of PIM regions take tensors as kernels leave them: fp16, anywhere?"""

import os
import struct
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
import tvm_ffi
from calibration.pim_device import PimDevice
from layers import PimLayer
from tvm import relax

from pimflow.errors import ArtifactError
from pimflow.frontend import relax_module
from pimflow.host import native
from pimflow.pim_backend.runtime import codegen, network_module, targets


def call_region(program, image, x, dtype):
    """The region's output for input `x`, both stored as `dtype`."""
    module = native.get("pimflow.runtime.create_module")()
    codegen.add_region(module, "layer", program, image)
    g = program.geometry
    y = np.zeros((g.pixels, g.oc), dtype)
    module["layer"](tvm_ffi.from_dlpack(x.astype(dtype)), tvm_ffi.from_dlpack(y))
    return y


def test_half_tensors_give_the_same_values():
    layer = PimLayer(x_shape=(1, 5, 5, 40), oc=20, channels=3)
    x, w = layer.operands()
    program = layer.lower(layer.schedules[0])
    image = layer.image(program, w)
    full = call_region(program, image, x.astype(np.float16), np.float32)
    assert (call_region(program, image, x, np.float16).astype(np.float32) == full).all()


def test_results_are_rounded_to_half_like_numpy():
    """An identity in fp32 passes any value on; storing it rounds: ties, subnormals, overflow, NaN."""
    rng = np.random.default_rng(0)
    halves = np.arange(2**15, dtype=np.uint16).view(np.float16).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        ties = halves + np.spacing(halves.astype(np.float16)).astype(np.float32) / 2
    wild = rng.integers(0, 2**32, 4096, np.uint32).view(np.float32)
    values = np.concatenate([halves, -halves, ties, -ties, np.nextafter(ties, 0), wild])
    values = values[np.isfinite(values)]
    values = np.resize(values, (values.size // 16 + 1) * 16).reshape(1, -1, 1, 16).astype(np.float32)
    layer = PimLayer(x_shape=values.shape, oc=16, dtype="fp32", channels=2)
    program = layer.lower(layer.schedules[0])
    image = layer.image(program, np.eye(16, dtype=np.float32))
    module = native.get("pimflow.runtime.create_module")()
    codegen.add_region(module, "layer", program, image)
    y = np.zeros((layer.geometry.pixels, 16), np.float16)
    module["layer"](tvm_ffi.from_dlpack(values), tvm_ffi.from_dlpack(y))
    with np.errstate(over="ignore"):
        expected = values.reshape(-1, 16).astype(np.float16)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("first", [0, 7, 500, 1000])
def test_the_output_may_overwrite_the_input(first):
    """Where they share no bytes (from 1000 on), the device works on both where they lie."""
    layer = PimLayer(x_shape=(1, 5, 5, 40), oc=20, dtype="fp32", channels=3)
    x, w = layer.operands()
    program = layer.lower(layer.schedules[0])
    image = layer.image(program, w)
    memory = np.zeros(1500, np.float32)
    memory[:1000] = x.reshape(-1)
    y = memory[first : first + 500].reshape(25, 20)
    module = native.get("pimflow.runtime.create_module")()
    codegen.add_region(module, "layer", program, image)
    module["layer"](tvm_ffi.from_dlpack(memory[:1000].reshape(x.shape)), tvm_ffi.from_dlpack(y))
    assert (y == PimDevice(program, image).run(x)).all()


def test_a_region_takes_two_tensors():
    layer = PimLayer(x_shape=(1, 3, 3, 40), oc=20)
    x, w = layer.operands()
    program = layer.lower(layer.schedules[0])
    module = native.get("pimflow.runtime.create_module")()
    codegen.add_region(module, "layer", program, layer.image(program, w))
    for tensors in ((), (tvm_ffi.from_dlpack(x),)):
        with pytest.raises(TypeError, match="'layer' takes an input and an output"):
            module["layer"](*tensors)


def test_inferences_side_by_side():
    """Threads share a module, and observers come and go meanwhile: the same values, each seen once or not."""
    layer = PimLayer(x_shape=(1, 6, 6, 300), oc=40, channels=4)
    x, w = layer.operands()
    program = layer.lower(layer.schedules[0])
    image = layer.image(program, w)
    expected = call_region(program, image, x, np.float32)
    module = native.get("pimflow.runtime.create_module")()
    codegen.add_region(module, "layer", program, image)
    results = [np.zeros((40, *expected.shape), np.float32) for _ in range(3)]
    seen = []

    def infer(outputs):
        for y in outputs:
            module["layer"](tvm_ffi.from_dlpack(x), tvm_ffi.from_dlpack(y))

    threads = [threading.Thread(target=infer, args=(outputs,)) for outputs in results]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        with codegen.observe_regions(lambda symbol, operands, y: seen.append((y == expected).all())):
            time.sleep(0.001)
    assert all((outputs == expected).all() for outputs in results)
    assert all(seen) and len(seen) <= 120


def test_a_damaged_interface_takes_no_memory():
    load = native.get("ffi.Module.load_from_bytes.pimflow (import pimflow first)")
    with pytest.raises(RuntimeError, match="truncated pimflow module"):
        load(struct.pack("<QQ", 0x3130544E4D4950, 1 << 62))
    with pytest.raises(ArtifactError, match="another version of pimflow: compile it again"):
        load(bytes(16))


def module_bytes(program, image, wider: int = 0) -> bytes:
    """A module of one region, "layer", as `pim_module.cc` writes it; its input has `wider` channels more."""
    words, offsets = program.program_words()
    parts = [struct.pack("<QQQ", 0x30314D4950, 1, 5), b"layer"]
    table = np.ascontiguousarray(image.table, np.int32)
    for array in (
        codegen._HEADER.row(**program.header()),
        words,
        offsets,
        image.lane_bits,
        table,
        np.empty(0, np.float32),
        np.empty(0, np.float32),
    ):
        code = {"i": 0, "u": 1, "f": 2}[array.dtype.kind]
        parts.append(struct.pack("<BBHQ", code, array.dtype.itemsize * 8, 1, array.ndim))
        parts.append(np.asarray(array.shape, np.int64).tobytes() + array.tobytes())
    channels, no_attention = program.geometry.c - program.added_channels, 0
    parts.append(struct.pack("<QQQQ", channels, channels + wider, program.added_channels, no_attention))
    return b"".join(parts)


def test_saved_modules_are_read():
    load = native.get("ffi.Module.load_from_bytes.pim")
    layer = PimLayer(x_shape=(1, 3, 3, 40), oc=20, channels=2)
    x, w = layer.operands()
    program = layer.lower(layer.schedules[0])
    image = layer.image(program, w)
    data = module_bytes(program, image)
    y = np.zeros((layer.geometry.pixels, 20), np.float32)
    load(data)["layer"](tvm_ffi.from_dlpack(x), tvm_ffi.from_dlpack(y))
    assert (y == call_region(program, image, x, np.float32)).all()
    wide = np.concatenate([np.full((*x.shape[:-1], 8), 7, x.dtype), x], -1)
    wide_result = np.zeros_like(y)
    load(module_bytes(program, image, wider=8))["layer"](
        tvm_ffi.from_dlpack(wide), tvm_ffi.from_dlpack(wide_result)
    )
    assert (wide_result == y).all(), "of a wider input it takes the last channels"
    for size in [*range(8, 200), *range(200, len(data), 997), len(data) - 1]:
        with pytest.raises(RuntimeError, match="truncated pimflow module"):
            load(data[:size])
    with pytest.raises(ArtifactError, match="another version of pimflow: compile the network again"):
        load(b"PIM07\0\0\0" + data[8:])
    adding = replace(layer, added_channels=20)
    program = adding.lower(layer.schedules[0])
    own_input, added = x[..., :20].copy(), x[..., 20:].copy()
    image = layer.image(program, w[..., :20])
    load(module_bytes(program, image))["layer"](*map(tvm_ffi.from_dlpack, (own_input, added, y)))
    assert (y == PimDevice(program, image).run(own_input, added=added)).all()


def test_machine_code_is_made_once_and_the_stored_library_is_the_same(tmp_path, monkeypatch):
    """Of a network that ran: by TVM's just-in-time compiler, or from the code that is stored."""
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 8), "float32"))
    with bb.function("main", [x]):
        with bb.dataflow():
            weight = relax.const(np.arange(32, dtype=np.float32).reshape(8, 4))
            y = bb.emit_output(bb.emit(relax.op.nn.relu(relax.op.matmul(x, weight))))
        bb.emit_func_output(y)
    mod = bb.get()
    values = {"x": np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)}
    kinds, results = [], []
    for name in ("anew", "once"):
        executable = tvm.compile(mod, targets.target_by_name("llvm+pim"))
        network = network_module.pack(executable, relax_module.inputs(mod), 1)
        with monkeypatch.context() as changed:  # nothing can be run from the temporary folder
            changed.setattr(network_module.os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
            assert network_module.MachineCode.from_network(network) is None
        code = network_module.MachineCode.from_network(network) if name == "once" else None
        results.append(network_module.infer(network, values)[0])
        network_module.store(network, tmp_path / f"{name}.so", 0, code)
        kinds.append([item.kind for item in executable.mod.imports])
        results.append(network_module.infer(network, values)[0])  # it runs on
        results.append(network_module.infer(network_module.load(tmp_path / f"{name}.so"), values)[0])
    assert kinds == [["llvm"], ["library"]]
    assert all(np.array_equal(item, results[0]) for item in results)
    assert (tmp_path / "anew.so").read_bytes() == (tmp_path / "once.so").read_bytes()
