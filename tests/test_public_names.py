"""What `import pimflow` gives."""

import ast
import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pimflow
from pimflow.errors import UnknownNameError, UsageError

PUBLIC = [
    *("Compiled", "compile", "fuse", "infer", "relax_pipeline", "run", "search", "select", "simulate"),
    *("trace", "plan_memory", "trace_plan", "fuse_decomposed", "export_decomposed", "measure_allocations"),
    *("execute_fused", "search_network", "sweep", "GpuSpec", "PimSpec", "System", "system"),
    *("choose_channels", "choose_copy_ahead", "NetworkOptions", "Goal", "SelectionOptions", "Profiling"),
]


def test_every_public_name_is_there_and_listed():
    assert set(PUBLIC) <= set(pimflow.__all__) <= set(dir(pimflow))
    for name in pimflow.__all__:
        assert getattr(pimflow, name) is not None
    with pytest.raises(AttributeError, match="module 'pimflow' has no attribute 'kompile'"):
        pimflow.kompile  # noqa: B018


def test_type_checkers_and_editors_see_what_is_public():
    """They do not run `__getattr__`: they read the imports that only they do."""
    tree = ast.parse(Path(pimflow.__file__).read_text(encoding="utf-8"))
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "_TYPE_CHECKING"
    )
    read = {
        name.asname or name.name: (node.module, name.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert read == pimflow._LAZY and list(pimflow._LAZY) == pimflow.__all__
    assert (Path(pimflow.__file__).parent / "py.typed").exists()


def test_the_version_stands_in_one_place():
    root = Path(__file__).resolve().parents[1]
    said = [line for line in (root / "pyproject.toml").read_text().splitlines() if line.startswith("version")]
    assert said == [f'version = "{pimflow.__version__}"']
    assert f"\nversion: {pimflow.__version__}\n" in (root / "CITATION.cff").read_text()
    assert f"\n## {pimflow.__version__}\n" in (root / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("name", ["compile", "search", "sweep", "plan_memory", "simulate", "run", "trace"])
def test_help_shows_arguments_and_what_is_raised(name):
    function = getattr(pimflow, name)
    first = next(iter(inspect.signature(function).parameters))
    assert first in ("model", "models", "path", "directory", "layer")
    assert inspect.getdoc(function) and function.__module__.startswith("pimflow.commands.")


WRONG = [
    (lambda: pimflow.compile("toy", systm="pimflow"), "'systm'; did you mean system"),
    (lambda: pimflow.compile("toy", "out", objectve="edp"), "did you mean objective"),
    (lambda: pimflow.compile(), "compile: missing a required argument: 'model'; it takes model, args"),
    (lambda: pimflow.compile(5), "compile: model is a name of the zoo, a file, an .* not 5 .int."),
    (lambda: pimflow.compile("toy", 5), "compile: args is a directory to write, or the .* not 5 .int."),
    (lambda: pimflow.compile("toy", progress=5), "progress is a function"),
    (lambda: pimflow.compile("toy", emit_traces="yes"), "emit_traces is True or False, not 'yes' .str."),
    (lambda: pimflow.compile("toy", target=5), "target is the name of a target"),
    (lambda: pimflow.compile("toy", inputs=5), "inputs is a mapping of names to arrays"),
    (lambda: pimflow.compile("toy", system=5), "system is a System"),
    (lambda: pimflow.search("toy", solvr="dp"), "did you mean solver"),
    (lambda: pimflow.sweep("toy", ["pim_channels=4"]), "models is a list of networks"),
    (lambda: pimflow.sweep(["toy"], "pim_channels=4"), "settings are a list, such as"),
    (lambda: pimflow.sweep(["toy"], [4]), "a setting is a Setting or a text"),
    (lambda: pimflow.plan_memory("toy", capacity=5), "did you mean capacity_bytes"),
    (lambda: pimflow.simulate(5), "simulate: path is a file, not 5"),
    (lambda: pimflow.simulate("x.pim", timings="strict"), "did you mean timing"),
    (lambda: pimflow.run(5), "run: directory is a compiled directory"),
    (lambda: pimflow.run("out", input={}), "did you mean inputs"),
    (lambda: pimflow.run("out", [np.zeros((9, 9))]), r"or None, not \[array.*… \(list\)$"),
    (lambda: pimflow.trace("fc:4,4"), "trace: missing a required argument: 'out'"),
    (lambda: pimflow.fuse("toy", sytem=3), "unknown keyword 'sytem'"),
    (lambda: pimflow.relax_pipeline(sytem=3), "did you mean"),
    (lambda: pimflow.trace_plan("toy", sytem=3), "did you mean system"),
    (lambda: pimflow.search_network(None, fuze=True), "'fuze'; did you mean fuse"),
    (lambda: pimflow.export_decomposed("toy", "tucker:0.1", "x.onnx", fuze=True), "'fuze'"),
    (lambda: pimflow.select("toy", fuze=True), "'fuze'"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_arguments_get_one_line_that_says_what_to_do(number):
    call, told = WRONG[number]
    with pytest.raises((UsageError, UnknownNameError), match=told) as raised:
        call()
    assert "\n" not in str(raised.value)


@pytest.mark.long
def test_naming_what_is_public_loads_no_tvm():
    code = "import sys, pimflow; dir(pimflow), pimflow.NetworkOptions(reorder=True), pimflow.Goal()"
    check = "; pimflow.SelectionOptions(), pimflow.system(); sys.exit('tvm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code + check], check=False).returncode == 0


def test_what_is_listed_is_public():
    """Not what the file imports for itself."""
    listed = {name for name in dir(pimflow) if not name.startswith("__")}
    assert listed == set(pimflow.__all__)


@pytest.mark.long
def test_results_are_shown_in_a_line():
    search = pimflow.search("toy")
    memory = pimflow.plan_memory("toy")
    for result in (search, *search.programs().values(), memory, memory.plan, pimflow.fuse("toy")):
        assert type(result).__name__ in repr(result) and len(repr(result)) < 160
    assert memory.to_json()["pool_bytes"] == memory.plan.pool_bytes
    with pytest.raises(UsageError, match=r"model is a name, a file, .*, not SearchResult"):
        pimflow.search(search)


@pytest.mark.long
def test_notebooks_show_tables_and_lines_short_texts():
    system = pimflow.system()
    for spec in (system, system.gpu, system.pim):
        assert len(repr(spec)) < 200 and type(spec).__name__ in repr(spec)
        assert f"<td>{spec.name}</td>" in spec._repr_html_()
    # What results are stored under tells systems apart that look alike.
    other = dataclasses.replace(system, pim=dataclasses.replace(system.pim, gangs=system.pim.gangs * 2))
    timing = dict(system.pim.timing) | {"nRCDR": 99}
    slower = dataclasses.replace(system, pim=dataclasses.replace(system.pim, timing=timing))
    assert len({system.identity, other.identity, slower.identity}) == 3 and repr(system) == repr(slower)
    report = pimflow.trace_plan("toy").report()._repr_html_()
    assert report.startswith("<pre>toy on pimflow: ") and "PIM stream" in report
    rows = pimflow.sweep(["toy"], ["pim_channels=4"], modes="gpu")
    assert "<th>pim_channels</th>" in rows._repr_html_() and "<td>4</td>" in rows._repr_html_()


MADE_BY_USERS = ("Goal", "NetworkOptions", "Profiling", "SelectionOptions", "GpuSpec", "PimSpec", "System")


@pytest.mark.parametrize("name", MADE_BY_USERS)
def test_a_class_refuses_keywords_that_it_does_not_have(name):
    public_class = getattr(pimflow, name)
    (first, *_) = inspect.signature(public_class).parameters
    with pytest.raises(UnknownNameError, match=f"unknown keyword '{first}x'; did you mean {first}"):
        public_class(**{f"{first}x": 1})
    with pytest.raises(UsageError, match=f"{name}: .*; it takes {first}, "):
        public_class(1)


@pytest.mark.long
def test_an_old_name_is_taken_with_a_warning():
    with pytest.warns(DeprecationWarning, match="target_system= is now system="):
        assert pimflow.search("toy", target_system=pimflow.system(dtype="fp32")).system.dtype == "fp32"
    assert pimflow.search("toy", "pimflow", modes="gpu").system == pimflow.system()
