"""PIM schedules of five networks: ``bench_schedules.py [--levels LEVEL …] [--model NAME …] [--json]``.

For every layer that PIM can run, under the timing ``strict``, it prints the cycles of the busiest channel in
the fastest loop order of a level, the lower bound (docs/devices.md derives it), their ratio, how busy the
multipliers are, how much of the open rows is used, and by how many units of work the busiest channel exceeds
the mean. Geometric means count a layer each time that it occurs. The plain bound knows only slots of COMPs
and G_ACTs, the bus, and the share of time that refreshes take.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass

from calibration.latency_bound import lower_bound, simple_bound

from pimflow import frontend
from pimflow.core.kernel import ConvGeometry
from pimflow.hardware import System, system
from pimflow.hardware.systems import SCHEDULINGS
from pimflow.pim_backend.programs.capability import unsupported_reason
from pimflow.pim_backend.programs.lowering import LoweringLimits, ProgramRequest
from pimflow.pim_backend.programs.schedule import BankTiling
from pimflow.placement.costs.pim_runs import PimTarget
from pimflow.relay_passes.regions.extract_regions import extract_regions
from pimflow.simulators.profiler import BuiltIn

NETWORKS = ("efficientnet-b0", "mnasnet-1.0", "mobilenet-v2", "resnet-50", "vgg-16")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A layer at a level; cycles are those of the busiest channel."""

    level: str
    model: str
    layer: str
    cycles: int
    bound_cycles: int
    plain_bound_cycles: int
    multipliers_busy: float
    row_utilisation: float
    units_above_mean: float
    schedule: str

    @property
    def ratio(self) -> float:
        """Cycles over the lower bound."""
        return self.cycles / self.bound_cycles

    @property
    def plain_ratio(self) -> float:
        """Cycles over the plain bound."""
        return self.cycles / self.plain_bound_cycles


def layers(model: str, target: System) -> list[tuple[str, ConvGeometry]]:
    """Name and geometry of every layer of `model` that PIM can run."""
    graph = extract_regions(frontend.load(model).module, model)
    return [(region.name, region.geometry) for region in graph.regions if not unsupported_reason(region)]


def layer_figures(geometry: ConvGeometry, target: System) -> dict:
    """The fields of a `Row` that do not depend on the layer's name."""
    channels, dtype = target.pim_channels, target.dtype
    pim_costs = PimTarget(
        pim=target.pim, channels=channels, dtype=dtype, profiler=BuiltIn(), level=target.scheduling
    )
    schedule = pim_costs.rank_schedules(geometry, "bench")[0]
    program = pim_costs.program(
        ProgramRequest("bench", geometry, schedule), LoweringLimits(only_busiest=True)
    )
    timing = pim_costs.profiler.time_program(program, target.pim)
    units = geometry.pixels * BankTiling.from_geometry(geometry, target.pim, dtype, schedule.gangs).tiles
    busiest = timing.commands["READRES"]
    return {
        "level": target.scheduling,
        "cycles": timing.cycles,
        "bound_cycles": lower_bound(geometry, target.pim, dtype, channels).cycles,
        "plain_bound_cycles": simple_bound(geometry, target.pim, dtype, channels),
        "multipliers_busy": timing.utilisation,
        "row_utilisation": timing.row_utilisation,
        "units_above_mean": busiest - units / channels,
        "schedule": str(schedule),
    }


def geomean(values: list[float]) -> float:
    """Geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def summary(rows: list[Row]) -> dict:
    """Means over the layers of a level, and the worst layer."""
    return {
        "layers": len(rows),
        "geomean_ratio": geomean([row.ratio for row in rows]),
        "geomean_plain_ratio": geomean([row.plain_ratio for row in rows]),
        "worst_ratio": max(row.ratio for row in rows),
        "most_units_above_mean": max(row.units_above_mean for row in rows),
        "geomean_multipliers_busy": geomean([row.multipliers_busy for row in rows]),
        "geomean_row_utilisation": geomean([row.row_utilisation for row in rows]),
    }


def faults(rows: list[Row]) -> list[str]:
    """Messages about layers that are faster than their bound, or whose work is not spread evenly."""
    wrong = []
    for row in rows:
        where = f"{row.model}, layer '{row.layer}', {row.level}"
        if row.cycles < row.bound_cycles:
            wrong.append(f"{where}: {row.cycles} cycles, below the bound of {row.bound_cycles}")
        if row.units_above_mean > 1:
            wrong.append(f"{where}: the busiest channel is {row.units_above_mean:g} units above the mean")
    return wrong


def print_rows(rows: list[Row]) -> None:
    """Print the rows of each level, and their means."""
    columns = "cycles  bound  ratio  plain   busy   rows  units"
    for level in dict.fromkeys(row.level for row in rows):
        of_level = [row for row in rows if row.level == level]
        print(f"{level}\n{'':38} {columns}")
        for row in sorted(of_level, key=lambda row: -row.ratio):
            print(
                f"{row.model + ' ' + row.layer:36.36} {row.cycles:8} {row.bound_cycles:6} {row.ratio:6.3f} "
                f"{row.plain_ratio:6.3f} {row.multipliers_busy:6.1%} {row.row_utilisation:6.1%} "
                f"{row.units_above_mean:6.2f}  {row.schedule}"
            )
        for name, value in summary(of_level).items():
            print(f"  {name} {value:.4g}")


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--levels", metavar="LEVEL", nargs="+", choices=SCHEDULINGS, default=SCHEDULINGS)
    parser.add_argument("--model", metavar="NAME", nargs="+", default=NETWORKS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    options = parser.parse_args()
    targets = {level: system(scheduling=level) for level in options.levels}
    rows: list[Row] = []
    figures: dict[tuple[str, ConvGeometry], dict] = {}
    for model in options.model:
        if not options.quiet:
            print(f"{model} …", file=sys.stderr)
        model_layers = layers(model, system())
        for level, target in targets.items():
            for name, geometry in model_layers:
                if (level, geometry) not in figures:
                    figures[level, geometry] = layer_figures(geometry, target)
                rows.append(Row(model=model, layer=name, **figures[level, geometry]))
    if options.json:
        layer_rows = [{**asdict(row), "ratio": row.ratio, "plain_ratio": row.plain_ratio} for row in rows]
        levels = {level: summary([row for row in rows if row.level == level]) for level in targets}
        print(json.dumps({"levels": levels, "layers": layer_rows}))
    else:
        print_rows(rows)
    for line in (wrong := faults(rows)):
        print(f"bench_schedules: {line}", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
