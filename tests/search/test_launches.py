"""Is every kernel charged the launch that its cost says, and that of the system where it sets another?"""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples

from pimflow.core.candidate import Provenance
from pimflow.hardware import system
from pimflow.placement import CandidateGenerator, Costs, Profiling, search
from pimflow.simulators.profiler import Analytic

SYSTEM = system()


@dataclass(frozen=True)
class Stopwatch:
    """A `GpuProfiler` that measures launches, as ``gpu=cuda`` does: free where the GPU's are."""

    launch_ns: float
    name: str = "stopwatch"
    computes: ClassVar[bool] = False

    def costs(self, requests, gpu, dtype):
        launch_ns = self.launch_ns if gpu.launch_ns else 0.0
        modelled = Analytic().costs(requests, gpu, dtype)
        return [replace(cost, launch_ns=launch_ns, provenance=Provenance.MEASURED) for cost in modelled]


def gpu_launches_ns(generator: CandidateGenerator) -> set[float]:
    """Of every GPU task of a network that is launched by itself."""
    tasks = [t for region in generator.graph.regions for c in generator.candidates(region) for t in c.tasks]
    regions = (r for r in generator.graph.regions if not generator.unsupported_reason(r))
    tasks += [generator.epilogue_cost(r).task for r in regions]
    return {task.launch_ns for task in tasks if task.resource == "gpu" and task.launched}


@settings(max_examples=examples(6), deadline=None)
@given(measured_ns=st.floats(100, 1e5), set_ns=st.floats(0, 1e5))
def test_a_measured_launch_is_charged_unless_another_is_set(toy, measured_ns, set_ns):
    costs = Costs(SYSTEM, Profiling(gpu=Stopwatch(measured_ns)))
    assert gpu_launches_ns(CandidateGenerator(toy, SYSTEM, costs)) == {measured_ns}
    for launch_ns in (set_ns, 0.0):
        variant = SYSTEM.with_launches(gpu_ns=launch_ns, pim_ns=0.0)
        expected_ns = measured_ns if launch_ns == SYSTEM.gpu.launch_ns else launch_ns
        assert gpu_launches_ns(CandidateGenerator(toy, variant, costs)) == {expected_ns}
    only_pim = SYSTEM.with_launches(gpu_ns=SYSTEM.gpu.launch_ns, pim_ns=0.0)
    assert gpu_launches_ns(CandidateGenerator(toy, only_pim, costs)) == {measured_ns}


def test_a_modelled_launch_is_the_gpus(toy):
    assert gpu_launches_ns(CandidateGenerator(toy, SYSTEM)) == {SYSTEM.gpu.launch_ns}


def test_launches_are_what_the_latency_differs_by(toy):
    """On the GPU alone, by one launch a region."""
    slow, fast = (search(toy, SYSTEM, Costs(SYSTEM, Profiling(gpu=Stopwatch(ns)))) for ns in (5e3, 1e3))
    saved_ns = slow.gpu_only.latency_ns - fast.gpu_only.latency_ns
    assert saved_ns == pytest.approx(4e3 * len(toy.regions))
