"""The tasks of attention over a cache in PIM: appends, both products, and the softmax between on the GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pimflow.core.candidate import Task
from pimflow.core.kernel import ELEMENT_BYTES, RESULT_BYTES, Kernel
from pimflow.core.region import Region
from pimflow.placement.candidates.candidates import CandidateGenerator
from pimflow.placement.candidates.tasks import TaskList
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
        attention, elements = self.attention.attention_layer, sum(self._other_operands[0])
        unread = 2 * math.prod(attention.scale_shape) - self.scale_elements // 2
        return elements - unread if attention.cache_type else elements

    @property
    def scale_elements(self) -> int:
        """Elements of the scales of keys and of values that are read, of a narrow cache."""
        attention = self.attention.attention_layer
        count = 2 * attention.batch * attention.kv_heads * attention.extent
        return count if attention.cache_type else 0

    @property
    def source_elements(self) -> int:
        """Elements of the tensors that the operators before attention compute Q from."""
        return sum(self._other_operands[1])

    @property
    def _other_operands(self) -> tuple[list[int], list[int]]:
        """Elements of each operand other than Q, K and V.

        First a mask, sinks, scales and positions that are no constants, then the sources of Q.
        """
        region, attention = self.attention, self.attention.attention_layer
        operands = list(zip(region.inputs, region.input_elements))[not region.prologue : region.operands]
        elements = [count for name, count in operands if name not in self.covers]
        scales = 2 if attention.cache_type else 0
        count = attention.masked + attention.sinks + scales + attention.positioned
        begin = min(count, len(elements) - bool(region.prologue))
        return elements[:begin], elements[begin:]


def attention_tasks(
    generator: CandidateGenerator, run: CachedRun, keys: ProductCost, values: ProductCost, parts: int
) -> tuple[Task, ...]:
    """Scores of each group, then products of the group before with its values (see `pim_attention`).

    If all channels have PIM, there is one group. For the GPU's kernels the channels are plain memory: before
    a program, operands are read into the L2, and all channels are switched; after it they are switched back,
    and results are written.
    """
    tasks = _AttentionTasks(generator, run, parts)
    has_query_kernel = run.attention.has_prologue_kernels
    query_tasks = tasks.append_after([_query_task(generator, run)] if has_query_kernel else [], ())
    softmaxes: list[tuple[int, ...]] = []
    for part in range(parts + 1):
        if part < parts:
            waits = tasks.append_scores(part, keys, values, query_tasks)
            softmaxes.append(tasks.append_softmax(part, keys, waits))
        if part:
            tasks.append_values(part - 1, values, softmaxes[part - 1])
    tasks.append_after(_sum_tasks(generator, run, values), tasks.positions)
    return tuple(tasks)


class _AttentionTasks(TaskList):
    """The tasks of attention in `parts` groups."""

    def __init__(self, generator: CandidateGenerator, run: CachedRun, parts: int):
        super().__init__()
        self.run, self.parts, self.system = run, parts, generator.system
        self.builder, self.name = generator.task_builder, run.attention.name

    def _suffix(self, part: int) -> str:
        return f", {part + 1} of {self.parts}" if self.parts > 1 else ""

    def _program(self, label: str, cost: PimCost, value_elements: int, sums: int = 1) -> list[Task]:
        """The tasks of a PIM program of one group, in a submission of its own."""
        return self.builder.pim_tasks(label, cost, value_elements // self.parts, sums)

    def _append_staging(self, label: str, read_elements: int, waits: tuple[int, ...]) -> tuple[int, ...]:
        """Append what comes before a program if all channels have PIM; returns what the program awaits."""
        if self.system.gpu_channels:
            return waits
        read_bytes = read_elements * ELEMENT_BYTES[self.system.dtype]
        return self.append_sequence(self.builder.staging_tasks(label, read_bytes), waits)

    def _append_writeback(self, label: str, results: int, waits: tuple[int, ...]) -> tuple[int, ...]:
        """Append what follows a program if all channels have PIM; returns what a reader awaits."""
        if self.system.gpu_channels:
            return waits
        result_bytes = results * RESULT_BYTES[self.system.dtype]
        return self.append_sequence(self.builder.writeback_tasks(label, result_bytes), self.positions)

    def append_scores(
        self, part: int, keys: ProductCost, values: ProductCost, waits: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Append the product with the keys, between the appends to both caches, as one submission.

        Returns the positions of the tasks that the softmax awaits.
        """
        run, suffix, label = self.run, self._suffix(part), f"{self.name} scores"
        key_elements, value_elements = run.keys.kernel.append_elements, run.values.kernel.append_elements
        waits = self._append_staging(label, run.query_elements + key_elements + value_elements, waits)
        new_keys = self._program(run.keys.name + suffix, keys.append, key_elements)
        first = self.append_after(new_keys, waits)[:1]
        product = self._program(label + suffix, keys.product, run.query_elements, keys.sums)
        score_tasks = self.append_after(map(_without_launch, product), first)
        new_values = self._program(run.values.name + suffix, values.append, value_elements)
        self.append_after(map(_without_launch, new_values), first)
        return self._append_writeback(label, keys.product.results * keys.sums, score_tasks)

    def append_softmax(self, part: int, keys: ProductCost, waits: tuple[int, ...]) -> tuple[int, ...]:
        """Append the kernels of the softmax of the scores; returns the positions of the last one's tasks."""
        for title, kernel in softmax_kernels(self.system.dtype, self.run, keys, self.parts).items():
            label = f"{self.name} ({title}{self._suffix(part)})"
            tasks = self.builder.gpu_tasks_with_traffic(label, self.name, kernel)
            waits = self.append_after(tasks if self.parts > 1 else tasks[:1], waits)
        return waits

    def append_values(self, part: int, values: ProductCost, waits: tuple[int, ...]) -> None:
        """Append the product of the softmax with the values."""
        attention, label = self.run.attention.attention_layer, f"{self.name} values"
        probabilities = math.prod(attention.score_shape)
        waits = self._append_staging(label, probabilities, waits)
        product = self._program(label + self._suffix(part), values.product, probabilities, values.sums)
        product_tasks = self.append_after(product, waits)
        self._append_writeback(label, math.prod(attention.output_shape) * values.sums, product_tasks)


def _without_launch(task: Task) -> Task:
    """A task of a program in the submission of another."""
    return replace(task, launch_ns=0.0, launched=False)


def softmax_kernels(dtype: str, run: CachedRun, keys: ProductCost, parts: int) -> dict[str, Kernel]:
    """By title, the kernels that compute the softmax of the scores of one of `parts` groups.

    Scores of a narrow cache are multiplied by the scales of keys in a kernel of their own.
    """
    region = run.attention
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


def partial_sum_bytes(dtype: str, run: CachedRun, values: ProductCost) -> int:
    """Bytes of the partial sums to add up; 0 if there is one for each element."""
    elements = math.prod(run.attention.attention_layer.output_shape)
    return elements * values.sums * RESULT_BYTES[dtype] if values.sums > 1 else 0


def _sum_tasks(generator: CandidateGenerator, run: CachedRun, values: ProductCost) -> list[Task]:
    """The kernel that adds up partial sums and does the epilogue; none if there is nothing to do."""
    region, dtype = run.attention, generator.system.dtype
    sum_bytes, result = partial_sum_bytes(dtype, run, values), math.prod(region.attention_layer.output_shape)
    if not (sum_bytes or region.epilogue.arithmetic) or not generator.system.charges("epilogue"):
        return []
    added_bytes = sum(region.input_elements[region.operands :]) * ELEMENT_BYTES[dtype]
    kernel = Kernel(
        kind="stream",
        macs=(values.sums - 1) * result,
        input_bytes=(sum_bytes or result * RESULT_BYTES[dtype]) + added_bytes,
        output_bytes=region.output_elements * ELEMENT_BYTES[dtype],
    )
    return [generator.task_builder.gpu_task(f"{run.attention.name} (sums)", kernel)]


def _query_task(generator: CandidateGenerator, run: CachedRun) -> Task:
    """The kernel of the operators before attention, which compute the queries."""
    element, operators = ELEMENT_BYTES[generator.system.dtype], ", ".join(run.attention.prologue)
    kernel = Kernel(
        kind="stream", input_bytes=run.source_elements * element, output_bytes=run.query_elements * element
    )
    return generator.task_builder.gpu_task(f"{run.attention.name} ({operators})", kernel)
