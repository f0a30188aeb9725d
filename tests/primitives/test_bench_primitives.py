"""Does the script of docs/primitives.md write what the page has marks for?"""

import re
import sys

import bench_primitives as script
import configurations
import pytest

from pimflow.compiler.c_code import builds

pytestmark = pytest.mark.long


def test_marks_are_the_tables_of_the_script():
    text = script.PAGE.read_text(encoding="utf-8")
    marked = re.findall(r"<!-- (\S+) begin[^>]*-->\n.*?<!-- (\S+) end -->", text, flags=re.DOTALL)
    names = [name for tables in script.PARTS.values() for name in tables]
    assert marked == [(name, name) for name in names]
    for part in script.PARTS:
        assert f"`scripts/bench_primitives.py {part}`" in text


def test_tables_of_a_small_network(capsys, monkeypatch, tmp_path):
    page = tmp_path / "primitives.md"
    page.write_text(script.PAGE.read_text())
    monkeypatch.setattr(script, "PAGE", page)
    monkeypatch.setattr(script, "GOOGLENET_POOLS", script.GOOGLENET_POOLS[-1:])
    monkeypatch.setattr(script, "SELECTED", "toy")
    monkeypatch.setattr(script, "PLANNED", (("toy", None), ("toy", 0.001)))
    monkeypatch.setattr(script, "C_NETWORK", "toy")
    monkeypatch.setattr(script, "IN_C", script.IN_C[-1:])
    monkeypatch.setattr(script, "GPUS", script.GPUS[:1])
    monkeypatch.setattr(script, "C_MEASURE", 1)
    threads = script.thread_count()
    parts = ["pools", "gpu", *(["c"] if builds.local_compiler() else [])]
    monkeypatch.setattr(sys, "argv", ["x", *parts, "--calls", "1", "--page"])
    script.main()
    text, printed = page.read_text(), capsys.readouterr().out
    tables = re.findall(r"begin: written by \S+ -->\n(.*?)\n<!-- (\S+) end", text, flags=re.DOTALL)
    for body, name in tables:
        body = re.sub(configurations.LINE, "", body)
        assert f"{name}\n\n{body}\n" in printed or name.partition("-")[0] not in parts
    assert "\n| toy | 0.001 | none | none | none | none | none | none |\n" in text
    assert "In microseconds, the least of 1 calls, on " in text
    assert script.thread_count() == threads
