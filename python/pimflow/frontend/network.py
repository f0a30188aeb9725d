"""Networks from any source, loaded into canonical Relax form."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import onnx
import tvm

from pimflow import zoo
from pimflow.core.state import State
from pimflow.errors import InfeasibleError, UsageError, one_line
from pimflow.frontend import (
    onnx_graph,
    onnx_runtime,
    perturbed_relax,
    perturbed_torch,
    relax_draws,
    relax_module,
    torch_module,
    torch_program,
)
from pimflow.frontend.reference import Perturbed, Reference, Run
from pimflow.frontend.states import StatefulDecoder, fill_caches
from pimflow.host import machine
from pimflow.relay_passes.memory.operator_memory import operator_liveness

if TYPE_CHECKING:
    import torch

    Model: TypeAlias = str | os.PathLike | onnx.ModelProto | tvm.IRModule | torch.export.ExportedProgram

__all__ = ["Network", "load", "with_values"]


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network that can be searched, compiled and verified.

    Attributes
    ----------
    module : IRModule
        In canonical form; see `Canonicalise`.
    inputs : dict of str to (tuple of int, str)
        Shape and dtype of every input, in order.
    reference : Reference
        Function from inputs by name to expected outputs. It shares no code with pimflow: it is ONNX Runtime,
        PyTorch, or, for a Relax module, TVM's own pipeline.
    table_rows : dict of str to int
        Number of rows or places, by input that selects rows of a table, such as token ids, or places of a
        cache; see `zoo.index_bounds`.
    draws : dict of str to Draw
        Distributions of the other inputs that are not drawn as usual; see `zoo.example_arrays`.
    output_names : tuple of str
        Names of the outputs, in order; empty where the model does not name them.
    rounded_outputs : frozenset of int
        Indices of outputs that are rounded to integers: narrow caches.
    perturbed : Perturbed, optional
        The reference with random roundings, which reads the model again.
    states : tuple of State
        Inputs that a step updates in place and returns.
    position : str
        Name of the input that was added to say how many tokens are in the `states`; empty without one.
    """

    name: str
    module: tvm.IRModule
    inputs: dict[str, tuple[tuple[int, ...], str]]
    reference: Reference
    table_rows: dict[str, int] = field(default_factory=dict)
    draws: dict[str, zoo.Draw] = field(default_factory=dict)
    output_names: tuple[str, ...] = ()
    rounded_outputs: frozenset[int] = frozenset()
    perturbed: Perturbed | None = None
    states: tuple[State, ...] = ()
    position: str = ""

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return relax_module.outputs(self.module)

    def drop_reference(self) -> Network:
        """The same network without its reference, which takes half of the memory."""
        return replace(self, reference=Reference(_no_reference))

    def require_memory(self) -> None:
        """Raise `InfeasibleError` if weights and live tensors in fp32 exceed the memory of this machine.

        This is a lower bound on what the computation takes.
        """
        tensors = operator_liveness(self.module).peak_bytes
        needed, available = relax_module.weight_bytes(self.module) + tensors, machine.memory_bytes()
        if needed > available:
            subject = f"'{self.name}': its weights and its tensors at once, on this machine"
            raise InfeasibleError(
                subject, needed, available, "bytes", ["a smaller --batch", "smaller shapes"]
            )

    def example_inputs(self, draws: Mapping[str, zoo.Draw] | None = None) -> dict[str, np.ndarray]:
        """Example values of all inputs, equal on every machine; see `zoo.example_inputs`.

        Parameters
        ----------
        draws : mapping of str to Draw, optional
            By input, a distribution that replaces that of the network.

        Raises
        ------
        InfeasibleError
            See `require_memory`.
        """
        self.require_memory()
        draws = draws or {}
        arrays = zoo.example_arrays(self.inputs, rows=self.table_rows, draws={**self.draws, **draws})
        if self.states:
            given = {name: arrays[name] for name in draws}
            fill_caches(self.position, self.table_rows.get(self.position, 0), arrays)
            arrays |= given
        return arrays


def _no_reference() -> Run:
    raise AssertionError("the reference was released")


def load(
    model: Model,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    batch: int | None = None,
    *,
    context: int | None = None,
    places: int | None = None,
    states: Mapping[str, str] | None = None,
) -> Network:
    """Load a network into canonical Relax form.

    Parameters
    ----------
    model : str, path, ModelProto, IRModule or ExportedProgram
        Name in the embedded zoo, an ``.onnx`` or ``.pt2`` file, or the content of such a file; or a Relax
        module whose weights are constants.
    shapes : mapping of str to tuple of int, optional
        Shapes of inputs that the model leaves open.
    batch : int, optional
        Inferences at once, which replaces the first dimension of every input of an ONNX model.
    context : int, optional
        For a decoder in ONNX or PyTorch: caches have places for this number of tokens, and a step writes its
        own tokens into them in place; see `KeepStates`. Open shapes of the model follow from it.
    places : int, optional
        With a context: number of places of the caches, of which the step reads the first `context`; equal to
        `context` by default.
    states : mapping of str to str, optional
        With a context: inputs that are caches, and the outputs with their new values, in addition to those
        that names and shapes show; see `zoo.state_pairs`.

    Raises
    ------
    UsageError
        For a module of PyTorch that is not exported; for a batch, a context or states with another kind of
        model, and for states without a context.
    UnknownNameError, ModelError
        If there is no such network, or the file cannot be read.
    UnsupportedOpError
        If the network uses an operator that cannot be imported.
    """
    if torch_module.is_module(model):
        raise UsageError(
            "a torch.nn.Module says no shapes: give pimflow.compile its arguments too, as in "
            "compile(module, (x,)), or give what torch.export.export(module, (x,)) returns"
        )
    shapes = dict(shapes or {})
    program = torch_program.is_program(model)
    if batch is not None and (program or isinstance(model, tvm.IRModule)):
        raise UsageError("a batch is set in ONNX models alone; give the shapes of the inputs")
    if (context is not None or states) and isinstance(model, tvm.IRModule):
        raise UsageError("caches of Relax modules cannot stay in place; give no context and no states")
    if states and context is None:
        raise UsageError("states need a context: how many tokens their caches hold")
    if isinstance(model, tvm.IRModule):
        fixed = relax_module.with_shapes(model, shapes)
        module, reference = relax_module.canonical(fixed), relax_module.reference(fixed)
        return Network(
            name="module",
            module=module,
            inputs=relax_module.inputs(module),
            reference=reference,
            table_rows=relax_draws.index_bounds(module),
            draws=relax_draws.input_draws(module),
            perturbed=functools.partial(perturbed_relax.reference_with_roundings, fixed),
        )
    if program:
        return _torch_network(model, shapes, context, places, states)
    return _onnx_network(model, shapes, batch, context, places, states)


def with_values(model: Model, values: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """An ONNX model with inputs as constants; see `zoo.with_values`, whose errors it raises.

    Raises
    ------
    UsageError
        For a model of another kind.
    """
    if isinstance(model, str | os.PathLike | onnx.ModelProto) and zoo.is_onnx(model):
        return zoo.with_values(model, values)
    raise UsageError("values of inputs are set in ONNX models alone; export the program with these constants")


def _torch_network(
    model: Model,
    shapes: dict[str, tuple[int, ...]],
    context: int | None,
    places: int | None,
    states: Mapping[str, str] | None,
) -> Network:
    """The network of a PyTorch program; parameters as of `load`."""
    imported, pairs = torch_program.load(model), {}
    if context is not None:
        explicit = {**imported.caches, **(states or {})}
        pairs = zoo.state_pairs(imported.data, imported.outputs, explicit)
        shapes = zoo.context_shapes(imported.data, imported.outputs, pairs, context, shapes)
    module = imported.canonical(shapes)
    network = Network(
        name=_default_name(model) if isinstance(model, str | os.PathLike) else imported.name,
        module=module,
        inputs=relax_module.inputs(module),
        reference=imported.reference,
        table_rows=relax_draws.index_bounds(module),
        draws=relax_draws.input_draws(module),
        output_names=imported.results,
        perturbed=functools.partial(
            perturbed_torch.reference_with_roundings,
            functools.partial(torch_program.open_program, model),
            imported.inputs,
            imported.buffers,
        ),
    )
    return network if context is None else _with_caches(network, pairs, places)


def _onnx_network(
    model: Model,
    shapes: dict[str, tuple[int, ...]],
    batch: int | None,
    context: int | None,
    places: int | None,
    states: Mapping[str, str] | None,
) -> Network:
    """The network of an ONNX model or of a name in the zoo; parameters as of `load`."""
    # Random weights are drawn later, directly into their final memory.
    state_options = {} if context is None else {"context": context, "states": dict(states or {})}
    read = functools.partial(zoo.load_model, model, shapes, batch=batch, seed=None, **state_options)
    exact = zoo.load_exact(model, shapes, batch=batch, seed=None, **state_options)
    proto = read() if zoo.has_double(exact) else exact
    name = (
        one_line(proto.graph.name) or "model" if isinstance(model, onnx.ModelProto) else _default_name(model)
    )
    network = Network(
        name=name,
        module=onnx_graph.from_onnx(proto),
        inputs=zoo.input_types(proto),
        reference=onnx_runtime.reference(exact, proto),
        table_rows=zoo.index_bounds(proto),
        draws=zoo.input_draws(proto),
        output_names=tuple(output.name for output in proto.graph.output),
        rounded_outputs=frozenset(
            index for index, output in enumerate(proto.graph.output) if zoo.cache_mark(output)
        ),
        perturbed=functools.partial(onnx_runtime.reference_with_roundings, read),
    )
    if context is None:
        return network
    data = [value for value in proto.graph.input if value.name in network.inputs]
    return _with_caches(network, zoo.state_pairs(data, proto.graph.output, states), places)


def _with_caches(network: Network, pairs: Mapping[str, str], places: int | None) -> Network:
    """`network` with caches that are updated in place; `pairs` are from `zoo.state_pairs`."""
    names = list(network.output_names)
    results = {past: names.index(present) for past, present in pairs.items()}
    decoder = StatefulDecoder.from_module(network.module, network.inputs, results, places)
    # The kernel that appends would write to the last place for any index above it.
    free = {decoder.position: decoder.free_places} if decoder.position else {}
    return replace(
        network,
        module=decoder.module,
        inputs=decoder.inputs,
        table_rows={**network.table_rows, **free},
        reference=decoder.reference(network.reference),
        perturbed=network.perturbed and decoder.reference_with_roundings(network.perturbed),
        states=decoder.states,
        position=decoder.position,
    )


def _default_name(model: object) -> str:
    """The default name of a network."""
    if not isinstance(model, str | os.PathLike):
        return "module"
    text = os.fspath(model)
    return text if text in zoo.all_names() else one_line(Path(text).stem)
