"""The precision of PyTorch's programs: fp32 in place of other types, as `zoo.precision` does with ONNX's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pimflow.errors import UnsupportedOpError

if TYPE_CHECKING:
    import torch
    from torch.export.graph_signature import InputSpec, OutputSpec

_CASTS = ("_to_copy", "to", "type_as", "float", "half", "bfloat16")
# Operators whose results may change completely if an operand changes by a rounding.
_DECIDING = ("argmax", "argmin", "eq", "ge", "gt", "le", "lt", "ne", "round", "floor", "ceil", "topk", "sort")


def without_narrow(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """`program` in fp32 where it is in bf16 or fp16; itself if it has none.

    What is stored in 16 bits is decided by the system. A cast stays whose result is only cast back or
    compared: its purpose is to round.

    Raises
    ------
    UnsupportedOpError
        If the program reads bits of such a type.
    """
    import torch

    return _single_program(program, (torch.bfloat16, torch.float16))


def single_precision(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """`program` in fp32 where it is in another floating-point type; see `without_narrow`.

    One that makes fp64 of integers keeps fp64: fp32 would change integers above 2^24.
    """
    import torch

    program = without_narrow(program)
    return program if _has_whole_doubles(program) else _single_program(program, (torch.float64,))


def _has_whole_doubles(program: torch.export.ExportedProgram) -> bool:
    """Whether a node has an fp64 result of an operand that is an integer."""
    import torch

    for node in _nodes(program.graph_module):
        operands = [_dtype(arg) for arg in node.args if isinstance(arg, torch.fx.Node)]
        is_integer = [dtype is not None and not dtype.is_floating_point for dtype in operands]
        if _dtype(node) is torch.float64 and any(is_integer) and torch.bool not in operands:
            return True
    return False


def result_types(program: torch.export.ExportedProgram) -> list[torch.dtype | None]:
    """Types of what the module of `program` returns; None of what is no tensor."""
    return [_dtype(node) for node, spec in _results(program) if spec.kind.name == "USER_OUTPUT"]


def cast_results(
    program: torch.export.ExportedProgram, types: Sequence[torch.dtype | None], kept: Collection[str]
) -> torch.export.ExportedProgram:
    """A functional program whose last results are of `types`, but for those named in `kept`."""
    import torch
    from torch.export.graph_signature import ExportGraphSignature, OutputSpec, TensorArgument

    result = copy.copy(program)
    result._graph_module = graph_module_copy(program)
    nodes, specs = map(list, zip(*_results(result), strict=True))
    graph = result.graph_module.graph
    output = graph.output_node()
    for index, dtype in enumerate(types, len(nodes) - len(types)):
        node = nodes[index]
        if dtype in (None, _dtype(node)) or node.name in kept:
            continue
        with graph.inserting_before(output):
            cast = graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
        cast.meta["val"] = node.meta["val"].to(dtype)
        nodes[index] = cast
        specs[index] = OutputSpec(specs[index].kind, TensorArgument(name=cast.name), None)
    output.args = (tuple(nodes),)
    result.graph_module.recompile()
    result._graph_signature = ExportGraphSignature(list(program.graph_signature.input_specs), specs)
    return result


def graph_module_copy(program: torch.export.ExportedProgram) -> torch.fx.GraphModule:
    """A copy of a program's graph; nodes keep names that PyTorch would change, such as ``input``."""
    module = copy.deepcopy(program.graph_module)
    for node, source in zip(module.graph.nodes, program.graph.nodes, strict=True):
        node.name = source.name
        if node.op == "placeholder":
            node.target = source.target
    return module


def _results(program: torch.export.ExportedProgram) -> list[tuple[Any, OutputSpec]]:
    """What a program returns: nodes or constants, each with what it is."""
    specs = program.graph_signature.output_specs
    return list(zip(program.graph.output_node().args[0], specs, strict=True))


def _single_program(
    program: torch.export.ExportedProgram, kinds: Collection[torch.dtype]
) -> torch.export.ExportedProgram:
    """`program` in fp32 where it is of `kinds`."""
    import torch

    if not any(_dtype(node) in kinds for node in _nodes(program.graph_module)):
        return program

    def single(value: Any) -> Any:
        """A value or type of an argument, in fp32 if it is of `kinds`."""
        if isinstance(value, torch.dtype):
            return torch.float32 if value in kinds else value
        if not isinstance(value, torch.Tensor) or value.dtype not in kinds:
            return value
        wide = value.detach().to(torch.float32)
        is_parameter = isinstance(value, torch.nn.Parameter)
        return torch.nn.Parameter(wide, requires_grad=False) if is_parameter else wide

    modules = graph_module_copy(program)
    for module in _graph_modules(modules):
        _retype(module, kinds, single)
    for node in modules.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = _converted(node.meta.get("val"), single)
    return rebuilt_program(
        program,
        modules,
        program.graph_signature.input_specs,
        {name: single(value) for name, value in program.state_dict.items()},
        {name: single(value) for name, value in program.constants.items()},
    )


def rebuilt_program(
    program: torch.export.ExportedProgram,
    module: torch.fx.GraphModule,
    specs: Sequence[InputSpec],
    state_dict: dict[str, Any],
    constants: dict[str, Any],
) -> torch.export.ExportedProgram:
    """`program` with another graph, whose inputs have their types, and with other weights."""
    from torch.export.graph_signature import ExportGraphSignature

    _infer_types(module)
    return type(program)(
        root=module,
        graph=module.graph,
        graph_signature=ExportGraphSignature(list(specs), list(program.graph_signature.output_specs)),
        state_dict=state_dict,
        range_constraints=copy.deepcopy(program.range_constraints),
        module_call_graph=copy.deepcopy(program.module_call_graph),
        constants=constants,
        verifiers=program.verifiers,
    )


def _retype(module: torch.fx.GraphModule, kinds: Collection[torch.dtype], single: Any) -> None:
    """Make types in arguments of all nodes fp32, in place, but for casts that are to round."""
    import torch

    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        operator = operator_name(node)
        if operator == "view" and isinstance(node.args[-1], torch.dtype):
            types = _dtype(node.args[0]), _dtype(node)
            if set(types) & set(kinds):
                raise UnsupportedOpError(f"'{node.name}' takes the bits of {types[0]} as {types[1]}")
        if operator in _CASTS and _dtype(node) in kinds and _rounds(node):
            with graph.inserting_after(node):
                wide = graph.call_function(torch.ops.aten.to.dtype, (node, torch.float32))
            wide.meta = {key: value for key, value in node.meta.items() if key != "val"}
            node.replace_all_uses_with(wide, lambda reader, wide=wide: reader is not wide)
            continue
        node.args = torch.fx.node.map_aggregate(node.args, single)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, single)
    module.recompile()


def _rounds(cast: torch.fx.Node) -> bool:
    """Whether a cast is to round: its result is only compared, or cast back."""
    readers = {operator_name(reader) for reader in cast.users} - {"_assert_tensor_metadata"}
    return bool(readers) and readers <= {*_CASTS, *_DECIDING}


def _converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    """`value` converted, where it is a tensor without data, by its mode."""
    if not hasattr(value, "fake_mode"):
        return value
    with value.fake_mode:
        return convert(value)


def _infer_types(module: torch.fx.GraphModule) -> None:
    """Infer the types of all nodes anew, in place, from those of the inputs."""
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    values = [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]
    mode = next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)
    FakeTensorProp(module, mode).propagate_dont_convert_inputs(*values)
    for node in module.graph.nodes:
        node.meta.pop("tensor_meta", None)  # of the types before


def _graph_modules(module: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    """A module, and those of its control flow."""
    import torch

    return (part for part in module.modules() if isinstance(part, torch.fx.GraphModule))


def _nodes(module: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    return (node for part in _graph_modules(module) for node in part.graph.nodes)


def _dtype(node: Any) -> torch.dtype | None:
    """The type of a node's result, of the first if there are several; None if it is no tensor."""
    value = node.meta.get("val") if hasattr(node, "meta") else None
    first = value[0] if isinstance(value, list | tuple) and value else value
    return getattr(first, "dtype", None)


def operator_name(node: torch.fx.Node) -> str:
    """Name of an operator of ``aten``, such as ``conv2d`` of ``aten.conv2d.default``; else empty."""
    text = str(node.target)
    return text.split(".")[1] if node.op == "call_function" and text.startswith("aten.") else ""
