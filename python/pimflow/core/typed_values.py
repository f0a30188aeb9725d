"""Dataclasses from plain data of files, and checks of their types."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping

Instance = typing.TypeVar("Instance")
Reader = Callable[[typing.Any], typing.Any]


def from_fields(kind: type[Instance], plain: Mapping[str, typing.Any]) -> Instance:
    """The inverse of `dataclasses.asdict` and `json_form`, also after a round trip through JSON.

    Types are not checked: see `has_type`.

    Raises
    ------
    TypeError
        If fields without a default are missing, or others are there.
    """
    readers, required, field_names = _field_readers(typing.cast(typing.Hashable, kind))
    if not (isinstance(plain, Mapping) and required <= plain.keys() <= field_names):
        raise TypeError(f"not the fields of {kind.__name__}")
    return kind(**{**plain, **{name: read(plain[name]) for name, read in readers.items() if name in plain}})


def read_fields(kind: type[Instance], plain: Mapping[str, typing.Any], *, signed: bool = False) -> Instance:
    """Like `from_fields`, but checks all types, for untrusted data.

    Parameters
    ----------
    signed : bool
        Whether numbers may be below zero.

    Raises
    ------
    TypeError
        If fields are missing, unknown or of other types.
    ValueError
        If a number is not finite, or is below zero and may not be.
    """
    value = from_fields(kind, plain)
    if not has_type(value, kind):
        raise TypeError(f"not of the types of {kind.__name__}")
    for number in _numbers(value):
        if not math.isfinite(number) or (number < 0 and not signed):
            raise ValueError(f"{number} is no number of {kind.__name__}")
    return value


def _numbers(value: object) -> typing.Iterator[float]:
    """All numbers in a tree of dataclasses, tuples and mappings."""
    if isinstance(value, int | float):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _numbers(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _numbers(part)
    elif isinstance(value, tuple):
        for part in value:
            yield from _numbers(part)


@functools.cache
def _field_readers(kind: typing.Any) -> tuple[dict[str, Reader], set[str], set[str]]:
    """Converters of the fields whose JSON form differs; required fields; all fields."""
    fields, unset = dataclasses.fields(kind), dataclasses.MISSING
    readers = {name: _value_reader(hint) for name, hint in _hints(kind).items()}
    required = {field.name for field in fields if field.default is unset and field.default_factory is unset}
    return {name: read for name, read in readers.items() if read is not _identity}, required, set(readers)


@functools.cache
def _hints(kind: typing.Any) -> dict[str, typing.Any]:
    """By field of a dataclass, its annotation."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _value_reader(kind: typing.Any) -> Reader:
    """The converter to an annotation: lists to tuples, values to enumerations, mappings to dataclasses."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        conversions = [read for read in map(_value_reader, args) if read is not _identity]
        return (lambda plain: None if plain is None else conversions[0](plain)) if conversions else _identity
    if origin is tuple:
        reads, is_homogeneous = tuple(map(_value_reader, args)), args[1:] == (Ellipsis,)

        def read_elements(plain: object) -> object:
            """Convert the elements of a list to a tuple."""
            if not isinstance(plain, list | tuple):
                return plain
            element_reads = reads[:1] * len(plain) if is_homogeneous else reads
            return tuple(read(value) for read, value in zip(element_reads, plain, strict=True))

        return read_elements
    if hasattr(kind, "to_table"):  # defines its own form in files, as for `json_form`
        read_table: Reader = kind.from_table
        return read_table
    if dataclasses.is_dataclass(kind):
        return functools.partial(from_fields, typing.cast(type, kind))
    return kind if isinstance(kind, type) and issubclass(kind, enum.Enum) else _identity


def _identity(plain: object) -> object:
    return plain


def has_type(value: object, kind: object) -> bool:
    """Whether `value` has the type of an annotation: a class, dataclass, tuple, dict, union or literal.

    Dataclasses are checked field by field. A bool is no int here; an int is a float if it is in a float's
    range.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(has_type(value, member) for member in args)
    if origin is typing.Literal:
        return value in args
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = args[:1] * len(value) if args[1:] == (Ellipsis,) else args
        return len(kinds) == len(value) and all(map(has_type, value, kinds))
    if origin is dict:
        key, entry = args
        if not isinstance(value, dict):
            return False
        return all(has_type(k, key) and has_type(v, entry) for k, v in value.items())
    if not isinstance(kind, type):
        raise TypeError(f"no rule for {kind}")
    if kind is float and isinstance(value, int) and abs(value) > sys.float_info.max:
        return False
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not isinstance(value, kind):
        return False
    if not dataclasses.is_dataclass(kind):
        return True
    return all(has_type(getattr(value, name), hint) for name, hint in _hints(kind).items())
