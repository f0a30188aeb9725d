"""Is no file of others lost, whatever lies in the folder of a command, and whenever it is killed?"""

import json
import os
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples

from pimflow.compiler import artifact
from pimflow.compiler.interface import INTERFACE, Interface
from pimflow.errors import ArtifactError
from pimflow.host import directories
from pimflow.host.directories import check_target, contents, new_directory
from pimflow.host.files import file_sha256

KIND = artifact.KIND
NAMES = ("plan.json", "regions.json", "model.so", "programs/a.pimprog", "programs/b.pimprog")
REPORTS = ("report.json", "report.html")
FOREIGN = (
    *(".git/HEAD", ".git/objects/00/11", "README.md", "y.npy", "src/main.c", "programs/mine", "traces/x.pim"),
    *("programs/a.pimprog", "plan.json", "model.so", "report.html", "interface.json", ".hidden", "programs"),
)
KILLED = 9


def files(directory: Path) -> dict[str, str]:
    """What is no folder, by its path: what it holds, or where a link leads."""
    contents = {}
    for folder, folders, names in os.walk(directory):
        for name in (*folders, *names):
            path = Path(folder, name)
            if path.is_symlink():
                contents[str(path.relative_to(directory))] = f"-> {os.readlink(path)}"
            elif path.is_file():
                contents[str(path.relative_to(directory))] = path.read_bytes().decode()
    return contents


def visible_files(directory: Path) -> dict[str, str]:
    """The same without what a killed run left, which is hidden."""
    return {name: text for name, text in files(directory).items() if not name.startswith(".interface.json.")}


def write(target: Path, names: list[str], text: str, *, force: bool = False) -> None:
    """Write files as `artifact.write` does, reports too."""
    with new_directory(target, KIND, force=force) as scratch:
        for name in (*names, *REPORTS):
            (scratch / name).parent.mkdir(exist_ok=True)
            (scratch / name).write_text(f"{text} {name}")
        digests = {name: file_sha256(scratch / name) for name in names}
        interface = Interface(inputs={}, targets=("c",), sha256=digests)
        (scratch / INTERFACE).write_text(interface.to_json())


def run_until_move(moves: int, act) -> bool:
    """Do something in a process that dies at the move of that number; whether it came so far."""
    child = os.fork()
    if child == 0:
        code = 0
        try:
            countdown, move = [moves], directories._move

            def dies(source, place, name):
                countdown[0] -= 1
                if countdown[0] < 0:
                    os._exit(KILLED)
                move(source, place, name)

            directories._move = dies
            act()
        except ArtifactError:
            code = 3
        except BaseException:
            code = 1
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 3, KILLED)
    return code == KILLED


@contextmanager
def working_in(directory: Path):
    before = os.getcwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


names = st.lists(st.sampled_from(NAMES), unique=True, max_size=4)
moves = st.integers(0, 14)
steps = st.one_of(
    st.tuples(st.just("foreign"), st.sampled_from(FOREIGN)),
    st.tuples(st.just("link to a file"), st.sampled_from(FOREIGN)),
    st.tuples(st.just("link to a folder"), st.sampled_from(("programs", "src", "x"))),
    st.tuples(st.just("ours"), names),
    st.tuples(st.just("half"), names, moves),
    st.tuples(st.just("edit"), st.sampled_from(NAMES)),
    st.tuples(st.just("lose"), st.sampled_from((*NAMES, INTERFACE))),
    st.tuples(st.just("version"), st.sampled_from(("pimflow-artifact/0", "pimflow-artifact/2", "x", 1))),
    st.tuples(st.just("mark"), st.sampled_from(("{}", "[" * 10_000, "\0", '{"sha256": 3}'))),
)
writes = st.tuples(names, st.booleans(), st.none() | moves)


class Folder:
    """A folder in some state, and the files in it that pimflow did not write or that were changed."""

    def __init__(self, root: Path):
        self.root, self.place, self.outside = root, root / "out", root / "elsewhere"
        self.theirs: dict[str, str] = {}  # by path, of `root`
        (self.outside / "folder").mkdir(parents=True)
        self.keep(self.outside / "file", "outside")
        self.keep(self.outside / "folder" / "a.pimprog", "outside")

    def keep(self, path: Path, text: str) -> None:
        path.write_text(text)
        self.theirs[str(path.relative_to(self.root))] = text

    def keep_all(self) -> None:
        """Nothing says any more that pimflow wrote what is there."""
        self.theirs |= {f"{self.place.name}/{name}": text for name, text in files(self.place).items()}

    def step(self, kind: str, subject, *extra) -> None:
        """Bring it into another state; nothing where that is none."""
        if kind in ("ours", "half"):
            self.write(subject, force=False, dies_at=extra[0] if extra else None)
            return
        self.place.mkdir(exist_ok=True)
        path = self.place / (INTERFACE if kind in ("version", "mark") else subject)
        key = str(path.relative_to(self.root))
        inside = os.path.realpath(path.parent).startswith(os.path.realpath(self.place))
        if kind.startswith(("foreign", "link")) and inside and not os.path.lexists(path):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError:  # a file lies there
                return
            if kind == "foreign":
                self.keep(path, f"theirs {subject}")
            else:
                target = self.outside / kind.removeprefix("link to a ")
                path.symlink_to(target)
                self.theirs[key] = f"-> {target}"
        elif kind == "edit" and path.is_file() and not path.is_symlink() and inside:
            self.keep(path, "edited")
        elif kind == "lose" and path.is_file() and not path.is_symlink() and inside:
            path.unlink()
            self.theirs.pop(key, None)
            if subject == INTERFACE:
                self.keep_all()
        elif kind in ("version", "mark") and key not in self.theirs and not path.is_symlink():
            if not path.is_file():
                return
            try:
                text = subject
                if kind == "version":
                    text = json.dumps(json.loads(path.read_text()) | {"version": subject})
            except (ValueError, RecursionError, TypeError):
                return
            path.write_text(text)
            if not str(subject).startswith("pimflow-artifact/"):
                self.keep_all()

    def write(self, names: list[str], *, force: bool, dies_at: int | None) -> None:
        """Write there; whatever comes of it, nothing of others is lost, and the old or the new is whole."""
        try:
            check_target(self.place, KIND, force=force)  # puts back what a killed run had moved
            there = contents(self.place, KIND) if self.place.exists() else directories.Contents()
        except ArtifactError:
            there = None
        before = visible_files(self.place)
        died, is_refused = False, False
        if dies_at is not None:
            died = run_until_move(dies_at, lambda: write(self.place, names, "new", force=force))
        else:
            try:
                write(self.place, names, "new", force=force)
            except ArtifactError:
                is_refused = True
        if there is not None and force:  # which changed files may be replaced
            for name in there.changed:
                if not is_refused:
                    self.theirs.pop(f"out/{name}", None)
        self.require_theirs()
        after = visible_files(self.place)
        if is_refused:
            assert after == before
        elif dies_at is None:
            now = contents(self.place, KIND)
            assert set(now.written) == {*names, *REPORTS, INTERFACE} and not now.changed
        elif died:
            with suppress(ArtifactError):
                check_target(self.place, KIND, force=True)
            self.require_theirs()
            assert not [name for name in os.listdir(self.place) if ".old." in name] or not self.place.exists()
            new = {name: f"new {name}" for name in (*names, *REPORTS)}
            after = visible_files(self.place)
            assert after == before or new.items() <= after.items()

    def require_theirs(self) -> None:
        now = {f"{d.name}/{name}": t for d in (self.place, self.outside) for name, t in files(d).items()}
        assert {name: now.get(name) for name in self.theirs} == self.theirs


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(steps, max_size=8), st.lists(writes, min_size=1, max_size=3), st.booleans(), st.booleans())
def test_nothing_of_others_is_lost(steps, writes, link, inside):
    with tempfile.TemporaryDirectory() as root:
        folder = Folder(Path(root))
        if link:
            (folder.root / "real").mkdir()
            folder.place.symlink_to("real")
        for step in steps:
            folder.step(*step)
        folder.place.mkdir(exist_ok=True)
        with working_in(folder.place if inside else folder.root):
            for names, force, dies_at in writes:
                folder.write(names, force=force, dies_at=dies_at)
