"""Is a group of layers one kernel that gives what the layers give, whatever its tiles?"""

import contextlib
import functools
import shutil
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import tvm
from cuda_by_threads import run as run_blocks
from graphs import inputs, outputs, run, same_bits
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernel_graphs import constant, convolution, graph, kernels
from length import examples, long_but
from tvm import relax
from tvm.relax import op

from pimflow.compiler import phases
from pimflow.core.blocks import BLOCK_SHARED_BYTES
from pimflow.fusion import GroupTiling
from pimflow.fusion.kernels.relax_formulas import fusible
from pimflow.fusion.kernels.tile_groups import TileGroups
from pimflow.fusion.tilings import TilingSearch
from pimflow.hardware import system
from pimflow.pim_backend.runtime import targets
from pimflow.pim_backend.runtime.cuda_binary import compile_kernels, cuda_compiler
from pimflow.relay_passes.flat import main_bindings, operator, shape
from pimflow.relay_passes.kernels.outline_groups import LAYERS, OutlineGroups
from pimflow.relay_passes.regions.extract_regions import extract_regions
from pimflow.relay_passes.regions.kernel_groups import kernel_groups
from pimflow.relay_passes.schedules.keep_barriers import TILES


def flat(network, *shapes):
    return relax.transform.CanonicalizeBindings()(graph(network, *shapes))


def emit_convolution(emit, x, draw, name):
    channels = shape(x)[3]
    groups = draw(st.sampled_from([g for g in (1, 2, channels) if channels % g == 0]))
    outputs = groups * draw(st.integers(1, 3))
    kernel = [draw(st.integers(1, min(3, size))) for size in shape(x)[1:3]]
    padding = [draw(st.integers(0, k - 1)) for k in (*kernel, *kernel)]
    attrs = {"padding": padding, "strides": draw(st.integers(1, 2)), "groups": groups}
    y = emit(convolution(x, constant(outputs, *kernel, channels // groups), **attrs), name)
    y = emit(op.add(y, constant(1, 1, 1, outputs)))
    kind = draw(st.sampled_from(("none", "relu", "leaky", "slopes", "clip", "silu", "gelu", "scaled")))
    if kind == "silu":
        return emit(op.multiply(y, emit(op.sigmoid(y))))
    if kind == "scaled":
        return emit(op.divide(emit(op.subtract(y, relax.const(0.5))), constant(outputs)))
    act = {
        "relu": op.nn.relu,
        "leaky": lambda y: op.nn.leakyrelu(y, 0.25),
        "slopes": lambda y: op.nn.prelu(y, constant(outputs), axis=3),
        "clip": lambda y: op.clip(y, -1.0, 1.5),
        "gelu": op.nn.gelu,
    }
    return emit(act[kind](y)) if kind != "none" else y


def emit_pool(emit, x, draw, name):
    attrs = {"pool_size": (2, 3), "padding": (1, 0, 0, 2), "layout": "NHWC"}
    attrs["strides"] = draw(st.integers(1, 2))
    if draw(st.booleans()):
        return emit(op.nn.max_pool2d(x, **attrs), name)
    return emit(op.nn.avg_pool2d(x, **attrs, count_include_pad=draw(st.booleans())), name)


@st.composite
def networks(draw):
    """Two to four layers: in a row, around a sum or beside one another; before and behind is another."""
    dims = tuple(draw(st.integers(*ends)) for ends in ((1, 2), (4, 9), (4, 7), (2, 6)))

    def network(emit, x, scales):
        y, values = emit(op.nn.relu(x), "first"), []
        for index in range(draw(st.integers(2, 4))):
            joinable = [m for m in values if shape(m)[:3] == shape(y)[:3] and m is not y]
            equal = [m for m in joinable if shape(m) == shape(y)]
            kind = draw(st.sampled_from(("conv", "conv", "pool", "sum", "join", "scale")))
            values.append(y)
            if kind == "sum" and equal:
                y = emit(op.add(y, draw(st.sampled_from(equal))), f"l{index}")
            elif kind == "join" and joinable:
                y = emit(op.concat([y, draw(st.sampled_from(joinable))], 3), f"l{index}")
            elif kind == "scale" and index == 1 and shape(y)[3] == dims[3]:
                y = emit(op.multiply(y, scales), f"l{index}")
            elif kind == "pool" and min(shape(y)[1:3]) > 2:
                y = emit_pool(emit, y, draw, f"l{index}")
            else:
                y = emit_convolution(emit, y, draw, f"l{index}")
        return emit(op.exp(emit(op.nn.max_pool2d(y, layout="NHWC"), "last")))

    return flat(network, dims, (dims[0], 1, 1, dims[3]))


def as_planned():
    """A CPU has the tiles of the plan, as a GPU does, and not its own."""
    return mock.patch.object(phases, "TileGroups", functools.partial(TileGroups, as_planned=True))


def choices(mod, views=True):
    """Every group of the network, without tiles."""
    regions = extract_regions(mod, "drawn", views=views)
    fusible_names = fusible(mod, regions, views=views)
    tilings = TilingSearch(replace(regions, fusible=fusible_names), system())
    names = [region.name for region in regions.regions]
    runs = [tuple(names[a:b]) for a in range(len(names)) for b in range(a + 2, len(names) + 1)]
    return tilings, [run for run in runs if not tilings.unsupported_reason(run, GroupTiling())]


@pytest.mark.long
@settings(max_examples=examples(6))
@given(networks(), st.data())
def test_a_group_gives_what_its_layers_give(mod, data):
    """Any group, any tiles; nothing inside of it is a tensor of the network any more."""
    tilings, groups = choices(mod)
    assume(groups)
    covers = data.draw(st.sampled_from(groups))
    n, h, w, _ = tilings.layers.shapes[covers[-1]]
    parts = data.draw(st.integers(1, h))
    bands = data.draw(st.sampled_from([bands for bands in range(1, parts + 1) if parts % bands == 0]))
    images, columns = data.draw(st.integers(1, n)), data.draw(st.integers(1, w))
    tiling = GroupTiling(n=images, h=parts, w=columns, retain=bands < parts, bands=bands)
    tiling = tiling if tiling.retain else replace(tiling, bands=1)
    assert GroupTiling.parse(str(tiling)) == tiling and not tilings.unsupported_reason(covers, tiling)
    outlined = OutlineGroups({covers: str(tiling)})(mod)
    assert len(kernel_groups(outlined)) == len(kernel_groups(mod)) - len(covers) + 1
    operands = inputs(mod)
    with as_planned():
        results = outputs(outlined, operands)
    for result, expected in zip(results, run(mod, *operands), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_a_group_reads_what_another_kernel_stores_beside_its_result():
    """A concatenation that the kernel of its first reader makes, and the result of that kernel."""

    def network(emit, x):
        parts = [emit(op.nn.relu(emit(convolution(x, constant(8, 1, 1, 8)), n))) for n in ("left", "right")]
        both = emit(op.concat(parts, 3))
        first = emit(op.nn.relu(emit(convolution(both, constant(8, 1, 1, 16)), "first")))
        y = emit(op.nn.relu(emit(convolution(both, constant(8, 1, 1, 16)), "reduce")))
        y = emit(op.nn.relu(emit(convolution(y, constant(8, 3, 3, 8), padding=1), "expand")))
        return emit(op.add(first, y), "sum")

    mod, covers = flat(network, (1, 9, 7, 8)), ("reduce", "expand")
    tilings, groups = choices(mod)
    host, layers = tilings.layers.layers[tilings.layers.index["first"]], tilings.layers
    assert covers in groups and host.extra_output in layers.layers[layers.index["reduce"]].inputs
    assert tilings.kernel(covers, GroupTiling()).input_bytes == 2 * 9 * 7 * (16 + 8)  # the sum has `first`
    after = OutlineGroups({covers: "tiles 1x3x2"})(mod)
    operands = inputs(mod)
    with as_planned():
        results = outputs(after, operands)
    for result, expected in zip(results, run(mod, *operands), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def block(emit, x):
    """Expansion, depthwise convolution, projection and sum, between two kernels."""
    x = emit(op.nn.max_pool2d(x, layout="NHWC"), "before")
    y = emit(op.nn.relu(emit(convolution(x, constant(24, 1, 1, 8)), "expand")))
    y = emit(op.nn.relu(emit(convolution(y, constant(24, 3, 3, 1), padding=1, groups=24), "depthwise")))
    y = emit(op.add(emit(convolution(y, constant(8, 1, 1, 24)), "project"), x), "sum")
    return emit(op.exp(emit(op.nn.max_pool2d(y, layout="NHWC"), "behind")))


BLOCK = ("expand", "depthwise", "project")


@pytest.fixture
def mobile():
    return flat(block, (1, 8, 8, 8))


@pytest.mark.long
def test_the_function_of_a_group(mobile):
    after = OutlineGroups({BLOCK: "tiles 1x2x2"})(mobile)
    (call,) = (b for b in main_bindings(after) if isinstance(getattr(b.value, "op", None), tvm.ir.GlobalVar))
    assert call.var.name == "sum" and [b.var.name for b in main_bindings(after)][:2] == ["before", "sum"]
    function = after[call.value.op]
    assert dict(function.attrs)[TILES] == "tiles 1x2x2" and list(function.attrs[LAYERS]) == [2, 2, 2]
    inside = [operator(b.value) for block in function.body.blocks for b in block.bindings]
    assert inside == ["nn.conv2d", "nn.relu"] * 2 + ["nn.conv2d", "add"] and len(function.params) == 1
    assert same_bits(mobile, after)
    assert OutlineGroups({})(after).same_as(after)
    assert OutlineGroups({})(mobile).same_as(mobile)


@pytest.mark.long
def test_what_is_inside_takes_no_memory(mobile):
    plans = []
    for groups in ({}, {BLOCK: "tiles 1x2x2"}):
        phases.build(OutlineGroups(groups)(mobile), "llvm+pim", system(), plans.append)
    apart, together = (plan.pool_bytes for plan in plans)
    assert together < apart
    # of 24 channels a tile with its halo, of 8 another two; nothing of 8 x 8 pixels but operand and result
    assert together < 2 * 4 * 4 * 4 * 8 + 4 * (6 * 6 * 24 * 2 + 6 * 6 * 8 * 2)


@pytest.mark.long
@settings(max_examples=examples(6))
@given(st.data())
def test_chunks_of_channels_give_what_their_layers_give(data):
    """A convolution, what keeps its channels, and a sum over them with a residual; any tiles and chunks."""
    draw, dims = data.draw, tuple(data.draw(st.integers(*ends)) for ends in ((1, 2), (3, 9), (3, 9), (1, 9)))
    count = draw(st.sampled_from((6, 12, 32, 48)))
    window, stride = draw(st.sampled_from(((1, 1), (3, 1), (3, 2))))

    def network(emit, x):
        x = emit(op.nn.max_pool2d(x, layout="NHWC"), "before")
        y = emit(op.nn.relu(emit(convolution(x, constant(count, 1, 1, dims[3])), "a")))
        if draw(st.booleans()):
            y = emit_pool(emit, y, draw, "b")
        elif window > 1:
            attrs = {"padding": 1, "strides": stride, "groups": count}
            y = emit(op.nn.silu(emit(convolution(y, constant(count, 3, 3, 1), **attrs), "b")))
        if draw(st.booleans()) or shape(y) == (*dims[:3], count):
            size = draw(st.sampled_from((1, 3)))
            y = emit(convolution(y, constant(dims[3], size, size, count), padding=size // 2), "c")
            y = emit(op.add(y, x)) if shape(y) == dims else emit(op.nn.relu(y))
        return emit(op.exp(emit(op.nn.max_pool2d(y, layout="NHWC"), "last")))

    mod = flat(network, dims)
    tilings, groups = choices(mod)
    covers = max((group for group in groups if group[0] == "a" and "last" not in group), key=len)
    _, h, w, _ = tilings.layers.shapes[covers[-1]]
    chunk = draw(st.sampled_from([d for d in range(1, count) if count % d == 0]))
    tiling = GroupTiling(h=draw(st.integers(1, h)), w=draw(st.integers(1, w)), chunk=chunk)
    assert GroupTiling.parse(str(tiling)) == tiling and not tilings.unsupported_reason(covers, tiling)
    after = OutlineGroups({covers: str(tiling)})(mod)
    operands = inputs(mod)
    for tiles in (as_planned(), contextlib.nullcontext()):
        with tiles:
            results = outputs(after, operands)
        for result, expected in zip(results, run(mod, *operands), strict=True):
            np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


SYSTEM = system()
ON_GPU = "tiles 2x3x2"  # along all axes, of different sizes


def build_for_gpu(network, covers, tiles, *dims, target_system=SYSTEM):
    """A group of `network` outlined; lowered; built for CUDA on a system."""
    outlined = OutlineGroups({covers: tiles})(flat(network, dims))
    target = targets.target_by_name("cuda+pim")
    with target:
        limits = target_system.gpu.kernel_limits("fp16")
        lowered = tvm.transform.Sequential(phases.kernel_phases(target, "fp16", limits=limits))(outlined)
    executable = phases.build(outlined, target, target_system)
    source = "".join(m.inspect_source() for m in all_modules(executable.mod) if m.kind == "cuda")
    return outlined, lowered, source


@pytest.fixture(scope="module")
def block_on_gpu():
    return build_for_gpu(block, BLOCK, ON_GPU, 2, 8, 8, 8)


@pytest.mark.long
def test_storage_and_blocks_on_a_gpu(block_on_gpu):
    """fp16 in DRAM and in shared memory, fp32 in between; a block a tile; the code compiles."""
    outlined, lowered, source = block_on_gpu
    (kernel,) = (f for f in kernels(lowered).values() if TILES in (f.attrs or {}))
    types = [str(p.ty.dtype) for p in kernel.params]
    assert types == ["float16"] * 4 + ["int32", "float16"]
    text = kernel.script()
    assert 'T.launch_thread("blockIdx.x", 12)' in text and 'scope="shared.dyn"' in text
    assert "extern __shared__" in source and "__syncthreads()" in source
    if not cuda_compiler():
        pytest.skip("needs nvcc or NVRTC")
    target = targets.target_by_name("cuda+pim")
    _, compiled = compile_kernels(lambda: phases.build(outlined, target, SYSTEM), target)
    assert compiled.source == source and not compiled.problem


def run_by_threads(built, tiles, folder, *dims):
    """What the CUDA code gives, a thread for each of its threads, and what the layers give."""
    outlined, lowered, source = built
    (call,) = (b.value for b in main_bindings(lowered) if "tiled" in str(b.value))
    function = next(f for gv, f in outlined.functions_items() if "tiled" in gv.name_hint)
    constants = [arg.value.numpy() for arg in call.args[1].fields[1:]]
    x = np.random.default_rng(0).standard_normal(dims).astype(np.float16)
    y = np.full(shape(function.body.body), np.nan, np.float16)
    arrays = {"load_0": x, "store_0": y, "bounds": constants.pop()}
    (kernel,) = (f for f in kernels(lowered).values() if TILES in (f.attrs or {}))
    names = [p.name for p in kernel.params if p.name.startswith("weights")]
    arrays |= dict(zip(names, constants, strict=True))
    name = next(gv.name_hint for gv, f in outlined.functions_items() if "tiled" in gv.name_hint)
    multiplied = run_blocks(
        source, f"{name}_kernel", arrays, GroupTiling.parse(tiles).blocks, folder, BLOCK_SHARED_BYTES // 2
    )
    alone = tvm.IRModule({"main": function.without_attr("Primitive").with_attr("global_symbol", "main")})
    (expected,) = run(alone, x.astype(np.float32))
    return y, expected, multiplied


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_blocks_of_threads_give_what_the_layers_give(block_on_gpu, tmp_path):
    result, expected, _ = run_by_threads(block_on_gpu, ON_GPU, tmp_path, 2, 8, 8, 8)
    assert np.abs(result - expected).max() <= 4e-3 * np.abs(expected).max()


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_blocks_keep_the_rows_that_their_next_tile_reads(tmp_path):
    """Two bands of four tiles: each block computes a row of the band once, on tensor cores and without."""

    def network(emit, x):
        x = emit(op.nn.max_pool2d(x, layout="NHWC"), "before")
        y = emit(op.nn.relu(emit(convolution(x, constant(16, 3, 3, 8), padding=1), "a")))
        y = emit(op.nn.relu(emit(convolution(y, constant(16, 3, 3, 1), padding=1, groups=16), "b")))
        y = emit(op.nn.relu(emit(convolution(y, constant(16, 3, 3, 16), padding=1), "c")))
        return emit(op.exp(emit(op.nn.max_pool2d(y, layout="NHWC"), "behind")))

    tiles, dims, covers = "tiles 1x8x1 retained in 2 bands", (1, 16, 20, 8), ("a", "b", "c")
    tilings, _ = choices(flat(network, dims))
    kernels_by_tiles = {t: tilings.kernel(covers, GroupTiling.parse(t)) for t in (tiles, "tiles 1x8x1")}
    assert kernels_by_tiles[tiles].blocks == 2 and kernels_by_tiles["tiles 1x8x1"].blocks == 8
    assert kernels_by_tiles[tiles].macs < kernels_by_tiles["tiles 1x8x1"].macs
    result, expected, multiplied = run_by_threads(
        build_for_gpu(network, covers, tiles, *dims), tiles, tmp_path, *dims
    )
    assert multiplied == kernels_by_tiles[tiles].fragments > 0
    assert np.abs(result - expected).max() <= 4e-3 * np.abs(expected).max()


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
@pytest.mark.parametrize("channels_and_chunk", long_but([(5, 16)], [(8, 16), (8, 0), (5, 16), (40, 32)]))
def test_products_on_tensor_cores(channels_and_chunk, tmp_path):
    """All channels at once, and sums over chunks of them in registers; channels that fill no fragment.

    The price counts the multiplications that the code does.
    """
    channels, chunk = channels_and_chunk

    def network(emit, x):
        x = emit(op.nn.max_pool2d(x, layout="NHWC"), "before")
        y = emit(op.nn.silu(emit(convolution(x, constant(64, 1, 1, channels)), "expand")))
        y = emit(op.nn.max_pool2d(y, (3, 3), (2, 2), (1, 1, 1, 1), layout="NHWC"), "pool")
        y = emit(op.add(emit(convolution(y, constant(24, 3, 3, 64), padding=1), "project"), constant(24)))
        return emit(op.exp(emit(op.nn.max_pool2d(y, layout="NHWC"), "behind")))

    tiling, dims = GroupTiling(h=2, w=2, chunk=chunk), (1, 9, 14, channels)
    covers = ("expand", "pool", "project")
    tilings, _ = choices(flat(network, dims))
    priced = tilings.kernel(covers, tiling)
    assert not tilings.unsupported_reason(covers, tiling)
    built = build_for_gpu(network, covers, str(tiling), *dims)
    result, expected, multiplied = run_by_threads(built, str(tiling), tmp_path, *dims)
    assert multiplied == priced.fragments > 0
    assert np.abs(result - expected).max() <= 4e-3 * np.abs(expected).max()


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_a_gpu_without_tensor_cores(tmp_path):
    """Its code is what its price is of."""
    built = build_for_gpu(block, BLOCK, ON_GPU, 2, 8, 8, 8, target_system=system(gpu="p100"))
    result, expected, multiplied = run_by_threads(built, ON_GPU, tmp_path, 2, 8, 8, 8)
    assert multiplied == 0 and "mma" not in built[-1]
    assert np.abs(result - expected).max() <= 4e-3 * np.abs(expected).max()


def all_modules(module):
    yield module
    for submodule in module.imports:
        yield from all_modules(submodule)


def test_layers_without_a_formula_stay_out(mobile):
    def odd(emit, x):
        y = emit(op.nn.softmax(emit(convolution(x, constant(4, 1, 1, 8)), "conv")), "softmax")
        y = emit(op.nn.gelu(emit(convolution(y, constant(4, 1, 1, 4)), "gelu")))
        return emit(op.mean(y, [1, 2], keepdims=True), "mean")

    assert fusible(mobile, extract_regions(mobile)) == ("before", *BLOCK, "behind")
    mod = flat(odd, (1, 4, 4, 8))
    assert fusible(mod, extract_regions(mod)) == ("conv", "gelu")
    assert TileGroups()(mod).same_as(mod)
