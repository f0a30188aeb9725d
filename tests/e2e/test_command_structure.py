"""Is every command a file of its own, with its options in the groups that all commands share?"""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import error_line

from pimflow import commands
from pimflow.commands import parser
from pimflow.commands.command_line import command_parser
from pimflow.commands.main import main

NAMES = [parser.command_name(command) for command in parser.COMMANDS]


def help_of(name: str, capsys, monkeypatch, columns: int = 80) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as exit_info:
        main([name, "--help"] if name else ["--help"])
    assert exit_info.value.code == 0
    return capsys.readouterr().out


def headings(text: str) -> list[str]:
    return re.findall(r"^(\S.*):$", text, re.M)


def section(text: str, heading: str) -> str:
    return text.partition(f"\n{heading}:\n")[2].partition("\n\n")[0]


def test_every_command_file_is_listed():
    files = {path.stem for path in Path(commands.__file__).parent.rglob("*_command.py")}
    assert files == {f"{name}_command".replace("-", "_") for name in NAMES}
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_command_has_a_summary_arguments_and_run(name):
    command = next(command for command in parser.COMMANDS if parser.command_name(command) == name)
    assert command.SUMMARY and not command.SUMMARY.endswith(".")
    assert list(inspect.signature(command.add_arguments).parameters) == ["sub"]
    assert list(inspect.signature(command.run).parameters) == ["args"]


@pytest.mark.long
@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_command_has_the_same_groups_in_the_same_order(name, columns, capsys, monkeypatch):
    text = help_of(name, capsys, monkeypatch, columns)
    order = ["positional arguments", command_parser.COMMON_OPTIONS, *command_parser.GROUPS]
    titles = headings(text)
    assert set(titles) <= set(order) and titles == sorted(titles, key=order.index)
    assert "--help" in section(text, "output")
    assert max(map(len, text.splitlines())) < columns


def test_compile_opens_with_ten_options(capsys, monkeypatch):
    text = help_of("compile", capsys, monkeypatch)
    assert text.startswith("usage: pimflow compile MODEL [OPTION …]\n")
    opening = section(text, command_parser.COMMON_OPTIONS)
    assert len(re.findall(r"^  -", opening, re.M)) == 10
    assert headings(text)[1:] == [command_parser.COMMON_OPTIONS, *command_parser.GROUPS]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_options_that_open_a_help_are_options_of_the_command(name):
    sub = parser.parse([name, *shortest_arguments(name)]).parser
    assert set(sub.common_flags) <= set(sub.flags)


def shortest_arguments(name: str) -> list[str]:
    """The shortest command line that can be read."""
    return {
        "decompose": ["toy", "-o", "x", "--decompose", "tucker:0.5"],
        "sweep": ["toy", "--set", "pim_channels=4"],
        "trace": ["fc:8,8", "--format", "pim", "-o", "x"],
        "generate": ["tiny-lm", "-n", "1"],
        "export": ["llmservingsim", "tiny-lm"],
        "models": [],
    }.get(name, ["x"])


def test_the_help_lists_every_command_once_with_its_summary(capsys, monkeypatch):
    text = help_of("", capsys, monkeypatch, 160)
    for command in parser.COMMANDS:
        assert text.count(f"\n  {parser.command_name(command)} ") == 1 and command.SUMMARY in text
    assert headings(text) == [*(title for title, _ in parser.GROUPS), "options"]


def test_the_version_is_that_of_the_package(capsys):
    from importlib.metadata import version

    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"pimflow {version('pimflow')}\n"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "give a command: compile, run"),
        (["compil", "toy"], "unknown command 'compil'; did you mean compile"),
        (["--verson"], "'pimflow' has no option --verson; did you mean --version?"),
        (["compile", "toy", "--objektive=energy"], "has no option --objektive; did you mean --objective?"),
        (["--pim-chanels=4", "compile", "toy"], "'pimflow compile' has no option --pim-chanels; did you"),
        (["run", "x", "--zzz"], "'pimflow run' has no option --zzz; see 'pimflow run --help'"),
        (["run", "x", "y"], "'pimflow run' takes no further argument 'y'"),
        (["compile"], "arguments are required: MODEL; see 'pimflow compile --help'"),
        (["compile", "toy", "--batch", "x"], "--batch: invalid int value: 'x'"),
        (["compile", "toy", "--pim-c"], "--pim-channels: expected one argument"),
        (["compile", "toy", "--max"], "ambiguous option: --max could match --max-latency, --max-energy"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(argv, says, capsys):
    assert says in error_line(capsys, 2, *argv)


@pytest.mark.long
@pytest.mark.parametrize("argv, heavy", [("--help", "numpy"), ("run --help", "numpy"), ("devices", "onnx")])
def test_what_a_command_does_not_need_is_not_loaded(argv, heavy):
    code = (
        f"import sys; sys.argv[1:] = {argv.split()}; from pimflow.commands.main import main\n"
        f"try: main()\nexcept SystemExit: pass\nfinally: print({heavy!r} in sys.modules, file=sys.stderr)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stderr == "False\n"
