"""Complex numbers in PyTorch's programs as two real tensors each; Fourier transforms as products."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pimflow.errors import UnsupportedOpError
from pimflow.frontend.onnx_signal import fourier_waves
from pimflow.frontend.torch_precision import graph_module_copy, operator_name, rebuilt_program

if TYPE_CHECKING:
    import torch
    from torch.export.graph_signature import InputKind


def split_complex(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """A functional program without complex numbers; itself if it has none.

    Raises
    ------
    UnsupportedOpError
        For complex inputs or results, and operators without a rule.
    """
    if not any(_is_complex(node) for node in program.graph.nodes):
        return program
    splitter = _Splitter(program)
    splitter.split()
    inputs = [node.name for node in splitter.graph.nodes if node.op == "placeholder"]
    specs = [splitter.spec_by_input[name] for name in inputs]
    return rebuilt_program(program, splitter.module, specs, splitter.state_dict, splitter.constants)


def _is_complex(node: Any) -> bool:
    """Whether a node's result, or the first of several, is complex."""
    value = node.meta.get("val") if hasattr(node, "meta") else None
    first = value[0] if isinstance(value, list | tuple) and value else value
    return hasattr(first, "is_complex") and bool(first.is_complex())


class _Pair:
    """Real and imaginary part of a node; `imaginary` is None where it is 0."""

    def __init__(self, real: Any, imaginary: Any = None) -> None:
        self.real, self.imaginary = real, imaginary


class _Splitter:
    """One program, whose complex nodes are replaced in a copy."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self.module = graph_module_copy(program)
        self.graph = self.module.graph
        self.spec_by_input = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        self.state_dict, self.constants = dict(program.state_dict), dict(program.constants)
        self.pairs: dict[torch.fx.Node, _Pair] = {}
        self.mode = next(
            value.fake_mode
            for node in self.graph.nodes
            if hasattr(value := node.meta.get("val"), "fake_mode")
        )

    def split(self) -> None:
        """Replace all complex nodes."""
        replaced: dict[torch.fx.Node, Any] = {}
        for node in list(self.graph.nodes):
            self.node = node
            reads_complex = any(source in self.pairs for source in node.all_input_nodes)
            if node.op == "output" and reads_complex:
                raise UnsupportedOpError("it returns complex numbers; return torch.view_as_real of them")
            if node.op == "placeholder" and _is_complex(node):
                replaced[node] = self._split_placeholder(node)
            elif node.op == "call_function" and (reads_complex or _is_complex(node)):
                with self.graph.inserting_before(node):
                    replaced[node] = self._result(node)
            if isinstance(result := replaced.get(node), _Pair):
                self.pairs[node] = result
            elif result is not None:
                node.replace_all_uses_with(result)
        for node, result in reversed(replaced.items()):
            name = node.name
            self.graph.erase_node(node)
            if not isinstance(result, _Pair) and result not in replaced and result.op == "call_function":
                result.name = name  # results of the program have names
        self.graph.eliminate_dead_code()
        self.module.recompile()

    def call(self, name: str, *args: Any, **options: Any) -> torch.fx.Node:
        """A node of ``aten``'s operator `name`, of the same torch module as the one that is replaced."""
        import torch

        packet, _, overload = name.partition(".")
        target = getattr(getattr(torch.ops.aten, packet), overload or "default")
        result = self.graph.call_function(target, args, options)
        result.meta = {key: value for key, value in self.node.meta.items() if key != "val"}
        return result

    def pair(self, value: Any) -> _Pair:
        """The parts of an operand: of a node, or of a number."""
        if value in self.pairs:
            return self.pairs[value]
        return _Pair(value.real, value.imag) if isinstance(value, complex) else _Pair(value)

    def constant(self, array: np.ndarray) -> torch.fx.Node:
        """A node whose value is `array`, in fp32."""
        import torch
        from torch.export.graph_signature import InputKind

        name = f"fourier_{len(self.constants)}"
        self.constants[name] = torch.from_numpy(array.astype(np.float32))
        *_, last = (node for node in self.graph.nodes if node.op == "placeholder")
        return self._placeholder(name, self.constants[name], InputKind.CONSTANT_TENSOR, last)

    def _placeholder(
        self, name: str, value: torch.Tensor, kind: InputKind, before: torch.fx.Node
    ) -> torch.fx.Node:
        """A new input of the graph, with the value of a weight, behind the input `before`."""
        from torch.export.graph_signature import InputSpec, TensorArgument

        with self.graph.inserting_after(before):
            node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = self.mode.from_tensor(value)
        self.spec_by_input[node.name] = InputSpec(kind, TensorArgument(name=node.name), name, True)
        return node

    def _split_placeholder(self, node: torch.fx.Node) -> _Pair:
        """Two weights in place of a complex one; raises `UnsupportedOpError` for an input."""
        import torch

        spec = self.spec_by_input[node.name]
        if spec.target is None:
            raise UnsupportedOpError(f"input '{node.name}' is complex; take its parts as inputs")
        stored = self.state_dict if spec.target in self.state_dict else self.constants
        value, parts = stored.pop(spec.target).detach(), []
        for part in ("real", "imag"):
            key, tensor = f"{spec.target}_{part}", getattr(value, part).to(torch.float32).contiguous()
            stored[key] = torch.nn.Parameter(tensor, False) if spec.kind.name == "PARAMETER" else tensor
            parts.append(self._placeholder(key, tensor, spec.kind, [node, *parts][-1]))
        return _Pair(*parts)

    def _result(self, node: torch.fx.Node) -> Any:
        """What replaces a node: a `_Pair`, or a real node."""
        import operator

        if node.target is operator.getitem:
            parts = self.pairs[node.args[0]]
            picked = [
                part and self.graph.call_function(operator.getitem, (part, node.args[1]))
                for part in (parts.real, parts.imaginary)
            ]
            return _Pair(*picked)
        name = operator_name(node)
        if name in _RULES:
            return _RULES[name](self, *node.args, **node.kwargs)
        if name in _LINEAR:
            return self._each_part(node)
        raise UnsupportedOpError(f"'{node.name}' ({name}) of complex numbers is not supported")

    def _each_part(self, node: torch.fx.Node) -> _Pair:
        """The same operator on both parts; where one operand has no imaginary part, it is zero."""
        import torch

        sources = [source for source in node.all_input_nodes if source in self.pairs]
        has_imaginary = any(self.pairs[source].imaginary is not None for source in sources)
        results = []
        for index in range(1 + has_imaginary):

            def part(source: torch.fx.Node, index: int = index) -> Any:
                """The part of an operand."""
                if source not in self.pairs:
                    is_value = index and source.meta["val"].is_floating_point()
                    return self.call("zeros_like", source) if is_value else source
                pair = self.pairs[source]
                if not index:
                    return pair.real
                return self.call("zeros_like", pair.real) if pair.imaginary is None else pair.imaginary

            args, options = torch.fx.node.map_arg((node.args, node.kwargs), part)
            result = self.graph.call_function(node.target, args, options)
            result.meta = {key: value for key, value in node.meta.items() if key != "val"}
            results.append(result)
        return _Pair(*results)

    def combine(self, kind: str, x: Any, y: Any) -> Any:
        """``x kind y`` of parts, of which None is 0; None for 0."""
        if kind in ("mul", "div"):
            return None if x is None else x if y is None and kind == "div" else y and self._apply(kind, x, y)
        if y is None:
            return x
        if x is None:
            return y if kind == "add" else self._apply("mul", y, -1)
        return self._apply(kind, x, y)

    def _apply(self, kind: str, x: Any, y: Any) -> Any:
        """An operator of two parts, of which one may be a number."""
        import torch

        if isinstance(x, torch.fx.Node):
            return self.call(f"{kind}.Tensor", x, y)
        if isinstance(y, torch.fx.Node):
            swapped = self.call("reciprocal", y) if kind == "div" else y
            if kind == "sub":
                return self.call("add.Tensor", self.call("neg", y), x)
            return self.call(f"{'mul' if kind == 'div' else kind}.Tensor", swapped, x)
        return {"add": x + y, "sub": x - y, "mul": x * y, "div": x / y if kind == "div" else 0}[kind]


Rule = Callable[..., Any]


def _sum(splitter: _Splitter, x: Any, y: Any, alpha: Any = 1, *, kind: str) -> _Pair:
    left, right = splitter.pair(x), splitter.pair(y)
    if alpha != 1:
        right = _product(splitter, y, alpha)
    combine = splitter.combine
    return _Pair(combine(kind, left.real, right.real), combine(kind, left.imaginary, right.imaginary))


def _product(splitter: _Splitter, x: Any, y: Any) -> _Pair:
    return _pair_product(splitter, splitter.pair(x), splitter.pair(y))


def _quotient(splitter: _Splitter, x: Any, y: Any) -> _Pair:
    a, b, combine = splitter.pair(x), splitter.pair(y), splitter.combine
    if b.imaginary is None:
        return _Pair(combine("div", a.real, b.real), combine("div", a.imaginary, b.real))
    size = combine("add", combine("mul", b.real, b.real), combine("mul", b.imaginary, b.imaginary))
    inverse = _Pair(combine("div", b.real, size), combine("div", combine("sub", None, b.imaginary), size))
    return _pair_product(splitter, a, inverse)


def _pair_product(splitter: _Splitter, a: _Pair, b: _Pair) -> _Pair:
    combine = splitter.combine
    real = combine("sub", combine("mul", a.real, b.real), combine("mul", a.imaginary, b.imaginary))
    return _Pair(
        real, combine("add", combine("mul", a.real, b.imaginary), combine("mul", a.imaginary, b.real))
    )


def _reciprocal(splitter: _Splitter, x: Any) -> _Pair:
    return _quotient(splitter, 1.0, x)


def _conjugate(splitter: _Splitter, x: Any) -> _Pair:
    pair = splitter.pair(x)
    return _Pair(pair.real, splitter.combine("sub", None, pair.imaginary))


def _exponential(splitter: _Splitter, x: Any) -> _Pair:
    pair = splitter.pair(x)
    size = splitter.call("exp", pair.real)
    return size if pair.imaginary is None else _polar(splitter, size, pair.imaginary)


def _polar(splitter: _Splitter, size: Any, angle: Any) -> _Pair:
    parts = (splitter.call(name, angle) for name in ("cos", "sin"))
    return _Pair(*(splitter.call("mul.Tensor", size, part) for part in parts))


def _power(splitter: _Splitter, x: Any, exponent: Any) -> _Pair:
    if exponent != 2:
        raise UnsupportedOpError(f"complex numbers to the power of {exponent} are not supported")
    return _product(splitter, x, x)


def _from_real(splitter: _Splitter, x: Any) -> _Pair:
    return _Pair(*(splitter.call("select.int", x, -1, index) for index in (0, 1)))


def _imaginary(splitter: _Splitter, pair: _Pair) -> Any:
    """The imaginary part, of zeros if it has none."""
    return splitter.call("zeros_like", pair.real) if pair.imaginary is None else pair.imaginary


def _to_real(splitter: _Splitter, x: Any) -> Any:
    pair = splitter.pair(x)
    return splitter.call("stack", [pair.real, _imaginary(splitter, pair)], -1)


def _size(splitter: _Splitter, x: Any) -> Any:
    pair = splitter.pair(x)
    return splitter.call("hypot", pair.real, _imaginary(splitter, pair))


def _angle(splitter: _Splitter, x: Any) -> Any:
    pair = splitter.pair(x)
    return splitter.call("atan2", _imaginary(splitter, pair), pair.real)


def _cast(splitter: _Splitter, x: Any, dtype: Any = None, **options: Any) -> Any:
    import torch

    pair = splitter.pair(x)
    if dtype is not None and not dtype.is_complex:  # PyTorch drops the imaginary part
        return splitter.call("_to_copy", pair.real, dtype=dtype)
    if x in splitter.pairs:
        return pair
    return _Pair(splitter.call("_to_copy", pair.real, dtype=torch.float32))


def _fill(splitter: _Splitter, first: Any, value: Any = 0, **options: Any) -> _Pair:
    """``full``, ``full_like`` and what they decompose."""
    import torch

    dims = list(first.meta["val"].shape) if isinstance(first, torch.fx.Node) else first
    parts = (value.real, value.imag) if isinstance(value, complex) else (value, 0)
    return _Pair(*(splitter.call("full", dims, float(part), dtype=torch.float32) for part in parts))


def _matrix_product(splitter: _Splitter, x: Any, y: Any, *, name: str) -> _Pair:
    """One product of the parts side by side: [a, b] @ [[c, d], [-b, c]]."""
    a, b = splitter.pair(x), splitter.pair(y)
    call, columns = splitter.call, y.meta["val"].shape[-1]
    if b.imaginary is None and a.imaginary is not None:
        return _Pair(call(name, a.real, b.real), call(name, a.imaginary, b.real))
    right = call("cat", [b.real, b.imaginary], -1)
    left = a.real
    if a.imaginary is not None:
        left = call("cat", [a.real, a.imaginary], -1)
        right = call("cat", [right, call("cat", [call("neg", b.imaginary), b.real], -1)], -2)
    product, last = call(name, left, right), len(y.meta["val"].shape) - 1
    return _Pair(*(call("slice.Tensor", product, last, i * columns, (i + 1) * columns) for i in (0, 1)))


def _scale(sizes: Sequence[int], norm: int) -> float:
    """The factor of a normalised transform: none, over the root of the sizes, or over these."""
    count = float(np.prod(sizes))
    return {0: 1.0, 1: count**-0.5, 2: 1 / count}[norm]


def _transform(
    splitter: _Splitter, pair: _Pair, axis: int, rank: int, waves: np.ndarray, real: bool
) -> _Pair:
    """A transform along an axis by the matrix `waves`; `real` for the real part of its result alone."""
    call, last = splitter.call, rank - 1
    order = list(range(rank))
    order[axis], order[last] = order[last], order[axis]

    def moved(x: Any) -> Any:
        """`x` with the axis last, or back."""
        return x if axis == last else call("permute", x, order)

    rows = [[waves.real] if real else [waves.real, waves.imag]]
    if pair.imaginary is not None:
        rows.append([-waves.imag] if real else [-waves.imag, waves.real])
    parts = [moved(part) for part in (pair.real, pair.imaginary) if part is not None]
    operand = parts[0] if len(parts) == 1 else call("cat", parts, -1)
    product = call("matmul", operand, splitter.constant(np.block(rows)))
    if real:
        return _Pair(moved(product))
    columns = waves.shape[1]
    return _Pair(
        *(moved(call("slice.Tensor", product, last, i * columns, (i + 1) * columns)) for i in (0, 1))
    )


def _fourier(splitter: _Splitter, x: Any, axes: Sequence[int], norm: int, last: Any, *, kind: str) -> Any:
    """Fourier transforms along `axes`; `last`: one-sided, forward, or the size of the last axis."""
    value = x.meta["val"]
    rank = value.dim()
    axes, pair = [axis % rank for axis in axes], splitter.pair(x)
    sizes = [int(value.shape[axis]) for axis in axes]
    if kind == "c2r":
        sizes[-1] = last
    inverse = kind == "c2r" or (kind == "c2c" and not last)
    scale = _scale(sizes, norm)
    order = list(zip(axes, sizes))
    if kind == "r2c":
        order.reverse()  # the real axis is the first that is transformed, and the last that becomes real
    for number, (axis, size) in enumerate(order):
        is_half = (kind == "r2c" and number == 0 and last) or (kind == "c2r" and number == len(order) - 1)
        count = size // 2 + 1 if is_half and inverse else size
        waves = fourier_waves(count, size, inverse, bool(is_half)) * (scale * (size if inverse else 1))
        scale = 1.0
        pair = _transform(splitter, pair, axis, rank, waves, bool(is_half and inverse))
    return pair.real if kind == "c2r" else pair


# Operators that apply to each part by itself.
_LINEAR = frozenset({
    "_unsafe_view", "alias", "as_strided", "cat", "clone", "constant_pad_nd", "copy", "cumsum", "detach",
    "diagonal", "expand", "flip", "gather", "index", "index_put", "index_select", "lift_fresh_copy", "mean",
    "neg", "permute", "repeat", "reshape", "roll", "select", "select_scatter", "slice", "slice_scatter",
    "split", "split_with_sizes", "squeeze", "stack", "sum", "t", "transpose", "tril", "triu", "unbind",
    "unsqueeze", "view", "where", "zeros_like",
})  # fmt: skip
_RULES: dict[str, Rule] = {
    **{f"_fft_{kind}": functools.partial(_fourier, kind=kind) for kind in ("r2c", "c2c", "c2r")},
    **{name: functools.partial(_matrix_product, name=name) for name in ("bmm", "matmul", "mm")},
    **dict.fromkeys(("_conj", "_conj_physical", "conj", "conj_physical"), _conjugate),
    **dict.fromkeys(("full", "full_like", "zeros", "zeros_like"), _fill),
    **dict.fromkeys(("resolve_conj", "resolve_neg"), lambda splitter, x: splitter.pair(x)),
    "_to_copy": _cast,
    "abs": _size,
    "add": functools.partial(_sum, kind="add"),
    "angle": _angle,
    "complex": lambda splitter, real, imaginary: _Pair(real, imaginary),
    "div": _quotient,
    "exp": _exponential,
    "imag": lambda splitter, x: _imaginary(splitter, splitter.pair(x)),
    "mul": _product,
    "polar": _polar,
    "pow": _power,
    "real": lambda splitter, x: splitter.pair(x).real,
    "reciprocal": _reciprocal,
    "sub": functools.partial(_sum, kind="sub"),
    "view_as_complex": _from_real,
    "view_as_real": _to_real,
}
