"""Options, each declared once: a field of a dataclass says what an option means and which values it takes.

From these declarations are made the options of the command line (`commands.command_line.command_parser`), the
keywords and signatures of Python functions (`commands.shared.arguments`), the options of TVM's
``PassContext`` (`tvm_extension.relay.pass_options`) and the pages of docs/reference.
"""

from __future__ import annotations

import functools
import math
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar

from pimflow.errors import UnknownNameError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Self

# Called with the name of an option and a value: returns the value that is kept, or raises `UsageError`.
Check = Callable[[str, Any], Any]
_KEY = "option"  # of the metadata of a field
# Names of an entry of a docstring.
_DOCUMENTED = re.compile(r"^(\w+(?:, \w+)*)(?: : .*)?\n    ", re.MULTILINE)
_INDENT = " " * 4
MAX_VALUE_CHARACTERS = 80  # of a wrong value, in a message


@dataclass(frozen=True, kw_only=True)
class Option:
    """The declaration of an option.

    Attributes
    ----------
    syntax : str
        Flag on the command line and its value, such as ``--batch N``; empty if only Python has the option.
    help : str
        ``%(default)s`` stands for the default, ``{choices}`` for `choices`.
    group : str
        Group in the help (`commands.command_line.command_parser.GROUPS`); by default that of the `OptionSet`.
    choices : tuple of str
        The allowed values, if they are names.
    parse : type or callable, optional
        Converts text of the command line: a type, by default that of the field if it is a number, or a
        function of text and flag that raises `UsageError`.
    check : callable, optional
        Check of a value from anywhere; by default that it has the type of the field, if that is a simple
        one, or that it is one of `choices`.
    is_mapping : bool
        Whether the option is a mapping: the command line repeats it for each item, which `parse` gives.
    is_convention : bool
        Whether a field of a system is a convention of its cost model, not part of the design.
    """

    syntax: str = ""
    help: str = ""
    group: str = ""
    choices: tuple[str, ...] = ()
    parse: Callable[..., Any] | None = None
    check: Check | None = None
    is_flag: bool = False
    is_mapping: bool = False
    is_convention: bool = False

    @property
    def flag(self) -> str:
        """The flag on the command line."""
        return self.syntax.partition(" ")[0]

    @property
    def metavar(self) -> str:
        """The value in the help; empty for an option that is on or off."""
        return self.syntax.partition(" ")[2]


def option(
    default: Any = MISSING,
    syntax: str = "",
    help: str = "",
    *,
    default_factory: Any = MISSING,
    repr: bool = True,
    **declaration: Any,
) -> Any:
    """A field of a dataclass with its declaration; see `Option`."""
    metadata = {_KEY: Option(syntax=syntax, help=help, **declaration)}
    return field(default=default, default_factory=default_factory, repr=repr, metadata=metadata)


@functools.cache
def declarations(cls: type) -> dict[str, Option]:
    """The declarations of a dataclass by field, with what follows from type and choices."""
    return {item.name: _complete(item, cls) for item in fields(cls) if _KEY in item.metadata}


def _complete(item: Field[Any], cls: type) -> Option:
    declared: Option = item.metadata[_KEY]
    kind, _, rest = getattr(item.type, "__name__", str(item.type)).partition(" | ")
    types, expected, parse = _SIMPLE_TYPES.get(kind if rest in ("", "None") else "", ((), "", None))
    check = type_check(f"{expected} or None", *types, type(None)) if rest else type_check(expected, *types)
    if declared.choices:
        check = _name_check(declared.choices)
    return replace(
        declared,
        help=declared.help.replace("{choices}", ", ".join(declared.choices)),
        group=declared.group or getattr(cls, "_group", ""),
        parse=declared.parse or parse,
        check=declared.check or (check if types or declared.choices else None),
        is_flag=kind == "bool",
    )


def options_text(cls: type, doc: str = "") -> str:
    """The options of a dataclass as a section of a docstring in NumPy's form, but those in `doc`."""
    known = {name for names in _DOCUMENTED.findall(doc) for name in names.split(", ")}
    lines = ["Options", "-------"]
    for item in fields(cls):
        declaration = declarations(cls).get(item.name)
        if declaration is not None and declaration.help and item.name not in known:
            text = re.sub(r"%\(default\)\w", str(item.default), declaration.help)
            lines += [item.name, textwrap.fill(text, 104, initial_indent=_INDENT, subsequent_indent=_INDENT)]
    return "\n".join(lines) if len(lines) > 2 else ""


def field_names(cls: type) -> tuple[str, ...]:
    """The names of a dataclass's fields."""
    return tuple(item.name for item in fields(cls))


@dataclass(frozen=True, kw_only=True)
class OptionSet:
    """Base of dataclasses of options, which are checked as declared; ``group`` is that of their options."""

    _group: ClassVar[str] = ""

    def __init_subclass__(cls, group: str = "") -> None:
        cls._group = group or cls._group

    @classmethod
    def pop_from(cls, keywords: dict[str, Any]) -> Self:
        """From keywords, without its own of which these are left."""
        return cls(**{name: keywords.pop(name) for name in field_names(cls) if name in keywords})

    def __post_init__(self) -> None:
        cls: type = type(self)
        for name, declaration in declarations(cls).items():
            if declaration.check is not None:
                object.__setattr__(self, name, declaration.check(name, getattr(self, name)))


def split_keywords(keywords: Mapping[str, Any], *classes: type) -> list[dict[str, Any]]:
    """For each dataclass, the keywords that are its fields; raises `UnknownNameError` for any other."""
    names = [field_names(cls) for cls in classes]
    allowed = [name for class_names in names for name in class_names]
    for name in keywords:
        if name not in allowed:
            raise UnknownNameError("keyword", name, allowed)
    return [{name: keywords[name] for name in class_names if name in keywords} for class_names in names]


def type_error(name: str, value: object, expected: str) -> UsageError:
    """The error that a value is not what is expected; one line, however long its text is."""
    text = " ".join(repr(value).split())
    text = text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}…"
    return UsageError(f"{name} is {expected}, not {text} ({type(value).__name__})")


def require_type(name: str, value: object, kinds: tuple[type, ...], expected: str) -> None:
    """Raise `UsageError` unless `value` is of one of `kinds`; a bool does not count as a number."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise type_error(name, value, expected)


def type_check(expected: str, *kinds: type) -> Check:
    """The check that a value is of one of `kinds`; `expected` says which these are."""

    def check(name: str, value: Any) -> Any:
        """Return the value, or raise `UsageError`."""
        require_type(name, value, kinds, expected)
        return value

    return check


def mapping_check(expected: str, check_item: Check) -> Check:
    """The check that a value is a mapping with texts as keys, or None, which stands for an empty one too.

    `check_item` is called with the name and the value of an item, and returns the value that is kept.
    """

    def check(name: str, mapping: Any) -> Any:
        """Return the mapping, or raise `UsageError`."""
        require_type(name, mapping, (Mapping, type(None)), expected)
        for key in mapping or ():
            require_type(name, key, (str,), expected)
        return {key: check_item(key, value) for key, value in (mapping or {}).items()} or None

    return check


def _name_check(names: tuple[str, ...]) -> Check:
    def check(name: str, value: Any) -> Any:
        """Return the value, or raise `UsageError`."""
        require_type(name, value, (str,), "a name")
        if value not in names:
            raise UnknownNameError(name.rpartition(".")[2], value, names)
        return value

    return check


def check_above_zero(name: str, value: Any) -> Any:
    """Check that a value is a number above zero, or None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < math.inf):
        raise UsageError(f"{name} {value!r} is no number above zero")
    return value


# By simple type of a field: the types of its values, what they are called, and what makes them of text.
_SIMPLE_TYPES: dict[str, tuple[tuple[type, ...], str, type | None]] = {
    "bool": ((bool,), "True or False", None),
    "int": ((Integral,), "a whole number", int),
    "float": ((Real,), "a number", float),
    "str": ((str,), "a text", None),
}
