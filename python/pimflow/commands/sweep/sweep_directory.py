"""The directory of a sweep: its tables, page and picture, and points that were compiled."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pimflow.commands.sweep.best import OBJECTIVES
from pimflow.commands.sweep.options import BEST
from pimflow.commands.sweep.sweep_chart import design_space
from pimflow.commands.sweep.sweep_page import render_sweep
from pimflow.commands.sweep.sweep_rows import ROWS, SweepRow
from pimflow.compiler import artifact
from pimflow.core.json_form import Json
from pimflow.host import pictures
from pimflow.host.directories import DirectoryKind, Seals, check_target, new_directory

TABLE = "sweep.csv"
_REPORT = re.compile(r"(point-\d+)/report\.html")


def check_output(directory: str | os.PathLike[str], *, force: bool = False) -> None:
    """Raise `ArtifactError` if `write` would fail there; call it before a sweep that takes hours."""
    check_target(directory, KIND, force=force)


def write(
    directory: str | os.PathLike[str],
    rows: Sequence[SweepRow],
    *,
    compile_point: Callable[[int, Path], object] | None = None,
    force: bool = False,
) -> None:
    """Write ``sweep.csv``, ``sweep.json``, ``sweep.html`` and, if it can be drawn, ``sweep.svg``.

    Parameters
    ----------
    compile_point : callable, optional
        Writes the compiled directory of the row of a number; called for the rows with a report.

    Raises
    ------
    ArtifactError
        If they cannot be written, or the directory has other files; with `force` these stay.
    """
    written = [row.to_json() for row in rows]
    picture = design_space(rows)
    with new_directory(directory, KIND, force=force) as folder:
        for number, row in enumerate(rows):
            if row.report and compile_point:
                compile_point(number, (folder / row.report).parent)
        (folder / TABLE).write_bytes(_csv(written))
        (folder / "sweep.html").write_bytes(render_sweep(rows))
        if pictures.can_render_images():
            (folder / "sweep.svg").write_bytes(pictures.render(picture, ".svg", "design space"))
        (folder / ROWS).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def with_reports(rows: Sequence[SweepRow], which: str, objective: str) -> list[SweepRow]:
    """Give a report to the points that are to be compiled.

    Parameters
    ----------
    which : str
        One of `options.POINTS`; the best point is the one with the least objective.
    objective : str
        Of the searches; rows have no memory, so that the fastest point is the best for ``memory``.
    """
    chosen = {number for number, row in enumerate(rows) if row.pareto}
    if which == BEST:
        value = OBJECTIVES.get(objective, OBJECTIVES["latency"])
        best: dict[str, int] = {}
        for number, row in enumerate(rows):
            least = best.get(row.model)
            if row.figures and (least is None or value(row.to_json()) < value(rows[least].to_json())):
                best[row.model] = number
        chosen = set(best.values())
    return [
        replace(row, report=f"point-{number}/report.html") if number in chosen else row
        for number, row in enumerate(rows)
    ]


def _csv(rows: Sequence[Mapping[str, Json]]) -> bytes:
    table = io.StringIO()
    writer = csv.DictWriter(table, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return table.getvalue().encode()


def _seals(directory: Path) -> Seals:
    """The files of a sweep and their digests; that of the table follows from ``sweep.json``."""
    try:
        rows = json.loads((directory / ROWS).read_text(encoding="utf-8"))
        if not all({"model", "error", "pareto"} <= row.keys() for row in rows):
            return {}
        digest = hashlib.sha256(_csv(rows)).hexdigest()
        folders = {match[1] for row in rows if (match := _REPORT.fullmatch(row.get("report", "")))}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
    seals: dict[str, str | int | None] = {ROWS: None, TABLE: digest, "sweep.html": None, "sweep.svg": None}
    for folder in folders:
        point_seals = {} if (directory / folder).is_symlink() else artifact.KIND.seals(directory / folder)
        seals |= {f"{folder}/{name}": seal for name, seal in point_seals.items()}
    return seals


KIND = DirectoryKind(name="a sweep", mark=ROWS, seals=_seals)
