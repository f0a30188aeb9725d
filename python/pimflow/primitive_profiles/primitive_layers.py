"""A network's layers as a selection problem: candidates, layouts, transforms."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from pimflow.core.candidate import Candidate, Cost, CostTable, EdgeCost, Known, Port, Rewrite, Task
from pimflow.core.region import MOVES, ConvGeometry, Region, RegionGraph
from pimflow.errors import ProfileError
from pimflow.placement.selection import RETURNED
from pimflow.primitive_profiles.primitive_profile import ANALYTIC, Move, Profile, applicable, is_free
from pimflow.primitives import PRIMITIVES
from pimflow.primitives.layer import has_choice


def apart(graph: RegionGraph) -> RegionGraph:
    """`graph` with concatenations in front of convolutions as regions of their own.

    A primitive reads one tensor; and what others read of such a region may be the concatenation.
    """
    regions: list[Region] = []
    joined: dict[tuple[str, tuple[int, ...]], str] = {}
    for region in graph.regions:
        found = {i: joined.get((region.inputs[i], region.input_shapes[i])) for i in region.kept_inputs}
        region = replace(
            region,
            inputs=tuple(found.get(i) or name for i, name in enumerate(region.inputs)),
            kept_inputs=tuple(i for i, name in found.items() if not name),
        )
        operands = _concatenated(region)
        if operands:
            layer = region.geometry
            shape = (layer.n, layer.h, layer.w, layer.c)
            name = f"{region.name}.concat"
            regions.append(
                Region(
                    name=name,
                    operator="concat",
                    operators=("concat",),
                    inputs=region.inputs[:operands],
                    input_shapes=region.input_shapes[:operands],
                    kept_inputs=tuple(i for i in region.kept_inputs if i < operands),
                    output_shape=shape,
                    anchored=False,
                )
            )
            joined[region.name, shape] = name
            region = replace(
                region,
                inputs=(name, *region.inputs[operands:]),
                input_shapes=(shape, *region.input_shapes[operands:]),
                operands=region.operands - operands + 1,
                kept_inputs=tuple(i - operands + 1 for i in region.kept_inputs if i >= operands),
                prologue=tuple(op for op in region.prologue if op != "concat"),
                operators=tuple(op for op in region.operators if op != "concat"),
                kept_elements=max(0, region.kept_elements - math.prod(shape)),
            )
        regions.append(region)
    return replace(graph, regions=tuple(regions))


def _concatenated(region: Region) -> int:
    """How many operands a region joins along channels in front of its convolution; 0 for none."""
    if not has_choice(region) or "concat" not in region.prologue:
        return 0
    layer, channels = region.geometry, 0
    for number, shape in enumerate(region.input_shapes):
        if len(shape) != 4 or shape[:3] != (layer.n, layer.h, layer.w):
            return 0
        channels += shape[-1]
        if channels == layer.c:
            return number + 1
    return 0


def _layouts(region: Region) -> tuple[str, ...]:
    """Those in which a region without a choice can work: as elementwise operators and concatenations do."""
    shapes = (region.output_shape, *region.input_shapes)
    moves = set(region.operators) & ({*MOVES, "strided_slice"})
    if region.anchored or region.geometry or moves or any(len(shape) != 4 for shape in shapes):
        return ("HWC",)
    return ("HWC", "CHW")


def _fits(region: Region, layout: str) -> bool:
    """Whether a primitive of `layout` may do a region, whose other operators then work in it too."""
    before = region.prologue[1:] if _given_as_chw(region) else region.prologue
    moved = {*MOVES, "concat", "strided_slice"} & {*before, *region.epilogue}
    pixel = region.geometry.oh * region.geometry.ow == 1
    return layout == "HWC" or not moved or (pixel and not {*MOVES, "concat"} & set(before))


def _given_as_chw(region: Region) -> bool:
    """Whether it begins with the transform of a graph input that comes in CHW."""
    return region.prologue[:1] == ("permute_dims",) and region.inputs[0].startswith("%")


def _port(layout: str) -> Port:
    return Port(layout=layout, dtype="fp32", device="cpu")


def _candidate(
    region: Region, layout: str, name: str = "", time_ns: float = 0.0, known: Known = Known.MEASURED
) -> Candidate:
    primitive, tasks = PRIMITIVES.get(name), ()
    if primitive:
        label = f"{region.name} {name}"
        tasks = (Task(label=label, resource="cpu", execution_ns=time_ns, known=known),)
    return Candidate(
        name=name or layout,
        covers=(region.name,),
        gpu_share=None,
        input=_port(layout),
        output=_port(layout),
        tasks=tasks,
        rewrite=Rewrite(mode="CPU", gpu_rows=0, primitive=name),
        workspace_bytes=primitive.workspace_bytes(region.geometry) if primitive else 0,
        filter_bytes=primitive.filter_bytes(region.geometry) if primitive else 0,
    )


@dataclass(frozen=True)
class Layers:
    """A network, as far as its selection needs no times, for primitives of `target`."""

    graph: RegionGraph
    target: str = "cpu"

    @functools.cached_property
    def chosen(self) -> dict[str, ConvGeometry]:
        """Layers that have a choice."""
        return {region.name: region.geometry for region in self.graph.regions if has_choice(region)}

    @functools.cached_property
    def inputs(self) -> dict[str, Port]:
        """The form in which the graph's inputs come."""
        first: dict[str, Port] = {}
        for region in self.graph.regions:
            for name in region.inputs:
                if name.startswith("%"):
                    first.setdefault(name, _port("CHW" if _given_as_chw(region) else "HWC"))
        return first

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, int, int, int]]:
        """Batch, height, width and channels of every tensor; what is no map is a pixel."""

        def map_of(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
            return shape if len(shape) == 4 else (1, 1, 1, math.prod(shape))

        found = {region.name: map_of(region.output_shape) for region in self.graph.regions}
        for region in self.graph.regions:
            for name, shape in zip(region.inputs, region.input_shapes):
                if name.startswith("%"):
                    n, c, h, w = shape if _given_as_chw(region) else (0, 0, 0, 0)
                    found.setdefault(name, (n, h, w, c) if n else map_of(shape))
        return found

    def layouts(self, name: str) -> set[str]:
        """Those that a region may give."""
        region = self.graph.region(name)
        if name not in self.chosen:
            return set(_layouts(region))
        layouts = {primitive.layout for primitive in applicable(region.geometry, self.target)}
        return {layout for layout in layouts if _fits(region, layout)}

    @functools.cached_property
    def moves(self) -> dict[tuple[str, str, str], Move]:
        """Transforms that may be needed, by tensor and layouts."""
        readers = [(region.name, self.layouts(region.name), region.inputs) for region in self.graph.regions]
        readers += [("", {RETURNED.layout}, (name,)) for name in self.graph.outputs]
        found = {}
        for _, layouts, names in readers:
            for tensor in names:
                known = self.inputs.get(tensor)
                for given in {known.layout} if known else self.layouts(tensor):
                    for taken in layouts:
                        move = (self.shapes[tensor], given, taken)
                        if not is_free(move):
                            found[tensor, given, taken] = move
        return found

    def table(self, profile: Profile) -> CostTable:
        """Every candidate that has a time.

        Raises
        ------
        ProfileError
            If a layer or a transform has none.
        """
        candidates = {region.name: self._candidates(region, profile) for region in self.graph.regions}
        edges = {}
        for key, move in self.moves.items():
            if move not in profile.moves_ns:
                shape = "x".join(map(str, move[0]))
                raise ProfileError(
                    f"the profile has no time of a transform of {shape} from {move[1]} to {move[2]}"
                )
            label = f"{key[0]} {move[1]} to {move[2]}"
            ns = profile.moves_ns[move]
            task = Task(label=label, resource="cpu", execution_ns=ns, known=Known.MEASURED)
            edges[key] = EdgeCost(task=task)
        return CostTable(
            candidates=candidates,
            costs={(name, c.name): Cost.of(c) for name, found in candidates.items() for c in found},
            refused={},
            settle={},
            absorb={},
            transforms=edges,
            inputs=self.inputs,
        )

    def _candidates(self, region: Region, profile: Profile) -> tuple[Candidate, ...]:
        if region.name not in self.chosen:
            return tuple(_candidate(region, layout) for layout in _layouts(region))
        layer, found = region.geometry, []
        for primitive in applicable(layer, self.target):
            key, known = (primitive.name, layer), Known.MEASURED
            if key not in profile.times_ns or profile.device.cpu == ANALYTIC:
                known = Known.ANALYTIC
            ns = profile.times_ns.get(key, profile.predicted_ns.get(key))
            if ns is not None and _fits(region, primitive.layout):
                found.append(_candidate(region, primitive.layout, primitive.name, ns, known))
        if not found:
            raise ProfileError(f"the profile has no time of any primitive for layer '{region.name}', {layer}")
        return tuple(found)
