"""The steps of `compile`, in order: check, prepare, place, select, build, verify; then `compile_results`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pimflow import zoo
from pimflow.commands.compile.conventions import ConventionSearch
from pimflow.commands.compile.make_report import PlacedNetwork
from pimflow.commands.compile.options import CompileOptions
from pimflow.commands.compile.pareto import search_front
from pimflow.commands.compile.reference_run import ReferenceRun, Trial
from pimflow.commands.shared import prepare
from pimflow.commands.shared.channel_report import ChannelCount
from pimflow.commands.shared.inputs import inputs_by_name
from pimflow.commands.shared.prepare import PreparedNetwork
from pimflow.commands.shared.published_decode import PublishedDecode
from pimflow.commands.shared.search import SearchRequest
from pimflow.commands.shared.search_arguments import plan_modes, require_effect
from pimflow.commands.shared.streaming_report import CopyDistance
from pimflow.compiler import artifact, build, ir_dump
from pimflow.compiler.build import Build
from pimflow.compiler.c_code import network as c_code
from pimflow.compiler.c_code.network import CNetwork
from pimflow.compiler.conditioning import OutputReference
from pimflow.compiler.interface import Interface
from pimflow.compiler.kernel_checks.check import require_cuda
from pimflow.compiler.measurement.kernel_times import inference_ns
from pimflow.compiler.verification import Verification, verify
from pimflow.core.rewrite import Mode
from pimflow.decomposition.calibration import Calibration
from pimflow.errors import UsageError
from pimflow.frontend import Network
from pimflow.host.directories import check_target
from pimflow.pim_backend.runtime import targets
from pimflow.placement import SearchResult
from pimflow.placement.candidates.candidates import require_primitives
from pimflow.primitive_selection import selection as primitive_selection
from pimflow.primitive_selection.network_time import network_time
from pimflow.primitive_selection.options import CUDA, check_device, goal_with_primitives
from pimflow.primitive_selection.selection import Selection

if TYPE_CHECKING:
    from pimflow.frontend import Model

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class CompileRequest(SearchRequest, CompileOptions):
    """The request of a compilation: that of a search, and what is built and written."""

    channel_counts: tuple[ChannelCount, ...] | None
    copy_distances: tuple[CopyDistance, ...] | None
    out: str | os.PathLike[str] | None
    force: bool
    progress: Progress


def check_request(request: CompileRequest) -> CompileRequest:
    """Check a request before any work, and return it with its final goal."""
    _check_directories(request)
    request = _with_budget(request)
    require_effect(
        request.goal, plan=request.plan, in_c=request.in_c, options=request.options, pareto=request.pareto
    )
    goal = request.goal
    if request.in_c:
        c_code.require_no_pim(request.plan)
        goal = replace(goal, modes="gpu")
    check_device(request.select, targets.C_TARGET if request.in_c else request.target)
    goal = goal_with_primitives(goal, request.select)
    request.system.require_network_dtype()
    request.profiling.require(request.system, plan_modes(goal, request.plan))
    if request.emit_traces and set(plan_modes(goal, request.plan)) <= {Mode.GPU}:
        raise UsageError("--emit-traces has no effect where nothing runs on PIM; leave it out")
    for option, is_set in (("check_kernels", request.check_kernels), ("cuda_graphs", request.cuda_graphs)):
        if is_set:
            require_cuda(option, request.target)
    if goal.primitives:
        require_primitives(request.system, request.profiling.gpu)
    if request.calibration is not None and request.options.decomposition_request is None:
        raise UsageError(
            "--calibration compares a decomposed network with the original: give --decompose too"
        )
    # Primitives of the GPU are part of the plan; those of a CPU are selected later, for its code.
    return replace(request, goal=goal, select=None if goal.primitives else request.select)


def _check_directories(request: CompileRequest) -> None:
    """Raise an error unless the directories of a request can be written, and neither is in the other."""
    if request.out is not None:
        check_target(request.out, artifact.KIND, force=request.force)
    if request.dump_ir is None:
        return
    check_target(request.dump_ir, ir_dump.KIND, force=request.force)
    if request.out is not None:
        out, modules = Path(request.out).resolve(), Path(request.dump_ir).resolve()
        if out.is_relative_to(modules) or modules.is_relative_to(out):
            raise UsageError(
                f"--dump-ir {request.dump_ir} and -o {request.out}: one directory is the other or in it; "
                "name separate ones"
            )


def _with_budget(request: CompileRequest) -> CompileRequest:
    """Apply the bound on memory to the selection for a CPU too; for C code to the selection only."""
    budget, select = request.goal.max_memory_bytes, request.select
    if budget is None or select is None or select.device == CUDA:
        return request
    if select.memory_budget_bytes is None:
        select = replace(select, memory_budget_bytes=budget)
    goal = replace(request.goal, max_memory_bytes=None) if request.in_c else request.goal
    return replace(request, goal=goal, select=select)


def prepare_network(request: CompileRequest, model: Model) -> tuple[PreparedNetwork, ReferenceRun]:
    """Load and prepare the network of `model`, and compute its reference."""
    request.progress("loading")
    network = prepare.load(model, request.options)
    prepare.require_decomposed(network, request.options)
    network.require_memory()
    calibration = request.calibration
    draws = network.draws | inputs_by_name(request.given_draws, list(network.inputs))
    interface = Interface(
        inputs=network.inputs,
        table_rows=network.table_rows,
        output_names=network.output_names,
        draws={name: str(draw) for name, draw in draws.items()},
    )
    reference = ReferenceRun(
        interface=interface,
        samples=request.samples(interface, network.example_inputs),
        calibration=None if calibration is None else Calibration.read(calibration, network),
        progress=request.progress,
        states={state.name: state.result for state in network.states},
        is_drawn=not (request.given_arrays() or request.given_draws),
    )
    prepared = request.prepare_network(network, reference.inspect, request.progress, reference.calibration)
    return prepared, reference


def place_network(request: CompileRequest, model: Model, prepared: PreparedNetwork) -> PlacedNetwork:
    """Search the plan of a network, or apply the one that is given; search the front if requested."""
    request.progress("searching")
    begin = time.perf_counter()
    search_result, pool = request.place_network(prepared, progress=request.progress)
    placed = PlacedNetwork(
        search_result=search_result,
        search_seconds=time.perf_counter() - begin,
        gpu_known=request.costs.kernel_counts(),
        pool=pool,
    )
    if request.pareto is None:
        return placed
    request.progress("searching the front")

    def load() -> Network:
        """The network again: objectives may decompose other layers."""
        return prepare.load(model, request.options)

    front = search_front(request, load, prepared.network, search_result, request.pareto)
    return replace(placed, front=front)


def convention_search(
    request: CompileRequest, prepared: PreparedNetwork, placed: PlacedNetwork
) -> ConventionSearch:
    """The search of the network under other conventions."""
    copies = prepare.with_other_copies(request.system)
    return ConventionSearch(
        search_result=placed.search_result,
        plan=request.plan,
        copies_graph=prepared.regions_for(copies),
        copies_original=prepared.original_regions_for(copies),
    )


def select_primitives(request: CompileRequest, prepared: PreparedNetwork) -> Selection | None:
    """Select primitives for the layers of a CPU, if requested; with target ``c`` by times of C code."""
    if request.select is None:
        return None
    request.progress("selecting primitives")
    options = request.select
    if request.in_c and not options.target:
        options = replace(options, target=targets.C_TARGET)
    graph = prepare.regions(prepared.network, request.system)
    return primitive_selection.select_for(graph, options, cache=request.profiling.cache)


@dataclass(frozen=True, kw_only=True)
class BuildSet:
    """The builds, that of the requested target first, and the network in C."""

    builds: tuple[Build, ...]
    c_part: CNetwork | None


def build_targets(
    request: CompileRequest,
    network: Network,
    search_result: SearchResult,
    selection: Selection | None,
    reference: ReferenceRun,
) -> BuildSet:
    """Build the network for the requested target, for the stand-in, and in C if that is the target."""
    request.progress("generating code")
    primitives = None
    if selection and selection.choices:
        primitives = build.LayerPrimitives(selection.choices, selection.layouts)
    stored = request.out is not None
    builds = tuple(
        build.build(
            network,
            search_result,
            targets.target_by_name(name),
            None if request.in_c else primitives,
            keep_code=stored,
            cuda_graphs=request.cuda_graphs,
        )
        for name in dict.fromkeys([request.target, "llvm+pim"])
    )
    if not request.in_c:
        return BuildSet(builds=builds, c_part=None)
    request.progress("building C")
    references = [
        OutputReference(expected=expected, perturbed=network.perturbed, tolerance=request.tolerance)
        for expected in reference.expected
    ]
    c_part = c_code.c_network(network, request.system, primitives, reference.samples, references)
    return BuildSet(builds=builds, c_part=c_part)


def verify_builds(
    request: CompileRequest, model: Model, network: Network, build_set: BuildSet, reference: ReferenceRun
) -> Verification:
    """Verify every build that runs on this machine on every sample.

    Drawn inputs for which values leave fp16 are drawn again, as smaller ones. The result is that of the first
    of these builds, for the sample whose error is nearest to its bound.
    """
    request.progress("verifying")
    verifications = _verifications(request, network, build_set, reference)
    can_draw = reference.is_drawn and reference.decomposition is None
    if can_draw and not all(verification.is_in_range for verification in verifications):
        request.progress("trying smaller inputs")
        for trial in reference.smaller_trials(prepare.load(model, request.options)):
            smaller = _verifications(request, network, build_set, trial)
            if all(verification.is_in_range for verification in smaller):
                reference.take_range(trial, "values leave fp16 for usual ones")
                verifications = smaller
                break
    for verification in verifications:
        verification.require()
    samples = len(reference.samples)
    worst = max(verifications[-samples:], key=lambda verification: verification.worst.error_over_bound)
    return replace(worst, samples=samples)


def _verifications(
    request: CompileRequest, network: Network, build_set: BuildSet, run: ReferenceRun | Trial
) -> list[Verification]:
    """Results of all samples for every build that runs on this machine, in the reverse order of builds."""
    return [
        verify(network, target_build, request.system, inputs, expected, request.tolerance)
        for target_build in reversed(build_set.builds)
        if target_build.can_run_here
        for inputs, expected in zip(run.samples, run.expected, strict=True)
    ]


def with_kernel_times(
    request: CompileRequest, selection: Selection | None, target_build: Build, reference: ReferenceRun
) -> Selection | None:
    """Return `selection` with times of the kernels of the whole network."""
    if selection is None or not target_build.calls:
        return selection
    request.progress("timing kernels")
    network_ns = network_time(target_build.calls, request.profiling.cache)
    if network_ns is not None:
        network_ns = replace(network_ns, measured_ns=inference_ns(target_build, reference.inputs))
    return primitive_selection.with_network(selection, network_ns)


def decoder_part(
    model: Model, network: Network, search_result: SearchResult | None = None, context: int | None = None
) -> str | None:
    """Notes on a decoder for the report: that it is one block of several, that each step copies its cache.

    With a result and a context also the time of a step on a GPU that decodes as the best published one does.
    """
    notes = []
    if isinstance(model, str) and model in zoo.decoder_names():
        decoder = zoo.decoder(model)
        is_block = not decoder.has_weights
        if is_block:
            notes.append(f"one block of {decoder.layers}, and no output layer: all figures are of one block")
        if search_result is not None and context is not None:
            types = {region.geometry.weights for region in search_result.graph.regions if region.geometry}
            if weights := next(filter(None, types), None):
                decoder = decoder.with_weights(weights)
            published = PublishedDecode.from_decoder(decoder, search_result.system, block_only=is_block)
            step_ns, plan_ns = published and published.step_ns(context), search_result.evaluation.latency_ns
            if published and step_ns:
                notes.append(
                    f"the best published GPU takes {step_ns / 1e6:.4f} ms, of which the plan is "
                    f"{step_ns / plan_ns:.3f}x: bytes at {published.source}"
                )
    if not network.states and zoo.past_name(0, "key") in network.inputs:
        notes.append("each step copies the cache; --context N keeps one of N tokens in place")
    return "; ".join(notes) or None
