"""The parser of a command: its options in groups that are the same in the help of every command."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, NoReturn

from pimflow.errors import UsageError

# Groups of options in the help of every command, in this order; `COMMON_OPTIONS` stands before them.
COMMON_OPTIONS = "most used options"
GROUPS = ("network", "system", "search", "memory", "decomposition", "primitives", "output")


class OneLineParser(argparse.ArgumentParser):
    """A parser that raises `UsageError` for arguments that it cannot parse."""

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError`; `argparse` calls it."""
        raise UsageError(f"{message.removeprefix('argument ')}; see '{self.prog} --help'")


class CommandParser(OneLineParser):
    """Parser of one command: every option is in one of `GROUPS`, or in `COMMON_OPTIONS`."""

    def __init__(self, **details: Any) -> None:
        super().__init__(**details, add_help=False)
        self.flags: list[str] = []
        self.help_entries: dict[str, list[tuple[str, str]]] = {"arguments": []}  # see `help_groups`
        self.common_flags: tuple[str, ...] = ()
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
        if details.get("required"):
            self._require(f"{flags[0]} {details['metavar']}")

    def choice(
        self,
        group: str,
        flag: str,
        metavar: str,
        purpose: str,
        values: Iterable[str],
        default: str | None = None,
    ) -> None:
        """Add an option whose values are `values`; without a default the help names none."""
        default_text = " (default: %(default)s)" if default else ""
        self.option(
            group,
            flag,
            metavar=metavar,
            default=default,
            help=f"{purpose}: {', '.join(values)}{default_text}",
        )

    def help_groups(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Groups in the order of the help: their titles, and the syntax and help of their options."""
        titles = ("arguments", COMMON_OPTIONS, *GROUPS)
        return [(title, self.help_entries[title]) for title in titles if self.help_entries.get(title)]

    def _require(self, text: str) -> None:
        self._required.append(text)
        self.usage = " ".join((*self._required, "[OPTION …]"))


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
        if getattr(args, name) != args.parser.get_default(name):
            raise UsageError(f"--{name.replace('_', '-')}: {reason}")
