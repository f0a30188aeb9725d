"""The text of a compilation's report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pimflow.commands.shared import channel_report, front
from pimflow.commands.shared.memory_report import PoolReport
from pimflow.commands.shared.plan_report import MIXTURE
from pimflow.commands.shared.report import GpuPart, OrderReport, RegionReport, Report, SystemReport
from pimflow.commands.shared.streaming_report import distances_text
from pimflow.core.output_error import error_text
from pimflow.core.rewrite import MODES
from pimflow.decomposition.report import agreement_text, decomposition_text, skips_text
from pimflow.hardware.systems import LAUNCHES
from pimflow.memory.reorder import OrderSummary
from pimflow.primitive_selection.report import primitives_text

MAX_LINES = 24  # largest number of lines of a summary: a screen
MAX_LAYERS, MIN_LAYERS = 10, 3
DEVICES = ("gpu", "pim")  # resources whose busy and idle times are printed


def table(report: Report, out: str | None) -> str:
    """The whole report as text: every region, and how the plan was found."""
    lines = _head_lines(report) + _region_lines(report.regions)
    lines += [
        _latency_line(report),
        _busy_line(report),
        *_baseline_lines(report),
        _search_line(report),
        _savings_line(report.energy.savings_pj),
    ]
    return "\n".join(lines + _last_lines(report, out) + _conventions_lines(report))


def summary(report: Report, out: str | None) -> str:
    """The report in a few lines: modes, and the layers whose time the plan changes most.

    It has at most `MAX_LINES` lines, unless other parts are long: then it shows only `MIN_LAYERS` layers.
    """
    first = _head_lines(report) + _mode_lines(report.regions)
    last = [_latency_line(report), _busy_line(report), *_baseline_lines(report), *_last_lines(report, out)]
    conventions = _conventions_lines(report)
    # One line has the heads of the columns; a command that searches conventions later begins with one line.
    room = MAX_LINES - len(first) - len(last) - 1 - max(len(conventions), 1)
    layers = _layer_lines(report.regions, max(MIN_LAYERS, min(MAX_LAYERS, room)))
    return "\n".join(first + layers + last + conventions)


def conventions_text(report: Report) -> str:
    """The speed-ups under other conventions, a line for each: of the same plan, and of the best one there."""
    searched = report.conventions.searched
    width = max(len(convention.what) for convention in searched)
    lines = [f"range     {'speed-up with':<{width}}  {'same plan':>9}  {'searched again':>14}"]
    for convention in searched:
        same_plan, searched_again = (
            "-" if speedup is None else f"{speedup:.3f}x"
            for speedup in (convention.same_plan, convention.searched_again)
        )
        gap = f"  gap {100 * convention.gap:.2f} %" if convention.gap else ""
        lines.append(f"{'':<10}{convention.what:<{width}}  {same_plan:>9}  {searched_again:>14}{gap}")
    return "\n".join(lines)


def _conventions_lines(report: Report) -> list[str]:
    return conventions_text(report).splitlines() if report.conventions.searched else []


def _head_lines(report: Report) -> list[str]:
    """The system and the network."""
    system, regions = report.system, report.regions
    capable = sum(r.pim_capable for r in regions)
    channels = (
        f"{system.gpu_channels} GPU + {system.pim_channels} PIM channels ({system.channel_sharing})"
        if any(r.on_pim for r in regions)
        else f"all {system.gpu_channels} channels on the GPU"
    )
    part_line = [f"part      {report.extras.part}"] if report.extras.part else []
    launch_text = "" if system.launches == LAUNCHES[0] else f", launches {system.launches}"
    return [
        *part_line,
        f"system    {system.gpu} ({_gpu_source_text(system)}) + {system.pim} ({system.timing}), {channels}, "
        f"accounting {system.accounting}{launch_text}, {system.dtype}",
        f"model     {report.model}: {len(regions)} regions, {capable} PIM-capable, "
        f"{len(regions) - capable} GPU only",
        *_obstacle_lines(regions),
    ]


def _obstacle_lines(regions: Sequence[RegionReport]) -> list[str]:
    """Why PIM can compute none of the products of a network, by its largest one."""
    products = [region for region in regions if region.size.macs]
    if not products or any(region.pim_capable for region in regions):
        return []
    largest = max(products, key=lambda region: region.size.macs)
    return [f"why       {largest.name}, the largest product, is not for PIM: {largest.reason}"]


def _latency_line(report: Report) -> str:
    plan, energy = report.plan, report.energy
    return (
        f"latency   {plan.latency_gpu_only_ns / 1e6:.4f} → {plan.latency_ns / 1e6:.4f} ms "
        f"({plan.speedup:.3f}x)"
        f"     energy {energy.energy_gpu_only_pj / 1e9:.2f} → {energy.energy_pj / 1e9:.2f} mJ"
    )


def _busy_line(report: Report) -> str:
    """Busy and idle time of the devices: of each, both together are the latency."""

    def text(device: str, busy_ns: float, idle_ns: float) -> str:
        return f"{device} busy {busy_ns / 1e3:.2f} us, idle {idle_ns / 1e3:.2f} us"

    regions = report.regions
    alone = (sum(r.busy_gpu_only_ns for r in regions), sum(r.idle_gpu_only_ns for r in regions))
    devices = [
        text(device.upper(), sum(r.busy_ns[device] for r in regions), sum(r.idle_ns[device] for r in regions))
        for device in DEVICES
    ]
    return f"devices   GPU only: {text('GPU', *alone)} → plan: {'; '.join(devices)}"


def _last_lines(report: Report, out: str | None) -> list[str]:
    """Lines about verification, sources of times and memory, and about requested extras."""
    system, check, extras = report.system, report.verification, report.extras
    legality = _legality_text(check.timing_violations, check.timing_violations_of, system.timing)
    verdict = "match" if check.verified else "DIFFER"
    samples = f" on {check.samples} samples" if check.samples > 1 else ""
    lines = [
        f"check     {check.regions_verified} of {sum(r.on_pim for r in report.regions)} PIM regions and the "
        f"outputs {verdict}{samples} ({error_text(check.worst)}, {system.dtype}); {legality}",
        _time_source_line(report.regions),
        _memory_line(report.memory.pool),
    ]
    if extras.input_range:
        lines.insert(1, f"inputs    {extras.input_range}")
    if report.memory.streaming:
        lines.append(f"weights   {report.memory.streaming.text()}")
    if extras.order:
        lines.append(f"order     {order_text(extras.order)}")
    if extras.decomposition:
        lines.append(f"numerics  {decomposition_text(extras.decomposition)}")
        if extras.decomposition.calibration:
            lines.append(f"samples   {agreement_text(extras.decomposition.calibration)}")
    if extras.skips:
        lines.append(f"skips     {skips_text(extras.skips)}")
    if extras.primitives:
        lines += primitives_text(extras.primitives)
    if extras.c_part:
        lines.append(extras.c_part.text())
    if extras.channel_counts:
        lines.append(channel_report.text(extras.channel_counts))
    if extras.copy_distances:
        lines.append(distances_text(extras.copy_distances))
    if extras.front:
        lines += front.text(extras.front)
    if report.gpu_part.target != "llvm+pim":
        lines.append(_gpu_line(report.gpu_part))
    if out:
        lines.append(f"wrote     {out}")
    return lines


def _mode_lines(regions: Sequence[RegionReport]) -> list[str]:
    """Number and times of regions by mode."""
    lines = [f"{'mode':<9} {'regions':>7}  {'GPU only → plan':>20}"]
    for mode in sorted({r.mode for r in regions}):
        mode_regions = [r for r in regions if r.mode == mode]
        before, after = (
            sum(ns) / 1e3 for ns in zip(*((r.latency_gpu_only_ns, r.latency_ns) for r in mode_regions))
        )
        lines.append(f"{mode:<9} {len(mode_regions):>7}  {before:>8.2f} → {after:>6.2f} us")
    return lines


def _layer_lines(regions: Sequence[RegionReport], max_layers: int) -> list[str]:
    """A line for each candidate of the plan, of the `max_layers` ones whose time changes most."""
    named = {r.name: r for r in regions}
    rows = []
    for first in (r for r in regions if r.covers[0] == r.name):
        before_us = sum(named[name].latency_gpu_only_ns for name in first.covers) / 1e3
        further_layers = len(first.covers) - 1
        label = f"{first.name} and {further_layers} more" if further_layers else first.name
        rows.append((label, first.mode, before_us, first.latency_ns / 1e3))
    shown = sorted(rows, key=lambda row: (-abs(row[3] - row[2]), row[0]))[:max_layers]
    width = max(len(row[0]) for row in shown)
    count_text = f"  {len(shown)} of {len(rows)}; --layers shows all" if len(shown) < len(rows) else ""
    lines = [f"{'layer':<{width}}  {'mode':<8}  {'GPU only → plan':>20}  {'change':>10}{count_text}"]
    for label, mode, before, after in shown:
        times = f"{before:>8.2f} → {after:>6.2f} us  {after - before:>+7.2f} us"
        lines.append(f"{label:<{width}}  {mode:<8}  {times}")
    return lines


def _baseline_lines(report: Report) -> list[str]:
    """A line about the baselines, if layers may be decomposed."""
    plan, mixture = report.plan, report.plan.mixture_gpu_only
    if mixture is None:
        return []
    speedup = mixture.latency_ns / plan.latency_ns
    return [f"baseline  {plan.baseline}; {MIXTURE} takes {mixture.text()} there ({speedup:.3f}x)"]


def _region_lines(regions: Sequence[RegionReport]) -> list[str]:
    """A heading, and a line for each region."""
    width = max([len(r.name) for r in regions] + [6])
    modes = max([len(r.mode) for r in regions] + [5])
    busy_heads = "  ".join(f"{device.upper()} {kind}" for device in DEVICES for kind in ("busy", "idle"))
    heads = f"{'gpu share':>9}  {'of':<9}  {busy_heads}  {'GPU only → plan':>20}"
    lines = [f"{'region':<{width}}  {'mode':<{modes}}  {heads}"]
    for r in regions:
        before, after = r.latency_gpu_only_ns / 1e3, r.latency_ns / 1e3
        share = "" if r.gpu_share is None else f"{r.gpu_share:.2f}"
        # The common time of several regions stands at the first.
        time_text = f"{after:>6.2f} us" if r.covers[0] == r.name else f"with {r.covers[0]}"
        busy = "  ".join(f"{ns[device] / 1e3:>8.2f}" for device in DEVICES for ns in (r.busy_ns, r.idle_ns))
        row = f"{share:>9}  {r.axis:<9}  {busy}  {before:>8.2f} → {time_text}"
        lines.append(f"{r.name:<{width}}  {r.mode:<{modes}}  {row}")
    return lines


def _legality_text(violations: int | None, timing_source: str | None, timing: str) -> str:
    """Number of timing violations; `timing_source` is the timing that was checked if `timing` has no
    clocks.
    """
    if violations is None:
        return "timing not checked (published timing)"
    text = f"{violations} timing violations"
    if timing_source == timing:
        return text
    return f"{text} in the clocks of {timing_source}, which the times are not from: {timing} says no clocks"


def _search_line(report: Report) -> str:
    """How the plan was found, and its proved quality."""
    estimate = report.plan.estimate
    overlapped = sum(estimate.overlapped_ns.values())
    modes = "" if len(estimate.modes) == len(MODES) else f" with {', '.join(estimate.modes)} alone"
    return (
        f"search    least {estimate.objective} by {estimate.solver}{modes}: gap {100 * estimate.gap:.2f} %, "
        "no plan below "
        f"{estimate.lower_bound_ns / 1e6:.4f} ms; {overlapped / 1e3:.2f} us overlapped by branches"
    )


def _memory_line(memory: PoolReport) -> str:
    bound_mb = memory.lower_bound_bytes / 1e6
    proof = "no pool of these is smaller" if memory.optimal else f"bound {bound_mb:.3f}"
    copied = sum(copied.size_bytes for copied in memory.copies)
    return (
        f"memory    {memory.tensors} tensors in one pool of {memory.pool_bytes / 1e6:.3f} MB ({proof}) "
        f"on {memory.target}{_regions(memory)}; {len(memory.copies)} copies of parts ({copied / 1e6:.3f} MB)"
        f"{_pool_choice_text(memory)}"
    )


def _regions(memory: PoolReport) -> str:
    """Sizes of the pool by set of memory channels, if there are several."""
    names = {"left": "in channels left to the GPU", "all": "over all channels", "pim": "in those with PIM"}
    sizes = [f"{region.size_bytes / 1e6:.3f} MB {names[region.channels]}" for region in memory.regions]
    return f": {', '.join(sizes)}" if sizes else ""


def _pool_choice_text(memory: PoolReport) -> str:
    """How the plan with this pool was found, if the goal was about memory."""
    if memory.choice is None:
        return ""
    search_mb, frugal_mb = (
        size_bytes / 1e6 for size_bytes in (memory.choice.searched_bytes, memory.choice.frugal_bytes)
    )
    staging_text = ", the fastest plan as far as it keeps to that" if memory.choice.staged else ""
    switched_text = "".join(f"; {name.replace('_', ' ')} switched on" for name in memory.switched_on)
    return (
        f"; {search_mb:.3f} MB as searched, {frugal_mb:.3f} MB on the GPU alone{staging_text}{switched_text}"
    )


def order_text(order: OrderSummary) -> str:
    """Memory that another order of layers saves, and its latency if that is known."""
    live, bound = order.live_bytes / 1e6, order.lower_bound_bytes / 1e6
    if not order.reordered:
        reason = order.kept_because
        return f"as given: {reason} ({live:.3f} MB live at once, bound of all orders {bound:.3f} MB)"
    assert order.pool_given_bytes is not None and order.pool_bytes is not None
    proof = "proved the fewest" if order.optimal else f"bound of all orders {bound:.3f} MB"
    text = (
        f"changed: {order.live_given_bytes / 1e6:.3f} → {live:.3f} MB live at once ({proof}), pool of the "
        f"network on the GPU {order.pool_given_bytes / 1e6:.3f} → {order.pool_bytes / 1e6:.3f} MB"
    )
    if not isinstance(order, OrderReport):
        return text
    return f"{text}; latency {order.latency_given_ns / 1e6:.4f} → {order.latency_ns / 1e6:.4f} ms"


def _time_source_line(regions: Sequence[RegionReport]) -> str:
    """By resource, how times are known; of several sources, with the number of regions of each."""
    counts: dict[str, Counter[str]] = {}
    for region in regions:
        for resource, source in region.known.items():
            counts.setdefault(resource, Counter())[source.value] += 1
    parts = []
    for resource, source_counts in sorted(counts.items()):
        texts = [f"{source} ({count} of the regions)" for source, count in source_counts.items()]
        parts.append(f"{resource} {', '.join(texts if len(texts) > 1 else source_counts)}")
    return f"known     {'; '.join(parts)}"


def _gpu_source_text(system: SystemReport) -> str:
    """The profiler of the GPU's times, and how the times of its kernels are known."""
    counts, name = system.gpu_known, system.gpu_profiler
    if list(counts) == [name]:
        return name
    return f"{name}: " + ", ".join(f"{count} kernels {source}" for source, count in counts.items())


def _savings_line(saved_pj: dict[str, float]) -> str:
    """Energy that the plan saves by shorter runtime and by cheaper work."""

    def mj(part: str) -> str:
        return f"{saved_pj[part] / 1e9:+.2f} mJ"

    return (
        f"saved     {mj('total')}: {mj('shorter_runtime')} by shorter runtime (constant power), "
        f"{mj('cheaper_work')} by cheaper work"
    )


def _gpu_line(part: GpuPart) -> str:
    """Modelled and measured time of a plan's kernels, and where they run."""
    modelled = f"modelled {part.modelled_ns / 1e6:.4f} ms on {part.modelled_on}"
    if part.measured_ns is not None:
        measured = f"measured {part.measured_ns / 1e6:.4f} ms on {part.measured_on}"
    elif part.flaw:
        measured = f"not compiled: {part.flaw}"
    else:
        measured = (
            f"compiled by {part.compiler}; no CUDA device here, so the llvm+pim twin was run and verified"
        )
    checked = f"; {part.checked_kernels} kernels checked thread by thread" if part.checked_kernels else ""
    if part.uncompared_kernels:
        checked += f", values of {part.uncompared_kernels} not all compared: some blocks did not run"
    return f"gpu part  {part.kernels} kernels, {modelled}; {measured}{checked}"
