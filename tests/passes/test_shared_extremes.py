"""Can threads share the maximum of a long tensor, which is NaN where an element is?"""

import pytest
import tvm
from tvm import relax, s_tir

from pimflow.relay_passes import keep_nan
from pimflow.relay_passes.schedules.schedule_gpu import Reduce


@pytest.mark.parametrize("kind", ["max", "min"])
def test_threads_share_an_extreme(kind):
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((1, 4096), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(getattr(relax.op, kind)(x))
        builder.emit_func_output(result)
    module = relax.transform.LegalizeOps(keep_nan.LEGAL)(builder.get())
    schedule = Reduce().apply(module[kind], tvm.target.Target("cuda"), False)
    assert "threadIdx" in schedule.mod.script()
    lowered = s_tir.transform.LowerCrossThreadReduction()(schedule.mod)
    assert "allreduce" in lowered.script()
