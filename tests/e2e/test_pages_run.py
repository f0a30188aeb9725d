"""Do the tutorials and the page on extending pimflow run, word for word?

Blocks of one page run in order, in one folder. ``pimflow …`` runs in this process, which has TVM already.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import draw_timeline as script
import pytest

import pimflow
from pimflow.commands.main import main
from pimflow.placement.candidates.substitutions import SUBSTITUTIONS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    pytest.param(page, id=page.stem, marks=pytest.mark.torch if "import torch" in page.read_text() else ())
    for page in (*sorted((ROOT / "docs" / "tutorials").glob("*.md")), ROOT / "docs" / "extending.md")
]
BLOCK = re.compile(r"^```(\w+) ?([\w.]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def shell(text: str, capsys) -> None:
    """Run commands: those of pimflow here, all that stands between them by the shell."""
    pending: list[str] = []
    for line in [*text.splitlines(), "pimflow"]:
        if not line.startswith("pimflow"):
            pending.append(line)
            continue
        if pending:
            subprocess.run(["bash", "-e", "-c", "\n".join(pending)], check=True, stdout=subprocess.DEVNULL)
            pending = []
        _, *words = shlex.split(line)
        if not words:
            return
        *words, file = (*words[:-2], words[-1]) if words[-2:-1] == [">"] else (*words, "")
        capsys.readouterr()
        code = main([*words, *(["--quiet"] if words[0] in ("compile", "run", "sweep", "generate") else [])])
        output = capsys.readouterr()
        assert code == 0, f"{line}: {output.err}"
        assert output.out.strip(), line
        if file:
            Path(file).write_text(output.out)


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PIMFLOW_CACHE", str(tmp_path / "cache"))
    text = page.read_text(encoding="utf-8")
    if "import torch" in text:
        pytest.importorskip("torch")
    blocks = BLOCK.findall(text)
    assert len(blocks) >= 2 and {language for language, *_ in blocks} <= {"sh", "python"}
    namespace = {"__name__": "page"}
    with mock.patch.dict(SUBSTITUTIONS):
        for language, file, text in blocks:
            if language == "sh":
                shell(text, capsys)
            elif file:  # blocks of one file follow one another
                with (tmp_path / file).open("a") as module:
                    module.write(text)
            else:
                exec(compile(text, page.name, "exec"), namespace)
    for _, file, _ in blocks:
        sys.modules.pop(Path(file).stem, None)


def test_the_picture_of_the_first_page_shows_the_device_of_every_layer(monkeypatch):
    monkeypatch.setattr(script, "NETWORK", "toy")
    monkeypatch.setattr(script, "LAYERS", 8)
    search_result = pimflow.search("toy")
    bars = script.chart()["data"]["values"]
    rows = ("GPU", "plan: PIM")
    shown = {row: {bar["layers"] for bar in bars if bar["row"].startswith(row)} for row in rows}
    regions = enumerate(search_result.graph.regions, 1)
    modes = {str(number): search_result.plan.choice(region.name).mode for number, region in regions}
    assert shown["GPU"] - {""} == set(modes)
    on_pim = {number for number, mode in modes.items() if mode != "GPU"}
    assert shown["plan: PIM"] - {""} <= on_pim and on_pim
