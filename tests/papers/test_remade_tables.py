"""Are the tables of the papers' pages that cost nothing to make what their scripts make now?"""

import re

import reproduce_deep_fusion as script
from configurations import block

from pimflow.commands.fuse import fuse


def test_deep_fusion_s_tables_of_resnet_18():
    graph, text = fuse.layer_graph("resnet-18"), script.PAGE.read_text(encoding="utf-8")
    tables = {
        "table 1": script.table_1(graph),
        "figure 1": script.figure_1(graph),
        "99.6": script.neurons(graph),
        "figure 5": script.figure_5(),
    }
    for name, rows in tables.items():
        _, written, _ = re.search(block(f"deep fusion {name}"), text, re.DOTALL).groups()
        assert written.splitlines() == rows, name
