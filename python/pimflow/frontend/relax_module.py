"""Relax modules of TVM's importers or of a user: canonical form, inputs, outputs, reference."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping

import numpy as np
import tvm
from tvm import relax

from pimflow.errors import ModelError, PimflowError, UnknownNameError, UnsupportedOpError, last_line
from pimflow.frontend.reference import Reference, Run
from pimflow.host import stderr
from pimflow.pim_backend.runtime.network_module import infer, pack
from pimflow.relay_passes.canonical.canonicalise import Canonicalise
from pimflow.relay_passes.flat import layer_name, main_bindings, operator
from pimflow.relay_passes.regions.copy_results import CopyResults


def canonical(
    mod: tvm.IRModule, name: str = "module", pushed: dict[str, np.ndarray] | None = None
) -> tvm.IRModule:
    """Bring `mod` into canonical form; see `Canonicalise`.

    Parameters
    ----------
    pushed : dict of str to ndarray, optional
        See `Canonicalise`.

    Raises
    ------
    ModelError, UnsupportedOpError
        If it has no ``main``, a pass cannot handle an operator, or a layer reads a tensor without elements.
    """
    main(mod)
    with warnings.catch_warnings(), stderr.hidden():
        warnings.simplefilter("ignore")
        result = _canonical(mod, name, pushed)
    if isinstance(result, PimflowError):
        raise result
    _refuse_empty_tensors(result)
    return result


def _canonical(
    mod: tvm.IRModule, name: str, pushed: dict[str, np.ndarray] | None
) -> tvm.IRModule | PimflowError:
    """The canonical module or an error; raised here, it would keep TVM's builders, which warn."""
    try:
        return CopyResults()(Canonicalise(pushed)(mod))
    except PimflowError as error:
        return error.with_traceback(None)
    except Exception as error:  # any error of an operator in a pass
        return ModelError(f"model '{name}' cannot be imported: {last_line(error)}")


def _refuse_empty_tensors(mod: tvm.IRModule) -> None:
    """Raise `UnsupportedOpError` for a tensor without elements: a constant, or an operand of a product.

    A file with such a constant cannot be loaded.
    """
    for binding in main_bindings(mod):
        product = operator(binding.value) in ("nn.conv2d", "matmul")
        empty: list[str] = []

        def note(expr: relax.Expr, product: bool = product, empty: list[str] = empty) -> None:
            """Add the shape of an empty operand to `empty`."""
            read = isinstance(expr, tvm.ir.GenericConst) or (product and isinstance(expr, relax.Var))
            dims = (sizes(expr.ty) if read else None) or ()
            if 0 in dims:
                empty.append("x".join(map(str, dims)))

        relax.analysis.post_order_visit(binding.value, note)
        if empty:
            raise UnsupportedOpError(
                f"'{layer_name(mod, binding.var)}' reads a tensor of shape {empty[0]}, which holds nothing; "
                "export the model without it"
            )


def main(mod: tvm.IRModule) -> relax.Function:
    """The function ``main``; raises `ModelError` if there is none."""
    function = next((mod[gv] for gv in mod.get_global_vars() if gv.name_hint == "main"), None)
    if not isinstance(function, relax.Function):
        raise ModelError("the module has no Relax function 'main'")
    return function


def with_shapes(mod: tvm.IRModule, shapes: Mapping[str, tuple[int, ...]]) -> tvm.IRModule:
    """`mod` with the symbolic dimensions of its inputs bound by `shapes`.

    Raises
    ------
    UnknownNameError, ModelError
        If an input does not exist, or has another shape.
    """
    params = {v.name: v for v in main(mod).params}
    bound: dict[str, int] = {}
    for name, requested in shapes.items():
        if name not in params:
            raise UnknownNameError("input", name, params)
        declared = list(params[name].ty.shape)
        fits = len(declared) == len(requested)
        for dim, size in zip(declared, requested):
            if isinstance(dim, tvm.tirx.Var):
                fits = fits and bound.setdefault(dim.name, size) == size
            elif isinstance(dim, tvm.tirx.IntImm):
                fits = fits and int(dim) == size
        if not fits:
            raise ModelError(f"input '{name}' has shape {sizes(params[name].ty)}, not {list(requested)}")
    fixed = relax.transform.BindSymbolicVars(bound)(mod) if bound else mod
    for param in main(fixed).params:  # dimensions that depend on others
        requested, actual = shapes.get(param.name), sizes(param.ty)
        if requested is not None and actual is not None and actual != list(requested):
            raise ModelError(
                f"input '{param.name}' has shape {actual} by other inputs, not {list(requested)}"
            )
    return fixed


def inputs(mod: tvm.IRModule) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every input of ``main``; raises `ModelError` for an open shape."""
    types = {}
    for var in main(mod).params:
        if not isinstance(var.ty, relax.TensorType):
            raise UnsupportedOpError(f"input '{var.name}' is no tensor")
        dims = sizes(var.ty)
        if dims is None or not all(isinstance(d, int) for d in dims):
            raise ModelError(
                f"input '{var.name}' has dynamic shape {dims}; fix it, "
                f"for example --shape {var.name}=1,3,224,224"
            )
        types[var.name] = (tuple(dims), str(var.ty.dtype))
    return types


def sizes(tensor: relax.TensorType) -> list[int | str] | None:
    """Dimensions of a tensor, symbolic ones as text; None if their number is open."""
    if tensor.shape is None:
        return None
    return [int(d) if isinstance(d, int | tvm.tirx.IntImm) else str(d) for d in tensor.shape]


def outputs(mod: tvm.IRModule) -> int:
    """Number of tensors that ``main`` returns."""
    result = main(mod).ret_ty
    return len(result.fields) if isinstance(result, relax.TupleType) else 1


def output_shapes(mod: tvm.IRModule) -> list[tuple[int, ...]]:
    """Shapes of all tensors that ``main`` returns; `mod` has fixed shapes."""
    result = main(mod).ret_ty
    fields = result.fields if isinstance(result, relax.TupleType) else [result]
    return [tuple(sizes(field) or ()) for field in fields]


def weight_bytes(mod: tvm.IRModule) -> int:
    """Bytes of all constants of ``main``."""
    total = 0

    def add(expr: relax.Expr) -> None:
        """Add the bytes of a constant to the total."""
        nonlocal total
        if isinstance(expr, tvm.ir.GenericConst):
            total += math.prod(expr.value.shape) * np.dtype(str(expr.value.dtype)).itemsize

    relax.analysis.post_order_visit(main(mod), add)
    return total


def reference(mod: tvm.IRModule) -> Reference:
    """Reference of `mod`: TVM's own pipeline compiles it for the CPU."""

    def prepare() -> Run:
        """Compile the module for the CPU."""
        plain = relax.transform.DecomposeOpsForInference()(mod)
        with stderr.hidden():  # warnings do not concern the user
            executable = tvm.compile(plain, tvm.target.Target("llvm"))
        return functools.partial(infer, pack(executable, inputs(mod), outputs(mod)))

    return Reference(prepare)
