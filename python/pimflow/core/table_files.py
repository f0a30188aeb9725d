"""Tables in files: the only reader of untrusted JSON and TOML.

Every error is one line that begins with the name of the file. Callers say of which class it is.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from pimflow.errors import PimflowError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_FILE_BYTES = 1 << 30  # /dev/zero, for one, never ends


def read_text(path: str | os.PathLike[str], error: type[PimflowError]) -> str:
    """The text of a file in UTF-8.

    Parameters
    ----------
    error
        Raised if it cannot be read, is larger than `MAX_FILE_BYTES`, or is not UTF-8.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as reason:  # a path with a null character is a ValueError
        raise error(f"{path}: cannot be read: {getattr(reason, 'strerror', None) or reason}") from reason
    if len(data) > MAX_FILE_BYTES:
        raise error(f"{path}: has more than {MAX_FILE_BYTES >> 30} GiB; tables are smaller")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as reason:
        raise error(
            f"{path}: not a text file in UTF-8: byte {reason.start} is part of no character"
        ) from None


def read_json(path: str | os.PathLike[str], error: type[PimflowError]) -> Any:
    """The value in a JSON file; raises `error` as `read_text` and `parse_json` do."""
    return parse_json(read_text(path, error), str(path), error)


def parse_json(text: str, where: str, error: type[PimflowError]) -> Any:
    """The value of a JSON text.

    It is stricter than Python's reader, so that each text has one meaning: no NaN or infinity in any
    spelling, no duplicate keys, no lone surrogates. Python's own limits bound depth and digits.

    Parameters
    ----------
    error
        Raised with the line of a syntax error.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object_without_duplicates,
            parse_float=_finite_number,
            parse_constant=_reject_constant,
        )
        if "\\ud" in text or "\\uD" in text:  # pairs are characters, halves cannot be printed or stored
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as reason:
        line = text.split("\n", reason.lineno)[reason.lineno - 1].strip()[:80]
        raise error(f"{where}:{reason.lineno}: {reason.msg}: {line!r}") from None
    except UnicodeEncodeError:
        raise error(f"{where}: not a JSON file: a text has half of a character") from None
    except RecursionError:
        raise error(f"{where}: not a JSON file: nested too deep") from None
    except ValueError as reason:  # of the hooks, and of numbers beyond what Python reads
        raise error(f"{where}: not a JSON file: {reason}") from None


def read_toml(path: str | os.PathLike[str], error: type[PimflowError]) -> dict[str, Any]:
    """The table in a TOML file; raises `error`."""
    text = read_text(path, error)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise error(f"{path}: not a TOML file: nested too deep") from None
    except ValueError as reason:  # TOML, and numbers beyond what Python reads
        raise error(f"{path}: not a TOML file: {reason}") from None


def _object_without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key '{duplicate[:80]}' occurs twice")
    return table


def _finite_number(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:80]} is too large for a number")
    return number


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
