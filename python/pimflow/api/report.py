"""What a compilation found, as data and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pimflow.api.baseline_report import baseline_lines, baseline_part, by_region_ns
from pimflow.api.explanation import known_parts, schedule_text
from pimflow.compiler.verification import JUDGED, Verification, legality_text
from pimflow.core.candidate import Cost
from pimflow.core.output_error import error_text
from pimflow.core.plan import MODES
from pimflow.core.stages import whole_name
from pimflow.decomposition.report import agreement_text, decomposition_text, skips_text
from pimflow.hardware import System
from pimflow.memory import MemoryPlan
from pimflow.placement import Searched
from pimflow.placement.solvers.evaluate import overlapped_ns, savings_pj
from pimflow.primitive_selection.report import c_text, primitives_text

if TYPE_CHECKING:
    from pimflow.relay_passes.regions.kernel_groups import Copied


def build(
    searched: Searched,
    verification: Verification,
    *,
    speedup_without_launch: float,
    conventions: list[dict[str, Any]],
    gpu_part: dict[str, Any],
    memory: dict[str, Any],
    order: dict[str, Any] | None,
    decomposition: dict[str, Any] | None,
    skips: dict[str, Any] | None,
    primitives: dict[str, Any] | None,
    c_part: dict[str, Any] | None = None,
    search_seconds: float,
    wall_seconds: float,
) -> dict[str, Any]:
    """The contents of ``report.json``; times in ns, energies in pJ, shares in [0, 1].

    Parameters
    ----------
    speedup_without_launch : float
        Of a search with both devices' launches at zero.
    conventions : list of dict
        Speed-ups under the other accounting and other PIM launch times.
    gpu_part, memory : dict
        What `gpu_part` and `memory_part` say.
    order : dict, optional
        Of the order of the layers: `LayerOrder.summary`, and the latency in the given and in this order.
    decomposition : dict, optional
        What `DecomposedNetwork.summary` says, if layers were decomposed.
    skips : dict, optional
        What `SkipOptimisation.summary` says, if skip connections were to be optimised.
    primitives : dict, optional
        What `primitive_selection.selection.summary` says, if convolutions have primitives that were chosen
        for a CPU, or `primitive_selection.report.plan_part`, if they may have some in the plan.
    c_part : dict, optional
        What `CNetwork.summary` says, if there is C code.
    """
    system, baseline, evaluation = searched.system, searched.baseline, searched.evaluation
    before_ns = by_region_ns(searched, decomposition)
    regions = [
        {
            "name": region.name,
            "covers": list(candidate.covers),
            "mode": candidate.rewrite.mode,
            "gpu_share": candidate.gpu_share,
            "axis": candidate.rewrite.axis if candidate.rewrite.mode == "SPLIT" else "",
            "latency_gpu_only_ns": before_ns[region.name],
            "latency_ns": evaluation.region_ns[region.name],
            "known": known_parts(Cost.of(candidate)),
            "schedule": schedule_text(candidate),
            "primitive": candidate.rewrite.primitive,
            "on_pim": region.name in candidate.pim_regions,
            "pim_capable": region.name not in searched.table.refused,
            "reason": choice.reason,
        }
        for region in searched.graph.regions
        for candidate, choice in [(searched.doing[region.name], searched.plan.choice(region.name))]
    ]
    placed_bytes = sum(c.placed_bytes for c in searched.candidates)
    return {
        "model": searched.graph.name,
        "system": system.name,
        "gpu": system.gpu.name,
        "pim": system.pim.name,
        "gpu_channels": searched.plan.gpu_channels,
        "pim_channels": system.pim_channels,
        "dtype": system.dtype,
        "accounting": system.accounting,
        "timing": searched.maker.costs.side.profiler.name,
        "gpu_profiler": searched.maker.costs.profiling.gpu.name,
        "gpu_known": searched.maker.costs.known_kernels(),
        "scheduling": system.scheduling,
        "copies": system.copies,
        "padding": system.padding,
        "splits": searched.maker.splitting,
        **baseline_part(searched),
        "latency_gpu_only_ns": baseline.latency_ns,
        "latency_ns": evaluation.latency_ns,
        **estimate_part(searched),
        "speedup": baseline.latency_ns / evaluation.latency_ns,
        "speedup_without_launch": speedup_without_launch,
        "conventions": conventions,
        "energy_gpu_only_pj": baseline.energy_pj,
        "energy_pj": evaluation.energy_pj,
        "energies_gpu_only_pj": baseline.energies_pj,
        "energies_pj": evaluation.energies_pj,
        "savings_pj": savings_pj(evaluation, baseline),
        "verified": verification.verified,
        "max_relative_error": verification.max_relative_error,
        "tolerance": verification.bound,
        "reference_deviation": verification.worst.reference_deviation,
        "outputs": [asdict(output) for output in verification.outputs],
        "regions_verified": len(_verified(verification)),
        "timing_violations": verification.timing_violations,
        "timing_violations_of": None if verification.timing_violations is None else JUDGED,
        "weight_load_ns": weight_load_ns(system, placed_bytes),
        "weight_bytes": placed_bytes,
        "peak_activation_bytes": searched.graph.liveness(system.dtype).peak_bytes,
        "regions": regions,
        "gpu_part": gpu_part,
        "memory": memory,
        "order": order,
        "decomposition": decomposition,
        "skips": skips,
        "primitives": primitives,
        "c_part": c_part,
        "assumed": system.assumptions(),
        "search_seconds": search_seconds,
        "wall_seconds": wall_seconds,
    }


def estimate_part(searched: Searched) -> dict[str, Any]:
    """What the solver made of the plan beside the timeline: its estimate, and where the two differ.

    `lower_bound_ns` is below the latency of every plan of these candidates; `estimate_gap` is a share of the
    timeline's latency. `overlapped_ns` says, by region, what running one after the other would have added.
    """
    plan, latency_ns = searched.plan, searched.evaluation.latency_ns
    return {
        "objective": searched.goal.objective,
        "modes": [mode.lower() for mode in searched.goal.modes],
        "solver": searched.goal.solver_for(searched.graph),
        "estimate_ns": plan.latency_ns,
        "estimate_gap": (plan.latency_ns - latency_ns) / latency_ns,
        "lower_bound_ns": plan.lower_bound_ns,
        "overlapped_ns": overlapped_ns(searched.graph, searched.candidates, searched.table),
    }


def _verified(verification: Verification) -> set[str]:
    """PIM regions that match, in all parts."""
    wrong = {whole_name(r.region) for r in verification.regions if not r.matches}
    return {whole_name(r.region) for r in verification.regions} - wrong


def memory_part(target: str, plan: MemoryPlan, copies: Iterable[Copied]) -> dict[str, Any]:
    """Where the tensors of the executable for `target` lie, and which parts of them are copied, and why.

    Sizes are of the type that the target stores: a CPU that stands in for a GPU stores fp32.
    """
    return {
        "target": target,
        "pool_bytes": plan.pool_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "optimal": plan.optimal,
        "tensors": len(plan.offsets_bytes),
        "copies": [asdict(copied) for copied in copies],
    }


def gpu_part(
    searched: Searched, target: str, compiler: str, flaw: str, measured_ns: float | None, measured_on: str
) -> dict[str, Any]:
    """The kernels of a plan: what the model says of them, and what a device says if there is one.

    Parameters
    ----------
    target : str
        What was built for.
    compiler, flaw : str
        Which compiler made the CUDA kernels a binary, or why there is none.
    measured_ns : float or None
        Kernels of one inference, launched back to back, on `measured_on`.
    """
    timeline = searched.evaluation.timeline
    return {
        "target": target,
        "kernels": sum(event.launched for event in timeline.events if event.resource == "gpu"),
        "modelled_ns": timeline.busy_ps("gpu") / 1e3,
        "modelled_on": searched.system.gpu.name,
        "measured_ns": measured_ns,
        "measured_on": measured_on,
        "compiler": compiler,
        "flaw": flaw,
    }


def weight_load_ns(system: System, placed_bytes: int) -> float:
    """Time to write weights into the PIM channels, all at once, each at the rate of its bus."""
    if not placed_bytes:
        return 0.0
    bytes_per_ns = system.pim.column_bytes / (system.pim.timing["nBL"] * system.pim.tCK_ns)
    return placed_bytes / (bytes_per_ns * system.pim_channels)


def table(report: dict[str, Any], out: str | None) -> str:
    """The report as text for people."""
    regions = report["regions"]
    capable = sum(r["pim_capable"] for r in regions)
    pim = [r for r in regions if r["on_pim"]]
    channels = (
        f"{report['gpu_channels']} GPU + {report['pim_channels']} PIM channels"
        if pim
        else f"all {report['gpu_channels']} channels on the GPU"
    )
    lines = [
        f"system    {report['gpu']} ({_known(report)}) + {report['pim']} ({report['timing']}), {channels}, "
        f"accounting {report['accounting']}",
        f"model     {report['model']}: {len(regions)} regions, {capable} PIM-capable, "
        f"{len(regions) - capable} GPU only",
    ]
    width = max([len(r["name"]) for r in regions] + [6])
    modes = max([len(r["mode"]) for r in regions] + [5])
    heads = f"{'gpu share':>9}  {'of':<9}  {'GPU only → plan':>20}"
    lines.append(f"{'region':<{width}}  {'mode':<{modes}}  {heads}")
    for r in regions:
        before, after = r["latency_gpu_only_ns"] / 1e3, r["latency_ns"] / 1e3
        share = "" if r["gpu_share"] is None else f"{r['gpu_share']:.2f}"
        # What several regions take together stands at the first.
        took = f"{after:>6.2f} us" if r["covers"][0] == r["name"] else f"with {r['covers'][0]}"
        row = f"{share:>9}  {r['axis']:<9}  {before:>8.2f} → {took}"
        lines.append(f"{r['name']:<{width}}  {r['mode']:<{modes}}  {row}")
    legality = legality_text(report["timing_violations"], report["timing_violations_of"], report["timing"])
    verdict = "match" if report["verified"] else "DIFFER"
    lines += [
        f"latency   {report['latency_gpu_only_ns'] / 1e6:.4f} → {report['latency_ns'] / 1e6:.4f} ms "
        f"({report['speedup']:.3f}x; launches set to zero: {report['speedup_without_launch']:.3f}x)"
        f"     energy {report['energy_gpu_only_pj'] / 1e9:.2f} → {report['energy_pj'] / 1e9:.2f} mJ",
        *baseline_lines(report),
        _search_line(report),
        _savings_line(report["savings_pj"]),
        "          " + "; ".join(f"{c['what']}: {c['speedup']:.3f}x" for c in report["conventions"]),
        f"check     {report['regions_verified']} of {len(pim)} PIM regions and the outputs {verdict} "
        f"({error_text(report)}, {report['dtype']}); {legality}",
    ]
    lines += [_known_line(regions), _memory_line(report["memory"])]
    if report["order"]:
        lines.append(f"order     {order_text(report['order'])}")
    if report["decomposition"]:
        lines.append(f"numerics  {decomposition_text(report['decomposition'])}")
        if report["decomposition"]["calibration"]:
            lines.append(f"samples   {agreement_text(report['decomposition']['calibration'])}")
    if report["skips"]:
        lines.append(f"skips     {skips_text(report['skips'])}")
    if report["primitives"]:
        lines += primitives_text(report["primitives"])
    if report["c_part"]:
        lines.append(c_text(report["c_part"]))
    if report["gpu_part"]["target"] != "llvm+pim":
        lines.append(_gpu_line(report["gpu_part"]))
    if out:
        lines.append(f"wrote     {out}")
    return "\n".join(lines)


def _search_line(report: dict[str, Any]) -> str:
    """How the plan was found, and how far the solver's view of it is from the timeline."""
    overlapped = sum(report["overlapped_ns"].values())
    modes = "" if len(report["modes"]) == len(MODES) else f" with {', '.join(report['modes'])} alone"
    return (
        f"search    least {report['objective']} by {report['solver']}{modes}: estimate "
        f"{report['estimate_ns'] / 1e6:.4f} ms ({100 * report['estimate_gap']:+.2f} %), no plan below "
        f"{report['lower_bound_ns'] / 1e6:.4f} ms; {overlapped / 1e3:.2f} us overlapped by branches"
    )


def _memory_line(memory: dict[str, Any]) -> str:
    proof = "the smallest" if memory["optimal"] else f"bound {memory['lower_bound_bytes'] / 1e6:.3f}"
    copied = sum(copied["size_bytes"] for copied in memory["copies"])
    return (
        f"memory    {memory['tensors']} tensors in one pool of {memory['pool_bytes'] / 1e6:.3f} MB ({proof}) "
        f"on {memory['target']}; {len(memory['copies'])} copies of parts ({copied / 1e6:.3f} MB)"
    )


def order_text(order: dict[str, Any]) -> str:
    """What another order of the layers saves, and costs if that is known."""
    live, bound = order["live_bytes"] / 1e6, order["lower_bound_bytes"] / 1e6
    if not order["reordered"]:
        why = order["kept_because"]
        return f"as given: {why} ({live:.3f} MB live at once, bound of all orders {bound:.3f} MB)"
    proof = "proved the fewest" if order["optimal"] else f"bound of all orders {bound:.3f} MB"
    text = (
        f"changed: {order['live_given_bytes'] / 1e6:.3f} → {live:.3f} MB live at once ({proof}), pool of the "
        f"network on the GPU {order['pool_given_bytes'] / 1e6:.3f} → {order['pool_bytes'] / 1e6:.3f} MB"
    )
    if "latency_ns" not in order:
        return text
    return f"{text}; latency {order['latency_given_ns'] / 1e6:.4f} → {order['latency_ns'] / 1e6:.4f} ms"


def _known_line(regions: list[dict[str, Any]]) -> str:
    """By resource, how the times are known; where in several ways, of how many regions in each."""
    counts: dict[str, Counter[str]] = {}
    for region in regions:
        for resource, known in region["known"].items():
            counts.setdefault(resource, Counter())[known] += 1
    parts = []
    for resource, ways in sorted(counts.items()):
        told = [f"{known} ({count} of the regions)" for known, count in ways.items()]
        parts.append(f"{resource} {', '.join(told if len(told) > 1 else ways)}")
    return f"known     {'; '.join(parts)}"


def _known(report: dict[str, Any]) -> str:
    """Which profiler the GPU's times are from, and how the kernels it was asked for are known."""
    known, name = report["gpu_known"], report["gpu_profiler"]
    if list(known) == [name]:
        return name
    return f"{name}: " + ", ".join(f"{count} kernels {way}" for way, count in known.items())


def _savings_line(saved_pj: dict[str, float]) -> str:
    """Of the energy, what the plan saves by taking less time, and by what its work costs."""

    def mj(part: str) -> str:
        return f"{saved_pj[part] / 1e9:+.2f} mJ"

    return (
        f"saved     {mj('total')}: {mj('shorter_runtime')} by shorter runtime (constant power), "
        f"{mj('cheaper_work')} by cheaper work"
    )


def _gpu_line(part: dict[str, Any]) -> str:
    """Where the kernels of a plan run, and how long they take there."""
    modelled = f"modelled {part['modelled_ns'] / 1e6:.4f} ms on {part['modelled_on']}"
    if part["measured_ns"] is not None:
        measured = f"measured {part['measured_ns'] / 1e6:.4f} ms on {part['measured_on']}"
    elif part["flaw"]:
        measured = f"not compiled: {part['flaw']}"
    else:
        measured = (
            f"compiled by {part['compiler']}; no CUDA device here, so the llvm+pim twin was run and verified"
        )
    return f"gpu part  {part['kernels']} kernels, {modelled}; {measured}"
