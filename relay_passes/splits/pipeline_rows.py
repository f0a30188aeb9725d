"""Pipelined execution: a run of convolutions in stages along output rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm import relax

from pimflow.core.ranges import RangeMap
from pimflow.core.rewrite import Mode
from pimflow.core.stages import Pipeline, StageRows, stage_name, stage_rows
from pimflow.errors import PlanError
from pimflow.relay_passes.flat import layer_name, operator, rebuild, shape, substitute, use_counts
from pimflow.relay_passes.operators import BINARY, UNARY
from pimflow.relay_passes.regions.kernel_groups import KernelGroup, kernel_groups, use_count
from pimflow.relay_passes.splits.split_mddp import convolution_rows, row_map

ROWS = 1  # their axis in NHWC

Env = dict[relax.Var, relax.Expr]


@tvm.transform.module_pass(opt_level=0, name="PipelineRows")
class PipelineRows:
    """Cut a run of regions into stages, so that both devices work on it (PIMFlow, "Pipelined Execution").

    A stage computes the rows of each region that it needs and that no earlier stage has computed. The rows of
    a tensor that exist by then are a concatenation of parts, which needs no copy. A region on the GPU
    includes its elementwise prologue and its epilogue. The epilogue of a region on PIM is in the kernel that
    reads it, or stays behind the last region.

    Parameters
    ----------
    pipelines : sequence of Pipeline
        Regions as `kernel_groups` titles them.

    Rewrite: ``y = f(g(x)) -> g0 = g(x[a:b]); y0 = f(g0); g1 = g(x[c:d]); y1 = f(concat(g0, g1)[e:h]);
    y = concat(y0, y1)``, parts named ``*__stage0``, ``*__stage1``, each with the rest of the padding.
    Preserves: values bit by bit, names of all else.

    Raises
    ------
    PlanError
        If a run is no chain of convolutions along rows, or cannot be cut so.
    """

    def __init__(self, pipelines: Sequence[Pipeline]):
        self.pipelines = tuple(pipelines)

    def transform_module(self, mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        """`mod` after the pass."""
        groups = {layer_name(mod, group.title): group for group in kernel_groups(mod)}
        counts, runs = use_counts(mod), {}
        for pipeline in self.pipelines:
            members = [groups.get(name) for name in pipeline.regions]
            # A pipeline that was applied already has no regions in the module.
            if all(member is not None and _is_convolution(member) for member in members):
                run = _run(pipeline, members, counts)
                runs[run.result] = run
        env: Env = {}

        def rewrite(builder: relax.BlockBuilder, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
            """The new value of `var`; None if `value` stays."""
            if var in runs:
                env[var] = _StageEmitter(builder, runs[var], env).emit_stages()
            elif isinstance(value, relax.Var):
                env[var] = value
                return None
            else:
                env[var] = builder.emit(value, name_hint=var.name)
            return env[var]

        return rebuild(mod, rewrite)


@dataclass(frozen=True)
class _PipelineRun:
    """A pipeline in a module.

    Attributes
    ----------
    rows : list of list of (begin, end)
        Output rows by region and stage.
    """

    pipeline: Pipeline
    groups: list[KernelGroup]
    maps: list[RangeMap]
    rows: StageRows

    @property
    def result(self) -> relax.Var:
        """The variable that the concatenated stages replace."""
        last = self.groups[-1]
        return last.result if self.pipeline.modes[-1] is Mode.GPU else last.anchor.var


def _is_convolution(group: KernelGroup) -> bool:
    return group.anchor is not None and operator(group.anchor.value) == "nn.conv2d"


def _run(pipeline: Pipeline, groups: list[KernelGroup], counts: dict[relax.Var, int]) -> _PipelineRun:
    """The run of a `pipeline`; raises `PlanError` with the name of a region that cannot be pipelined."""
    for position, (name, group) in enumerate(zip(pipeline.regions, groups)):
        problem = _problem(group)
        if not problem and position:
            before = groups[position - 1].result
            if not _source(group).same_as(before):
                problem = "it does not read the region before it"
            elif counts[before] != use_count(group.bindings, before):
                problem = "others read the region before it, too"
        if not problem and pipeline.modes[position] is Mode.PIM and _prologue(group):
            problem = "PIM does not compute what comes before the convolution"
        if problem:
            raise PlanError(f"region '{name}' cannot be pipelined: {problem}")
    pairs = zip(pipeline.modes, pipeline.modes[1:], groups, pipeline.regions)
    for mode, after, group, name in pairs:
        if mode is after is Mode.PIM and not group.result.same_as(group.anchor.var):
            raise PlanError(
                f"region '{name}' cannot be pipelined: its epilogue needs the GPU between PIM regions"
            )
    maps = [row_map(group.anchor.value, ROWS) for group in groups]
    try:
        return _PipelineRun(pipeline, groups, maps, stage_rows(maps, pipeline.cuts))
    except ValueError as error:
        raise PlanError(f"region '{pipeline.regions[-1]}' cannot be pipelined: {error}") from error


def _problem(group: KernelGroup) -> str:
    """Why a kernel cannot be computed in parts along rows; empty if it can."""
    call, result = group.anchor.value, group.anchor.var
    if str(call.attrs.data_layout) != "NHWC" or shape(result)[0] != 1:
        return "it is no convolution of one image in NHWC"
    if group.extra_outputs or _source(group) is None:
        return "its kernel does more than a convolution and what is elementwise around it"
    around = [(b, shape(call.args[0])) for b in _prologue(group)]
    around += [(b, shape(result)) for b in _epilogue(group)]
    for binding, dims in around:
        if operator(binding.value) not in UNARY + BINARY or shape(binding.var) != dims:
            return f"'{binding.var.name}' is not elementwise"
    return ""


def _anchor_index(group: KernelGroup) -> int:
    """Position of the anchor."""
    return next(i for i, b in enumerate(group.bindings) if b.var.same_as(group.anchor.var))


def _prologue(group: KernelGroup) -> list[relax.VarBinding]:
    return group.bindings[: _anchor_index(group)]


def _epilogue(group: KernelGroup) -> list[relax.VarBinding]:
    return group.bindings[_anchor_index(group) + 1 :]


def _source(group: KernelGroup) -> relax.Var | None:
    """The tensor that the convolution reads, through its prologue; None if there are several."""
    leading = group.bindings[: _anchor_index(group) + 1]
    inner_vars = {b.var for b in leading}
    sources = {v for b in leading for v in relax.analysis.free_vars(b.value)} - inner_vars
    return next(iter(sources)) if len(sources) == 1 else None


@dataclass(frozen=True)
class _StageEmitter:
    """Emits the parts of a run; `env` has the new values of variables before it."""

    builder: relax.BlockBuilder
    run: _PipelineRun
    env: Env

    def emit_stages(self) -> relax.Var:
        """Emit all parts in the order of execution; returns the complete result of the last region."""
        run = self.run
        # By region and stage, the rows that exist after the stage.
        done_rows: dict[tuple[int, int], relax.Var] = {}
        for position, stage in run.pipeline.steps:
            group = run.groups[position]
            source = done_rows[position - 1, stage] if position else substitute(_source(group), self.env)
            part = self._emit_convolution(position, stage, source)
            if run.pipeline.modes[position] is Mode.GPU:
                rows = run.rows[position][stage]
                part = self._emit_elementwise(_epilogue(group), group.anchor.var, part, rows, stage)
            if stage:
                last = position == len(run.groups) - 1 and stage == len(run.pipeline.cuts)
                hint = run.result.name if last else f"{group.title.name}__until{stage}"
                whole = relax.op.concat([done_rows[position, stage - 1], part], axis=ROWS)
                part = self.builder.emit(whole, name_hint=hint)
            done_rows[position, stage] = part
        return part

    def _emit_convolution(self, position: int, stage: int, source: relax.Var) -> relax.Var:
        """Emit the rows of a convolution that a stage computes, from the existing rows of its operand."""
        run, group = self.run, self.run.groups[position]
        name = stage_name(group.anchor.var.name, stage)
        before = (
            run.groups[position - 1] if position and run.pipeline.modes[position - 1] is Mode.PIM else None
        )
        reads = run.maps[position].inputs(*run.rows[position][stage])
        rows = reads.begin, reads.end
        x = self._emit_slice(source, rows, f"{name}_in")
        if before is not None and run.pipeline.modes[position] is Mode.GPU:
            x = self._emit_elementwise(_epilogue(before), before.anchor.var, x, rows, stage)
        x = self._emit_elementwise(_prologue(group), _source(group), x, rows, stage)
        return self.builder.emit(convolution_rows(group.anchor.value, x, reads), name_hint=name)

    def _emit_slice(self, x: relax.Expr, rows: tuple[int, int], name: str) -> relax.Expr:
        """Emit some rows of `x`."""
        if rows == (0, shape(x)[ROWS]):
            return x
        part = relax.op.strided_slice(x, [ROWS], rows[:1], rows[1:], assume_inbound=True)
        return self.builder.emit(part, name_hint=name)

    def _emit_elementwise(
        self,
        bindings: list[relax.VarBinding],
        source: relax.Var,
        part: relax.Var,
        rows: tuple[int, int],
        stage: int,
    ) -> relax.Var:
        """Emit `bindings` for some `rows`; `part` has these rows of `source`, which the first binding reads.

        Returns `part` if there are no bindings.
        """
        inside: Env = {source: part}
        height = shape(bindings[0].var)[ROWS] if bindings else 0

        def select_rows(operand: relax.Expr, name: str) -> relax.Expr:
            """The same rows of an outside operand; all of an operand without rows."""
            if isinstance(operand, relax.Var) and operand in inside:
                return inside[operand]
            operand = substitute(operand, self.env)
            dims = shape(operand) if isinstance(operand.ty, relax.TensorType) else ()
            if len(dims) < 3 or dims[-3] != height or height == 1:
                return operand
            if isinstance(operand, tvm.ir.GenericConst):
                return relax.const(operand.value.numpy()[..., rows[0] : rows[1], :, :])
            return self._emit_slice(operand, rows, f"{name}_rows")

        for binding in bindings:
            value, name = binding.value, stage_name(binding.var.name, stage)
            args = [select_rows(arg, name) for arg in value.args]
            call = relax.Call(value.op, args, value.attrs, value.ty_args)
            part = inside[binding.var] = self.builder.emit(call, name_hint=name)
        return part
