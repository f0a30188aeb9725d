"""Is attention found however it is spelled out, and does it compute what its description says?"""

from dataclasses import replace

import numpy as np
import pytest
import tvm
from attention_values import attend
from decoders import DecoderModel
from graphs import PLAIN_CODE, as_module, close, main_module, run
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_graphs import graph
from length import examples, long_but
from tvm import relax
from tvm.relax import op
from tvm.script import ir as I
from tvm.script import relax as R

from pimflow import frontend
from pimflow.compiler import phases
from pimflow.core.attention import Attention
from pimflow.relay_passes.attention import ATTENTION, attention_from_call, attention_function
from pimflow.relay_passes.canonical import attention_operands
from pimflow.relay_passes.canonical.recognise_attention import RecogniseAttention
from pimflow.relay_passes.flat import main_bindings, operator
from pimflow.relay_passes.kernels.group_kernels import GroupKernels
from pimflow.relay_passes.regions.extract_regions import extract_regions
from pimflow.simulators.gpu.region_kernels import gpu_kernels

STEP = Attention(
    batch=1, heads=4, kv_heads=2, head_size=8, value_size=8, queries=1, keys=8, scale=8**-0.5, offset=7
)


def attention_calls(mod: tvm.IRModule) -> list[Attention]:
    """The attention that ``main`` calls."""
    calls = (attention_from_call(mod, binding.value) for binding in main_bindings(mod))
    return [attention for attention in calls if attention is not None]


@as_module
def RecognisedAttentionBefore(
    q: R.Tensor((1, 2, 1, 4), "float32"),
    k: R.Tensor((1, 2, 3, 4), "float32"),
    v: R.Tensor((1, 2, 3, 5), "float32"),
):
    half = R.multiply(q, R.const(0.5, "float32"))
    kt = R.permute_dims(k, [0, 1, 3, 2])
    s = R.matmul(half, kt)
    p = R.nn.softmax(s, axis=-1)
    y = R.matmul(p, v)
    return y


@I.ir_module
class RecognisedAttentionExpected:
    @R.function(private=True)
    def attention(
        q: R.Tensor((1, 2, 1, 4), "float32"),
        k: R.Tensor((1, 2, 3, 4), "float32"),
        v: R.Tensor((1, 2, 3, 5), "float32"),
    ):
        with R.dataflow():
            kt = R.permute_dims(k, [0, 1, 3, 2])
            s = R.matmul(q, kt)
            scaled = R.multiply(s, R.const(0.5, "float32"))
            p = R.nn.softmax(scaled, axis=-1)
            y = R.matmul(p, v)
            R.output(y)
        return y

    @R.function
    def main(
        q: R.Tensor((1, 2, 1, 4), "float32"),
        k: R.Tensor((1, 2, 3, 4), "float32"),
        v: R.Tensor((1, 2, 3, 5), "float32"),
    ):
        cls = RecognisedAttentionExpected
        with R.dataflow():
            y = cls.attention(q, k, v)
            R.output(y)
        return y


def plain(mod: tvm.IRModule) -> tvm.IRModule:
    """`mod` without what its functions say about themselves."""
    return tvm.IRModule({gv: f.without_attr(ATTENTION) for gv, f in mod.functions_items()})


def test_the_products_become_one_call():
    after = RecogniseAttention()(RecognisedAttentionBefore)
    assert attention_calls(after) == [
        Attention(batch=1, heads=2, kv_heads=2, head_size=4, value_size=5, queries=1, keys=3, scale=0.5)
    ]
    tvm.ir.assert_structural_equal(plain(after), RecognisedAttentionExpected)
    close(RecognisedAttentionBefore, after)
    tvm.ir.assert_structural_equal(RecogniseAttention()(after), after)


def test_a_cache_of_any_size_is_found():
    """Of 2^27 elements here: where they lie is worked out from the axes, not element by element."""
    batch, heads, keys, size = 8, 32, 4096, 128
    q = relax.Var("q", relax.TensorType((batch, heads, 1, size), "float32"))
    k, v = (relax.Var(name, relax.TensorType((batch, keys, heads, size), "float32")) for name in "kv")

    def network(builder):
        turned = builder.emit(op.permute_dims(k, [0, 2, 3, 1]))
        scores = builder.emit(op.nn.softmax(builder.emit(op.matmul(q, turned)), axis=-1))
        return op.matmul(scores, builder.emit(op.permute_dims(v, [0, 2, 1, 3])))

    (call,) = attention_calls(RecogniseAttention()(main_module([q, k, v], network)))
    assert (call.batch, call.heads, call.kv_heads, call.keys) == (batch, heads, heads, keys)


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_places_are_those_of_numpy(data):
    """Digits by axis, as far as there are any, against the elements that NumPy moves."""
    dims = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    x = relax.Var("x", relax.TensorType(dims, "float32"))
    array, last, values, moves = np.arange(np.prod(dims)).reshape(dims), x, {}, []
    builder = relax.BlockBuilder()
    for _ in range(data.draw(st.integers(0, 4))):
        kind = data.draw(st.sampled_from(["reshape", "permute_dims", "broadcast_to", "repeat"]))
        if kind == "reshape":
            count = int(array.size)
            first = data.draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
            array, value = array.reshape(first, -1), op.reshape(last, (first, count // first))
        elif kind == "permute_dims":
            axes = data.draw(st.permutations(range(array.ndim)))
            array, value = array.transpose(axes), op.permute_dims(last, axes)
        elif kind == "broadcast_to":
            wide = [2, *(size if size > 1 else data.draw(st.integers(1, 3)) for size in array.shape)]
            array, value = np.broadcast_to(array, wide), op.broadcast_to(last, wide)
        else:
            axis = data.draw(st.sampled_from([None, *range(array.ndim)]))
            array, value = np.repeat(array, 2, axis), op.repeat(last, 2, axis)
        value = builder.normalize(value)
        last = relax.Var(f"v{len(moves)}", value.ty)
        values[last] = value
        moves.append(last)
    places = attention_operands._places(x, moves, values)
    if places is None:
        return
    offsets = np.zeros(1, np.int64)
    for extent, stride in (digit for axis in places for digit in axis):
        offsets = np.add.outer(offsets, np.arange(extent) * stride).reshape(-1)
    assert [np.prod([n for n, _ in axis], dtype=int) for axis in places] == list(array.shape)
    assert (offsets == array.reshape(-1)).all()


FORMS = {
    "plain": {},
    "shared heads": {"kv_heads": 2},
    "one head for all": {"kv_heads": 1, "scaled": "both"},
    "scaled queries": {"kv_heads": 2, "scaled": "query"},
    "several tokens": {"kv_heads": 2, "tokens": 3, "mask": "causal"},
    "a mask": {"tokens": 2, "mask": "given"},
}


@pytest.fixture(scope="module", params=FORMS.values(), ids=FORMS.keys())
def decoder(request):
    """A network, and what it is made of."""
    return frontend.load(DecoderModel(**request.param).model()), request.param


@pytest.mark.long
def test_every_form_is_described(decoder):
    network, options = decoder
    (attention,) = attention_calls(network.module)
    tokens, mask = options.get("tokens", 1), options.get("mask", "")
    assert attention == replace(
        STEP,
        kv_heads=options.get("kv_heads", 4),
        queries=tokens,
        keys=7 + tokens,
        scale=pytest.approx(8**-0.5),
        causal=mask == "causal",
        offset=7 if mask == "causal" else 0,
        masked=mask == "given",
    )


@pytest.mark.long
def test_a_build_gives_what_onnx_runtime_gives(decoder):
    network, _ = decoder
    machine = relax.VirtualMachine(phases.build(network.module, PLAIN_CODE), tvm.cpu())
    values = network.example_inputs()
    results = machine["main"](*(tvm.runtime.tensor(value) for value in values.values()))
    for got, expected in zip(results, network.reference(values), strict=True):
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-4, atol=1e-4)


def test_a_region_is_the_kernels_that_are_built(decoder):
    network, _ = decoder
    regions = extract_regions(network.module).regions
    (region,) = (candidate for candidate in regions if candidate.attention)
    assert (region.operator, region.attention) == ("attention", *attention_calls(network.module))
    assert region.inputs[-2:] == ("present.0.key.append", "present.0.value.append") or region.attention.masked
    kernels = gpu_kernels(region, "fp16")
    assert [kernel.kind for kernel in kernels] == ["gemm", "stream", "gemm"]
    assert sum(kernel.macs for kernel in kernels if kernel.kind == "gemm") == region.attention.macs
    built = GroupKernels()(network.module)
    calls = (b.value for b in main_bindings(built) if isinstance(b.value, relax.Call))
    kernel_calls = [call.op for call in calls if isinstance(call.op, tvm.ir.GlobalVar)]
    assert not any(ATTENTION in (f.attrs or {}) for f in built.functions.values())
    assert len(kernel_calls) == sum(len(gpu_kernels(candidate, "fp16")) for candidate in regions)


def test_the_first_product_reads_each_key_once():
    """Query heads that share keys are rows of one product: on the GPU too, the cache is read once."""
    (region,) = (
        candidate
        for candidate in extract_regions(frontend.load(DecoderModel(kv_heads=1).model()).module).regions
        if candidate.attention
    )
    first, _, last = gpu_kernels(region, "fp16")
    read = sum(kernel.groups * kernel.n * kernel.k for kernel in (first, last))
    assert read == region.attention.cache_elements


# Not attention over a cache: as many queries as keys, scores that are returned, a softmax over queries.
def _square(emit, q, k, v):
    weights = emit(op.nn.softmax(emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2]))))))
    return emit(op.matmul(weights, v))


def _with_scores(emit, q, k, v):
    scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2]))))
    return relax.Tuple([emit(op.matmul(emit(op.nn.softmax(scores)), v)), scores])


def _softmax_over_queries(emit, q, k, v):
    weights = emit(op.nn.softmax(emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2])))), axis=2))
    return emit(op.matmul(weights, v))


@pytest.mark.parametrize(
    ("network", "tokens"),
    [(_square, 5), (_with_scores, 2), (_softmax_over_queries, 2)],
    ids=["square", "kept", "axis"],
)
def test_other_products_stay(network, tokens):
    mod = graph(network, (1, 2, tokens, 4), (1, 2, 5, 4), (1, 2, 5, 3))
    tvm.ir.assert_structural_equal(RecogniseAttention()(mod), mod)


@st.composite
def attentions(draw):
    """Attention of every kind."""
    kv_heads, positioned = draw(st.sampled_from([1, 2])), draw(st.booleans())
    return Attention(
        batch=draw(st.sampled_from([1, 2])),
        heads=kv_heads * draw(st.sampled_from([1, 3])),
        kv_heads=kv_heads,
        head_size=draw(st.sampled_from([1, 4])),
        value_size=draw(st.sampled_from([2, 4])),
        queries=draw(st.sampled_from([1, 3])),
        keys=draw(st.sampled_from([5, 6])),
        scale=draw(st.sampled_from([1.0, 0.3])),
        causal=draw(st.booleans()),
        offset=0 if positioned else draw(st.integers(-2, 5)),
        positioned=positioned,
        window=draw(st.sampled_from([0, 2])),
        softcap=draw(st.sampled_from([0.0, 1.5])),
        masked=draw(st.booleans()),
        sinks=draw(st.booleans()),
    )


@pytest.mark.long
@settings(max_examples=examples(24))
@given(attentions(), st.integers(0, 3))
def test_the_operators_compute_what_the_description_says(attention, seed):
    rng = np.random.default_rng(seed)
    dims = (attention.query_shape, attention.key_shape, attention.value_shape)
    q, k, v = (rng.normal(size=dims_of).astype(np.float32) for dims_of in dims)
    given = {"mask": rng.normal(size=(1, 1, *attention.score_shape[2:])).astype(np.float32)}
    given["sinks"] = rng.normal(size=(1, attention.heads, 1, 1)).astype(np.float32)
    given["position"] = rng.integers(0, attention.keys - attention.queries + 1, attention.batch)
    given = {
        name: array
        for name, array in given.items()
        if getattr(attention, {"mask": "masked", "position": "positioned"}.get(name, name))
    }
    function = attention_function(attention, given["mask"].shape if attention.masked else ())
    mod = tvm.IRModule({"main": function.without_attr(ATTENTION).with_attr("global_symbol", "main")})
    (got,) = run(mod, q, k, v, *given.values())
    np.testing.assert_allclose(got, attend(attention, q, k, v, **given), rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.parametrize("shifted", [False, True])
def test_scores_that_no_key_stands_for_are_sinks(shifted):
    """As gpt-oss has them: joined to the scores, and dropped behind the softmax."""
    torch = pytest.importorskip("torch")

    class StepWithSinks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.sinks = torch.nn.Parameter(torch.arange(4.0) / 3)

        def forward(self, q, key, value, past_key, past_value):
            key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
            scores = q @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.5
            scores = torch.cat([scores, self.sinks.reshape(1, -1, 1, 1).expand(1, -1, 2, -1)], -1)
            scores = scores - scores.max(-1, keepdim=True).values if shifted else scores
            return torch.softmax(scores, -1)[..., :-1] @ value.repeat_interleave(2, 1)

    dims = [(1, 4, 2, 8), (1, 2, 2, 8), (1, 2, 2, 8), (1, 2, 5, 8), (1, 2, 5, 8)]
    rng = np.random.default_rng(0)
    operands = [torch.from_numpy(rng.normal(size=item).astype(np.float32)) for item in dims]
    step = StepWithSinks().eval()
    network = frontend.load(torch.export.export(step, tuple(operands)))
    (attention,) = attention_calls(network.module)
    assert attention.sinks and attention.kv_heads == 2
    machine = relax.VirtualMachine(phases.build(network.module, PLAIN_CODE), tvm.cpu())
    got = machine["main"](*(tvm.runtime.tensor(item.numpy()) for item in operands))
    np.testing.assert_allclose(got.numpy(), step(*operands).detach().numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.parametrize("masked", long_but(["plain"], {"plain": False, "a mask that hides all": True}))
def test_a_step_of_pytorch_reads_the_cache_where_it_lies(masked):
    """Decomposed, it scales the whole cache and repeats it, and guards the softmax against rows of -inf."""
    torch = pytest.importorskip("torch")

    class CachedStep(torch.nn.Module):
        def forward(self, q, key, value, past_key, past_value, mask=None):
            key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
            return torch.nn.functional.scaled_dot_product_attention(
                q, key, value, attn_mask=mask, scale=0.5, enable_gqa=True
            )

    dims = [(1, 4, 2, 8), (1, 2, 2, 8), (1, 2, 2, 8), (1, 2, 5, 8), (1, 2, 5, 8)]
    rng = np.random.default_rng(0)
    operands = [torch.from_numpy(rng.normal(size=item).astype(np.float32)) for item in dims]
    if masked:
        operands.append(torch.tensor([[0.0] * 6 + [-torch.inf], [-torch.inf] * 7])[None, None])
    network = frontend.load(torch.export.export(CachedStep(), tuple(operands)))
    (attention,) = attention_calls(network.module)
    assert (attention.kv_heads, attention.scale) == (2, pytest.approx(0.5))
    (call,) = (b.value for b in main_bindings(network.module) if attention_from_call(network.module, b.value))
    values = {b.var: b.value for b in main_bindings(network.module)}
    assert [operator(values[item]) for item in call.args[1:3]] == ["concat", "concat"]
    machine = relax.VirtualMachine(phases.build(network.module, PLAIN_CODE), tvm.cpu())
    got = machine["main"](*(tvm.runtime.tensor(item.numpy()) for item in operands))
    np.testing.assert_allclose(got.numpy(), CachedStep()(*operands).numpy(), rtol=1e-5, atol=1e-5)
