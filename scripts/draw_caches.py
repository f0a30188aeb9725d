"""Draw docs/caches_in_banks.svg: where keys and values of attention lie in channels, banks and rows.

Layouts are those of the fastest schedules, and positions those of packed caches. The upper part shows every
channel and bank of one device, the lower part the rows of one bank of each device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from bench_generate import PIMS, ROOT

from pimflow import Profiling, system
from pimflow.core.attention import Attention
from pimflow.host import pictures
from pimflow.host.charts import BAR_TEXT_COLOUR, chart, cycle_colours
from pimflow.pim_backend.programs.cache_layout import KeyLayout, ValueLayout
from pimflow.pim_backend.programs.packed_cache import LAYOUTS, element_places
from pimflow.placement import Costs

Layout = KeyLayout | ValueLayout

PICTURE = ROOT / "docs" / "caches_in_banks.svg"
TITLE = "Keys and values in channels, banks and rows"
ATTENTION = Attention(
    batch=1,
    heads=2,
    kv_heads=2,
    head_size=128,
    value_size=128,
    queries=1,
    keys=4096,
    scale=128**-0.5,
    causal=True,
    positioned=True,
)
WIDTH = 480  # of a panel, in pixels
CELL, ROW = 17, 30  # heights of a bank and of a row
EMPTY = -1
MATRIX, TOKEN, ELEMENT = range(3)  # indices of the last axis of `place_contents`


def layouts(pim: str) -> dict[str, Layout]:
    """Layouts of keys and values in the fastest schedules on the device called `pim`."""
    target = system(pim=pim)
    caches = Costs(target, Profiling()).attention_costs(ATTENTION)
    return {
        kind: costs[0].schedule.layout(
            LAYOUTS[kind], ATTENTION, target.pim, target.dtype, target.pim_channels
        )
        for kind, costs in caches.items()
    }


def place_contents(layout: Layout) -> np.ndarray:
    """Matrix, token and element of each place, or `EMPTY`: [channels, rows, columns, elements, banks, 3]."""
    row = layout.pim.columns_per_row * layout.elements
    contents = np.full((layout.channels * layout.rows * row * layout.banks, 3), EMPTY)
    for matrix in range(layout.matrices):
        places = element_places(layout, matrix)
        contents[places] = np.stack(np.broadcast_arrays(matrix, *np.indices(places.shape)), axis=-1)
    return contents.reshape(
        layout.channels, layout.rows, layout.pim.columns_per_row, layout.elements, layout.banks, 3
    )


def bank_marks(layout: Layout) -> Iterator[dict[str, Any]]:
    """A mark for each bank of each channel: its head, and its first token or element."""
    first = place_contents(layout)[:, 0, 0, 0]
    for channel, bank in itertools.product(range(layout.channels), range(layout.banks)):
        matrix, token, element = first[channel, bank].tolist()
        label = token if layout.kind == "keys" else element
        yield {"channel": channel, "bank": bank, "head": f"KV head {matrix}", "told": label}


def row_marks(layout: Layout, channel: int = 0, bank: int = 0) -> Iterator[dict[str, Any]]:
    """A mark for each run of columns of a bank that hold the key of one token, or one element of values."""
    bank_contents = place_contents(layout)[channel, ..., bank, :]  # [rows, columns, elements, 3]
    axis = TOKEN if layout.kind == "keys" else ELEMENT
    for row, columns in enumerate(bank_contents):
        numbered = enumerate(columns)
        for (matrix, label), run in itertools.groupby(
            numbered, key=lambda pair: (int(pair[1][0, MATRIX]), int(pair[1][0, axis]))
        ):
            if matrix == EMPTY:
                continue
            run_columns = [column for column, _ in run]
            tokens = np.unique(columns[run_columns, :, TOKEN])
            text = f"{label}" if layout.kind == "keys" else f"element {label}: {_ranges(tokens)}"
            yield {
                "row": row,
                "begin": run_columns[0],
                "end": run_columns[-1] + 1,
                "middle": (run_columns[0] + run_columns[-1] + 1) / 2,
                "head": f"KV head {matrix}",
                "told": text,
            }


def _ranges(tokens: np.ndarray) -> str:
    """The first two ranges of neighbouring tokens, and the last, as text."""
    runs = np.split(tokens, np.flatnonzero(np.diff(tokens) > 1) + 1)
    texts = [f"{run[0]}-{run[-1]}" for run in runs if run[0] != EMPTY]
    return ", ".join(texts if len(texts) < 4 else [*texts[:2], "...", texts[-1]])


def caches_chart() -> dict[str, Any]:
    """The picture in Vega-Lite's grammar."""
    layouts_by_pim = {pim: layouts(pim) for pim in PIMS}
    above = [_banks(PIMS[0], layout) for layout in layouts_by_pim[PIMS[0]].values()]
    below = [
        {"hconcat": [_rows(pim, layout) for layout in of_pim.values()]}
        for pim, of_pim in layouts_by_pim.items()
    ]
    return chart(vconcat=[{"hconcat": above}, *below], config={"aria": False})  # a label a mark is most of it


def _banks(pim: str, layout: Layout) -> dict[str, Any]:
    label = "first token" if layout.kind == "keys" else "first element"
    return {
        "title": f"{pim}, {layout.kind}: the {label} in each bank",
        "width": WIDTH,
        "height": {"step": CELL},
        "data": {"values": list(bank_marks(layout))},
        "encoding": {
            "x": {
                "field": "channel",
                "type": "ordinal",
                "title": "channel",
                "axis": {"labelAngle": 0, "ticks": False},
            },
            "y": {"field": "bank", "type": "ordinal", "title": "bank"},
        },
        "layer": [
            {"mark": {"type": "rect", "stroke": "white"}, "encoding": {"color": _colour()}},
            {"mark": {"type": "text", "color": BAR_TEXT_COLOUR}, "encoding": {"text": {"field": "told"}}},
        ],
    }


def _rows(pim: str, layout: Layout) -> dict[str, Any]:
    columns = layout.pim.columns_per_row
    scale = {"domain": [0, columns], "nice": False}
    axis = {"values": list(range(0, columns + 1, columns // 8)), "grid": False}
    y = {"field": "row", "type": "ordinal", "title": "row", "scale": {"paddingInner": 0.12}}
    return {
        "title": f"{pim}, {layout.kind}: tokens in rows of bank 0 of channel 0",
        "width": WIDTH,
        "height": {"step": ROW},
        "data": {"values": list(row_marks(layout))},
        "encoding": {"y": y},
        "layer": [
            {
                "mark": {"type": "bar", "stroke": "white"},
                "encoding": {
                    "x": {
                        "field": "begin",
                        "type": "quantitative",
                        "title": "column",
                        "scale": scale,
                        "axis": axis,
                    },
                    "x2": {"field": "end"},
                    "color": _colour(),
                },
            },
            {
                "mark": {"type": "text", "color": BAR_TEXT_COLOUR},
                "encoding": {"x": {"field": "middle", "type": "quantitative"}, "text": {"field": "told"}},
            },
        ],
    }


def _colour() -> dict[str, Any]:
    heads = [f"KV head {matrix}" for matrix in range(ATTENTION.batch * ATTENTION.kv_heads)]
    legend = {"title": None, "orient": "top"}
    return {
        "field": "head",
        "type": "nominal",
        "scale": {"domain": heads, "range": cycle_colours(heads)},
        "legend": legend,
    }


def main() -> None:
    pictures.save(PICTURE, caches_chart(), TITLE)


if __name__ == "__main__":
    main()
