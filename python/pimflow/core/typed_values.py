"""Values of dataclasses from plain data that was read from files, and whether they are of the types there."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping

Made = typing.TypeVar("Made")
Reader = Callable[[typing.Any], typing.Any]


def from_fields(kind: type[Made], plain: Mapping[str, typing.Any]) -> Made:
    """The dataclass that `dataclasses.asdict` or `json_form` made `plain` of, before or after JSON.

    Types are not checked: see `of_type`.

    Raises
    ------
    TypeError
        If fields without a default are missing, or others are there.
    """
    readers, least, known = _form(typing.cast(typing.Hashable, kind))
    if not (isinstance(plain, Mapping) and least <= plain.keys() <= known):
        raise TypeError(f"not the fields of {kind.__name__}")
    return kind(**{**plain, **{name: read(plain[name]) for name, read in readers.items() if name in plain}})


def read_fields(kind: type[Made], plain: Mapping[str, typing.Any], *, signed: bool = False) -> Made:
    """As `from_fields`, of plain data that may be anything.

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
    if not of_type(value, kind):
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
def _form(kind: typing.Any) -> tuple[dict[str, Reader], set[str], set[str]]:
    """What makes the fields of a dataclass that JSON has otherwise; the fields that it needs, and all."""
    fields, unset = dataclasses.fields(kind), dataclasses.MISSING
    readers = {name: _reader(hint) for name, hint in _hints(kind).items()}
    least = {each.name for each in fields if each.default is unset and each.default_factory is unset}
    return {name: read for name, read in readers.items() if read is not _same}, least, set(readers)


@functools.cache
def _hints(kind: typing.Any) -> dict[str, typing.Any]:
    """By field of a dataclass, its annotation."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _reader(kind: typing.Any) -> Reader:
    """What makes values of an annotation: tuples of lists, enumerations of values, dataclasses of fields."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        found = [read for read in map(_reader, args) if read is not _same]
        return (lambda plain: None if plain is None else found[0](plain)) if found else _same
    if origin is tuple:
        reads, alike = tuple(map(_reader, args)), args[1:] == (Ellipsis,)

        def elements(plain: object) -> object:
            if not isinstance(plain, list | tuple):
                return plain
            each = reads[:1] * len(plain) if alike else reads
            return tuple(read(value) for read, value in zip(each, plain, strict=True))

        return elements
    if dataclasses.is_dataclass(kind):
        return functools.partial(from_fields, typing.cast(type, kind))
    return kind if isinstance(kind, type) and issubclass(kind, enum.Enum) else _same


def _same(plain: object) -> object:
    return plain


def of_type(value: object, kind: object) -> bool:
    """Whether `value` is of an annotation: a class, a dataclass field by field, or a tuple, dict or union.

    A bool is no int here, and an int is a float if one is so large.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(of_type(value, each) for each in args)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = args[:1] * len(value) if args[1:] == (Ellipsis,) else args
        return len(kinds) == len(value) and all(map(of_type, value, kinds))
    if origin is dict:
        key, entry = args
        if not isinstance(value, dict):
            return False
        return all(of_type(k, key) and of_type(v, entry) for k, v in value.items())
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
    return all(of_type(getattr(value, name), hint) for name, hint in _hints(kind).items())
