"""Device epilogues: PIM itself does the epilogue of a layer, and no GPU kernel has to.

Latches can start from a bias or a residual (`PimProgram.initial`). The product itself can add a residual
(`PimProgram.added_channels`), without such latches. An activation after them can be applied before sums are
read (`PimProgram.activation`), if its table is known to be exact. Other activations stay on the GPU; if a
device has a unit for them, `min_activation_ns` is a lower bound of their time.
"""

from __future__ import annotations

from dataclasses import replace

from pimflow.core.kernel import ConvGeometry
from pimflow.core.region import RESHAPE, Region
from pimflow.core.rewrite import LayerRewrite, PimRewrite, SplitRewrite
from pimflow.errors import PlanError
from pimflow.hardware import System
from pimflow.placement.costs.pim_runs import ONLY_SUMS, LatchUse

# Operators that a table of an activation unit can have: functions of one result.
_ACTIVATIONS = {"nn.relu", "clip", "sigmoid", "tanh", "nn.silu", "nn.gelu", "nn.leakyrelu"}
_RELU6 = (0.0, 6.0)


def latch_use(region: Region, rewrite: LayerRewrite) -> LatchUse:
    """What latches start from as PIM computes `region`, and the activation of their sums."""
    if isinstance(rewrite, SplitRewrite) or not rewrite.device_epilogue:
        return ONLY_SUMS
    added = "add" if rewrite.accumulates_residual else ""
    initial = [operator for operator in _operators_to_activation(region) if operator != added]
    return LatchUse(initial=initial[0] if initial else "", activation=_activation(region))


def pim_layer(region: Region, rewrite: LayerRewrite) -> ConvGeometry:
    """The layer that PIM computes: with further channels if the product adds the residual."""
    adds_residual = isinstance(rewrite, PimRewrite) and rewrite.accumulates_residual
    return region.layer.with_added_channels if adds_residual else region.layer


def device_epilogues(region: Region, system: System) -> tuple[PimRewrite, ...]:
    """All device epilogues of `region`; none if PIM cannot do its epilogue, or there is none."""
    can_start_latches = system.pim.can_write_latches and system.timing == "strict"
    operators, activation = _operators_to_activation(region), _activation(region)
    supported = {*operators} & {"bias", "add"}
    if (
        not region.epilogue.operators
        or (region.geometry is not None and region.geometry.activations)  # sums are of integers
        or sorted(operators) != sorted(supported)
        or ("add" in supported and not _has_residual(region))
    ):
        return ()
    if system.pim.result_lanes > 1 or ("bias" in supported and not can_start_latches):
        return ()
    if activation and not (system.pim.can_activate and system.timing == "strict"):
        return ()
    by_latches = PimRewrite(device_epilogue=region.epilogue.operators)
    epilogues = [by_latches] if len(supported) <= (1 if can_start_latches else 0) else []
    if "add" in supported and region.geometry and region.geometry.is_pointwise:
        epilogues.append(replace(by_latches, accumulates_residual=True))
    return tuple(epilogues)


def profitable_epilogues(region: Region, system: System) -> tuple[PimRewrite, ...]:
    """Those of `device_epilogues` that may pay: no residual in products or table, if epilogues are free."""
    epilogues = device_epilogues(region, system)
    if system.charges("epilogue"):
        return epilogues
    return tuple(e for e in epilogues if not e.accumulates_residual and not _activation(region))


def with_device_epilogue(region: Region, rewrite: LayerRewrite, system: System) -> LayerRewrite:
    """`rewrite` as PIM does it: if only the product can add the residual, it does so.

    Raises `PlanError` if PIM cannot do the epilogue that it asks for.
    """
    if isinstance(rewrite, SplitRewrite):
        return rewrite
    if not rewrite.device_epilogue:
        return PimRewrite(schedule=rewrite.schedule)
    reason = unsupported_epilogue_reason(region, system)
    if rewrite.device_epilogue != region.epilogue.operators:
        epilogue = ", ".join(region.epilogue.operators) or "nothing"
        reason = f"PIM does {epilogue} of what follows a layer that is wholly its own, or none of it"
    if reason:
        raise PlanError(f"region '{region.name}' cannot be finished on PIM: {reason}")
    epilogues = device_epilogues(region, system)
    is_same = any(e.accumulates_residual == rewrite.accumulates_residual for e in epilogues)
    return rewrite if is_same else replace(epilogues[0], schedule=rewrite.schedule)


def _activation(region: Region) -> str:
    """The activation of `PimProgram` that ends an epilogue; empty for none."""
    last = region.epilogue.operators[-1:]
    if last == ("clip",) and region.epilogue.clip_bounds[-1:] == (_RELU6,):
        return "relu6"
    return "relu" if last == ("nn.relu",) else ""


def _operators_to_activation(region: Region) -> tuple[str, ...]:
    """The operators of an epilogue before the activation that ends it."""
    return region.epilogue.operators[:-1] if _activation(region) else region.epilogue.operators


def unsupported_epilogue_reason(region: Region, system: System) -> str:
    """Why PIM cannot do the epilogue of `region`; empty if it can, or there is none."""
    pim, remaining = system.pim, [*region.epilogue.arithmetic]
    if not remaining or device_epilogues(region, system):
        return ""
    if pim.result_lanes > 1:
        # The activation of a sum does not follow from the activations of its partial sums.
        unit = ", and its activation unit acts on lanes before they are added" * pim.activation_unit
        return f"'{pim.name}' leaves the sums of its lanes to a kernel of the GPU{unit}"
    if system.timing != "strict":
        return f"the timing '{system.timing}' has no command for it"
    if _activation(region) and pim.can_activate:
        remaining.pop()
    latch_operators = [
        operator for operator in ("bias", *["add"] * _has_residual(region)) if operator in remaining
    ]
    for operator in latch_operators:
        remaining.remove(operator)
    if latch_operators and not pim.can_write_latches:
        return (
            f"the latches of '{pim.name}' always start from zero{_residual_obstacle(region, latch_operators)}"
        )
    if remaining and pim.can_activate and set(remaining) <= _ACTIVATIONS:
        unknown = [operator for operator in remaining if operator != "nn.relu"]
        order_reason = f"the activation unit of '{pim.name}' comes last"
        return (
            f"what a table of '{pim.name}' makes of {', '.join(unknown)} is not known"
            if unknown
            else order_reason
        )
    if not remaining and RESHAPE in region.epilogue.operators:
        return "its result takes another shape behind it"
    if not remaining:
        return f"a latch of '{pim.name}' starts from one value{_residual_obstacle(region, latch_operators)}"
    return f"'{pim.name}' does nothing more after a sum: {', '.join(remaining)}"


def _residual_obstacle(region: Region, latch_operators: list[str]) -> str:
    """Why the product of a region cannot add the residual, to be appended to a message; else empty."""
    one_tap = region.geometry and region.geometry.is_pointwise
    return (
        ""
        if one_tap or "add" not in latch_operators
        else ", and only a product of one tap adds a tensor itself"
    )


def min_activation_ns(region: Region, system: System) -> float:
    """A lower bound of the time that an activation unit adds to a region; 0 if a program uses it already.

    Its tables lie in rows of the banks. So for the results of each tile, of all accumulators at once, the row
    of a table is opened, and then that of the weights again. Only these row changes count, on the busiest
    channel.
    """
    g, pim = region.geometry, system.pim
    if (
        g is None
        or not pim.can_activate
        or not _ACTIVATIONS & {*region.epilogue.operators}
        or device_epilogues(region, system)
    ):
        return 0.0
    tiles = -(-g.oc // pim.banks)
    sums = -(-g.pixels * tiles // system.pim_channels)
    rows = -(-sums // (pim.global_buffers * pim.accumulators))
    return rows * pim.row_switch_cycles * pim.tCK_ns


def _has_residual(region: Region) -> bool:
    """Whether the epilogue reads exactly one tensor, of the result's shape: a residual."""
    return region.input_shapes[region.operands :] == (region.output_shape,)
