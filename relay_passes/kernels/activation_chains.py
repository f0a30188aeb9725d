"""Runs of layers that may be one kernel, without whole tensors stored between the layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

from pimflow.relay_passes.flat import (
    LAYER_NAMES,
    LAYER_ROLES,
    cached_by_module,
    main_bindings,
    operator,
    shape,
    use_counts,
)
from pimflow.relay_passes.operators import BINARY, POOL, UNARY
from pimflow.relay_passes.regions.extract_regions import region_groups


def activation_chains(mod: tvm.IRModule) -> list[list[str]]:
    """Runs of ``lconv``, elementwise operators, at most one pooling, ``fconv`` of a decomposed module.

    A run ends at its pooling if other readers than one ``fconv`` follow, such as a residual block: this also
    avoids the map in front of the pooling. Layers are found by their roles. Several ``lconv`` are in one run
    where their maps are added up, such as a residual that is restored. The other operands of elementwise
    operators are constants: a tensor from outside would be a full map. The convolutions read every pixel at
    most once. The last result of a run is its only one: a tensor with other readers, such as a skip
    connection that is not restored, ends it.
    """
    graph, chains, pooled = RunGraph.from_module(mod), [], []
    for binding in main_bindings(mod):
        is_pooling = operator(binding.value) in POOL
        if not (is_pooling or graph.has_role(binding, "fconv", strides=True)):
            continue
        run = graph.run_to(binding)
        if run:
            (pooled if is_pooling else chains).append([graph.names[b.var] for b in run])
    inside = {layer for chain in chains for layer in chain}
    chains += [run for run in pooled if run[-1] not in inside]
    place = {layer: index for index, layer in enumerate(graph.names.values())}
    return sorted(chains, key=lambda chain: place[chain[0]])


@cached_by_module
def chain_regions(mod: tvm.IRModule, *, views: bool = True) -> list[tuple[str, ...]]:
    """The runs of `activation_chains` that consist of whole regions, as names of regions.

    The last region may have further elementwise operators, such as the sum of parts, and `trailing_moves`,
    such as the flattening behind a pooling. A region with other operators is in no run: a group has no
    formula for them.
    """
    groups, layers = region_groups(mod, views=views), LAYER_NAMES.read(mod)

    def layer(binding: relax.VarBinding) -> str:
        """The layer of a binding."""
        return layers.get(binding.var.name, binding.var.name)

    region_of = {layer(b): name for name, group in groups.items() for b in group.bindings}
    runs = []
    for chain in activation_chains(mod):
        names = tuple(dict.fromkeys(map(region_of.__getitem__, chain)))
        inside = set(chain)
        rest = [b for name in names for b in groups[name].bindings if layer(b) not in inside]
        last = groups[names[-1]]
        by_pixel = rest[: len(rest) - len(trailing_moves(rest))]
        goes_on = (
            last.bindings[-len(rest) :] == rest
            and not last.extra_outputs
            and all(map(_is_by_pixel, by_pixel))
        )
        if names[0] == chain[0] and (not rest or goes_on):
            runs.append(names)
    return runs


def trailing_moves(bindings: Sequence[relax.VarBinding]) -> Sequence[relax.VarBinding]:
    """The last of `bindings`, as far as they only move elements: each permutes or reshapes the one before."""
    count = 0
    while count < len(bindings) and operator(bindings[-1 - count].value) in ("permute_dims", "reshape"):
        count += 1
    return bindings[len(bindings) - count :]


def region_runs(mod: tvm.IRModule, *, views: bool = True) -> tuple[tuple[str, ...], ...]:
    """The `chain_regions` whose regions are consecutive in execution order."""
    order = list(region_groups(mod, views=views))
    begins = {name: position for position, name in enumerate(order)}
    return tuple(
        run
        for run in chain_regions(mod, views=views)
        if tuple(order[begins[run[0]] : begins[run[0]] + len(run)]) == run
    )


@dataclass(frozen=True)
class RunGraph:
    """Facts about ``main`` that a search for runs needs, computed once.

    Attributes
    ----------
    bindings, names, roles : dict
        Binding and layer name of each variable; role of each layer that has one.
    counts : dict
        How many bindings read each variable; the result of ``main`` counts as one.
    order : dict
        Position of each variable's binding.
    """

    bindings: dict[relax.Var, relax.VarBinding]
    names: dict[relax.Var, str]
    roles: dict[str, str]
    operands: dict[relax.Var, list[relax.Var]]
    readers: dict[relax.Var, list[relax.VarBinding]]
    counts: dict[relax.Var, int]
    order: dict[relax.Var, int]

    @classmethod
    def from_module(cls, mod: tvm.IRModule) -> RunGraph:
        """Facts about ``main`` of `mod`."""
        operands: dict[relax.Var, list[relax.Var]] = {}
        readers: dict[relax.Var, list[relax.VarBinding]] = {}
        bindings, names, order, layers = {}, {}, {}, LAYER_NAMES.read(mod)
        for position, binding in enumerate(main_bindings(mod)):
            bindings[binding.var] = binding
            names[binding.var] = layers.get(binding.var.name, binding.var.name)
            order[binding.var] = position
            operands[binding.var] = list(dict.fromkeys(relax.analysis.free_vars(binding.value)[:]))
            for var in operands[binding.var]:
                readers.setdefault(var, []).append(binding)
        return cls(bindings, names, LAYER_ROLES.read(mod), operands, readers, use_counts(mod), order)

    def is_isolated(self, run: Sequence[relax.VarBinding | None]) -> bool:
        """Whether all bindings of `run` exist, and only the last one has readers outside."""
        if None in run:
            return False
        inside = {binding.var for binding in run}
        return all(
            self.counts[binding.var] == len(readers) and all(reader.var in inside for reader in readers)
            for binding in run[:-1]
            for readers in (self.readers.get(binding.var, []),)
        )

    def has_role(self, binding: relax.VarBinding, role: str, strides: bool = False) -> bool:
        """Whether `binding` is a dense convolution with this role that reads every pixel at most once.

        With `strides`, it may leave pixels out.
        """
        kind = operator(binding.value)
        if kind != "nn.conv2d" or self.roles.get(self.names[binding.var]) != role:
            return False
        attrs = binding.value.attrs
        is_whole = strides or all(int(stride) == 1 for stride in attrs.strides)
        return int(attrs.groups) == 1 and is_whole and not any(map(int, attrs.padding))

    def run_to(self, last: relax.VarBinding, begins: Collection[relax.Var] = ()) -> list[relax.VarBinding]:
        """The run that ends at `last`, in execution order; empty if there is none.

        On all ways it begins at an ``lconv``, or at one of `begins`; nothing else reads what lies between.
        """
        inside, waiting, poolings = {last.var: last}, [last], int(operator(last.value) in POOL)
        if poolings and not _fusible_pooling(last.value):
            return []
        while waiting:
            reader = waiting.pop()
            for var in self.operands[reader.var]:
                binding = self.bindings.get(var)
                if var in inside:
                    continue
                is_begin = binding is not None and (var in begins or self.has_role(binding, "lconv"))
                if binding is None or not (is_begin or _joins_run(binding)):
                    return []
                poolings += operator(binding.value) in POOL
                inside[var] = binding
                waiting += [] if is_begin else [binding]
        run = sorted(inside.values(), key=lambda b: self.order[b.var])
        return run if poolings <= 1 and self.is_isolated(run) else []


def _joins_run(binding: relax.VarBinding) -> bool:
    """Whether a run may have `binding` between its convolutions."""
    kind = operator(binding.value)
    if kind in POOL:
        return _fusible_pooling(binding.value)
    return kind in UNARY + BINARY and _is_by_channel(binding.value) and _has_equal_shapes(binding)


def _fusible_pooling(call: relax.Call) -> bool:
    """Whether all windows have the same divisor; those of a mean without the padding have not."""
    attrs = call.attrs
    fixed = operator(call) == "nn.max_pool2d" or not any(map(int, attrs.padding)) or attrs.count_include_pad
    return attrs.layout == "NHWC" and bool(fixed) and not attrs.ceil_mode


def _is_by_pixel(binding: relax.VarBinding) -> bool:
    """Whether `binding` computes a feature map elementwise, from maps of its shape or one value a channel."""
    call, dims = binding.value, shape(binding.var)
    elementwise = operator(call) in UNARY + BINARY and _is_by_channel(call)
    return elementwise and len(dims) == 4 and _has_equal_shapes(binding)


def _has_equal_shapes(binding: relax.VarBinding) -> bool:
    """Whether all tensors that an elementwise operator reads have the shape of its result."""
    tensors = [arg for arg in binding.value.args if isinstance(arg, relax.Var)]
    return all(shape(tensor) == shape(binding.var) for tensor in tensors)


def _is_by_channel(call: relax.Call) -> bool:
    """Whether constant operands of `call` vary only along channels, so that they also fit a wider map."""
    constants = [arg.value.shape for arg in call.args if isinstance(arg, tvm.ir.GenericConst)]
    last = operator(call) != "nn.prelu" or int(call.attrs.axis) in (-1, 3)
    return last and all(int(dim) == 1 for dims in constants for dim in dims[:-1])
