"""Files that fuzzing found a fault with, and some mutants of every kind: one line on stderr, or none."""

import functools
import math
import random
import signal
import subprocess
import sys
from pathlib import Path

import mutators
import pytest
from kill_commands import early_outcome as outcome
from targets import TARGETS, slug

CORPUS = sorted(path for path in (Path(__file__).parent / "corpus").iterdir())
QUICK = (".pimprog", ".pim", "PIM device", "GPU", "system", "cache")
MUTANTS = 8  # of weight 1


def target_of(path: Path) -> str:
    """The target whose mutant it is: `scripts/fuzz.py` names files by it."""
    name = path.name.rpartition(".")[0].rpartition(".")[0]
    return next(target for target in TARGETS if slug(target) == name)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A folder for each target, so that what its files are read with is compiled once."""
    return functools.cache(lambda name: tmp_path_factory.mktemp(slug(name)))


@pytest.mark.parametrize("path", CORPUS, ids=[path.name for path in CORPUS])
def test_what_was_found(folder_of, path):
    copy = folder_of(target_of(path)) / path.name
    copy.write_bytes(path.read_bytes())
    assert not TARGETS[target_of(path)].check(copy)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in TARGETS]
)
def test_mutants(folder_of, name):
    target, draw = TARGETS[name], random.Random(name)
    seeds = target.seeds(folder_of(name))
    path = folder_of(name) / f"mutant{target.suffix}"
    for data in seeds[:3]:
        path.write_bytes(data)
        assert not target.check(path)
    for _ in range(math.ceil(MUTANTS * target.weight)):
        path.write_bytes(target.mutant(draw.choice(seeds), draw))
        assert not target.check(path)


def test_mutants_differ_and_are_the_same_in_every_run():
    data = b'{"x": [1, 2, {"y": "z"}]}'
    mutants = [mutators.mutant(data, random.Random(number), ".json") for number in range(50)]
    assert mutants == [mutators.mutant(data, random.Random(number), ".json") for number in range(50)]
    assert len(set(mutants)) > 25


@pytest.mark.long
def test_forked_processes_run_kernels():
    """TVM's threads are not in a process that is forked: kernels of several waited for them for ever."""
    scripts = Path(__file__).parents[2] / "scripts"
    code = f"""
import contextlib, io, sys
sys.path.insert(0, {str(scripts)!r})
import fuzz
from pimflow.commands.main import main

def compiled():
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["compile", "glyphs", "--modes", "gpu", "--quiet", "--jobs", "1"]) == 0

compiled()
child = fuzz.FORK.Process(target=compiled)
child.start()
child.join(60)
child.kill()
assert child.exitcode == 0, child.exitcode
"""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TVM_NUM_THREADS", raising=False)
        subprocess.run([sys.executable, "-c", code], check=True)


def test_what_an_early_interrupt_did_is_named():
    """scripts/kill_commands.py --start-up called everything that it did not know a traceback."""
    assert outcome(130, "pimflow: interrupted\n") == "130 and one line"
    assert outcome(-signal.SIGINT, "") == "no word, by the signal"
    assert outcome(0, "") == "through"
    assert outcome(1, "Traceback (most recent call last):\n  …\nKeyboardInterrupt\n") == "Python's traceback"
    assert outcome(1, "Fatal Python error: init_import_site") == "Python's traceback"
    for code, said in ((1, ""), (130, ""), (0, "pimflow: interrupted\n"), (-signal.SIGSEGV, "")):
        assert outcome(code, said) == "other"
