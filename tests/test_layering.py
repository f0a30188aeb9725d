"""Does every module import only what lies below it?

The layers are those of docs/architecture.md: a module may import its own layer where `PEERS` lets it,
and every layer below. Nothing here runs the modules: imports are read from the source, those inside
functions included.
"""

import ast
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
# Lowest first.
LAYERS = (
    ("errors", "core", "hardware", "interrupts", "native", "without_torch", "decomposition", "primitives"),
    ("primitive_kernels",),
    ("relay_passes", "pim_backend", "simulators", "memory", "zoo"),
    ("deep_fusion",),
    ("placement",),
    (
        "frontend",
        "decomposed",
        "primitive_profiles",
        "c_code",
        "targets",
        "kernels",
        "kernel_builds",
        "cuda_profiler",
        "pipeline",
        "execution",
        "compilation",
        "measure",
        "network_kernels",
        "artifact",
        "kernel_traces",
        "tracing",
        "verify",
        "output_error",
        "explanation",
        "report",
        "timeline",
        "devices",
        "profilers",
        "simulation",
        "smaller_pool",
        "layer_order",
        "network_memory",
        "network_search",
        "allocation",
        "operator_memory",
        "fusion",
        "fused_execution",
        "inference",
    ),
    (
        "api",
        "commands",
        "published",
        "cli",
        "__main__",
        "profiling",
        "design_space",
        "design_settings",
        "primitive_selection",
        "selection_figures",
        "relay",
        "pass_options",
        "tvm_extension",
    ),
)
# Below these every part of a layer stands alone.
SEPARATE = LAYERS[2]
WITHOUT_TVM = (
    "errors",
    "core",
    "hardware",
    "interrupts",
    "native",
    "without_torch",
    "decomposition",
    "primitives",
    "simulators",
    "memory",
    "zoo",
    "deep_fusion",
    "placement",
    "explanation",
    "report",
    "devices",
    "cli",
    "commands",
    "timeline",
    "tracing",
    "artifact",
    "simulation",
    "kernel_traces",
    "fusion",
    "primitive_selection",
    "selection_figures",
)
BARE = ("relay_passes", "pim_backend", "simulators", "python")


def sources(folder: str):
    return sorted(p for p in (ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts)


def module_name(path: Path) -> str:
    for folder, package in FOLDERS.items():
        if path.is_relative_to(ROOT / folder):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            return ".".join((package, *parts)).removesuffix(".__init__")
    return path.stem


def imports(source: str, package: str = "") -> list[tuple[str, int]]:
    """Absolute dotted names that `source` imports, with their lines; ``from a import b`` gives ``a.b``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, base] if base else up)
            found += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
    return found


def part(module: str) -> str:
    """``pimflow.core.plan`` is part ``core``; the package itself has none."""
    pieces = module.split(".")
    return pieces[1] if pieces[0] == "pimflow" and len(pieces) > 1 else ""


def level(name: str) -> int:
    return next((index for index, layer in enumerate(LAYERS) if name in layer), -1)


def faults(module: str, source: str, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of `module`."""
    here = part(module)
    package = module if is_package else module.rpartition(".")[0]
    wrong = []
    for name, line in imports(source, package):
        root, there = name.split(".")[0], part(name)
        place = f"{module}:{line}: {name}"
        if root in BARE:
            wrong.append(f"{place}: import it as pimflow.{root}")
        elif root in ("tvm", "topi") and here in WITHOUT_TVM:
            wrong.append(f"{place}: '{here}' is free of TVM")
        elif root != "pimflow" or not here:
            continue
        elif level(there) < 0:
            if here not in LAYERS[-1]:
                wrong.append(f"{place}: only {', '.join(LAYERS[-1])} may use the public names")
        elif here == "zoo" and there not in ("zoo", "errors"):
            wrong.append(f"{place}: the zoo needs only errors")
        elif level(there) > level(here):
            wrong.append(f"{place}: '{there}' lies above '{here}'")
        elif here in SEPARATE and there in SEPARATE and here != there:
            wrong.append(f"{place}: '{here}' and '{there}' do not know one another")
    return wrong


def script_faults(name: str, source: str) -> list[str]:
    """Scripts stand outside: they import nothing private, and no folder of the repository by itself."""
    wrong = []
    for imported, line in imports(source):
        pieces = imported.split(".")
        if pieces[0] in BARE:
            wrong.append(f"{name}:{line}: {imported}: import it as pimflow.{pieces[0]}")
        if pieces[0] == "pimflow" and any(p.startswith("_") for p in pieces):
            wrong.append(f"{name}:{line}: {imported} is private")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            wrong.append(f"{name}:{node.lineno}: .{node.attr} is private")
    return wrong


PACKAGE_FILES = [path for folder in FOLDERS for path in sources(folder)]


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downwards(path):
    assert faults(module_name(path), path.read_text(), path.name == "__init__.py") == []


@pytest.mark.parametrize("path", sources("scripts"), ids=lambda p: p.name)
def test_scripts_use_only_what_is_public(path):
    assert script_faults(path.name, path.read_text()) == []


@pytest.mark.parametrize("path", sources("tests"), ids=lambda p: str(p.relative_to(ROOT)))
def test_tests_import_the_installed_package(path):
    assert [name for name, _ in imports(path.read_text()) if name.split(".")[0] in BARE] == []


def test_every_part_has_a_layer():
    parts = {part(module_name(path)) for path in PACKAGE_FILES} - {""}
    known = {name for layer in LAYERS for name in layer}
    assert parts <= known, "name its layer in LAYERS"
    assert {"core", "relay_passes", "pim_backend", "simulators", "placement", "api"} <= parts


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("pimflow.core.plan", "from pimflow.placement import search"),
        ("pimflow.core.plan", "from pimflow import simulators"),
        ("pimflow.core.plan", "import pimflow.relay_passes.flat"),
        ("pimflow.core.plan", "from ..zoo import weights"),
        ("pimflow.core.plan", "from .. import api"),
        ("pimflow.core.plan", "import pimflow"),
        ("pimflow.verify", "from pimflow import compile"),
        ("pimflow.core.plan", "import tvm"),
        ("pimflow.hardware.pim", "from tvm import relax"),
        ("pimflow.simulators.timing", "def f():\n    import tvm.relax"),
        ("pimflow.simulators.timing", "from pimflow.pim_backend import lowering"),
        ("pimflow.pim_backend.codegen", "from pimflow.relay_passes.flat import shape"),
        ("pimflow.relay_passes.flat", "from pimflow.placement.solve import solve_dp"),
        ("pimflow.placement.solve", "from pimflow import verify"),
        ("pimflow.verify", "from pimflow.api import compile"),
        ("pimflow.memory.exact", "from pimflow.simulators.timing import time_program"),
        ("pimflow.memory.exact", "import tvm"),
        ("pimflow.zoo.weights", "from pimflow.core.region import Region"),
        ("pimflow.zoo.weights", "from ..hardware import system"),
        ("pimflow.api", "import simulators"),
        ("pimflow.api", "from relay_passes.flat import shape"),
        ("pimflow.cli", "from pim_backend import lowering"),
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
        ("pimflow.placement.candidates", "from pimflow.simulators.timing import time_program"),
        ("pimflow.api", "from pimflow import artifact, compilation, frontend, pipeline, report, zoo"),
        ("pimflow.simulators.timing", "import tvm_ffi"),
    ],
)
def test_what_is_allowed_passes(module, line):
    assert faults(module, line) == []


@pytest.mark.parametrize(
    "line",
    [
        "from pimflow.api import _search",
        "import pimflow._native",
        "import simulators.timing",
        "from pimflow import api\napi._search()",
    ],
)
def test_a_script_violation_is_seen(line):
    assert len(script_faults("script.py", line)) == 1


def test_parts_without_tvm_do_not_load_it():
    """What the source cannot show: importing the low layers leaves TVM out of the process."""
    import subprocess

    parts = ("zoo", "placement", "simulators.timing", "memory", "cli", "tracing", "simulation", "fusion")
    names = ", ".join(f"pimflow.{each}" for each in (*parts, "timeline"))
    heavy = {"tvm", "tvm_ffi", "torch"}
    code = f"import sys, pimflow, {names}; sys.exit(not {heavy}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd="/").returncode == 0


def test_every_package_is_installed():
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (packages,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "PACKAGES"
    )
    folders = {
        str(path.parent.relative_to(ROOT)) for f in FOLDERS for path in (ROOT / f).rglob("__init__.py")
    }
    assert folders == set(packages.values())
