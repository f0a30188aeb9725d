"""A language model over several devices: its blocks in a pipeline, or each block's products in parts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pimflow.errors import UsageError
from pimflow.hardware.link import LinkSpec
from pimflow.zoo.language.decoder import Decoder

PIPELINE, TENSOR = "pipeline", "tensor"
PARALLEL = (PIPELINE, TENSOR)
MAX_DEVICES = 1024


@dataclass(frozen=True, kw_only=True)
class DeviceGroup:
    """Equal devices, each a GPU with its PIM channels, and how they share a model.

    In a ``pipeline`` each device has some blocks; one batch of sequences is in flight, so that one device
    works at a time. With ``tensor``, each has some heads and some of the feed-forward of every block, and
    partial sums of both are added over the link.
    """

    count: int
    parallel: str
    link: LinkSpec

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_DEVICES:
            raise UsageError(f"--devices {self.count}: give 1 to {MAX_DEVICES}")

    def device_part(self, decoder: Decoder) -> Decoder:
        """The decoder whose block and output layer a device computes; raises `UsageError`."""
        if self.count == 1:
            return decoder
        if self.parallel == PIPELINE:
            if self.count > decoder.layers:
                raise UsageError(f"--devices {self.count}: '{decoder.name}' has {decoder.layers} blocks")
            return decoder
        sizes = {name: getattr(decoder, name) for name in ("heads", "kv_heads", "feed_forward")}
        for name, size in sizes.items():
            if size % self.count:
                raise UsageError(
                    f"--devices {self.count} --parallel tensor: the {size} {name} of '{decoder.name}' cannot "
                    "be shared equally"
                )
        parts = {name: size // self.count for name, size in sizes.items()}
        part = replace(decoder, **parts, vocabulary=-(-decoder.vocabulary // self.count))
        kinds = set(decoder.weight_types.values())
        return part.with_weights(kinds.pop()) if kinds else part

    def held_bytes(self, blocks: int, block_bytes: int, output_bytes: int) -> int:
        """Bytes of PIM's rows on the fullest device, of a model of so many blocks and its output layer."""
        if self.parallel == TENSOR or self.count == 1:
            return blocks * block_bytes + output_bytes
        others = self.count - 1  # devices before the last, which has the output layer
        return min(
            max(each * block_bytes, max(blocks - others * each, 0) * block_bytes + output_bytes)
            for each in range(1, blocks + 1)
        )

    def link_ns(self, decoder: Decoder, rows: int, element_bytes: int) -> float:
        """Time of a step on links, for `rows` tokens of all sequences, of which logits of one row each.

        A pipeline sends the hidden state from device to device, and the token back. Tensor parallelism adds
        up two hidden states in each block, and gathers the logits.
        """
        if self.count == 1:
            return 0.0
        hidden_bytes = rows * decoder.hidden * element_bytes
        if self.parallel == PIPELINE:
            return (self.count - 1) * self.link.message_ns(hidden_bytes) + self.link.latency_ns
        sums_ns = 2 * decoder.layers * self.link.all_reduce_ns(hidden_bytes, self.count)
        return sums_ns + self.link.all_gather_ns(decoder.vocabulary * element_bytes, self.count)


def min_devices(decoder: Decoder, block_bytes: int, output_bytes: int, room_bytes: int) -> int | None:
    """The smallest number of devices in a pipeline with room for a model; None if one block has none."""
    link = LinkSpec(name="", description="", latency_ns=0.0, bytes_per_ns=1.0)
    for count in range(1, decoder.layers + 1):
        group = DeviceGroup(count=count, parallel=PIPELINE, link=link)
        if group.held_bytes(decoder.layers, block_bytes, output_bytes) <= room_bytes:
            return count
    return None
