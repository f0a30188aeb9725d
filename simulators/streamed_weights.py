"""The time that copies of streamed weights take, over the link from the host's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pimflow.core.candidate import Timeline
from pimflow.hardware import System


@dataclass(frozen=True, kw_only=True)
class StreamedInference:
    """An inference that copies its weights.

    Attributes
    ----------
    copied_bytes : int
        Weights of the GPU; those of PIM stay in its banks.
    copying_ns : float
        Time for which the link is busy.
    latency_ns : float
        End of the inference, with the time that kernels wait for copies.
    """

    copied_bytes: int
    copying_ns: float
    latency_ns: float

    @classmethod
    def from_timeline(
        cls, timeline: Timeline, weight_bytes: Mapping[str, int], system: System
    ) -> StreamedInference:
        """Schedule the copies beside the events of a plan, which wait for them.

        A candidate's weights are one copy: the launch of a transfer, and their bytes over the link. The link
        does one copy at a time, in order. A copy begins once all candidates have ended that come more than
        `System.copy_ahead` before its own: then the place in the pool is free. If it ends too late, its
        candidate and all later ones are delayed by as much, so that the schedule stays possible.

        Parameters
        ----------
        weight_bytes : mapping of str to int
            By the first region of a candidate, the bytes that the GPU reads of its weights.
        """
        begins_ns: dict[str, float] = {}
        ends_ns: dict[str, float] = {}
        for event in timeline.events:
            name = event.regions[0]
            begins_ns[name] = min(begins_ns.get(name, event.start_ps / 1e3), event.start_ps / 1e3)
            ends_ns[name] = max(ends_ns.get(name, 0.0), event.end_ps / 1e3)
        delay_ns = link_free_ns = copying_ns = 0.0
        reached_ns = [0.0]  # by number of candidates, when all of them have ended
        for number, (name, begin_ns) in enumerate(begins_ns.items()):
            if size_bytes := weight_bytes.get(name, 0):
                copy_ns = system.gpu.launch_ns + size_bytes / system.host_link_bytes_per_ns
                place_free_ns = reached_ns[max(number - system.copy_ahead, 0)]
                link_free_ns = max(link_free_ns, place_free_ns) + copy_ns
                copying_ns += copy_ns
                delay_ns = max(delay_ns, link_free_ns - begin_ns)
            reached_ns.append(max(reached_ns[-1], ends_ns[name] + delay_ns))
        return cls(
            copied_bytes=sum(weight_bytes.get(name, 0) for name in begins_ns),
            copying_ns=copying_ns,
            latency_ns=reached_ns[-1],
        )
