"""Caches of decoders in PyTorch programs: buffers that are written to, and writes at a position."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tvm import relax

from pimflow.errors import ModelError, UnsupportedOpError, last_line
from pimflow.frontend.reference import Run
from pimflow.frontend.torch_precision import graph_module_copy
from pimflow.frontend.torch_scatter import rows_written
from pimflow.relay_passes.caches import append_tokens
from pimflow.relay_passes.flat import shape

if TYPE_CHECKING:
    import torch

# By operator, which operand is the tensor of which a part is replaced.
_WRITES = {"index_put": 0, "index_copy": 0, "where": 2, "copy": 1, "cat": 0}
_ALIASES = ("alias", "clone", "_to_copy", "lift_fresh_copy", "detach")
_CACHE_RANK, _TOKEN_AXIS = 4, 2


def written_buffers(program: torch.export.ExportedProgram) -> dict[str, str]:
    """Buffers that a functional program writes to, by their inputs, in the order of its outputs."""
    signature = program.graph_signature
    names = {target: name for name, target in signature.inputs_to_buffers.items()}
    return {names[target]: target for target in signature.buffers_to_mutate.values()}


def with_buffers_as_inputs(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """A functional program whose written buffers are inputs, and their new values outputs, for import."""
    from torch.export.graph_signature import (
        ExportGraphSignature,
        InputKind,
        InputSpec,
        OutputKind,
        OutputSpec,
    )

    written = set(written_buffers(program).values())
    if not written:
        return program
    signature = program.graph_signature
    inputs = [
        InputSpec(InputKind.USER_INPUT, spec.arg, None) if spec.target in written else spec
        for spec in signature.input_specs
    ]
    outputs = [
        OutputSpec(OutputKind.USER_OUTPUT, spec.arg, None)
        if spec.kind is OutputKind.BUFFER_MUTATION
        else spec
        for spec in signature.output_specs
    ]
    changed = copy.copy(program)
    changed._graph_signature = ExportGraphSignature(inputs, outputs)
    changed._constants = {name: value for name, value in program.constants.items() if name not in written}
    return changed


def without_constant_inputs(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """A program without the inputs that are no tensors: it was exported for their values, and reads none."""
    from torch.export.graph_signature import ConstantArgument, ExportGraphSignature

    signature = program.graph_signature
    constants = {spec.arg.name for spec in signature.input_specs if isinstance(spec.arg, ConstantArgument)}
    if not constants:
        return program
    inputs = [spec for spec in signature.input_specs if spec.arg.name not in constants]
    changed = copy.copy(program)
    changed._graph_signature = ExportGraphSignature(inputs, list(signature.output_specs))
    changed._graph_module = graph_module_copy(program)
    for node in changed.graph_module.graph.nodes:
        if node.op == "placeholder" and node.name in constants and not node.users:
            changed.graph_module.graph.erase_node(node)
    return changed


def cache_pairs(program: torch.export.ExportedProgram) -> dict[str, str]:
    """By input that is a cache, the output that is this cache with tokens written into it or behind it."""
    inputs = set(program.graph_signature.user_inputs)
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    pairs: dict[str, str] = {}
    for node in output.args[0]:
        source = _find_write_target(node)
        value = None if source is None else source.meta.get("val")
        if value is not None and source.name in inputs and value.dim() == _CACHE_RANK:
            pairs.setdefault(source.name, node.name)
    return pairs


def _find_write_target(node: Any) -> Any:
    """The placeholder into which the operators that make `node` write; None if it is made otherwise."""
    has_written = False
    while getattr(node, "op", "") == "call_function":
        kind = str(node.target).removeprefix("aten.").partition(".")[0]
        if kind in _WRITES:
            has_written, node = True, node.args[_WRITES[kind]]
            if kind == "cat":
                node = next((part for part in node if not _is_empty(part)), None)
        elif kind in _ALIASES:
            node = node.args[0]
        else:
            return None
    return node if has_written and getattr(node, "op", "") == "placeholder" else None


def _is_empty(node: Any) -> bool:
    value = node.meta.get("val")
    return value is not None and value.dim() == 1 and value.shape[0] == 0


def converters() -> dict[str, Callable[[torch.fx.Node, Any], relax.Expr]]:
    """Conversions for TVM's importer, by operator: as its own, except for what caches need."""
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

    def concat(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
        """A Concat; PyTorch ignores empty tensors of one dimension, whatever the others have."""
        parts, *rest = importer.retrieve_args(node)
        kept = [part for part in parts if _static_shape(part) != (0,)] or list(parts)[:1]
        axis = rest[0] if rest else node.kwargs.get("dim", 0)
        return kept[0] if len(kept) == 1 else importer.block_builder.emit(relax.op.concat(kept, axis=axis))

    def index_put(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
        """A write of one token to a cache or of rows, or TVM's conversion."""
        data, indices, *_ = node.args
        places = [axis for axis, index in enumerate(indices) if index is not None]
        adds = node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False)
        index = indices[_TOKEN_AXIS] if places == [_TOKEN_AXIS] and not adds else None
        result = index and _write_token(importer, *(importer.env[x] for x in (data, index, node.args[2])))
        result = rows_written(node, importer) if result is None else result
        return importer._index_put(node) if result is None else result

    def index_copy(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
        """A write of one token to a cache."""
        data, axis, index, values = node.args
        operands = [importer.env[x] for x in (data, index, values)]
        result = _write_token(importer, *operands) if axis in (2, -2) else None
        if result is None:
            raise NotImplementedError("index_copy writes no token into a cache of four dimensions")
        return result

    return {"cat.default": concat, "index_put.default": index_put, "index_copy.default": index_copy}


def _write_token(importer: Any, cache: relax.Var, place: relax.Expr, new: relax.Expr) -> relax.Expr | None:
    """`cache` with one token `new` at `place`; None if these are something else."""
    builder, operands = importer.block_builder, (cache, place, new)
    dims, place_dims, new_dims = map(_static_shape, operands)
    if len(dims) != _CACHE_RANK or place_dims != (1,) or str(cache.ty.dtype) != "float32":
        return None
    token_dims = (*dims[:2], 1, dims[3])
    if new_dims != token_dims:
        if (1,) * (_CACHE_RANK - len(new_dims)) + new_dims != token_dims:
            return None
        new = builder.emit(relax.op.reshape(new, token_dims))
    position = place if dims[0] == 1 else builder.emit(relax.op.broadcast_to(place, dims[:1]))
    return append_tokens(cache, new, position, lambda value, name: builder.emit(value, name_hint=name))


def _static_shape(expr: relax.Expr) -> tuple[int, ...]:
    """The shape of a tensor; empty if a dimension is open."""
    try:
        return shape(expr)
    except UnsupportedOpError:
        return ()


def program_runner(
    program: torch.export.ExportedProgram,
    names: Sequence[str],
    buffers: Mapping[str, str],
    interpreter: Callable[[Any], torch.fx.Interpreter] | None = None,
    *,
    check_guards: bool = True,
) -> Run:
    """A function that runs a program for all inputs by name, and returns its results in order.

    Parameters
    ----------
    names : sequence of str
        Names of its inputs in the functional program, in order.
    buffers : mapping of str to str
        `written_buffers`: they are set before a run, and are the first results after it.
    interpreter : callable, optional
        Gives what runs the program's module.
    check_guards : bool
        Whether shapes are refused for which the program was not exported.
    """
    import torch
    from torch.export.graph_signature import ConstantArgument, InputKind
    from torch.utils import _pytree

    signature, in_spec = program.graph_signature, program.call_spec.in_spec
    inputs = [spec.arg for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
    module = program.module(check_guards=check_guards)
    runner = interpreter and interpreter(module)
    types = {node.name: getattr(node.meta.get("val"), "dtype", None) for node in program.graph.nodes}

    def run(values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Results of the program."""
        tensors = {name: torch.from_numpy(value.copy()) for name, value in values.items()}
        flat = [
            arg.value if isinstance(arg, ConstantArgument) else tensors[name].to(types[arg.name])
            for name, arg in zip(names, inputs, strict=True)
        ]
        args, kwargs = _pytree.tree_unflatten(flat, in_spec)
        with torch.no_grad():
            for name, target in buffers.items():
                module.get_buffer(target).copy_(tensors[name])
            try:
                if runner is None:
                    result = module(*args, **kwargs)
                else:
                    result = runner.run(*flat, enable_io_processing=False)
            except RuntimeError as error:  # as a division of integers by zero
                advice = "give inputs that it is made for (--inputs, --input)"
                raise ModelError(
                    f"PyTorch cannot run it on these inputs: {last_line(error)}; {advice}"
                ) from error
            written = [module.get_buffer(target).clone() for target in buffers.values()]
        return [y.numpy() for y in (*written, *_pytree.tree_leaves(result))]

    return run
