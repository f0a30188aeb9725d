"""Does every module import only what lies below it?

The house is that of docs/architecture.md: a *room* is a package of pimflow, or a module beside the packages.
A room imports only rooms of lower layers, none beside it; inside a room, folders import one another along
`INSIDE`. Nothing here runs the modules: imports are read from the source, those inside functions included.
"""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Folder to the package that it is imported as.
FOLDERS = {
    "python/pimflow": "pimflow",
    "relay_passes": "pimflow.relay_passes",
    "pim_backend": "pimflow.pim_backend",
    "simulators": "pimflow.simulators",
}
# Lowest first; the empty name is the package itself.
LAYERS = (
    ("errors", "weight_types"),
    ("core", "host", "zoo"),
    ("hardware", "memory", "primitives"),
    ("relay_passes", "pim_backend", "simulators"),
    ("frontend",),
    ("fusion",),
    ("placement",),
    ("compiler",),
    ("decomposition", "primitive_selection", "report_page"),
    ("commands",),
    ("tvm_extension",),
    ("", "__main__"),
)
# Of a room, each folder and the folders that it imports; "." is the room's own files.
# The families of commands, and what each uses beside what all share.
FAMILIES = {
    "catalogue": set(),
    "compile": {"simulate"},
    "fuse": set(),
    "generate": set(),
    "memory": set(),
    "pages": set(),
    "primitives": {"profile"},
    "profile": set(),
    "run": set(),
    "serve": {"generate"},
    "simulate": set(),
    "sweep": {"compile", "profile"},
}
INSIDE = {
    "commands": {
        ".": {"command_line", *FAMILIES},
        "command_line": {"shared"},
        **{family: {"shared", "command_line", *others} for family, others in FAMILIES.items()},
    },
    "compiler": {"c_code": {"."}, "kernel_checks": {"."}, "measurement": {"."}},
    "fusion": {"kernels": {"."}},
    "pim_backend": {"runtime": {"programs"}},
    "placement": {".": {"candidates", "costs", "solvers"}, "candidates": {"costs", "solvers"}},
    "primitives": {"kernels": {"."}},
    "relay_passes": {
        "canonical": {"."},
        "regions": {"."},
        "splits": {"regions", "."},
        "pim": {"."},
        "decomposition": {"canonical", "kernels", "regions", "."},
        "kernels": {"regions", "schedules", "."},
        "memory": {"regions", "schedules", "."},
        "schedules": {"."},
        "c_kernels": {"schedules", "."},
    },
    "simulators": {
        ".": {"pim", "gpu"},
        "accel_sim": {".", "pim", "gpu"},
        "ramulator": {".", "pim"},
        "exports": {".", "pim"},
        "serving": set(),
    },
    "tvm_extension": {".": {"relay"}},
    "zoo": {".": {"foreign", "language"}},
}
# By dotted name without ``pimflow.``; a folder stands for all that is in it but what `WITH_TVM` names.
WITHOUT_TVM = (
    *("errors", "core", "host", "zoo", "hardware", "memory", "primitives"),
    *("simulators", "fusion", "placement", "report_page"),
    *("pim_backend.programs", "compiler.artifact", "compiler.interface", "tvm_extension.install"),
    *("commands.main", "commands.command_line", "commands.parser"),
    *("decomposition.factors", "decomposition.ranks", "decomposition.request", "decomposition.factorisation"),
    *("decomposition.alternatives", "decomposition.alternative_search"),
    *("decomposition.report", "primitive_selection.problem"),
    *("primitive_selection.options", "primitive_selection.report", "compiler.c_report"),
    *(
        "primitive_selection.search",
        "commands.shared.report",
        "commands.shared.memory_report",
        "commands.shared.plan_report",
        "commands.shared.report_text",
        "commands.compile.make_report",
        "commands.compile.explain",
        "commands.shared.options",
        "commands.compile.timeline",
        "commands.simulate.trace",
        "commands.simulate.trace_formats",
        "commands.simulate.kernel_traces",
        "commands.fuse.fuse",
        "commands.fuse.fusion_report",
        "commands.shared.front",
        "commands.shared.layer_details",
        "commands.pages.pages",
        "commands.generate.generation",
        "commands.serve.report",
        "commands.serve.request_traces",
        "commands.serve.step_grid",
    ),
)
WITH_TVM = ("fusion.kernels", "primitives.kernels")
BARE = ("relay_passes", "pim_backend", "simulators", "python")


def sources(folder: str):
    return sorted(p for p in (ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts)


def module_name(path: Path) -> str:
    for folder, package in FOLDERS.items():
        if path.is_relative_to(ROOT / folder):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            return ".".join((package, *parts)).removesuffix(".__init__")
    return path.stem


PACKAGE_FILES = [path for folder in FOLDERS for path in sources(folder)]
MODULES = {module_name(path): path for path in PACKAGE_FILES}
# Beside the package: how a command starts.
OUTSIDE = {path.stem: path for path in sorted((ROOT / "python").glob("*.py"))}


BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # fields of statements that have statements


@functools.cache
def import_statements(source: str) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """All of `source`, those inside functions too."""
    nodes, statements = [], [ast.parse(source)]
    while statements:
        node = statements.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            nodes.append(node)
        for block in BLOCKS:
            statements += getattr(node, block, [])
    return tuple(sorted(nodes, key=lambda node: node.lineno))


def imports(source: str, package: str = "") -> list[tuple[str, int]]:
    """Absolute dotted names that `source` imports, with their lines; ``from a import b`` gives ``a.b``."""
    names = []
    for node in import_statements(source):
        if isinstance(node, ast.Import):
            names += [(alias.name, node.lineno) for alias in node.names]
        else:
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, base] if base else up)
            names += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
    return names


def room(module: str) -> str:
    """``pimflow.core.plan`` is in room ``core``; the package itself is the room without a name."""
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 and f"pimflow.{pieces[1]}" in MODULES else ""


def folder(module: str) -> str:
    """The folder of its room that a module is in; "." for the room's own files."""
    pieces = module.split(".")
    nested = ".".join(pieces[:3])
    return pieces[2] if len(pieces) > 2 and MODULES.get(nested, ROOT).name == "__init__.py" else "."


def level(name: str) -> int:
    return next((index for index, layer in enumerate(LAYERS) if name in layer), -1)


def is_under(module: str, names: tuple[str, ...]) -> bool:
    return any(module == f"pimflow.{name}" or module.startswith(f"pimflow.{name}.") for name in names)


def faults(module: str, source: str, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of `module`."""
    here = room(module)
    package = module if is_package else module.rpartition(".")[0]
    light = is_under(module, WITHOUT_TVM) and not is_under(module, WITH_TVM)
    wrong = []
    for name, line in imports(source, package):
        root, there = name.split(".")[0], room(name)
        place = f"{module}:{line}: {name}"
        if root in BARE:
            wrong.append(f"{place}: import it as pimflow.{root}")
        elif root in ("tvm", "topi"):
            if light:
                wrong.append(f"{place}: '{module}' is free of TVM")
        elif root != "pimflow":
            continue
        elif there == here:
            inner, outer = folder(module), folder(name)
            if inner != outer and outer not in INSIDE.get(here, {}).get(inner, ()):
                wrong.append(f"{place}: in '{here}', '{inner}' does not import '{outer}'")
        elif here == "zoo" and there not in LAYERS[0]:
            wrong.append(f"{place}: the zoo needs only rooms of the lowest layer")
        elif level(there) >= level(here):
            wrong.append(f"{place}: '{there}' does not lie below '{here}'")
        elif light and is_under(name, WITH_TVM) and source_level(source, line):
            wrong.append(f"{place}: '{module}' is free of TVM, which that imports")
    return wrong


def source_level(source: str, line: int) -> bool:
    """Whether the import in `line` runs when the module is imported."""
    return any(n.lineno == line for n in ast.parse(source).body if isinstance(n, ast.Import | ast.ImportFrom))


def script_faults(name: str, source: str) -> list[str]:
    """Scripts stand outside: they import nothing private, and no folder of the repository by itself."""
    wrong = []
    for imported, line in imports(source):
        pieces = imported.split(".")
        if pieces[0] in BARE:
            wrong.append(f"{name}:{line}: {imported}: import it as pimflow.{pieces[0]}")
        if pieces[0] == "pimflow" and any(p.startswith("_") and not p.endswith("__") for p in pieces):
            wrong.append(f"{name}:{line}: {imported} is private")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                continue
            wrong.append(f"{name}:{node.lineno}: .{node.attr} is private")
    return wrong


def test_imports_point_downwards():
    wrong = [fault for m, p in MODULES.items() for fault in faults(m, p.read_text(), p.name == "__init__.py")]
    assert wrong == []


def test_no_two_files_import_one_another():
    """No circle of modules, however long; what is imported inside functions counts."""
    reads = {}
    files = MODULES | OUTSIDE
    for module, path in files.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        names = [name for name, _ in imports(path.read_text(), package)]
        modules = {name if name in files else name.rpartition(".")[0] for name in names}
        reads[module] = (modules & files.keys()) - {module}
    finished: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " imports ".join((*above[above.index(module) :], module))
        if module not in finished:
            for read in sorted(reads[module]):
                visit(read, (*above, module))
            finished.add(module)

    for module in sorted(reads):
        visit(module, ())


@pytest.mark.long
def test_scripts_use_only_what_is_public():
    assert [f for path in sources("scripts") for f in script_faults(path.name, path.read_text())] == []


def test_tests_import_the_installed_package():
    mentions = re.compile(rf"(from|import) +({'|'.join(BARE)})\b")  # few files have to be parsed
    wrong = [
        (path.name, name)
        for path in sources("tests")
        if mentions.search(text := path.read_text())
        for name, _ in imports(text)
        if name.split(".")[0] in BARE
    ]
    assert wrong == []


def test_what_needs_pytorch_is_marked():
    """`.ci/run` runs the others without it, and then these alone."""
    sources = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    asking = {path.name for path, text in sources.items() if 'importorskip("torch"' in text}
    assert asking == {path.name for path, text in sources.items() if "mark.torch" in text}


def test_every_room_has_a_layer():
    rooms = [name for layer in LAYERS for name in layer]
    assert len(rooms) == len(set(rooms))
    assert {room(module) for module in MODULES} == set(rooms), "name its layer in LAYERS"


def test_no_package_hands_on_the_name_of_one_of_its_files():
    """Which of the two an import gets would depend on what was imported before."""
    wrong = []
    for module, path in MODULES.items():
        if path.name == "__init__.py" and module != "pimflow":
            files = {name.rpartition(".")[2] for name in MODULES if name.rpartition(".")[0] == module}
            handed = {
                alias.asname or alias.name
                for node in ast.parse(path.read_text()).body
                if isinstance(node, ast.ImportFrom) and node.module != module
                for alias in node.names
            }
            wrong += [f"{module}: {name}" for name in sorted(files & handed)]
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("pimflow.core.plan", "from pimflow.placement import search"),
        ("pimflow.core.plan", "from pimflow import simulators"),
        ("pimflow.core.plan", "import pimflow.relay_passes.flat"),
        ("pimflow.core.plan", "from ..zoo import weights"),
        ("pimflow.core.plan", "from .. import commands"),
        ("pimflow.core.plan", "import pimflow"),
        ("pimflow.compiler.verification", "from pimflow import compile"),
        ("pimflow.core.plan", "import tvm"),
        ("pimflow.hardware.pim", "from tvm import relax"),
        ("pimflow.hardware.pim", "from pimflow.memory import plan"),
        ("pimflow.simulators.pim.timing", "def f():\n    import tvm.relax"),
        ("pimflow.simulators.pim.timing", "from pimflow.pim_backend.programs import lowering"),
        ("pimflow.simulators.pim.timing", "from pimflow.simulators.gpu import model"),
        ("pimflow.simulators.pim.timing", "from pimflow.simulators.installed import run"),
        ("pimflow.pim_backend.runtime.codegen", "from pimflow.relay_passes.flat import shape"),
        ("pimflow.pim_backend.programs.layout", "from pimflow.pim_backend.runtime import codegen"),
        ("pimflow.relay_passes.flat", "from pimflow.placement.solvers.evaluate import evaluate"),
        ("pimflow.relay_passes.splits.split_mddp", "from pimflow.relay_passes.canonical import push_bias"),
        ("pimflow.placement.solvers.plan_search", "from pimflow.compiler import verification"),
        ("pimflow.placement.solvers.plan_search", "from pimflow.placement.candidates import tasks"),
        ("pimflow.placement.best_plan", "from pimflow.fusion.kernels import execution"),
        ("pimflow.decomposition.skips", "from pimflow.primitive_selection import layers"),
        ("pimflow.compiler.verification", "from pimflow.commands.compile.compile import compile"),
        ("pimflow.memory.exact", "from pimflow.simulators.pim.timing import time_program"),
        ("pimflow.memory.exact", "import tvm"),
        ("pimflow.zoo.weights", "from pimflow.core.region import Region"),
        ("pimflow.zoo.weights", "from ..hardware import system"),
        ("pimflow.commands.compile.compile", "import simulators"),
        ("pimflow.commands.compile.compile", "from relay_passes.flat import shape"),
        ("pimflow.commands.main", "from pim_backend import programs"),
        ("pimflow.commands.main", "from pimflow.tvm_extension import install"),
    ],
)
def test_a_violation_is_seen(module, line):
    assert len(faults(module, line)) == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("pimflow.core.plan", "from pimflow.errors import PlanError"),
        ("pimflow.hardware.pim", "from pimflow.core.region import ELEMENT_BYTES"),
        ("pimflow.relay_passes.flat", "import tvm"),
        ("pimflow.zoo.weights", "from ..errors import ModelError\nfrom .shapes import Shape"),
        ("pimflow.placement.candidates.tasks", "from pimflow.simulators.pim.timing import time_program"),
        ("pimflow.commands.compile.compile", "from pimflow import compiler, frontend, zoo"),
        ("pimflow.fusion.kernels.execution", "import tvm"),
        ("pimflow.simulators.pim.timing", "import tvm_ffi"),
    ],
)
def test_what_is_allowed_passes(module, line):
    assert faults(module, line) == []


@pytest.mark.parametrize(
    "line",
    [
        "from pimflow.commands import _search",
        "import pimflow._native",
        "import simulators.timing",
        "from pimflow import commands\ncommands._search()",
    ],
)
def test_a_script_violation_is_seen(line):
    assert len(script_faults("script.py", line)) == 1


@pytest.mark.long
def test_parts_without_tvm_do_not_load_it():
    """What the source cannot show: importing the low layers leaves TVM out of the process."""
    names = (
        *("zoo", "placement", "simulators.pim.timing", "memory", "fusion", "primitive_selection.problem"),
        *("commands.main", "commands.simulate.trace", "commands.simulate.simulate", "commands.fuse.fuse"),
        *("commands.compile.timeline", "commands.compile.explain", "commands.shared.report"),
        *("commands.shared.options", "commands.shared.report_text"),
    )
    modules = ", ".join(f"pimflow.{name}" for name in names)
    heavy = {"tvm", "tvm_ffi", "torch"}
    code = f"import sys, pimflow, {modules}; sys.exit(not {heavy}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd="/").returncode == 0


def test_every_folder_with_sources_is_a_package():
    """``setup.py`` installs the folders that have an ``__init__.py``."""
    for path in PACKAGE_FILES:
        assert (path.parent / "__init__.py").exists(), path.parent
