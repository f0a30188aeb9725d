"""Partitioned boolean quadratic programs: a solver by reductions, an independent baseline.

Each node takes one of its states. A state has a cost, and so has each pair of states of two nodes with an
edge. The reductions R0 (a node without edges), RI (with one) and RII (with two) fold a node into its
neighbours and keep the optimum. Where all nodes have more edges, RN takes the state of one that looks best,
and may lose it.

Source: Scholz and Eckstein, "Register allocation for irregular architectures", 2002 (the reductions);
Anderson and Gregg, "Optimal DNN primitive selection with partitioned boolean quadratic programming", 2018
(primitives as states, layout transforms on edges).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from pimflow.core.candidate import Candidate
from pimflow.primitive_selection.problem import SelectionProblem

Node = Hashable


@dataclass(frozen=True, kw_only=True)
class PbqpSolution:
    """States by node, and the number of nodes whose state RN guessed: the optimum if it is 0."""

    states: dict[Node, int]
    guesses: int


@dataclass
class Pbqp:
    """A program; it is used up by `solve`.

    Attributes
    ----------
    costs : dict
        Vector of costs by node.
    edges : dict
        By node and neighbour, the matrix of costs, with the node's states in rows; in both directions.
    """

    costs: dict[Node, np.ndarray] = field(default_factory=dict)
    edges: dict[Node, dict[Node, np.ndarray]] = field(default_factory=dict)

    def add_node(self, node: Node, costs: np.ndarray) -> None:
        """Add a node with its costs."""
        self.costs[node] = np.array(costs, dtype=float)
        self.edges[node] = {}

    def add_edge(self, node: Node, neighbour: Node, costs: np.ndarray) -> None:
        """Add costs [states of node, states of neighbour] between two different nodes."""
        total = self.edges[node].get(neighbour, 0.0) + np.asarray(costs, dtype=float)
        self.edges[node][neighbour], self.edges[neighbour][node] = total, total.T

    def solve(self) -> PbqpSolution:
        """Reduce all nodes, then choose their states in reverse order."""
        folded: list[tuple[Node, dict[Node, np.ndarray]]] = []
        guesses = 0
        remaining = set(self.costs)
        while remaining:
            node = min(remaining, key=lambda name: (len(self.edges[name]), str(name)))
            if len(self.edges[node]) > 2:
                node = max(remaining, key=lambda name: (len(self.edges[name]), str(name)))
                self._fix(node)
                guesses += 1
            neighbours = self.edges.pop(node)
            for neighbour in neighbours:
                del self.edges[neighbour][node]
            self._fold(node, neighbours)
            folded.append((node, neighbours))
            remaining.remove(node)
        states: dict[Node, int] = {}
        for node, neighbours in reversed(folded):
            known = (matrix[:, states[neighbour]] for neighbour, matrix in neighbours.items())
            states[node] = int(np.argmin(sum(known, start=self.costs[node])))
        return PbqpSolution(states=states, guesses=guesses)

    def _fold(self, node: Node, neighbours: dict[Node, np.ndarray]) -> None:
        """R0, RI and RII: add what `node` costs at best to the costs of its at most two neighbours."""
        if len(neighbours) == 1:
            ((neighbour, matrix),) = neighbours.items()
            self.costs[neighbour] += (self.costs[node][:, None] + matrix).min(axis=0)
        elif len(neighbours) == 2:
            (first, to_first), (second, to_second) = neighbours.items()
            sums = self.costs[node][:, None, None] + to_first[:, :, None] + to_second[:, None, :]
            self.add_edge(first, second, sums.min(axis=0))

    def _fix(self, node: Node) -> None:
        """RN: leave `node` the one state that is cheapest if each neighbour chose for it alone."""
        costs = self.costs[node].copy()
        for neighbour, matrix in self.edges[node].items():
            costs += (matrix + self.costs[neighbour]).min(axis=1)
        best = int(np.argmin(costs))
        for neighbour, matrix in list(self.edges[node].items()):
            self.costs[neighbour] += matrix[best]
            del self.edges[node][neighbour], self.edges[neighbour][node]
        others = np.arange(len(costs)) != best
        self.costs[node][others] = np.inf


def from_selection(problem: SelectionProblem) -> Pbqp:
    """The program of minimal time: candidates are states, layout transforms are on edges."""
    program = Pbqp()
    steps = {step.name: step for step in problem.steps}
    for step in problem.steps:
        program.add_node(step.name, np.array([problem.time_ns(c) for c in step.candidates]))
    for step in problem.steps:
        for tensor in step.reads:
            if tensor in steps:
                costs = [
                    [_transform_ns(problem, tensor, source, target) for target in step.candidates]
                    for source in steps[tensor].candidates
                ]
                program.add_edge(tensor, step.name, np.array(costs))
            else:
                program.costs[step.name] += [
                    _transform_ns(problem, tensor, None, target) for target in step.candidates
                ]
    return program


def _transform_ns(
    problem: SelectionProblem, tensor: str, source: Candidate | None, target: Candidate
) -> float:
    """Time of a tensor's transform between two candidates; without a source, of an input of the network."""
    given = source.output if source else problem.placements(tensor)[0]
    edge = problem.table.transform(tensor, given, target.input)
    return edge.latency_ns if given != target.input and edge.task else 0.0


def select_by_pbqp(problem: SelectionProblem) -> tuple[dict[str, Candidate], int]:
    """The candidate of each region by PBQP, and the number of guesses by RN."""
    solution = from_selection(problem).solve()
    choice = {
        step.name: step.candidates[solution.states[step.name]]
        for step in problem.steps
        if step.name in problem.table.candidates
    }
    return choice, solution.guesses
