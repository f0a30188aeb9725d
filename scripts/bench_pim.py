"""Speed of the PIM simulators: ``bench_pim.py [--commands N] [--model NAME] [--exact MODEL …] [--json]``.

It parses and times a ``.pim`` trace. It times the same commands in memory and as a program with loops, a
stream of commands in which nothing repeats, and a layer of VGG-16. It executes a network's layers by value in
every instruction set, on one thread and on two; rates are ratios to the portable code on one thread. All is
measured on this machine.

``--exact`` measures no speed: for every PIM-capable layer of the networks, in both timings, it compares loops
that the simulator advances a period at a time with the same commands one by one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from calibration.pim_device import PimDevice, simd_variants

import pimflow
from pimflow.core.commands import Affine, Comp, GAct, Gwrite, Loop, Readres
from pimflow.core.kernel import ConvGeometry
from pimflow.core.program import PimProgram
from pimflow.core.rewrite import PimRewrite
from pimflow.hardware.constraints import OPTIONAL_COMMANDS
from pimflow.hardware.pim import COMMANDS, PimSpec
from pimflow.pim_backend.programs.layout import memory_image
from pimflow.pim_backend.programs.lowering import ProgramRequest, lower
from pimflow.pim_backend.programs.schedule import schedules
from pimflow.simulators.pim.streams import distinct_channels
from pimflow.simulators.pim.timing import TIMINGS, issue_program, time_program, time_trace
from pimflow.simulators.pim.trace import Trace, expand_to_pim


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


def random_trace(spec: PimSpec, commands: int) -> Trace:
    """A trace as of `blocks` with random rows, and columns in random order, so that nothing is a run."""
    draw = np.random.default_rng(0)
    rows = draw.integers(0, spec.rows_per_bank, max(1, commands // (2 + spec.gangs + spec.columns_per_row)))
    columns = np.argsort(draw.random((len(rows), spec.columns_per_row)), axis=1)
    lines = []
    for row, order in zip(rows.tolist(), columns.tolist()):
        lines.append("0x00000000 GWRITE")
        lines += (f"0x{gang << 27 | row << 11:08x} G_ACT{gang}" for gang in range(spec.gangs))
        lines += (f"0x{row << 11 | column << 6:08x} COMP" for column in order)
        lines.append("READRES")
    return Trace.read(("\n".join(lines) + "\n").encode())


def vgg_layer(spec: PimSpec) -> list[PimProgram]:
    """The widest 28x28 convolution of VGG-16 on 16 channels, in every loop order."""
    g = ConvGeometry(n=1, h=28, w=28, c=512, oc=512, kh=3, kw=3, padding=(1, 1, 1, 1))
    orders = schedules(g, spec, "fp16")
    return [lower(ProgramRequest("conv", g, order), spec, dtype="fp16", channels=16) for order in orders]


def is_exact(program: PimProgram, spec: PimSpec, channel: int) -> bool:
    """Whether a channel's cycles are, in both timings, those of its commands one by one."""
    stream = issue_program(program, spec, channel)
    clock, kind, bursts = stream["clock"], stream["command"], stream["bursts"]
    reads, writes = kind == COMMANDS.index("READRES"), kind == COMMANDS.index("GWRITE")
    nBL, nCL = spec.timing["nBL"], spec.timing["nCL"]
    ends = (clock + 1, clock[reads] + nCL + nBL * bursts[reads], clock[writes] + nBL * bursts[writes])
    cycles = max(int(end.max(initial=0)) for end in ends)
    timed = time_program(program, spec)
    flat = time_trace(expand_to_pim(program, channel), spec, "ramulator-pimflow")
    published = time_program(program, spec, "ramulator-pimflow")
    counts = zip(COMMANDS, np.bincount(kind, minlength=len(COMMANDS)).tolist())
    issued_by_name = {name: count for name, count in counts if count or name not in OPTIONAL_COMMANDS}
    return (
        timed.channel_cycles[channel] == cycles
        and timed.channel_commands[channel] == issued_by_name
        and published.channel_cycles[channel] == flat.cycles
        and published.channel_commands[channel] == flat.commands
    )


def check_exactness(models: list[str], commands: int) -> int:
    """Check every layer of `models` whose channels have at most `commands` commands; the exit code."""
    checked = skipped = 0
    for model in models:
        search_result = pimflow.search(model)
        for region in search_result.graph.regions:
            if region.name in search_result.table.unsupported_reasons:
                continue
            program = search_result.generator.pim_program(
                region, search_result.generator.make(region, PimRewrite()).rewrite, 0
            )
            for channel in distinct_channels(program, search_result.system.pim):
                counts = time_program(program, search_result.system.pim).channel_commands[channel]
                if sum(counts.values()) > commands:
                    skipped += 1
                elif is_exact(program, search_result.system.pim, channel):
                    checked += 1
                else:
                    print(f"{model}, region '{region.name}', channel {channel}: not exact", file=sys.stderr)
                    return 1
    print(f"{checked} streams exact in both timings; {skipped} of more than {commands} commands not checked")
    return 0


def best_s(function: Callable, *operands: object, repeats: int = 3) -> float:
    """Shortest wall time of `repeats` calls, in seconds."""
    times_s = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        function(*operands)
        times_s.append(time.perf_counter() - begin_s)
    return min(times_s)


@dataclass
class ByValue:
    """Time of a network's layers, executed by value in one instruction set on some threads.

    Attributes
    ----------
    seconds : float
        Of all layers, one after the other.
    slowest : tuple of (float, str)
        MACs a second of the slowest layer, and its name.
    """

    macs: int = 0
    seconds: float = 0.0
    slowest: tuple[float, str] = (float("inf"), "")

    def add(self, name: str, macs: int, seconds: float) -> None:
        """Count a layer of `macs` multiplications that took `seconds`."""
        self.macs, self.seconds = self.macs + macs, self.seconds + seconds
        self.slowest = min(self.slowest, (macs / seconds, name))

    @property
    def macs_per_s(self) -> float:
        return self.macs / self.seconds


def measure_by_value(model: str, min_s: float = 0.05) -> dict[tuple[str, int], ByValue]:
    """Execute all PIM-capable layers of `model` in every instruction set, on one thread and on two.

    They take turns at a layer, at least five times and for `min_s` seconds, and each counts its shortest
    time: other load on the machine then slows all of them equally.
    """
    search_result = pimflow.search(model)
    draw = np.random.default_rng(0)
    totals = {(variant, threads): ByValue() for variant in simd_variants() for threads in (1, 2)}
    for region in search_result.graph.regions:
        if region.name in search_result.table.unsupported_reasons:
            continue
        g = region.geometry
        program = search_result.generator.pim_program(
            region, search_result.generator.make(region, PimRewrite()).rewrite, 0
        )
        weights = draw.standard_normal((g.oc, g.reduction), np.float32)
        device = PimDevice(program, memory_image(program, weights))
        x = draw.standard_normal((g.n, g.h, g.w, g.c), np.float32)
        times_s: dict[tuple[str, int], list[float]] = {configuration: [] for configuration in totals}
        begin_s = time.perf_counter()
        while len(times_s[next(iter(totals))]) < 5 or time.perf_counter() < begin_s + min_s * len(totals):
            for variant, threads in totals:
                times_s[variant, threads].append(best_s(device.run, x, threads, variant, repeats=1))
        for configuration, total in totals.items():
            total.add(region.name, g.macs, min(times_s[configuration]))
    return totals


def figures_by_value(model: str) -> dict[str, float | str]:
    """Rates of the fastest instruction set, and the others' as ratios."""
    totals = measure_by_value(model)
    fastest, portable = simd_variants()[0], totals["portable", 1].macs_per_s
    one_thread, two_threads = totals[fastest, 1], totals[fastest, 2]
    figures = {
        "by_value_model": model,
        "by_value_variant": fastest,
        "by_value_macs_per_s": one_thread.macs_per_s,
        "by_value_slowest_layer_macs_per_s": one_thread.slowest[0],
        "by_value_slowest_layer": one_thread.slowest[1],
        "by_value_two_threads_ratio": two_threads.macs_per_s / one_thread.macs_per_s,
    }
    for variant, threads in totals:
        key = f"by_value_{variant}_{threads}_thread{'s'[: threads > 1]}_to_portable"
        figures[key] = totals[variant, threads].macs_per_s / portable
    return figures


def main() -> None:
    """Read the arguments of the command line, and do what the top of this file says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commands", type=int, default=2_000_000)
    parser.add_argument("--model", default="mobilenet-v2", help="network whose layers are executed by value")
    parser.add_argument("--exact", metavar="MODEL", nargs="+", help="check these networks, measure nothing")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.exact:
        sys.exit(check_exactness(options.exact, options.commands))

    spec = PimSpec.load("newton-gddr6")
    program = blocks(spec, options.commands)
    text = expand_to_pim(program, 0)
    trace = Trace.read(text)
    commands, mixed, layer = len(trace), random_trace(spec, options.commands), vgg_layer(spec)
    results = {"commands": commands, "parse_s": best_s(Trace.read, text)}
    for timing in TIMINGS:
        key = timing.replace("-", "_")
        results |= {
            f"{key}_parse_and_time_s": best_s(time_trace, text, spec, timing),
            f"{key}_trace_commands_per_s": commands / best_s(time_trace, trace, spec, timing),
            f"{key}_shuffled_commands_per_s": len(mixed) / best_s(time_trace, mixed, spec, timing),
            f"{key}_program_commands_per_s": commands / best_s(time_program, program, spec, timing),
            f"{key}_vgg_layer_s": max(best_s(time_program, order, spec, timing) for order in layer),
        }
    results |= figures_by_value(options.model)
    if options.json:
        print(json.dumps(results))
        return
    for name, value in results.items():
        print(f"{name:45} {value:.3g}" if isinstance(value, float) else f"{name:45} {value}")


if __name__ == "__main__":
    main()
