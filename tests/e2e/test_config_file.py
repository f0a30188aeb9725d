"""Do options come from ``pimflow.toml``, and does ``--show-config`` say where from?"""

import pytest
from command_line import error_line, run_json

from pimflow.commands import parser

FILE = """
dtype = "fp32"
pim-channels = 8
perfetto = "for another command"
[compile]
objective = "energy"
quiet = true
max-latency = "1ms"
modes = ["gpu", "pim"]
shape = {input = [1, 3, 24, 24]}
pin = {"down.conv" = "gpu"}
[sweep]
set = "pim_channels=4"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "below").mkdir()
    (tmp_path / "pimflow.toml").write_text(FILE)
    monkeypatch.chdir(tmp_path / "below")
    return tmp_path


def test_what_the_command_line_does_not_say_is_in_the_file(folder):
    args = parser.parse(["compile", "toy", "--pim-ch", "4", "--pin", "stem.conv=pim"])
    assert (args.dtype, args.objective, args.quiet, args.modes) == ("fp32", "energy", True, "gpu,pim")
    assert (args.pim_channels, args.max_latency_ns) == (4, 1e6)
    assert args.pins == [("stem.conv", "pim")] and args.shapes == [("input", (1, 3, 24, 24))]
    assert args.objective == args.parser.get_default("objective")  # so nothing refuses it as idle
    assert parser.parse(["sweep", "toy"]).settings == ["pim_channels=4"]
    assert parser.parse(["models"]).quiet is False


def test_each_option_says_where_it_is_from(folder, capsys):
    shown = run_json(capsys, "compile --show-config --objective latency")
    path = str(folder / "pimflow.toml")
    assert shown["file"] == path
    sources = {name: (row["value"], row["from"]) for name, row in shown["options"].items()}
    assert sources["objective"] == ("latency", "command line") and sources["dtype"] == ("fp32", path)
    assert sources["solver"] == ("label", "default")
    flags = parser.parse(["compile", "toy"]).parser.flags
    long_names = {flag[2:] for flag in flags if flag.startswith("--")}
    assert long_names - sources.keys() == {"help", "show-config"}
    (folder / "pimflow.toml").unlink()
    assert run_json(capsys, "compile --show-config")["file"] == ""


WRONG = {
    "dtypo = 1": r"pimflow.toml: 'dtypo'; did you mean dtype",
    "[compile]\nobjektive = 1": "[compile]: 'objektive'; did you mean objective",
    "quiet = 1": "quiet: true or false, not 1",
    'batch = "x"': "batch: invalid literal",
    "dtype = true": "dtype: a text, a number or a list, not True",
    'shape = "x"': "shape: ",
    "[": "not a TOML file",
    'profiler = "gpu=evil:Code"': "profiler may name code, which only the command line may: --profiler",
    '[compile]\nexecutor = "dask://there:1"': "executor may name code",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_in_the_file_is_said_in_a_line(text, folder, capsys):
    (folder / "pimflow.toml").write_text(text)
    assert WRONG[text] in error_line(capsys, 2, "compile toy")
