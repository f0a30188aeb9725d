"""Do the emitted traces move and compute what the kernels do, no more and no less?"""

import dataclasses
import gzip
import itertools
import lzma
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from length import examples
from trace_reader import read_kernels_list, read_trace

from pimflow.core.kernel import ConvGeometry, Kernel, convolution_kernel
from pimflow.errors import UsageError
from pimflow.hardware import GpuSpec
from pimflow.simulators.accel_sim.gemm import Gemm, gemm_launch
from pimflow.simulators.accel_sim.kernels import (
    kernel_name,
    launches,
    parse_kernel_name,
    write_kernel,
    write_traces,
)
from pimflow.simulators.accel_sim.launch import Launch
from pimflow.simulators.accel_sim.simd import (
    SimdConvolution,
    Stream,
    depthwise_launch,
    gemv_launch,
    stream_launch,
)
from pimflow.simulators.accel_sim.trace import HostCopy
from pimflow.simulators.gpu.emitted import ROTATION_BYTES
from pimflow.simulators.gpu.machine import TILES
from pimflow.simulators.gpu.model import KernelRequest

DATA = Path(__file__).parent / "data"
GPU = GpuSpec.load("rtx-2060-pim32")
A, B, C, D = (0x7F1000000000 + operand * 0x40000000 for operand in range(4))
BASES = {"input_base": A, "weight_base": B, "output_base": C, "residual_base": D}
SOME = settings(max_examples=examples(25), derandomize=True, deadline=None)


def text_of(launch: Launch) -> str:
    return str(launch.header(1)) + "".join(text for text, _ in launch.blocks())


def parse_launch(launch: Launch, tmp_path: Path) -> list:
    """Thread blocks, through the file and the parser; what every kernel must keep to."""
    path = tmp_path / f"{launch.name}.traceg"
    path.write_text(text_of(launch), encoding="ascii", newline="\n")
    header, blocks = read_trace(path)
    blocks = list(blocks)
    assert [b.index for b in blocks] == [i[::-1] for i in itertools.product(*map(range, header.grid[::-1]))]
    for block in blocks:
        barriers = {sum(i.opcode == "BAR.SYNC" for i in warp) for warp in block.warps}
        assert len(barriers) == 1, "warps that wait for one another for ever"
        for warp in block.warps:
            assert [i.opcode for i in warp].count("EXIT") == 1 and warp[-1].opcode == "EXIT"
            assert all(len(i.destinations) <= 1 and len(i.sources) <= 4 and i.mask for i in warp)
            assert all(i.width_bytes == 0 or i.addresses[0] % i.width_bytes == 0 for i in warp)
    counted = sum(i.lanes for block in blocks for warp in block.warps for i in warp)
    assert counted == sum(lanes for _, lanes in launch.blocks())
    return blocks


def traffic(blocks: list) -> tuple[set[int], Counter]:
    """Elements (of 2 bytes) that are loaded, and how often each is stored."""
    loads, stores = set(), Counter()
    for block in blocks:
        for warp in block.warps:
            for i in warp:
                if i.opcode.startswith(("LDG", "STG")):
                    elements = [address + d for address in i.addresses for d in range(0, i.width_bytes, 2)]
                    (loads if i.opcode.startswith("LDG") else stores).update(elements)
    return loads, stores


def operand_addresses(g: ConvGeometry, depthwise: bool) -> tuple[set[int], set[int]]:
    """Addresses of input and filter elements, by the definition of a convolution."""
    inputs, filters = set(), set()
    cg, ng = g.c // g.groups, g.oc // g.groups
    for n, y, x, o, dy, dx, c in itertools.product(*map(range, (g.n, g.oh, g.ow, g.oc, g.kh, g.kw, cg))):
        iy = y * g.stride[0] + dy * g.dilation[0] - g.padding[0]
        ix = x * g.stride[1] + dx * g.dilation[1] - g.padding[1]
        if 0 <= iy < g.h and 0 <= ix < g.w:
            inputs.add(A + 2 * (((n * g.h + iy) * g.w + ix) * g.c + o // ng * cg + c))
        tap = dy * g.kw + dx
        if not depthwise:
            filters.add(B + 2 * ((o * g.kh * g.kw + tap) * cg + c))
        elif 0 <= iy < g.h and 0 <= ix < g.w:
            filters.add(B + 2 * (tap * g.oc + o))
    return inputs, filters


@st.composite
def geometries(draw, depthwise: bool = False) -> ConvGeometry:
    kh, kw = draw(st.sampled_from(((1, 1), (3, 3), (1, 3))))
    dilation = (draw(st.integers(1, 2)), 1)
    channels = draw(st.sampled_from((1, 3, 4, 6, 8, 12, 16, 40)))
    groups = channels if depthwise else draw(st.sampled_from((1, 1, 2)))
    assume(not depthwise or channels > 1)
    outputs = channels * draw(st.integers(1, 2)) if depthwise else groups * draw(st.integers(1, 40))
    geometry = ConvGeometry(
        n=draw(st.integers(1, 2)),
        h=draw(st.integers(1, 6)),
        w=draw(st.integers(1, 6)),
        c=channels if depthwise else channels * groups,
        oc=outputs,
        kh=kh,
        kw=kw,
        stride=draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
        dilation=dilation,
        padding=tuple(draw(st.tuples(*(st.integers(0, 1),) * 4))),
        groups=groups,
    )
    fits_height = geometry.h + sum(geometry.padding[::2]) >= (kh - 1) * dilation[0] + 1
    assume(fits_height and geometry.w + sum(geometry.padding[1::2]) >= kw)
    assume(geometry.is_depthwise == depthwise)
    return geometry


# --- the kernel that was simulated ---


# The traces here are by the generator of the kernels in tests/gpu_model/data/accelsim_rtx2060.csv. The
# logs of two of them, which Accel-Sim ran, are beside them: `gpu_sim_insn` counts every lane.
def pointwise_launch(m: tuple[int, int], k: int, n: int, tile=(64, 64), **options) -> Launch:
    gemm = Gemm(geometry=ConvGeometry(n=1, h=m[0], w=m[1], c=k, oc=n), tile=tile, **BASES, **options)
    return gemm_launch(f"pw_{m[0] * m[1]}x{n}x{k}", gemm)


def read_stored_trace(name: str) -> str:
    return lzma.decompress((DATA / f"{name}.traceg.xz").read_bytes()).decode()


def test_traces_byte_by_byte():
    """The first is one that Accel-Sim ran."""
    layers = ((28, 28), 32, 192), ((16, 16), 96, 128, (128, 64))
    for launch in (pointwise_launch(*layer, listed=True) for layer in layers):
        assert text_of(launch) == read_stored_trace(launch.name)


def test_another_that_it_ran_instruction_by_instruction():
    log = gzip.decompress((DATA / "pw_49x960x160.16.log.gz").read_bytes()).decode()
    expected = read_stored_trace("pw_49x960x160")
    counted = int(re.search(r"^gpu_sim_insn = (\d+)", log, re.M)[1])
    assert expected.count(" ffffffff ") * 32 == counted
    launch = pointwise_launch((7, 7), 160, 960, listed=True)
    # Of rows 48 to 55 it stored all with full warps, of which only row 48, 4 lanes, exists.
    idle = 30 * 28
    assert sum(lanes for _, lanes in launch.blocks()) == counted - idle
    ours, real = text_of(launch).split("\n"), expected.split("\n")
    assert [line for line in ours if " STG" not in line] == [line for line in real if " STG" not in line]


# By opcode, a letter each. The loads of the next iteration come behind the barrier, ahead of its products.
ORDER = re.compile(r"I{12}(?:L+S+B(?:L+P+S+BJ)*P+J)?T*E")
LETTERS = {
    **{"IMAD.MOV.U32": "I", "STS.128": "S", "BAR.SYNC": "B", "BRA": "J", "EXIT": "E"},
    **dict.fromkeys(("LDSM.16.M88.4", "HMMA.1688.F32", "IADD3", "ISETP.GE.AND"), "P"),
}


@SOME
@given(st.sampled_from(TILES), st.sampled_from((8, 32, 40, 96, 168)), st.sampled_from((1, 2)))
def test_loads_are_on_their_way_while_the_iteration_before_multiplies(tmp_path_factory, tile, k, split):
    geometry = ConvGeometry(n=1, h=5, w=5, c=k, oc=40)
    gemm = Gemm(geometry=geometry, tile=tile, split=split, apart=split > 1, **BASES)
    blocks = parse_launch(gemm_launch("gemm", gemm), tmp_path_factory.mktemp("t"))
    loads = 0
    for warp in (warp for block in blocks for warp in block.warps):
        letters = [LETTERS.get(i.opcode, "L" if i.opcode.startswith("LDG") else "T") for i in warp]
        assert ORDER.fullmatch("".join(letters))
        assert [i.pc for i in warp] == sorted({i.pc for i in warp})
        # A register is stored to shared memory after it was loaded, and before it is loaded again.
        full: set[int] = set()
        for i in warp:
            if i.opcode.startswith("LDG"):
                full.update(i.destinations)
                loads += 1
            elif i.opcode == "STS.128":
                full.discard(i.sources[1])
            elif i.opcode == "BAR.SYNC":
                assert not full
        assert not full
    assert loads


def test_shorter_addresses_mean_the_same(tmp_path):
    listed = parse_launch(pointwise_launch((7, 7), 64, 64, listed=True), tmp_path)
    short = parse_launch(pointwise_launch((7, 7), 64, 64), tmp_path)
    assert {i.mode for b in short for w in b.warps for i in w if i.addresses} == {1, 2}

    def plain(blocks):
        return [[[dataclasses.replace(i, mode=0) for i in w] for w in b.warps] for b in blocks]

    assert plain(listed) == plain(short)


# --- what moves ---


def is_residual(touched: set[int], size_bytes: int, output_bytes: int) -> bool:
    """Whether what is added to the results is read: all of it, or, if it is smaller, within an access."""
    all_addresses = {D + 2 * i for i in range(size_bytes // 2)}
    if size_bytes >= output_bytes:
        return touched == all_addresses
    return touched <= all_addresses | {D + i for i in range(16)}


def residuals(times: int, geometry: ConvGeometry) -> int:
    """None, a few bytes, or `times` - 1 tensors like the result."""
    return (0, 10)[times] if times < 2 else (times - 1) * geometry.pixels * geometry.oc * 2


@SOME
@given(geometries(), st.sampled_from(TILES[-7:]), st.integers(0, 3))
def test_an_implicit_gemm_touches_its_operands(tmp_path_factory, geometry, tile, times):
    residual = residuals(times, geometry)
    gemm = Gemm(geometry=geometry, tile=tile, residual_bytes=residual, **BASES)
    blocks = parse_launch(gemm_launch("gemm", gemm), tmp_path_factory.mktemp("t"))
    loads, stores = traffic(blocks)
    inputs, filters = operand_addresses(geometry, False)
    outputs = geometry.pixels * geometry.oc
    assert {address for address in loads if address < D} == inputs | filters
    assert is_residual({address for address in loads if address >= D}, residual, 2 * outputs)
    assert stores == Counter(C + 2 * o for o in range(outputs))


@SOME
@given(geometries(), st.sampled_from(TILES[-3:]), st.sampled_from((2, 4, 8)))
def test_split_k_stores_every_partial_sum_once(tmp_path_factory, geometry, tile, split):
    gemm = Gemm(geometry=geometry, tile=tile, split=split, apart=True, residual_bytes=10, **BASES)
    loads, stores = traffic(parse_launch(gemm_launch("gemm", gemm), tmp_path_factory.mktemp("t")))
    inputs, filters = operand_addresses(geometry, False)
    assert loads == inputs | filters
    assert stores == Counter(C + 2 * half for half in range(2 * split * geometry.pixels * geometry.oc))


@pytest.mark.long
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_computes_its_products(tile):
    geometry = ConvGeometry(n=1, h=20, w=13, c=72, oc=130, kh=1, kw=1)
    launch = gemm_launch("gemm", Gemm(geometry=geometry, tile=tile, **BASES))
    blocks = launch.grid[0] * launch.grid[1]
    assert blocks == -(-260 // tile[0]) * -(-130 // tile[1])
    # 3 iterations of 32 for K = 72; an HMMA.1688 is 16 x 8 x 8.
    assert text_of(launch).count(" HMMA.1688.F32 ") * 16 * 8 * 8 == blocks * tile[0] * tile[1] * 96
    assert launch.shared_memory_bytes == (tile[0] + tile[1]) * 32 * 2 <= GPU.shared_memory_bytes
    assert launch.registers <= 255 and launch.threads * launch.registers * 4 <= GPU.registers_bytes


@SOME
@given(geometries(depthwise=True), st.integers(0, 3))
def test_a_depthwise_convolution_touches_its_operands(tmp_path_factory, geometry, times):
    residual = residuals(times, geometry)
    launch = depthwise_launch("dw", SimdConvolution(geometry=geometry, residual_bytes=residual, **BASES))
    loads, stores = traffic(parse_launch(launch, tmp_path_factory.mktemp("t")))
    inputs, filters = operand_addresses(geometry, True)
    outputs = geometry.pixels * geometry.oc
    assert {address for address in loads if address < D} == inputs | filters
    assert is_residual({address for address in loads if address >= D}, residual, 2 * outputs)
    assert stores == Counter(C + 2 * o for o in range(outputs))


@SOME
@given(st.integers(1, 700), st.integers(1, 40), st.sampled_from((1, 2)))
def test_a_gemv_touches_its_operands(tmp_path_factory, k, n, groups):
    geometry = ConvGeometry(n=1, h=1, w=1, c=k * groups, oc=n * groups, groups=groups)
    launch = gemv_launch("gemv", SimdConvolution(geometry=geometry, **BASES))
    loads, stores = traffic(parse_launch(launch, tmp_path_factory.mktemp("t")))
    assert loads == {A + 2 * i for i in range(k * groups)} | {B + 2 * i for i in range(k * n * groups)}
    assert stores == Counter(C + 2 * o for o in range(n * groups))


def weights_by_block(k: int, n: int, folder: Path) -> list[list[list[int]]]:
    """Of each block, what each of its loads reads of the matrix: offsets of elements, in bytes."""
    geometry = ConvGeometry(n=1, h=1, w=1, c=k, oc=n)
    blocks = parse_launch(gemv_launch("gemv", SimdConvolution(geometry=geometry, **BASES)), folder)
    return [
        [
            [address + offset - B for address in i.addresses for offset in range(0, i.width_bytes, 2)]
            for warp in block.warps
            for i in warp
            if i.opcode.startswith("LDG") and B <= i.addresses[0] < C
        ]
        for block in blocks
    ]


@SOME
@given(st.integers(1, 1500), st.integers(1, 80))
def test_blocks_of_a_gemv_begin_their_rows_one_after_the_other(tmp_path_factory, k, n):
    """Each weight is read once; a block begins where the one before it read second, or where it wraps."""
    blocks = weights_by_block(k, n, tmp_path_factory.mktemp("t"))
    read = Counter(access for block in blocks for load in block for access in load)
    assert read == Counter(range(0, 2 * k * n, 2))
    for number, block in enumerate(blocks):
        begins = {access[0] // (2 * k): access[0] % (2 * k) for access in reversed(block)}
        assert set(begins) == set(range(8 * number, min(8 * number + 8, n)))
        assert set(begins.values()) == {number * ROTATION_BYTES % (2 * k)}


@pytest.mark.long
@pytest.mark.parametrize("k", [512, 4096])
def test_rows_of_a_bad_pitch_meet_in_all_channels(tmp_path, k):
    """By what the first block of each SM reads first."""
    first = [
        load for block in weights_by_block(k, 8 * GPU.sms, tmp_path) for load in block[:: max(1, k // 256)]
    ]
    assert len(first) == 8 * GPU.sms
    channels = {offset // 256 % GPU.memory_channels for load in first for offset in load}
    assert len(channels) == GPU.memory_channels


@SOME
@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 30), st.sampled_from((1, 64)))
def test_a_product_that_scales_a_map_reads_and_writes_all_of_it(tmp_path_factory, k, n, pixels, rows):
    """Squeeze and excite, by whichever way the model takes for one row or for some; all lanes share it."""
    geometry = ConvGeometry(n=rows, h=1, w=1, c=k, oc=n)
    unscaled = convolution_kernel(geometry, "fp16")
    map_bytes = pixels * unscaled.output_bytes
    scaled = replace(unscaled, input_bytes=unscaled.input_bytes + map_bytes, output_bytes=map_bytes)
    kernel_launches = launches(scaled, GPU, "fp16", 32)
    loads, sums = traffic(parse_launch(kernel_launches[0], tmp_path_factory.mktemp("t")))
    if pixels == 1:  # no map: as many as the products, which are multiplied where they are, but by split-K
        map_addresses = {C + 2 * i for i in range(map_bytes // 2)}
        assert (
            set(sums) == map_addresses
            if len(kernel_launches) == 1
            else kernel_launches[1].name == kernel_launches[0].name + "_reduce"
        )
        return
    assert 2 * len(loads) == unscaled.input_bytes + unscaled.weight_bytes
    split, rest = divmod(len(sums), rows * n * 2)  # sums in fp32, of each part of the reduction
    assert split >= 1 and rest == 0 and set(sums.values()) == {1}
    second_name = kernel_launches[0].name + ("_scale" if split == 1 else "_reduce")
    assert len(kernel_launches) == 2 and kernel_launches[1].name == second_name
    blocks = parse_launch(kernel_launches[1], tmp_path_factory.mktemp("t"))
    loads, stores = traffic(blocks)
    assert stores == Counter(C + 2 * i for i in range(-(-map_bytes // 16) * 8))
    assert set(sums) <= loads and len(loads) == -(-(map_bytes + 2 * len(sums)) // 16) * 8
    lanes = [i.lanes for block in blocks for warp in block.warps for i in warp if i.opcode.startswith("STG")]
    assert max(lanes) == min(32, -(-map_bytes // 16)) and sum(n < 32 for n in lanes) <= len(blocks)


@SOME
@given(st.integers(0, 60000), st.integers(0, 60000), st.integers(0, 10000))
def test_a_stream_passes_its_bytes_once(tmp_path_factory, reads, writes, macs):
    stream = Stream(read_base=A, write_base=C, read_bytes=reads, write_bytes=writes, macs=macs)
    blocks = parse_launch(stream_launch("stream", stream), tmp_path_factory.mktemp("t"))
    loads, stores = traffic(blocks)
    assert loads == {A + 2 * i for i in range(-(-reads // 16) * 8)}
    assert stores == Counter(C + 2 * i for i in range(-(-writes // 16) * 8))
    products = sum(i.opcode == "HFMA2" for block in blocks for warp in block.warps for i in warp) * 64
    assert macs <= products < macs + 512 * len(blocks)


# --- from kernels to launches ---

LAYERS = {
    "pointwise": ConvGeometry(n=1, h=14, w=14, c=96, oc=64),
    "3x3": ConvGeometry(n=1, h=14, w=14, c=64, oc=64, kh=3, kw=3, padding=(1,) * 4),
    "image": ConvGeometry(n=1, h=32, w=32, c=3, oc=32, kh=3, kw=3, stride=(2, 2), padding=(1,) * 4),
    "depthwise": ConvGeometry(n=1, h=14, w=14, c=96, oc=96, kh=3, kw=3, padding=(1,) * 4, groups=96),
    "fc": ConvGeometry(n=1, h=1, w=1, c=512, oc=100),
    "long": ConvGeometry(n=1, h=4, w=4, c=2048, oc=64),
}


@pytest.mark.long
@pytest.mark.parametrize("layer", LAYERS)
def test_a_kernel_moves_at_least_its_footprint(layer, tmp_path):
    kernel = convolution_kernel(LAYERS[layer], "fp16", fused_input_bytes=64)
    kernel_launches = launches(kernel, GPU, "fp16", 16)
    loads, stores = set(), Counter()
    for launch in kernel_launches:
        addresses, written = traffic(parse_launch(launch, tmp_path))
        loads |= addresses
        stores += written
    assert 2 * len(loads) >= kernel.input_bytes + kernel.weight_bytes
    assert 2 * sum(stores.values()) >= kernel.output_bytes
    assert kernel_launches[0].name == kernel_name(kernel, "fp16")
    if len(kernel_launches) == 1:
        assert 2 * sum(stores.values()) == kernel.output_bytes
    assert {copy.size_bytes for copy in kernel_launches[0].inputs} >= {kernel.weight_bytes, 64}


def test_split_k_is_two_launches_where_the_model_splits(tmp_path):
    efficiency = {**GPU.efficiency, "split_cycles": 1.0, "gemv": 0.001, "iteration_cycles": 3000.0}
    split = dataclasses.replace(GPU, efficiency=efficiency)
    gemm, reduce = launches(convolution_kernel(LAYERS["long"], "fp16"), split, "fp16")
    assert reduce.name == gemm.name + "_reduce"
    _, partial = traffic(parse_launch(gemm, tmp_path))
    read, written = traffic(parse_launch(reduce, tmp_path))
    assert read == set(partial)
    assert len(written) * 2 == 16 * 64 * 2


def test_kernels_without_a_convolution():
    moved = {"input_bytes": 3920, "weight_bytes": 5120, "output_bytes": 6272}
    plain = Kernel(kind="gemm", m=49, n=64, k=40, macs=49 * 64 * 40, **moved)
    conv = convolution_kernel(ConvGeometry(n=1, h=7, w=7, c=40, oc=64), "fp16")
    assert dataclasses.replace(conv, geometry=None) == plain
    plain_text, conv_text = (text_of(launches(kernel, GPU, "fp16")[0]) for kernel in (plain, conv))
    assert plain_text.split("\n", 1)[1] == conv_text.split("\n", 1)[1]
    # The products of a window over one axis: so are those over three.
    wide = dataclasses.replace(plain, k=360, window=9, macs=49 * 64 * 360, weight_bytes=46080)
    column = ConvGeometry(n=1, h=49, w=1, c=40, oc=64, kh=9, padding=(4, 0, 4, 0))
    conv = convolution_kernel(column, "fp16")
    assert dataclasses.replace(conv, geometry=None) == wide
    plain_text, conv_text = (text_of(launches(kernel, GPU, "fp16")[0]) for kernel in (wide, conv))
    assert plain_text.split("\n", 1)[1] == conv_text.split("\n", 1)[1]
    depthwise = Kernel(kind="depthwise", window=9, macs=9 * 640, input_bytes=1280, output_bytes=1280)
    with pytest.raises(UsageError, match="a trace needs its convolution"):
        launches(depthwise, GPU, "fp16")
    with pytest.raises(UsageError, match="fp16 kernels, for tensor cores; not of fp32"):
        launches(plain, GPU, "fp32")


def test_names_are_stable():
    named = kernel_name(convolution_kernel(LAYERS["3x3"], "fp16", 64), "fp16")
    assert named == "gemm_m196_n64_k576_h14w14c64o64_f3x3_p1x1x1x1_in25152_fp16"
    stream = Kernel(kind="stream", macs=7, input_bytes=10, output_bytes=20)
    assert kernel_name(stream, "fp16") == "stream_macs7_in10_out20_fp16"


@st.composite
def any_kernels(draw) -> Kernel:
    if draw(st.booleans()):
        kernel = convolution_kernel(draw(geometries(draw(st.booleans()))), "fp16", draw(st.integers(0, 3)))
    else:
        small = st.integers(0, 3)
        sizes = [draw(small) for _ in range(7)]
        names = ("m", "n", "k", "macs", "input_bytes", "weight_bytes", "output_bytes")
        kernel = Kernel(kind="gemm", **dict(zip(names, sizes)), groups=draw(st.integers(1, 2)))
    return kernel


@settings(max_examples=examples(300), derandomize=True, deadline=None)
@given(any_kernels(), st.sampled_from(("fp16", "fp32")))
def test_a_name_says_which_kernel_it_is(kernel, dtype):
    name = kernel_name(kernel, dtype)
    assert re.fullmatch(r"[A-Za-z0-9_]{1,200}", name)
    assert parse_kernel_name(name, dtype) == kernel
    assert parse_kernel_name(name, "fp32" if dtype == "fp16" else "fp16") is None


@pytest.mark.parametrize(
    "name",
    ["", "pw_784x192x32", "gemm_m784_n192_k32_fp16_reduce", "gemm_m1_n2_k3_h28w28c32o192_fp16", "gemm_fp16x"],
)
def test_names_of_no_kernel(name):
    assert parse_kernel_name(name, "fp16") is None


# --- on disk ---

SMALL = [Kernel(kind="stream", input_bytes=100, output_bytes=32), convolution_kernel(LAYERS["fc"], "fp16")]


def requests(kernels, *channels: int) -> list[KernelRequest]:
    return [KernelRequest(kernel, count) for kernel in kernels for count in channels]


def test_traces_on_disk(tmp_path):
    progress = []
    traces = write_traces(requests(SMALL, 16, 32), GPU, "fp16", tmp_path, progress.append)
    assert [trace.directory for trace in traces] == [
        f"{kernel_name(kernel, 'fp16')}.{channels}" for kernel in SMALL for channels in (16, 32)
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(trace.directory for trace in traces)
    assert progress == sorted(progress) and progress[-1] == 1
    for trace in traces:
        folder = tmp_path / trace.directory
        entries = read_kernels_list(folder / "kernelslist.g")
        assert entries == [f"kernel-{n}.traceg" for n in range(1, len(trace.launches) + 1)]
        headers = [read_trace(folder / entry)[0] for entry in entries]
        assert tuple(header.name for header in headers) == trace.launches
        assert trace.files_bytes == {p.name: p.stat().st_size for p in folder.iterdir()}


def test_copies_are_said_on_demand(tmp_path):
    write_kernel(SMALL[0], GPU, "fp16", 32, tmp_path, copies=True)
    assert read_kernels_list(tmp_path / "kernelslist.g") == [HostCopy(A, 100), "kernel-1.traceg"]


def test_same_kernels_same_bytes(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_traces(requests(SMALL, 32), GPU, "fp16", tmp_path / name)
    folders = tmp_path / "a", tmp_path / "b"
    first, second = ({p.relative_to(d): p.read_bytes() for p in d.rglob("*.*g")} for d in folders)
    assert first == second and len(first) >= 4
