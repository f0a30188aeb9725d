"""Is every place for a result refused before the work, or written as it was named?"""

import json
import os
from pathlib import Path

import pytest
from command_line import error_line
from length import long_but

from pimflow.commands.main import main
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
    "export": (["export", "llmservingsim", "tiny-lm", "-o"], False),
    "steps": (["serve-sim", "tiny-lm", "--trace", "requests.csv", "--save-steps"], False),
    "front": (["compile", "toy", "--pareto", "2", "--plot"], False),
    "pools": (["memory", "toy", "--plot"], False),
    "primitives": (["select", "toy", "--plot"], False),
    "run": (["run", "toy", "-o"], False),
    "report": (["report", "toy", "-o"], False),
    "compare": (["compare", "toy", "other", "-o"], False),
}


@pytest.fixture
def no_work(monkeypatch):
    """Whoever reads a network, or a compiled one, has begun the work."""
    from pimflow import frontend, zoo
    from pimflow.compiler.interface import Interface

    def fail(*_args, **_options):
        raise AssertionError("it began before it looked where to write")

    for owner, name in ((zoo, "load_model"), (frontend, "load"), (Interface, "load")):
        monkeypatch.setattr(owner, name, fail)


@pytest.mark.long
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
        said = error_line(capsys, 3, *argv, place)
        assert str(place) in said and "File exists" not in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file.png", "folder.png", "loop.png"]
    assert (tmp_path / "file.png").read_text() == "mine"


def test_every_command_that_writes_is_here():
    """And takes `--force`."""
    from pimflow.commands.parser import COMMANDS as KNOWN
    from pimflow.commands.parser import build_parser, command_name

    flags = {command_name(command): set(build_parser(command).flags) for command in KNOWN}
    writing = {
        (name, flag)
        for name, command_flags in flags.items()
        for flag in command_flags & {"-o", "--plot", "--perfetto", "--save-steps"}
    }
    assert {(argv[0], argv[-1]) for argv, _ in COMMANDS.values()} == writing
    forcible = {name for name, command_flags in flags.items() if "--force" in command_flags}
    assert {name for name, _ in writing} == forcible


TWICE = {  # arguments before the place, and the place
    "compile": (["compile", "toy", "--modes", "gpu", "--conventions", "none", "-o"], "out"),
    "sweep": (["sweep", "toy", "--set", "pim_channels=8,16", "-o"], "out"),
    "trace": (["trace", "conv:1x64x7x7,64,1x1", "--format", "pim", "-o"], "out"),
    "kernels": (["trace", "fc:64,10", "--format", "accel-sim", "-o"], "out"),
    "decompose": (["decompose", "toy", "--decompose", "tucker:0.5", "-o"], "net.onnx"),
    "timeline": (["timeline", "toy", "--perfetto"], "t.json"),
    "page": (["timeline", "toy", "--plot"], "t.html"),
    "picture": (["timeline", "toy", "--plot"], "t.png"),
    "memory": (["memory", "toy", "-o"], "m.csv"),
    "select": (["select", "toy", "-o"], "p.json"),
    "export": (["export", "llmservingsim", "tiny-lm", "-o"], "e.json"),
    "run": (["run", "DIR", "-o"], "y.npy"),
    "report": (["report", "DIR", "-o"], "r.html"),
    "compare": (["compare", "DIR", "DIR", "-o"], "c.html"),
}


@pytest.fixture(scope="module")
def compiled(compiled_toy):
    return compiled_toy[0]


@pytest.mark.parametrize("command", long_but(["trace", "sweep"], list(TWICE)))
def test_what_a_command_wrote_it_replaces_but_nothing_else(capsys, tmp_path, compiled, command):
    argv, name = TWICE[command]
    argv = [str(compiled) if text == "DIR" else text for text in argv]
    place = tmp_path / name
    for _ in range(2):
        assert main([*argv, str(place), "--quiet"]) == 0, capsys.readouterr().err
    user_file = place / "notes" if place.is_dir() else place
    user_file.write_text("mine")
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert str(user_file.name) in error_line(capsys, 3, *argv, place)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    assert main([*argv, str(place), "--quiet", "--force"]) == 0
    assert not place.is_dir() or user_file.read_text() == "mine"
    capsys.readouterr()


def test_an_input_is_no_output(capsys, tmp_path, no_work):
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY")
    (tmp_path / "link.npy").symlink_to("x.npy")
    argv = ["run", "toy", "--input", f"input={tmp_path / 'x.npy'}", "-o", tmp_path / "link.npy"]
    assert "is an input too" in error_line(capsys, 3, *argv)


@pytest.mark.parametrize("content", ["{}", "[" * 200_000, '{"version": "pimflow-artifact/1", "sha256": 1}'])
def test_a_file_of_the_name_of_a_mark_says_nothing(capsys, tmp_path, no_work, content):
    (tmp_path / "interface.json").write_text(content)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("")
    assert "holds .git and 1 more" in error_line(capsys, 3, "compile toy -o", tmp_path)
    assert "interface.json is none" in error_line(capsys, 3, "compile toy -o", tmp_path, "--force")
    assert (tmp_path / ".git" / "HEAD").exists()


def test_the_folder_that_holds_everything(capsys, no_work):
    assert "/ holds " in error_line(capsys, 3, "compile toy -o /")


def test_names_that_are_not_utf8(capsys, tmp_path, monkeypatch, no_work):
    folder = tmp_path / os.fsdecode(b"b\xff")
    commands = (["compile", folder], ["compile", "toy", "-o", folder], ["memory", "toy", "-o", folder])
    for advice in ("write it in UTF-8", "rename it"):
        for argv in commands:
            assert main(list(map(str, argv))) == 2
            assert capsys.readouterr().err == f"pimflow: error: {tmp_path}/b\\udcff is not UTF-8; {advice}\n"
        folder.mkdir(exist_ok=True)
    assert main(["generate", "tiny-lm", "--prompt", os.fsdecode(b"a \xff"), "-n", "1"]) == 2
    assert capsys.readouterr().err == "pimflow: error: a \\udcff is not UTF-8; write it in UTF-8\n"
    monkeypatch.chdir(folder)
    assert "is not UTF-8; rename it" in error_line(capsys, 3, "compile toy -o out")
    assert not list(folder.iterdir())


def test_an_error_of_who_writes_names_the_directory(tmp_path):
    message = rf"^{tmp_path}/out/model.so: No space left$"
    with pytest.raises(ArtifactError, match=message), new_directory(tmp_path / "out", KIND) as scratch:
        raise ArtifactError(f"{scratch / 'model.so'}: No space left")


def test_no_name_at_all(capsys, no_work):
    assert "''" in error_line(capsys, 3, "compile toy -o", "")


def seals(directory: Path) -> dict[str, str]:
    """In place of an interface: a table of what was written."""
    return json.loads((directory / MARK).read_text())


KIND = DirectoryKind(name="what this test writes", mark=MARK, seals=seals)


def write_folder(target, *names: str) -> None:
    with new_directory(target, KIND) as scratch:
        for name in names:
            (scratch / name).write_text(name)
        digests = {name: file_sha256(scratch / name) for name in names}
        (scratch / MARK).write_text(json.dumps({**digests, MARK: None}))


def contents(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()} - {MARK}


@pytest.mark.parametrize("target", [".", "here"])
def test_the_folder_that_a_shell_works_in(tmp_path, monkeypatch, target):
    working_folder = tmp_path / "here"
    working_folder.mkdir()
    monkeypatch.chdir(working_folder)
    place = "." if target == "." else working_folder
    before = os.stat(".").st_ino
    check_target(place, KIND)
    for names in (["a", "b"], ["b", "c"]):
        write_folder(place, *names)
        assert contents(working_folder) == set(names) and (working_folder / "b").read_text() == "b"
        # or the shell would see nothing
        assert os.stat(".").st_ino == os.stat(working_folder).st_ino == before
    assert [p.name for p in tmp_path.iterdir()] == ["here"]


@pytest.mark.parametrize("moves", range(8))
def test_an_interrupt_while_a_folder_is_filled(tmp_path, monkeypatch, moves):
    monkeypatch.chdir(tmp_path)
    write_folder(".", "a", "old")
    rename, countdown = Path.rename, [moves]

    def rename_or_interrupt(self, target):
        countdown[0] -= 1
        if countdown[0] == -1:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_or_interrupt)
    try:
        write_folder(".", "a", "new")
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
        write_folder(link, name)
        assert link.is_symlink() and contents(target) == {name}
    assert {p.name for p in tmp_path.iterdir()} == {"disk", "link"}
    assert {p.name for p in target.parent.iterdir()} == {"target"}


def test_names_as_long_as_the_file_system_takes(tmp_path):
    for name in ("x" * 255, "層" * 85):
        write_folder(tmp_path / name, "a")
        assert contents(tmp_path / name) == {"a"}
