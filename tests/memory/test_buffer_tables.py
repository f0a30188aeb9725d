"""Is a table of buffers read as it is written, and is every bad one refused in one clear line?"""

import csv
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples

from pimflow import memory
from pimflow.core.liveness import Lifetime
from pimflow.errors import LifetimeError, OutputError
from pimflow.host import files
from pimflow.memory import csv_form

DATA = Path(__file__).parent / "data"
# ids may hold commas and quotes
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=8)


@st.composite
def buffers(draw):
    ids = draw(st.lists(WORDS, min_size=1, max_size=6, unique=True))
    lifetimes = []
    for name in ids:
        begin = draw(st.integers(-5, 1 << 40))
        alignment = draw(st.sampled_from([1, 64]))
        alias = draw(st.sampled_from(["", "s"]))
        lifetimes.append(
            Lifetime(
                name=name,
                begin=begin,
                end=begin + draw(st.integers(1, 9)),
                size_bytes=draw(st.integers(0, csv_form.MAX_INTEGER)),
                memory=draw(st.sampled_from([csv_form.DEFAULT_MEMORY, "pim"])),
                alias=alias,
                within_bytes=draw(st.sampled_from([0, 64])) if alias else 0,
                alignment_bytes=alignment,
                offset_bytes=alignment * draw(st.integers(0, 1 << 40)),
            )
        )
    return lifetimes


@settings(max_examples=examples(100))
@given(lifetimes=buffers())
def test_what_is_written_is_read(tmp_path_factory, lifetimes):
    path = tmp_path_factory.mktemp("plan") / "plan.csv"
    csv_form.write(path, lifetimes, {life.name: life.offset_bytes for life in lifetimes})
    assert csv_form.read(path) == lifetimes
    assert list(path.parent.iterdir()) == [path]


def test_a_plan_of_parts_is_planned_as_it_is(tmp_path):
    (tmp_path / "parts.csv").write_text(
        "id,lower,upper,size,alias,within\na,0,2,8,w,\nb,1,2,4,w,8\nw,2,4,12,w,0\n"
    )
    lifetimes = csv_form.read(tmp_path / "parts.csv")
    extra = Lifetime(name="x", begin=0, end=1, size_bytes=1, memory=csv_form.DEFAULT_MEMORY)
    offsets = memory.plan([*lifetimes, extra]).offsets_bytes
    assert offsets["b"] == offsets["a"] + 8
    csv_form.write(tmp_path / "plan.csv", lifetimes, offsets)
    assert memory.plan(csv_form.read(tmp_path / "plan.csv")).offsets_bytes == {n: offsets[n] for n in "abw"}


def test_a_part_of_nothing_is_refused(tmp_path):
    (tmp_path / "part.csv").write_text("id,lower,upper,size,within\na,0,2,8,4\n")
    with pytest.raises(LifetimeError, match=r"part\.csv:2: within 4 needs an alias"):
        csv_form.read(tmp_path / "part.csv")


def test_minimalloc_form():
    lifetimes = csv_form.read(DATA / "input.12.csv")
    assert lifetimes[1] == Lifetime(name="b2", begin=3, end=9, size_bytes=4, memory=csv_form.DEFAULT_MEMORY)
    assert csv_form.read(DATA / "input.12.csv", alignment_bytes=4)[0].alignment_bytes == 4


def test_the_plan_has_minimalloc_s_output_form(tmp_path):
    lifetimes = csv_form.read(DATA / "input.12.csv")
    csv_form.write(tmp_path / "plan.csv", lifetimes, {"b1": 8, "b2": 8, "b3": 4, "b4": 4, "b5": 0})
    lines = (tmp_path / "plan.csv").read_text().splitlines()
    assert lines[:2] == ["id,lower,upper,size,offset", "b1,0,3,4,8"]
    assert [row["offset"] for row in csv.DictReader(lines)] == ["8", "8", "4", "4", "0"]


def test_columns_in_any_order_blank_lines_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("size, id,upper,lower,alignment\r\n\r\n4,a,2,0,\r\n8,b,3,1,16\r\n", encoding="utf-8-sig")
    a, b = csv_form.read(path, alignment_bytes=2)
    assert (a.size_bytes, a.begin, a.end, a.alignment_bytes) == (4, 0, 2, 2)
    assert (b.name, b.alignment_bytes) == ("b", 16)


HEAD = "id,lower,upper,size\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: column 'id' is missing; the first line has to name id,lower,upper,size"),
        ("id,lower,upper\na,0,1\n", ":1: column 'size' is missing"),
        ("id,lower,upper,size,alignement\n", ":1: unknown column 'alignement'; did you mean alignment"),
        ("id,lower,upper,size,size\n", ":1: column 'size' occurs twice"),
        (HEAD, "no buffers"),
        (HEAD + "a,0,1,-4\n", ":2: size -4 is below 0"),
        (HEAD + "a,0,1,4\nb,3,3,4\n", ":3: upper 3 is not above lower 3"),
        (HEAD + "a,5,3,4\n", ":2: upper 3 is not above lower 5"),
        (HEAD + "a,0,1,4\n\na,1,2,4\n", ":4: id 'a' is that of line 2 too"),
        (HEAD + f"a,0,1,{2**63}\n", ":2: size 9223372036854775808 is beyond 2^63 - 1"),
        (HEAD + f"a,0,{10**30},1\n", "is beyond 2^63 - 1"),
        (HEAD + "a,0,1,4.5\n", ":2: size '4.5' is not an integer"),
        (HEAD + "a,0,1,\n", ":2: size '' is not an integer"),
        (HEAD + "a,0,1,\u0661\n", "is not an integer"),
        (HEAD + f"a,0,1,{'9' * 5000}\n", "is not an integer"),
        (HEAD + ",0,1,4\n", ":2: the id is empty"),
        (HEAD + "a,0,1\n", ":2: 3 cells, 4 columns"),
        (HEAD + "a,0,1,4,5\n", ":2: 5 cells, 4 columns"),
        (HEAD + '"a,0,1,4\n', "unexpected end of data"),
        ("id,lower,upper,size,alignment\na,0,1,4,0\n", ":2: alignment 0 is below 1"),
        ("id,lower,upper,size,offset\na,0,1,4,-1\n", ":2: offset -1 is below 0"),
        ("id,lower,upper,size,alignment,offset\na,0,1,4,8,4\n", ":2: offset 4 is no multiple"),
    ],
)
def test_a_bad_table_is_refused(tmp_path, text, message):
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(LifetimeError) as caught:
        csv_form.read(path)
    line = str(caught.value)
    assert message in line and line.startswith(str(path)) and "\n" not in line
    assert len(line) < len(str(path)) + 200


def test_files_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(LifetimeError, match="cannot be read"):
        csv_form.read(tmp_path / "nothing.csv")
    (tmp_path / "binary.csv").write_bytes(b"id\xff\x00")
    with pytest.raises(LifetimeError, match="UTF-8: byte 2"):
        csv_form.read(tmp_path / "binary.csv")
    with pytest.raises(OutputError, match="cannot be written"):
        csv_form.write(tmp_path / "no" / "plan.csv", [], {})


def test_devices_and_links_are_written_to_and_stay_what_they_are(tmp_path):
    """A rename as root would put a plain file in their place."""
    pipe, link, plain = tmp_path / "pipe", tmp_path / "link", tmp_path / "plain"
    os.mkfifo(pipe)
    link.symlink_to(plain)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (pipe, link, plain):
        files.replace_file(path, b"plan")
    assert os.read(reader, 10) == b"plan" == plain.read_bytes()
    os.close(reader)
    assert pipe.is_fifo() and link.is_symlink() and plain.is_file()
    assert sorted(tmp_path.iterdir()) == [link, pipe, plain]
