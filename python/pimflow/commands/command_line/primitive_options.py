"""Options that `compile` and `select` share: the choice of convolution primitives, and their times."""

from __future__ import annotations

import argparse
import os
from typing import Any

from pimflow.commands.command_line.command_parser import refuse
from pimflow.errors import UsageError, hint
from pimflow.primitive_selection.options import SelectionOptions

# Fields of `SelectionOptions` that `compile` and `select` have.
FIELDS = ("minimize", "time_budget_ns", "memory_model", "device", "measure")


def selection(args: argparse.Namespace, profile: str) -> dict[str, Any]:
    """The options of a selection as keywords of the API; `profile` is the source of times."""
    from pimflow.primitive_selection.time_sources import MODES

    keywords: dict[str, Any] = args.parser.keywords(args, SelectionOptions)
    if profile == "predicted" or profile not in MODES:
        refuse(args, ["measure"], f"--profile {profile} measures no primitives; leave out --measure")
    check_profile(profile)
    return keywords | {"profile": profile}


def check_profile(profile: str) -> None:
    """Raise `UsageError` for a source of times that is none of the words for it, and cannot be a file."""
    from pimflow.primitive_selection.time_sources import MODES

    looks_like_a_file = os.sep in profile or "." in profile
    if not (profile in MODES or looks_like_a_file or os.path.exists(profile)):
        raise UsageError(f"unknown profile '{profile}': no file; {hint(profile, MODES)}")
