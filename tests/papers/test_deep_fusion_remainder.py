"""Do the reasons for what a fused network moves add up to all of it?"""

import pytest
from papers.deep_fusion_remainder import remaining_bytes

from pimflow.commands.fuse import fuse
from pimflow.fusion import Accelerator


@pytest.mark.parametrize("baseline", ["folded", "unfolded"])
@pytest.mark.parametrize("halo", ["retain", "recompute"])
@pytest.mark.parametrize("kib", [2, 12])
def test_reasons_add_up(baseline, halo, kib):
    plan = fuse.fuse("toy", Accelerator(on_chip_bytes=kib * 2**10), baseline=baseline, halo=halo)
    reasons = remaining_bytes(plan)
    assert sum(reasons.values()) == plan.dram_bytes - plan.dram_bytes_ideal > 0
    assert min(reasons.values()) >= 0
