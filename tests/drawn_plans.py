"""Plans at random, whose tensors lie anywhere that their readers can read."""

import random

from pimflow.core.candidate import Candidate, CostTable
from pimflow.placement import Candidates
from pimflow.placement.solvers import steps


def drawn(maker: Candidates, table: CostTable, draw: random.Random) -> tuple[Candidate, ...]:
    """Of each kind of candidate, one is as likely as of another. What leads nowhere is drawn anew."""
    graph = maker.graph
    while True:
        chosen, position, state = [], 0, steps.begin(table)
        while position < len(graph.regions):
            kinds = {}
            for c in table.candidates[graph.regions[position].name]:
                if steps.fits(graph, table, c, state):
                    kind = c.rewrite.mode, c.rewrite.axis, len(c.covers) > 1, bool(c.rewrite.primitive)
                    kinds.setdefault((*kind, c.output.layout), []).append(c)
            if not kinds:
                break
            chosen.append(draw.choice(kinds[draw.choice(sorted(kinds))]))
            state = steps.after(graph, chosen[-1], state)
            position += len(chosen[-1].covers)
        if position == len(graph.regions) and not state.open:
            return tuple(chosen)
