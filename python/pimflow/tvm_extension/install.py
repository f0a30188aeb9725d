"""Extension of TVM by the import of pimflow, as soon as TVM itself is imported.

It adds targets with PIM, options of the search in `PassContext`, and the Relay entry points that TVM removed
in 0.20. It does not import TVM, which would take a second, also for ``pimflow --help``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

# Names of modules in TVM, and the modules that they stand for.
_MODULE_BY_TVM_NAME = {
    "tvm.relay": "pimflow.tvm_extension.relay",
    "tvm.relay.frontend": "pimflow.tvm_extension.relay.frontend",
    "tvm.contrib.graph_executor": "pimflow.tvm_extension.relay.graph_executor",
}

_RELAY_MODULES = (
    "build_module",
    "frontend",
    "graph_executor",
    "pass_options",
    "verification",
)  # of pimflow.tvm_extension.relay


def install() -> None:
    """Extend TVM now if it is imported, else when it is imported."""
    use_cores()
    sys.meta_path.insert(0, _RelayFinder())
    if "tvm" in sys.modules:
        _extend_tvm()
    else:
        sys.meta_path.insert(0, _TvmFinder())


def use_cores(siblings: Path = Path("/sys/devices/system/cpu")) -> None:
    """Let TVM's kernels run on every core that this process may use, unless ``TVM_NUM_THREADS`` is set.

    TVM itself uses half of the processors, since it assumes two hyper-threads per core. It binds threads to
    the first cores, so that concurrent processes share these. Here threads are not bound, unless
    ``TVM_BIND_THREADS`` says so.

    Parameters
    ----------
    siblings : Path
        Folder in which Linux says which processors share a core; without it, TVM's number stays.
    """
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    if "TVM_NUM_THREADS" in os.environ or not hasattr(os, "sched_getaffinity"):
        return
    files = [siblings / f"cpu{n}" / "topology" / "thread_siblings_list" for n in os.sched_getaffinity(0)]
    try:
        cores = {file.read_text().strip() for file in files}
    except OSError:
        return
    os.environ["TVM_NUM_THREADS"] = str(len(cores))


def _extend_tvm() -> None:
    from pimflow.host import native
    from pimflow.pim_backend.runtime import targets
    from pimflow.tvm_extension.relay import pass_options

    native.load()
    targets.register()
    pass_options.register()
    for name, source in _MODULE_BY_TVM_NAME.items():
        module = importlib.import_module(source)
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        setattr(importlib.import_module(parent), leaf, module)


class _TvmFinder:
    """An import hook that extends TVM once it is loaded; who only looks for TVM leaves it in place."""

    is_searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of TVM, with a loader that extends it."""
        if name != "tvm" or self.is_searching:
            return None
        self.is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.is_searching = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                """Load TVM, then extend it."""
                sys.meta_path.remove(self)
                execute(module)
                _extend_tvm()

            spec.loader.exec_module = exec_module
        return spec


class _RelayFinder:
    """An import hook whose errors say what replaces parts of Relay that do not exist any more."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None; raises `ImportError` for parts of Relay that do not exist any more."""
        parent, _, leaf = name.rpartition(".")
        if parent in ("tvm.relay", "pimflow.tvm_extension.relay") and leaf not in _RELAY_MODULES:
            from pimflow.tvm_extension.relay import replacement_hint

            raise ImportError(replacement_hint(leaf), name=name)
        return None
