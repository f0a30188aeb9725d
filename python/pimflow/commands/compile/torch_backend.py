"""The backend ``pimflow`` of ``torch.compile``: modules without training.

PyTorch finds it as ``torch.compile(module, backend="pimflow")`` by the entry point of the installed package;
`pimflow.torch_backend` is the same without one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pimflow.errors import UsageError

if TYPE_CHECKING:
    import torch

    from pimflow.commands.compile.compile import Compiled

_STATIC = "_dynamo_static_input_type"  # PyTorch's mark of parameters and buffers among the inputs of a graph


def torch_backend(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph that ``torch.compile`` has traced; what its calls return is computed by pimflow.

    The graph is compiled when it is called with shapes that are new to it. Weights are constants of it: if
    one is written to, the next call compiles again.

    Parameters
    ----------
    options : mapping of str to object, optional
        Keywords of `pimflow.compile`, as ``torch.compile(module, backend="pimflow", options={…})``.

    Raises
    ------
    UsageError
        By a call in which gradients are taken.
    PimflowError
        By a call, as `pimflow.compile`.
    """
    compiled_by_shapes: dict[tuple[Any, ...], tuple[list[Any], Compiled]] = {}
    static = [_is_static(node) for node in graph_module.graph.nodes if node.op == "placeholder"]

    def call(*inputs: Any) -> Any:
        """Compute the graph's results."""
        weights = [value for value, is_static in zip(inputs, static, strict=True) if is_static]
        values = [value for value, is_static in zip(inputs, static, strict=True) if not is_static]
        _refuse_gradients(inputs)
        arguments = tuple(value for value in values if _is_tensor(value))
        shapes = tuple(tuple(value.shape) if _is_tensor(value) else value for value in values)
        versions = [_version(weight) for weight in weights]
        if shapes not in compiled_by_shapes or compiled_by_shapes[shapes][0] != versions:
            compiled = _compile_graph(graph_module, inputs, static, arguments, options or {})
            compiled_by_shapes[shapes] = versions, compiled
        return compiled_by_shapes[shapes][1](*arguments)

    return call


def _compile_graph(
    graph_module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    static: Sequence[bool],
    arguments: tuple[torch.Tensor, ...],
    options: Mapping[str, Any],
) -> Compiled:
    """Compile a graph for the values of its weights and the shapes of its other inputs."""
    import torch

    from pimflow.commands.compile.compile import compile

    class LayerInterpreter(torch.fx.Interpreter):
        """Runs each operator within a module of the layer's name, which `torch.export` notes."""

        def run_node(self, node: torch.fx.Node) -> Any:
            """Run an operator within the module of its layer."""
            if node.op not in ("call_function", "call_method"):
                return super().run_node(node)
            args, kwargs = self.fetch_args_kwargs_from_env(node)
            run = getattr(super(), node.op)
            return network.layer(layer_path(node))(lambda: run(node.target, args, kwargs))

    class LayerModule(torch.nn.Module):
        """A module of a layer's name."""

        def forward(self, run: Callable[[], Any]) -> Any:
            return run()

    class TracedNetwork(torch.nn.Module):
        """The graph with its weights as buffers."""

        def __init__(self) -> None:
            super().__init__()
            for place, (value, is_static) in enumerate(zip(inputs, static, strict=True)):
                if is_static:
                    self.register_buffer(f"weight_{place}", value.detach())
            for node in graph_module.graph.nodes:
                self.layer(layer_path(node))

        def layer(self, path: str) -> torch.nn.Module:
            """The module at a dotted path, which is added if it is missing."""
            module: torch.nn.Module = self
            for name in filter(None, path.split(".")):
                if name not in module._modules:
                    module.add_module(name, LayerModule())
                module = module._modules[name]
            return module if path else identity

        def forward(self, *values: torch.Tensor) -> Any:
            """Run the graph on its inputs without weights."""
            given = iter(values)
            operands = [
                getattr(self, f"weight_{place}")
                if is_static
                else (next(given) if _is_tensor(value) else value)
                for place, (value, is_static) in enumerate(zip(inputs, static, strict=True))
            ]
            return LayerInterpreter(graph_module).run(*operands)

    def identity(run: Callable[[], Any]) -> Any:
        return run()

    network = TracedNetwork().eval()
    return compile(network, arguments, **{"conventions": "none", **options})


def layer_path(node: torch.fx.Node) -> str:
    """Dotted path of the module that a node of a traced graph is from; empty for the network itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    path = re.sub(r"^L\['\w+'\]", "", path)  # the local variable that holds the network
    for old, new in (("._modules['", "."), ("['", "."), ("']", ""), ("[", "."), ("]", "")):
        path = path.replace(old, new)
    return path.strip(".")


def _is_static(node: torch.fx.Node) -> bool:
    """Whether an input of a graph is a parameter or a buffer of the module."""
    return bool((node.meta.get("tensor_dict") or {}).get(_STATIC))


def _version(weight: torch.Tensor) -> tuple[int, int]:
    """What changes if a weight is replaced or written to."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach")


def _refuse_gradients(inputs: Sequence[Any]) -> None:
    """Raise `UsageError` if the caller could take gradients of the results."""
    import torch

    if torch.is_grad_enabled() and any(_is_tensor(value) and value.requires_grad for value in inputs):
        raise UsageError("the backend pimflow computes no gradients: call the module within torch.no_grad()")
