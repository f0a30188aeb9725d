"""``tvm.relay`` for a TVM without Relay: the entry points of its users, over Relax.

TVM removed Relay in 0.20. The import of pimflow restores what is needed to compile a network::

    import pimflow
    from tvm import relay
    from tvm.contrib import graph_executor

    mod, params = relay.frontend.from_onnx(onnx.load("net.onnx"), {"input": (1, 3, 224, 224)})
    with tvm.transform.PassContext(opt_level=3, config={"pimflow.objective": "energy"}):
        lib = relay.build(mod, target="llvm+pim", params=params)
    m = graph_executor.GraphModule(lib["default"](tvm.cpu()))

Modules are Relax modules; use the passes and analyses of ``tvm.relax``.
"""

from __future__ import annotations

from pimflow.tvm_extension.relay import frontend
from pimflow.tvm_extension.relay.build_module import (
    GraphExecutorFactoryModule,
    build,
    load_param_dict,
    save_param_dict,
)

__all__ = ["GraphExecutorFactoryModule", "build", "frontend", "load_param_dict", "save_param_dict"]

_REPLACEMENTS = {
    "analysis": "tvm.relax.analysis",
    "backend": "what relay.build returns",
    "create_executor": "relay.build and tvm.contrib.graph_executor.GraphModule",
    "dataflow_pattern": "tvm.relax.dpl",
    "expr": "tvm.relax.expr",
    "expr_functor": "tvm.relax.expr_functor",
    "image": "tvm.relax.op.image",
    "nn": "tvm.relax.op.nn",
    "op": "tvm.relax.op",
    "optimize": "relay.build",
    "qnn": "a network in floating point: there is no quantised dialect",
    "quantize": "a network in floating point: there is no quantised dialect",
    "testing": "the networks of pimflow.zoo",
    "transform": "tvm.relax.transform",
    "var": "tvm.relax.Var",
    "vision": "tvm.relax.op.vision",
    "vm": "tvm.compile and tvm.relax.VirtualMachine",
}


def replacement_hint(name: str) -> str:
    """The message for users who look for ``tvm.relay.<name>``."""
    from tvm import relax

    replacement = _REPLACEMENTS.get(name) or (f"tvm.relax.{name}" if hasattr(relax, name) else "tvm.relax")
    return f"TVM has no Relay since 0.20, so no tvm.relay.{name}; use {replacement}"


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(replacement_hint(name))
