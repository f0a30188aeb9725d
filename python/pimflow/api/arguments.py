"""Check the arguments of public functions: unknown names and wrong types raise an error of one line.

Without this check Python raises errors of its own, some of them only after minutes of work.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

from pimflow.core import keywords
from pimflow.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")


class Kind(NamedTuple):
    """A test of an argument's value, and the text that says which values pass."""

    allows: Callable[[Any], bool]
    told: str


def _kind(told: str, *kinds: type) -> Kind:
    def allows(value: object) -> bool:
        return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))

    return Kind(allows, told)


# A network is an object of one of several libraries: only types that cannot be a network are rejected here.
_NO_MODEL = (bool, int, float, bytes, Mapping, Sequence, set, type(None))
_PATH, _NONE = (str, os.PathLike), type(None)
_TEXT = _kind("a name or None", str, _NONE)
_FLAG = _kind("True or False", bool)
_CALLED = Kind(callable, "a function that is called with the progress")
# By name of the argument: a name has the same meaning in every public function.
KINDS = {
    "model": Kind(
        lambda value: isinstance(value, _PATH) or not isinstance(value, _NO_MODEL),
        "a name of the zoo, a file, an ONNX model, a Relax module or a program of torch.export",
    ),
    "models": Kind(
        lambda value: isinstance(value, Sequence) and not isinstance(value, str | bytes),
        "a list of networks, such as ['mobilenet-v2']",
    ),
    "directory": _kind("a compiled directory", *_PATH),
    "path": _kind("a file", *_PATH),
    "layer": _kind("a layer such as 'fc:4096,4096', or a compiled directory", *_PATH),
    "out": _kind("a directory or file to write, or None", *_PATH, _NONE),
    "inputs": Kind(
        lambda value: value is None or isinstance(value, Mapping) or hasattr(value, "__array__"),
        "a mapping of names to arrays, or None",
    ),
    "format": _kind("the name of a format", str),
    "pim_channels": Kind(lambda value: value in (None, "auto"), "'auto', or None: the system says how many"),
    "target": _kind("the name of a target, such as 'llvm+pim'", str, _NONE),
    "conventions": Kind(
        lambda value: isinstance(value, Sequence) and all(isinstance(name, str) for name in value),
        "'all', 'none' or names such as 'pim-launch=0'",
    ),
    "timing": _TEXT,
    "emit_traces": _FLAG,
    "compare": _FLAG,
    "in_place": _FLAG,
    "gwrite_hiding": _FLAG,
    "progress": _CALLED,
    "advance": _CALLED,
}


def public(*further_keywords: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that checks the arguments of a public function.

    `further_keywords` are `TypedDict` classes that declare the keywords of its ``**`` parameter.

    Raises
    ------
    UnknownNameError
        By the decorated function, for a keyword that it does not take.
    UsageError
        By the decorated function, for a missing argument, one too many, or one of a wrong type; see `KINDS`.
    """
    further: set[str] = set()
    for each in further_keywords:
        further |= getattr(each, "__required_keys__") | getattr(each, "__optional_keys__")  # noqa: B009

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        """Wrap `function` with the check."""
        signature = inspect.signature(function)
        own = [name for name, each in signature.parameters.items() if each.kind is not each.VAR_KEYWORD]

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            """Check the arguments, then call the function."""
            given = keywords.bound(function.__name__, signature, {*own, *further}, args, kwargs)
            for name, value in {**given.arguments, **kwargs}.items():
                if name in KINDS and not KINDS[name].allows(value):
                    told = f"{name} is {KINDS[name].told}, not {value!r} ({type(value).__name__})"
                    raise UsageError(f"{function.__name__}: {told}")
            return function(*args, **kwargs)

        return called

    return decorated
