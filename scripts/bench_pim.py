"""Speed of the PIM simulators: ``bench_pim.py [--commands N] [--model NAME] [--json]``.

Parses and times a ``.pim`` trace, times the same commands in memory and as a program with loops, and
executes a network's layers by value. Measured on this machine, on one core.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np

import pimflow
from pimflow.core.commands import Affine, Comp, GAct, Gwrite, Loop, Readres
from pimflow.core.program import PimProgram
from pimflow.core.region import ConvGeometry
from pimflow.hardware.pim import PimSpec
from pimflow.pim_backend.layout import memory_image
from pimflow.simulators.functional import Device
from pimflow.simulators.timing import TIMINGS, time_program, time_trace
from pimflow.simulators.trace import Trace, expand_to_pim


def blocks(spec: PimSpec, commands: int) -> PimProgram:
    """At least `commands` commands on one channel: GWRITE, a row in every gang, its COMPs, READRES."""
    here, row = Affine(0), Affine(0, (0, 1))
    body = (
        Gwrite(buffer=0, pixel=here, pixels=1, k=here, columns=spec.columns_per_row),
        *(GAct(gang=gang, row=row) for gang in range(spec.gangs)),
        Comp(buffer=0, row=row, column=here, count=spec.columns_per_row),
        Readres(buffer=0, pixel=here, channel=here),
    )
    rows = 64
    commands_per_loop = rows * (2 + spec.gangs + spec.columns_per_row)
    loop = Loop(extent=max(1, -(-commands // commands_per_loop)), body=(Loop(extent=rows, body=body),))
    return PimProgram(
        region="bench",
        pim=spec.name,
        dtype="fp16",
        geometry=ConvGeometry(n=1, h=1, w=1, c=spec.elements_per_row("fp16"), oc=spec.banks),
        pixel_begin=0,
        pixel_end=1,
        banks=spec.banks,
        gangs=spec.gangs,
        columns_per_row=spec.columns_per_row,
        elements_per_column=spec.elements_per_column("fp16"),
        buffers=spec.global_buffers,
        readres_bursts=spec.readres_bursts("fp16"),
        row_begin=0,
        rows=rows,
        channels=((loop,),),
    )


def best_s(function: Callable, *operands: object, repeats: int = 3) -> float:
    """Shortest wall time of `repeats` calls, in seconds."""
    times_s = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        function(*operands)
        times_s.append(time.perf_counter() - begin_s)
    return min(times_s)


def macs_per_s(model: str) -> tuple[float, float]:
    """MACs a second, on one core, of all PIM-capable layers of `model` executed by value.

    Returns the rate over all layers, and that of the slowest one.
    """
    searched = pimflow.search(model)
    draw = np.random.default_rng(0)
    macs, seconds, slowest = 0, 0.0, float("inf")
    for region in searched.graph.regions:
        if region.name in searched.table.refused:
            continue
        g, program = region.geometry, searched.maker.pim_run(region, 0).program
        weights = draw.standard_normal((g.oc, g.reduction))
        device = Device(program, memory_image(program, weights, searched.system.pim))
        x = draw.standard_normal((g.n, g.h, g.w, g.c)).astype(np.float32)
        layer_s = best_s(device.run, x, 1)
        macs, seconds, slowest = macs + g.macs, seconds + layer_s, min(slowest, g.macs / layer_s)
    return macs / seconds, slowest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commands", type=int, default=2_000_000)
    parser.add_argument("--model", default="mobilenet-v2", help="network whose layers are executed by value")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    spec = PimSpec.load("newton-gddr6")
    program = blocks(spec, options.commands)
    text = expand_to_pim(program, 0)
    trace = Trace.read(text)
    commands = len(trace)
    results = {"commands": commands, "parse_s": best_s(Trace.read, text)}
    for timing in TIMINGS:
        key = timing.replace("-", "_")
        results |= {
            f"{key}_parse_and_time_s": best_s(time_trace, text, spec, timing),
            f"{key}_trace_commands_per_s": commands / best_s(time_trace, trace, spec, timing),
            f"{key}_program_commands_per_s": commands / best_s(time_program, program, spec, timing),
        }
    rate, slowest = macs_per_s(options.model)
    results |= {"by_value_macs_per_s": rate, "by_value_slowest_layer_macs_per_s": slowest}
    if options.json:
        print(json.dumps(results))
        return
    for name, value in results.items():
        print(f"{name:45} {value:.3g}" if isinstance(value, float) else f"{name:45} {value}")


if __name__ == "__main__":
    main()
