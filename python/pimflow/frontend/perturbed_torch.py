"""PyTorch programs with random roundings, to measure how far rounding moves their outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pimflow.frontend.perturbed_onnx import FP16_ROUNDOFF, FP32_ROUNDOFF
from pimflow.frontend.reference import Fp16Storage, Run
from pimflow.frontend.torch_caches import program_runner
from pimflow.frontend.torch_precision import operator_name, single_precision

if TYPE_CHECKING:
    import numpy as np
    import torch

_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_KEEPS_WHOLE = ("to", "_to_copy", "cumsum", "sum", "view", "reshape", "unsqueeze", "squeeze", "expand")
_PRODUCTS = (*_CONVOLUTIONS, "linear", "matmul", "mm", "bmm")  # a third operand is a bias


def reference_with_roundings(
    read: Callable[[], torch.export.ExportedProgram],
    names: Sequence[str],
    buffers: Mapping[str, str],
    stored: Fp16Storage,
) -> Run:
    """Run the program of `read` by PyTorch with random roundings; see `perturbed_onnx.perturb`.

    For `names` and `buffers` see `torch_caches.program_runner`.

    Here the results of all operators except products count as arithmetic, and all results as stored if
    kernels store fp16. Whole numbers, such as counts, are exact in every type that is used.
    """
    import torch

    draw = torch.Generator().manual_seed(0)

    def scale(x: torch.Tensor, roundoff: float) -> torch.Tensor:
        return x * (1 + roundoff * (2 * torch.rand(x.shape, generator=draw) - 1))

    def round_to_fp16(x: torch.Tensor) -> torch.Tensor:
        return (x if is_first else scale(x, FP16_ROUNDOFF)).half().float()

    class RoundingInterpreter(torch.fx.Interpreter):
        def __init__(self, module: torch.fx.GraphModule) -> None:
            super().__init__(module)
            self.narrow = _products_of(module.graph.nodes, stored.layers)
            self.whole = _whole_numbers(module.graph.nodes)

        def run_node(self, node: torch.fx.Node) -> Any:
            """The result of a node, rounded as the stored values are."""
            operator = operator_name(node)
            if not operator:
                return super().run_node(node)
            args, kwargs = self.fetch_args_kwargs_from_env(node)
            if node in self.narrow:
                operands = (*map(round_to_fp16, args[:2]), *[None] * (len(args) > 2), *args[3:])
                product = round_to_fp16(self.call_function(node.target, operands, kwargs))
                if len(args) < 3 or args[2] is None:
                    return product
                behind = product.dim() - 2 if operator in _CONVOLUTIONS else 0
                return product + args[2].reshape(-1, *[1] * behind)
            if operator in _PRODUCTS:
                x, weights, *rest = args
                terms = weights[0].numel() if operator in _CONVOLUTIONS else x.shape[-1]
                x = scale(x, FP32_ROUNDOFF * max(2.0, math.sqrt(terms)))
                args = (x, round_to_fp16(weights) if stored.kernels else weights, *rest)
            result = self.call_function(node.target, args, kwargs)
            if not isinstance(result, torch.Tensor) or result.dtype != torch.float32 or node in self.whole:
                return result
            if stored.kernels:
                return round_to_fp16(result)
            return result if operator in _PRODUCTS else scale(result, 2 * FP32_ROUNDOFF)

    run_program = program_runner(
        single_precision(read()), names, buffers, RoundingInterpreter, check_guards=False
    )
    is_first = True  # it rounds to the nearest, as `onnx_runtime.reference_with_roundings` says

    def run(values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Results of the program for inputs by name."""
        nonlocal is_first
        results = run_program(values)
        is_first = False
        return results

    return run


def _whole_numbers(nodes: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    """Nodes whose elements are whole numbers: counts, converted integers, and what is added up of these."""
    import torch

    whole: set[torch.fx.Node] = set()
    for node in nodes:
        value, operator = node.meta.get("val"), operator_name(node)
        is_integral = isinstance(value, torch.Tensor) and not value.dtype.is_floating_point
        kept = operator in _KEEPS_WHOLE and node.args[0] in whole
        if is_integral or kept or operator == "histc":
            whole.add(node)
    return whole


def _products_of(nodes: Iterable[torch.fx.Node], layers: Iterable[str]) -> set[torch.fx.Node]:
    """Products that `layers` are imported from: those of their torch modules, or all if there are none."""
    from pimflow.frontend.torch_program import path_of

    products = [node for node in nodes if operator_name(node) in _PRODUCTS]
    perturbed = set()
    for layer in layers:
        of_layer = {
            n for n in products if layer == (path := path_of(n)) or (path and layer.startswith(f"{path}."))
        }
        perturbed |= of_layer or set(products)
    return perturbed
