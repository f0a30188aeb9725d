"""Networks, layers and plans whose GPU kernels the sweep of ``prove_kernels.py`` checks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
import tvm
from integer_cases import WITH_FLOATS, integer_models
from tvm import relax
from tvm.relax import op

import pimflow
from pimflow import frontend, zoo
from pimflow.commands.shared import prepare
from pimflow.commands.shared.options import NetworkOptions
from pimflow.commands.shared.search import SearchRequest
from pimflow.compiler.build import apply_search_result
from pimflow.compiler.kernel_checks.kernels import PlainKernels
from pimflow.core.kernel import ConvGeometry
from pimflow.core.rewrite import FusedGroupRewrite
from pimflow.pim_backend.runtime.targets import target_by_name
from pimflow.placement import apply
from pimflow.primitives import PRIMITIVES
from pimflow.primitives.kernels.prim_func import kernel as primitive_kernel
from pimflow.zoo.language.decoder import Decoder
from pimflow.zoo.language.decoder_parts import Experts
from pimflow.zoo.language.graph import step_graph

EXTENTS = (1, 3, 17, 129)  # odd ones: no tile divides them
QUERY_HEADS = (1, 2, 3, 4, 5, 7, 8)  # of a head of keys and values
CONTEXTS = (1, 17, 256, 1024)
SAME = {"kh": 3, "kw": 3, "padding": (1, 1, 1, 1)}
LAYERS = (
    ConvGeometry(n=1, h=28, w=28, c=48, oc=64, **SAME),
    ConvGeometry(n=2, h=13, w=17, c=20, oc=24, kh=5, kw=3, stride=(2, 1), padding=(2, 1, 0, 2)),
    ConvGeometry(n=1, h=7, w=7, c=96, oc=40),
    ConvGeometry(n=1, h=28, w=28, c=48, oc=48, groups=48, **SAME),
)
FUSED = ("toy", "squeezenet-1.1", "mobilenet-v2")
PLANNED = ("toy", "mobilenet-v2", "resnet-50", "efficientnet-b0")
PLANS = {"every mode": {}, "splits": {"modes": "gpu,split"}, "pipelines": {"modes": "gpu,pipeline"}}


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """Kernels of the sweep: a group of its table, a name, the storage type, and what makes them."""

    group: str
    name: str
    dtype: str
    make: Callable[[], PlainKernels]

    @property
    def part(self) -> str:
        """What several groups have in common, such as all decoders."""
        return self.group.partition(":")[0]


def cases() -> Iterator[KernelCase]:
    """All cases, part by part."""
    for dtype in ("fp16", "fp32"):
        for name in zoo.names():
            yield _case("networks", name, dtype, network_kernels, name, dtype)
        for heads, context in itertools.product(QUERY_HEADS, CONTEXTS):
            title = f"{heads} query heads, context {context}"
            group = f"decoders: {heads} query heads a head of keys"
            yield _case(group, title, dtype, decoder_kernels, heads, context, dtype)
        for rows, columns, depth in itertools.product(EXTENTS, repeat=3):
            title = f"product {rows} x {columns} x {depth}"
            yield _case("odd extents: products", title, dtype, product_kernels, rows, columns, depth, dtype)
        for size, channels, filters in itertools.product(EXTENTS[1:3], EXTENTS, EXTENTS):
            title = f"3x3 convolution {size} x {size}, {channels} to {filters} channels"
            group, sizes = "odd extents: convolutions", (channels, filters)
            yield _case(group, title, dtype, convolution_kernels, size, sizes, dtype)
        for rows, columns in itertools.product(EXTENTS, repeat=2):
            title = f"reductions of {rows} x {columns}"
            yield _case("odd extents: reductions", title, dtype, reduction_kernels, rows, columns, dtype)
        for name in FUSED:
            yield _case("fused groups", name, dtype, planned_kernels, name, dtype, fuse=True, modes="gpu")
        chains = {"decompose": "tucker:0.5", "fuse_activations": True, "modes": "gpu"}
        yield _case("fused groups", "chains of toy", dtype, planned_kernels, "toy", dtype, **chains)
        for name, (title, options) in itertools.product(PLANNED, PLANS.items()):
            yield _case(
                f"plans: {title}", f"{title} of {name}", dtype, planned_kernels, name, dtype, **options
            )
    for name, primitive in PRIMITIVES.items():
        if primitive.target == "cuda" and primitive.places:
            yield _case("primitives", name, "fp32", primitive_kernels, name)
    for dtype in ("fp16", "fp32"):
        for kind, name, build in integer_models():
            if dtype == "fp16" or kind in WITH_FLOATS:
                yield _case(f"integers: {kind}", name, dtype, integer_kernels, build, dtype)


def _case(
    group: str, name: str, dtype: str, make: Callable, *arguments: object, **options: object
) -> KernelCase:
    return KernelCase(group=group, name=name, dtype=dtype, make=lambda: make(*arguments, **options))


def network_kernels(model: object, dtype: str, context: int | None = None) -> PlainKernels:
    """The kernels of a network of which the GPU does everything."""
    system, options = pimflow.system(dtype=dtype), NetworkOptions(context=context)
    prepared = prepare.prepare(prepare.load(model, options), options, system)
    return PlainKernels.from_network(prepared.network.module, system)


def integer_kernels(build: Callable[[], onnx.ModelProto], dtype: str) -> PlainKernels:
    """The kernels of a network of integers that `build` makes."""
    return network_kernels(build(), dtype)


def decoder_kernels(
    query_heads: int, context: int, dtype: str, experts: Experts | None = None
) -> PlainKernels:
    """The kernels of a step of a small decoder with two heads of keys and values."""
    decoder = Decoder(
        name="small",
        layers=1,
        hidden=96,
        heads=2 * query_heads,
        kv_heads=2,
        head_size=32,
        feed_forward=160,
        experts=experts,
        vocabulary=61,
        max_context=1024,
        source="scripts/kernel_cases.py",
    )
    return network_kernels(step_graph(decoder, context), dtype)


def planned_kernels(model: str, dtype: str, tiling: str | None = None, **options: object) -> PlainKernels:
    """The kernels of a network by the plan of a search; `tiling` replaces the tiles of its fused groups."""
    request = SearchRequest.from_arguments(pimflow.system(dtype=dtype), **options).validate()
    network, search_result = request.find_plan(prepare.load(model, request.options))
    if tiling is not None:
        choices = (
            replace(choice, rewrite=FusedGroupRewrite(tiling=tiling))
            if isinstance(choice.rewrite, FusedGroupRewrite)
            else choice
            for choice in search_result.plan.choices
        )
        plan = replace(search_result.plan, choices=tuple(choices))
        search_result = apply(search_result.graph, search_result.system, plan)
    return PlainKernels.from_network(apply_search_result(network.module, search_result), request.system)


def primitive_kernels(name: str, layers: Sequence[ConvGeometry] = LAYERS) -> PlainKernels:
    """The kernels of a primitive of the GPU, for the layers that it applies to."""
    primitive = PRIMITIVES[name]
    functions = {
        f"layer_{index}": primitive_kernel(primitive, layer)
        for index, layer in enumerate(layers)
        if primitive.applies(layer)
    }
    return PlainKernels(
        module=tvm.IRModule(functions),
        target=target_by_name("cuda+pim"),
        limits=pimflow.system().gpu.kernel_limits("fp32"),
    )


def product_kernels(rows: int, columns: int, depth: int, dtype: str, batch: int = 1) -> PlainKernels:
    """A product of matrices, both computed."""
    return _kernels(relax.op.matmul, (batch, rows, depth), (batch, depth, columns), dtype=dtype)


def convolution_kernels(
    size: int, channels: tuple[int, int], dtype: str, window: int = 3, stride: int = 1, groups: int = 1
) -> PlainKernels:
    """A convolution of a square map, from channels[0] to channels[1], with its bias and activation."""
    layer = _convolution(channels, window, stride, groups)
    return _kernels(layer, (1, channels[0], size, size), dtype=dtype)


def flat_convolution_kernels(size: int, channels: tuple[int, int], parts: int, dtype: str) -> PlainKernels:
    """A convolution of a square map whose result is stored as `parts` rows, as in front of a product."""
    layer = _convolution(channels, 3, 1, 1)
    dims = (1, parts, channels[1] * size * size // parts)
    return _kernels(lambda x: op.reshape(layer(x), dims), (1, channels[0], size, size), dtype=dtype)


def _convolution(
    channels: tuple[int, int], window: int, stride: int, groups: int
) -> Callable[[relax.Expr], relax.Expr]:
    """A convolution with its bias and activation, in the layout of ONNX."""
    inputs, filters = channels
    rng = np.random.default_rng(0)
    weights = relax.const(rng.uniform(-1, 1, (filters, inputs // groups, window, window)).astype("float32"))
    bias = relax.const(rng.uniform(-1, 1, (1, filters, 1, 1)).astype("float32"))

    def compute(x: relax.Expr) -> relax.Expr:
        """The layer."""
        y = op.nn.conv2d(x, weights, strides=stride, padding=window // 2, groups=groups)
        return op.nn.relu(op.add(y, bias))

    return compute


def reduction_kernels(rows: int, columns: int, dtype: str) -> PlainKernels:
    """A softmax along the rows of a matrix, and means along its columns."""

    def compute(x: relax.Expr) -> relax.Expr:
        """Both reductions, one after the other."""
        return op.mean(op.nn.softmax(x, axis=-1), axis=[0])

    return _kernels(compute, (rows, columns), dtype=dtype)


def _kernels(compute: Callable[..., relax.Expr], *shapes: tuple[int, ...], dtype: str) -> PlainKernels:
    """The kernels of a function of Relax expressions."""
    system = pimflow.system(dtype=dtype)
    parameters = [relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)]
    builder = relax.BlockBuilder()
    with builder.function("main", parameters):
        with builder.dataflow():
            result = builder.emit_output(builder.normalize(compute(*parameters)))
        builder.emit_func_output(result)
    return PlainKernels.from_network(frontend.load(builder.get()).module, system)
