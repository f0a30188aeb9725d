"""Files that fuzzing found a fault with, and some mutants of every kind: one line on stderr, or none."""

import math
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import mutators
from targets import TARGETS, slug

CORPUS = sorted(path for path in (Path(__file__).parent / "corpus").iterdir())
QUICK = (".pimprog", ".pim", "PIM device", "GPU", "system", "cache")
MUTANTS = 8  # of weight 1


def target_of(path: Path) -> str:
    """The target whose mutant it is: `scripts/fuzz.py` names files by it."""
    name = path.name.rpartition(".")[0].rpartition(".")[0]
    return next(target for target in TARGETS if slug(target) == name)


@pytest.mark.parametrize("path", CORPUS, ids=[path.name for path in CORPUS])
def test_what_was_found(tmp_path, path):
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    assert not TARGETS[target_of(path)].check(copy)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in TARGETS]
)
def test_mutants(tmp_path, name):
    target, draw = TARGETS[name], random.Random(name)
    seeds = target.seeds(tmp_path)
    path = tmp_path / f"mutant{target.suffix}"
    for data in seeds[:3]:
        path.write_bytes(data)
        assert not target.check(path)
    for _ in range(math.ceil(MUTANTS * target.weight)):
        path.write_bytes(target.mutant(draw.choice(seeds), draw))
        assert not target.check(path)


def test_mutants_differ_and_are_the_same_in_every_run():
    data = b'{"x": [1, 2, {"y": "z"}]}'
    made = [mutators.mutant(data, random.Random(number), ".json") for number in range(50)]
    assert made == [mutators.mutant(data, random.Random(number), ".json") for number in range(50)]
    assert len(set(made)) > 25
