"""A network's layers as a selection problem: candidates, layouts, transforms."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pimflow.core.candidate import Candidate, CostTable, EdgeCost, Footprint, Provenance, Task
from pimflow.core.kernel import ConvGeometry
from pimflow.core.region import CONCAT_SUFFIX, MOVES, KernelShape, Region
from pimflow.core.region_graph import RegionGraph
from pimflow.core.rewrite import GpuRewrite
from pimflow.core.tensor_placement import Layout, TensorPlacement
from pimflow.errors import ProfileError
from pimflow.primitive_selection.problem import OUTPUT_PLACEMENT
from pimflow.primitive_selection.profile import (
    ANALYTIC,
    Move,
    Pooling,
    Profile,
    applicable_primitives,
    is_free,
)
from pimflow.primitives import PRIMITIVES
from pimflow.primitives.layer import BLOCK, LAYOUTS, has_choice

REDUCTIONS = ("mean", "sum", "max", "min")
LayoutsByRegion = Mapping[str, tuple[str, ...]]  # by region, the layouts in which it can work


def separate_concats(graph: RegionGraph) -> RegionGraph:
    """`graph` with concatenations before convolutions and pools as separate regions.

    A primitive reads one tensor. And other regions may read the concatenation.
    """
    regions: list[Region] = []
    concat_names: dict[tuple[str, tuple[int, ...]], str] = {}
    for region in graph.regions:
        kept_names = {
            i: concat_names.get((region.inputs[i], region.input_shapes[i])) for i in region.extra_inputs
        }
        region = replace(
            region,
            inputs=tuple(kept_names.get(i) or name for i, name in enumerate(region.inputs)),
            extra_inputs=tuple(i for i, name in kept_names.items() if not name),
        )
        operands = _concat_operand_count(region)
        if operands:
            shape = _operand_shape(region)
            name = f"{region.name}{CONCAT_SUFFIX}"
            regions.append(
                Region(
                    name=name,
                    operator="concat",
                    operators=("concat",),
                    inputs=region.inputs[:operands],
                    input_shapes=region.input_shapes[:operands],
                    extra_inputs=tuple(i for i in region.extra_inputs if i < operands),
                    output_shape=shape,
                    kernel=KernelShape(has_anchor=False),
                )
            )
            concat_names[region.name, shape] = name
            region = replace(
                region,
                inputs=(name, *region.inputs[operands:]),
                input_shapes=(shape, *region.input_shapes[operands:]),
                operands=region.operands - operands + 1,
                extra_inputs=tuple(i - operands + 1 for i in region.extra_inputs if i >= operands),
                prologue=tuple(op for op in region.prologue if op != "concat"),
                operators=tuple(op for op in region.operators if op != "concat"),
                kernel=replace(
                    region.kernel,
                    extra_output_elements=max(0, region.kernel.extra_output_elements - math.prod(shape)),
                ),
            )
        regions.append(region)
    return replace(graph, regions=tuple(regions))


def _concat_operand_count(region: Region) -> int:
    """How many operands a region concatenates along channels before it computes; 0 for none."""
    leading_operators = region.prologue or _leading_operators(region)
    operand = _operand_shape(region) if "concat" in leading_operators else ()
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


def _leading_operators(region: Region) -> tuple[str, ...]:
    """Operators of a region before its pool or reduction."""
    pools = region.kernel.has_anchor and region.operator in region.operators
    return region.operators[: region.operators.index(region.operator)] if pools else ()


def _operand_shape(region: Region) -> tuple[int, ...]:
    """Shape of the map that a convolution, a pool or a reduction reads; empty for all other regions."""
    window = region.geometry if has_choice(region) else _window(region)
    return (window.n, window.h, window.w, window.c) if window else ()


def _window(region: Region) -> ConvGeometry | None:
    """Window of a pool, as that of a depthwise convolution; of a reduction, the whole map. Else None."""
    if region.kernel.pooling or region.operator not in REDUCTIONS or not region.kernel.has_anchor:
        return region.kernel.pooling
    n, h, w, _ = region.input_shapes[0] if len(region.input_shapes[0]) == 4 else (0, 0, 0, 0)
    channels = region.output_elements // max(n, 1)
    # A reduction over channels is excluded: it has h * w outputs an inference.
    if not n or h * w == channels or channels not in region.output_shape:
        return None
    return ConvGeometry(n=n, h=h, w=w, c=channels, oc=channels, kh=h, kw=w, groups=channels)


def _supported_layouts(region: Region, target: str) -> tuple[str, ...]:
    """Layouts of a region without primitives: several for elementwise operators, concatenations, pools."""
    shapes = [*region.input_shapes, region.output_shape]
    window = _window(region)
    operators = region.operators
    if window and window.pixels == window.n and region.output_elements == window.n * window.oc:
        # A single pixel has the same bytes in all layouts.
        operators, shapes = _leading_operators(region), shapes[:-1]
    is_fixed = (
        {*MOVES, "strided_slice"} & set(operators)
        or region.geometry
        or (region.kernel.has_anchor and not window)
    )
    if is_fixed or any(len(shape) != 4 for shape in shapes):
        return ("HWC",)
    has_blocks = all(shape[-1] % BLOCK == 0 for shape in shapes) and "nn.prelu" not in region.operators
    used = {primitive.layout for primitive in PRIMITIVES.values() if primitive.target == target}
    return tuple(layout for layout in LAYOUTS if layout in used and (has_blocks or layout != "CHWc16"))


def _supports_layout(region: Region, layout: str) -> bool:
    """Whether a primitive of `layout` can compute a region: its other operators have to support it too."""
    leading_operators = region.prologue[1:] if _is_chw_input(region) else region.prologue
    moved = {*MOVES, "concat", "strided_slice"} & {*leading_operators, *region.epilogue.operators}
    pixel = region.geometry.oh * region.geometry.ow == 1
    if layout == "CHWc16" and "nn.prelu" in region.operators:  # its slopes are not in blocks
        return False
    return layout == "HWC" or not moved or (pixel and not {*MOVES, "concat"} & set(leading_operators))


def _is_chw_input(region: Region) -> bool:
    """Whether a region begins with the transform of a graph input in CHW."""
    geometry, input_shapes = region.geometry, region.input_shapes[:1]
    moved = region.prologue[:1] == ("permute_dims",) or (
        geometry and input_shapes == ((geometry.n, geometry.c, geometry.h, geometry.w),)
    )
    return bool(region.prologue and moved) and region.inputs[0].startswith("%")


def _placement(layout: str) -> TensorPlacement:
    return TensorPlacement(layout=Layout(layout))


def _candidate(
    region: Region,
    layout: str,
    name: str = "",
    time_ns: float = 0.0,
    time_source: Provenance = Provenance.MEASURED,
) -> Candidate:
    primitive, tasks = PRIMITIVES.get(name), ()
    if primitive or time_ns:
        label = f"{region.name} {name or layout}"
        tasks = (Task(label=label, resource="cpu", execution_ns=time_ns, known=time_source),)
    return Candidate(
        name=name or layout,
        covers=(region.name,),
        rewrite=GpuRewrite(primitive=name),
        tasks=tasks,
        input=_placement(layout),
        output=_placement(layout),
        footprint=Footprint(
            workspace_bytes=primitive.workspace_bytes(region.geometry),
            filter_bytes=primitive.filter_bytes(region.geometry),
        )
        if primitive
        else Footprint(),
    )


@dataclass(frozen=True)
class Layers:
    """The layers of a network, and their possible layouts and transforms, for primitives of `target`.

    All that a selection needs but times, which `table` adds.
    """

    graph: RegionGraph
    target: str = "cpu"

    @functools.cached_property
    def primitive_layers(self) -> dict[str, ConvGeometry]:
        """By region that primitives can compute, its geometry."""
        return {region.name: region.geometry for region in self.graph.regions if has_choice(region)}

    @functools.cached_property
    def inputs(self) -> dict[str, TensorPlacement]:
        """The layouts of the graph's inputs, as placements."""
        first: dict[str, TensorPlacement] = {}
        for region in self.graph.regions:
            for name in region.inputs:
                if name.startswith("%"):
                    first.setdefault(name, _placement("CHW" if _is_chw_input(region) else "HWC"))
        return first

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, int, int, int]]:
        """Batch, height, width and channels of every tensor; a tensor that is no map counts as one pixel.

        So does a map of which only one axis is longer than 1: it may be a pixel with another order of axes.
        """

        def map_shape(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
            """`shape` as a map."""
            if len(shape) != 4:
                return (1, 1, 1, math.prod(shape))
            n, *rest = shape
            return shape if sum(extent > 1 for extent in rest) > 1 else (n, 1, 1, math.prod(rest))

        shapes = {region.name: map_shape(region.output_shape) for region in self.graph.regions}
        for region in self.graph.regions:
            for name, shape in zip(region.inputs, region.input_shapes):
                if name.startswith("%"):
                    n, c, h, w = shape if _is_chw_input(region) else (0, 0, 0, 0)
                    shapes.setdefault(name, (n, h, w, c) if n else map_shape(shape))
        return shapes

    @functools.cached_property
    def pools(self) -> dict[str, Pooling]:
        """By region that pools in one of several layouts, its pooling: the time depends on the layout."""
        pools = {}
        for region in self.graph.regions:
            window = None if region.name in self.primitive_layers else _window(region)
            if window and len(self.layouts[region.name]) > 1:
                pools[region.name] = Pooling(operator=region.operator, window=window)
        return pools

    @property
    def pool_layouts(self) -> list[tuple[Pooling, str]]:
        """All pairs of a pool and one of its layouts."""
        return [(pool, layout) for name, pool in self.pools.items() for layout in self.layouts[name]]

    @functools.cached_property
    def layouts(self) -> dict[str, tuple[str, ...]]:
        """By region, the possible layouts of its result."""
        layouts = {}
        for region in self.graph.regions:
            if region.name in self.primitive_layers:
                primitive_layouts = {p.layout for p in applicable_primitives(region.geometry, self.target)}
                fitting = (
                    layout
                    for layout in LAYOUTS
                    if layout in primitive_layouts and _supports_layout(region, layout)
                )
                layouts[region.name] = tuple(fitting)
            else:
                layouts[region.name] = _supported_layouts(region, self.target)
        return layouts

    @functools.cached_property
    def moves(self) -> dict[tuple[str, str, str], Move]:
        """Layout transforms that may be needed, by tensor, source layout and target layout."""
        return self._needed_moves(self.layouts)

    def _needed_moves(self, layouts: LayoutsByRegion) -> dict[tuple[str, str, str], Move]:
        readers = [(layouts[region.name], region.inputs) for region in self.graph.regions]
        readers += [((OUTPUT_PLACEMENT.layout.value,), (name,)) for name in self.graph.outputs]
        moves = {}
        for reader_layouts, names in readers:
            for tensor in names:
                placement = self.inputs.get(tensor)
                for source in (placement.layout.value,) if placement else layouts[tensor]:
                    for target in reader_layouts:
                        move = (self.shapes[tensor], source, target)
                        if not is_free(move):
                            moves[tensor, source, target] = move
        return moves

    def layouts_with_times(self, profile: Profile) -> LayoutsByRegion:
        """`layouts` without those for which `profile` lacks a time, of regions without primitives.

        A profile that was stored for other networks may lack times of transforms and of pools.
        """
        layouts = dict(self.layouts)
        for name, pool in self.pools.items():
            timed_layouts = [layout for layout in layouts[name] if (pool, layout) in profile.pools_ns]
            layouts[name] = tuple(timed_layouts) if "HWC" in timed_layouts else ("HWC",)
        for region in self.graph.regions:
            for layout in layouts[region.name]:
                if region.name not in self.primitive_layers and layout != "HWC":
                    edges = self._region_moves(region.name, layout, layouts)
                    if any(move not in profile.moves_ns for move in edges):
                        layouts[region.name] = tuple(name for name in layouts[region.name] if name != layout)
        return layouts

    def _region_moves(self, name: str, layout: str, layouts: LayoutsByRegion) -> list[Move]:
        """Transforms that may be needed if a region works in `layout`."""
        region, edges = self.graph.region(name), []
        for tensor in region.inputs:
            placement = self.inputs.get(tensor)
            edges += [
                (tensor, source, layout)
                for source in ((placement.layout.value,) if placement else layouts[tensor])
            ]
        for reader in self.graph.consumers[name]:
            edges += [(name, layout, target) for target in layouts[reader]]
        if name in self.graph.outputs:
            edges.append((name, layout, OUTPUT_PLACEMENT.layout.value))
        return [self.moves[edge] for edge in edges if edge in self.moves]

    def table(self, profile: Profile) -> CostTable:
        """The cost table: candidates and transforms with the times of `profile`.

        Raises
        ------
        ProfileError
            If a layer or a transform has no time.
        """
        layouts = self.layouts_with_times(profile)
        candidates = {
            region.name: self._candidates(region, profile, layouts[region.name])
            for region in self.graph.regions
        }
        edges = {}
        for key, move in self._needed_moves(layouts).items():
            if move not in profile.moves_ns:
                shape = "x".join(map(str, move[0]))
                raise ProfileError(
                    f"the profile has no time of a transform of {shape} from {move[1]} to {move[2]}"
                )
            label = f"{key[0]} {move[1]} to {move[2]}"
            time_ns = profile.moves_ns[move]
            task = Task(label=label, resource="cpu", execution_ns=time_ns, known=Provenance.MEASURED)
            tensor, source, target = key
            edges[tensor, _placement(source), _placement(target)] = EdgeCost(task=task)
        return CostTable(candidates=candidates, transforms=edges, inputs=self.inputs)

    def _candidates(
        self, region: Region, profile: Profile, layouts: tuple[str, ...]
    ) -> tuple[Candidate, ...]:
        if region.name not in self.primitive_layers:
            # Only differences between layouts matter: no choice changes the minimum.
            pool = self.pools.get(region.name)
            times = {layout: profile.pools_ns.get((pool, layout), 0.0) for layout in layouts}
            min_ns = min(times.values())
            return tuple(
                _candidate(region, pool_layout, time_ns=ns - min_ns) for pool_layout, ns in times.items()
            )
        layer, candidates = region.geometry, []
        for primitive in applicable_primitives(layer, self.target):
            key, time_source = (primitive.name, layer), Provenance.MEASURED
            if key not in profile.times_ns or profile.device.cpu == ANALYTIC:
                time_source = Provenance.ANALYTIC
            ns = profile.times_ns.get(key, profile.predicted_ns.get(key))
            if ns is not None and _supports_layout(region, primitive.layout):
                candidates.append(_candidate(region, primitive.layout, primitive.name, ns, time_source))
        if not candidates:
            raise ProfileError(f"the profile has no time of any primitive for layer '{region.name}', {layer}")
        return tuple(candidates)
