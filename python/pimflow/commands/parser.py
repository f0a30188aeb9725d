"""The command line of ``pimflow``: its commands, and the arguments of each."""

from __future__ import annotations

import argparse
import difflib
import functools
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from pimflow.commands.catalogue import cache_command, completion_command, devices_command, models_command
from pimflow.commands.command_line import config_file, output, output_options
from pimflow.commands.command_line.command_parser import CommandParser, OneLineParser
from pimflow.commands.compile import compile_command, timeline_command
from pimflow.commands.fuse import fuse_command
from pimflow.commands.generate import export_command, generate_command
from pimflow.commands.memory import decompose_command, memory_command
from pimflow.commands.pages import compare_command, report_command
from pimflow.commands.primitives import select_command
from pimflow.commands.profile import profile_command
from pimflow.commands.run import run_command
from pimflow.commands.serve import serve_sim_command
from pimflow.commands.simulate import compare_simulator_command, simulate_command, trace_command
from pimflow.commands.sweep import best_command, sweep_command
from pimflow.errors import UnknownNameError, UsageError, is_utf8

# Each command is a module ``NAME_command`` with `SUMMARY`, `add_arguments` and `run`.
GROUPS = (
    (
        "compile a network and run it",
        (compile_command, run_command, generate_command, report_command, compare_command),
    ),
    (
        "ask what a system would do",
        (profile_command, sweep_command, best_command, timeline_command, serve_sim_command),
    ),
    (
        "change a network, plan its memory and its layers",
        (decompose_command, memory_command, fuse_command, select_command),
    ),
    (
        "simulate PIM programs, write traces",
        (simulate_command, compare_simulator_command, trace_command, export_command),
    ),
    ("see what there is", (models_command, devices_command, cache_command, completion_command)),
)
COMMANDS = tuple(command for _, commands in GROUPS for command in commands)
_MIN_SUMMARY_WIDTH = 11  # smallest width of a summary in characters, as argparse has for its help
DESCRIPTION = "A TVM back end for GPUs whose DRAM computes"


class _Version(argparse.Action):
    """Prints the version of the installed package; it is looked up only when it is needed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"{parser.prog} {version('pimflow')}")
        parser.exit()


def command_name(command: ModuleType) -> str:
    """The name of a command on the command line."""
    return command.__name__.rpartition(".")[2].removesuffix("_command").replace("_", "-")


def parser(only: str | None = None, *, is_listed: bool = False) -> OneLineParser:
    """The parser of the command line, with every command, or with `only` one.

    Its help lists commands in groups; if `is_listed`, as argparse does, which `shtab` reads.
    """
    top_parser = OneLineParser(
        prog="pimflow",
        usage="pimflow COMMAND [ARGUMENT …]",
        description=_description(shutil.get_terminal_size().columns - 2),
        epilog="'pimflow COMMAND --help' says what a command takes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    top_parser.add_argument("-h", "--help", action="help", help="print this help and exit")
    top_parser.add_argument("-V", "--version", action=_Version, nargs=0, help="print the version and exit")
    top_parser.commands = {}
    commands = top_parser.add_subparsers(
        parser_class=CommandParser, help="commands" if is_listed else argparse.SUPPRESS
    )
    for command in COMMANDS:
        name = command_name(command)
        if only not in (None, name):
            continue
        sub = commands.add_parser(
            name, prog=f"pimflow {name}", description=_sentence(command.SUMMARY), help=command.SUMMARY
        )
        sub.set_defaults(command=command.run)
        top_parser.commands[name] = sub
        if command is completion_command:
            sub.set_defaults(full_parser=functools.partial(parser, is_listed=True))
        _add_arguments(command, sub)
    return top_parser


def build_parser(command: ModuleType) -> CommandParser:
    """The parser of one of `COMMANDS`, for its documentation."""
    sub = CommandParser(prog=f"pimflow {command_name(command)}", description=_sentence(command.SUMMARY))
    _add_arguments(command, sub)
    return sub


def _add_arguments(command: ModuleType, sub: CommandParser) -> None:
    command.add_arguments(sub)
    output_options.output_options(sub)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; ``command`` of the result is the function that runs it, ``parser`` its parser.

    Raises
    ------
    UsageError
        For an unknown command, an unknown option or a value that cannot be parsed.
    """
    argv = sys.argv[1:] if argv is None else argv
    name = next((argument for argument in argv if not argument.startswith("-")), "")
    names = [command_name(command) for command in COMMANDS]
    if name and name not in names:
        raise UnknownNameError("command", name, names)
    args, remaining = _parse_configured(parser(name), name, argv)
    flags = args.parser.flags if name else ["--help", "--version"]
    prog = args.parser.prog if name else "pimflow"
    for flag in (argument.partition("=")[0] for argument in remaining if argument.startswith("-")):
        near = " or ".join(difflib.get_close_matches(flag, flags, n=2))
        advice = f"did you mean {near}?" if near else f"see '{prog} --help'"
        raise UsageError(f"'{prog}' has no option {flag}; {advice}")
    if remaining:
        raise UsageError(f"'{prog}' takes no further argument '{remaining[0]}'; see '{prog} --help'")
    if not name:
        raise UsageError(f"give a command: {', '.join(names)}; see 'pimflow --help'")
    _require_utf8(argv)
    return args


def _parse_configured(
    top_parser: OneLineParser, name: str, argv: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Parse a command line, with defaults of a ``pimflow.toml``; with ``--show-config``, to print these."""
    config = config_file.ConfigFile.find() if name else config_file.ConfigFile(path=None, tables={})
    is_shown = config_file.SHOW in argv
    if not name or not (config.tables or is_shown):
        return top_parser.parse_known_args(argv)
    sub = top_parser.commands[name]
    if is_shown:
        sub.make_optional()
    given = sub.given_attributes(lambda: top_parser.parse_known_args(argv)[0])
    values = config.values(
        name,
        config_file.option_names(sub),
        lambda: {other: list(config_file.option_names(sub)) for other, sub in parser().commands.items()},
    )
    sources = config_file.apply(config, sub, given, values)
    args, remaining = top_parser.parse_known_args(argv)
    if is_shown:
        shown = config_file.ShownConfig.from_arguments(config, args, sources)
        args.command = lambda arguments: output.show(shown, arguments.json)
    return args, remaining


def _require_utf8(argv: Sequence[str]) -> None:
    """Raise `UsageError` for text that is not UTF-8: compilers, JSON and pages cannot take it."""
    for text in argv:
        if not is_utf8(text):
            advice = "rename it" if os.path.lexists(text) else "write it in UTF-8"
            raise UsageError(f"{text} is not UTF-8; {advice}")


def _description(width: int) -> str:
    """The commands in their groups, with the summary of each."""
    width_of_names = 4 + max(len(command_name(command)) for command in COMMANDS)
    indent = " " * width_of_names
    width = max(width, width_of_names + _MIN_SUMMARY_WIDTH)
    lines = [DESCRIPTION]
    for title, commands in GROUPS:
        lines += ["", f"{title}:"]
        for command in commands:
            first = f"  {command_name(command)}".ljust(width_of_names)
            lines += textwrap.wrap(command.SUMMARY, width, initial_indent=first, subsequent_indent=indent)
    return "\n".join(lines)


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."
