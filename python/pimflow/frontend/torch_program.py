"""PyTorch programs: ``torch.export.ExportedProgram`` and the ``.pt2`` files that hold them."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import tvm
from tvm import relax

from pimflow.errors import ModelError, PimflowError, UnsupportedOpError, UsageError, last_line
from pimflow.frontend import relax_module, torch_archive, torch_experts, torch_recurrent
from pimflow.frontend.naming import anchor_of, layer_names, with_names
from pimflow.frontend.reference import Reference, Run
from pimflow.frontend.torch_caches import (
    cache_pairs,
    converters,
    program_runner,
    with_buffers_as_inputs,
    without_constant_inputs,
    written_buffers,
)
from pimflow.frontend.torch_complex import split_complex
from pimflow.frontend.torch_control_flow import inline_control_flow
from pimflow.frontend.torch_decompositions import DECOMPOSITIONS
from pimflow.frontend.torch_module import program_name
from pimflow.frontend.torch_operators import CONVERTERS, KEPT_OPERATORS
from pimflow.frontend.torch_precision import cast_results, result_types, single_precision, without_narrow
from pimflow.host import stderr
from pimflow.relay_passes.flat import main_bindings

if TYPE_CHECKING:
    import torch


_OPEN_SIZE = "Cannot use and / or / not operator to Expr"  # what TVM says if one is compared


def is_program(model: object) -> bool:
    """Whether `model` is a program of PyTorch, imported or not, or the path of a ``.pt2`` file."""
    if isinstance(model, TorchProgram):
        return True
    if isinstance(model, str | os.PathLike):
        return Path(model).suffix == ".pt2"
    loaded = sys.modules.get("torch.export")
    return loaded is not None and isinstance(model, loaded.ExportedProgram)


@dataclass(frozen=True, kw_only=True)
class TorchProgram:
    """An imported program of PyTorch; dimensions of its inputs may be open.

    Attributes
    ----------
    module : IRModule
        Layers have the names of their torch modules.
    inputs : tuple of str
        Names of the inputs, in order, without buffers that it writes to.
    results : tuple of str
        Names of the outputs, in order. New values of buffers that it writes to are the first.
    caches : dict of str to str
        By input that is a cache, the output that is this cache with tokens written into it or behind it.
    buffers : dict of str to str
        Buffers that it writes to, by the input that has their values.
    program : ExportedProgram
        The program as it was.
    reference : Reference
        PyTorch as the reference.
    """

    name: str
    program: torch.export.ExportedProgram
    module: tvm.IRModule
    inputs: tuple[str, ...]
    results: tuple[str, ...]
    caches: dict[str, str]
    buffers: dict[str, str]
    reference: Reference

    def canonical(self, shapes: Mapping[str, tuple[int, ...]]) -> tvm.IRModule:
        """The canonical module for these input shapes; raises the errors of `relax_module.with_shapes`."""
        return relax_module.canonical(relax_module.with_shapes(self.module, shapes), self.name)

    def reads(self, name: str) -> bool:
        """Whether an operator reads an input; one that is returned as it is does not count."""
        (param,) = (param for param in relax_module.main(self.module).params if param.name == name)
        values = (binding.value for binding in main_bindings(self.module))
        return any(
            param in relax.analysis.free_vars(value) for value in values if not isinstance(value, relax.Tuple)
        )

    @property
    def data(self) -> list[onnx.ValueInfoProto]:
        """The inputs, in ONNX's form."""
        return [_value(param.name, param.ty) for param in relax_module.main(self.module).params]

    @property
    def outputs(self) -> list[onnx.ValueInfoProto]:
        """The outputs, in ONNX's form."""
        types = _returned(self.module)
        return [_value(name, tensor_type) for name, tensor_type in zip(self.results, types, strict=True)]


def _value(name: str, tensor: relax.TensorType) -> onnx.ValueInfoProto:
    dtype = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(str(tensor.dtype)))
    return onnx.helper.make_tensor_value_info(name, dtype, relax_module.sizes(tensor))


def load(model: str | os.PathLike | torch.export.ExportedProgram | TorchProgram) -> TorchProgram:
    """Import an exported program; one that is imported stays as it is.

    Raises
    ------
    UsageError
        If PyTorch is not installed.
    ModelError, UnsupportedOpError
        If the file is not an exported program, or the program cannot be imported.
    """
    if isinstance(model, TorchProgram):
        return model
    source = open_program(model)
    name = os.fspath(model) if isinstance(model, str | os.PathLike) else program_name(source)
    with warnings.catch_warnings(), stderr.hidden(), _without_logs():
        warnings.simplefilter("ignore")
        conversion = _try_import(source, name)
    if isinstance(conversion, PimflowError):
        raise conversion
    program, functional, imported = conversion.program, conversion.functional, conversion.imported
    buffers = written_buffers(functional)
    inputs = tuple(map(str, functional.graph_signature.user_inputs))
    # Decomposition renames results; what the caller knows are the names in the file.
    decomposed = list(map(str, imported.graph_signature.user_outputs))
    results = (*decomposed[: len(buffers)], *map(str, program.graph_signature.user_outputs))
    names = dict(zip(decomposed, results, strict=True))
    types = [str(tensor.dtype) for tensor in _returned(conversion.module)]
    return TorchProgram(
        name=name,
        program=program,
        module=conversion.module,
        inputs=inputs,
        results=results,
        caches={past: names[present] for past, present in cache_pairs(imported).items()},
        buffers=buffers,
        reference=Reference(lambda: _typed_run(program_runner(program, inputs, buffers), types)),
    )


@dataclass(frozen=True, kw_only=True)
class _Conversion:
    """A program without bf16 and fp16; functional and in fp32; with buffers as inputs; and its module."""

    program: torch.export.ExportedProgram
    functional: torch.export.ExportedProgram
    imported: torch.export.ExportedProgram
    module: tvm.IRModule


def _try_import(source: torch.export.ExportedProgram, name: str) -> _Conversion | PimflowError:
    """The module or an error, which is not raised here: it would keep a builder alive, which then warns."""
    try:
        program = without_narrow(source)
        plain = inline_control_flow(single_precision(program))
        functional = plain.run_decompositions(_decompositions(plain))
        _drop_assertions(functional)
        if (real := split_complex(functional)) is not functional:
            functional = real.run_decompositions(_decompositions(real))
        imported = without_constant_inputs(with_buffers_as_inputs(functional))
        imported = cast_results(imported, result_types(source), cache_pairs(imported).values())
        module = _import(imported)
        return _Conversion(program=program, functional=functional, imported=imported, module=module)
    except (NotImplementedError, UnsupportedOpError) as error:
        return UnsupportedOpError(f"'{name}': {_reason(error)}")
    except Exception as error:  # any error of the importer's operators
        reason = _reason(error)
        if _OPEN_SIZE in reason:
            reason = "an operator compares open sizes; export it with fixed ones"
        kind = UnsupportedOpError if "Unsupported function" in reason else ModelError
        return kind(f"'{name}' cannot be imported: {reason}")


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    """Context in which PyTorch logs no tracebacks of failed attempts."""
    previous_level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(previous_level)


def _reason(error: Exception) -> str:
    """What an error says, in a line; without what PyTorch adds about the operator that it traced."""
    text = str(error).partition("\nWhile executing")[0].strip()
    return last_line(Exception(text or type(error).__name__))


def _returned(mod: tvm.IRModule) -> list[relax.TensorType]:
    """Types of what ``main`` returns."""
    returned = relax_module.main(mod).ret_ty
    return list(returned.fields) if isinstance(returned, relax.TupleType) else [returned]


def _typed_run(run: Run, types: Sequence[str]) -> Run:
    """`run`, whose results have these types."""
    return lambda values: [y.astype(kind, copy=False) for y, kind in zip(run(values), types, strict=True)]


def open_program(
    model: str | os.PathLike | torch.export.ExportedProgram | TorchProgram,
) -> torch.export.ExportedProgram:
    """The exported program, which is read if `model` is a path; raises the errors of `load`."""
    if isinstance(model, TorchProgram):
        return model.program
    return _read(model) if isinstance(model, str | os.PathLike) else model


def _read(path: str | os.PathLike) -> torch.export.ExportedProgram:
    if not Path(path).is_file():
        raise ModelError(f"'{os.fspath(path)}': no such file")
    try:
        import torch
    except ImportError as error:
        raise UsageError(
            "reading a .pt2 file needs PyTorch: pip install 'pimflow[torch]', or export to ONNX"
        ) from error
    try:
        with _without_logs(), torch_experts.grouped_product_definition():
            torch_archive.require_plain(path)
            with torch_archive.weights_only(), torch_archive.plain_containers():
                program = torch.export.load(path)
            torch_experts.replace_grouped_products(program)
        return program
    except ModelError:
        raise
    except pickle.UnpicklingError as error:
        raise ModelError(f"'{os.fspath(path)}': pickles more than weights, which is not loaded") from error
    except Exception as error:  # any error of the archive's parts
        raise ModelError(f"'{os.fspath(path)}': is not a torch.export file, or is damaged") from error


def _import(program: torch.export.ExportedProgram) -> tvm.IRModule:
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

    importer = ExportedProgramImporter()
    mod = importer.from_exported_program(
        program,
        keep_params_as_input=False,
        unwrap_unit_return_tuple=True,
        no_bind_return_tuple=False,
        custom_convert_map=CONVERTERS | converters() | torch_recurrent.converters(program),
    )
    builder = importer.block_builder
    layers = {
        node: result
        for node, result in importer.env.items()
        if node.op == "call_function" and isinstance(result, relax.Var)
    }
    products = Counter(path_of(n) for n, result in layers.items() if anchor_of(result, builder) is not None)
    names: dict[relax.Var, str] = {}
    for node, result in layers.items():
        if result not in names:
            # The only product of a torch module has the module's name; other operators get a suffix.
            path, is_product = path_of(node), anchor_of(result, builder) is not None
            is_only_product = bool(path) and products[path] == 1 and is_product
            layer = path if is_only_product else ".".join(filter(None, (path, node.name)))
            names |= layer_names(result, layer, builder, names)
    return with_names(mod, {var.name: layer for var, layer in names.items()})


def _decompositions(
    program: torch.export.ExportedProgram,
) -> dict[torch._ops.OperatorBase, Callable[..., Any]]:
    """PyTorch's decompositions and ours, but for the operators that have converters here."""
    import torch

    table = torch.export.default_decompositions()
    for name in (*KEPT_OPERATORS, *torch_recurrent.unrolled_operators(program)):
        table.pop(_operator(name), None)
    for name, decomposition in DECOMPOSITIONS.items():
        table[_operator(name)] = decomposition
    return table


def _operator(name: str) -> torch._ops.OperatorBase:
    import torch

    packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def _drop_assertions(program: torch.export.ExportedProgram) -> None:
    """Erase checks of values, which compute nothing; TVM's would make the network impure."""
    graph = program.graph_module.graph
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and str(node.target).startswith("aten._assert") and not node.users:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def path_of(node: torch.fx.Node) -> str:
    """Path of the torch module that `node` is from; empty for the network itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0] if stack else ""
