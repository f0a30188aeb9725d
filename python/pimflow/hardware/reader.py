"""Reader of hardware files: TOML tables to frozen dataclasses, with errors that name the field.

A value is bare (``clock_mhz = 1365``) or has a source
(``clock_mhz = { value = 1365, source = "Accel-Sim SM75_RTX2060" }``); so has every value of a section such as
``[energy]``. Every report lists values whose source says ``assumed``. A table of values may inherit from an
embedded device (``efficiency = { as = "v100", source = "…", value = { … } }``); its own values override. The
source of an inherited value is the table's, followed by the other device's in parentheses. A whole file may
begin as an embedded device of its kind (``as = "newton-gddr6"``): its own fields, and values of sections,
override.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from pathlib import Path

from pimflow.core import table_files
from pimflow.errors import SpecError, UnknownNameError, hint

if typing.TYPE_CHECKING:
    from _typeshed import DataclassInstance

Table = dict[str, object]  # of a TOML file
SpecT = typing.TypeVar("SpecT", bound="DataclassInstance")
SPECS = Path(__file__).parent / "specs"
# Products of two integers must fit the simulators' 64-bit counters.
INTEGER_LIMIT = 1 << 31
FLOAT_LIMIT = 1e18  # products of a few numbers must stay finite


def spec_names(kind: str) -> list[str]:
    """Names of the embedded devices of one kind: ``"pim"``, ``"gpu"`` or ``"system"``."""
    return sorted(path.stem for path in (SPECS / kind).glob("*.toml"))


def spec_path(kind: str, name_or_path: str | os.PathLike[str]) -> Path:
    """Path of an embedded device's file, or the given path."""
    text = os.fspath(name_or_path)
    if text in spec_names(kind):
        return SPECS / kind / f"{text}.toml"
    if text.endswith(".toml") or os.sep in text:
        return Path(text)
    raise UnknownNameError(kind, text, spec_names(kind))


def read_toml(kind: str, name_or_path: str | os.PathLike[str]) -> tuple[str, Table]:
    """Name and table of an embedded device, or of the TOML file at a path."""
    path = spec_path(kind, name_or_path)
    table = table_files.read_toml(path, SpecError)
    if "as" in table:
        table = _with_base(kind, path, table)
    return path.stem, {field: _resolve_inheritance(path, field, entry) for field, entry in table.items()}


def _with_base(kind: str, path: Path, table: Table) -> Table:
    """`table` over that of the embedded device that it begins as; raises `SpecError` if there is none."""
    name = table["as"]
    others = [spec for spec in spec_names(kind) if spec != path.stem]
    if name not in others:
        raise SpecError(f"{path}: no other embedded device '{name}' to begin as; {hint(str(name), others)}")
    base = table_files.read_toml(spec_path(kind, str(name)), SpecError)
    if "as" in base:
        raise SpecError(f"{path}: '{name}' begins as another device itself; begin as '{base['as']}'")
    merged = dict(base)
    for field, value in table.items():
        inherited = base.get(field)
        is_section = isinstance(value, dict) and isinstance(inherited, dict) and "value" not in value
        merged[field] = {**inherited, **value} if is_section else value  # type: ignore[dict-item]
    del merged["as"]
    return merged


def _resolve_inheritance(path: Path, field: str, entry: object) -> object:
    """`entry` with the values that it inherits by ``as``; each value gets its own source."""
    if not isinstance(entry, dict) or "as" not in entry:
        return entry
    where, name, overrides = f"{path}: field '{field}'", str(entry["as"]), entry.get("value", {})
    kind_by_device = {
        spec_file.stem: spec_file.parent.name for spec_file in SPECS.glob("*/*.toml") if spec_file != path
    }
    if name not in kind_by_device:
        raise SpecError(
            f"{where}: no other embedded device '{name}' to begin as; {hint(name, kind_by_device)}"
        )
    inherited, inherited_source = split_source(read_toml(kind_by_device[name], name)[1].get(field))
    if not isinstance(overrides, dict) or not isinstance(inherited, dict):
        raise SpecError(f"{where}: only a table of values can begin as another")
    if unknown := sorted(entry.keys() - {"as", "source", "value"}):
        raise SpecError(f"{where}: unknown '{unknown[0]}' next to 'as'; values of its own belong in 'value'")
    source = str(entry.get("source", f"as {name}"))
    inherited_section, override_section = _section(inherited), _section(overrides)
    sources = {key: override_section[1].get(key, source) for key in overrides}
    for key in inherited_section[0].keys() - overrides.keys():
        original_source = inherited_section[1].get(key, inherited_source)
        sources[key] = f"{source} ({original_source})" if original_source else source
    values = {**inherited_section[0], **override_section[0]}
    return {key: {"value": value, "source": sources[key]} for key, value in values.items()}


def build(cls: type[SpecT], table: object, where: str, **extra: object) -> SpecT:
    """An instance of dataclass `cls` from a TOML table.

    Values written as ``{value, source}`` are unwrapped; their sources go to the field ``sources`` if `cls`
    has one, for values of a section as ``section.key``. Raises `SpecError` for a missing, unknown or wrongly
    typed field.
    """
    if not isinstance(table, dict):
        raise SpecError(f"{where}: {table!r} is not a table")
    fields = {
        f.name: f for f in dataclasses.fields(cls) if f.init and f.name != "sources" and f.name not in extra
    }
    hints = typing.get_type_hints(cls)
    values = dict(extra)
    sources: dict[str, str] = {}
    for key, value in table.items():
        if key not in fields:
            raise SpecError(f"{where}: unknown field '{key}'; {hint(key, fields)}")
        value, source = split_source(value)
        if source is not None:
            sources[key] = source
        if typing.get_origin(hints[key]) is dict:
            if not isinstance(value, dict):
                raise SpecError(f"{where}: field '{key}' is not a table")
            value, value_sources = _section(value)
            sources |= {f"{key}.{name}": value_source for name, value_source in value_sources.items()}
        values[key] = _convert(value, hints[key], f"{where}: field '{key}'")
    missing = [
        name
        for name, f in fields.items()
        if name not in values
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise SpecError(f"{where}: missing field{'s'[: len(missing) > 1]} {', '.join(missing)}")
    if "sources" in hints:
        values["sources"] = sources
    try:
        return cls(**values)
    except ValueError as error:
        raise SpecError(f"{where}: {error}") from error


def split_source(value: object) -> tuple[object, str | None]:
    """Value and source of an entry of a file; the source of a bare value is None."""
    if isinstance(value, dict) and set(value) <= {"value", "source"} and "value" in value:
        return value["value"], str(value.get("source", ""))
    return value, None


def _section(table: Table) -> tuple[Table, dict[str, str]]:
    """The values of a section, and the sources of those that have one."""
    entries = {key: split_source(value) for key, value in table.items()}
    sources = {key: source for key, (_, source) in entries.items() if source is not None}
    return {key: value for key, (value, _) in entries.items()}, sources


def _convert(value: object, kind: object, where: str) -> object:
    """`value` as type `kind`: ints become floats where required, and lists tuples."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if fault := out_of_range(value):
        raise SpecError(f"{where}: {fault}")
    if kind is float and type(value) is int:
        return float(value)
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(item, args[0], where) for item in value)
    if origin is dict and isinstance(value, dict):
        return {key: _convert(item, args[1], f"{where}.{key}") for key, item in value.items()}
    if type(None) in args:
        (kind,) = (a for a in args if a is not type(None))
        return _convert(value, kind, where)
    if origin is None and isinstance(kind, type) and isinstance(value, kind) and type(value) is not bool:
        return value
    if kind is bool and isinstance(value, bool):
        return value
    raise SpecError(f"{where}: {value!r} is not a {getattr(kind, '__name__', kind)}")


def out_of_range(value: object) -> str:
    """Why a number is too large or small; empty if it is not. `require_positive` rejects NaN and infinity."""
    if type(value) is int and abs(value) >= INTEGER_LIMIT:
        return f"{value!a:.40} is not below {INTEGER_LIMIT}"
    if type(value) is float and FLOAT_LIMIT <= abs(value) < float("inf"):
        return f"{value!r} is not below {FLOAT_LIMIT:g}"
    if type(value) is float and 0 < abs(value) < 1 / FLOAT_LIMIT:
        return f"{value!r} is nearer to zero than {1 / FLOAT_LIMIT:g}"
    return ""


def require_positive(**values: float | None) -> None:
    """Raise `ValueError` for the first value that is not a finite number above zero."""
    for name, value in values.items():
        if value is not None and not (0 < value < float("inf")):
            raise ValueError(f"field '{name}': {value} is not a finite number above zero")


def require_not_negative(**values: float | None) -> None:
    """Raise `ValueError` for the first value that is not a finite number of zero or more."""
    for name, value in values.items():
        if value is not None and not (0 <= value < float("inf")):
            raise ValueError(f"field '{name}': {value} is not a finite number of zero or more")
