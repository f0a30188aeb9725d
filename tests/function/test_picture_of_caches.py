"""Does the picture of keys and values in the banks show where appends write them?"""

from collections import defaultdict

import draw_caches as script
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from test_attention_programs import cases, flat, layouts

from pimflow.core.commands import Write
from pimflow.pim_backend.programs.cache_appends import append_keys, append_values


def bank_contents(layout, channel, bank):
    """By row and column of a bank, the matrix, and tokens (of keys) or elements (of values) written there."""
    keys, contents = layout.kind == "keys", defaultdict(set)
    per_gang = layout.banks // layout.pim.gangs
    for token in range(layout.attention.keys):
        program = (append_keys if keys else append_values)(layout, token)
        for node in flat(program.channels[channel]):
            if not isinstance(node, Write):
                continue
            first = node.gang * per_gang + node.bank
            if first <= bank < first + node.banks:
                position = token if keys else node.k.base + bank - first
                if not keys and position >= layout.attention.value_size:
                    continue  # zeros
                for column in range(node.column.base, node.column.base + node.count):
                    contents[node.row.base - layout.first_row, column].add((node.pixel.base, position))
    return contents


@settings(max_examples=examples(20), deadline=None)
@given(cases(), st.data())
def test_marks_are_where_appends_write(case, data):
    for layout in layouts(case):
        channel = data.draw(st.integers(0, layout.channels - 1))
        bank = data.draw(st.integers(0, layout.banks - 1))
        shown = {}
        for mark in script.row_marks(layout, channel, bank):
            position = int(mark["told"].partition(":")[0].rpartition(" ")[2])
            for column in range(mark["begin"], mark["end"]):
                shown[mark["row"], column] = {(int(mark["head"].rpartition(" ")[2]), position)}
        assert shown == bank_contents(layout, channel, bank)


def test_the_picture_has_every_bank_and_row(monkeypatch):
    """In each channel one head; in each bank one token of 16 neighbours, and an element of the values."""
    attention = script.ATTENTION.with_batch_and_heads(1, 2)
    monkeypatch.setattr(script, "ATTENTION", type(attention)(**{**vars(attention), "keys": 256}))
    chart = script.caches_chart()
    keys, values = (part["data"]["values"] for part in chart["vconcat"][0]["hconcat"])
    assert len(keys) == len(values) == 16 * 16
    for mark in keys:
        assert mark["told"] % 16 == mark["bank"] and mark["told"] // 16 % 8 == mark["channel"] % 8
    assert all(mark["told"] == mark["bank"] for mark in values)
    assert {(m["channel"] // 8, m["head"]) for m in keys + values} == {(0, "KV head 0"), (1, "KV head 1")}
    titles = [part["title"] for row in chart["vconcat"] for part in row["hconcat"]]
    assert len(titles) == 6 and {title.partition(",")[0] for title in titles} == set(script.PIMS)
