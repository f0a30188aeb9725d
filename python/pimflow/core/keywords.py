"""Errors of one line for wrong keywords of functions and classes; they name similar keywords.

Python's own messages do not.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pimflow.errors import UnknownNameError, UsageError

T = TypeVar("T")


def bind_arguments(
    name: str,
    signature: inspect.Signature,
    keywords: Collection[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> inspect.BoundArguments:
    """Bind the arguments of a call of `name` to its parameters.

    Raises
    ------
    UnknownNameError
        For a keyword that it does not accept.
    UsageError
        For a missing argument, or one too many.
    """
    for keyword in kwargs:
        if keyword not in keywords:
            raise UnknownNameError("keyword", keyword, keywords)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        parameter_names = [
            parameter.name
            for parameter in signature.parameters.values()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        raise UsageError(f"{name}: {error}; it takes {', '.join(parameter_names)}") from None


def check_keywords(cls: type[T]) -> type[T]:
    """Decorate a dataclass of the public API: its constructor raises the errors of `bind_arguments`."""
    signature, original_init = inspect.signature(cls), cls.__init__

    @functools.wraps(original_init)
    def __init__(self: T, *args: Any, **kwargs: Any) -> None:
        bind_arguments(cls.__name__, signature, signature.parameters, args, kwargs)
        original_init(self, *args, **kwargs)

    setattr(cls, "__init__", __init__)  # noqa: B010  (mypy lets nobody assign it)
    return cls
