"""Can threads share the maximum of a long tensor, which is NaN where an element is?"""

import pytest
import tvm
from graphs import main_module
from tvm import relax, s_tir

from pimflow.relay_passes import keep_nan
from pimflow.relay_passes.schedules.schedule_gpu import Reduce


@pytest.mark.parametrize("kind", ["max", "min"])
def test_threads_share_an_extreme(kind):
    x = relax.Var("x", relax.TensorType((1, 4096), "float32"))
    module = main_module([x], lambda _: getattr(relax.op, kind)(x))
    module = relax.transform.LegalizeOps(keep_nan.LEGAL)(module)
    schedule = Reduce().apply(module[kind], tvm.target.Target("cuda"), False)
    assert "threadIdx" in schedule.mod.script()
    lowered = s_tir.transform.LowerCrossThreadReduction()(schedule.mod)
    assert "allreduce" in lowered.script()
