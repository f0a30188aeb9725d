"""Is it charged that the host adds the lanes of a device without an adder tree?"""

from dataclasses import replace

import pytest

from pimflow.core.region import Epilogue
from pimflow.core.rewrite import PimRewrite, SplitRewrite
from pimflow.hardware import PimSpec, system
from pimflow.pim_backend.programs.schedule import schedules
from pimflow.placement import CandidateGenerator

HBM = PimSpec.load("hbm-pim")
SUMMED = replace(HBM, result_lanes=1)  # the same device with an adder tree
REGION = "widen.conv"


def tasks(toy, pim, gpu_rows=0, accounting="full"):
    """Tasks of a candidate by what is in brackets behind the region's name."""
    region = toy.region(REGION)
    order = str(schedules(region.geometry, pim, "fp16")[0])
    generator = CandidateGenerator(toy, system(pim=pim, accounting=accounting))
    share = gpu_rows / region.geometry.oh
    rewrite = SplitRewrite(gpu_share=share, schedule=order) if gpu_rows else PimRewrite(schedule=order)
    candidate = generator.make(region, rewrite)
    return candidate, {task.label.partition("(")[2]: task for task in candidate.tasks}


@pytest.mark.parametrize("gpu_rows", [0, 3], ids=["PIM", "SPLIT"])
def test_the_lanes_are_moved_and_read(toy, gpu_rows):
    """Fifteen partial sums more a result: over the crossbar, and by the kernel that reads it."""
    candidate, with_lanes = tasks(toy, HBM, gpu_rows)
    plain, without = tasks(toy, SUMMED, gpu_rows)
    assert candidate.rewrite == plain.rewrite
    g = toy.region(REGION).geometry
    results = (g.oh - gpu_rows) * g.ow * g.oc
    more_bytes = 15 * results * 2
    lanes = with_lanes.pop("lanes)")
    assert with_lanes.keys() == without.keys()
    assert lanes.moved_bytes == more_bytes and not lanes.launched and lanes.launch_ns == 0
    assert lanes.execution_ns > 0 and lanes.energy_pj > 0
    # A READRES returns the results of 8 banks: 16 bytes in a burst of 32, or 256 bytes in 8 bursts.
    reads = (g.oh - gpu_rows) * g.ow * -(-g.oc // 8)
    moved = [table["to and from PIM)"].moved_bytes for table in (with_lanes, without)]
    assert moved[0] - moved[1] == reads * (8 - 1) * 32
    assert with_lanes["PIM)"].execution_ns > without["PIM)"].execution_ns


@pytest.mark.long
def test_no_lanes_go_from_pim_to_pim(toy):
    """A kernel adds them in between, even after a layer that leaves nothing else undone."""
    region = replace(toy.region(REGION), epilogue=Epilogue())
    plain = replace(toy, regions=tuple(region if r.name == REGION else r for r in toy.regions))
    for pim, deferred in ((HBM, ("lanes",)), (SUMMED, ())):
        generator = CandidateGenerator(plain, system(pim=pim))
        candidate = generator.make(region, PimRewrite())
        assert (candidate.deferred_epilogue, candidate.keeps_submission_open) == (deferred, not deferred)
        assert generator.epilogue_cost(region).task.launched


def test_the_paper_charges_nothing_beside_the_commands(toy):
    _, task_table = tasks(toy, HBM, accounting="paper")
    assert list(task_table) == ["refreshes ahead)", "PIM)"]
