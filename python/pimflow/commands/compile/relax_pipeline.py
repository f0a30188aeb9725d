"""The pass pipeline for users of Relax."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import tvm

from pimflow import frontend
from pimflow.commands.shared.arguments import public
from pimflow.commands.shared.options import NetworkOptions
from pimflow.commands.shared.search import SearchRequest
from pimflow.commands.shared.search_arguments import SEARCH
from pimflow.compiler import build, phases
from pimflow.core.options import declarations
from pimflow.core.plan import Plan
from pimflow.errors import UsageError
from pimflow.hardware import System
from pimflow.pim_backend.runtime import targets
from pimflow.placement import SearchResult

# Options of networks that a module determines.
_MODULE_OPTIONS = tuple(
    name for name, declaration in declarations(NetworkOptions).items() if declaration.group == "network"
)


@public(*SEARCH, without=("target", "select"))
def relax_pipeline(
    system: System | None = None,
    plan: Plan | SearchResult | str | os.PathLike[str] | None = None,
    **keywords: Any,
) -> tvm.transform.Pass:
    """Return a pass pipeline for ``tvm.compile(mod, target="cuda+pim", relax_pipeline=…)``.

    Parameters
    ----------
    system : System, optional
        `pimflow.system()` by default.
    plan : Plan, SearchResult or path, optional
        A plan that `search` found for the same module; the pipeline searches one if None.
    options, goal, profiling, **keywords
        See `pimflow.search`: ``reorder``, ``decompose``, ``optimize_skips``, ``fuse_activations``,
        ``fuse`` and the goal; shapes and caches are those of the module.

    Raises
    ------
    UsageError
        As `search`; and when the pipeline runs, if the target has no PIM.
    """
    search_request = SearchRequest.from_arguments(system, plan=plan, **keywords)
    defaults = NetworkOptions()
    for name in _MODULE_OPTIONS:
        if getattr(search_request.options, name) != getattr(defaults, name):
            raise UsageError(f"{name} has no effect: a module has its shapes and caches; leave it out")

    @tvm.transform.module_pass(opt_level=0, name="pimflow.relax_pipeline")  # type: ignore[untyped-decorator]
    def run_pipeline(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """Search or apply the plan, and lower the module."""
        target = tvm.target.Target.current(allow_none=True)
        if target is None or not targets.has_pim(target):
            raise UsageError(f"the target has no PIM; use one of {', '.join(targets.TARGETS)}")
        request = replace(search_request, target=targets.target_name(target)).validate()
        network, search_result = request.find_plan(frontend.load(mod))
        return phases.lower(build.apply_search_result(network.module, search_result), target, request.system)

    return run_pipeline
