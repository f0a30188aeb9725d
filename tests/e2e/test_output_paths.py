"""Is every place for a result refused before the work, or written as it was named?"""

import json
import os
from pathlib import Path

import pytest

from pimflow.cli.main import main
from pimflow.errors import ArtifactError
from pimflow.host.directories import DirectoryKind, check_target, new_directory
from pimflow.host.files import file_sha256

MARK = "mark"
COMMANDS = {  # without their last argument, and whether it is a directory
    "compile": (["compile", "toy", "-o"], True),
    "sweep": (["sweep", "toy", "--set", "pim_channels=8,16", "-o"], True),
    "trace": (["trace", "conv:1x64x7x7,64,1x1", "--format", "pimprog", "-o"], True),
    "decompose": (["decompose", "toy", "--decompose", "tucker:0.5", "-o"], False),
    "timeline": (["timeline", "toy", "--perfetto"], False),
    "picture": (["timeline", "toy", "--plot"], False),
    "memory": (["memory", "toy", "-o"], False),
    "select": (["select", "toy", "-o"], False),
    "run": (["run", "toy", "-o"], False),
    "report": (["report", "toy", "-o"], False),
    "compare": (["compare", "toy", "other", "-o"], False),
}


@pytest.fixture
def no_work(monkeypatch):
    """Whoever reads a network, or a compiled one, has begun the work."""
    from pimflow import frontend, zoo
    from pimflow.compiler.artifact import Interface

    def begun(*_args, **_options):
        raise AssertionError("it began before it looked where to write")

    for owner, name in ((zoo, "load_model"), (frontend, "load"), (Interface, "load")):
        monkeypatch.setattr(owner, name, begun)


def refused(capsys, *argv) -> str:
    code = main([str(a) for a in argv])
    out, err = capsys.readouterr()
    assert (code, out) == (3, "") and err.startswith("pimflow: error: ") and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("command", COMMANDS)
def test_refused_before_the_work(capsys, tmp_path, no_work, command):
    argv, directory = COMMANDS[command]
    (tmp_path / "file.png").write_text("mine")
    (tmp_path / "loop.png").symlink_to("loop.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "folder.png" / "other").write_text("mine")
    places = [tmp_path / "file.png" / "x.png", "/proc/x.png", tmp_path / ("x" * 300 + ".png")]
    places += [tmp_path / name for name in ("folder.png", "loop.png", "file.png")]
    places += [] if directory else [tmp_path / "no/where/x.png"]
    for place in places:
        said = refused(capsys, *argv, place)
        assert str(place) in said and "File exists" not in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file.png", "folder.png", "loop.png"]
    assert (tmp_path / "file.png").read_text() == "mine"


def test_no_name_at_all(capsys, no_work):
    assert "''" in refused(capsys, "compile", "toy", "-o", "")


def seals(directory: Path) -> dict[str, str]:
    """In place of an interface: a table of what was written."""
    return json.loads((directory / MARK).read_text())


KIND = DirectoryKind(name="what this test writes", mark=MARK, seals=seals)


def made(target, *names: str) -> None:
    with new_directory(target, KIND) as scratch:
        for name in names:
            (scratch / name).write_text(name)
        digests = {name: file_sha256(scratch / name) for name in names}
        (scratch / MARK).write_text(json.dumps({**digests, MARK: None}))


def contents(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()} - {MARK}


@pytest.mark.parametrize("target", [".", "here"])
def test_the_folder_that_a_shell_works_in(tmp_path, monkeypatch, target):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    place = "." if target == "." else here
    before = os.stat(".").st_ino
    check_target(place, KIND)
    for names in (["a", "b"], ["b", "c"]):
        made(place, *names)
        assert contents(here) == set(names) and (here / "b").read_text() == "b"
        assert os.stat(".").st_ino == os.stat(here).st_ino == before  # or the shell would see nothing
    assert [p.name for p in tmp_path.iterdir()] == ["here"]


@pytest.mark.parametrize("moves", range(8))
def test_an_interrupt_while_a_folder_is_filled(tmp_path, monkeypatch, moves):
    monkeypatch.chdir(tmp_path)
    made(".", "a", "old")
    rename, left = Path.rename, [moves]

    def interrupted(self, target):
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    try:
        made(".", "a", "new")
    except KeyboardInterrupt:
        assert contents(tmp_path) == {"a", "old"}
    else:
        assert contents(tmp_path) == {"a", "new"} and moves > 5
    assert (tmp_path / MARK).exists()


@pytest.mark.parametrize("there", [False, True])
def test_a_link_stays_one(tmp_path, there):
    target, link = tmp_path / "disk" / "target", tmp_path / "link"
    target.parent.mkdir()
    if there:
        target.mkdir()
    link.symlink_to(target)
    for name in ("a", "b"):
        check_target(link, KIND)
        made(link, name)
        assert link.is_symlink() and contents(target) == {name}
    assert {p.name for p in tmp_path.iterdir()} == {"disk", "link"}
    assert {p.name for p in target.parent.iterdir()} == {"target"}


def test_a_link_to_what_is_no_compiled_network(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("")
    (tmp_path / "link").symlink_to("mine")
    with pytest.raises(ArtifactError, match="holds file, not only what this test writes"):
        check_target(tmp_path / "link", KIND)


def test_names_as_long_as_the_file_system_takes(tmp_path):
    for name in ("x" * 255, "層" * 85):
        made(tmp_path / name, "a")
        assert contents(tmp_path / name) == {"a"}


@pytest.mark.long
def test_compiling_into_the_current_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main(["compile", "toy", "-o", ".", "--quiet"]) == 0
        assert main(["run", "."]) == 0
    capsys.readouterr()
