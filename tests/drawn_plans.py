"""Plans at random, whose tensors lie anywhere that their readers can read."""

import random

from pimflow.core.candidate import Candidate, CostTable
from pimflow.placement import CandidateGenerator
from pimflow.placement.solvers import plan_state


def random_plan(generator: CandidateGenerator, table: CostTable, rng: random.Random) -> tuple[Candidate, ...]:
    """Of each kind of candidate, one is as likely as of another. What leads nowhere is drawn anew."""
    graph = generator.graph
    while True:
        plan, position, state = [], 0, plan_state.initial_state(table)
        while position < len(graph.regions):
            kinds = {}
            for candidate in table.candidates[graph.regions[position].name]:
                if plan_state.is_feasible(graph, table, candidate, state):
                    kind = (
                        candidate.rewrite.mode,
                        getattr(candidate.rewrite, "axis", "rows"),
                        len(candidate.covers) > 1,
                        bool(candidate.primitive),
                    )
                    kinds.setdefault((*kind, candidate.output.channels_text), []).append(candidate)
            if not kinds:
                break
            plan.append(rng.choice(kinds[rng.choice(sorted(kinds))]))
            state = plan_state.next_state(graph, plan[-1], state)
            position += len(plan[-1].covers)
        if position == len(graph.regions) and not state.open_alternative:
            return tuple(plan)
