"""The executor's values are the program's alone: threads, instruction sets and callers do not change them."""

import ctypes
import os
import platform
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from calibration.pim_device import PimDevice, simd_variants
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import layers
from length import examples
from test_function import LONG, POINTWISE, SPECIAL, UNALIKE, bits, run

from pimflow.errors import UnknownNameError, UsageError


@pytest.mark.parametrize("layer", [POINTWISE, UNALIKE, LONG], ids=["pointwise", "unalike", "long"])
def test_threads_do_not_change_values(layer):
    x, w = layer.operands()
    for schedule in layer.schedules:
        alone = run(layer, schedule, x, w, threads=1)
        for threads in (2, 3, 16):
            assert (bits(run(layer, schedule, x, w, threads=threads)) == bits(alone)).all()


WITHOUT_THREADS = """
import threading, numpy as np
from layers import PimLayer
from calibration.pim_device import PimDevice
try:
    threading.Thread(target=print).start()
except RuntimeError:
    layer = PimLayer(x_shape=(1, 5, 6, 120), oc=40, channels=3)
    x, w = layer.operands()
    program = layer.lower(layer.schedules[0])
    image = layer.image(program, w)
    device = PimDevice(program, image)
    print((device.run(x, 3) == device.run(x, 1)).all())
"""


@pytest.mark.long
def test_threads_that_the_system_refuses_are_done_without():
    def no_room_for_stacks():
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 47, resource.RLIM_INFINITY))

    if resource.getrlimit(resource.RLIMIT_STACK)[1] != resource.RLIM_INFINITY:
        pytest.skip("the size of stacks is limited")
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_THREADS],
        cwd=Path(__file__).parent,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=no_room_for_stacks,
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout) == (0, "True\n"), run.stderr


@pytest.mark.long
@pytest.mark.parametrize("variant", simd_variants())
@settings(max_examples=examples(60))
@given(layers(), st.sampled_from((0.0, 0.0, 0.01, 0.5)))
def test_every_instruction_set_gives_the_same_bits(variant, layer, special):
    """Which NaN comes out of a sum, too."""
    x, w = layer.operands()
    if layer.dtype != "int8":
        rng = np.random.default_rng(layer.seed)
        for operand in (x, w):
            some = rng.random(operand.shape) < special
            operand[some] = rng.choice(SPECIAL, some.sum())
    for schedule in layer.schedules[::3]:
        expected = bits(run(layer, schedule, x, w, variant="portable"))
        assert (bits(run(layer, schedule, x, w, variant=variant)) == expected).all()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the word that is set is x86's MXCSR")
@pytest.mark.parametrize("bits_set", [0x8040, 0x6000], ids=["subnormals flushed", "rounded towards zero"])
@pytest.mark.parametrize("variant", simd_variants())
def test_the_callers_arithmetic_does_not_matter(variant, bits_set):
    """Libraries set it for a thread (torch.set_flush_denormal); the threads beside it have their own."""
    layer = replace(POINTWISE, dtype="fp32")
    x, w = layer.operands()
    x[:, ::2] *= np.float32(2.0**-80)
    w[::2] *= np.float32(2.0**-60)
    program = layer.lower(layer.schedules[0])
    device = PimDevice(program, layer.image(program, w))
    expected = device.run(x, 1, variant)
    assert ((expected != 0) & (abs(expected) < np.finfo(np.float32).tiny)).any()
    libm, callers = ctypes.CDLL("libm.so.6"), (ctypes.c_uint32 * 8)()
    libm.fegetenv(callers)
    changed = type(callers)(*callers)
    changed[7] |= bits_set
    libm.fesetenv(changed)
    try:
        result = device.run(x, 1, variant)
        after = type(callers)()
        libm.fegetenv(after)
    finally:
        libm.fesetenv(callers)
    assert (bits(result) == bits(expected)).all()
    assert after[7] & bits_set == bits_set


def test_the_environment_names_the_instruction_set(monkeypatch):
    x, w = POINTWISE.operands()
    for variant in simd_variants():
        monkeypatch.setenv("PIMFLOW_SIMD", variant)
        run(POINTWISE, POINTWISE.schedules[0], x, w)
    monkeypatch.setenv("PIMFLOW_SIMD", "mmx")
    with pytest.raises(UsageError, match=r"PIMFLOW_SIMD.*'mmx'.*portable"):
        run(POINTWISE, POINTWISE.schedules[0], x, w)
    monkeypatch.delenv("PIMFLOW_SIMD")
    with pytest.raises(UnknownNameError, match="portable"):
        run(POINTWISE, POINTWISE.schedules[0], x, w, variant="portabel")
