"""Do steps that are searched take what compiled ones take, and have rows of the grid their order?"""

from dataclasses import replace

import bench_generate as script
import pytest

from pimflow import Profiling
from pimflow.commands.generate.generation import StepCosts
from pimflow.hardware import system
from pimflow.zoo.language import shapes


@pytest.mark.long
def test_steps_that_are_searched_take_what_compiled_ones_take(monkeypatch):
    """GPT-2 of a tenth of its tokens: drawing and compiling the rest takes most of the time."""
    monkeypatch.setitem(shapes._BY_NAME, "gpt-2", replace(shapes.decoder("gpt-2"), vocabulary=5_000))
    profiling = Profiling()
    compiled = script.row("gpt-2", "newton-gddr6", 128, 1, profiling)
    searched = script.step_figures("gpt-2", "newton-gddr6", 128, 1, profiling)
    times, full, room = searched.times, compiled.full_cache, "there is no room for all blocks"
    assert 0 < searched.held_bytes == compiled.held_bytes < compiled.room_bytes
    assert room not in compiled.table()
    assert room in replace(compiled, room_bytes=compiled.held_bytes - 1).table()
    assert (times.ns, times.ns_gpu_only) == pytest.approx((full.tpot_ns, full.tpot_ns_gpu_only))
    assert times.pj == pytest.approx(full.energy_per_token_pj)


def test_cells_say_what_fits():
    times = StepCosts(ns=4e6, ns_gpu_only=10e6, pj=1.0, pj_gpu_only=1.0)
    room = system(pim="newton-gddr6").pim_bytes
    assert room == 4 << 30
    steps = [
        script.StepSearch(times=times, published_ns=published_ns, held_bytes=held_bytes)
        for published_ns, held_bytes in ((None, room), (6e6, room + (1 << 29)))
    ]
    assert script.grid_line("gpt-2", "newton-gddr6", 2, steps) == (
        "| gpt-2 | newton-gddr6 | 2 | 10.00 → 4.00 (2.50x), 500/s, 4.0 GiB "
        "| 10.00 → 4.00 (2.50x, 1.50x of the best GPU), 500/s, 4.5 GiB, no room |"
    )


def test_rows_of_a_table_are_ordered_and_written_once():
    page = "<!-- grid begin (x) -->\n<!-- grid end -->\n"
    rows = [
        f"| {model} | {pim} | {batch} | 1.00 → 0.50 |"
        for model in ("gpt-2", "llama-2-7b")
        for pim in script.PIMS
        for batch in (4, 16)
    ]
    for row in (*reversed(rows), rows[0]):
        page = script.with_row(page, row, "grid", ["| head |", "|---|"])
    lines = [line for line in page.splitlines()[1:-1] if line]
    assert "commit" in lines[0] and lines[1:] == ["| head |", "|---|", *rows]
