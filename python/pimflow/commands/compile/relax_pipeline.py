"""The pass pipeline for users of Relax."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tvm

from pimflow import frontend
from pimflow.commands.shared.arguments import public
from pimflow.commands.shared.options import (
    AnyPlan,
    NetworkOptions,
    SearchKeywords,
    as_plan,
    as_profiling,
    as_system,
    merge_keywords,
)
from pimflow.commands.shared.search import search_network
from pimflow.compiler import build, phases
from pimflow.errors import UsageError
from pimflow.hardware import System
from pimflow.pim_backend.runtime import targets
from pimflow.placement import Goal, Profiling

if TYPE_CHECKING:
    from typing_extensions import Unpack


@public(SearchKeywords)
def relax_pipeline(
    target_system: System | None = None,
    plan: AnyPlan | None = None,
    *,
    options: NetworkOptions | None = None,
    goal: Goal | None = None,
    profiling: Profiling | None = None,
    **keywords: Unpack[SearchKeywords],
) -> tvm.transform.Pass:
    """Return a pass pipeline for ``tvm.compile(mod, target="cuda+pim", relax_pipeline=…)``.

    Parameters
    ----------
    target_system : System, optional
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
    system, applied_plan, profiling = as_system(target_system), as_plan(plan), as_profiling(profiling)
    options, goal = merge_keywords(keywords, options, goal)
    for name in ("shapes", "batch", "context", "states"):
        if getattr(options, name) is not None:
            raise UsageError(f"{name} has no effect: a module has its shapes and caches; leave it out")

    @tvm.transform.module_pass(opt_level=0, name="pimflow.relax_pipeline")  # type: ignore[untyped-decorator]
    def run_pipeline(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """Search or apply the plan, and lower the module."""
        target = tvm.target.Target.current(allow_none=True)
        if target is None or not targets.has_pim(target):
            raise UsageError(f"the target has no PIM; use one of {', '.join(targets.TARGETS)}")
        network, search_result = search_network(
            frontend.load(mod),
            system,
            applied_plan,
            target=targets.target_name(target),
            options=options,
            goal=goal,
            profiling=profiling,
        )
        return phases.lower(build.apply_search_result(network.module, search_result), target, system)

    return run_pipeline
