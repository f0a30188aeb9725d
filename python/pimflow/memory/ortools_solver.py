"""A second exact planner, for comparison: CP-SAT of OR-Tools; buffers are rectangles of steps and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pimflow.core.liveness import Lifetime
from pimflow.errors import UsageError
from pimflow.memory.exact import Incumbent
from pimflow.memory.pools import lower_bound_bytes, pool_end_bytes


def solve(
    buffers: Sequence[Lifetime],
    start_offsets: Sequence[int],
    seconds: float,
    capacity_bytes: int | None = None,
) -> Incumbent:
    """Improve the plan `start_offsets`; parameters as in `exact.solve`.

    Raises
    ------
    UsageError
        OR-Tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise UsageError("the planner 'ortools' needs OR-Tools; pip install 'pimflow[ortools]'") from error
    solution = Incumbent(
        list(start_offsets), pool_end_bytes(buffers, start_offsets), lower_bound_bytes(buffers)
    )
    if solution.is_optimal or (capacity_bytes is not None and solution.pool_bytes <= capacity_bytes):
        return solution
    model = cp_model.CpModel()
    goal = solution.pool_bytes - 1 if capacity_bytes is None else min(capacity_bytes, solution.pool_bytes - 1)
    if goal < solution.lower_bound_bytes:
        return solution
    offsets, byte_ranges, step_ranges = [], [], []
    pool = model.new_int_var(solution.lower_bound_bytes, goal, "pool")
    for life in buffers:
        multiple = model.new_int_var(0, goal // life.alignment_bytes, life.name)
        offset = multiple * life.alignment_bytes
        if life.offset_bytes is not None:
            model.add(offset == life.offset_bytes)
        model.add(offset + life.size_bytes <= pool)
        offsets.append(offset)
        byte_ranges.append(model.new_fixed_size_interval_var(offset, life.size_bytes, life.name))
        step_ranges.append(model.new_fixed_size_interval_var(life.begin, life.end - life.begin, life.name))
    model.add_no_overlap_2d(step_ranges, byte_ranges)
    if capacity_bytes is None:
        model.minimize(pool)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = seconds
    status = solver.solve(model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        solution.offsets = [solver.value(offset) for offset in offsets]
        solution.pool_bytes = pool_end_bytes(buffers, solution.offsets)
    if capacity_bytes is None and status == cp_model.OPTIMAL:
        solution.lower_bound_bytes = solution.pool_bytes
    elif status == cp_model.INFEASIBLE:
        solution.lower_bound_bytes = goal + 1
    elif capacity_bytes is None:
        bound = math.ceil(solver.best_objective_bound - 1e-6)
        solution.lower_bound_bytes = min(max(solution.lower_bound_bytes, bound), solution.pool_bytes)
    return solution
