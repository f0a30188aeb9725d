"""Do the generated networks grow as asked, and does the table say which targets were missed?"""

import bench_compile
import build_zoo
import growing_networks
import pytest

from pimflow import frontend
from pimflow.commands.shared import prepare

pytestmark = pytest.mark.long


@pytest.mark.parametrize("kind", ["chain", "branchy"])
def test_networks_have_about_the_regions_asked_for(tmp_path, kind):
    strip, build = build_zoo.strip, growing_networks.KINDS[kind]
    for requested_count in (14, 28):
        path = tmp_path / f"{requested_count}.onnx"
        path.write_bytes(strip(build(requested_count), path.stem).SerializeToString())
        region_count = len(prepare.regions(frontend.load(path)).regions)
        assert abs(region_count - requested_count) <= 0.3 * requested_count, (requested_count, region_count)


def row(search_seconds: float, full_seconds: float, peak_gib: float) -> dict:
    phases = {"generating code": 1.0, "verifying": 2.0, "searching under other conventions": 0.5}
    return {
        cache: {
            "model": "net",
            "regions": 5,
            "phase_cpu_seconds": phases | {"searching": seconds - 0.5},
            "cpu_seconds": seconds + 4.0,
            "peak_memory_bytes": peak_gib * 2**30,
        }
        for cache, seconds in (("empty", search_seconds), ("full", full_seconds))
    }


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ((59.0, 9.0, 4.0), "yes"),
        ((59.1, 9.0, 4.0), "no: empty cache"),
        ((1.0, 9.1, 4.1), "no: full cache, no: memory"),
    ],
)
def test_search_rewrite_and_code_count_against_the_targets(figures, verdict):
    text = bench_compile.table([row(*figures)])
    assert text.splitlines()[-1] == (
        f"| net | 5 | {figures[0]:.1f} | {figures[1]:.1f} | 1.0 | 2.0 "
        f"| {figures[0] + 4:.1f} | {figures[1] + 4:.1f} | {figures[2]:.2f} | {verdict} |"
    )
