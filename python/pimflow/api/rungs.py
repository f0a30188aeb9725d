"""Decode steps over the tokens so far: one for each of a few extents, all over the same caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx

from pimflow.api.decoding import Lengths, Step, compiled_step, placed_step
from pimflow.api.generation import smallest
from pimflow.api.search import Question
from pimflow.frontend import Network
from pimflow.host.garbage_collection import give_back
from pimflow.placement import Searched

LEAST = 128  # tokens: below, no step is shorter for fewer
MOST_SHARE = 3 / 4  # of the context: what is nearer to it is taken for it
PAYS = 0.01  # of a step's time: what a rung has to save


def extents(context: int) -> list[int]:
    """Tokens that decode steps may attend to, rising: powers of two, and the whole context."""
    found, extent = [], LEAST
    while extent <= context * MOST_SHARE:
        found.append(extent)
        extent *= 2
    return [*found, context]


class Rungs:
    """The decode steps of a model.

    The step over the whole context is searched, and its plan is applied to all others: so weights and caches
    lie in the same places, in the same layouts. Steps are compiled when they are needed, and not kept.

    Parameters
    ----------
    graph : callable
        The ONNX graph of a step by the tokens that it attends to.
    context, batch : int
        Places of the caches, and sequences at once.
    several : bool
        Whether steps may attend to fewer tokens than the context.
    """

    def __init__(
        self,
        graph: Callable[[int], onnx.ModelProto],
        question: Question,
        context: int,
        batch: int,
        *,
        several: bool = True,
    ) -> None:
        self.context = context
        self._graph, self._question, self._batch = graph, question, batch
        self._extents = extents(context) if several else [context]
        self._searched: dict[int, Searched] = {}

    def lengths(self, extent: int) -> Lengths:
        """Of the step over so many tokens."""
        return Lengths(attended=extent, batch=self._batch, places=self.context if self.context > 1 else 0)

    def for_steps(self, tokens: Sequence[int]) -> list[int]:
        """The extents, rising, to have for steps that attend to so many tokens: their rungs, and the context.

        One that is not `PAYS` faster than the next is left out, where so is the GPU alone.
        """
        wanted = sorted({self.context, *(smallest(self._extents, each) for each in tokens)})
        found = [wanted.pop()]
        for extent in reversed(wanted):
            shorter, longer = _times(self.searched(extent)), _times(self.searched(found[0]))
            if any(less <= (1 - PAYS) * more for less, more in zip(shorter, longer)):
                found.insert(0, extent)
        return found

    def searched(self, extent: int) -> Searched:
        """The plan of the step over so many tokens."""
        if extent not in self._searched:
            self._searched[extent] = placed_step(
                self._graph(extent), self._asked(extent), self.lengths(extent)
            )[2]
            give_back()  # the weights that the graph was loaded with
        return self._searched[extent]

    def compiled(
        self,
        extent: int,
        inputs: Callable[[Network], Mapping[str, np.ndarray]],
        progress: Callable[[str], None],
    ) -> Step:
        """The step over so many tokens, verified on `inputs`; raises what `compiled_step` does."""
        graph, lengths, known = self._graph(extent), self.lengths(extent), self._searched.get(extent)
        step = compiled_step(graph, self._asked(extent), lengths, inputs, progress, known)
        self._searched[extent] = step.searched
        return step

    def _asked(self, extent: int) -> Question:
        """What a step is searched by: the whole context's plan, but for that itself."""
        if extent == self.context:
            return self._question
        return self._question.applying(self.searched(self.context).plan)


def _times(searched: Searched) -> tuple[float, float]:
    return searched.evaluation.latency_ns, searched.baseline.latency_ns
