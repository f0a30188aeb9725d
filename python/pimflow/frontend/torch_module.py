"""Modules of PyTorch: exported for the arguments of an example, and called with arguments as they are."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import ml_dtypes
import numpy as np

from pimflow.errors import ModelError, UnsupportedOpError, UsageError, last_line

if TYPE_CHECKING:
    import torch

# Operators that compute something else while a module is trained, and which argument says so.
_TRAINING_ARGUMENTS = {"batch_norm": 5, "dropout": 2, "feature_dropout": 2, "alpha_dropout": 2}


def is_module(model: object) -> TypeGuard[torch.nn.Module]:
    """Whether `model` is a ``torch.nn.Module``; PyTorch is not imported for the answer."""
    loaded = sys.modules.get("torch.nn")
    return loaded is not None and isinstance(model, loaded.Module)


def export(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> torch.export.ExportedProgram:
    """Export a module by ``torch.export.export``, whose parameters these are.

    Raises
    ------
    UsageError
        If the module is in training mode, and this changes its results.
    ModelError
        If PyTorch cannot export it.
    """
    import torch

    name = type(module).__name__
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(
                module, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes
            )
        except Exception as error:  # anything that the module or PyTorch raises
            raise ModelError(f"torch.export cannot export {name}: {_reason(error)}") from error
    for node in program.graph.nodes:
        operator = str(node.target).removeprefix("aten.").partition(".")[0]
        place = _TRAINING_ARGUMENTS.get(operator)
        is_training = place is not None and len(node.args) > place and node.args[place] is True
        if is_training and not (operator == "batch_norm" and node.args[3] is None):
            raise UsageError(f"{name} is in training mode, where {operator} differs; call its eval() first")
    return program


def _reason(error: Exception) -> str:
    """The first line that an error of PyTorch says something in; its last ones are hints and addresses."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else last_line(error)


def program_name(program: torch.export.ExportedProgram) -> str:
    """The class of the exported module; ``module`` if the program does not say it."""
    for node in program.graph.nodes:
        for path, cls in (node.meta.get("nn_module_stack") or {}).values():
            if not path:
                return (cls if isinstance(cls, str) else cls.__qualname__).rpartition(".")[2]
    return "module"


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """How the module of a program is called: its arguments as inputs by name, its outputs as it returns them.

    Attributes
    ----------
    inputs : tuple
        Of each leaf of the arguments, the name of the input, or the value of an argument that is no tensor.
    in_spec, out_spec : TreeSpec
        Structures of (args, kwargs) and of what the module returns.
    """

    inputs: tuple[str | _Constant, ...]
    in_spec: Any
    out_spec: Any

    @classmethod
    def from_program(cls, program: torch.export.ExportedProgram) -> CallForm:
        """The form of a program's module.

        Raises
        ------
        UnsupportedOpError
            If the module writes to its buffers or arguments, or returns something else than tensors.
        """
        from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument

        signature = program.graph_signature
        inputs = [spec.arg for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
        for spec in signature.output_specs:
            is_result = spec.kind is OutputKind.USER_OUTPUT and isinstance(spec.arg, TensorArgument)
            if not is_result:
                what = "returns more than tensors"
                if spec.kind is not OutputKind.USER_OUTPUT:
                    what = f"writes to '{spec.target}'"
                raise UnsupportedOpError(f"the module {what}; run its compiled directory by pimflow.Session")
        return cls(
            inputs=tuple(
                _Constant(arg.value) if isinstance(arg, ConstantArgument) else arg.name for arg in inputs
            ),
            in_spec=program.call_spec.in_spec,
            out_spec=program.call_spec.out_spec,
        )

    def arrays(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Inputs by name, from the arguments of a call.

        Raises
        ------
        UsageError
            For arguments of another structure than those of the export, or other values of those that are no
            tensors.
        """
        from torch.utils import _pytree

        names = list(self.in_spec.child(1).context)
        if set(names) == set(kwargs):
            kwargs = {name: kwargs[name] for name in names}
        leaves, spec = _pytree.tree_flatten((tuple(args), dict(kwargs)))
        if spec != self.in_spec:
            raise UsageError(
                f"it was compiled for arguments of the form {_form(self.in_spec)}, not {_form(spec)}"
            )
        arrays = {}
        for name, leaf in zip(self.inputs, leaves, strict=True):
            if isinstance(name, str):
                arrays[name] = _array(leaf) if hasattr(leaf, "detach") else np.asarray(leaf)
            elif leaf != name.value:
                raise UsageError(f"it was compiled for an argument of {name.value!r}, not {leaf!r}")
        return arrays

    def result(self, arrays: Sequence[np.ndarray]) -> Any:
        """What the module returns, with these outputs as its tensors."""
        from torch.utils import _pytree

        return _pytree.tree_unflatten([_tensor(array) for array in arrays], self.out_spec)


def _array(tensor: torch.Tensor) -> np.ndarray:
    """The values of a tensor; bf16, which NumPy lacks, as fp32."""
    import torch

    tensor = tensor.detach().cpu()
    array: np.ndarray = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array


def _tensor(array: np.ndarray) -> torch.Tensor:
    """An array as a tensor."""
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(array)


@dataclass(frozen=True)
class _Constant:
    """An argument that is no tensor: the program was exported for this value."""

    value: object


def _form(spec: Any) -> str:
    """A structure of arguments as text: an asterisk for each tensor."""
    from torch.utils import _pytree

    args, kwargs = _pytree.tree_unflatten([_Leaf()] * spec.num_leaves, spec)
    return ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]) or "none"


class _Leaf:
    """A tensor in a text."""

    def __repr__(self) -> str:
        return "*"
