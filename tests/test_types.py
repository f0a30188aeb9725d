"""What mypy checks, and that it and other people's checkers find the package's types."""

import ast
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
ROOT_TEXT, MYPY_PATH = "$MYPY_CONFIG_FILE_DIR", SETTINGS["mypy"]["mypy_path"]
MYPY_ROOTS = [Path(path.replace(ROOT_TEXT, str(ROOT))) for path in MYPY_PATH]


def package_folders() -> dict[str, str]:
    """`FOLDERS` of setup.py: what is imported as which package."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FOLDERS":
            return ast.literal_eval(node.value)
    raise AssertionError("setup.py has no FOLDERS")


def mypy_paths(package: str) -> list[Path]:
    places = [root.joinpath(*package.split(".")) for root in MYPY_ROOTS]
    return [place.resolve() for place in places if place.exists()]


def test_mypy_finds_every_folder_of_the_package():
    assert {name: mypy_paths(name) for name in package_folders()} == {
        "pimflow": [ROOT / "python/pimflow", ROOT / ".ci/types/pimflow"],
        **{name: [ROOT / folder] for name, folder in package_folders().items() if name != "pimflow"},
    }


def test_what_mypy_checks_is_there():
    for name in SETTINGS["mypy"]["packages"]:
        folder, _, module = name.rpartition(".")
        places = mypy_paths(name) + [place / f"{module}.py" for place in mypy_paths(folder)]
        assert any(place.exists() for place in places), name


def test_the_package_says_that_it_is_typed():
    assert "py.typed" in SETTINGS["setuptools"]["package-data"]["pimflow"]
    assert (ROOT / "python/pimflow/py.typed").exists()
