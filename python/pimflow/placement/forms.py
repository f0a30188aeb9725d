"""Decomposition alternatives: a network in which each layer is original, or a chain of smaller ones."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pimflow.core.region import Region, RegionGraph


@dataclass(frozen=True, kw_only=True)
class Forms:
    """The alternatives of a network: the original, and with all layers decomposed by each of some rules.

    Attributes
    ----------
    given : RegionGraph
        The original.
    decomposed : tuple of RegionGraph
        One for each rule, which decides the ranks: they differ only in sizes of tensors and filters.
    chains : dict of str to tuple of str
        By decomposed layer, the regions of its chain, in order.
    rules : tuple of str
        Names of the rules of `decomposed`.
    errors : dict of str to tuple of float
        By layer, the error of its chain by each rule (`Candidate.error`); 0 for layers that are left out.
    """

    given: RegionGraph
    decomposed: tuple[RegionGraph, ...]
    chains: dict[str, tuple[str, ...]]
    rules: tuple[str, ...] = ("",)
    errors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @functools.cached_property
    def distinct(self) -> dict[str, tuple[int, ...]]:
        """By free layer and rule, the first rule with the same chain."""
        shapes = {
            layer: [
                tuple(graph.region(name).geometry for name in self.chains[layer]) for graph in self.decomposed
            ]
            for layer in self.free
        }
        return {layer: tuple(each.index(shape) for shape in each) for layer, each in shapes.items()}

    @functools.cached_property
    def free(self) -> tuple[str, ...]:
        """Layers that can be replaced by their chains without a change to any other region.

        If a layer stores a tensor for others, such as a concatenation, its ``fconv`` stores it instead.
        """
        return tuple(
            layer
            for layer in self.chains
            if all(self._exchangeable(layer, graph) for graph in self.decomposed)
        )

    @property
    def bound(self) -> tuple[str, ...]:
        """Decomposed layers that are not `free`: all of them have the same rule, or all are original."""
        return tuple(layer for layer in self.chains if layer not in self.free)

    def _exchangeable(self, layer: str, graph: RegionGraph) -> bool:
        chain, known = self.chains[layer], {region.name for region in graph.regions}
        if layer not in {region.name for region in self.given.regions} or not known.issuperset(chain):
            return False
        links, whole = [graph.region(name) for name in chain], self.given.region(layer)
        order = [region.name for region in graph.regions]
        begin = order.index(chain[0])
        in_a_row = tuple(order[begin : begin + len(chain)]) == chain and all(
            after.first_result == before.name
            and graph.consumers[before.name] == (after.name,)
            and before.name not in graph.outputs
            for before, after in itertools.pairwise(links)
        )
        first, last = links[0], links[-1]
        operands = [
            (self._given_name(name), *rest)
            for link in links
            for name, *rest in _operands(link)
            if name not in chain
        ]
        return (
            in_a_row
            and operands == _operands(whole)
            and self._alike(graph.consumers[last.name], self.given.consumers[layer])
            and self._alike(_kept_readers(graph, first.name), _kept_readers(self.given, layer))
            and layer not in self.given.kept_outputs
            and (first.prologue, first.operands) == (whole.prologue, whole.operands)
            and first.kept_elements == whole.kept_elements
            and not any(link.kept_elements for link in links[1:])
            and _left_undone(last) == _left_undone(whole)
        )

    def _alike(self, decomposed: Sequence[str], given: Sequence[str]) -> bool:
        """Whether regions of a decomposed and of the original graph do the same."""
        return [self._given_name(name) for name in decomposed] == list(given)

    def _given_name(self, name: str) -> str:
        """The region of `given` that does what region `name` of `decomposed` is part of."""
        return self._layer_of.get(name, name)

    @functools.cached_property
    def _layer_of(self) -> dict[str, str]:
        return {name: layer for layer, chain in self.chains.items() for name in chain}

    def mixture(self, chosen: Mapping[str, int]) -> RegionGraph:
        """The network with the layers `chosen` decomposed, each by the rule of that number.

        All other layers are original. The `bound` layers must all have the same rule, or all be original.
        """
        uniform = {chosen.get(layer) for layer in self.chains}
        if len(uniform) == 1:
            return self._in_form(uniform.pop())
        whole = chosen.get(self.bound[0]) if self.bound else 0
        base = self._in_form(whole)
        # From the region of `base` that stores a layer's result, or a tensor beside it, to the mixture's.
        results, kept = (
            {
                (x if whole is None else self.chains[x][at]): self.chains[x][at] if x in chosen else x
                for x in self.free
            }
            for at in (-1, 0)
        )
        regions: list[Region] = []
        for region in base.regions:
            layer = self._given_name(region.name)
            if layer not in self.free or chosen.get(layer) == whole:
                regions.append(region)
            elif region.name == (layer if whole is None else self.chains[layer][0]):
                regions += self._exchanged(layer, base, self._in_form(chosen.get(layer)))
        known = {region.name for region in regions}
        return RegionGraph(
            name=base.name,
            regions=tuple(
                _renamed(region, lambda name, keeps: (kept if keeps else results).get(name, name))
                for region in regions
            ),
            outputs=tuple(results.get(name, name) for name in base.outputs),
            kept_outputs=base.kept_outputs,
            runs=tuple(run for run in self.decomposed[0].runs if known.issuperset(run)),
            fusible=tuple(region.name for region in regions if region.name in self._fusible),
        )

    def _in_form(self, rule: int | None) -> RegionGraph:
        """The network with all layers decomposed by a rule; the original for None."""
        return self.given if rule is None else self.decomposed[rule]

    @functools.cached_property
    def _fusible(self) -> frozenset[str]:
        """Regions, original or of chains, that may be part of groups."""
        return frozenset((*self.given.fusible, *self.decomposed[0].fusible))

    def _exchanged(self, layer: str, base: RegionGraph, other: RegionGraph) -> list[Region]:
        """The regions of `layer` in `other`, with the operands that it has in `base`."""
        operands, others = (
            [
                (name, keeps)
                for region in self._doing(layer, graph)
                for name, keeps, _ in _operands(region)
                if name not in self.chains[layer]
            ]
            for graph in (base, other)
        )
        names = {operand: name for operand, (name, _) in zip(others, operands, strict=True)}
        return [
            _renamed(region, lambda name, keeps: names.get((name, keeps), name))
            for region in self._doing(layer, other)
        ]

    def _doing(self, layer: str, graph: RegionGraph) -> list[Region]:
        names = (layer,) if graph is self.given else self.chains[layer]
        return [graph.region(name) for name in names]


def _operands(region: Region) -> list[tuple[str, bool, tuple[int, ...]]]:
    """Name of each operand, whether it is a tensor kept beside a result, and its shape."""
    return [
        (name, i in region.kept_inputs, shape)
        for i, (name, shape) in enumerate(zip(region.inputs, region.input_shapes))
    ]


def _kept_readers(graph: RegionGraph, name: str) -> list[str]:
    """Regions that read the tensor that `name` keeps beside its result."""
    return [r.name for r in graph.regions for read, keeps, _ in _operands(r) if keeps and read == name]


def _renamed(region: Region, new: Callable[[str, bool], str]) -> Region:
    """`region` with renamed operands: `new` maps a name, and whether it is kept beside a result."""
    return replace(region, inputs=tuple(new(name, keeps) for name, keeps, _ in _operands(region)))


def _left_undone(region: Region) -> tuple[object, ...]:
    """The properties of a region that decide the cost of its deferred epilogue."""
    results = region.geometry and region.geometry.pixels * region.geometry.oc
    return region.output_shape, results, region.input_elements[region.operands :]
