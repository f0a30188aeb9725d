"""Are the tables of the papers' pages that cost nothing to make what their scripts make now?"""

import importlib
import re
import sys
from pathlib import Path

import pytest

from pimflow.commands.fuse import fuse

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("reproduce_deep_fusion")
    sys.path.remove(str(SCRIPTS))
    for name in ("reproduce_deep_fusion", "configurations"):
        sys.modules.pop(name, None)


def test_deep_fusion_s_tables_of_resnet_18(script):
    graph, text = fuse.layer_graph("resnet-18"), script.PAGE.read_text(encoding="utf-8")
    tables = {
        "table 1": script.table_1(graph),
        "figure 1": script.figure_1(graph),
        "99.6": script.neurons(graph),
        "figure 5": script.figure_5(),
    }
    block = importlib.import_module("configurations").block
    for name, rows in tables.items():
        _, written, _ = re.search(block(f"deep fusion {name}"), text, re.DOTALL).groups()
        assert written.splitlines() == rows, name
