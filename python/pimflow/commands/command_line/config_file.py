"""The file ``pimflow.toml``: values of options for all commands, and for some.

It lies in the working directory or above. Keys are options without ``--``. Those at the top are for every
command that has the option; those in a table with the name of a command are for this one:

    dtype = "fp32"
    [compile]
    objective = "energy"
    shape = {input = [1, 3, 224, 224]}
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pimflow.commands.command_line.command_parser import CommandParser
from pimflow.core.json_form import Json
from pimflow.core.table_files import read_toml
from pimflow.errors import UnknownNameError, UsageError

NAME = "pimflow.toml"
_COMMAND_LINE, _DEFAULT = "command line", "default"
SHOW = "--show-config"
# Options that may name code or programs: a file that a stranger left in a folder must not run them.
_RUN_CODE = ("profiler", "executor")
# Options of a single call.
_NOT_STORED = ("help", SHOW.removeprefix("--"))


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """A configuration file; without a `path` there is none."""

    path: Path | None
    tables: Mapping[str, Any]

    @classmethod
    def find(cls, folder: Path | None = None) -> ConfigFile:
        """The file in a folder, by default the working directory, or in the nearest one above it."""
        folder = (folder or Path.cwd()).resolve()
        paths = (place / NAME for place in (folder, *folder.parents))
        path = next((path for path in paths if os.path.isfile(path)), None)
        return cls(path=path, tables=read_toml(path, UsageError) if path else {})

    def values(
        self, command: str, names: Collection[str], all_names: Callable[[], Mapping[str, Collection[str]]]
    ) -> dict[str, Any]:
        """Values by option of a command.

        Parameters
        ----------
        names : collection of str
            Options of the command, without ``--``.
        all_names : callable
            Gives those of all commands, by command.

        Raises
        ------
        UnknownNameError
            For a key that is no option of the command that its table is of, or of any command.
        UsageError
            For an option that may run code.
        """
        for table in (self.tables, *(table for table in self.tables.values() if isinstance(table, Mapping))):
            for key in table:
                if _option(key) in _RUN_CODE:
                    raise UsageError(
                        f"{self.path}: {key} may name code, which only the command line may: --{key} …"
                    )
        top = {key: value for key, value in self.tables.items() if not isinstance(value, Mapping)}
        tables = {key: value for key, value in self.tables.items() if isinstance(value, Mapping)}
        of_command = tables.pop(command, {})
        values: dict[str, Any] = {}
        for key, value in [*top.items(), *tables.items()]:
            name = _option(key)
            is_option = name in names
            # A table called as a command is that command's, also where an option has the name, as --compile.
            if is_option and not (isinstance(value, Mapping) and name in all_names()):
                values[name] = value
                continue
            options = all_names()
            known = {option for command_options in options.values() for option in command_options}
            if name not in known | options.keys():
                raise UnknownNameError(f"option in {self.path}:", key, sorted(known))
        for key, value in of_command.items():
            if _option(key) not in names:
                raise UnknownNameError(f"option in {self.path}, [{command}]:", key, sorted(names))
            values[_option(key)] = value
        return values


def _option(key: str) -> str:
    return key.replace("_", "-")


def option_names(sub: CommandParser) -> dict[str, argparse.Action]:
    """The options of a command that a file may have, by name without ``--``."""
    named = {action.option_strings[-1].removeprefix("--"): action for action in sub.actions}
    return {name: action for name, action in named.items() if name not in _NOT_STORED}


def apply(
    config: ConfigFile, sub: CommandParser, given: Collection[str], values: Mapping[str, Any]
) -> dict[str, str]:
    """Make values of a file the defaults of a command; returns where the value of each option is from.

    Parameters
    ----------
    given : collection of str
        Attributes of the arguments that the command line sets.

    Raises
    ------
    UsageError
        For a value that the option does not take.
    """
    sources = {}
    for name, action in option_names(sub).items():
        if action.dest in given:
            sources[action.dest] = _COMMAND_LINE
        elif name in values:
            try:
                action.default = _parse_value(action, values[name], action.dest in sub.repeated)
            except (ValueError, UsageError, argparse.ArgumentTypeError) as error:
                raise UsageError(f"{config.path}: {name}: {error}") from None
            sources[action.dest] = str(config.path)
            action.required = False
        else:
            sources[action.dest] = _DEFAULT
    return sources


def _parse_value(action: argparse.Action, value: Any, is_repeated: bool) -> Any:
    """A value of a file as the command line would give it."""
    if action.nargs == "?" and value is True:
        return action.const
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UsageError(f"true or false, not {value!r}")
        return action.const if value else not action.const
    parse: Callable[[str], Any] = action.type if callable(action.type) else str
    if not is_repeated:
        return parse(_text(value))
    if isinstance(value, Mapping):
        return [parse(f"{key}={_text(item)}") for key, item in value.items()]
    return [parse(_text(item)) for item in (value if isinstance(value, list) else [value])]


def _text(value: Any) -> str:
    """A value as the command line has it: lists with commas."""
    if isinstance(value, bool | Mapping):
        raise UsageError(f"a text, a number or a list, not {value!r}")
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


@dataclass(frozen=True, kw_only=True)
class ShownConfig:
    """The values of a command's options, and where each is from."""

    path: str
    options: dict[str, tuple[Any, str]]

    @classmethod
    def from_arguments(
        cls, config: ConfigFile, args: argparse.Namespace, sources: Mapping[str, str]
    ) -> ShownConfig:
        """From parsed arguments."""
        return cls(
            path=str(config.path or ""),
            options={
                name: (getattr(args, action.dest), sources[action.dest])
                for name, action in option_names(args.parser).items()
            },
        )

    def to_json(self) -> dict[str, Json]:
        """The file, and of each option value and source."""
        rows: dict[str, Json] = {
            name: {"value": _plain(value), "from": where} for name, (value, where) in self.options.items()
        }
        return {"file": self.path, "options": rows}

    def text(self) -> str:
        """A line for each option."""
        width = max(map(len, self.options))
        values = {name: str(_plain(value)) for name, (value, _) in self.options.items()}
        value_width = max(map(len, values.values()))
        lines = [f"file      {self.path or f'no {NAME} here or above'}"]
        lines += [
            f"{name:<{width}}  {values[name]:<{value_width}}  {where}"
            for name, (_, where) in self.options.items()
        ]
        return "\n".join(lines)


def _plain(value: Any) -> Json:
    """A value as JSON."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
