"""Launches that are issued ahead (`System.launches`): the part of them that earlier work does not hide.

Each device has a queue, like a CUDA stream: a launch is issued when the task before it in the queue begins to
execute. Of a launch, only what exceeds the time until its task may begin anyway is charged. That time is
bounded from below: by the executions on a path of tasks, each of which waits for the one before.
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
    """How much of the next launch on `resource` is hidden by the work in progress.

    `own_ns` if its task waits only for the task before it in the queue; `behind_ns`, no less, if it also
    waits for the last region.
    """

    resource: str
    own_ns: float
    behind_ns: float

    def clamp(self, longest_ns: Mapping[str, float]) -> Queue:
        """The queue with its times limited to `longest_ns`, the longest launches: no more can be hidden."""
        max_ns = longest_ns.get(self.resource, 0.0)
        if self.behind_ns <= max_ns:
            return self
        return Queue(
            resource=self.resource, own_ns=min(self.own_ns, max_ns), behind_ns=min(self.behind_ns, max_ns)
        )


@dataclass(frozen=True, kw_only=True)
class Running:
    """The work in progress when the next candidate is issued.

    Attributes
    ----------
    awaited_region : str
        The last region, or `BEGIN`; empty if no launch may wait for it.
    queues : tuple of Queue
        Of the resources that were used.
    waited_ns : float
        How much of a launch on another resource is hidden, if its task waits for the last region.
    """

    awaited_region: str = BEGIN
    queues: tuple[Queue, ...] = ()
    waited_ns: float = 0.0

    @functools.cached_property
    def _hidden_ns(self) -> dict[str, tuple[float, float]]:
        """By resource of a queue, `hidden_ns` of a task that does not wait for the last region, or does."""
        return {queue.resource: (queue.own_ns, queue.behind_ns) for queue in self.queues}

    def hidden_ns(self, resource: str, follows: bool) -> float:
        """How much of a candidate's launch is hidden; `follows`: whether it waits for the last region."""
        return self._hidden_ns.get(resource, (0.0, self.waited_ns))[follows]

    def advance(self, outstanding: OutstandingWork, longest_ns: Mapping[str, float]) -> Running:
        """The work in progress after another candidate; `longest_ns`: the longest launches, by resource.

        Times are limited to the longest launch on their resource, since no more can be hidden. So partial
        plans with the same effect on the next launch have the same state.
        """
        work_ns, follows = outstanding.executing_ns, outstanding.follows
        queues = {
            queue.resource: replace(queue, behind_ns=queue.behind_ns + work_ns if follows else queue.own_ns)
            for queue in self.queues
        }
        queues |= {queue.resource: queue for queue in outstanding.queues}
        max_ns = max(longest_ns.values(), default=0.0)
        return Running(
            awaited_region=outstanding.awaited_region,
            queues=tuple(queue.clamp(longest_ns) for _, queue in sorted(queues.items())),
            waited_ns=min(self.waited_ns + work_ns, max_ns) if follows else 0.0,
        )


@dataclass(frozen=True, kw_only=True)
class OutstandingWork:
    """The work that a candidate leaves in progress, independent of what ran before it.

    Attributes
    ----------
    awaited_region : str
        Its last region; empty if no launch may wait for it.
    follows : bool
        Whether its tasks wait for the last region before it.
    queues : tuple of Queue
        Of the resources that it uses, from its own tasks alone.
    executing_ns : float
        A lower bound of its execution time.
    """

    awaited_region: str
    follows: bool
    queues: tuple[Queue, ...] = ()
    executing_ns: float = 0.0

    @classmethod
    def from_tasks(
        cls, tasks: Sequence[Task], awaited_region: str, follows: bool, longest_ns: Mapping[str, float]
    ) -> OutstandingWork:
        """The work after the tasks of a candidate; equal if the same part of any launch is hidden."""
        if not tasks:  # a view is read in place of what it shows
            return cls(awaited_region=awaited_region if follows else "", follows=follows)
        return cls(
            awaited_region=awaited_region,
            follows=follows,
            queues=tuple(queue.clamp(longest_ns) for queue in launch_queues(tasks)),
            executing_ns=min(executing_ns(tasks), max(longest_ns.values(), default=0.0)),
        )


def launch_queues(tasks: Sequence[Task]) -> tuple[Queue, ...]:
    """The queues of the resources that a candidate uses, from its own tasks alone."""
    last_tasks: dict[str, int] = {}
    for number, task in enumerate(tasks):
        for resource in task.resources:
            if resource not in last_tasks or task.launch_ns or task.launched:
                last_tasks[resource] = number
    return tuple(
        Queue(
            resource=resource,
            own_ns=tasks[number].execution_ns,
            behind_ns=executing_ns(tasks, number),
        )
        for resource, number in sorted(last_tasks.items())
        if resource != "crossbar"
    )


def executing_ns(tasks: Sequence[Task], first: int | None = None) -> float:
    """A lower bound of the tasks' execution time.

    The longest path, or the longest from task `first_launches` on.
    """
    starts = _starts_ns(tasks, first)
    return max((start + task.execution_ns for start, task in zip(starts, tasks)), default=0.0)


def _starts_ns(tasks: Sequence[Task], first: int | None = None) -> list[float]:
    """By task, a lower bound of its start after the begin (of `first_launches`).

    `NEVER` if no path leads there.
    """
    starts: list[float] = []
    free: dict[str, float] = {}
    for number, task in enumerate(tasks):
        begins = 0.0 if first in (None, number) else NEVER
        waits = [starts[i] + tasks[i].execution_ns for i in task.after]
        starts.append(max([begins, *waits, *(free.get(resource, NEVER) for resource in task.resources)]))
        free |= dict.fromkeys(task.resources, starts[-1] + task.execution_ns)
    return starts


@dataclass(frozen=True, kw_only=True)
class Launching:
    """The tasks of a candidate, with launches shortened by what its own tasks hide of them.

    Attributes
    ----------
    tasks : tuple of Task
        The first launch on each resource is not shortened: it depends on earlier candidates.
    first_launches : tuple of (int, float)
        The positions of these first launches, and how much of each the candidate's own tasks hide.
    """

    tasks: tuple[Task, ...]
    first_launches: tuple[tuple[int, float], ...] = ()

    @classmethod
    def from_tasks(cls, tasks: Sequence[Task], follows: bool) -> Launching:
        """The launches of a candidate; `follows`: whether it waits for the last region.

        The first launch on a resource is issued before the resource is free or, if the candidate follows the
        last region, before it may begin; it also overlaps the candidate's own earlier tasks. Each further
        launch is issued when the task before it on the resource executes.
        """
        if not any(task.launch_ns for task in tasks):
            return cls(tasks=tuple(tasks))
        ends = [start + task.execution_ns for start, task in zip(_starts_ns(tasks), tasks)]
        previous_ns: dict[str, float] = {}
        free: dict[str, float] = {}
        busy_ns: dict[str, float] = defaultdict(float)
        launched_tasks, first_launches = [], []
        for number, (task, end_ns) in enumerate(zip(tasks, ends)):
            hidden_ns = previous_ns.get(task.resource)
            if task.launch_ns and hidden_ns is None:
                # Other resources of the task may be busy for longer, which the rest of the launch overlaps.
                bounds_ns = [free.get(task.resource, 0.0), *(ends[i] for i in task.after)]
                first_launches.append((number, max(bounds_ns) if follows else busy_ns[task.resource]))
            remaining_ns = task.launch_ns if hidden_ns is None else max(task.launch_ns - hidden_ns, 0.0)
            launched_tasks.append(task.with_launch_ns(remaining_ns))
            if task.launch_ns or hidden_ns is not None:
                previous_ns |= dict.fromkeys(task.resources, task.execution_ns)
            free |= dict.fromkeys(task.resources, end_ns)
            for resource in task.resources:
                busy_ns[resource] += task.execution_ns
        return cls(tasks=tuple(launched_tasks), first_launches=tuple(first_launches))

    def remaining_ns(self, hidden_ns: Callable[[str], float]) -> tuple[float, ...]:
        """The remainder of each first launch, if earlier work hides `hidden_ns` of it, by its resource."""
        tasks = self.tasks
        return tuple(
            max(tasks[number].launch_ns - (hidden_ns(tasks[number].resource) + own_ns), 0.0)
            for number, own_ns in self.first_launches
        )

    def remaining_tasks(self, hidden_ns: Callable[[str], float]) -> tuple[Task, ...]:
        """The tasks with first launches shortened to `remaining_ns`."""
        launched_tasks = list(self.tasks)
        for (number, _), ns in zip(self.first_launches, self.remaining_ns(hidden_ns)):
            launched_tasks[number] = launched_tasks[number].with_launch_ns(ns)
        return tuple(launched_tasks)
