"""Do the tables of decoding say the same where both have a step, and have rows their order?"""

import importlib
import re
import sys
from pathlib import Path

import pytest

from pimflow.api.generation import Times

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield importlib.import_module("bench_generate")
    sys.modules.pop("bench_generate", None)


def rows(script, name):
    """Rows of a table of the page by the titles of its columns."""
    text = script.PAGE.read_text(encoding="utf-8")
    (body,) = re.findall(rf"<!-- {name} begin[^>]*-->\n(.*?)<!-- {name} end -->", text, re.DOTALL)
    head, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines())
    return [dict(zip(head, cells, strict=True)) for cells in lines]


def test_steps_that_are_searched_take_what_compiled_ones_take(script):
    """Of one request over 1024 tokens: the grid searches what the other table compiled and verified."""
    compiled = {(row["model"], row["PIM"]): row for row in rows(script, "decode") if row["context"] == "1024"}
    both = 0
    for row in rows(script, "grid"):
        if row["batch"] != "1":
            continue
        wanted = compiled[row["model"], row["PIM"]]
        alone, plan, speedup, tokens = re.match(
            r"([\d.]+) → ([\d.]+) \(([\d.]+x)\), (\d+)/s", row["1024 tokens"]
        ).groups()
        plan_ms, told = wanted["plan, ms"].split()
        assert float(alone) == pytest.approx(float(wanted["GPU alone, ms"]), abs=0.006)
        assert float(plan) == pytest.approx(float(plan_ms), abs=0.006)
        assert (f"({speedup})", tokens) == (told, wanted["tokens/s"])
        both += 1
    assert both


def test_cells_say_what_fits(script):
    times = Times(ns=4e6, ns_gpu_only=10e6, pj=1.0, pj_gpu_only=1.0)
    room = script.room_bytes("newton-gddr6")
    assert room == 4 << 30
    found = [script.Searched(times=times, held_bytes=each) for each in (room, room + (1 << 29))]
    assert script.grid_line("gpt-2", "newton-gddr6", 2, [*found, None]) == (
        "| gpt-2 | newton-gddr6 | 2 | 10.00 → 4.00 (2.50x), 500/s, 4.0 GiB "
        "| 10.00 → 4.00 (2.50x), 500/s, 4.5 GiB, no room | refused |"
    )


def test_rows_of_a_table_are_ordered_and_written_once(script):
    page = "<!-- grid begin (x) -->\n<!-- grid end -->\n"
    made = [
        f"| {model} | {pim} | {batch} | 1.00 → 0.50 |"
        for model in ("gpt-2", "llama-2-7b")
        for pim in script.PIMS
        for batch in (4, 16)
    ]
    for row in (*reversed(made), made[0]):
        page = script.with_row(page, row, "grid", ["| head |", "|---|"])
    assert page.splitlines()[1:-1] == ["| head |", "|---|", *made]
