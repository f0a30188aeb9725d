"""The graph of the regions of a network."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pimflow.core.kernel import ELEMENT_BYTES
from pimflow.core.liveness import BufferUses, Liveness
from pimflow.core.region import APPEND, Region
from pimflow.core.typed_values import from_fields, has_type
from pimflow.errors import UnknownNameError


@dataclass(frozen=True, kw_only=True)
class RegionGraph:
    """A network as regions, in execution order.

    Attributes
    ----------
    runs : tuple of tuple of str
        Chains of regions that may be one kernel on the GPU.
    fusible : tuple of str
        Regions that may be fused with their neighbours into one tiled kernel.
    extra_outputs : tuple of str
        Those of `outputs` whose extra output the network returns, not their result.
    """

    name: str
    regions: tuple[Region, ...]
    outputs: tuple[str, ...]
    runs: tuple[tuple[str, ...], ...] = ()
    fusible: tuple[str, ...] = ()
    extra_outputs: tuple[str, ...] = ()

    @classmethod
    def from_table(cls, plain: Mapping[str, Any]) -> RegionGraph:
        """The inverse of `to_table`, for untrusted data; raises `TypeError` or `ValueError`."""
        fields = dict(plain)
        graph = from_fields(cls, fields | {"extra_outputs": fields.pop("kept_outputs", ())})
        if not has_type(graph, cls):
            raise TypeError("not of the types of a graph of regions")
        graph.require_order()
        return graph

    def to_table(self) -> dict[str, Any]:
        """The graph as an object of JSON, as `regions.json` has it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"kept_outputs": fields.pop("extra_outputs")}

    def require_order(self) -> None:
        """Raise `ValueError` unless every region reads only earlier regions and inputs of the graph."""
        earlier: set[str] = set()
        for region in self.regions:
            read = {name for name in region.inputs if not name.startswith("%")}
            if (
                not read <= earlier
                or region.name in earlier
                or len(region.inputs) != len(region.input_shapes)
            ):
                raise ValueError(f"region '{region.name}' reads an unknown tensor")
            earlier.add(region.name)
        runs = {name for run in self.runs for name in run}
        if not {*self.outputs, *self.extra_outputs, *self.fusible} | runs <= earlier:
            raise ValueError("names of unknown regions")

    def region(self, name: str) -> Region:
        """The region of that name; raises `UnknownNameError` if there is none."""
        if name not in self._region_by_name:
            raise UnknownNameError("region", name, self._region_by_name)
        return self._region_by_name[name]

    @functools.cached_property
    def _region_by_name(self) -> dict[str, Region]:
        return {region.name: region for region in self.regions}

    @functools.cached_property
    def consumers(self) -> dict[str, tuple[str, ...]]:
        """By region, the regions that read its result."""
        return self._readers_by_region({region.name: region.result_inputs for region in self.regions})

    @functools.cached_property
    def readers(self) -> dict[str, tuple[str, ...]]:
        """By region, the regions that read its result or its second tensor, once for each read."""
        return self._readers_by_region({region.name: region.inputs for region in self.regions})

    @functools.cached_property
    def last_readers(self) -> dict[str, str]:
        """By region that is read, the last region that reads it."""
        return {name: readers[-1] for name, readers in self.readers.items() if readers}

    def returns_result(self, name: str) -> bool:
        """Whether the network returns the result of a region, not only its extra output."""
        return name in self.outputs and name not in self.extra_outputs

    def is_shared(self, name: str) -> bool:
        """Whether the result of a region is needed more than once: by regions, or as an output."""
        return len(self.consumers[name]) + self.returns_result(name) > 1

    def _readers_by_region(self, reads: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        readers: dict[str, list[str]] = {region.name: [] for region in self.regions}
        for reader, names in reads.items():
            for name in names:
                if name in readers:
                    readers[name].append(reader)
        return {name: tuple(region_readers) for name, region_readers in readers.items()}

    def tensor_bytes(self, dtype: str) -> dict[str, int]:
        """Bytes of the graph's inputs, and of the regions' results together with their extra outputs."""
        element = ELEMENT_BYTES[dtype]
        sizes = {r.name: (r.output_elements + r.kernel.extra_output_elements) * element for r in self.regions}
        for region in self.regions:
            for name, elements in zip(region.inputs, region.input_elements):
                if name.startswith("%"):
                    sizes[name] = elements * element
        return sizes

    def buffer_uses(self, dtype: str) -> BufferUses:
        """Uses of the regions' results and the graph's inputs; each region is one step.

        Views take no bytes: a region that reads a view reads the tensor that the view lies inside, or all
        parts of a concatenation, which share the bytes of the whole.
        """
        tensor_bytes = self.tensor_bytes(dtype)
        inputs = [name for name in tensor_bytes if name.startswith("%")]
        size_bytes, aliases = dict(tensor_bytes), dict[str, str]()
        steps: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
        storage: dict[str, tuple[str, ...]] = {name: (name,) for name in inputs}
        for region in self.regions:
            name = region.name
            reads = tuple(
                dict.fromkeys(buffer for input_name in region.inputs for buffer in storage[input_name])
            )
            steps.append((reads, (name,)))
            storage[name] = (*reads, name) if region.is_view else (name,)
            if region.operator == APPEND:
                storage[name] = storage[region.inputs[0]]
            if region.is_view or region.operator == APPEND:
                size_bytes[name] = 0
            if region.is_view and region.operator == "concat":
                parts = [buffer for buffer in reads if size_bytes[buffer]]
                aliases |= dict.fromkeys(parts, name)
                size_bytes |= dict.fromkeys(parts, sum(tensor_bytes[part] for part in region.inputs))
        outputs = tuple(dict.fromkeys(buffer for name in self.outputs for buffer in storage[name]))
        return BufferUses(
            steps=steps, size_bytes=size_bytes, inputs=tuple(inputs), outputs=outputs, aliases=aliases
        )

    def liveness(self, dtype: str) -> Liveness:
        """Lifetimes of `buffer_uses`."""
        uses = self.buffer_uses(dtype)
        lifetimes = Liveness.from_steps(uses.steps, uses.size_bytes, inputs=uses.inputs, outputs=uses.outputs)
        return lifetimes.with_aliases(uses.aliases)

    @functools.cached_property
    def digest(self) -> str:
        """Hash of everything that a plan depends on: names, shapes, order. Weights do not matter."""
        attention = [region.attention for region in self.regions if region.attention is not None]
        identity = (self.regions, self.outputs, self.extra_outputs, *attention)
        return hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
