"""Readers in C++ asked directly, without what Python checks before: one line, soon, in bounded memory."""

import resource
import struct
import time

import numpy as np
import pytest
import tvm_ffi

from pimflow.commands.main import main
from pimflow.hardware.pim import PimSpec
from pimflow.host import native
from pimflow.simulators.pim import timing

SECONDS, KILOBYTES = 5.0, 1 << 20
GOOD = b"0x00000000 GWRITE\n0x00000000 G_ACT0\n0x08000000 G_ACT1\n0x10000000 G_ACT2\n0x18000000 G_ACT3\n"
SPEC = PimSpec.load("newton-gddr6")
LARGE = [2**31, 2**62, 2**63 - 1, -1, -(2**31) - 1, -(2**62), -(2**63)]
AFFINE = [0] * 5
COMP = [3, 14, 0, *AFFINE, *AFFINE, 1]
READRES = [4, 13, 0, *AFFINE, *AFFINE]


@pytest.fixture(autouse=True)
def _soon_and_small():
    begin, size = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - begin < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size < KILOBYTES


def error_line(call, *arguments) -> str:
    """The one line of a reader that refuses its input."""
    with pytest.raises(Exception) as raised:
        call(*arguments)
    (line,) = str(raised.value).strip().splitlines()
    return line


def engine():
    return timing._engine(SPEC, "strict", True, timing.Bursts(1), SPEC.rows_per_bank, SPEC.gangs)


def command_tally(words: list[int]) -> np.ndarray:
    tally = np.zeros(len(timing._TALLY.fields), dtype=np.int64)
    engine()(np.array(words, dtype=np.int64), tally)
    return tally


def loop(extent: int, *nodes: list[int]) -> list[int]:
    body = [word for node in nodes for word in node]
    return [0, 3 + len(body), extent, *body]


STREAMS = {
    "no size": [3],
    "size 0": [3, 0],
    "negative size": [3, -14, *COMP[2:]],
    "size beyond the end": [3, 2**31, *COMP[2:]],
    "size of another command": [3, 13, *COMP[2:]],
    "unknown command": [8, 2],
    "large command": [2**62, 2],
    "empty loop without extent": [0, 2],
    "loop beyond its end": [0, 2**62, 1, *COMP],
    "loop that ends within a command": [0, 10, 1, *COMP],
    "loops in loops": loop(1, loop(1, loop(1, loop(1, loop(1, COMP))))),
    "deep loops": [word for _ in range(100_000) for word in (0, 2**30, 1)],
    "sum of a row": loop(2**62, [3, 14, 0, 0, 2**62, 0, 0, 0, *AFFINE, 1]),
}


@pytest.mark.parametrize("words", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("name", ["time", "signature", "text"])
def test_streams_that_cannot_be_walked(name, words):
    calls = {
        "time": command_tally,
        "signature": lambda stream: native.get("pimflow.simulators.timing_signature")(
            np.array(stream, dtype=np.int64), False
        ),
        "text": lambda stream: native.get("pimflow.simulators.write_trace")(np.array(stream, dtype=np.int64)),
    }
    line = error_line(calls[name], words)
    assert any(said in line for said in ("not a stream", "nested deeper", "beyond 2^62", "no operand"))


@pytest.mark.parametrize("number", LARGE)
@pytest.mark.parametrize("place", range(2, 14))
def test_operands_of_any_size(number, place):
    """An operand that the device has not is refused, wherever it stands."""
    words = list(COMP)
    words[place] = number
    if place in (4, 5, 6, 7, 9, 10, 11, 12):  # steps of loops that are not there
        words = loop(2, loop(2, loop(2, loop(2, words))))
    assert error_line(command_tally, [*loop(3, READRES), *words])


@pytest.mark.long
def test_a_text_without_end_is_cut():
    endless = loop(2**31 - 1, loop(2**31 - 1, READRES))
    write = native.get("pimflow.simulators.write_trace")
    assert "more than 256 MiB" in error_line(write, np.array(endless, dtype=np.int64))


def test_records_of_another_version():
    """Numbers are laid out by name, in any order; other names than those of the library are refused."""
    record = native.Record("pimflow.memory.storage")
    table = record.table(("at_end", "bytes", "at_start"), [(1, 64, 0)])
    assert dict(zip(record.fields, table[0].tolist())) == {"bytes": 64, "at_start": 0, "at_end": 1}
    line = error_line(lambda: record.row(bytes=64, at_start=0))
    assert "the fields of 'pimflow.memory.storage' are at_end, at_start, bytes, not at_start, bytes" in line


def test_arrays_of_another_kind():
    parse = native.get("pimflow.simulators.parse_trace")
    for words in (np.empty(4, np.uint32), np.empty(5, np.int64), np.empty(10, np.uint32)[::2]):
        assert "numbers of 32 bits" in error_line(parse, GOOD, words)
    feed, tally = engine(), np.zeros(len(timing._TALLY.fields), dtype=np.int64)
    assert "3 numbers are no records" in error_line(feed, np.zeros(4, np.int64), tally[:3])
    for stream in (np.zeros(4, np.int16), np.zeros(8, np.int64)[::2], np.zeros(4, np.uint8)):
        assert "numbers of" in error_line(feed, stream, tally)


TRACES = {
    "a line of 100 MB": (GOOD + b"x" * 100_000_000, "a line of more than"),
    "a line of 100 MB that ends": (GOOD + b"0x0 " + b" " * 100_000_000 + b"COMP\n", "a line of more than"),
    "zeros": (GOOD + bytes(10_000_000), "a line of more than"),
    "zeros in lines": (GOOD + b"\0\n" * 1_000_000, ":6: missing address or command"),
    "a zero in a command": (GOOD + b"0x00000000 CO\0MP\n", ":6: unknown command"),
    "cut off": (GOOD[:-1], ":5: the last line does not end in a newline"),
    "an address of 100 digits": (GOOD + b"0x" + b"f" * 100 + b" COMP\n", ":6: address is beyond 29 bits"),
    "2^62 as an address": (GOOD + b"%x COMP\n" % 2**62, ":6: address is beyond 29 bits"),
    "a negative address": (GOOD + b"-1 COMP\n", ":6: address is not hexadecimal"),
    "UTF-16": (GOOD.decode().encode("utf-16"), ":1: address is not hexadecimal"),
}


@pytest.mark.long
@pytest.mark.parametrize("text, said", TRACES.values(), ids=TRACES)
def test_hostile_traces(text, said, tmp_path, capsys):
    path = tmp_path / "hostile.pim"
    path.write_bytes(text)
    assert main(["simulate", str(path), "--quiet"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"pimflow: error: {path}") and said in line and len(line) < 400


@pytest.mark.long
def test_ten_million_commands(tmp_path, capsys):
    path = tmp_path / "long.pim"
    path.write_bytes(GOOD + b"0x00000000 COMP\n" * 10_000_000)
    assert main(["simulate", str(path)]) == 0
    assert "10000000" in capsys.readouterr().out.replace(",", "")


@pytest.fixture(scope="module")
def modules(tmp_path_factory) -> dict[str, tuple]:
    """Saved bytes of PIM regions and of a network, with what reads them."""
    from pimflow.pim_backend.runtime import codegen, network_module  # noqa: F401

    save = native.get("pimflow.runtime.save_module")
    regions = native.get("pimflow.runtime.create_module")()
    array = np.arange(12, dtype=np.int64)
    native.get("pimflow.runtime.add_region")(regions, "region", *[array] * 7, 1, 1, 0)
    network = native.get("pimflow.runtime.create_network")(
        regions, ["x"], [tvm_ffi.Shape((1, 4))], ["float32"], 1, "llvm+pim", 1, ""
    )
    readers = {}
    for name, module, kind in (("pim", regions, "pim"), ("network", network, str(network.kind))):
        readers[name] = (bytes(save(module)), native.get(f"ffi.Module.load_from_bytes.{kind}"))
    return readers


@pytest.mark.parametrize("name", ["pim", "network"])
def test_modules_cut_off_anywhere(modules, name):
    data, read = modules[name]
    read(data)
    for end in range(len(data)):
        assert error_line(read, data[:end])


@pytest.mark.parametrize("name", ["pim", "network"])
def test_modules_with_any_number(modules, name):
    """Each word of eight bytes by another: read as another module, or refused."""
    data, read = modules[name]
    for offset in range(0, len(data) - 8):
        for number in LARGE:
            try:
                read(data[:offset] + struct.pack("<q", number) + data[offset + 8 :])
            except Exception as error:
                assert "\n" not in str(error).strip()
