"""Keywords that a function or a class does not take are refused in one line, with those that it does take.

Python says these things in its own words, and does not say which names come near.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pimflow.errors import UnknownNameError, UsageError

T = TypeVar("T")


def bound(
    name: str,
    signature: inspect.Signature,
    known: Collection[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> inspect.BoundArguments:
    """Which argument has which value in a call of `name`.

    Parameters
    ----------
    known : collection of str
        Keywords that it takes.

    Raises
    ------
    UnknownNameError
        For a keyword that it does not take.
    UsageError
        For a missing argument, and one too many.
    """
    for keyword in kwargs:
        if keyword not in known:
            raise UnknownNameError("keyword", keyword, known)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        own = [each.name for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        raise UsageError(f"{name}: {error}; it takes {', '.join(own)}") from None


def keywords_checked(cls: type[T]) -> type[T]:
    """A decorator of a dataclass that users make: its calls raise as `bound` says."""
    signature, made = inspect.signature(cls), cls.__init__

    @functools.wraps(made)
    def __init__(self: T, *args: Any, **kwargs: Any) -> None:
        bound(cls.__name__, signature, signature.parameters, args, kwargs)
        made(self, *args, **kwargs)

    setattr(cls, "__init__", __init__)  # noqa: B010  (mypy lets nobody assign it)
    return cls
