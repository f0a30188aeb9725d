"""``tvm.relay.frontend``: importers."""

from __future__ import annotations

import os
from collections.abc import Mapping

import onnx
import tvm

from pimflow.errors import UsageError

_REPLACEMENTS = {
    "from_pytorch": "tvm.relax.frontend.torch.from_exported_program, or give pimflow.compile the program",
    "from_keras": "the model as ONNX (tf2onnx)",
    "from_tensorflow": "the model as ONNX (tf2onnx)",
    "from_tflite": "tvm.relax.frontend.tflite.from_tflite, or the model as ONNX (tf2onnx)",
    "from_mxnet": "the model as ONNX",
    "from_coreml": "the model as ONNX",
    "from_caffe": "the model as ONNX",
    "from_caffe2": "the model as ONNX",
    "from_darknet": "the model as ONNX",
    "from_oneflow": "the model as ONNX",
    "from_paddle": "the model as ONNX (paddle2onnx)",
}


class OnnxParams(dict[str, tvm.runtime.Tensor]):
    """Parameters of a module from `from_onnx`, with the model that they are from.

    Attributes
    ----------
    model : ModelProto
        What `relay.build` verifies the built module against; as `zoo.load_exact` gives it.
    """

    def __init__(self, values: Mapping[str, tvm.runtime.Tensor], model: onnx.ModelProto) -> None:
        super().__init__(values)
        self.model = model


def from_onnx(
    model: onnx.ModelProto | str | os.PathLike,
    shape: Mapping[str, tuple[int, ...]] | None = None,
    dtype: str = "float32",
    opset: int | None = None,
    freeze_params: bool = True,
    convert_config: Mapping[str, object] | None = None,
) -> tuple[tvm.IRModule, OnnxParams]:
    """An ONNX network as a Relax module, and its parameters.

    Give the parameters to ``relay.build``, also if there are none: they have the model, which it verifies
    against.

    Parameters
    ----------
    shape : mapping of str to tuple of int, optional
        Shapes of inputs that the model does not fix.
    dtype : str
        Must be float32: the file has the types of its inputs.
    opset : int, optional
        Version of the operators, if that in the model is wrong.
    freeze_params : bool
        Whether weights are constants of the module, as in the last Relay; else they are inputs of
        ``main``, and returned for ``relay.build(…, params=params)``.
    convert_config : mapping, optional
        Must be empty.

    Raises
    ------
    ModelError, UnsupportedOpError
        If the network cannot be read or imported.
    UsageError
        For arguments that Relax has no counterpart of.
    """
    from tvm import relax

    from pimflow import zoo
    from pimflow.frontend import onnx_graph

    if dtype != "float32" or convert_config:
        raise UsageError("from_onnx takes neither dtype nor convert_config; change the model instead")
    if opset is not None and not 1 <= opset < 1 << 31:
        raise UsageError(f"opset {opset}: ONNX counts them from 1 on")
    exact = zoo.load_exact(model, dict(shape or {}))
    if opset is not None:
        for opset_entry in exact.opset_import:
            if opset_entry.domain in ("", "ai.onnx"):
                opset_entry.version = opset
    proto = zoo.without_double(exact)
    mod = onnx_graph.import_onnx(proto, keep_params=not freeze_params)
    if freeze_params:
        return mod, OnnxParams({}, exact)
    input_count = int(mod["main"].attrs["num_input"])
    mod, values = relax.frontend.detach_params(mod)
    names = [param.name for param in mod["main"].params[input_count:]]
    return mod, OnnxParams(dict(zip(names, values.get("main", []), strict=True)), exact)


def __getattr__(name: str) -> object:
    if name in _REPLACEMENTS:
        raise AttributeError(
            f"TVM has no Relay since 0.20, so no relay.frontend.{name}; use {_REPLACEMENTS[name]}"
        )
    raise AttributeError(f"module 'tvm.relay.frontend' has no attribute '{name}'; there is from_onnx")
