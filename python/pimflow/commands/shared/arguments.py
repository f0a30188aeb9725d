"""Check the arguments of public functions: unknown names and wrong types raise an error of one line.

Without this check Python raises errors of its own, some of them only after minutes of work.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, ParamSpec, TypeVar

from pimflow.core import keywords
from pimflow.core.options import Check, options_text, type_check, type_error
from pimflow.host.pass_context import all_passes

P = ParamSpec("P")
R = TypeVar("R")


# A network is an object of one of several libraries: only types that cannot be a network are rejected here.
_NON_MODEL_TYPES = (bool, int, float, bytes, Mapping, Sequence, set, type(None))
_PATH, _NONE = (str, os.PathLike), type(None)


def _value_check(expected: str, allows: Callable[[Any], bool]) -> Check:
    def check(name: str, value: Any) -> Any:
        """Return the value, or raise `UsageError`."""
        if not allows(value):
            raise type_error(name, value, expected)
        return value

    return check


_FLAG = type_check("True or False", bool)
_CALLBACK = _value_check("a function that is called with the progress", callable)
_OLD_NAMES = {"target_system": "system"}
# By name of the argument: a name has the same meaning in every public function.
ARGUMENT_CHECKS = {
    "model": _value_check(
        "a name of the zoo, a file, an ONNX model, a Relax module or a program of torch.export",
        lambda value: isinstance(value, _PATH) or not isinstance(value, _NON_MODEL_TYPES),
    ),
    "models": _value_check(
        "a list of networks, such as ['mobilenet-v2']",
        lambda value: isinstance(value, Sequence) and not isinstance(value, str | bytes),
    ),
    "directory": type_check("a compiled directory", *_PATH),
    "path": type_check("a file", *_PATH),
    "layer": type_check("a layer such as 'fc:4096,4096', or a compiled directory", *_PATH),
    "args": type_check(
        "a directory to write, or the arguments of a module of PyTorch, such as (x,)",
        *(*_PATH, tuple, list, _NONE),
    ),
    "kwargs": type_check("the keywords of a module of PyTorch, or None", Mapping, _NONE),
    "out": type_check("a directory or file to write, or None", *_PATH, _NONE),
    "format": type_check("the name of a format", str),
    "pim_channels": _value_check(
        "'auto', or None: the system says how many", lambda value: value in (None, "auto")
    ),
    "copy_ahead": _value_check(
        "'auto', or None: the system says how many kernels", lambda value: value in (None, "auto")
    ),
    "target": type_check("the name of a target, such as 'llvm+pim'", str, _NONE),
    "conventions": _value_check(
        "'all', 'none' or names such as 'pim-launch=0'",
        lambda value: isinstance(value, Sequence) and all(isinstance(name, str) for name in value),
    ),
    "timing": type_check("a name or None", str, _NONE),
    "gwrite_hiding": _FLAG,
    "progress": _CALLBACK,
    "advance": _CALLBACK,
}


def public(*declared: type, without: Collection[str] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that checks the arguments of a public function, and gives it its signature.

    Parameters
    ----------
    declared : type
        Dataclasses whose fields are the keywords of its ``**`` parameter. The docstring ends with the options
        of the first.

    Raises
    ------
    UnknownNameError
        By the decorated function, for a keyword that it does not take.
    UsageError
        By the decorated function, for a missing argument, one too many, or one of a wrong type; see
        `ARGUMENT_CHECKS`.
    """
    declared_fields = [field for cls in declared for field in fields(cls) if field.name not in without]

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        """Wrap `function` with the check."""
        own_signature = inspect.signature(function)
        signature = _signature(own_signature, declared_fields)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            """Check the arguments, then call the function so that it can use all of TVM's passes."""
            _rename_old(kwargs, signature)
            arguments = keywords.bind_arguments(
                function.__name__, own_signature, signature.parameters, args, kwargs
            )
            for name, value in {**arguments.arguments, **kwargs}.items():
                if name in ARGUMENT_CHECKS:
                    ARGUMENT_CHECKS[name](f"{function.__name__}: {name}", value)
            with all_passes():
                return function(*args, **kwargs)

        doc = inspect.cleandoc(function.__doc__ or "")
        options = options_text(declared[0], doc) if declared else ""
        call.__doc__ = f"{doc}\n\n{options}" if options else doc
        setattr(call, "__signature__", signature)  # noqa: B010  (mypy knows no such attribute)
        return call

    return decorate


def _rename_old(kwargs: dict[str, Any], signature: inspect.Signature) -> None:
    """Give arguments with names of the version before their names, and warn of these."""
    for old, new in _OLD_NAMES.items():
        if old in kwargs and new in signature.parameters and new not in kwargs:
            warnings.warn(f"{old}= is now {new}=; the next version no longer takes it", DeprecationWarning, 3)
            kwargs[new] = kwargs.pop(old)


def _signature(signature: inspect.Signature, declared: Sequence[Field[Any]]) -> inspect.Signature:
    """A signature with declared fields as keywords in place of its ``**`` parameter."""
    parameters = [item for item in signature.parameters.values() if item.kind is not item.VAR_KEYWORD]
    parameters += [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=_annotation(field),
        )
        for field in declared
        if field.name not in signature.parameters
    ]
    return signature.replace(parameters=parameters)


def _annotation(field: Field[Any]) -> Any:
    """The type of a keyword; None stands for a default that the check of the field makes."""
    may_be_none = field.default is not None or "None" in str(field.type)
    return field.type if may_be_none else f"{field.type} | None"
