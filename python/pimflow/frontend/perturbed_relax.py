"""Relax modules with random roundings, to measure how far rounding moves their outputs.

The module is that of the reference, compiled by TVM's own pipeline; kernels that round stand between its
operators.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping

import numpy as np
import tvm
from tvm import relax, te, tirx

from pimflow.frontend import relax_module
from pimflow.frontend.perturbed_onnx import FP16_ROUNDOFF, FP32_ROUNDOFF, TIE
from pimflow.frontend.reference import Fp16Storage, Run
from pimflow.host import stderr
from pimflow.pim_backend.runtime.network_module import infer, pack
from pimflow.relay_passes.flat import layer_name, main_bindings, operator, rebuild, shape, unique_name

_CONVOLUTIONS = tuple(f"nn.conv{rank}d{kind}" for rank in (1, 2, 3) for kind in ("", "_transpose"))
_PRODUCTS = (*_CONVOLUTIONS, "matmul")
_SUMS = ("cumsum", "mean", "nn.adaptive_avg_pool2d", "nn.avg_pool1d", "nn.avg_pool2d", "nn.avg_pool3d", "sum")
_QUANTISERS = ("quantize", "round")
# Results are elements of the operands, or do not depend on them, without rounding.
_MOVES = frozenset(
    [
        *("abs", "arange", "astype", "broadcast_to", "clip", "concat", "dynamic_strided_slice"),
        *("expand_dims", "flatten", "flip", "full", "full_like", "gather_elements", "gather_nd"),
        *("layout_transform", "max", "maximum", "min", "minimum", "negative", "nn.max_pool1d"),
        *("nn.max_pool2d", "nn.max_pool3d", "nn.pad", "nn.relu", "one_hot", "ones", "ones_like"),
        *("permute_dims", "repeat", "reshape", "scatter_elements", "scatter_nd", "squeeze", "stack"),
        *("strided_slice", "take", "tile", "tril", "triu", "where", "zeros", "zeros_like"),
    ]
)


def reference_with_roundings(mod: tvm.IRModule, stored: Fp16Storage) -> Run:
    """Run `mod`, in flat form, with random roundings; see `perturbed_onnx.perturb`.

    Results of all operators except products count as arithmetic, and all results as stored if kernels store
    fp16.
    """
    plain = relax.transform.DecomposeOpsForInference()(mod)
    rounded, seed_name = _RelaxRoundingInserter(plain, stored).result()
    with stderr.hidden():  # warnings do not concern the user
        executable = tvm.compile(rounded, tvm.target.Target("llvm"))
    network = pack(executable, relax_module.inputs(rounded), relax_module.outputs(rounded))
    seeds = itertools.count()  # 0 rounds to the nearest, as `onnx_runtime.reference_with_roundings` says

    def run(values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Results of the module with roundings, for inputs by name."""
        return infer(network, {**values, seed_name: np.array(next(seeds), np.int64)})

    return run


class _RelaxRoundingInserter:
    def __init__(self, mod: tvm.IRModule, stored: Fp16Storage) -> None:
        self.stored, self.source = stored, mod
        main = mod["main"]
        name = unique_name("rounding_seed", {param.name for param in main.params})
        self.seed = relax.Var(name, relax.TensorType((), "int64"))
        function = relax.Function([*main.params, self.seed], main.body, main.ret_ty, main.is_pure, main.attrs)
        self.mod = tvm.IRModule(dict(mod.functions_items()), attrs=mod.attrs)
        self.mod.update_func(mod.get_global_var("main"), function)
        self.salts = itertools.count(1)
        products = [b.var for b in main_bindings(mod) if operator(b.value) in _PRODUCTS]
        self.layers = _variables_of_layers(
            {var.name: layer_name(mod, var) for var in products}, stored.layers
        )

    def result(self) -> tuple[tvm.IRModule, str]:
        """The module with roundings, and the name of its further input, a seed."""
        return rebuild(self.mod, self._rewrite), self.seed.name

    def _rewrite(self, builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
        """`value` with rounded operands and results; None if it stays."""
        kind = operator(value)
        if not kind or not _is_single(var):
            return None
        if kind in _PRODUCTS:
            return self._product(builder, value, var.name in self.layers)
        roundoff = TIE if kind in _QUANTISERS else FP32_ROUNDOFF * max(2.0, math.sqrt(_terms(value, var)))
        if kind in _QUANTISERS or kind in _SUMS:
            value = _with_operands(value, [self._scale(builder, value.args[0], roundoff)])
        if self.stored.kernels and kind not in _MOVES:
            return self._scale(builder, builder.emit(value), FP16_ROUNDOFF, half=True)
        if kind in _MOVES or kind in _SUMS or kind in _QUANTISERS:
            return value
        return self._scale(builder, builder.emit(value), 2 * FP32_ROUNDOFF)

    def _product(self, builder: relax.BlockBuilder, value: relax.Call, is_narrow: bool) -> relax.Expr:
        """A product whose operands and result are stored in fp16, or whose sum is rounded."""
        x, weights = value.args[:2]
        if not (_is_single(x) and _is_single(weights)):
            return value
        if is_narrow:
            operands = [self._scale(builder, y, FP16_ROUNDOFF, half=True) for y in (x, weights)]
        else:
            roundoff = FP32_ROUNDOFF * max(2.0, math.sqrt(_terms(value, None)))
            operands = [self._scale(builder, x, roundoff)]
            if self.stored.kernels:
                operands.append(self._scale(builder, weights, FP16_ROUNDOFF, half=True))
        product = builder.emit(_with_operands(value, operands))
        if not is_narrow and not self.stored.kernels:
            return product
        return self._scale(builder, product, FP16_ROUNDOFF, half=True)

    def _scale(
        self, builder: relax.BlockBuilder, x: relax.Expr, roundoff: float, half: bool = False
    ) -> relax.Expr:
        """`x` with each element times a random factor of at most 1 ± `roundoff`; then rounded to fp16."""
        if not _is_single(x):
            return x
        salt = next(self.salts)

        def rounded(values: te.Tensor, seed: te.Tensor) -> te.Tensor:
            """The kernel."""

            def element(*index: tirx.Var) -> tirx.PrimExpr:
                """One element, scaled and rounded."""
                unit = _draw(index, values.shape, seed(), salt)
                if half:
                    unit = tirx.Select(seed() == tirx.const(0, "int64"), tirx.const(0.0, "float32"), unit)
                return _round(values(*index), unit, roundoff, half)

            return te.compute(values.shape, element, name="rounded")

        return builder.emit(builder.call_te(rounded, x, self.seed))


def _round(value: tirx.PrimExpr, unit: tirx.PrimExpr, roundoff: float, half: bool) -> tirx.PrimExpr:
    scaled = value * (tirx.const(1.0, "float32") + unit * tirx.const(roundoff, "float32"))
    return scaled.astype("float16").astype("float32") if half else scaled


def _draw(index: Iterable[tirx.Var], dims: Iterable[int], seed: tirx.PrimExpr, salt: int) -> tirx.PrimExpr:
    """A number from -1 to 1 for each element, seed and kernel: a hash of 32 bits of them (T. Mueller's).

    It is computed in int64, in which nothing overflows: TVM's simplifier assumes so.
    """

    def word(number: int) -> tirx.PrimExpr:
        return tirx.const(number, "int64")

    place: tirx.PrimExpr = word(0)
    for position, extent in zip(index, dims):
        place = place * extent + position
    bits = place * word(0x1E3779B1) + seed * word(0x05EBCA77) + word(salt * 0x42B2AE3D % 2**32)
    for _ in range(3):
        bits = bits & word(0xFFFFFFFF)
        bits = ((bits >> word(16)) ^ bits) * word(0x45D9F3B)
    bits = (bits >> word(8)) & word(0xFFFFFF)
    return bits.astype("float32") * tirx.const(2.0**-23, "float32") - tirx.const(1.0, "float32")


def _with_operands(call: relax.Call, operands: list[relax.Expr]) -> relax.Call:
    """`call` with other first operands."""
    return relax.Call(call.op, [*operands, *call.args[len(operands) :]], call.attrs, call.ty_args)


def _is_single(x: relax.Expr) -> bool:
    return isinstance(x.ty, relax.TensorType) and str(x.ty.dtype) == "float32"


def _terms(call: relax.Call, result: relax.Var | None) -> int:
    """Number of terms of the sums of a product or reduction."""
    kind, x = operator(call), list(shape(call.args[0]) if call.args and _is_single(call.args[0]) else ())
    if kind in _CONVOLUTIONS:
        weights = shape(call.args[1])
        layout = str(call.attrs.kernel_layout)
        return max(1, math.prod(weights) // weights[layout.index("O")])
    if kind == "matmul":
        return max(1, x[-1])
    if kind in _SUMS and result is not None:
        return max(1, math.prod(x) // max(1, math.prod(shape(result))))
    return 1


def _variables_of_layers(products: Mapping[str, str], layers: Iterable[str]) -> set[str]:
    """Variables of the products that `layers` are made of, from the layer names of all products.

    A layer that was rewritten has the name of a product with a suffix after a dot. For a layer that is not
    found, all products count.
    """
    variables: set[str] = set()
    for layer in layers:
        parts = layer.split(".")
        begins = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        names = next((begin for begin in begins if begin in products.values()), None)
        variables |= {var for var, name in products.items() if name == names} or {*products}
    return variables
