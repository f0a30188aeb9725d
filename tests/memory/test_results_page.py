"""Is every table of docs/results.md, and of pages like it, a script's, and do these print what was found?"""

import re
from pathlib import Path

import pytest
import reproduce_occamy
import sensitivity
import update_results

import pimflow

ROOT = Path(__file__).resolve().parents[2]


def test_marks_are_the_tables_of_the_script():
    """Each on its page, and nothing else between such marks."""
    pages = {update_results.page_of(name) for name in update_results.TABLES}
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    for page, text in texts.items():
        marked = re.findall(r"<!-- (\S+) begin[^>]*-->\n(.*?)<!-- (\S+) end -->", text, flags=re.DOTALL)
        page_tables = [name for name in update_results.TABLES if update_results.page_of(name) == page]
        assert [begin for begin, _, _ in marked] == [end for _, _, end in marked] == page_tables
    text = "".join(texts.values())
    for script, *arguments in update_results.TABLES.values():
        assert f"`scripts/{' '.join([script, *arguments])}`" in text
        assert (ROOT / "scripts" / script).is_file()
    for name in update_results.TABLES:
        filled = update_results.fill(text, name, "|new|")
        assert filled.count("|new|") == 1 and filled.count("<!--") == text.count("<!--")


@pytest.mark.parametrize("sharing", ["partitioned", "time-shared"])
def test_every_value_of_the_sensitivity_table_changes_the_system(sharing):
    """What is chosen is what the system has, and no end is without effect or within the others."""
    base = pimflow.system(channel_sharing=sharing)
    values = sensitivity.values(base)
    assert ("channel_mode_switch_ns" in values) == base.is_time_shared
    for value in values.values():
        assert value.low <= value.chosen <= value.high and value.low < value.high
        systems = {value.changed(base, number).identity for number in (value.low, value.chosen, value.high)}
        assert base.identity in systems and len(systems) == len({value.low, value.chosen, value.high})


@pytest.mark.long
def test_tables_of_a_small_network():
    parts = reproduce_occamy.collect(["toy"], ["counts", "memory", "ahead"], runs=1, torch=False)
    counts, rows = reproduce_occamy.counts_table(parts["counts"]), parts["memory"]
    assert "| toy | - | 19 / 46 / 19 | " in counts
    assert [row["batch"] for row in rows] == [1, 16]
    for row in rows:
        assert row["optimal"] and row["planned_bytes"] <= row["lazy_peak_bytes"] < row["eager_bytes"]
        assert row["pool"]["allocated_bytes"] == row["planned_bytes"] < row["resident_bytes"]
    text = reproduce_occamy.TABLES["memory"](rows)
    held_mb, planned_mb = (rows[-1][f"{kind}_bytes"] / 1e6 for kind in ("resident", "planned"))
    assert f"| toy | 16 | {held_mb:.3f} | {planned_mb:.3f} |" in text
    ratio = rows[-1]["planned_bytes"] / rows[-1]["lazy_peak_bytes"]
    assert f"batch 16, 1 networks: planned to lazy {ratio:.3f}" in text
    assert "to PyTorch" not in text.partition("The paper")[0]  # it was left out
    resident, *ahead = parts["ahead"]
    pools = [row["pool_bytes"] for row in ahead]
    assert pools == sorted(pools) and pools[0] > resident["pool_bytes"]
    modelled = [row["latency_ns"] for row in ahead]
    assert modelled == sorted(modelled, reverse=True) and modelled[-1] > resident["latency_ns"]
    assert "| toy | resident | " in reproduce_occamy.ahead_table(parts["ahead"])
