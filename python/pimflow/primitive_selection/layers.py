"""A network's layers as a selection problem: candidates, layouts, transforms."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pimflow.core.candidate import Candidate, CostTable, EdgeCost, Known, Port, Rewrite, Task
from pimflow.core.region import CONCAT_SUFFIX, MOVES, ConvGeometry, Region, RegionGraph
from pimflow.errors import ProfileError
from pimflow.primitive_selection.problem import RETURNED
from pimflow.primitive_selection.profile import ANALYTIC, Move, Pooling, Profile, applicable, is_free
from pimflow.primitives import PRIMITIVES
from pimflow.primitives.layer import BLOCK, LAYOUTS, has_choice

REDUCTIONS = ("mean", "sum", "max", "min")
Allowed = Mapping[str, tuple[str, ...]]  # by region, the layouts in which it can work


def apart(graph: RegionGraph) -> RegionGraph:
    """`graph` with concatenations before convolutions and pools as separate regions.

    A primitive reads one tensor. And other regions may read the concatenation.
    """
    regions: list[Region] = []
    joined: dict[tuple[str, tuple[int, ...]], str] = {}
    for region in graph.regions:
        kept = {i: joined.get((region.inputs[i], region.input_shapes[i])) for i in region.kept_inputs}
        region = replace(
            region,
            inputs=tuple(kept.get(i) or name for i, name in enumerate(region.inputs)),
            kept_inputs=tuple(i for i, name in kept.items() if not name),
        )
        operands = _concatenated(region)
        if operands:
            shape = _operand(region)
            name = f"{region.name}{CONCAT_SUFFIX}"
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
    """How many operands a region concatenates along channels before it computes; 0 for none."""
    before = region.prologue or _before(region)
    operand = _operand(region) if "concat" in before else ()
    if not operand:
        return 0
    channels = 0
    for number, shape in enumerate(region.input_shapes):
        if len(shape) != 4 or shape[:3] != operand[:3]:
            return 0
        channels += shape[-1]
        if channels == operand[3]:
            return number + 1
    return 0


def _before(region: Region) -> tuple[str, ...]:
    """Operators of a region before its pool or reduction."""
    pools = region.anchored and region.operator in region.operators
    return region.operators[: region.operators.index(region.operator)] if pools else ()


def _operand(region: Region) -> tuple[int, ...]:
    """Shape of the map that a convolution, a pool or a reduction reads; empty for all other regions."""
    window = region.geometry if has_choice(region) else _window(region)
    return (window.n, window.h, window.w, window.c) if window else ()


def _window(region: Region) -> ConvGeometry | None:
    """Window of a pool, as that of a depthwise convolution; of a reduction, the whole map. Else None."""
    if region.pooling or region.operator not in REDUCTIONS or not region.anchored:
        return region.pooling
    n, h, w, _ = region.input_shapes[0] if len(region.input_shapes[0]) == 4 else (0, 0, 0, 0)
    channels = region.output_elements // max(n, 1)
    # A reduction over channels is excluded: it has h * w outputs an inference.
    if not n or h * w == channels or channels not in region.output_shape:
        return None
    return ConvGeometry(n=n, h=h, w=w, c=channels, oc=channels, kh=h, kw=w, groups=channels)


def _layouts(region: Region, target: str) -> tuple[str, ...]:
    """Layouts of a region without primitives: several for elementwise operators, concatenations, pools."""
    shapes = [*region.input_shapes, region.output_shape]
    window = _window(region)
    behind = region.operators
    if window and window.pixels == window.n and region.output_elements == window.n * window.oc:
        # A single pixel has the same bytes in all layouts.
        behind, shapes = _before(region), shapes[:-1]
    fixed = {*MOVES, "strided_slice"} & set(behind) or region.geometry or (region.anchored and not window)
    if fixed or any(len(shape) != 4 for shape in shapes):
        return ("HWC",)
    blocks = all(shape[-1] % BLOCK == 0 for shape in shapes) and "nn.prelu" not in region.operators
    used = {primitive.layout for primitive in PRIMITIVES.values() if primitive.target == target}
    return tuple(layout for layout in LAYOUTS if layout in used and (blocks or layout != "CHWc16"))


def _fits(region: Region, layout: str) -> bool:
    """Whether a primitive of `layout` can compute a region: its other operators have to support it too."""
    before = region.prologue[1:] if _given_as_chw(region) else region.prologue
    moved = {*MOVES, "concat", "strided_slice"} & {*before, *region.epilogue}
    pixel = region.geometry.oh * region.geometry.ow == 1
    if layout == "CHWc16" and "nn.prelu" in region.operators:  # its slopes are not in blocks
        return False
    return layout == "HWC" or not moved or (pixel and not {*MOVES, "concat"} & set(before))


def _given_as_chw(region: Region) -> bool:
    """Whether a region begins with the transform of a graph input in CHW."""
    g, given = region.geometry, region.input_shapes[:1]
    moved = region.prologue[:1] == ("permute_dims",) or (g and given == ((g.n, g.c, g.h, g.w),))
    return bool(region.prologue and moved) and region.inputs[0].startswith("%")


def _port(layout: str) -> Port:
    return Port(layout=layout, dtype="fp32", device="cpu")


def _candidate(
    region: Region, layout: str, name: str = "", time_ns: float = 0.0, known: Known = Known.MEASURED
) -> Candidate:
    primitive, tasks = PRIMITIVES.get(name), ()
    if primitive or time_ns:
        label = f"{region.name} {name or layout}"
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
    """The layers of a network, and their possible layouts and transforms, for primitives of `target`.

    All that a selection needs but times, which `table` adds.
    """

    graph: RegionGraph
    target: str = "cpu"

    @functools.cached_property
    def chosen(self) -> dict[str, ConvGeometry]:
        """By region that primitives can compute, its geometry."""
        return {region.name: region.geometry for region in self.graph.regions if has_choice(region)}

    @functools.cached_property
    def inputs(self) -> dict[str, Port]:
        """The layouts of the graph's inputs, as ports."""
        first: dict[str, Port] = {}
        for region in self.graph.regions:
            for name in region.inputs:
                if name.startswith("%"):
                    first.setdefault(name, _port("CHW" if _given_as_chw(region) else "HWC"))
        return first

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, int, int, int]]:
        """Batch, height, width and channels of every tensor; a tensor that is no map counts as one pixel.

        So does a map of which only one axis is longer than 1: it may be a pixel with another order of axes.
        """

        def map_of(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
            """`shape` as a map."""
            if len(shape) != 4:
                return (1, 1, 1, math.prod(shape))
            n, *rest = shape
            return shape if sum(extent > 1 for extent in rest) > 1 else (n, 1, 1, math.prod(rest))

        shapes = {region.name: map_of(region.output_shape) for region in self.graph.regions}
        for region in self.graph.regions:
            for name, shape in zip(region.inputs, region.input_shapes):
                if name.startswith("%"):
                    n, c, h, w = shape if _given_as_chw(region) else (0, 0, 0, 0)
                    shapes.setdefault(name, (n, h, w, c) if n else map_of(shape))
        return shapes

    @functools.cached_property
    def pools(self) -> dict[str, Pooling]:
        """By region that pools in one of several layouts, its pooling: the time depends on the layout."""
        pools = {}
        for region in self.graph.regions:
            window = None if region.name in self.chosen else _window(region)
            if window and len(self.layouts[region.name]) > 1:
                pools[region.name] = Pooling(operator=region.operator, window=window)
        return pools

    @property
    def pooled(self) -> list[tuple[Pooling, str]]:
        """All pairs of a pool and one of its layouts."""
        return [(pool, layout) for name, pool in self.pools.items() for layout in self.layouts[name]]

    @functools.cached_property
    def layouts(self) -> dict[str, tuple[str, ...]]:
        """By region, the possible layouts of its result."""
        layouts = {}
        for region in self.graph.regions:
            if region.name in self.chosen:
                made = {p.layout for p in applicable(region.geometry, self.target)}
                fitting = (layout for layout in LAYOUTS if layout in made and _fits(region, layout))
                layouts[region.name] = tuple(fitting)
            else:
                layouts[region.name] = _layouts(region, self.target)
        return layouts

    @functools.cached_property
    def moves(self) -> dict[tuple[str, str, str], Move]:
        """Layout transforms that may be needed, by tensor, source layout and target layout."""
        return self._moves(self.layouts)

    def _moves(self, layouts: Allowed) -> dict[tuple[str, str, str], Move]:
        readers = [(layouts[region.name], region.inputs) for region in self.graph.regions]
        readers += [((RETURNED.layout,), (name,)) for name in self.graph.outputs]
        moves = {}
        for wanted, names in readers:
            for tensor in names:
                known = self.inputs.get(tensor)
                for given in (known.layout,) if known else layouts[tensor]:
                    for taken in wanted:
                        move = (self.shapes[tensor], given, taken)
                        if not is_free(move):
                            moves[tensor, given, taken] = move
        return moves

    def timed(self, profile: Profile) -> Allowed:
        """`layouts` without those for which `profile` lacks a time, of regions without primitives.

        A profile that was stored for other networks may lack times of transforms and of pools.
        """
        layouts = dict(self.layouts)
        for name, pool in self.pools.items():
            known = [layout for layout in layouts[name] if (pool, layout) in profile.pools_ns]
            layouts[name] = tuple(known) if "HWC" in known else ("HWC",)
        for region in self.graph.regions:
            for layout in layouts[region.name]:
                if region.name not in self.chosen and layout != "HWC":
                    without = tuple(each for each in layouts[region.name] if each != layout)
                    edges = self._of(region.name, layout, layouts)
                    if any(move not in profile.moves_ns for move in edges):
                        layouts[region.name] = without
        return layouts

    def _of(self, name: str, layout: str, layouts: Allowed) -> list[Move]:
        """Transforms that may be needed if a region works in `layout`."""
        region, edges = self.graph.region(name), []
        for tensor in region.inputs:
            known = self.inputs.get(tensor)
            edges += [(tensor, given, layout) for given in ((known.layout,) if known else layouts[tensor])]
        for reader in self.graph.consumers[name]:
            edges += [(name, layout, taken) for taken in layouts[reader]]
        if name in self.graph.outputs:
            edges.append((name, layout, RETURNED.layout))
        return [self.moves[edge] for edge in edges if edge in self.moves]

    def table(self, profile: Profile) -> CostTable:
        """The cost table: candidates and transforms with the times of `profile`.

        Raises
        ------
        ProfileError
            If a layer or a transform has no time.
        """
        layouts = self.timed(profile)
        candidates = {
            region.name: self._candidates(region, profile, layouts[region.name])
            for region in self.graph.regions
        }
        edges = {}
        for key, move in self._moves(layouts).items():
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
            refused={},
            settle={},
            absorb={},
            transforms=edges,
            inputs=self.inputs,
        )

    def _candidates(
        self, region: Region, profile: Profile, layouts: tuple[str, ...]
    ) -> tuple[Candidate, ...]:
        if region.name not in self.chosen:
            # Only differences between layouts matter: no choice changes the minimum.
            pool = self.pools.get(region.name)
            times = {layout: profile.pools_ns.get((pool, layout), 0.0) for layout in layouts}
            least_ns = min(times.values())
            return tuple(_candidate(region, each, time_ns=ns - least_ns) for each, ns in times.items())
        layer, candidates = region.geometry, []
        for primitive in applicable(layer, self.target):
            key, known = (primitive.name, layer), Known.MEASURED
            if key not in profile.times_ns or profile.device.cpu == ANALYTIC:
                known = Known.ANALYTIC
            ns = profile.times_ns.get(key, profile.predicted_ns.get(key))
            if ns is not None and _fits(region, primitive.layout):
                candidates.append(_candidate(region, primitive.layout, primitive.name, ns, known))
        if not candidates:
            raise ProfileError(f"the profile has no time of any primitive for layer '{region.name}', {layer}")
        return tuple(candidates)
