"""Modules of PyTorch in `compile`: exported for an example, and called as the module itself is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pimflow.commands.shared.inputs import InputOptions
from pimflow.compiler.build import Build
from pimflow.compiler.interface import Interface
from pimflow.compiler.verification import layer_of_symbol, require_fp16_range
from pimflow.errors import UnsupportedOpError, UsageError
from pimflow.frontend import torch_module, torch_program
from pimflow.frontend.torch_module import CallForm
from pimflow.placement import SearchResult

if TYPE_CHECKING:
    from pimflow.frontend import Model


@dataclass(frozen=True, kw_only=True)
class Example:
    """A network, with the call that it was exported for.

    Attributes
    ----------
    model : Model
        An exported program in place of a module; any other network as it is.
    inputs : dict of str to ndarray
        The arguments of the call by input; empty for a network that is no module.
    call_form : CallForm, optional
        None unless the network is a program of PyTorch.
    problem : str
        Why it cannot be called as its module; empty if it can.
    """

    model: Model
    inputs: dict[str, np.ndarray]
    call_form: CallForm | None = None
    problem: str = "its network is no program of PyTorch; run its directory by pimflow.run"

    @classmethod
    def from_arguments(
        cls, model: Any, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
    ) -> Example:
        """Export a module for its arguments; parameters as of `torch_module.export`, whose errors it raises.

        Raises
        ------
        UsageError
            For a module without arguments, and for arguments of another network.
        """
        is_module = torch_module.is_module(model)
        given = [
            name
            for name, value in (("args", args), ("kwargs", kwargs), ("dynamic_shapes", dynamic_shapes))
            if value is not None
        ]
        if not is_module and given:
            raise UsageError(f"{given[0]} belongs to a torch.nn.Module, and this is none; leave it out")
        if is_module and args is None and kwargs is None:
            raise UsageError("a module of PyTorch is exported for its arguments: give them, as in (x,)")
        if is_module:
            model = torch_module.export(model, args or (), kwargs, dynamic_shapes)
        elif isinstance(model, str) or not torch_program.is_program(model):
            return cls(model=model, inputs={})
        try:
            call_form = CallForm.from_program(torch_program.open_program(model))
        except UnsupportedOpError as error:
            return cls(model=model, inputs={}, problem=str(error))
        inputs = call_form.arrays(args or (), kwargs or {}) if is_module else {}
        return cls(model=model, inputs=inputs, call_form=call_form, problem="")

    def with_example(
        self, options: InputOptions, keywords: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Inputs of the verification, and keywords of the search with shapes; from the call by default."""
        shapes = {name: array.shape for name, array in self.inputs.items()} | (keywords.get("shapes") or {})
        fits = all(shapes[name] == array.shape for name, array in self.inputs.items())
        if not self.inputs:
            return {}, dict(keywords)
        is_drawn = options.inputs is None and options.input_values is None
        return {"inputs": self.inputs} if fits and is_drawn else {}, {**keywords, "shapes": shapes}


@dataclass(frozen=True, kw_only=True)
class ModuleCall:
    """A compiled network that is called as the module of PyTorch which it came from.

    Attributes
    ----------
    build : Build
        What runs: that of the target if its device is here, else of the stand-in.
    """

    example: Example
    build: Build
    interface: Interface
    search_result: SearchResult

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns: tensors in the same tuples, lists and dictionaries.

        Raises
        ------
        UsageError, ArtifactError
            For arguments of another form, shape or value than those of the export.
        UnsupportedOpError
            If the network cannot be called so; the message says what can be done.
        VerificationError
            If values of a layer on PIM leave fp16.
        """
        form = self.example.call_form
        if form is None:
            raise UnsupportedOpError(f"this network is not called: {self.example.problem}")
        arrays = self.interface.order_inputs(form.arrays(args, kwargs))
        with require_fp16_range(self._layer):
            outputs = self.build.infer(arrays)
        return form.result(outputs)

    def _layer(self, symbol: str) -> str:
        if self.search_result.system.dtype != "fp16":
            return ""
        return layer_of_symbol(symbol, self.search_result.graph)
