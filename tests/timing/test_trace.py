"""`.pim` traces: what is malformed and how it is said, and what a program's text looks like."""

import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timing_programs import act, act_all, comp, program, read, write

from pimflow.core.commands import Affine, Loop
from pimflow.errors import TraceError, UsageError
from pimflow.simulators.pim.trace import Trace, expand_to_pim

GOOD = b"0x00000000 GWRITE_2 \n0x18003800 G_ACT3\n0x000007c0 COMP\nREADRES\n"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"", "blank line"),
        (b"# GWRITE", "comments are not allowed"),
        (b"// 0x0 COMP", "comments are not allowed"),
        (b"0x00000000 PREA", "unknown command"),
        (b"0x00000000 G_ACT4", "unknown command"),
        (b"0x00000000 COMP ", "unknown command"),
        (b"0x00000000 COMP\r", "the line ends in CRLF, not LF"),
        (b"0x00000000 comp", "unknown command"),
        (b"0x00000000 ", "missing command"),
        (b"0x00000000", "missing address or command"),
        (b"COMP", "missing address or command"),
        (b" COMP", "missing address or command"),
        (b"0x0000g000 COMP", "address is not hexadecimal"),
        (b"0x COMP", "address is not hexadecimal"),
        (b"-1 COMP", "address is not hexadecimal"),
        (b"0x20000000 COMP", "address is beyond 29 bits"),
        (b"0x10000000000000000 COMP", "address is beyond 29 bits"),
        (b"\xff\x00\x01", "missing address or command"),
    ],
)
def test_malformed_line(tmp_path, line, problem):
    path = tmp_path / "bad.pim"
    path.write_bytes(GOOD + line + b"\n" + GOOD)
    with pytest.raises(TraceError) as raised:
        Trace.read(path)
    assert str(raised.value) == f"{path}:5: {problem}: {line.decode('utf-8', 'replace')!r}"


def test_long_lines_are_cut():
    with pytest.raises(TraceError) as raised:
        Trace.read(b"x" * 10_000 + b"\n")
    assert len(str(raised.value)) < 120


def test_binary_and_unreadable_files(tmp_path):
    path = tmp_path / "trace.xz"
    path.write_bytes(lzma.compress(GOOD * 100))
    with pytest.raises(TraceError, match=r"trace\.xz:1: "):
        Trace.read(path)
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        Trace.read(tmp_path)
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        Trace.read(Path("absent.pim"))


@given(st.lists(st.sampled_from([*GOOD.splitlines(True), b"\n", b"0x", b" ", b"#"]) | st.binary(max_size=12)))
def test_any_bytes_are_a_trace_or_a_trace_error(pieces):
    text = b"".join(pieces)
    try:
        assert len(Trace.read(text)) == text.count(b"\n")
    except TraceError as error:
        assert str(error).startswith("<bytes>:")


def test_empty_trace_is_legal():
    assert len(Trace.read(b"")) == 0


def test_accepted_forms():
    text = b"READRES 3\n1000 GWRITE_4 0x20\n0X0000   COMP\nREADRESULT\n"
    assert len(Trace.read(text)) == 4


def test_text_of_a_program():
    stream = (write(buffer=1), act(3, 7), comp(2, row=5, column=30), read())
    assert expand_to_pim(program((), stream), 1) == (
        b"0x00000000 GWRITE\n0x18003800 G_ACT3\n0x00002f80 COMP\n0x00002fc0 COMP\nREADRES\n"
    )


def test_text_of_loops_has_every_command():
    stream = (*act_all(), Loop(extent=3, body=(write(), comp(4, row=Affine(0, (2,))), read())))
    expanded = program(stream)
    assert len(Trace.read(expand_to_pim(expanded, 0))) == len(list(expanded.commands(0)))


def test_row_without_place_in_the_address():
    with pytest.raises(UsageError, match="row 16384 has no place"):
        expand_to_pim(program((act(0, 16384),)), 0)
