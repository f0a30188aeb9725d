"""Is every table of docs/results.md one that a script writes, and says the page which?"""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def update_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import update_results

    yield update_results
    for name in ("update_results", "update_readme"):
        sys.modules.pop(name, None)


def test_marks_are_the_tables_of_the_script(update_results):
    text = update_results.PAGE.read_text(encoding="utf-8")
    marked = re.findall(r"<!-- (\S+) begin[^>]*-->\n(.*?)<!-- (\S+) end -->", text, flags=re.DOTALL)
    assert [begin for begin, _, _ in marked] == [end for _, _, end in marked] == list(update_results.TABLES)
    for script, *arguments in update_results.TABLES.values():
        assert f"`scripts/{' '.join([script, *arguments])}`" in text
        assert (ROOT / "scripts" / script).is_file()
    written = {"a": "|new|"} | {begin: body for begin, body, _ in marked}
    for name in update_results.TABLES:
        filled = update_results.fill(text, name, written["a"])
        assert filled.count("|new|") == 1 and filled.count("<!--") == text.count("<!--")
