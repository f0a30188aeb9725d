"""``pimflow devices``: PIM devices, GPUs and systems, with the sources of their figures."""

from __future__ import annotations

import argparse

from pimflow.commands.command_line import output
from pimflow.commands.command_line.command_parser import CommandParser
from pimflow.errors import SpecError, UsageError

SUMMARY = "list PIM devices, GPUs and systems, or show one with its sources"


CHECK = "check"


def add_arguments(sub: CommandParser) -> None:
    """Add the arguments of the command, which `run` takes."""
    sub.positional("device", "NAME|FILE", "device or system to show; 'check' to check one", nargs="?")
    sub.positional("checked", "NAME|FILE", "device to check against the rules of DRAM", nargs="?")
    sub.option("output", "--toml", action="store_true", help="print its file, to start one of your own from")


def run(args: argparse.Namespace) -> None:
    """Print the device of `args`, or all of them."""
    from pimflow.hardware import description

    if args.device == CHECK:
        _check(args)
        return
    if args.checked is not None:
        raise UsageError(f"'{args.checked}': name one device, or check one: pimflow devices {CHECK} FILE")
    if args.toml:
        if args.device is None:
            raise UsageError("--toml prints the file of one device; name it")
        if args.json:
            raise UsageError("--toml prints TOML, --json JSON; leave out one of both")
        print(description.file_text(args.device), end="")
        return
    if args.device is None:
        if args.json:
            output.print_json(description.catalogue())
        else:
            print(description.catalogue_text())
        return
    device = description.describe(description.load(args.device))
    if args.json:
        output.print_json(device)
    else:
        print(description.description_text(device))


def _check(args: argparse.Namespace) -> None:
    """Print each rule of DRAM with its term; if the device breaks some, raise one error with all faults."""
    from pimflow.hardware import description
    from pimflow.hardware.device_rules import device_rules, rule_faults

    if args.checked is None or args.toml:
        raise UsageError(f"name one device: pimflow devices {CHECK} FILE")
    device = description.unchecked_pim(args.checked)
    if faults := list(rule_faults(device)):
        raise SpecError(f"pim '{device.name}': {'; '.join(faults)}")
    rules = [{"term": rule.term, "rule": rule.text} for rule in device_rules(device)]
    if args.json:
        output.print_json({"device": device.name, "rules": rules})
    else:
        print("\n".join(f"ok  {rule['term']:<5}  {rule['rule']}" for rule in rules))
