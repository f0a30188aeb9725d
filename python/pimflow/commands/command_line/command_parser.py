"""The parser of a command: its options in groups that are the same in the help of every command."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from pimflow.core import options
from pimflow.errors import UsageError

# Groups of options in the help of every command, in this order; `COMMON_OPTIONS` stands before them.
COMMON_OPTIONS = "most used options"
GROUPS = ("network", "system", "search", "memory", "decomposition", "primitives", "output")


class OneLineParser(argparse.ArgumentParser):
    """A parser that raises `UsageError` for arguments that it cannot parse."""

    commands: dict[str, CommandParser]

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError`; `argparse` calls it."""
        raise UsageError(f"{message.removeprefix('argument ')}; see '{self.prog} --help'")


class CommandParser(OneLineParser):
    """Parser of one command: every option is in one of `GROUPS`, or in `COMMON_OPTIONS`."""

    def __init__(self, **details: Any) -> None:
        super().__init__(**details, add_help=False)
        self.set_defaults(parser=self)
        self.flags: list[str] = []
        self.actions: list[argparse.Action] = []
        self.repeated: set[str] = set()  # attributes of options that may be repeated
        self.help_entries: dict[str, list[tuple[str, str]]] = {"arguments": []}  # see `help_groups`
        self.common_flags: tuple[str, ...] = ()
        self._declared: list[tuple[type, str]] = []
        self._flag_by_name: dict[str, str] = {}
        self._required = [self.prog]
        self.usage = f"{self.prog} [OPTION …]"
        self._sections = {title: self.add_argument_group(title) for title in (COMMON_OPTIONS, *GROUPS)}

    def show_first(self, *flags: str) -> None:
        """Show these options first in the help; call this before they are added."""
        self.common_flags = flags

    def positional(self, name: str, metavar: str, help: str, nargs: str | None = None) -> None:
        """Add a positional argument."""
        self.add_argument(name, metavar=metavar, help=help, nargs=nargs)
        self.help_entries["arguments"].append((metavar, help))
        self._require({"?": f"[{metavar}]", "+": f"{metavar} [{metavar} …]"}.get(nargs or "", metavar))

    def option(self, group: str, *flags: str, **details: Any) -> None:
        """Add an option to one of `GROUPS`; `details` are those of `argparse`."""
        title = group if {*flags}.isdisjoint(self.common_flags) else COMMON_OPTIONS
        action = self._sections[title].add_argument(*flags, **details)
        flags_text = ", ".join(flags) + (f" {action.metavar}" if action.metavar else "")
        self.help_entries.setdefault(title, []).append(
            (flags_text, (action.help or "") % {"default": action.default})
        )
        self.flags += flags
        self.actions.append(action)
        if details.get("action") == "append":
            self.repeated.add(action.dest)
        self._flag_by_name[action.dest] = flags[-1]
        if details.get("required"):
            self._require(f"{flags[0]} {details['metavar']}")

    def add_fields(self, cls: type, *names: str, **details: Any) -> None:
        """Add options that a dataclass declares.

        Parameters
        ----------
        names : str
            Fields of `cls`; by default all that the command line has.
        details
            What `argparse` is told in place of the declaration.
        """
        declarations = options.declarations(cls)
        for name in names or [name for name, declaration in declarations.items() if declaration.syntax]:
            declared = _argparse_details(declarations[name], getattr(cls, name, argparse.SUPPRESS))
            self.option(declarations[name].group, declarations[name].flag, dest=name, **declared | details)
            self._declared.append((cls, name))

    def keywords(self, args: argparse.Namespace, *classes: type) -> dict[str, Any]:
        """The values of the options that dataclasses declare and the command has, as keywords of Python."""
        return {
            name: _mapping(declaration.flag, getattr(args, name))
            if declaration.is_mapping
            else getattr(args, name)
            for cls in classes
            for name, declaration in options.declarations(cls).items()
            if hasattr(args, name) and any(name == n and issubclass(cls, c) for c, n in self._declared)
        }

    def make_optional(self) -> None:
        """Require no argument any more."""
        for action in self._actions:
            action.required = False
            if not action.option_strings:
                action.nargs = "*" if action.nargs == "+" else "?"

    def given_attributes(self, parse: Callable[[], argparse.Namespace]) -> set[str]:
        """Attributes that a command line sets; `parse` parses it, here without defaults."""
        settings = [(action, action.default, action.required) for action in self._actions]
        for action in self._actions:
            action.default, action.required = argparse.SUPPRESS, False
        try:
            return set(vars(parse()))
        finally:
            for action, default, is_required in settings:
                action.default, action.required = default, is_required

    def help_groups(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Groups in the order of the help: their titles, and the syntax and help of their options."""
        titles = ("arguments", COMMON_OPTIONS, *GROUPS)
        return [(title, self.help_entries[title]) for title in titles if self.help_entries.get(title)]

    def flag(self, name: str) -> str:
        """The flag of an option whose value is attribute `name` of the arguments."""
        return self._flag_by_name[name]

    def _require(self, text: str) -> None:
        self._required.append(text)
        self.usage = " ".join((*self._required, "[OPTION …]"))


def _mapping(flag: str, items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The items of a repeated option; raises `UsageError` for a name that is given twice."""
    mapping: dict[str, Any] = {}
    for name, value in items:
        if name in mapping:
            raise UsageError(f"{flag} {name}=…: '{name}' is given twice; give it once")
        mapping[name] = value
    return mapping


def _argparse_details(declaration: options.Option, default: Any) -> dict[str, Any]:
    """A declaration in the words of `argparse`."""
    details = {"default": default, "help": declaration.help}
    if not declaration.metavar:
        return details | {"action": "store_false" if default is True else "store_true"}
    parse, details["metavar"] = declaration.parse, declaration.metavar
    if parse is not None:
        details["type"] = parse if isinstance(parse, type) else lambda text: parse(text, declaration.flag)
    return details | ({"action": "append", "default": []} if declaration.is_mapping else {})


def refuse(args: argparse.Namespace, names: Iterable[str], reason: str) -> None:
    """Raise `UsageError` if one of some options is set, since it would have no effect.

    Parameters
    ----------
    names : iterable of str
        Attributes of `args`.
    reason : str
        The reason, which the message gives after the option.
    """
    for name in names:
        if hasattr(args, name) and getattr(args, name) != args.parser.get_default(name):
            raise UsageError(f"{args.parser.flag(name)}: {reason}")
