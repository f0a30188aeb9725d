"""The memory of a plan: the bytes of its pool of tensors."""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace

from pimflow.core.blocks import SMALLEST_GPU, KernelLimits
from pimflow.core.candidate import Candidate, CostTable, LayerAlternative
from pimflow.core.channel_sets import channel_sets
from pimflow.core.kernel import ELEMENT_BYTES, Kernel
from pimflow.core.liveness import MEMORY, LiveBytes, Liveness, Moment, align_up
from pimflow.core.product_tiles import split_workspace_bytes
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import OPERATOR_KERNELS, SplitRewrite
from pimflow.core.tensor_placement import ChannelSet
from pimflow.placement.solvers import plan_state
from pimflow.placement.solvers.plan_state import PlanState
from pimflow.simulators.gpu.region_kernels import gpu_kernel, gpu_kernels


class PlanMemory:
    """Peak memory of plans of one network: an upper bound of the pool that is built for them.

    Counted are tensors between regions while they are live, and the buffers of each candidate while it runs
    (`Footprint.run_moments`): workspaces, copies, parts. Regions run one after another, in their order.
    Regions that are one kernel count as one: its inputs and its result are live at once, and tensors between
    these regions are never stored. A pipeline keeps all its tensors from its first stage to its last. A
    deferred epilogue keeps its operands live; the kernel that fuses it also stores the finished result if
    others need it. Two partial sums that are still to be added take as much each as their sum. The network's
    inputs and weights are not in the pool, as in an executable.

    If tensors lie in several sets of memory channels, each set has a pool of its own, and the peaks are added
    up. The buffers of a candidate lie where its result does.

    A result of the GPU lies over an operand that is dead after it, if the kernel may overwrite that
    (`Region.overwritable_inputs`). The pool that is built may be smaller: if other kernels write over an
    operand, or parts are combined later.

    Parameters
    ----------
    dtype : str
        Storage type of tensors.
    table : CostTable, optional
        Its transforms make copies; without it there are none.
    kernel_device : str
        Whose kernels' workspaces count: ``gpu``, or ``cpu``, its stand-in; none by default.
    limits : KernelLimits
        Those of the GPU.

    Attributes
    ----------
    liveness : Liveness
        Lifetimes over the regions of the results that count.
    size_bytes : dict of str to int
        Bytes of each tensor in the pool, aligned.
    """

    def __init__(
        self,
        graph: RegionGraph,
        dtype: str,
        table: CostTable | None = None,
        kernel_device: str = "",
        limits: KernelLimits = SMALLEST_GPU,
    ):
        self.graph, self.dtype, self.table = graph, dtype, table
        self._kernel_device, self._limits = kernel_device, limits
        self._order = {region.name: position for position, region in enumerate(graph.regions)}
        self._storage_bytes = graph.tensor_bytes(dtype)
        self.size_bytes = {name: align_up(size) for name, size in self._storage_bytes.items()}
        # The network's outputs are fp32 whatever the storage type.
        outputs = (r for r in graph.regions if graph.returns_result(r.name) and not r.is_view)
        self._output_bytes = {r.name: r.output_elements * ELEMENT_BYTES["fp32"] for r in outputs}
        live = graph.liveness(dtype)
        stored = tuple(
            replace(life, size_bytes=align_up(max(life.size_bytes, self._output_bytes.get(life.name, 0))))
            for life in live.lifetimes
            if not life.name.startswith("%")
        )
        self.liveness = Liveness(steps=live.steps, lifetimes=stored)
        self._lives = {life.name: life for life in stored}
        self._live_bytes: dict[Hashable, LiveBytes] = {}

    def _part(self, names: Collection[str]) -> PlanMemory:
        """The memory of the results `names`, and of the buffers of candidates that give them."""
        part = copy.copy(self)
        part._live_bytes = {}
        part.size_bytes = {name: size if name in names else 0 for name, size in self.size_bytes.items()}
        part._lives = {name: life for name, life in self._lives.items() if name in names}
        part.liveness = replace(self.liveness, lifetimes=tuple(part._lives.values()))
        return part

    def buffer_bytes(self, candidate: Candidate, moment: Moment) -> int:
        """Bytes of the buffers of `candidate` at a moment.

        PIM stores a network's output in the narrower storage type first, which is then converted.
        """
        is_narrow, result = self.dtype != "fp32" and candidate.uses_pim, candidate.covers[-1]
        own_bytes = 0
        if result in self._lives:
            workspace_bytes = self._workspace_bytes(candidate) if moment.reads else 0
            own_bytes = align_up(moment.own_bytes) + align_up(workspace_bytes)
        return own_bytes + (self.size_bytes[result] if is_narrow and result in self._output_bytes else 0)

    def _workspace_bytes(self, candidate: Candidate) -> int:
        """Bytes of the workspace of the kernel that computes a region, in whole or in part."""
        if not self._kernel_device or candidate.alternative != LayerAlternative():
            return 0
        region, kernels = self.graph.region(candidate.covers[-1]), list[Kernel]()
        if self._kernel_device == "cpu":
            is_plain = candidate.rewrite == OPERATOR_KERNELS
            return region.kernel.workspace_elements * ELEMENT_BYTES[self.dtype] if is_plain else 0
        if candidate.rewrite == OPERATOR_KERNELS:
            kernels = gpu_kernels(region, self.dtype)
        elif isinstance(candidate.rewrite, SplitRewrite):
            kernels = [gpu_kernel(region, self.dtype, candidate.rewrite.split(region.layer))]
        sizes = (split_workspace_bytes(kernel, self.dtype, self._limits) for kernel in kernels)
        return max(sizes, default=0)

    def live_bytes(self, candidate: Candidate) -> LiveBytes:
        """Bytes of the tensors that are live while `candidate` does its regions."""
        overrides = self.size_overrides_bytes(candidate)
        key = (candidate.covers, candidate.fuses_regions, tuple(sorted(overrides.items())))
        if key not in self._live_bytes:
            begin, count = self._order[candidate.covers[0]], len(candidate.covers)
            inside = candidate.covers[:-1] if candidate.fuses_regions else ()
            live = self.liveness  # which knows what is live in each step, unless sizes differ
            if overrides:
                sizes = {life.name: life.size_bytes for life in live.lifetimes} | overrides
                lifetimes = (replace(life, size_bytes=sizes[life.name]) for life in live.lifetimes)
                live = replace(live, lifetimes=tuple(lifetimes))
            self._live_bytes[key] = live.live_range_bytes(begin, begin + count, inside)
        return self._live_bytes[key]

    def size_overrides_bytes(self, candidate: Candidate) -> dict[str, int]:
        """Bytes of the results whose sizes differ from the graph's if `candidate` does its regions."""
        if not candidate.alternative.regions:
            return {}
        growths: dict[str, int] = {}
        for replacement in candidate.alternative.regions:
            if replacement.name in self._order:  # else an original layer, which has no chain
                region = self.graph.region(replacement.name)
                growths[replacement.first_result_input] = (
                    replacement.input_elements[0] - region.input_elements[0]
                )
                growths[replacement.name] = replacement.output_elements - region.output_elements
        element = ELEMENT_BYTES[self.dtype]
        return {
            name: align_up(self._storage_bytes[name] + growth * element)
            for name, growth in growths.items()
            if growth
        }

    def overwritable_inputs(self, candidate: Candidate) -> tuple[str, ...]:
        """Inputs of `candidate` that are dead after it, so that its result may lie over one of them.

        It does if the input lies in the same memory, is not copied, and no deferred epilogue needs it.
        """
        is_plain = candidate.rewrite == OPERATOR_KERNELS and candidate.alternative == LayerAlternative()
        steps = candidate.footprint.run_moments
        if not is_plain or len(candidate.covers) > 1 or any(step.writes and not step.reads for step in steps):
            return ()
        region = self.graph.region(candidate.covers[-1])
        end, result = self._order[region.name] + 1, self._lives.get(region.name)
        if result is None or result.alias:
            return ()
        return tuple(
            name
            for name in region.overwritable_inputs
            if (life := self._lives.get(name)) and life.end == end and life.size_bytes == result.size_bytes
            if not life.alias and not life.pinned
        )

    def _overwritten_bytes(self, candidate: Candidate, state: PlanState, copied: Collection[str]) -> int:
        """Bytes of the input that the result of `candidate` lies over in `state`; 0 if there is none."""
        deferred = [self.graph.region(name) for name in state.deferred_epilogues]
        needed = {name for region in deferred for name in (region.name, *region.inputs[region.operands :])}
        inputs = set(self.overwritable_inputs(candidate)).difference(needed, copied)
        return self._lives[candidate.covers[-1]].size_bytes if inputs else 0

    def peak_bytes(self, candidate: Candidate, state: PlanState) -> int:
        """Peak bytes that are live while `candidate` runs in `state`, first while it copies its inputs."""
        live, position = self.live_bytes(candidate), self._order[candidate.covers[0]]
        copies, peaks = 0, list[int]()
        transforms = self.table and plan_state.layout_transforms(self.graph, self.table, candidate, state)
        copied = [tensor for tensor, task in (transforms or {}).items() if task.launched]  # others make none
        for tensor in copied:
            peaks.append(live.moment_bytes(writes=False) + copies + self.size_bytes[tensor])
            copies += self.copy_bytes(tensor, position)
        overwritten_bytes = self._overwritten_bytes(candidate, state, copied)
        for moment in candidate.footprint.run_moments:
            moment_bytes = live.moment_bytes(moment.reads, moment.writes) - moment.writes * overwritten_bytes
            peaks.append(moment_bytes + self.buffer_bytes(candidate, moment) + copies)
        half_bytes = sum(self.size_bytes[name] for name in state.partial_sums)
        return max(peaks) + half_bytes + self._epilogue_bytes(candidate, position, state.deferred_epilogues)

    def copy_bytes(self, tensor: str, position: int) -> int:
        """Bytes that the copy of a tensor adds: 0 if the tensor is dead after it, so that it reuses these."""
        life = self._lives.get(tensor)
        return self.size_bytes[tensor] if life and life.end > position + 1 else 0

    def _epilogue_bytes(
        self, candidate: Candidate, position: int, deferred_epilogues: Collection[str]
    ) -> int:
        """Bytes for deferred epilogues while `candidate` runs.

        These are tensors that only such epilogues keep live, and earlier results that it completes and
        stores, since others need them too. If it does not fuse epilogues, they are done in place before it.
        """
        if not deferred_epilogues:
            return 0
        regions = (self.graph.region(name) for name in deferred_epilogues)
        operands = {name for region in regions for name in region.inputs[region.operands :]}
        held = [name for name in operands if (life := self._lives.get(name)) and life.end <= position]
        if candidate.fuses_epilogue:
            results_read = set(plan_state.results_read(self.graph, candidate))
            held += filter(self.graph.is_shared, results_read.intersection(deferred_epilogues))
        return sum(self.size_bytes[name] for name in held)

    def pool_bytes(self, candidates: Sequence[Candidate]) -> int:
        """Bytes of the pool of a plan of `candidates`."""
        return sum(self.bytes_by_memory(candidates).values())

    def bytes_by_memory(self, candidates: Sequence[Candidate]) -> dict[str, int]:
        """Peak bytes by memory region: a set of channels, if tensors lie in several sets."""
        sets = channel_sets(candidates)
        if not sets:
            return {MEMORY: self._plan_peak_bytes(candidates)}
        inputs = {name for region in self.graph.regions for name in region.inputs if name not in sets}
        sets |= dict.fromkeys(inputs, ChannelSet.GPU)  # copies of inputs lie in the GPU channels
        peaks = {}
        for place in ChannelSet:
            if names := {name for name, tensor_set in sets.items() if tensor_set == place}:
                peaks[place] = self._part(names)._plan_peak_bytes(candidates)
        return {place: size for place, size in peaks.items() if size}

    def _plan_peak_bytes(self, candidates: Sequence[Candidate]) -> int:
        return max(map(self.peak_bytes, candidates, plan_state.states(self.graph, candidates)))
