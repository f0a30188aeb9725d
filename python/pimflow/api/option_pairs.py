"""Options that would have no effect beside others: refused before the work."""

from __future__ import annotations

from pimflow.core.plan import Plan
from pimflow.errors import UsageError
from pimflow.placement import Goal

# By field of a goal, the option that gives it.
_OF_A_GOAL = {
    "objective": "--objective",
    "solver": "--solver",
    "modes": "--modes",
    "max_latency_ns": "--max-latency",
    "max_energy_pj": "--max-energy",
    "max_memory_bytes": "max_memory_bytes",
}
# What a plan has decided. Bounds are not in it: the plan has to keep to them.
_DECIDED = ("objective", "solver", "modes")
_GPU_ALONE = Goal(modes="gpu").modes


def require_effect(
    wanted: Goal,
    *,
    plan: Plan | None = None,
    in_c: bool = False,
    fuse: bool = False,
    fuse_activations: bool = False,
) -> None:
    """Raise `UsageError` for an option that nothing would heed.

    Parameters
    ----------
    wanted : Goal
    plan : Plan, optional
        Applied instead of searching.
    in_c : bool
        Whether the target is ``c``.
    fuse, fuse_activations : bool
        See `api.compile`.
    """
    plain = Goal()
    given = [name for name in _OF_A_GOAL if getattr(wanted, name) != getattr(plain, name)]
    if in_c:
        fused = {"--fuse": fuse, "--fuse-activations": fuse_activations}
        idle = [option for option, is_given in fused.items() if is_given]
        idle += [_OF_A_GOAL[name] for name in given if name != "modes" or wanted.modes != _GPU_ALONE]
        why = "--target c: the CPU computes layer by layer, and nothing is placed or fused"
    else:
        idle = [_OF_A_GOAL[name] for name in given if plan is not None and name in _DECIDED]
        why = "--plan: the plan says what does each layer, and nothing is searched for"
    if idle:
        raise UsageError(f"{idle[0]} has no effect with {why}; leave out one of both")
