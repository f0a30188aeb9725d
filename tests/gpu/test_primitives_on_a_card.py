"""Do the primitives compute on a card what plain loops compute on the CPU, and can they be timed there?"""

import numpy as np
import pytest
import tvm

from pimflow.core.kernel import ConvGeometry
from pimflow.primitive_selection import measuring
from pimflow.primitive_selection.machines import Card, Machine
from pimflow.primitives import PRIMITIVES, get_primitive
from pimflow.primitives.families import input_shape, output_shape
from pimflow.primitives.filters import transform_filters
from pimflow.primitives.kernels.prim_func import kernel
from pimflow.primitives.layer import filter_shape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not tvm.cuda().exist, reason="needs a CUDA device")]
SAME = {"kh": 3, "kw": 3, "padding": (1, 1, 1, 1)}
LAYERS = (
    ConvGeometry(n=1, h=28, w=28, c=48, oc=64, **SAME),
    ConvGeometry(n=2, h=13, w=17, c=20, oc=24, kh=5, kw=3, stride=(2, 1), padding=(2, 1, 0, 2)),
    ConvGeometry(n=1, h=7, w=7, c=96, oc=40),
    ConvGeometry(n=1, h=28, w=28, c=48, oc=48, groups=48, **SAME),
)
LOOPS = get_primitive("direct-hwc-loops")


def result(machine, chosen, layer, x, filters):
    mod = tvm.IRModule({"main": kernel(chosen, layer).with_attr("global_symbol", "main")})
    with machine.target:
        mod = machine.schedule(mod)
    built = machine.build(mod)
    y = tvm.runtime.tensor(np.full(output_shape(chosen, layer), np.nan, np.float32), machine.cpu)
    operands = (x, transform_filters(chosen, layer, filters))
    built["main"](*(tvm.runtime.tensor(array, machine.cpu) for array in operands), y)
    return y.numpy()


@pytest.mark.parametrize("name", [p.name for p in PRIMITIVES.values() if p.target == "cuda" and p.places])
def test_values(name):
    chosen, random = PRIMITIVES[name], np.random.default_rng(0)
    layers = [layer for layer in LAYERS if chosen.applies(layer)]
    assert layers
    for layer in layers:
        x = random.standard_normal(input_shape(chosen, layer), np.float32)
        filters = random.standard_normal(filter_shape(layer), np.float32)
        expected = result(Machine(), LOOPS, layer, x, filters)
        bound = 1e-4 if chosen.family == "winograd" else 1e-5
        actual = result(Card(), chosen, layer, x, filters)
        assert np.abs(actual - expected).max() <= bound * np.abs(expected).max(), layer


@pytest.mark.alone
def test_times():
    move = ((1, 28, 28, 48), "HWC", "CHW")
    times = measuring.Measurer(machine=Card()).measure([LAYERS[0]], [move], 6)
    assert not times.failed and len(times.times_ns) == 6 and times.device.target == "cuda"
    assert all(1e3 < ns < 1e8 for ns in (*times.times_ns.values(), times.moves_ns[move]))
