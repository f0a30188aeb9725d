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


class ArgumentType(NamedTuple):
    """A test of an argument's value, and the text that says which values pass."""

    allows: Callable[[Any], bool]
    description: str


def _argument_type(description: str, *types: type) -> ArgumentType:
    def allows(value: object) -> bool:
        return isinstance(value, types) and (bool in types or not isinstance(value, bool))

    return ArgumentType(allows, description)


# A network is an object of one of several libraries: only types that cannot be a network are rejected here.
_NON_MODEL_TYPES = (bool, int, float, bytes, Mapping, Sequence, set, type(None))
_PATH, _NONE = (str, os.PathLike), type(None)
_TEXT = _argument_type("a name or None", str, _NONE)
_FLAG = _argument_type("True or False", bool)
_CALLBACK = ArgumentType(callable, "a function that is called with the progress")
# By name of the argument: a name has the same meaning in every public function.
ARGUMENT_TYPES = {
    "model": ArgumentType(
        lambda value: isinstance(value, _PATH) or not isinstance(value, _NON_MODEL_TYPES),
        "a name of the zoo, a file, an ONNX model, a Relax module or a program of torch.export",
    ),
    "models": ArgumentType(
        lambda value: isinstance(value, Sequence) and not isinstance(value, str | bytes),
        "a list of networks, such as ['mobilenet-v2']",
    ),
    "directory": _argument_type("a compiled directory", *_PATH),
    "path": _argument_type("a file", *_PATH),
    "layer": _argument_type("a layer such as 'fc:4096,4096', or a compiled directory", *_PATH),
    "out": _argument_type("a directory or file to write, or None", *_PATH, _NONE),
    "dump_ir": _argument_type("a directory to write, or None", *_PATH, _NONE),
    "inputs": ArgumentType(
        lambda value: value is None or isinstance(value, Mapping) or hasattr(value, "__array__"),
        "a mapping of names to arrays, or None",
    ),
    "format": _argument_type("the name of a format", str),
    "pim_channels": ArgumentType(
        lambda value: value in (None, "auto"), "'auto', or None: the system says how many"
    ),
    "target": _argument_type("the name of a target, such as 'llvm+pim'", str, _NONE),
    "conventions": ArgumentType(
        lambda value: isinstance(value, Sequence) and all(isinstance(name, str) for name in value),
        "'all', 'none' or names such as 'pim-launch=0'",
    ),
    "timing": _TEXT,
    "emit_traces": _FLAG,
    "compare": _FLAG,
    "in_place": _FLAG,
    "gwrite_hiding": _FLAG,
    "progress": _CALLBACK,
    "advance": _CALLBACK,
}


def public(*extra_keywords: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that checks the arguments of a public function.

    `extra_keywords` are `TypedDict` classes that declare the keywords of its ``**`` parameter.

    Raises
    ------
    UnknownNameError
        By the decorated function, for a keyword that it does not take.
    UsageError
        By the decorated function, for a missing argument, one too many, or one of a wrong type; see
        `ARGUMENT_TYPES`.
    """
    extra_names: set[str] = set()
    for typed_dict in extra_keywords:
        extra_names |= getattr(typed_dict, "__required_keys__") | getattr(typed_dict, "__optional_keys__")  # noqa: B009

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        """Wrap `function` with the check."""
        signature = inspect.signature(function)
        own_names = [
            name
            for name, parameter in signature.parameters.items()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            """Check the arguments, then call the function."""
            arguments = keywords.bind_arguments(
                function.__name__, signature, {*own_names, *extra_names}, args, kwargs
            )
            for name, value in {**arguments.arguments, **kwargs}.items():
                if name in ARGUMENT_TYPES and not ARGUMENT_TYPES[name].allows(value):
                    fault = (
                        f"{name} is {ARGUMENT_TYPES[name].description}, not {value!r} "
                        f"({type(value).__name__})"
                    )
                    raise UsageError(f"{function.__name__}: {fault}")
            return function(*args, **kwargs)

        return call

    return decorate
