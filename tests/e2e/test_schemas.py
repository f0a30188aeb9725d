"""Do compiled directories keep to the JSON schemas of docs/schemas?"""

import json
from pathlib import Path

import pytest

jsonschema = pytest.importorskip("jsonschema")
SCHEMAS = Path(__file__).resolve().parents[2] / "docs" / "schemas"
FILES = {
    "plan": "plan.json",
    "report": "report.json",
    "interface": "interface.json",
    "timeline": "timeline.json",
    "pimprog": "programs/*.pimprog",
}
OPEN = {"options"}  # of any form


@pytest.fixture(scope="module")
def directory(compiled_toy):
    return compiled_toy[0]


def validator(name: str):
    return jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{name}.json").read_text()))


def test_every_schema_is_of_a_file_and_is_one():
    assert {path.stem for path in SCHEMAS.glob("*.json")} == set(FILES)
    for name in FILES:
        check = validator(name)
        check.check_schema(check.schema)


@pytest.mark.parametrize("name", FILES)
def test_what_is_written_keeps_to_its_schema(name, directory):
    """So it does, and no field that is described may be missing or hold something else."""
    check = validator(name)
    trees = [json.loads(path.read_text()) for path in directory.glob(FILES[name])]
    assert trees
    for tree in trees:
        check.validate(tree)
        for key in (tree.keys() & check.schema["properties"].keys()) - OPEN:
            assert not check.is_valid(tree | {key: {"no": ["such", "value"]}}), key
        for key in check.schema["required"]:
            assert not check.is_valid({k: value for k, value in tree.items() if k != key}), key


def test_a_plan_of_another_mode_is_refused(directory):
    plan = json.loads((directory / "plan.json").read_text())
    plan["choices"][0]["mode"] = "TPU"
    assert not validator("plan").is_valid(plan)
