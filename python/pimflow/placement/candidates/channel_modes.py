"""Variants of candidates on a time-shared system: where tensors lie, and which memory channels kernels use.

On such a system kernels may use the channels that have PIM as plain memory. A kernel runs either

- at the GPU channels, those without PIM. It may run while PIM works; all its tensors lie there.
- or at all channels, never while PIM works. Then each input and the result may lie in the GPU channels, over
  all channels, or in those that have PIM. Its weights lie where that suits these best.

Results of PIM, and tensors of kernels that run while PIM works, lie in the GPU channels. So does the input of
a PIM program, or it lies over all channels and passes through the L2 (`l2_reuse`).

The time of a kernel at all channels follows from how evenly its tensors load these
(`simulators.gpu.traffic`). If it reads a tensor from another place than it was made for, the largest possible
delay is added.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pimflow.core.candidate import Candidate, EdgeCost, Task, Transforms, with_fields
from pimflow.core.kernel import ELEMENT_BYTES
from pimflow.core.rewrite import (
    AttentionRewrite,
    FusedGroupRewrite,
    GpuRewrite,
    PimRewrite,
    SplitRewrite,
    SubstitutionRewrite,
)
from pimflow.core.tensor_placement import (
    GPU_CHANNELS_ALONE,
    IN_ALL_CHANNELS,
    IN_GPU_CHANNELS,
    ChannelMode,
    ChannelSet,
    ChannelUse,
    TensorPlacement,
)
from pimflow.fusion import GroupTiling
from pimflow.placement.candidates import rewrites
from pimflow.placement.candidates.candidates import CandidateGenerator
from pimflow.placement.candidates.channel_layouts import (
    WHOLE_PLACEMENTS,
    cut_tensors,
    from_row,
    row_operand,
    rows_read,
    with_placements,
    with_reader,
)
from pimflow.placement.candidates.l2_reuse import L2Reuse
from pimflow.simulators.gpu.region_kernels import gpu_kernels
from pimflow.simulators.gpu.traffic import TrafficShares

IMPOSSIBLE = EdgeCost(possible=False)


def expand_candidates(
    generator: CandidateGenerator, candidates: Mapping[str, Iterable[Candidate]]
) -> tuple[dict[str, tuple[Candidate, ...]], Transforms]:
    """All variants of the `candidates` of a mixed plan by region, and costs of reading in other layouts.

    Candidates are unchanged on a system with partitioned channels. So they are if all are GPU candidates: no
    plan of them is mixed, and one without PIM has all channels anyway.
    """
    by_region = {name: tuple(region_candidates) for name, region_candidates in candidates.items()}
    is_gpu_only = not any(c.uses_pim for c in itertools.chain(*by_region.values()))
    if not generator.system.is_time_shared or (is_gpu_only and generator.system.gpu_channels):
        return by_region, {}
    channel_variants = ChannelVariants(
        generator, cut_tensors(generator, itertools.chain(*by_region.values()))
    )
    variants = {
        name: tuple(itertools.chain(*map(channel_variants.variants, region_candidates)))
        for name, region_candidates in by_region.items()
    }
    return variants, channel_variants.transforms(itertools.chain(*variants.values()))


def channel_variants(generator: CandidateGenerator, candidates: Iterable[Candidate]) -> list[Candidate]:
    """All variants of some candidates, without splits of tensors by rows."""
    return [
        variant for candidate in candidates for variant in ChannelVariants(generator, {}).variants(candidate)
    ]


def with_channels(
    generator: CandidateGenerator, candidate: Candidate, channels: ChannelUse
) -> Candidate | None:
    """The variant of a candidate at `channels`; None if there is none."""
    if not generator.system.is_time_shared:
        return candidate if channels == GPU_CHANNELS_ALONE else None
    cut_rows = cut_tensors(generator, [candidate])
    if channels.writes and channels.writes.first_row:
        cut_rows[candidate.covers[-1]] = {channels.writes.first_row}
    variants = ChannelVariants(generator, cut_rows).variants(candidate)
    return next((variant for variant in variants if variant.channels == channels), None)


def transforms(generator: CandidateGenerator, candidates: Iterable[Candidate]) -> Transforms:
    """The costs of reading tensors in other layouts than those for which `candidates` were made."""
    candidate_list = list(candidates)
    return ChannelVariants(generator, cut_tensors(generator, candidate_list)).transforms(candidate_list)


def with_gpu_channels(generator: CandidateGenerator, candidate: Candidate) -> Candidate:
    """The variant of a candidate whose tensors lie in the GPU channels, if the system has any."""
    if not candidate.uses_pim or candidate.channels != GPU_CHANNELS_ALONE:
        candidate = rewrites.make(generator, candidate.covers, candidate.rewrite)
    return with_channels(generator, candidate, GPU_CHANNELS_ALONE) or candidate


@dataclass(frozen=True)
class ChannelVariants(L2Reuse):
    """Makes the variants of the candidates of one network on a time-shared system."""

    # By kernel and tensor, results of `_read_slowdown_ns`.
    _read_slowdowns_ns: dict[tuple[object, ...], float] = field(default_factory=dict)

    def variants(self, candidate: Candidate) -> list[Candidate]:
        """All variants of a candidate of a mixed plan."""
        if not self.system.is_time_shared or not self.system.pim_channels:
            return [candidate]
        if candidate.uses_pim and not self.system.gpu_channels:
            if isinstance(candidate.rewrite, AttentionRewrite):
                return [self.with_modes(candidate, ChannelMode.PLAIN_MEMORY)]
            return self.pim_only_variants(candidate)
        if candidate.uses_pim:
            pim_candidate = self.with_modes(candidate, ChannelMode.PIM)
            if isinstance(candidate.rewrite, AttentionRewrite):
                return [pim_candidate]
            pim_variants = [pim_candidate, *self.operand_variants(pim_candidate)]
            return [*pim_variants, *itertools.chain(*map(self.result_variants, pim_variants))]
        if not candidate.tasks:  # a view lies where its operands do
            possible = self.result_placements(candidate.covers[-1]) if self.spreads_tensors else ()
            places = [place for place in WHOLE_PLACEMENTS if place in possible and place != IN_GPU_CHANNELS]
            uses = [ChannelUse(reads=place, writes=place) for place in places]
            return [
                candidate,
                *(with_placements(candidate, *variant) for variant in zip(uses, places, places)),
            ]
        if not isinstance(candidate.rewrite, GpuRewrite):
            return self._gpu_variants(candidate)
        generator, region = self.generator, self.generator.graph.region(candidate.covers[0])
        placements = self.result_placements(candidate.covers[-1])
        # The result has the candidate too: as long as it exists, no other has its number.
        key = (generator.gpu_identity, generator.graph.digest, placements, id(candidate))
        result = generator.costs.region_result(
            region, key, lambda: (candidate, self._gpu_variants(candidate))
        )
        return result[1]

    def _gpu_variants(self, candidate: Candidate) -> list[Candidate]:
        """All variants of a candidate on the GPU that takes time."""
        wide_candidate = self._wide_candidate(candidate)
        if not self.system.gpu_channels:
            return [wide_candidate, *self.writeback_variants(wide_candidate)]
        if not self.spreads_tensors:
            use = ChannelUse(reads=IN_ALL_CHANNELS, writes=IN_ALL_CHANNELS)
            return [candidate, with_placements(wide_candidate, use, IN_GPU_CHANNELS, IN_GPU_CHANNELS)]
        variants = self._wide_variants(candidate, wide_candidate)
        spread_readers = [v for v in variants if v.channels.reads == IN_ALL_CHANNELS]
        return [candidate, *variants, *itertools.chain(*map(self.writeback_variants, spread_readers))]

    def _wide_candidate(self, candidate: Candidate) -> Candidate:
        """A GPU candidate at all channels, with all its tensors over all channels."""
        wide = self._with_channel_count(candidate, self.system.gpu.memory_channels)
        tasks = tuple(with_fields(task, also=("pim",)) for task in wide.tasks)
        return self.with_modes(wide, ChannelMode.PLAIN_MEMORY, tasks=tasks)

    def _with_channel_count(self, candidate: Candidate, gpu_channels: int) -> Candidate:
        return rewrites.make(self.generator, candidate.covers, candidate.rewrite, gpu_channels)

    def _wide_variants(self, candidate: Candidate, wide_candidate: Candidate) -> list[Candidate]:
        """The variants of `candidate` at all channels that are no slower than at the GPU channels."""
        traffic, slowdown_ns = self._traffic(candidate), _slowdown_ns(candidate, wide_candidate)
        *first, last = wide_candidate.tasks
        name, variants = candidate.covers[-1], []
        results = [(place, self.tensor_shares(name, place)) for place in self.result_placements(name)]
        for operands in WHOLE_PLACEMENTS:
            read_shares, reader = self.tensor_shares("", operands), with_reader(candidate, operands)
            for result, result_shares in results:
                if traffic is None:
                    share = 0.0 if operands == result == IN_ALL_CHANNELS else 1.0
                else:
                    balance = traffic.balance(self.set_shares, read_shares, result_shares)
                    share = (balance - 1) / self._max_excess_balance
                if share <= 1:
                    task = with_fields(last, execution_ns=last.execution_ns + share * slowdown_ns)
                    variant = with_fields(wide_candidate, tasks=(*first, task))
                    use = ChannelUse(reads=operands, writes=result)
                    variants.append(with_placements(variant, use, reader, result))
        return variants

    @property
    def _max_excess_balance(self) -> float:
        """By how much the balance of a kernel at the GPU channels exceeds 1."""
        return 1 / self.set_shares[ChannelSet.GPU] - 1

    def _traffic(self, candidate: Candidate) -> TrafficShares | None:
        """Traffic of a candidate's kernel; None if it has several kernels, or multiplies two activations."""
        region = self.generator.graph.region(candidate.covers[0])
        is_substituted = isinstance(candidate.rewrite, SubstitutionRewrite)
        if candidate.primitive or region.kernel.product or is_substituted:
            return None
        kernels = gpu_kernels(region, self.system.dtype)
        if isinstance(candidate.rewrite, FusedGroupRewrite):
            tiling = GroupTiling.parse(candidate.rewrite.tiling)
            kernels = [self.generator.tilings.kernel(candidate.covers, tiling)]
        if len(kernels) != 1:
            return None
        (kernel,) = kernels
        cost = self.generator.costs.kernel_cost(kernel, self.system.gpu.memory_channels)
        return TrafficShares.from_cost(kernel, cost, self.system.gpu, self.system.dtype)

    # Reading tensors that lie in another layout.

    def transforms(self, variants: Iterable[Candidate]) -> Transforms:
        """By tensor, where it lies and what a candidate reads: whether it can, and at what cost."""
        graph = self.generator.graph
        edges: Transforms = {}
        if not self.spreads_tensors:
            return edges
        with_edges: set[tuple[str, TensorPlacement]] = set()
        for variant in variants:
            for name in dict.fromkeys(n for entry in variant.covers for n in graph.region(entry).inputs):
                if name in variant.covers or (name, variant.input) in with_edges:
                    continue
                placements = self.result_placements(name) if name in graph.readers else (IN_GPU_CHANNELS,)
                if new_edges := self._read_transforms(variant, name, placements):
                    edges |= new_edges
                    with_edges.add((name, variant.input))
        return edges

    def _read_transforms(
        self, variant: Candidate, name: str, placements: Sequence[TensorPlacement]
    ) -> Transforms:
        """The costs for `variant` of reading a tensor, by the one of `placements` where the tensor lies."""
        required = variant.input  # of a kernel beside PIM, or a view
        if variant.channels.stages_operand and isinstance(variant.rewrite, PimRewrite | SplitRewrite):
            region = self.generator.graph.region(variant.covers[0])
            is_staged = name == row_operand(self.generator, region)
            required = from_row(rows_read(region, variant.rewrite)) if is_staged else IN_GPU_CHANNELS
        if variant.channels.stages_operand or not required.reader or not variant.tasks:
            return {(name, place, variant.input): IMPOSSIBLE for place in placements if place != required}
        edges: Transforms = {}
        kernel = (variant.covers, variant.rewrite, name)  # the same for all variants
        if kernel not in self._read_slowdowns_ns:
            self._read_slowdowns_ns[kernel] = self._read_slowdown_ns(variant, name)
        slowdown_ns, native = self._read_slowdowns_ns[kernel], replace(required, reader="")
        native_shares = self.tensor_shares("", native)
        for placement in placements:
            actual_shares = self.tensor_shares(name, placement)
            added_share = max(
                (actual_shares[channels] - native_shares[channels]) / share
                for channels, share in self.set_shares.items()
            )
            if placement != native and added_share * slowdown_ns > 0:
                task = Task(
                    label=f"{name} (read from elsewhere)",
                    resource="gpu",
                    execution_ns=slowdown_ns * added_share / self._max_excess_balance,
                    launched=False,
                )
                edges[name, placement, variant.input] = EdgeCost(task=task)
        return edges

    def _read_slowdown_ns(self, variant: Candidate, name: str) -> float:
        """How much longer a kernel takes to read a tensor at the GPU channels than at all channels."""
        traffic = self._traffic(variant)
        narrow_candidate = self._with_channel_count(variant, self.system.gpu_channels)
        slowdown_ns = _slowdown_ns(narrow_candidate, self._wide_candidate(narrow_candidate))
        read_bytes = sum(
            elements * ELEMENT_BYTES[self.system.dtype]
            for region in map(self.generator.graph.region, variant.covers)
            for input_name, elements in zip(region.inputs, region.input_elements)
            if input_name == name
        )
        return (traffic.share(read_bytes) if traffic else 1.0) * slowdown_ns


def _slowdown_ns(candidate: Candidate, wide_candidate: Candidate) -> float:
    """How much longer a candidate executes at the GPU channels than at all channels."""
    narrow_ns, wide_ns = (
        sum(task.execution_ns for task in variant.tasks) for variant in (candidate, wide_candidate)
    )
    return max(narrow_ns - wide_ns, 0.0)
