"""Buffers and plans as MiniMalloc's CSV: ``id,lower,upper,size``, a buffer a line.

A buffer is live in the steps [lower, upper). Optional columns: ``alignment``, ``offset`` (a required offset;
in a plan, every buffer has one), ``memory``, ``alias`` and ``within`` (where the buffer begins in its alias
class, in bytes). Empty cells take the default.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Mapping, Sequence

from pimflow.core.liveness import Lifetime
from pimflow.core.table_files import read_text
from pimflow.errors import LifetimeError, hint
from pimflow.host.files import replace_file

REQUIRED = ("id", "lower", "upper", "size")
OPTIONAL = ("alignment", "offset", "memory", "alias", "within")
MAX_INTEGER = 2**63 - 1
DEFAULT_MEMORY = "pool"  # of buffers without a column ``memory``

_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")


def read(path: str | os.PathLike[str], alignment_bytes: int = 1) -> list[Lifetime]:
    """Read the buffers of a file.

    Parameters
    ----------
    alignment_bytes : int
        Alignment of buffers that have none in the file.

    Raises
    ------
    LifetimeError
        If the file is malformed; the message names file and line.
    """
    text = read_text(path, LifetimeError).removeprefix("\ufeff")  # spreadsheets write a byte order mark
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    lifetimes: list[Lifetime] = []
    lines: dict[str, int] = {}
    try:
        header = [name.strip() for name in next(rows, [])]
        _check_header(header, f"{path}:1")
        for cells in rows:
            if not any(cell.strip() for cell in cells):
                continue
            where = f"{path}:{rows.line_num}"
            if len(cells) != len(header):
                raise LifetimeError(f"{where}: {len(cells)} cells, {len(header)} columns; give one for each")
            life = _lifetime(
                {name: cell.strip() for name, cell in zip(header, cells)}, where, alignment_bytes
            )
            if life.name in lines:
                raise LifetimeError(
                    f"{where}: id '{life.name}' is that of line {lines[life.name]} too; rename one"
                )
            lines[life.name] = rows.line_num
            lifetimes.append(life)
    except csv.Error as error:
        raise LifetimeError(f"{path}:{rows.line_num}: {error}; write one buffer a line") from error
    if not lifetimes:
        raise LifetimeError(f"{path}: no buffers; write one a line, as {','.join(REQUIRED)}")
    return lifetimes


def _check_header(header: Sequence[str], where: str) -> None:
    missing = [name for name in REQUIRED if name not in header]
    if missing:
        raise LifetimeError(
            f"{where}: column '{missing[0]}' is missing; the first line has to name {','.join(REQUIRED)}"
        )
    for index, name in enumerate(header):
        if name not in REQUIRED + OPTIONAL:
            raise LifetimeError(f"{where}: unknown column '{name}'; {hint(name, REQUIRED + OPTIONAL)}")
        if name in header[:index]:
            raise LifetimeError(f"{where}: column '{name}' occurs twice; remove one")


def _lifetime(cells: Mapping[str, str], where: str, alignment_bytes: int) -> Lifetime:
    if not cells["id"]:
        raise LifetimeError(f"{where}: the id is empty; give every buffer a name")
    begin, end = _integer(cells, "lower", where), _integer(cells, "upper", where)
    if end <= begin:
        raise LifetimeError(
            f"{where}: upper {end} is not above lower {begin}; a buffer lives in [lower, upper)"
        )
    size = _integer(cells, "size", where, minimum=0)
    has_alignment = bool(cells.get("alignment"))
    alignment = _integer(cells, "alignment", where, minimum=1) if has_alignment else alignment_bytes
    offset = _integer(cells, "offset", where, minimum=0) if cells.get("offset") else None
    if offset is not None and offset % alignment:
        raise LifetimeError(f"{where}: offset {offset} is no multiple of the alignment, {alignment}")
    within_bytes = _integer(cells, "within", where, minimum=0) if cells.get("within") else 0
    if within_bytes and not cells.get("alias"):
        raise LifetimeError(
            f"{where}: within {within_bytes} needs an alias, since it is an offset inside the alias class"
        )
    return Lifetime(
        name=cells["id"],
        begin=begin,
        end=end,
        size_bytes=size,
        memory=cells.get("memory") or DEFAULT_MEMORY,
        alias=cells.get("alias", ""),
        within_bytes=within_bytes,
        alignment_bytes=alignment,
        offset_bytes=offset,
    )


def _integer(cells: Mapping[str, str], column: str, where: str, minimum: int | None = None) -> int:
    text = cells[column]
    if not _INTEGER.fullmatch(text):
        raise LifetimeError(f"{where}: {column} '{text[:40]}' is not an integer")
    value = int(text)
    if abs(value) > MAX_INTEGER:
        raise LifetimeError(f"{where}: {column} {text[:40]} is beyond 2^63 - 1")
    if minimum is not None and value < minimum:
        raise LifetimeError(f"{where}: {column} {value} is below {minimum}")
    return value


def write(
    path: str | os.PathLike[str], lifetimes: Sequence[Lifetime], offsets_bytes: Mapping[str, int]
) -> None:
    """Write a plan in MiniMalloc's output format; the file appears whole or not at all.

    ``alignment``, ``memory``, ``alias`` and ``within`` have a column if a buffer has another value than the
    default.

    Raises
    ------
    OutputError
        The file cannot be written.
    """
    optional_columns: dict[str, Sequence[int | str]] = {
        "alignment": [life.alignment_bytes for life in lifetimes],
        "memory": [life.memory for life in lifetimes],
        "alias": [life.alias for life in lifetimes],
        "within": [life.within_bytes for life in lifetimes],
    }
    defaults: dict[str, int | str] = {"alignment": 1, "memory": DEFAULT_MEMORY, "alias": "", "within": 0}
    needed_columns = [
        name for name, column in optional_columns.items() if any(value != defaults[name] for value in column)
    ]
    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerow([*REQUIRED, *needed_columns, "offset"])
    for index, life in enumerate(lifetimes):
        cells = [life.name, life.begin, life.end, life.size_bytes]
        table.writerow(
            [*cells, *(optional_columns[name][index] for name in needed_columns), offsets_bytes[life.name]]
        )
    replace_file(path, text.getvalue().encode())
