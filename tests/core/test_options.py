"""Is an option declared once, and are command line, signature and pass context made from that?"""

import inspect
from dataclasses import dataclass

import pytest

import pimflow
from pimflow.commands.command_line.command_parser import CommandParser
from pimflow.commands.shared.options import NetworkOptions
from pimflow.commands.shared.search_arguments import SEARCH
from pimflow.core.options import OptionSet, declarations, field_names, option, split_keywords
from pimflow.errors import UnknownNameError, UsageError
from pimflow.tvm_extension.relay import pass_options


def parse_percent(text: str, flag: str) -> float:
    if not text.endswith("%"):
        raise UsageError(f"{flag} {text}: no per cent")
    return float(text[:-1]) / 100


@dataclass(frozen=True, kw_only=True)
class CoolingOptions(OptionSet, group="system"):
    fans: int = option(2, "--fans N", "number of fans (default: %(default)s)")
    load: float | None = option(None, "--load X%", "share of the power", parse=parse_percent)
    kind: str = option("air", "--kind NAME", "what cools: {choices}", choices=("air", "water"))
    quiet: bool = option(False, "--slow", "turn slowly", group="output")
    sensor: object = None


def parse_line(*argv: str) -> dict[str, object]:
    sub = CommandParser(prog="cool")
    sub.add_fields(CoolingOptions)
    return sub.keywords(sub.parse_args(argv), CoolingOptions)


def test_the_command_line_is_made_from_the_declaration():
    assert parse_line() == {"fans": 2, "load": None, "kind": "air", "quiet": False}
    expected = {"fans": 3, "load": 0.25, "kind": "air", "quiet": True}
    assert parse_line("--fans", "3", "--load", "25%", "--slow") == expected
    sub = CommandParser(prog="cool")
    sub.add_fields(CoolingOptions)
    assert dict(sub.help_groups()) == {
        "system": [
            ("--fans N", "number of fans (default: 2)"),
            ("--load X%", "share of the power"),
            ("--kind NAME", "what cools: air, water"),
        ],
        "output": [("--slow", "turn slowly")],
    }


@pytest.mark.parametrize(
    ("argv", "says"),
    [(["--fans", "x"], "--fans: invalid int value"), (["--load", "3"], "--load 3: no per cent")],
)
def test_text_is_refused_by_its_flag(argv, says):
    with pytest.raises(UsageError, match=says):
        parse_line(*argv)


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        ({"fans": "2"}, UsageError, r"fans is a whole number, not '2' \(str\)"),
        ({"fans": True}, UsageError, "fans is a whole number"),
        ({"load": "1"}, UsageError, "load is a number or None, not '1'"),
        ({"kind": 3}, UsageError, "kind is a name, not 3"),
        ({"kind": "watr"}, UnknownNameError, "unknown kind 'watr'; did you mean water"),
        ({"quiet": 1}, UsageError, "quiet is True or False, not 1"),
    ],
)
def test_values_are_checked_by_type_and_choices(values, error, says):
    with pytest.raises(error, match=says):
        CoolingOptions(**values)


def test_keywords_go_to_the_class_that_has_them():
    shares = split_keywords({"fans": 1, "fuse": True}, CoolingOptions, NetworkOptions)
    assert shares == [{"fans": 1}, {"fuse": True}]
    with pytest.raises(UnknownNameError, match="unknown keyword 'fan'; did you mean fans"):
        split_keywords({"fan": 1}, CoolingOptions)


def test_a_signature_shows_every_option():
    declared = {name for cls in SEARCH for name in field_names(cls)}
    assert set(inspect.signature(pimflow.search).parameters) == {"model", "system", *declared}
    parameters = inspect.signature(pimflow.compile).parameters
    assert declared < set(parameters) and parameters["objective"].default == "latency"
    assert parameters["goal"].annotation == "Goal | None"


def test_the_pass_context_takes_what_a_module_leaves_open():
    loading = {name for name, declared in declarations(NetworkOptions).items() if declared.group == "network"}
    narrow = {"weight_type", "kv_cache_dtype"}
    assert loading == {"shapes", "batch", "context", "states", "values"} | narrow
    declared = {name for cls in SEARCH for name in field_names(cls)}
    elsewhere = loading | {"target", "options", "goal", "select"}
    own = {"system", "dump_ir", "check_kernels", "cuda_graphs", "profiler", "verify"}
    assert set(pass_options.OPTIONS) == (declared - elsewhere) | own
