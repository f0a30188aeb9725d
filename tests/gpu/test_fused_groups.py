"""Do the threads of a fused group give what the CPU gives, and move as many bytes?"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import tvm
from fused_cuda import compile_group_for_cuda

from pimflow import zoo
from pimflow.commands.fuse import fuse
from pimflow.fusion import Accelerator
from pimflow.fusion.kernels import execution
from pimflow.fusion.kernels.onnx_formulas import computations
from pimflow.pim_backend.runtime.cuda_binary import compile_kernels
from pimflow.pim_backend.runtime.targets import local_cuda

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not tvm.cuda().exist, reason="needs a CUDA device")]


@pytest.mark.parametrize(("halo", "on_chip_kib"), [("recompute", 24), ("retain", 24), ("retain", 12)])
def test_a_group_runs_in_shared_memory(halo, on_chip_kib):
    """The last of them channel by channel, too."""
    plan = fuse.fuse("toy", Accelerator(on_chip_bytes=on_chip_kib << 10), reuse="lifetime", halo=halo)
    formulas, ran = computations(zoo.load_model("toy"), plan.graph), 0
    for group, placed in zip(plan.groups, plan.placements):
        if placed is None:
            continue
        random = np.random.default_rng(ran)
        inputs = {name: random.uniform(-1, 1, group.graph.elements(name)).astype(np.float32)
                  for name in group.input_names}  # fmt: skip
        target = local_cuda()
        executable, kernels = compile_kernels(
            partial(compile_group_for_cuda, group, placed, formulas, target), target
        )
        assert not kernels.problem
        kernel = executable.mod[execution.NAME]
        here, there = dict(inputs), dict(inputs)
        function = execution.build(group, placed, formulas)
        counted = replace(function, function=kernel).run(there, tvm.cuda())
        assert counted == function.run(here)
        assert sum(counted.values()) == 4 * group.traffic_elements
        for name in group.output_names:  # products may be contracted into sums on one side alone
            assert np.abs(there[name] - here[name]).max() <= 1e-5 * np.abs(here[name]).max()
        ran += 1
    assert ran
