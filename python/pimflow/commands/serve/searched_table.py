"""The table of a server's step costs, made of searched plans."""

from __future__ import annotations

import numpy as np

from pimflow.commands.serve.step_costs import StepPlans
from pimflow.commands.serve.step_grid import StepGrid
from pimflow.commands.serve.step_table import HeldOutStep, StepTable
from pimflow.core.json_form import report_from

MIN_CHUNK = 16  # tokens: a shorter chunk costs as much
_TILE = 32  # tokens: GPU kernels of the model work by tiles of a multiple of it


def searched_table(
    plans: StepPlans, max_batch: int, chunk_tokens: int, random_points: int = 0, seed: int = 0
) -> StepTable:
    """Search steps for a grid that is refined, and judge it at so many random steps of either kind."""
    decode, chunks = _decode_grid(plans, max_batch), _chunk_grid(plans, chunk_tokens)
    rng = np.random.default_rng(seed)
    last_chunk = chunks.lengths[-1]
    for grid, sizes, lengths in (
        (decode, (1, max_batch), (decode.lengths[0], plans.context)),
        (chunks, (chunks.sizes[0], chunk_tokens), (0, last_chunk)),
    ):
        grid.refine()
        draws = (rng.integers(*ends, random_points, endpoint=True) for ends in (sizes, lengths))
        grid.hold_out((int(size), int(length)) for size, length in zip(*draws))
    steps = [plans.decode(size, plans.context) for size in decode.sizes]
    return report_from(
        StepTable,
        plans,
        version=StepTable.VERSION,
        model=plans.language.name,
        system=plans.request.system.name,
        max_batch=max_batch,
        chunk_tokens=chunk_tokens,
        weight_bytes=max(step.weight_bytes for step in steps),
        decode=decode.table(),
        chunks=chunks.table(),
        held_out=tuple(
            HeldOutStep(kind=kind, size=size, length=length, relative_error=error)
            for kind, grid in (("decode", decode), ("chunk", chunks))
            for (size, length), error in grid.held_out.items()
        ),
    )


def _decode_grid(plans: StepPlans, max_batch: int) -> StepGrid:
    """Costs of decode steps over requests and attended tokens."""
    context = plans.context
    return StepGrid(
        cost=lambda size, tokens: plans.decode(size, tokens).figures,
        sizes=sorted({max_batch, *(2**power for power in range(max_batch.bit_length()))}),
        lengths=sorted({2, context // 4, context // 2, context}),
    )


def _chunk_grid(plans: StepPlans, chunk_tokens: int) -> StepGrid:
    """Costs of chunks of a prompt over their tokens and the number of whole chunks before them."""
    last = plans.context // chunk_tokens - 1  # the last whole chunk
    return StepGrid(
        cost=lambda size, number: plans.chunk(size, number * chunk_tokens).figures,
        sizes=sorted({min(MIN_CHUNK, chunk_tokens), chunk_tokens}),
        lengths=sorted({0, min(1, last), last}),
        tile=_TILE,
    )
