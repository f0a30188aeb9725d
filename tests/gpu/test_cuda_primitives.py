"""Do the primitives compute on a card what they do on paper, and can they be timed there?"""

import sys
from pathlib import Path

import numpy as np
import pytest
import tvm

sys.path.insert(0, str(Path(__file__).parents[1] / "primitives"))
from conv_layers import ON_CUDA, convolved, layers_for, operands

from pimflow import primitive_profiler
from pimflow.core.region import ConvGeometry
from pimflow.primitive_kernels import kernel
from pimflow.primitive_machines import Card
from pimflow.primitives import PRIMITIVES
from pimflow.primitives.families import output_shape
from pimflow.primitives.filters import transformed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not tvm.cuda().exist, reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", [name for name in ON_CUDA if PRIMITIVES[name].places])
def test_values(name):
    chosen, card = PRIMITIVES[name], Card()
    for layer in layers_for(chosen, 3):
        x, filters = operands(layer)
        with card.target:
            mod = card.schedule(
                tvm.IRModule({"main": kernel(chosen, layer).with_attr("global_symbol", "main")})
            )
        built = card.load(tvm.compile(mod, card.target, tir_pipeline=card.pipeline))
        y = tvm.runtime.tensor(np.full(output_shape(chosen, layer), np.nan, np.float32), tvm.cuda())
        given = [tvm.runtime.tensor(a, tvm.cuda()) for a in (x, transformed(chosen, layer, filters))]
        built["main"](*given, y)
        expected = convolved(layer, x, filters)
        bound = 1e-4 if chosen.family == "winograd" else 1e-5
        assert np.abs(y.numpy() - expected).max() <= bound * np.abs(expected).max(), layer


def test_times():
    layer = ConvGeometry(n=1, h=56, w=56, c=64, oc=64, kh=3, kw=3, padding=(1, 1, 1, 1))
    found = primitive_profiler.measure([layer], [((1, 56, 56, 64), "HWC", "CHW")], 6, machine=Card())
    assert not found.failed and len(found.times_ns) == 6 and found.device.target == "cuda"
    assert all(1e3 < ns < 1e8 for ns in (*found.times_ns.values(), *found.moves_ns.values()))
