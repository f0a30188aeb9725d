"""What streamed weights cost in time, for the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pimflow.hardware import System
from pimflow.placement import SearchResult
from pimflow.placement.candidates.tasks import weight_bytes
from pimflow.placement.solvers.weight_copies import StreamedInference


@dataclass(frozen=True, kw_only=True)
class CopyDistance:
    """The best plan whose weights are copied so many kernels before they are used.

    Attributes
    ----------
    latency_ns : float or None
        With copies; None if no plan is within the bounds.
    pool_bytes : int or None
        Of the pool that is built, weights included while they lie there.
    """

    copy_ahead: int
    latency_ns: float | None = None
    pool_bytes: int | None = None
    chosen: bool = False


def distances_text(rows: Sequence[CopyDistance]) -> str:
    """Latency and pool for each distance, in a line."""
    parts = []
    for row in rows:
        figures = "none"
        if row.latency_ns is not None and row.pool_bytes is not None:
            figures = f"{row.latency_ns / 1e6:.4f} ms in {row.pool_bytes / 1e6:.3f} MB"
        parts.append(f"{row.copy_ahead}: {figures}{' (chosen)' * row.chosen}")
    return f"copies    kernels ahead, {', '.join(parts)}"


@dataclass(frozen=True, kw_only=True)
class StreamingReport:
    """Latencies with weights that are copied from the host's memory in every inference.

    The search does not know of copies: the plan is the one without them. Energy has none of theirs.

    Attributes
    ----------
    copy_ahead : int
        How many kernels before its first use a weight is copied.
    gpu_only, plan : StreamedInference
        On the GPU alone, and by the plan, whose weights on PIM stay in the banks.
    """

    copy_ahead: int
    host_link_bytes_per_ns: float
    gpu_only: StreamedInference
    plan: StreamedInference

    @classmethod
    def from_search(cls, search_result: SearchResult, system: System | None = None) -> StreamingReport | None:
        """From a search result, on its system or one with other copies; None if weights are resident."""
        system = system or search_result.system
        if not system.streams_weights:
            return None
        timeline, graph = search_result.baseline.timeline, search_result.original or search_result.graph
        covers = {event.regions[0]: event.regions for event in timeline.events}
        gpu_only_bytes = {
            first: sum(weight_bytes(graph.region(name), system.dtype) for name in names)
            for first, names in covers.items()
        }
        plan_bytes = {c.covers[0]: c.footprint.filter_bytes for c in search_result.candidates}
        return cls(
            copy_ahead=system.copy_ahead,
            host_link_bytes_per_ns=system.host_link_bytes_per_ns,
            gpu_only=StreamedInference.from_timeline(timeline, gpu_only_bytes, system),
            plan=StreamedInference.from_timeline(search_result.evaluation.timeline, plan_bytes, system),
        )

    def text(self) -> str:
        """Bytes and latencies in a line."""
        speedup = self.gpu_only.latency_ns / self.plan.latency_ns
        return (
            f"streamed, {self.gpu_only.copied_bytes / 1e6:.3f} → {self.plan.copied_bytes / 1e6:.3f} MB an "
            f"inference at {self.host_link_bytes_per_ns:g} GB/s, {self.copy_ahead} kernels ahead: latency "
            f"{self.gpu_only.latency_ns / 1e6:.4f} → {self.plan.latency_ns / 1e6:.4f} ms ({speedup:.3f}x) "
            "with copies"
        )
