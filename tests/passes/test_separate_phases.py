"""Do runs over transposed convolutions become runs of each phase, with the same values?"""

import numpy as np
import pytest
import tvm
from kernel_graphs import constant, convolution, graph
from length import long_but
from tvm import relax
from tvm.relax import op

from pimflow.compiler import phases as pipeline
from pimflow.hardware import system
from pimflow.relay_passes.canonical.subpixel_convolution import SubpixelConvolution
from pimflow.relay_passes.decomposition.separate_phases import SeparatePhases
from pimflow.relay_passes.flat import LAYER_ROLES, layer_name, main_bindings, operator
from pimflow.relay_passes.kernels.activation_chains import activation_chains, chain_regions
from pimflow.relay_passes.kernels.outline_groups import OutlineGroups


def upsampling(rows: int, columns: int, *, between=op.nn.relu) -> tvm.IRModule:
    """lconv that computes `rows` x `columns` pixels as channels, bias, `between`, fconv; with their roles."""

    def network(emit, x):
        y = emit(convolution(x, constant(rows * columns * 12, 1, 1, 5)), name_hint="lconv")
        y = emit(op.reshape(y, (2, 5, 7, 1, rows, columns, 12)))
        y = emit(op.permute_dims(y, [0, 1, 4, 2, 5, 3, 6]))
        y = emit(op.reshape(y, (2, 5 * rows, 7 * columns, 12)))
        y = emit(op.add(y, constant(1, 1, 1, 12)), name_hint="bias")
        y = emit(between(y), name_hint="act")
        y = emit(convolution(y, constant(3, 1, 1, 12)), name_hint="fconv")
        return emit(op.nn.relu(y), name_hint="behind")

    mod = relax.transform.CanonicalizeBindings()(graph(network, (2, 5, 7, 5)))
    return LAYER_ROLES.attach(mod, {"lconv": "lconv", "fconv": "fconv"})


def ran(mod: tvm.IRModule, x: np.ndarray) -> np.ndarray:
    machine = relax.VirtualMachine(pipeline.build(mod, "llvm+pim", system()), tvm.cpu())
    return machine["main"](tvm.runtime.tensor(x)).numpy()


@pytest.mark.long
@pytest.mark.parametrize("phases", long_but([(1, 3)], [(2, 2), (1, 3)]))
def test_a_run_for_each_phase(phases):
    before = upsampling(*phases)
    assert activation_chains(before) == []
    after = SeparatePhases()(before)
    chains = activation_chains(after)
    assert len(chains) == phases[0] * phases[1]
    assert chains[1] == ["lconv.phase1", "bias.phase1", "act.phase1", "fconv.phase1"]
    assert "fconv" not in LAYER_ROLES.read(after), "what has its name moves results"
    x = np.random.default_rng(0).standard_normal((2, 5, 7, 5)).astype(np.float32)
    expected = ran(before, x)
    assert ran(after, x).tobytes() == expected.tobytes()
    runs = chain_regions(after)
    assert len(runs) == len(chains)
    fused = ran(OutlineGroups(dict.fromkeys(runs, ""))(after), x)
    assert np.abs(fused - expected).max() <= 1e-5 * np.abs(expected).max()
    tvm.ir.assert_structural_equal(SeparatePhases()(after), after)


def test_what_mixes_phases_stays():
    pooled = upsampling(2, 2, between=lambda x: op.nn.max_pool2d(x, (2, 2), layout="NHWC"))
    tvm.ir.assert_structural_equal(SeparatePhases()(pooled), pooled)


def test_the_form_is_that_of_subpixel_convolutions():
    """What is matched here is written there."""

    def network(emit, x):
        filters = constant(6, 8, 2, 2)
        y = op.nn.conv2d_transpose(x, filters, strides=(2, 2), data_layout="NHWC", kernel_layout="IOHW")
        y = emit(y, name_hint="lconv")
        return emit(
            op.nn.relu(emit(convolution(emit(op.nn.relu(y)), constant(4, 1, 1, 8)), name_hint="fconv"))
        )

    mod = relax.transform.CanonicalizeBindings()(graph(network, (1, 5, 6, 6)))
    after = LAYER_ROLES.attach(SubpixelConvolution()(mod), {"lconv": "lconv", "fconv": "fconv"})
    (lconv,) = (b for b in main_bindings(after) if operator(b.value) == "nn.conv2d" and b.var.name == "lconv")
    assert layer_name(after, lconv.var) == "lconv"
    assert len(activation_chains(SeparatePhases()(after))) == 4
