"""Networks of one kernel or two, of every kind that there is."""

import numpy as np
import tvm
from graphs import as_module, main_module
from tvm import relax, tirx
from tvm.relax import op
from tvm.script import relax as R

from pimflow.relay_passes.flat import LAYER_ROLES, main_bindings, shape

RNG = np.random.default_rng(0)


def constant(*dims: int) -> relax.Expr:
    return relax.const(RNG.standard_normal(dims, np.float32))


def graph(network, *shapes: tuple[int, ...]) -> tvm.IRModule:
    """``main`` of `network`, a function of Relax expressions."""
    params = [relax.Var(f"p{i}", relax.TensorType(dims, "float32")) for i, dims in enumerate(shapes)]
    return main_module(params, lambda builder: network(builder.emit, *params))


def kernels(mod: tvm.IRModule) -> dict[str, tirx.PrimFunc]:
    return {gv.name_hint: f for gv, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)}


def convolution(x: relax.Expr, filters: relax.Expr, **attrs) -> relax.Expr:
    return op.nn.conv2d(x, filters, data_layout="NHWC", kernel_layout="OHWI", **attrs)


def shared_sum(emit, x):
    """The sum is read by another kernel beside the convolution's: a second result."""
    total = emit(op.add(x, constant(1, 1, 1, 16)))
    y = emit(convolution(total, constant(16, 3, 3, 16), padding=1))
    return emit(op.add(emit(op.nn.max_pool2d(y, layout="NHWC")), total))


def _elu(emit, y):
    unit = relax.const(1.0)
    return emit(op.subtract(emit(op.nn.relu(y)), emit(op.nn.relu(emit(op.subtract(unit, emit(op.exp(y))))))))


def _softplus(emit, y):
    return emit(op.log(emit(op.add(emit(op.exp(y)), relax.const(1.0)))))


def _waves(emit, y):
    """Steps that together are continuous."""
    up, down = emit(op.subtract(emit(op.ceil(y)), y)), emit(op.subtract(y, emit(op.floor(y))))
    return emit(op.add(emit(op.multiply(up, down)), emit(op.abs(emit(op.subtract(y, emit(op.round(y))))))))


def _root(emit, y):
    """Infinite of 0, which is what kernels have in channels that only pad a tile."""
    shift = relax.const(1 + RNG.random(shape(y)[3], np.float32))
    return emit(op.rsqrt(emit(op.multiply(emit(op.add(emit(op.power(y, relax.const(2.0))), shift)), shift))))


# Activations as canonical form leaves them; together they have all elementwise operators there are.
ACTIVATIONS = {
    "": lambda emit, y: y,
    "relu": lambda emit, y: emit(op.nn.relu(y)),
    "leaky": lambda emit, y: emit(op.nn.leakyrelu(y, 0.25)),
    "slopes": lambda emit, y: emit(op.nn.prelu(y, constant(shape(y)[3]), axis=3)),
    "silu": lambda emit, y: emit(op.nn.silu(y)),
    "swish": lambda emit, y: emit(op.multiply(y, emit(op.sigmoid(y)))),
    "gelu": lambda emit, y: emit(op.nn.gelu(y)),
    "erf": lambda emit, y: emit(op.multiply(y, emit(op.erf(y)))),
    "hard": lambda emit, y: emit(op.clip(emit(op.add(y, relax.const(0.5))), 0.0, 1.0)),
    "hard swish": lambda emit, y: emit(op.multiply(y, ACTIVATIONS["hard"](emit, y))),
    "elu": _elu,
    "softplus": _softplus,
    "mish": lambda emit, y: emit(op.multiply(y, emit(op.tanh(_softplus(emit, y))))),
    "softsign": lambda emit, y: emit(op.divide(y, emit(op.add(emit(op.abs(y)), relax.const(1.0))))),
    "signed": lambda emit, y: emit(
        op.multiply(emit(op.sign(y)), emit(op.sqrt(emit(op.power(y, relax.const(2.0))))))
    ),
    "limits": lambda emit, y: emit(
        op.minimum(emit(op.maximum(emit(op.negative(y)), constant(1))), constant(1))
    ),
    "waves": _waves,
    "root": _root,
}


def fused_chain(x_shape, channels, outputs, *, activation="relu", pool=None, mean=False) -> tvm.IRModule:
    """lconv, bias, activation, pooling by `pool` (window, stride, padding), fconv unless there are no
    `outputs`; with their roles.
    """

    def network(emit, x):
        y = emit(convolution(x, constant(channels, 1, 1, x_shape[3])), name_hint="lconv")
        y = emit(op.add(y, constant(1, 1, 1, channels)), name_hint="bias")
        y = ACTIVATIONS[activation](emit, y)
        if pool:
            window, step, padding = pool
            kind = op.nn.avg_pool2d if mean else op.nn.max_pool2d
            options = {"count_include_pad": True} if mean else {}
            y = kind(y, [window] * 2, [step] * 2, [padding] * 4, layout="NHWC", **options)
            y = emit(y, name_hint="pool")
        if not outputs:
            return y
        filters = constant(outputs, 1, 1, channels)
        return emit(convolution(y, filters), name_hint="fconv")

    mod = relax.transform.CanonicalizeBindings()(graph(network, x_shape))
    last = main_bindings(mod)[-1].var.name
    return LAYER_ROLES.attach(mod, {"lconv": "lconv"} | ({last: "fconv"} if outputs else {}))


OPERATORS = {
    "two results": shared_sum,
    "adaptive pool": lambda emit, x: emit(op.nn.adaptive_avg_pool2d(x, (5, 5), layout="NHWC")),
    "softmax": lambda emit, x: emit(op.nn.softmax(x)),
    "layer norm": lambda emit, x: emit(op.nn.layer_norm(x, constant(16), constant(16), [-1])),
    "concat": lambda emit, x: emit(op.concat([x, x], 3)),
    "argmax": lambda emit, x: emit(op.argmax(x, 3)),
    "sort": lambda emit, x: emit(op.sort(x)),
    "split": lambda emit, x: emit(relax.TupleGetItem(emit(op.split(x, 2, 3)), 1)),
    "permute": lambda emit, x: emit(op.permute_dims(x, [0, 3, 1, 2])),
    "squeeze-excite": lambda emit, x: emit(op.multiply(x, emit(op.mean(x, [1, 2], keepdims=True)))),
}


# An elementwise operator reads the sum before the convolution does: the sum cannot wait for it.
# Later, its kernel would store it.
@as_module
def EarlyReader(x: R.Tensor((1, 4, 4, 2), "float32"), w: R.Tensor((2, 1, 1, 2), "float32")):
    sum = R.add(x, x)
    early = R.negative(sum)
    conv = R.nn.conv2d(sum, w, data_layout="NHWC", kernel_layout="OHWI")
    y = R.add(conv, early)
    return y


def values(func: tirx.PrimFunc) -> list[np.ndarray]:
    """What `func` leaves in its parameters, of random ones."""
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal([int(d) for d in p.shape]).astype(str(p.dtype)) for p in func.params]
    library = tvm.compile(tvm.IRModule({"kernel": func.with_attr("global_symbol", "kernel")}), "llvm")
    tensors = [tvm.runtime.tensor(a) for a in arrays]
    library["kernel"](*tensors)
    return [t.numpy() for t in tensors]
