"""What `import pimflow` gives, and what it says of names that moved."""

import importlib
import subprocess
import sys

import pytest

import pimflow
from pimflow import moved

PUBLIC = [
    *("Compiled", "compile", "fuse", "infer", "relax_pipeline", "run", "search", "select", "simulate"),
    *("trace", "plan_memory", "trace_plan", "fuse_decomposed", "export_decomposed", "measure_allocations"),
    *("execute_fused", "search_network", "sweep", "GpuSpec", "PimSpec", "System", "system"),
    *("NetworkOptions", "Goal", "SelectionOptions", "Profiling"),
]


def found(name: str) -> object:
    """What a dotted name is: a module, or what one has."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(module), attribute)


def test_every_public_name_is_there_and_listed():
    assert set(PUBLIC) <= set(pimflow.__all__) <= set(dir(pimflow))
    for name in pimflow.__all__:
        assert getattr(pimflow, name) is not None
    with pytest.raises(AttributeError, match="module 'pimflow' has no attribute 'kompile'"):
        pimflow.kompile  # noqa: B018


def test_naming_what_is_public_loads_no_tvm():
    code = "import sys, pimflow; dir(pimflow), pimflow.NetworkOptions(reorder=True), pimflow.Goal()"
    check = "; pimflow.SelectionOptions(), pimflow.system(); sys.exit('tvm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code + check], check=False).returncode == 0


@pytest.mark.parametrize("name", sorted(moved.MOVED))
def test_a_name_that_moved_says_where_it_went(name):
    where = moved.MOVED[name]
    assert found(where) is not None
    package, _, leaf = name.rpartition(".")
    with pytest.raises(ImportError, match=rf"^'{name}' has moved: it is '{where}' now$"):
        importlib.import_module(name)
    with pytest.raises(ImportError, match=f"it is '{where}' now"):
        exec(f"from {package} import {leaf}")


@pytest.mark.parametrize(
    "name", [name for name in moved.MOVED if name.rpartition(".")[0] in ("pimflow", "pimflow.api")]
)
def test_an_attribute_that_moved_says_where_it_went(name):
    package, _, leaf = name.rpartition(".")
    with pytest.raises(AttributeError, match=f"'{name}' has moved: it is '{moved.MOVED[name]}' now"):
        getattr(importlib.import_module(package), leaf)
    assert not hasattr(importlib.import_module(package), leaf)
