"""Whether values that were read from files are of the types that dataclasses say."""

from __future__ import annotations

import dataclasses
import sys
import types
import typing


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
    hints = typing.get_type_hints(kind)
    return all(of_type(getattr(value, each.name), hints[each.name]) for each in dataclasses.fields(kind))
