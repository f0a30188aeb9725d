"""Launches that are issued ahead (`System.launches`): what is left of them when the work before has ended.

Each device has a queue, as a stream has: the next launch goes out when the task before it there begins to
execute. It is over no later than the task can begin anyway, or it is charged for as long as it takes more.
How long it is on its way is counted from below: by executions on a path of tasks, each of which waits for
the one before.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pimflow.core.candidate import Task

BEGIN = "the begin"
NEVER = float("-inf")


@dataclass(frozen=True, kw_only=True)
class Queue:
    """How long a launch on `resource` is on its way when the task may begin to execute.

    `own_ns` for the task before alone; `behind_ns`, no less, where it also waits for the last region.
    """

    resource: str
    own_ns: float
    behind_ns: float

    def within(self, longest_ns: Mapping[str, float]) -> Queue:
        """The queue for launches that take no longer than `longest_ns`, by resource: no wait hides more."""
        most_ns = longest_ns.get(self.resource, 0.0)
        if self.behind_ns <= most_ns:
            return self
        return Queue(
            resource=self.resource, own_ns=min(self.own_ns, most_ns), behind_ns=min(self.behind_ns, most_ns)
        )


@dataclass(frozen=True, kw_only=True)
class Running:
    """What runs when the next candidate is issued.

    Attributes
    ----------
    of : str
        The last region, or `BEGIN`; empty if nobody waits for that.
    queues : tuple of Queue
        Of resources that were used; what was not can have been launched at the begin.
    waited_ns : float
        How long what is not among `queues` has had, where the last region is waited for.
    """

    of: str = BEGIN
    queues: tuple[Queue, ...] = ()
    waited_ns: float = 0.0

    @functools.cached_property
    def _hidden_ns(self) -> dict[str, tuple[float, float]]:
        """By resource of a queue, `hides_ns` of what does not wait for the last region, and of what does."""
        return {queue.resource: (queue.own_ns, queue.behind_ns) for queue in self.queues}

    def hides_ns(self, resource: str, follows: bool) -> float:
        """How much is hidden of a launch of a candidate that waits for the last region, or does not."""
        return self._hides_ns(resource)[follows]

    def _hides_ns(self, resource: str) -> tuple[float, float]:
        return self._hidden_ns.get(resource, (0.0, self.waited_ns))

    def then(self, behind: Behind, longest_ns: Mapping[str, float]) -> Running:
        """What runs behind a candidate too; `longest_ns` are the longest launches, by resource.

        No wait is longer than the longest launch on its resource: it hides no more. So ways that end alike
        for the next launch are one state.
        """
        whole_ns, follows = behind.executing_ns, behind.follows
        queues = {
            queue.resource: replace(queue, behind_ns=queue.behind_ns + whole_ns if follows else queue.own_ns)
            for queue in self.queues
        }
        queues |= {queue.resource: queue for queue in behind.queues}
        most_ns = max(longest_ns.values(), default=0.0)
        return Running(
            of=behind.of,
            queues=tuple(queue.within(longest_ns) for _, queue in sorted(queues.items())),
            waited_ns=min(self.waited_ns + whole_ns, most_ns) if follows else 0.0,
        )


@dataclass(frozen=True, kw_only=True)
class Behind:
    """What a candidate leaves running, whatever ran before it.

    Attributes
    ----------
    of : str
        Its last region; empty if nobody waits for what runs.
    follows : bool
        Whether its tasks wait for the last region before it.
    queues : tuple of Queue
        Of the resources that it launches on, counted from its own tasks.
    executing_ns : float
        How long it executes at least.
    """

    of: str
    follows: bool
    queues: tuple[Queue, ...] = ()
    executing_ns: float = 0.0

    @classmethod
    def made(cls, tasks: Sequence[Task], of: str, follows: bool, longest_ns: Mapping[str, float]) -> Behind:
        """Behind the tasks of a candidate. Those after which any launch hides as much are alike."""
        if not tasks:  # a view is read in place of what it shows
            return cls(of=of if follows else "", follows=follows)
        return cls(
            of=of,
            follows=follows,
            queues=tuple(queue.within(longest_ns) for queue in leaves(tasks)),
            executing_ns=min(executing_ns(tasks), max(longest_ns.values(), default=0.0)),
        )


def leaves(tasks: Sequence[Task]) -> tuple[Queue, ...]:
    """The queues of the resources that a candidate launches on, counted from its own tasks."""
    last: dict[str, int] = {}
    for number, task in enumerate(tasks):
        for resource in task.held:
            if resource not in last or task.launch_ns or task.launched:
                last[resource] = number
    return tuple(
        Queue(
            resource=resource,
            own_ns=tasks[number].execution_ns,
            behind_ns=executing_ns(tasks, number),
        )
        for resource, number in sorted(last.items())
        if resource != "crossbar"
    )


def executing_ns(tasks: Sequence[Task], first: int | None = None) -> float:
    """How long the tasks execute at least: the longest path, or the longest that begins with `first`."""
    starts = _starts_ns(tasks, first)
    return max((start + task.execution_ns for start, task in zip(starts, tasks)), default=0.0)


def _starts_ns(tasks: Sequence[Task], first: int | None = None) -> list[float]:
    """By task, how long after the begin (of `first`) it executes at least; `NEVER` without a path."""
    starts: list[float] = []
    free: dict[str, float] = {}
    for number, task in enumerate(tasks):
        begins = 0.0 if first in (None, number) else NEVER
        waits = [starts[i] + tasks[i].execution_ns for i in task.after]
        starts.append(max([begins, *waits, *(free.get(resource, NEVER) for resource in task.held)]))
        free |= dict.fromkeys(task.held, starts[-1] + task.execution_ns)
    return starts


@dataclass(frozen=True, kw_only=True)
class Launching:
    """The tasks of a candidate with what is left of their launches, whatever runs before them.

    Attributes
    ----------
    tasks : tuple of Task
        The first launch on each resource is whole.
    first : tuple of (int, float)
        Where these are, and how long they have been on their way while the candidate's own tasks execute.
    """

    tasks: tuple[Task, ...]
    first: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, tasks: Sequence[Task], follows: bool) -> Launching:
        """Of a candidate that `follows` the last region, or does not.

        The first launch on a resource is on its way before the resource is free or, where the candidate
        follows the last region, before it may begin; and then while tasks before it there execute. Each other
        goes out when the task before it there executes.
        """
        if not any(task.launch_ns for task in tasks):
            return cls(tasks=tuple(tasks))
        ends = [start + task.execution_ns for start, task in zip(_starts_ns(tasks), tasks)]
        before: dict[str, float] = {}
        free: dict[str, float] = {}
        held_ns: dict[str, float] = defaultdict(float)
        made, first = [], []
        for number, (task, end_ns) in enumerate(zip(tasks, ends)):
            hidden_ns = before.get(task.resource)
            if task.launch_ns and hidden_ns is None:
                # What it holds besides may be busy for longer: what is left of the launch overlaps that.
                waits = [free.get(task.resource, 0.0), *(ends[i] for i in task.after)]
                first.append((number, max(waits) if follows else held_ns[task.resource]))
            left_ns = task.launch_ns if hidden_ns is None else max(task.launch_ns - hidden_ns, 0.0)
            made.append(task.launched_for(left_ns))
            if task.launch_ns or hidden_ns is not None:
                before |= dict.fromkeys(task.held, task.execution_ns)
            free |= dict.fromkeys(task.held, end_ns)
            for resource in task.held:
                held_ns[resource] += task.execution_ns
        return cls(tasks=tuple(made), first=tuple(first))

    def left_ns(self, hides_ns: Callable[[str], float]) -> tuple[float, ...]:
        """What is left of each first launch if `hides_ns` of one on a resource is hidden before."""
        tasks = self.tasks
        return tuple(
            max(tasks[number].launch_ns - (hides_ns(tasks[number].resource) + own_ns), 0.0)
            for number, own_ns in self.first
        )

    def left(self, hides_ns: Callable[[str], float]) -> tuple[Task, ...]:
        """The tasks, if so much is hidden before."""
        made = list(self.tasks)
        for (number, _), ns in zip(self.first, self.left_ns(hides_ns)):
            made[number] = made[number].launched_for(ns)
        return tuple(made)
