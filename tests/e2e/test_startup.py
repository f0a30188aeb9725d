"""What does a command import? Only what it needs: TVM takes a second, PyTorch more, SciPy half of one."""

import json
import os
import subprocess
import sys

import pytest

RUN = """
import json, sys
from pimflow.__main__ import run
try:
    run()
finally:
    with open("imported.json", "w") as file:
        json.dump(sorted({"tvm", "tvm_ffi", "torch", "scipy"} & sys.modules.keys()), file)
"""
# Stands where PyTorch may be installed: whoever asks for it is seen.
TORCH = """
from pathlib import Path
Path(__file__).with_name("asked").touch()
raise ImportError("no PyTorch")
"""
LAYER = "conv:1x8x4x4,16,1x1"


def module_names(folder, *options: str) -> list[str]:
    """What a done loads that runs one command; ``torch`` if it so much as asks for it."""
    (folder / "torch.py").write_text(TORCH, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(folder), "PIMFLOW_CACHE": str(folder / "cache")}
    command = [sys.executable, "-c", RUN, *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    modules = json.loads((folder / "imported.json").read_text(encoding="utf-8"))
    return modules + ["torch"] * (folder / "asked").exists()


@pytest.mark.parametrize(
    "options",
    [
        ("--help",),
        pytest.param(("compile", "--help"), marks=pytest.mark.long),
        pytest.param(("devices", "hbm-pim"), marks=pytest.mark.long),
        pytest.param(("models",), marks=pytest.mark.long),
        pytest.param(("fuse", "toy", "--quiet"), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_neither_tvm_nor_its_foreign_functions(options, tmp_path):
    assert module_names(tmp_path, *options) == []


@pytest.mark.long
def test_the_timing_engines_alone(tmp_path):
    assert module_names(tmp_path, "trace", LAYER, "--format", "pimprog", "-o", "out", "--quiet") == [
        "tvm_ffi"
    ]
    (program,) = (tmp_path / "out").glob("**/*.pimprog")
    assert module_names(tmp_path, "simulate", str(program), "--quiet") == ["tvm_ffi"]


@pytest.mark.long
def test_networks_need_tvm_and_no_pytorch(tmp_path):
    options = ("--system", "pimflow", "--jobs", "1", "--modes", "gpu", "--quiet")
    assert module_names(tmp_path, "timeline", "toy", *options) == ["tvm", "tvm_ffi"]


def test_tables_of_buffers_need_the_planner_alone(tmp_path):
    rows = "id,lower,upper,size\na,0,2,64\nb,1,3,32\nc,2,4,64\n"
    (tmp_path / "buffers.csv").write_text(rows, encoding="utf-8")
    assert set(module_names(tmp_path, "memory", "buffers.csv", "--quiet")) <= {"tvm_ffi"}


def test_a_program_that_imports_pimflow_keeps_pytorch_in_tvm(tmp_path):
    """Only the command's own process does without."""
    (tmp_path / "torch.py").write_text(TORCH, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = "import pimflow.host.native; pimflow.host.native.load()"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert (tmp_path / "asked").exists()


def test_pytorch_can_be_imported_after_tvm(tmp_path):
    (tmp_path / "torch.py").write_text("VALUE = 7\n", encoding="utf-8")
    code = (
        "from pimflow.host import native, partial_tvm; partial_tvm.install(); native.load(); "
        "import sys; assert 'torch' not in sys.modules; import torch; assert torch.VALUE == 7"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.long
def test_commands_load_backends_only_where_they_generate_code():
    code = (
        "from pimflow.host import partial_tvm; partial_tvm.install(); import ctypes, tvm\n"
        "from tvm.backend import loader; from pimflow.pim_backend.runtime import targets\n"
        "loaded = [loader.is_loaded('cuda')]\n"
        "for name in ('llvm+pim', 'cuda+pim'):\n"
        "    targets.target_by_name(name)\n"
        "    loaded.append(loader.is_loaded('cuda'))\n"
        "try: driver = bool(ctypes.CDLL(partial_tvm.CUDA_DRIVER))\n"
        "except OSError: driver = False\n"
        "assert loaded == [driver, driver, True], loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Sends the signal when `pimflow` begins to import the first of its modules.
AT_THE_FIRST_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "pimflow.tvm_extension":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""
ENTRIES = {"script": ["-c", "from pimflow_command import run; run()"], "module": ["-m", "pimflow"]}


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_interrupt_while_the_package_is_imported_is_one_line(entry, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(AT_THE_FIRST_IMPORT, encoding="utf-8")
    command = [sys.executable, *ENTRIES[entry], "--version"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout, process.stderr) == (130, "", "pimflow: interrupted\n")


def test_who_imports_pimflow_keeps_handlers():
    code = "import signal, pimflow; print(signal.getsignal(2) is signal.default_int_handler)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == "True\n"


def test_the_first_modules_of_a_command_need_no_other():
    code = "import sys; before = {*sys.modules}; import pimflow_command; print(*({*sys.modules} - before))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {*process.stdout.split()} == {"pimflow_command", "pimflow_signals"}
