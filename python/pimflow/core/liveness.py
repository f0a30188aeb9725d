"""Liveness: in which steps each buffer holds a value that is still needed."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

# Offsets of buffers are multiples of this: vectorised kernels fault at unaligned tensors.
ALIGNMENT_BYTES = 64
# The default memory region: the only one of a program whose buffers may lie anywhere.
MEMORY = "gpu"


def align_up(size_bytes: int) -> int:
    """`size_bytes` rounded up to a multiple of `ALIGNMENT_BYTES`."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, kw_only=True)
class BufferUses:
    """Buffers that the steps of a network read and write.

    Attributes
    ----------
    steps : list of (tuple of str, tuple of str)
        Buffers that each step reads, and those that it writes.
    size_bytes : dict of str to int
        Size of every buffer; for buffers that share their bytes, the size of all these bytes.
    inputs, outputs : tuple of str
        Buffers that hold values before the first step, and buffers that are needed after the last.
    aliases : dict of str to str
        Alias class of the buffers that share their bytes.
    """

    steps: list[tuple[tuple[str, ...], tuple[str, ...]]]
    size_bytes: dict[str, int]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    aliases: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Lifetime:
    """Half-open interval of steps in which a buffer is live.

    Attributes
    ----------
    begin, end : int
        First step that writes it, and one past the last step that uses it.
    alias : str
        Alias class: buffers of one class share their bytes. If empty, it shares them with no other.
    within_bytes : int
        Offset inside its alias class, for a part of a tensor.
    pinned : bool
        True for graph inputs and outputs, which are live before or after all steps.
    alignment_bytes : int
        Its offset is a multiple of this.
    offset_bytes : int, optional
        Fixed offset in its memory region; anywhere if None.
    """

    name: str
    begin: int
    end: int
    size_bytes: int
    memory: str = MEMORY
    alias: str = ""
    within_bytes: int = 0
    pinned: bool = False
    alignment_bytes: int = 1
    offset_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Memory that a candidate needs at one moment of its run, besides buffers that are live all the time.

    Attributes
    ----------
    own_bytes : int
        Its temporary buffers: workspaces, padded inputs, parts that are copied to their places.
    reads, writes : bool
        Whether its inputs are still needed, and whether its result is already being written.
    """

    own_bytes: int = 0
    reads: bool = True
    writes: bool = True


@dataclass(frozen=True, kw_only=True)
class LiveBytes:
    """Bytes that are live during a range of steps of one candidate, each alias class once.

    Attributes
    ----------
    across_bytes : int
        Bytes that are live before the first of the steps and after the last.
    read_bytes, written_bytes : int
        Bytes of buffers that the steps use last, and of buffers that they write.
    """

    across_bytes: int
    read_bytes: int
    written_bytes: int

    @property
    def total_bytes(self) -> int:
        """All live bytes."""
        return self.across_bytes + self.read_bytes + self.written_bytes

    def moment_bytes(self, reads: bool = True, writes: bool = True) -> int:
        """Live bytes while inputs are still needed, or the result is already being written."""
        return self.across_bytes + reads * self.read_bytes + writes * self.written_bytes


@dataclass(frozen=True, kw_only=True)
class Liveness:
    """Lifetimes of a program's buffers over its `steps` steps."""

    steps: int
    lifetimes: tuple[Lifetime, ...]

    @classmethod
    def from_steps(
        cls,
        steps: Sequence[tuple[Iterable[str], Iterable[str]]],
        size_bytes: dict[str, int],
        *,
        inputs: Iterable[str] = (),
        outputs: Iterable[str] = (),
    ) -> Liveness:
        """Lifetimes that follow from the (reads, writes) of each step, in execution order.

        Raises
        ------
        ValueError
            If a step reads what no earlier step wrote and is no input, or an output is never written.
        """
        inputs, outputs = tuple(inputs), tuple(outputs)
        begin = dict.fromkeys(inputs, 0)
        end: dict[str, int] = dict.fromkeys(inputs, 1)
        pinned = set(inputs) | set(outputs)
        for step, (reads, writes) in enumerate(steps):
            for name in reads:
                if name not in begin:
                    raise ValueError(f"step {step} reads '{name}' before it is written")
                end[name] = max(end[name], step + 1)
            for name in writes:
                begin.setdefault(name, step)
                end[name] = max(end.get(name, 0), step + 1)
        for name in outputs:
            if name not in begin:
                raise ValueError(f"output '{name}' is never written")
            end[name] = len(steps)
        lifetimes = [
            Lifetime(
                name=name,
                begin=begin[name],
                end=end[name],
                size_bytes=size_bytes[name],
                pinned=name in pinned,
            )
            for name in begin
        ]
        return cls(steps=len(steps), lifetimes=tuple(lifetimes))

    def with_aliases(self, aliases: Mapping[str, str]) -> Liveness:
        """The same lifetimes in alias classes; a buffer that `aliases` does not name is in one of its own."""
        lifetimes = tuple(replace(life, alias=aliases.get(life.name, "")) for life in self.lifetimes)
        return replace(self, lifetimes=lifetimes)

    @functools.cached_property
    def _live_by_step(self) -> list[list[Lifetime]]:
        """By step, the buffers that are live in it."""
        live_by_step: list[list[Lifetime]] = [[] for _ in range(self.steps)]
        for life in self.lifetimes:
            for step in range(life.begin, min(life.end, self.steps)):
                live_by_step[step].append(life)
        return live_by_step

    def live_bytes(self, step: int) -> int:
        """Live bytes during `step`, each alias class once."""
        return self.live_range_bytes(step, step + 1).total_bytes

    def live_range_bytes(self, begin: int, end: int, internal: Collection[str] = ()) -> LiveBytes:
        """Live bytes while one candidate does the steps ``[begin, end)``.

        Parameters
        ----------
        internal : collection of str
            Buffers between steps of one kernel. They take no memory, unless a step outside the kernel reads
            them too, or they share bytes with a buffer that it reads.
        """
        sizes: dict[str, int] = {}
        stored: set[str] = set()
        live_before: set[str] = set()
        live_after: set[str] = set()
        for step in range(begin, min(end, self.steps)):
            for life in self._live_by_step[step]:
                if begin < step != life.begin:
                    continue  # counted in the step before
                key = life.alias or life.name
                sizes[key] = max(sizes.get(key, 0), life.within_bytes + life.size_bytes)
                is_internal = (
                    life.name in internal and begin <= life.begin and life.end <= end and not life.pinned
                )
                stored |= set() if is_internal else {key}
                live_before |= {key} if life.begin < begin else set()
                live_after |= {key} if life.end > end or life.pinned else set()
        read = sum(sizes[key] for key in stored & live_before - live_after)
        written = sum(sizes[key] for key in stored - live_before)
        across = sum(sizes[key] for key in stored & live_before & live_after)
        return LiveBytes(across_bytes=across, read_bytes=read, written_bytes=written)

    @property
    def peak_bytes(self) -> int:
        """Maximum `live_bytes` over all steps: a lower bound for any allocation."""
        return max((self.live_bytes(step) for step in range(self.steps)), default=0)


def view_obstacle(shape: Sequence[int], axis: int, begin: int, element_bytes: int) -> str:
    """Why the part of a row-major tensor from index `begin` of `axis` on cannot be a view; empty if it can.

    A view must be contiguous and begin at a multiple of `ALIGNMENT_BYTES`.
    """
    if any(extent != 1 for extent in shape[:axis]):
        return f"parts along axis {axis} of {tuple(shape)} are not contiguous"
    offset_bytes = begin * math.prod(shape[axis + 1 :]) * element_bytes
    if offset_bytes % ALIGNMENT_BYTES:
        return f"a part begins {offset_bytes} B into its tensor, no multiple of {ALIGNMENT_BYTES} B"
    return ""
