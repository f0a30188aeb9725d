"""Arguments of `pimflow.compile` as options in TVM's ``PassContext(config={"pimflow.system": …})``.

TVM is imported inside functions, because its import calls `register`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tvm_ffi

from pimflow.commands.compile.options import CompileOptions
from pimflow.commands.shared.search_arguments import SEARCH
from pimflow.core.options import Option, declarations, type_check
from pimflow.errors import UsageError
from pimflow.hardware import System, system
from pimflow.host import native

# Arguments of a search that `relay.build` has of its own.
_OWN_ARGUMENTS = ("target", "options", "goal", "select")
# Two names of one option: that of the command line, and that of Python.
_PROFILER, _PROFILING = "profiler", "profiling"


def _check_system(name: str, value: Any) -> System:
    if isinstance(value, System):
        return value
    if isinstance(value, str | os.PathLike):
        return system(str(value))
    raise UsageError(f"{name} is a System, a name or a file, not {type(value).__name__}")


def _declarations() -> dict[str, Option]:
    """The declaration of each option, by name without ``pimflow.``; those of a module's shapes are none."""
    options = {"system": Option(check=_check_system)}
    for cls in SEARCH:
        for name, declaration in declarations(cls).items():
            if declaration.group != "network" and name not in _OWN_ARGUMENTS:
                options[name] = declaration
    options[_PROFILER] = options[_PROFILING]
    verify = Option(check=type_check("True or False", bool), is_flag=True)
    others = {
        name: declarations(CompileOptions)[name] for name in ("dump_ir", "check_kernels", "cuda_graphs")
    }
    return options | others | {"verify": verify}


OPTIONS = _declarations()


def _context_check(name: str, declaration: Option) -> Callable[[Any], Any]:
    """The check of an option for TVM, which hands on texts and numbers of its own types.

    A checked value must be valid too: passes create copies of the current context.
    """

    def context_value(value: Any) -> Any:
        """The value that the context holds; raises `UsageError` if it is invalid."""
        plain = str(value) if isinstance(value, str) else value
        if declaration.is_flag and plain in (0, 1):
            plain = bool(plain)
        assert declaration.check is not None
        checked = declaration.check(f"pimflow.{name}", plain)
        return plain if isinstance(checked, tuple) else checked

    return context_value


def register() -> None:
    """Register the options with ``PassContext``, with checks of their values."""
    import tvm

    add = native.get("pimflow.register_pass_option")
    compiler = next(iter(Path(tvm.__file__).parent.glob("lib*/libtvm_compiler.*")), None)
    for name, declaration in OPTIONS.items():
        key, check = f"pimflow.{name}", tvm_ffi.convert(_context_check(name, declaration))
        if compiler is None or not add(str(compiler), key, check):
            raise ImportError(f"TVM {tvm.__version__} takes no option '{key}'; install apache-tvm 0.27")


def current() -> dict[str, Any]:
    """The options of the current context, by name without ``pimflow.``.

    Raises
    ------
    UsageError
        If an option is given under both of its names.
    """
    import tvm

    config = tvm.transform.PassContext.current().config
    options = {name: config[f"pimflow.{name}"] for name in OPTIONS if f"pimflow.{name}" in config}
    if _PROFILER in options:
        if _PROFILING in options:
            raise UsageError("pimflow.profiler and pimflow.profiling are one option; give one")
        options[_PROFILING] = options.pop(_PROFILER)
    return options
