"""The tasks of attention over a cache in PIM: appends, both products, and the softmax between on the GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pimflow.core.candidate import Task
from pimflow.core.region import ELEMENT_BYTES, RESULT_BYTES, Kernel, Region
from pimflow.pim_backend.programs.cache_schedule import CacheSchedule
from pimflow.placement.candidates.candidates import CandidateGenerator
from pimflow.placement.candidates.l2_reuse import L2Reuse
from pimflow.placement.costs.attention_runs import ProductCost
from pimflow.placement.costs.pim_runs import PimCost


@dataclass(frozen=True, kw_only=True)
class CachedRun:
    """The regions that append to keys and to values, and the attention that reads both."""

    keys: Region
    values: Region
    attention: Region

    @property
    def covers(self) -> tuple[str, ...]:
        return (self.keys.name, self.values.name, self.attention.name)

    @property
    def query_elements(self) -> int:
        """Elements of Q."""
        return math.prod(self.attention.attention_layer.query_shape)

    @property
    def mask_elements(self) -> int:
        """Elements of the mask and the positions, unless they are constants, and of the scales of values."""
        attention = self.attention.attention_layer
        unread = 2 * math.prod(attention.scale_shape) - self.scale_elements // 2
        others = sum(self._other_operand_elements[: self._source_begin])
        return others - (unread if attention.cache_type else 0)

    @property
    def scale_elements(self) -> int:
        """Elements of the scales of keys and of values that are read, of a narrow cache."""
        attention = self.attention.attention_layer
        count = 2 * attention.batch * attention.kv_heads * attention.extent
        return count if attention.cache_type else 0

    @property
    def source_elements(self) -> int:
        """Elements of the tensors that the operators before attention compute Q from."""
        return sum(self._other_operand_elements[self._source_begin :])

    @property
    def _other_operand_elements(self) -> list[int]:
        """Elements of each operand other than Q, K and V."""
        region, first_operand = self.attention, 0 if self.attention.prologue else 1
        operands = list(zip(region.inputs, region.input_elements))[first_operand : region.operands]
        return [elements for name, elements in operands if name not in self.covers]

    @property
    def _source_begin(self) -> int:
        """How many of `_other_operand_elements` come before the sources of Q.

        A mask, sinks, scales and positions that are no constants.
        """
        attention, other_count = self.attention.attention_layer, len(self._other_operand_elements)
        scales = 2 if attention.cache_type else 0
        count = attention.masked + attention.sinks + scales + attention.positioned
        return min(count, other_count - bool(self.attention.prologue))


def attention_tasks(
    generator: CandidateGenerator,
    run: CachedRun,
    schedule: CacheSchedule,
    keys: ProductCost,
    values: ProductCost,
) -> tuple[Task, ...]:
    """Scores of each group, then products of the group before with its values; see the module docstring."""
    if not generator.system.gpu_channels:
        return _switched_tasks(generator, run, keys, values)
    parts = schedule.parts
    tasks = _AttentionTasks(generator, run, parts)
    query_tasks = tasks.append(
        [_query_task(generator, run)] if run.attention.has_prologue_kernels else [], ()
    )
    softmaxes: list[tuple[int, ...]] = []
    for part in range(parts + 1):
        if part < parts:
            score_tasks = tasks.append_scores(part, keys, values, query_tasks)
            kernels = softmax_kernels(generator, run, keys, parts)
            softmaxes.append(tasks.append_softmax(part, kernels, score_tasks))
        if part:
            probabilities = math.prod(run.attention.attention_layer.score_shape)
            product = tasks.program(
                f"{run.attention.name} values", part - 1, values.product, probabilities, values.sums
            )
            tasks.append(product, softmaxes[part - 1])
    tasks.append(_sum_tasks(generator, run, values), tuple(range(len(tasks.tasks))))
    return tuple(tasks.tasks)


def _switched_tasks(
    generator: CandidateGenerator, run: CachedRun, keys: ProductCost, values: ProductCost
) -> tuple[Task, ...]:
    """The tasks where all channels have PIM, one after the other.

    For the GPU's kernels these are plain memory. Before a program, operands are read into the L2, and all
    channels are switched; after it they are switched back, and results are written.
    """
    tasks, attention = _AttentionTasks(generator, run, 1), run.attention.attention_layer
    dtype, name = generator.system.dtype, run.attention.name
    element, result = ELEMENT_BYTES[dtype], RESULT_BYTES[dtype]
    appended = run.keys.kernel.append_elements + run.values.kernel.append_elements
    probabilities = math.prod(attention.score_shape)
    tasks.append([_query_task(generator, run)] if run.attention.has_prologue_kernels else [], ())
    tasks.append_operands(f"{name} scores", (run.query_elements + appended) * element)
    tasks.append_scores(0, keys, values, tasks.last)
    tasks.append_results(f"{name} scores", keys.product.results * keys.sums * result)
    tasks.append_softmax(0, softmax_kernels(generator, run, keys, 1), tasks.last)
    tasks.append_operands(f"{name} values", probabilities * element)
    tasks.append(tasks.program(f"{name} values", 0, values.product, probabilities, values.sums), tasks.last)
    tasks.append_results(f"{name} values", math.prod(attention.output_shape) * values.sums * result)
    tasks.append(_sum_tasks(generator, run, values), tasks.all)
    return tuple(tasks.tasks)


@dataclass(frozen=True)
class _AttentionTasks:
    """The tasks of attention in `parts` groups, in the order in which they are issued."""

    generator: CandidateGenerator
    run: CachedRun
    parts: int
    tasks: list[Task] = field(default_factory=list)

    def append(self, tasks: Iterable[Task], after: tuple[int, ...]) -> tuple[int, ...]:
        """Append tasks that wait for the tasks `after`; returns their positions."""
        begin = len(self.tasks)
        self.tasks.extend(task.with_dependencies(after) for task in tasks)
        return tuple(range(begin, len(self.tasks)))

    @property
    def all(self) -> tuple[int, ...]:
        """Positions of all tasks so far."""
        return tuple(range(len(self.tasks)))

    @property
    def last(self) -> tuple[int, ...]:
        """Position of the last task, if there is one."""
        return self.all[-1:]

    def append_operands(self, label: str, read_bytes: int) -> None:
        """Append the read of a program's operands into the L2, and the switch of all channels to PIM."""
        transfer = self._l2_reuse.transfer_task(f"{label} (operands to the L2)", read_bytes)
        for task in (transfer, *self.generator.task_builder.switch_tasks):
            self.append([task], self.last)

    def append_results(self, label: str, result_bytes: int) -> None:
        """Append the switch of all channels to plain memory, and the write of a program's results."""
        write_task, waits = self._l2_reuse.write_task(label, result_bytes), self.all
        for task in (*self.generator.task_builder.switch_tasks, write_task):
            waits = self.append([task], waits)

    @property
    def _l2_reuse(self) -> L2Reuse:
        return L2Reuse(self.generator)

    def program(self, label: str, part: int, cost: PimCost, value_elements: int, sums: int = 1) -> list[Task]:
        """The tasks of a PIM program of one group, in a submission of its own."""
        return self.generator.task_builder.pim_tasks(
            label + self._part_label(part), cost, value_elements // self.parts, sums
        )

    def append_scores(
        self, part: int, keys: ProductCost, values: ProductCost, after: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Append one submission: the appends to both caches, and between them the product with the keys.

        Returns the positions of the tasks of the product.
        """
        run = self.run
        key_elements, value_elements = run.keys.kernel.append_elements, run.values.kernel.append_elements
        first = self.append(self.program(run.keys.name, part, keys.append, key_elements), after)[:1]
        product = self.program(
            f"{run.attention.name} scores", part, keys.product, run.query_elements, keys.sums
        )
        score_tasks = self.append(map(_without_launch, product), first)
        new_values = self.program(run.values.name, part, values.append, value_elements)
        self.append(map(_without_launch, new_values), first)
        return score_tasks

    def append_softmax(
        self, part: int, kernels: Mapping[str, Kernel], after: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Append the kernels of the softmax of the scores of one group, in sequence."""
        name, builder = self.run.attention.name, self.generator.task_builder
        for title, kernel in kernels.items():
            label = f"{name} ({title}{self._part_label(part)})"
            if self.parts > 1:
                after = self.append(builder.gpu_tasks_with_traffic(label, name, kernel), after)
            else:
                after = self.append([builder.gpu_task(label, kernel)], after)
        return after

    def _part_label(self, part: int) -> str:
        return f", {part + 1} of {self.parts}" if self.parts > 1 else ""


def _without_launch(task: Task) -> Task:
    """A task of a program in the submission of another."""
    return replace(task, launch_ns=0.0, launched=False)


def softmax_kernels(
    generator: CandidateGenerator, run: CachedRun, keys: ProductCost, parts: int
) -> dict[str, Kernel]:
    """By title, the kernels that compute the softmax of the scores of one of `parts` groups.

    Scores of a narrow cache are multiplied by the scales of keys in a kernel of their own.
    """
    region, dtype = run.attention, generator.system.dtype
    scores, element = keys.product.results * keys.sums, ELEMENT_BYTES[dtype]
    read_bytes, written = scores * RESULT_BYTES[dtype], math.prod(region.attention_layer.score_shape) // parts
    kernels = {}
    if region.attention_layer.cache_type:
        scales = run.scale_elements // (2 * parts)
        kernels["scales"] = Kernel(
            kind="stream",
            macs=scores,
            input_bytes=read_bytes + scales * element,
            output_bytes=written * element,
        )
        scores, read_bytes = written, written * element
    kernels["softmax"] = Kernel(
        kind="stream",
        macs=scores + run.mask_elements,
        input_bytes=read_bytes + run.mask_elements * element,
        output_bytes=written * element,
    )
    return kernels


def partial_sum_bytes(generator: CandidateGenerator, run: CachedRun, values: ProductCost) -> int:
    """Bytes of the partial sums to add up; 0 if there is one for each element."""
    elements = math.prod(run.attention.attention_layer.output_shape)
    return elements * values.sums * RESULT_BYTES[generator.system.dtype] if values.sums > 1 else 0


def _sum_tasks(generator: CandidateGenerator, run: CachedRun, values: ProductCost) -> list[Task]:
    """The kernel that adds up partial sums and does the epilogue; none if there is nothing to do."""
    read_bytes = partial_sum_bytes(generator, run, values)
    if not (read_bytes or run.attention.epilogue.arithmetic) or not generator.system.charges("epilogue"):
        return []
    result = math.prod(run.attention.attention_layer.output_shape)
    read_bytes += 0 if read_bytes else result * RESULT_BYTES[generator.system.dtype]
    read_bytes += (
        sum(run.attention.input_elements[run.attention.operands :]) * ELEMENT_BYTES[generator.system.dtype]
    )
    kernel = Kernel(
        kind="stream",
        macs=(values.sums - 1) * result,
        input_bytes=read_bytes,
        output_bytes=run.attention.output_elements * ELEMENT_BYTES[generator.system.dtype],
    )
    return [generator.task_builder.gpu_task(f"{run.attention.name} (sums)", kernel)]


def _query_task(generator: CandidateGenerator, run: CachedRun) -> Task:
    """The kernel of the operators before attention, which compute the queries."""
    element, operators = ELEMENT_BYTES[generator.system.dtype], ", ".join(run.attention.prologue)
    kernel = Kernel(
        kind="stream", input_bytes=run.source_elements * element, output_bytes=run.query_elements * element
    )
    return generator.task_builder.gpu_task(f"{run.attention.name} ({operators})", kernel)
