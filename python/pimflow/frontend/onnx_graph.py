"""The import of ONNX networks into canonical Relax form."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import warnings
from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx
import tvm
from tvm.relax.analysis import free_vars

from pimflow import zoo
from pimflow.errors import ModelError, PimflowError, UnsupportedOpError, last_line
from pimflow.frontend.empty_tensors import fold_empty_tensors
from pimflow.frontend.float8 import FLOAT8
from pimflow.frontend.naming import with_names
from pimflow.frontend.onnx_bodies import BODIES, needs_body
from pimflow.frontend.onnx_importer import NamingImporter
from pimflow.frontend.onnx_rewrites import (
    drop_unread_results,
    inference_graph,
    is_supported,
    opset_of,
    refuse_training,
    replace_outdated,
    simplify,
    strip_weights,
)
from pimflow.frontend.onnx_roles import with_stored_roles
from pimflow.frontend.quantised_layers import fuse_quantised_layers
from pimflow.frontend.relax_module import canonical
from pimflow.host import stderr
from pimflow.relay_passes.flat import ACTIVATION_TYPES, CACHE_TYPES, WEIGHT_TYPES, main_bindings
from pimflow.zoo import foreign


def from_onnx(model: onnx.ModelProto, pushed: dict[str, np.ndarray] | None = None) -> tvm.IRModule:
    """Import an ONNX network with fixed shapes into canonical Relax form; for `pushed_biases` see
    `Canonicalise`.

    Raises
    ------
    ModelError, UnsupportedOpError
        If TVM cannot import the network, even after ONNX Runtime has folded the operators that depend only on
        shapes.
    """
    caches = zoo.cache_types(model)

    def convert(light: onnx.ModelProto, weights: onnx.GraphProto) -> tvm.IRModule:
        """The canonical module of a network, which knows the type of its caches."""
        mod = _import(light, weights)
        return canonical(CACHE_TYPES.attach(mod, caches) if caches else mod, model.graph.name, pushed)

    mod = _convert_or_simplify(model, convert)
    types = zoo.weight_types(model) | foreign.narrow_products(model)
    mod = WEIGHT_TYPES.attach(mod, types) if types else mod
    integers = zoo.activation_types(model)
    mod = ACTIVATION_TYPES.attach(mod, integers) if integers else mod
    return with_stored_roles(mod, model)


def import_onnx(model: onnx.ModelProto, keep_params: bool = False) -> tvm.IRModule:
    """Import an ONNX network with fixed shapes into Relax, not canonical; raises the errors of `from_onnx`.

    Parameters
    ----------
    keep_params : bool
        Whether weights are further inputs of ``main``, with their values in its attribute ``params``.
    """
    return _convert_or_simplify(model, lambda *m: _import(*m, keep_params))


def _convert_or_simplify(
    model: onnx.ModelProto, convert: Callable[[onnx.ModelProto, onnx.GraphProto], tvm.IRModule]
) -> tvm.IRModule:
    """Convert a model, or, if that fails, its simplified form; `convert` gets the model and its weights."""
    refuse_training(model)
    light = replace_outdated(strip_weights(model))
    zoo.name_nodes(light)
    try:
        _expand(light, model.graph)
        constants = list(light.graph.initializer)
        light = inference_graph(light)
        light.graph.initializer.extend(constants)
        return convert(light, model.graph)
    except (ModelError, UnsupportedOpError) as error:
        light.graph.initializer.extend(zoo.with_weights(model).graph.initializer)
        rewritten = simplify(light)
        try:
            _expand(rewritten, rewritten.graph)  # definitions have operators that need it, and constants
            return convert(inference_graph(rewritten), rewritten.graph)
        except ModelError:  # is less precise than the error of the original network
            if isinstance(error, UnsupportedOpError):
                raise error from None
            raise


def _expand(model: onnx.ModelProto, weights: onnx.GraphProto) -> None:
    """Replace operators that the importer lacks, or gets wrong, in place; `weights` has all weights."""
    drop_unread_results(model.graph)
    tensors = {tensor.name: tensor for tensor in weights.initializer}
    fold_empty_tensors(model, tensors)
    fuse_quantised_layers(model, tensors | foreign.constants(model.graph))
    foreign.expand(model, tensors)
    scalars = {name for name, tensor in tensors.items() if math.prod(tensor.dims) == 1}
    floats8 = {name for name, tensor in tensors.items() if tensor.data_type in FLOAT8}
    floats8 |= {value.name for value in model.graph.value_info if value.type.tensor_type.elem_type in FLOAT8}
    needs = functools.partial(needs_body, scalars=scalars, floats8=floats8)
    foreign.expand(model, tensors, BODIES, needs)


def _import(model: onnx.ModelProto, weights: onnx.GraphProto, keep_params: bool = False) -> tvm.IRModule:
    _check_operators(model)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), stderr.hidden():
        warnings.simplefilter("ignore")
        module = _try_import(model, weights, keep_params)
    if isinstance(module, PimflowError):
        raise module
    return module


def _try_import(
    model: onnx.ModelProto, weights: onnx.GraphProto, keep_params: bool
) -> tvm.IRModule | PimflowError:
    """The module or an error, which is not raised here: it would keep a builder alive, which then warns."""
    importer, name = NamingImporter(weights, keep_params), model.graph.name
    try:
        mod = importer.from_onnx(model.graph, opset_of(model))  # prints operators that it cannot import
    except PimflowError as error:
        return type(error)(f"model '{name}': {error}")
    except tvm.error.OpNotImplemented as error:
        return UnsupportedOpError(f"model '{name}': {last_line(error)}")
    except Exception as error:  # any error of its operators
        return ModelError(f"model '{name}' cannot be imported: {last_line(error)}")
    return with_names(mod, _names_of_steps(mod, {var.name: layer for var, layer in importer.names.items()}))


def _names_of_steps(mod: tvm.IRModule, names: dict[str, str]) -> dict[str, str]:
    """`names`, and names for the other variables: they are steps of the layer that reads them first."""
    readers: dict[str, str] = {}
    counts: Counter[str] = Counter()
    result = dict(names)
    for binding in reversed(main_bindings(mod)):
        name = binding.var.name
        if name not in names and name in readers:
            counts[readers[name]] += 1
            result[name] = f"{readers[name]}.step{counts[readers[name]]}"
        layer = names.get(name, readers.get(name))
        for operand in free_vars(binding.value) if layer is not None else ():
            readers[operand.name] = layer
    return result


def _check_operators(model: onnx.ModelProto) -> None:
    """Raise `UnsupportedOpError`, which names operator and node, if the importer has no rule for a node."""
    unsupported = [node for node in model.graph.node if not is_supported(node)]
    if unsupported:
        first = unsupported[0]
        kinds = sorted({n.op_type for n in unsupported} - {first.op_type})
        others = f"; nor can {', '.join(kinds)}" if kinds else ""
        raise UnsupportedOpError(
            f"model '{model.graph.name}': operator {first.op_type} of node '{first.name or first.output[0]}' "
            f"cannot be imported{others}; export the network without it, or cut the model there"
        )
