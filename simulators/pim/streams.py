"""The command streams of a program's channels, reduced to what affects its time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pimflow.core.commands import MAX_DEPTH, GAct, Write
from pimflow.core.program import PimProgram
from pimflow.errors import TraceError
from pimflow.hardware import PimSpec
from pimflow.host import native

_clear = native.get("pimflow.simulators.timing_signature")


def timing_streams(program: PimProgram, spec: PimSpec) -> list[np.ndarray]:
    """Encoded words of every channel, without what has no effect on time; equal streams take the same time.

    Channels that share their commands share the array.

    Where the channels share a host (`PimSpec.has_single_host`), the pixel of a GWRITE or WRBIAS is replaced
    by the number of other groups of channels that get different values at this step, and rows stay, since an
    instruction names one row. Programs that only WRITE do not use these instructions, but plain accesses to
    each channel.

    Raises
    ------
    TraceError
        If the channels are not in lockstep, on a device whose channels share a host.
    """
    channels = range(len(program.channels))
    if not is_lockstep(program, spec):
        signatures: dict[int, np.ndarray] = {}
        for words in map(program.channel_words, channels):
            if id(words) not in signatures:
                signatures[id(words)] = _timing_signature(words)
        return [signatures[id(program.channel_words(channel))] for channel in channels]
    encoded = [program.channel_words(channel) for channel in channels]
    streams = [_timing_signature(words, keep_rows=True) for words in encoded]
    longest = max(streams, key=len)
    places = []
    for channel, words in enumerate(streams):
        places.append(_node_positions(words, longest))
        if (places[channel] >= 0).sum() < len(words):
            raise TraceError(
                f"region '{program.region}', channel {channel}: not in lockstep with the others; one host "
                f"issues the instructions of all channels of pim '{spec.name}'; lower it again for it"
            )
    size = 1 + MAX_DEPTH
    for opcode in (1, 6):
        # After the pixel, a GWRITE has the number of pixels and the element, a WRBIAS the output channel.
        second = 4 + size if opcode == 1 else 3 + size
        for position in _opcode_positions(longest, opcode):
            # A bias is the same for all pixels.
            is_bias = opcode == 6 and program.initial == "bias" and not longest[position + 3 + 2 * size]
            first = second if is_bias else 3
            positions = [
                (channel, int(place[position]))
                for channel, place in enumerate(places)
                if place[position] >= 0
            ]
            values = {
                tuple(
                    tuple(encoded[channel][position + word : position + word + size])
                    for word in (first, second)
                )
                for channel, position in positions
            }
            for channel, begin in positions:
                streams[channel][begin + 3] = len(values) - 1
    return streams


def _node_positions(words: np.ndarray, longest: np.ndarray) -> np.ndarray:
    """For each word of the longest stream, its position in `words`; -1 where this channel idles.

    An instruction goes to any set of channels, so the nodes of a stream in lockstep are a subsequence of
    those of the longest.
    """
    positions = np.full(len(longest), -1)
    if np.array_equal(words, longest[: len(words)]):
        positions[: len(words)] = np.arange(len(words))
        return positions
    node = index = 0
    while node < len(longest) and index < len(words):
        size = int(longest[node + 1])
        if np.array_equal(words[index : index + size], longest[node : node + size]):
            positions[node : node + size] = np.arange(index, index + size)
            index += size
        node += size
    return positions


def is_lockstep(program: PimProgram, spec: PimSpec) -> bool:
    """Whether one host issues the instructions of all channels; it does not if the program only WRITEs."""
    if not spec.has_single_host:
        return False
    return not program.command_kinds <= {GAct, Write}


def _opcode_positions(words: np.ndarray, target: int) -> Iterator[int]:
    """Positions of the nodes with an opcode, including those in loops."""
    node, plain = 0, words.tolist()
    while node < len(plain):
        opcode, size = plain[node : node + 2]
        if opcode == target:
            yield node
        node += 3 if opcode == 0 else size


def distinct_channels(program: PimProgram, spec: PimSpec) -> dict[int, int]:
    """The first of the channels with equal streams, and their number; these take the same time."""
    first: dict[bytes, int] = {}
    counts: dict[int, int] = {}
    for channel, words in enumerate(timing_streams(program, spec)):
        key = words.tobytes()
        index = first.setdefault(key, channel)
        counts[index] = counts.get(index, 0) + 1
    return counts


def _timing_signature(words: np.ndarray, keep_rows: bool = False) -> np.ndarray:
    """Encoded words without what has no effect on time: pixels, elements, outputs, banks, the first row."""
    words = words.copy()
    _clear(words, keep_rows)
    return words
