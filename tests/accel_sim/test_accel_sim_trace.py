"""Are Accel-Sim's traces read and written as they are, and every fault of theirs named?"""

import dataclasses
import lzma
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from trace_reader import ThreadBlock, parse_instruction, read_kernels_list, read_trace

from pimflow.errors import TraceError
from pimflow.simulators.accel_sim.trace import (
    DELTAS,
    LISTED,
    STRIDED,
    HostCopy,
    SassInstruction,
    TraceHeader,
    compress,
    is_stridable,
    write_kernels_list,
)

DATA = Path(__file__).parent / "data"
FAST = settings(max_examples=examples(200), derandomize=True, deadline=None)


def text_of(name: str) -> str:
    """A trace that Accel-Sim ran."""
    return lzma.decompress((DATA / f"{name}.traceg.xz").read_bytes()).decode("ascii")


def write_trace(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kernel-1.traceg"
    path.write_text(text, encoding="ascii", newline="\n")
    return path


@pytest.mark.parametrize("name", ["empty", "pw_784x192x32"])
def test_real_traces_come_back_byte_by_byte(name, tmp_path):
    header, blocks = read_trace(write_trace(tmp_path, text_of(name)))
    assert str(header) + "".join(map(str, blocks)) == text_of(name)


def test_a_real_trace_is_understood(tmp_path):
    header, blocks = read_trace(write_trace(tmp_path, text_of("pw_784x192x32")))
    blocks = list(blocks)
    assert (header.name, header.grid, header.block) == ("pw_784x192x32", (3, 13, 1), (128, 1, 1))
    assert (header.blocks, header.warps, len(blocks)) == (39, 4, 39)
    instructions = [i for block in blocks for warp in block.warps for i in warp]
    loads = [i for i in instructions if i.opcode.startswith("LDG")]
    touched = {address // 32 for i in loads for address in i.addresses}
    assert len(touched) * 32 == (784 * 32 + 192 * 32) * 2  # both operands, once
    # What its log calls gpu_sim_insn.
    assert sum(i.lanes for i in instructions) == 343296


def decompress_like_accel_sim(words: list[str], mask: int) -> list[int]:
    """`trace_parser.cc`, lane by lane, for any mode."""
    mode, first, lanes, started, stopped = int(words[0]), int(words[1], 16), [], False, False
    deltas = [int(word) for word in words[2:]]
    address, used = first, 0
    for lane in range(32):
        if not mask >> lane & 1:
            stopped = started
            continue
        if started:
            if mode == 1:
                assert not stopped
            address += deltas[0] if mode == 1 else deltas[used]
            used += 1
        started = True
        lanes.append(address)
    return lanes


@st.composite
def instructions(draw) -> SassInstruction:
    registers = st.integers(0, 255)
    base = SassInstruction(
        pc=16 * draw(st.integers(0, 1 << 16)),
        opcode=draw(st.sampled_from(("LDG.E.128.SYS", "STS.64", "HMMA.1688.F32", "EXIT", "IADD3"))),
        destinations=tuple(draw(st.lists(registers, max_size=1))),
        sources=tuple(draw(st.lists(registers, max_size=4))),
        mask=draw(st.integers(0, (1 << 32) - 1) | st.just((1 << 32) - 1) | st.just(0xFF0)),
    )
    if not draw(st.booleans()):
        return base
    if draw(st.booleans()):
        first, stride = draw(st.integers(1 << 40, 1 << 46)), draw(st.integers(-4096, 4096))
        addresses = tuple(first + stride * lane for lane in range(base.lanes))
    else:
        some = st.lists(st.integers(0, (1 << 47) - 1), min_size=base.lanes, max_size=base.lanes)
        addresses = tuple(draw(some))
    return dataclasses.replace(base, width_bytes=draw(st.sampled_from((1, 2, 4, 8, 16))), addresses=addresses)


@FAST
@given(instructions())
def test_instructions_come_back(instruction):
    assert parse_instruction(1, str(instruction)) == instruction
    short = compress(instruction)
    assert parse_instruction(1, str(short)) == short
    assert short.addresses == instruction.addresses


@FAST
@given(instructions())
def test_accel_sim_finds_the_same_addresses(instruction):
    short = compress(instruction)
    if not short.addresses:
        return
    memory = str(short).split()[-len(short._memory().split()) :]
    assert decompress_like_accel_sim(memory, short.mask) == list(short.addresses)


def test_a_stride_is_for_neighbouring_lanes():
    assert is_stridable(0x0000FF00) and is_stridable(0xFFFFFFFF) and is_stridable(1) and is_stridable(0)
    assert not is_stridable(0b101)
    strided = SassInstruction(0, "LDG.E.SYS", (1,), (2,), 0b101, 4, (0, 4), STRIDED)
    with pytest.raises(ValueError, match="no single stride"):
        str(strided)
    assert compress(strided).mode == DELTAS
    with pytest.raises(ValueError, match="no single stride"):
        str(dataclasses.replace(strided, mask=0b111, addresses=(0, 4, 12)))


@st.composite
def traces(draw) -> tuple[TraceHeader, list[ThreadBlock]]:
    grid = tuple(draw(st.tuples(*(st.integers(1, 2),) * 3)))
    header = TraceHeader(
        name=draw(st.sampled_from(("gemm_m1", "_Z6kernelPfS_"))),
        kernel_id=draw(st.integers(1, 9)),
        grid=grid,
        block=(draw(st.sampled_from((1, 32, 40, 64))), 1, 1),
        shared_memory_bytes=draw(st.integers(0, 65536)),
        registers=draw(st.integers(16, 255)),
        shared_base=draw(st.integers(0, (1 << 48) - 1)),
    )
    warp = st.lists(instructions(), max_size=2).map(tuple)
    blocks = []
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(grid[0]):
                blocks.append(ThreadBlock((x, y, z), tuple(draw(warp) for _ in range(header.warps))))
    return header, blocks


@settings(max_examples=examples(40), derandomize=True, deadline=None)
@given(traces())
def test_traces_come_back(tmp_path_factory, trace):
    header, blocks = trace
    path = write_trace(tmp_path_factory.mktemp("t"), str(header) + "".join(map(str, blocks)))
    header_read, iterator = read_trace(path)
    assert (header_read, list(iterator)) == (header, blocks)


FAULTS = {
    "ends inside a thread block": lambda t: t[: t.index("#END_TB")],
    "ends after 0 of 1 thread blocks": lambda t: t[: t.index("#BEGIN_TB")],
    r":3: not three numbers: '\(1,1\)'": lambda t: t.replace("(1,1,1)", "(1,1)"),
    "tracer version 4": lambda t: t.replace("tracer version = 3", "tracer version = 4"),
    r":6: '-nregs' is no number": lambda t: t.replace("nregs = 16", "nregs = many"),
    "the header has no '-shmem'": lambda t: t.replace("-shmem = 0\n", ""),
    ":2: not '-<field> = <value>'": lambda t: t.replace("-kernel id = 1", "-kernel name = x"),
    ":18: thread block 7,0,0 is outside the grid": lambda t: t.replace("block = 0,0,0", "block = 7,0,0"),
    "warp '1' where warp 0 is due": lambda t: t.replace("warp = 0", "warp = 1"),
    "'insts' is no number": lambda t: t.replace("insts = 1", "insts = x"),
    ":22: not an instruction": lambda t: t.replace("0000 ffffffff 0 EXIT", "0000 ffffffff EXIT"),
    "not as many registers as it says": lambda t: t.replace("0 EXIT 0", "1 EXIT 0"),
    "addresses without a width": lambda t: t.replace("EXIT 0 0 ", "EXIT 0 0 1 0x0 4 "),
    "no address mode 0, 1 or 2": lambda t: t.replace("EXIT 0 0 ", "EXIT 0 4 3 0x0 4 "),
    "1 addresses for 32 active lanes": lambda t: t.replace("EXIT 0 0 ", "EXIT 0 4 0 0x0 "),
    "not '#END_TB'": lambda t: t.replace("#END_TB", "0000 ffffffff 0 EXIT 0 0 "),
    "not '#BEGIN_TB'": lambda t: t + "more\n",
    "not a line of a trace's header": lambda t: "hello\n" + t,
}


@pytest.mark.parametrize("said", FAULTS)
def test_faults_are_named_with_their_place(said, tmp_path):
    path = write_trace(tmp_path, FAULTS[said](text_of("empty")))
    with pytest.raises(TraceError, match=said) as caught:
        list(read_trace(path)[1])
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_no_text_or_not_there(tmp_path):
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none.traceg")
    (tmp_path / "b.traceg").write_bytes(b"-kernel name = x\n\xff\xfe")
    with pytest.raises(TraceError, match=r"b\.traceg: not a text file"):
        read_trace(tmp_path / "b.traceg")


@FAST
@given(
    st.lists(
        st.builds(HostCopy, st.integers(0, (1 << 48) - 1), st.integers(1, 1 << 40))
        | st.integers(1, 99).map(lambda n: f"kernel-{n}.traceg")
    )
)
def test_lists_of_kernels_come_back(tmp_path_factory, entries):
    path = tmp_path_factory.mktemp("l") / "kernelslist.g"
    write_kernels_list(path, entries)
    assert read_kernels_list(path) == entries


def test_a_real_list_of_kernels(tmp_path):
    path = tmp_path / "kernelslist.g"
    path.write_text("MemcpyHtoD,0x00007f1000000000,50176\nkernel-1.traceg\nMemcpyDtoH,0x0,4\n")
    assert read_kernels_list(path) == [HostCopy(0x7F1000000000, 50176), "kernel-1.traceg"]
    path.write_text("kernel-1.traceg\nlaunch\n")
    with pytest.raises(TraceError, match=r"kernelslist\.g:2: neither a copy nor a kernel's trace: 'launch'"):
        read_kernels_list(path)


def test_modes_have_the_numbers_of_the_format():
    assert (LISTED, STRIDED, DELTAS) == (0, 1, 2)
