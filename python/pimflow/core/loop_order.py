"""The loop order of a PIM program; `pim_backend.programs.schedule` says what its terms do."""

from __future__ import annotations

import re
from dataclasses import dataclass

STATIONARY = ("input", "weight", "output")


@dataclass(frozen=True, kw_only=True)
class LoopOrder:
    """In which order the loops of a PIM program go over pixels, outputs and parts of the reduction.

    Files and reports have it as text: ``str`` prints it, `parse` reads it.

    Attributes
    ----------
    stationary : str
        One of `STATIONARY`.
    pixels : int
        Pixels that a GWRITE puts side by side into one buffer. With fewer, the bus is free for READRES
        sooner; with more, a row is opened for more pixels.
    tile_groups : int
        For ``input``, the number of groups into which the tiles are divided.
    staggered : bool
        For ``input``, whether each buffer changes its pixels at a different tile: rows are visited
        cyclically, and every GWRITE is hidden behind a change of rows.
    overlap : bool
        Whether buffers are written while others compute. If not, all are filled first: in the published
        timing, no COMP can follow a GWRITE soon, whatever its buffer.
    gangs : int
        Gangs over which the output channels of a tile lie; 0 for all. Smaller tiles occupy more
        channels, and leave the same rows of the other gangs unused.
    pixel_groups : int
        For channels in lockstep, the number of groups into which they are divided: each group has its own
        pixels, and its channels share the tiles (`lockstep_phases`). 0 for channels that work independently.
    accumulators : int
        Tiles that are multiplied with a vector before their results are read, one after the other.
    together : int
        Groups of a grouped convolution in one matrix.
    resumed : bool
        For ``output``, whether each chunk of a pixel is multiplied with all tiles before the next is written:
        incomplete sums are read, and written back to the latches later.
    """

    stationary: str
    buffers: int
    pixels: int = 1
    tile_groups: int = 1
    staggered: bool = False
    overlap: bool = True
    gangs: int = 0
    pixel_groups: int = 0
    accumulators: int = 1
    together: int = 1
    resumed: bool = False

    @property
    def pixel_major_groups(self) -> int:
        """Groups of tiles within which units go to channels pixel by pixel; 0 where they go tile by tile."""
        return self.tile_groups if self.stationary == "input" else 0

    def __str__(self) -> str:
        def plural(count: int, noun: str) -> str:
            return f"{count} {noun}{'s'[: count > 1]}"

        pixels = f" of {plural(self.pixels, 'pixel')}" if self.stationary != "output" else ""
        groups = f", {plural(self.tile_groups, 'tile group')}" if self.tile_groups > 1 else ""
        gangs = f", {plural(self.gangs, 'gang')} a tile" if self.gangs else ""
        staggered = " staggered" if self.staggered else ""
        buffers = f"{plural(self.buffers, 'buffer')}{staggered}"
        first = "" if self.overlap else ", filled first"
        accumulators = f", {plural(self.accumulators, 'accumulator')}" if self.accumulators > 1 else ""
        accumulators += ", sums resumed" * self.resumed
        lockstep = f", {plural(self.pixel_groups, 'pixel group')} in lockstep" if self.pixel_groups else ""
        together = f", {self.together} groups together" if self.together > 1 else ""
        order = (
            f"{self.stationary}-stationary, {buffers}{pixels}{groups}{first}{gangs}{accumulators}{lockstep}"
        )
        return order + together

    @classmethod
    def parse(cls, text: str) -> LoopOrder:
        """The inverse of ``str``; raises `ValueError` if `text` is no loop order."""
        pattern = (
            r"(\w+)-stationary, (\d+) buffers?( staggered)?(?: of (\d+) pixels?)?"
            r"(?:, (\d+) tile groups?)?(, filled first)?(?:, (\d+) gangs? a tile)?"
            r"(?:, (\d+) accumulators?)?(, sums resumed)?(?:, (\d+) pixel groups? in lockstep)?"
            r"(?:, (\d+) groups together)?"
        )
        match = re.fullmatch(pattern, text)
        if not match or match[1] not in STATIONARY:
            raise ValueError(f"{text!r} is no schedule")
        order = cls(
            stationary=match[1],
            buffers=int(match[2]),
            staggered=match[3] is not None,
            pixels=int(match[4] or 1),
            tile_groups=int(match[5] or 1),
            overlap=match[6] is None,
            gangs=int(match[7] or 0),
            accumulators=int(match[8] or 1),
            resumed=match[9] is not None,
            pixel_groups=int(match[10] or 0),
            together=int(match[11] or 1),
        )
        if str(order) != text:
            raise ValueError(f"{text!r} is no schedule")
        return order
