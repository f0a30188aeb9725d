"""Is PBQP exact where it reduces all nodes, and never better than the best of all assignments?"""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from length import examples
from papers.pbqp import Pbqp, select_by_pbqp
from papers.taso_instances import inception_problem

from pimflow.primitive_selection.search import fastest


def assignment_cost(costs, edges, states):
    return sum(costs[node][state] for node, state in enumerate(states)) + sum(
        matrix[states[a], states[b]] for (a, b), matrix in edges.items()
    )


@given(nodes=st.integers(1, 6), density=st.floats(0, 1), seed=st.integers(0, 10**6))
@settings(max_examples=examples(150), deadline=None, derandomize=True)
def test_against_every_assignment(nodes, density, seed):
    rng = np.random.default_rng(seed)
    costs = [rng.random(rng.integers(1, 4)) for _ in range(nodes)]
    edges = {
        (a, b): rng.random((len(costs[a]), len(costs[b])))
        for a, b in itertools.combinations(range(nodes), 2)
        if rng.random() < density
    }
    program = Pbqp()
    for node, vector in enumerate(costs):
        program.add_node(node, vector)
    for (a, b), matrix in edges.items():
        program.add_edge(a, b, matrix)
    solution = program.solve()
    best = min(assignment_cost(costs, edges, s) for s in itertools.product(*map(range, map(len, costs))))
    cost = assignment_cost(costs, edges, [solution.states[node] for node in range(nodes)])
    if solution.guesses:
        assert cost >= best - 1e-9
    else:
        assert abs(cost - best) < 1e-9


def test_both_solvers_find_the_same_optimum():
    """The reductions and the integer program share no code, and agree on a network of branches."""
    problem = inception_problem(30, 12, "sum")
    choice, guesses = select_by_pbqp(problem)
    assert guesses == 0
    assert np.isclose(problem.evaluate(choice).time_ns, fastest(problem).sums.time_ns, rtol=1e-9)
