"""The memory of a plan: the bytes of its pool of tensors."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from pimflow.core.blocks import SMALLEST_GPU, KernelLimits
from pimflow.core.candidate import Candidate, CostTable, LayerAlternative
from pimflow.core.channel_sets import channel_sets
from pimflow.core.liveness import MEMORY, Lifetime, LiveBytes, Liveness, Moment, align_up
from pimflow.core.product_tiles import split_workspace_bytes
from pimflow.core.region import ELEMENT_BYTES, Kernel, RegionGraph
from pimflow.core.rewrite import OPERATOR_KERNELS, SplitRewrite
from pimflow.core.tensor_placement import ChannelSet
from pimflow.placement.solvers import plan_state
from pimflow.placement.solvers.plan_state import PlanState
from pimflow.simulators.gpu.region_kernels import gpu_kernel, gpu_kernels

COPYING = Moment(writes=False)
Sizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
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
    only : frozenset of str, optional
        Regions whose results and candidates' buffers count; all if None.
    kernel_device : str
        Whose kernels' workspaces count: ``gpu``, or ``cpu``, its stand-in; none by default.
    limits : KernelLimits
        Those of the GPU.
    """

    graph: RegionGraph
    dtype: str
    table: CostTable | None = None
    only: frozenset[str] | None = None
    kernel_device: str = ""
    limits: KernelLimits = SMALLEST_GPU
    _live_bytes: dict[tuple[int, int, bool, Sizes], LiveBytes] = field(
        default_factory=dict, repr=False, compare=False
    )

    @functools.cached_property
    def liveness(self) -> Liveness:
        """Lifetimes over the regions of the results that count."""
        live = self.graph.liveness(self.dtype)
        stored = tuple(
            replace(life, size_bytes=align_up(max(life.size_bytes, self._output_bytes.get(life.name, 0))))
            for life in live.lifetimes
            if not life.name.startswith("%") and self._is_counted(life.name)
        )
        return Liveness(steps=live.steps, lifetimes=stored)

    @functools.cached_property
    def _output_bytes(self) -> dict[str, int]:
        """Bytes of the network's outputs, which are fp32 whatever the storage type."""
        outputs = (r for r in self.graph.regions if self.graph.returns_result(r.name) and not r.is_view)
        return {region.name: region.output_elements * ELEMENT_BYTES["fp32"] for region in outputs}

    def buffer_bytes(self, candidate: Candidate, moment: Moment) -> int:
        """Bytes of the buffers of `candidate` at a moment.

        PIM stores a network's output in the narrower storage type first, which is then converted.
        """
        is_narrow, result = self.dtype != "fp32" and candidate.uses_pim, candidate.covers[-1]
        size_bytes = 0
        if self._is_counted(result):
            size_bytes = align_up(moment.own_bytes)
            size_bytes += align_up(self._workspace_bytes(candidate)) if moment.reads else 0
        return size_bytes + (self._aligned_bytes[result] if is_narrow and result in self._output_bytes else 0)

    def _workspace_bytes(self, candidate: Candidate) -> int:
        """Bytes of the workspace of the kernel that computes a region, in whole or in part."""
        if not self.kernel_device or candidate.alternative != LayerAlternative():
            return 0
        region, kernels = self.graph.region(candidate.covers[-1]), list[Kernel]()
        if self.kernel_device == "cpu":
            is_plain = candidate.rewrite == OPERATOR_KERNELS
            return region.kernel.workspace_elements * ELEMENT_BYTES[self.dtype] if is_plain else 0
        if candidate.rewrite == OPERATOR_KERNELS:
            kernels = gpu_kernels(region, self.dtype)
        elif isinstance(candidate.rewrite, SplitRewrite):
            kernels = [gpu_kernel(region, self.dtype, candidate.rewrite.split(region.layer))]
        sizes = (split_workspace_bytes(kernel, self.dtype, self.limits) for kernel in kernels)
        return max(sizes, default=0)

    def _is_counted(self, region: str) -> bool:
        return self.only is None or region in self.only

    @functools.cached_property
    def _order(self) -> dict[str, int]:
        return {region.name: position for position, region in enumerate(self.graph.regions)}

    @functools.cached_property
    def _lifetime_by_result(self) -> dict[str, Lifetime]:
        return {life.name: life for life in self.liveness.lifetimes}

    @functools.cached_property
    def _ends(self) -> dict[str, int]:
        return {life.name: life.end for life in self.liveness.lifetimes}

    @functools.cached_property
    def _storage_bytes(self) -> dict[str, int]:
        return self.graph.tensor_bytes(self.dtype)

    @functools.cached_property
    def _aligned_bytes(self) -> dict[str, int]:
        return {
            name: align_up(size) if self._is_counted(name) else 0
            for name, size in self._storage_bytes.items()
        }

    def size_bytes(self, tensor: str) -> int:
        """Bytes of a tensor in the pool, aligned."""
        return self._aligned_bytes[tensor]

    def live_bytes(self, candidate: Candidate) -> LiveBytes:
        """Bytes of the tensors that are live while `candidate` does its regions."""
        begin, count = self._order[candidate.covers[0]], len(candidate.covers)
        overrides = tuple(sorted(self.size_overrides_bytes(candidate).items()))
        key = (begin, count, candidate.fuses_regions, overrides)
        if key not in self._live_bytes:
            inside = candidate.covers[:-1] if candidate.fuses_regions else ()
            live = self.liveness  # which knows what is live in each step, unless sizes differ
            if overrides:
                live = replace(live, lifetimes=self.lifetimes(candidate))
            self._live_bytes[key] = live.live_range_bytes(begin, begin + count, inside)
        return self._live_bytes[key]

    def lifetimes(self, candidate: Candidate) -> tuple[Lifetime, ...]:
        """Lifetimes of all results, in their sizes if `candidate` does its regions."""
        sizes, lifetimes = self.size_overrides_bytes(candidate), self.liveness.lifetimes
        if not sizes:
            return lifetimes
        return tuple(replace(life, size_bytes=sizes.get(life.name, life.size_bytes)) for life in lifetimes)

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
        if not is_plain or any(step.writes and not step.reads for step in steps):
            return ()
        region = self.graph.region(candidate.covers[-1])
        lives, end = self._lifetime_by_result, self._order[region.name] + 1
        result = lives.get(region.name)
        if result is None or result.alias:
            return ()
        return tuple(
            name
            for name in region.overwritable_inputs
            if (life := lives.get(name)) and life.end == end and life.size_bytes == result.size_bytes
            if not life.alias and not life.pinned
        )

    def _overwritten_bytes(self, candidate: Candidate, state: PlanState, copied: Collection[str]) -> int:
        """Bytes of the input that the result of `candidate` lies over in `state`; 0 if there is none."""
        deferred = [self.graph.region(name) for name in state.deferred_epilogues]
        needed = {name for region in deferred for name in (region.name, *region.inputs[region.operands :])}
        inputs = set(self.overwritable_inputs(candidate)).difference(needed, copied)
        return self._lifetime_by_result[candidate.covers[-1]].size_bytes if inputs else 0

    def peak_bytes(self, candidate: Candidate, state: PlanState) -> int:
        """Peak bytes that are live while `candidate` runs in `state`, first while it copies its inputs."""
        live, position = self.live_bytes(candidate), self._order[candidate.covers[0]]
        copies, peak_bytes = 0, 0
        transforms = (
            plan_state.layout_transforms(self.graph, self.table, candidate, state) if self.table else {}
        )
        copied = [tensor for tensor, task in transforms.items() if task.launched]  # others make no copy
        for tensor in copied:
            peak_bytes = max(peak_bytes, live.moment_bytes(COPYING) + copies + self._aligned_bytes[tensor])
            copies += self.copy_bytes(tensor, position)
        moments = (
            replace(moment, own_bytes=self.buffer_bytes(candidate, moment))
            for moment in candidate.footprint.run_moments
        )
        overwritten_bytes = self._overwritten_bytes(candidate, state, copied)
        live = replace(live, written_bytes=live.written_bytes - overwritten_bytes)
        peak_bytes = max(peak_bytes, max(map(live.moment_bytes, moments)) + copies)
        return peak_bytes + self._epilogue_bytes(candidate, position, state.deferred_epilogues)

    def copy_bytes(self, tensor: str, position: int) -> int:
        """Bytes that the copy of a tensor adds: 0 if the tensor is dead after it, so that it reuses these."""
        return self._aligned_bytes[tensor] if self._ends.get(tensor, 0) > position + 1 else 0

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
        held = [name for name in operands if name in self._order and self._ends.get(name, 0) <= position]
        if candidate.fuses_epilogue:
            fused_regions = set(plan_state.results_read(self.graph, candidate)).intersection(
                deferred_epilogues
            )
            held += filter(self.graph.is_shared, fused_regions)
        return sum(self._aligned_bytes[name] for name in held)

    def pool_bytes(self, candidates: Sequence[Candidate]) -> int:
        """Bytes of the pool of a plan of `candidates`."""
        return sum(self.bytes_by_memory(candidates).values())

    def peak_live_bytes(self, candidates: Sequence[Candidate]) -> int:
        """Peak bytes that are live in a plan of `candidates`, over all sets of channels."""
        return max(self._peaks(candidates))

    def bytes_by_memory(self, candidates: Sequence[Candidate]) -> dict[str, int]:
        """Peak bytes by memory region: a set of channels, if tensors lie in several sets."""
        sets = channel_sets(candidates)
        if not sets:
            return {MEMORY: self.peak_live_bytes(candidates)}
        inputs = {name for region in self.graph.regions for name in region.inputs if name not in sets}
        sets |= dict.fromkeys(inputs, ChannelSet.GPU)  # copies of inputs lie in the GPU channels
        members = {
            place: frozenset(n for n, tensor_set in sets.items() if tensor_set == place)
            for place in ChannelSet
        }
        parts = {
            place: replace(self, only=names, _live_bytes={}) for place, names in members.items() if names
        }
        peaks = {place: part.peak_live_bytes(candidates) for place, part in parts.items()}
        return {place: size for place, size in peaks.items() if size}

    def _peaks(self, candidates: Sequence[Candidate]) -> Iterator[int]:
        state, halves = PlanState(), set[str]()
        for candidate in candidates:
            halves &= state.deferred_epilogues
            yield self.peak_bytes(candidate, state) + sum(self._aligned_bytes[name] for name in halves)
            state = plan_state.next_state(self.graph, candidate, state)
            halves |= {candidate.covers[-1]} if candidate.defers_partial_sum else set()
