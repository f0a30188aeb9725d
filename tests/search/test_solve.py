"""Is the plan of a search the best one there is?"""

from dataclasses import replace

import pytest

from pimflow.core.candidate import makespan_ns
from pimflow.core.rewrite import OPERATOR_KERNELS, PimRewrite, SplitRewrite
from pimflow.errors import PlanError
from pimflow.hardware import system
from pimflow.hardware.systems import SCHEDULINGS
from pimflow.pim_backend.programs.schedule import schedules
from pimflow.placement import CandidateGenerator, Costs, Profiling, search
from pimflow.simulators.profiler import BuiltIn

CHANGES = {
    "full": {},
    "free launches": {"pim_launch_ns": 0.0},
    "dear launches": {"pim_launch_ns": 5000.0},
    "paper": {"accounting": "paper", "timing": "ramulator-pimflow"},
    "few channels": {"pim_channels": 2},
    "lanes": {"pim": "hbm-pim"},
}
# Of time-shared systems, whose candidates do not all go together, test_channel_modes.py tries all covers.
SYSTEMS = {name: system(channel_sharing="partitioned", **changes) for name, changes in CHANGES.items()}


def test_a_dependent_region_goes_on_with_the_submission_before_it(toy):
    target = system()
    generator = CandidateGenerator(toy, target)
    region = toy.region("widen.conv")
    alone = generator.make(region, PimRewrite())
    saved_ns = makespan_ns(alone.tasks) - makespan_ns(alone.with_shared_submission().tasks)
    assert saved_ns == pytest.approx(target.pim_launch_ns)
    gpu = generator.make(region, OPERATOR_KERNELS)
    split = generator.make(region, SplitRewrite(gpu_share=8 / region.geometry.oh))
    assert gpu.with_shared_submission() == gpu and split.with_shared_submission() == split


class SlowProfiler:
    """A profiler that finds everything taking seven times as long."""

    name = identity = "slower"

    def time_program(self, program, pim):
        timing = BuiltIn().time_program(program, pim)
        return replace(timing, time_ns=7 * timing.time_ns)


def test_pim_times_come_from_the_profiler(toy):
    target = system()
    slow_costs = Costs(target, Profiling(pim=SlowProfiler()))
    built_in, slower = CandidateGenerator(toy, target), CandidateGenerator(toy, target, slow_costs)
    for name in ("down.conv", "widen.conv"):
        region = toy.region(name)
        for rewrite in (PimRewrite(), SplitRewrite(gpu_share=4 / region.geometry.oh)):
            fast, slow = (generator.make(region, rewrite) for generator in (built_in, slower))
            times = [{t.label: t.execution_ns for t in candidate.tasks} for candidate in (fast, slow)]
            label = f"{name} (PIM)"
            assert times[1].pop(label) == pytest.approx(7 * times[0].pop(label))
            assert times[0] == times[1]
    plans = [search(toy, target, costs).plan for costs in (None, slow_costs)]
    assert plans[0].system != plans[1].system and plans[0].latency_ns < plans[1].latency_ns


def test_a_scheduling_level_restricts_loop_orders_and_enters_the_digest(toy):
    search_results = {level: search(toy, system(scheduling=level)) for level in SCHEDULINGS}
    assert len({r.plan.system for r in search_results.values()}) == len(search_results)
    for level, search_result in search_results.items():
        region = toy.region("widen.conv")
        orders = schedules(region.geometry, search_result.system.pim, "fp16", level)
        assert search_result.generator.pim_cost(region, PimRewrite()).schedule in orders
        others = [s for s in schedules(region.geometry, search_result.system.pim, "fp16") if s not in orders]
        for schedule in others[:1]:
            with pytest.raises(PlanError, match="is none of"):
                search_result.generator.make(region, PimRewrite(schedule=str(schedule)))


def test_an_unknown_loop_order_is_told_the_nearest(toy):
    """A plan for another device listed all loop orders of this one: lines of thousands of letters."""
    generator = CandidateGenerator(toy, system())
    orders = [str(order) for order in generator.costs.pim_target.schedules(toy.region("widen.conv").geometry)]
    assert len(orders) > 4
    with pytest.raises(PlanError, match=r"is none of the \d+ loop orders that this layer has") as caught:
        generator.make(toy.region("widen.conv"), PimRewrite(schedule=orders[3] + "s"))
    named = [order for order in orders if repr(order) in str(caught.value)]
    assert orders[3] in named and len(named) == 3
