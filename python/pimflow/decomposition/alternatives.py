"""Decomposition alternatives: a network in which each layer is original, or a chain of smaller ones."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pimflow.core.region import Region
from pimflow.core.region_graph import RegionGraph


@dataclass(frozen=True, kw_only=True)
class DecompositionAlternatives:
    """The alternatives of a network: the original, and with all layers decomposed by each of some rules.

    Attributes
    ----------
    decomposed : tuple of RegionGraph
        One for each rule, which decides the ranks: they differ only in sizes of tensors and filters.
    chains : dict of str to tuple of str
        By decomposed layer, the regions of its chain, in order.
    errors : dict of str to tuple of float
        By layer, the error of its chain by each rule (`LayerAlternative.error`); 0 for layers that are not
        in it.
    """

    original: RegionGraph
    decomposed: tuple[RegionGraph, ...]
    chains: dict[str, tuple[str, ...]]
    rules: tuple[str, ...] = ("",)
    errors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @functools.cached_property
    def distinct_rules(self) -> dict[str, tuple[int, ...]]:
        """By free layer and rule, the first rule with the same chain."""
        shapes = {
            layer: [
                tuple(graph.region(name).geometry for name in self.chains[layer]) for graph in self.decomposed
            ]
            for layer in self.independent_layers
        }
        return {
            layer: tuple(layer_shapes.index(shape) for shape in layer_shapes)
            for layer, layer_shapes in shapes.items()
        }

    @functools.cached_property
    def independent_layers(self) -> tuple[str, ...]:
        """Layers that can be replaced by their chains without a change to any other region.

        If a layer stores a tensor for others, such as a concatenation, its ``fconv`` stores it instead.
        """
        return tuple(
            layer
            for layer in self.chains
            if all(self._is_exchangeable(layer, graph) for graph in self.decomposed)
        )

    @property
    def dependent_layers(self) -> tuple[str, ...]:
        """Decomposed layers that are not `independent_layers`.

        All of them have the same rule, or all are original.
        """
        return tuple(layer for layer in self.chains if layer not in self.independent_layers)

    def _is_exchangeable(self, layer: str, graph: RegionGraph) -> bool:
        chain, region_names = self.chains[layer], {region.name for region in graph.regions}
        if layer not in {region.name for region in self.original.regions} or not region_names.issuperset(
            chain
        ):
            return False
        links, original_layer = [graph.region(name) for name in chain], self.original.region(layer)
        order = [region.name for region in graph.regions]
        begin = order.index(chain[0])
        is_chain = tuple(order[begin : begin + len(chain)]) == chain and all(
            consumer.first_result_input == producer.name
            and graph.consumers[producer.name] == (consumer.name,)
            and producer.name not in graph.outputs
            for producer, consumer in itertools.pairwise(links)
        )
        first, last = links[0], links[-1]
        operands = [
            (self._original_name(name), *rest)
            for link in links
            for name, *rest in _operands(link)
            if name not in chain
        ]
        return (
            is_chain
            and operands == _operands(original_layer)
            and self._is_equivalent(graph.consumers[last.name], self.original.consumers[layer])
            and self._is_equivalent(
                _extra_output_readers(graph, first.name), _extra_output_readers(self.original, layer)
            )
            and layer not in self.original.extra_outputs
            and (first.prologue, first.operands) == (original_layer.prologue, original_layer.operands)
            and first.kernel.extra_output_elements == original_layer.kernel.extra_output_elements
            and not any(link.kernel.extra_output_elements for link in links[1:])
            and _epilogue_properties(last) == _epilogue_properties(original_layer)
        )

    def _is_equivalent(self, decomposed: Sequence[str], original: Sequence[str]) -> bool:
        """Whether regions of a decomposed and of the original graph do the same."""
        return [self._original_name(name) for name in decomposed] == list(original)

    def _original_name(self, name: str) -> str:
        """The region of `original` that does what region `name` of `decomposed` is part of."""
        return self._layer_by_region.get(name, name)

    @functools.cached_property
    def _layer_by_region(self) -> dict[str, str]:
        return {name: layer for layer, chain in self.chains.items() for name in chain}

    def mixture(self, rules: Mapping[str, int]) -> RegionGraph:
        """The network with the layers `rules` decomposed, each by the rule of that number.

        All other layers are original. All `dependent_layers` must have the same rule, or be original.
        """
        uniform = {rules.get(layer) for layer in self.chains}
        if len(uniform) == 1:
            return self._uniform_graph(uniform.pop())
        base_rule = rules.get(self.dependent_layers[0]) if self.dependent_layers else 0
        base = self._uniform_graph(base_rule)
        # From the region of `base` that stores a layer's result, or an extra output, to the mixture's.
        results, extra_outputs = (
            {
                (layer_name if base_rule is None else self.chains[layer_name][link]): self.chains[layer_name][
                    link
                ]
                if layer_name in rules
                else layer_name
                for layer_name in self.independent_layers
            }
            for link in (-1, 0)
        )
        regions: list[Region] = []
        for region in base.regions:
            layer = self._original_name(region.name)
            if layer not in self.independent_layers or rules.get(layer) == base_rule:
                regions.append(region)
            elif region.name == (layer if base_rule is None else self.chains[layer][0]):
                regions += self._replacement_regions(layer, base, self._uniform_graph(rules.get(layer)))
        region_names = {region.name for region in regions}
        fusible = {*self.original.fusible, *self.decomposed[0].fusible}
        return RegionGraph(
            name=base.name,
            regions=tuple(
                _with_inputs(
                    region, lambda name, extra: (extra_outputs if extra else results).get(name, name)
                )
                for region in regions
            ),
            outputs=tuple(results.get(name, name) for name in base.outputs),
            extra_outputs=base.extra_outputs,
            runs=tuple(run for run in self.decomposed[0].runs if region_names.issuperset(run)),
            fusible=tuple(region.name for region in regions if region.name in fusible),
        )

    def _uniform_graph(self, rule: int | None) -> RegionGraph:
        """The network with all layers decomposed by a rule; the original for None."""
        return self.original if rule is None else self.decomposed[rule]

    def _replacement_regions(self, layer: str, base: RegionGraph, source: RegionGraph) -> list[Region]:
        """The regions of `layer` in `source`, with the operands that it has in `base`."""
        operands, source_operands = (
            [
                (name, is_extra)
                for region in self._layer_regions(layer, graph)
                for name, is_extra, _ in _operands(region)
                if name not in self.chains[layer]
            ]
            for graph in (base, source)
        )
        names = {operand: name for operand, (name, _) in zip(source_operands, operands, strict=True)}
        return [
            _with_inputs(region, lambda name, is_extra: names.get((name, is_extra), name))
            for region in self._layer_regions(layer, source)
        ]

    def _layer_regions(self, layer: str, graph: RegionGraph) -> list[Region]:
        names = (layer,) if graph is self.original else self.chains[layer]
        return [graph.region(name) for name in names]


def _operands(region: Region) -> list[tuple[str, bool, tuple[int, ...]]]:
    """Name of each operand, whether it is an extra output, and its shape."""
    return [
        (name, i in region.extra_inputs, shape)
        for i, (name, shape) in enumerate(zip(region.inputs, region.input_shapes))
    ]


def _extra_output_readers(graph: RegionGraph, name: str) -> list[str]:
    """Regions that read the extra output of region `name`."""
    return [
        region.name
        for region in graph.regions
        for read, is_extra, _ in _operands(region)
        if is_extra and read == name
    ]


def _with_inputs(region: Region, new_name: Callable[[str, bool], str]) -> Region:
    """`region` with renamed operands: `new_name` maps a name, and whether it is an extra output."""
    return replace(region, inputs=tuple(new_name(name, is_extra) for name, is_extra, _ in _operands(region)))


def _epilogue_properties(region: Region) -> tuple[object, ...]:
    """The properties of a region that decide the cost of its deferred epilogue."""
    results = region.geometry and region.geometry.pixels * region.geometry.oc
    return region.output_shape, results, region.input_elements[region.operands :]
