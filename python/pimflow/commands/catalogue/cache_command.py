"""``pimflow cache``: what is kept from earlier commands."""

from __future__ import annotations

import argparse

from pimflow.commands.command_line import output
from pimflow.commands.command_line.command_parser import CommandParser
from pimflow.errors import UnknownNameError

SUMMARY = "show or clear the cache of results"
ACTIONS = ("list", "size", "clear")


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    from pimflow.commands.command_line import options

    sub.positional(
        "action", "list|size|clear", "list it (default), print its bytes, or delete its results", nargs="?"
    )
    options.cache_option(sub, "output")


def run(args: argparse.Namespace) -> None:
    """Print the file of the cache and how much is in it; delete its results if that is the action."""
    from pimflow.host.result_cache import CacheSize, ResultCache, default_path

    action = args.action or "list"
    if action not in ACTIONS:
        raise UnknownNameError("action", action, ACTIONS)
    path = args.cache or default_path()
    size = CacheSize.measure(path)
    if action == "clear" and size.results:
        cache = ResultCache(path)
        cache.clear()
        cache.close()
    if args.json:
        output.print_json({"action": action, **size.to_json()})
    elif action == "size":
        print(size.bytes)
    else:
        print(f"{'cleared' if action == 'clear' else 'cache'}     {size.text()}")
