"""Buffers of a lowered ``main``: their lifetimes over its calls, and the bytes that they share."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import tvm
from tvm import relax

from pimflow.core.liveness import ALIGNMENT_BYTES, MEMORY, Lifetime, Liveness
from pimflow.core.split import GPU_SUFFIX, PIM_SUFFIX
from pimflow.core.stages import whole_name
from pimflow.core.tensor_placement import ChannelSet
from pimflow.relay_passes.flat import CHANNEL_SETS, RESULT, operator, tensor_bytes
from pimflow.relay_passes.memory.keep_views import JOIN, PART, view_call
from pimflow.relay_passes.memory.overwriting import can_overwrite
from pimflow.relay_passes.memory.stream_weights import weight_copy

# Calls whose result is an alias of their operand.
_NAMES = ("reshape", "memory.view", "memory.ensure_zero_offset")


@dataclass(eq=False)
class TensorBuffer:
    """A tensor that ``main`` allocates, or a concatenation of such tensors.

    Attributes
    ----------
    begin, end : int
        Calls between which it is live, half-open; -1 until it is used.
    home : Buffer
        The buffer inside which it lies; itself if it lies in no other.
    within_bytes : int
        Its offset in `home`.
    value : str
        Name in the graph of the value that is first written to it: the layer's name, as a variable.
    memory : str
        The memory region in which it lies: a set of channels, where tensors lie in several sets.
    """

    var: relax.Var
    size_bytes: int
    begin: int = -1
    end: int = -1
    pinned: bool = False
    home: TensorBuffer = field(init=False)
    within_bytes: int = 0
    value: str = ""
    memory: str = MEMORY

    def __post_init__(self) -> None:
        self.home = self

    def place(self) -> tuple[TensorBuffer, int]:
        """The outermost buffer inside which it lies, and its offset there."""
        if self.home is self:
            return self, 0
        home, within_bytes = self.home.place()
        return home, within_bytes + self.within_bytes


@dataclass(frozen=True)
class KernelStep:
    """A call that computes or copies a weight: its kernel, if the module has it, and the buffers it uses.

    `copies_weight` is the name of a call that begins, awaits or makes a copy (`stream_weights`), else empty.
    """

    kernel: tvm.ir.GlobalVar | None
    operands: tuple[TensorBuffer | None, ...]
    copies_weight: str = ""


@dataclass(frozen=True)
class MainBuffers:
    """Buffers of ``main`` by the variable that first holds each, and the calls that use them.

    Attributes
    ----------
    by_var : dict of Var to Buffer
        Allocations and joins.
    overwritten : dict of Buffer to Buffer
        Results that reuse the memory of an operand, with that operand.
    kernels_in_place : set of GlobalVar
        Kernels that write a result over an operand.
    """

    by_var: dict[relax.Var, TensorBuffer]
    steps: list[KernelStep]
    overwritten: dict[TensorBuffer, TensorBuffer]
    kernels_in_place: set[tvm.ir.GlobalVar]
    weights: set[TensorBuffer]

    @property
    def names(self) -> dict[TensorBuffer, str]:
        """A unique name of each buffer, the same for equal modules: its number and the name of its value."""
        return {
            buffer: f"{index}:{buffer.value or buffer.var.name}"
            for index, buffer in enumerate(self.by_var.values())
        }

    @property
    def kernels_before(self) -> list[int]:
        """By step, and once more at the end, how many kernels and PIM programs run before it."""
        return list(accumulate((not step.copies_weight for step in self.steps), initial=0))

    def liveness(self) -> Liveness:
        """Lifetimes over the calls of ``main``; a buffer that no call uses needs no memory."""
        names = self.names
        lifetimes = []
        for buffer, name in names.items():
            if buffer.begin < 0:
                continue
            home, within_bytes = buffer.place()
            lifetimes.append(
                Lifetime(
                    name=name,
                    begin=buffer.begin,
                    end=buffer.end,
                    size_bytes=buffer.size_bytes,
                    memory=home.memory,
                    alias=names[home],
                    within_bytes=within_bytes,
                    pinned=buffer.pinned,
                    alignment_bytes=ALIGNMENT_BYTES,
                )
            )
        return Liveness(steps=len(self.steps), lifetimes=tuple(lifetimes))


def buffers(mod: tvm.IRModule, *, in_place: bool = True) -> MainBuffers:
    """Buffers of ``main`` after ``CallTIRRewrite``.

    A call is a step; the first call with a buffer writes it. Results of ``main`` are live to the end.

    Parameters
    ----------
    in_place : bool
        Whether results may reuse the memory of operands whose last use is the same kernel (Occamy, III-B).
    """
    unshared = _read_buffers(mod)
    return _reuse_operands(mod, unshared) if in_place else unshared


def _read_buffers(mod: tvm.IRModule) -> MainBuffers:
    reader, body = _BindingReader(), mod["main"].body
    for binding in (b for block in body.blocks for b in block.bindings):
        reader.bind(binding.var, binding.value)
    for buffer in reader.buffers_in(body.body):
        buffer.pinned, buffer.end = True, len(reader.steps)
    _place_in_channels(reader.by_var.values(), CHANNEL_SETS.read(mod))
    for buffer in reader.buffers_in(body.body):
        if buffer.value.startswith("gv"):  # TVM's name of results without a name
            buffer.value = "output"
    for buffer in reversed(reader.by_var.values()):
        if buffer.home is not buffer and buffer.home.begin >= 0:
            # Parts are live as long as their tensor, through which they are read.
            buffer.end = max(buffer.end, buffer.home.end)
    return MainBuffers(reader.by_var, reader.steps, {}, set(), reader.weights)


def _place_in_channels(main_buffers: Collection[TensorBuffer], sets: Mapping[str, str]) -> None:
    """Set the memory of each buffer by `sets`, the channel set of each variable, if there are several sets.

    A part lies in the set of its tensor. A buffer without a name in the graph, such as a workspace, lies in
    the set of the result of the last call that uses it: of its own, where it completes an earlier one too.
    """
    if not sets:
        return
    written: dict[int, list[TensorBuffer]] = {}
    named: dict[TensorBuffer, str] = {}
    for buffer in main_buffers:
        written.setdefault(buffer.begin, []).append(buffer)
        tensor_name = whole_name(buffer.value, sets)
        if tensor_name not in sets:  # a part of a split
            tensor_name = tensor_name.removesuffix(GPU_SUFFIX).removesuffix(PIM_SUFFIX)
        if tensor_name not in sets and buffer.pinned:
            tensor_name = RESULT
        if tensor_name in sets:
            named[buffer] = sets[tensor_name]
    for buffer in main_buffers:
        steps = range(buffer.end - 1, buffer.begin - 1, -1)
        beside = (n for step in steps for n in reversed(written.get(step, ())) if n in named)
        neighbour = buffer if buffer in named else next(beside, None)
        buffer.memory = named[neighbour] if neighbour else ChannelSet.GPU.value


class _BindingReader:
    """Reads ``main`` binding by binding, and records which buffers each variable holds."""

    def __init__(self) -> None:
        self.by_var: dict[relax.Var, TensorBuffer] = {}
        self.steps: list[KernelStep] = []
        self.weights: set[TensorBuffer] = set()
        self._buffers: dict[relax.Var, tuple[TensorBuffer, ...]] = {}  # several for a tuple
        self._fields: dict[relax.Var, list[relax.Expr]] = {}

    def buffers_in(self, expr: relax.Expr) -> tuple[TensorBuffer, ...]:
        """The buffers that `expr` holds, one for each field of a tuple."""
        if isinstance(expr, relax.Var):
            return self._buffers.get(expr, ())
        if isinstance(expr, relax.Tuple):
            return tuple(buffer for item in expr.fields for buffer in self.buffers_in(item))
        return ()

    def bind(self, var: relax.Var, value: relax.Expr) -> None:
        """Read one binding."""
        if operator(value) == "builtin.alloc_tensor":
            self._add_buffer(var, TensorBuffer(var, tensor_bytes(var)))
        elif view_call(value) == JOIN:
            self._add_buffer(var, _join_parts(var, [self.buffers_in(part) for part in value.args]))
        elif operator(value) in _NAMES or view_call(value) == PART:
            self._add_alias(var, value.args[0])
        elif isinstance(value, relax.Tuple):
            self._buffers[var], self._fields[var] = self.buffers_in(value), list(value.fields)
        elif isinstance(value, relax.TupleGetItem):
            fields = self._fields.get(value.tuple_value)
            self._add_alias(var, fields[value.index] if fields else value.tuple_value)
        elif isinstance(value, relax.Var):
            self._add_alias(var, value)
        elif isinstance(value, relax.Call):
            self._add_step(value)

    def _add_buffer(self, var: relax.Var, buffer: TensorBuffer) -> None:
        self.by_var[var] = buffer
        self._buffers[var] = (buffer,)

    def _add_alias(self, var: relax.Var, source: relax.Expr) -> None:
        """Record that `var` is an alias of `source`."""
        self._buffers[var] = self.buffers_in(source)
        for buffer in self._buffers[var] if len(self._buffers[var]) == 1 else ():
            buffer.value = buffer.value or var.name
        if source in self._fields:
            self._fields[var] = self._fields[source]

    def _add_step(self, call: relax.Call) -> None:
        number = len(self.steps)
        for arg in call.args:
            for buffer in self.buffers_in(arg):
                buffer.begin = number if buffer.begin < 0 else buffer.begin
                buffer.end = max(buffer.end, number + 1)
        operands = tuple(next(iter(self.buffers_in(arg)), None) for arg in call.args)
        kernel = call.op if isinstance(call.op, tvm.ir.GlobalVar) else None
        copies_weight = weight_copy(call)
        if copies_weight:
            self.weights |= {buffer for buffer in operands if buffer is not None}
        if kernel is not None or any(operands):
            self.steps.append(KernelStep(kernel, operands, copies_weight))


def _join_parts(var: relax.Var, parts: list[tuple[TensorBuffer, ...]]) -> TensorBuffer:
    """The concatenation of `parts`, inside which they lie from now on."""
    tensor = TensorBuffer(var, tensor_bytes(var), value=var.name)
    within_bytes = 0
    for (part,) in parts:
        assert part.home is part, "a part lies in one tensor only"
        part.home, part.within_bytes = tensor, within_bytes
        within_bytes += part.size_bytes
        tensor.begin = part.begin if tensor.begin < 0 else min(tensor.begin, part.begin)
        tensor.end = max(tensor.end, part.end)
    assert within_bytes == tensor.size_bytes, "parts fill their tensor"
    return tensor


def _reuse_operands(mod: tvm.IRModule, main_buffers: MainBuffers) -> MainBuffers:
    """`main_buffers`, with results in the memory of operands whose last use is the same call."""
    members: dict[TensorBuffer, list[TensorBuffer]] = {}
    for buffer in main_buffers.by_var.values():
        members.setdefault(buffer.place()[0], []).append(buffer)

    def is_last_use(operand: TensorBuffer, step: int) -> bool:
        """Whether no buffer in the memory of `operand` is live after `step`."""
        home, _ = operand.place()
        return all(sharing.end <= step + 1 and not sharing.pinned for sharing in members[home])

    for number, step in enumerate(main_buffers.steps):
        if step.kernel is None:
            continue
        for result, operand in _reuse_candidates(step, number):
            if operand.size_bytes != result.size_bytes or not is_last_use(operand, number):
                continue
            if operand.place()[0].memory != result.memory:
                continue
            positions = step.operands.index(operand), step.operands.index(result)
            if not can_overwrite(mod[step.kernel], *positions):
                continue
            result.home, result.within_bytes = operand, 0
            main_buffers.overwritten[result] = operand
            main_buffers.kernels_in_place.add(step.kernel)
            moved = members.pop(result)
            members[operand.place()[0]] += moved
    return main_buffers


def _reuse_candidates(step: KernelStep, number: int) -> Iterator[tuple[TensorBuffer, TensorBuffer]]:
    """Pairs of a result of `step` without a place yet, and an operand whose memory it may reuse."""
    results = [b for b in step.operands if b is not None and b.begin == number and b.home is b]
    operands = [b for b in step.operands if b is not None and 0 <= b.begin < number]
    reused_homes: set[TensorBuffer] = set()
    for result in results:
        for operand in operands:
            home = operand.place()[0]
            sharing = [b for b in operands if b.place()[0] is home]
            if len(sharing) == 1 and home not in reused_homes and result.home is result:
                yield result, operand
                if result.home is not result:
                    reused_homes.add(home)
