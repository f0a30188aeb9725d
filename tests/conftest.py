import gc
import inspect
import linecache
import os
import runpy
import signal
import sys
from pathlib import Path

# Before TVM and NumPy come: tests run side by side, and threads that wait for a core spin.
os.environ.setdefault("TVM_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from hypothesis import settings

import pimflow
from pimflow import zoo

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # nohup, a job in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else the commands that tests run ignore it too


def frames(context: int = 1) -> list[inspect.FrameInfo]:
    """`inspect.stack`, with the line that each frame is in.

    TVMScript asks for it at each function that it parses. Python looks through all modules for the source of
    each frame, which took half of what collecting the tests does.
    """
    stack, frame = [], sys._getframe(1)
    while frame is not None:
        path, line = frame.f_code.co_filename, frame.f_lineno
        source = [linecache.getline(path, line)]
        stack.append(inspect.FrameInfo(frame, path, line, frame.f_code.co_name, source, 0))
        frame = frame.f_back
    return stack


inspect.stack = frames

MOST_WORKERS = 8  # a worker takes up to 2 GiB

# The same examples in every run: a failure is a change of the code, not of the dice.
settings.register_profile("tests", derandomize=True, deadline=None, max_examples=20)
settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """All tests run on all cores where pytest-xdist is installed; neighbours share a core and fixtures."""
    has_workers = not config.pluginmanager.hasplugin("xdist") or config.option.numprocesses is not None
    is_whole_suite = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if has_workers or not is_whole_suite or config.option.usepdb or "PYTEST_XDIST_WORKER" in os.environ:
        return
    config.option.numprocesses = min(len(os.sched_getaffinity(0)), MOST_WORKERS)
    config.option.dist = "worksteal"


def pytest_collection_finish():
    """Searches make many objects: the collector need not look through modules and tests for each of these."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """No test reads what a user's searches found, or leaves anything there; workers share what they found."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIMFLOW_CACHE", str(folder / "profiles.sqlite"))
        yield


@pytest.fixture(scope="session")
def zoo_generator():
    """What scripts/build_zoo.py defines."""
    return runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "build_zoo.py"))


@pytest.fixture(scope="session")
def small_bert(zoo_generator):
    """The generator's BERT with two layers of two heads of 16, for 8 tokens of 50; with weights."""
    generator = zoo_generator["NETWORKS"]["bert-base"].__globals__
    sizes = generator["EncoderSizes"](layers=2, width=32, heads=2, vocabulary=50, positions=16)
    graph = generator["bert"]("bert-small", sizes, length=8)
    return zoo.load_model(zoo_generator["strip"](graph, "bert-small"))


@pytest.fixture(scope="session")
def compiled_toy(tmp_path_factory):
    """The toy network, compiled with all defaults: its directory, which no test changes, and the result."""
    directory = tmp_path_factory.mktemp("compiled") / "toy"
    return directory, pimflow.compile("toy", directory)
