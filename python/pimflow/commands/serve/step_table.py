"""The table of a server's step costs, and its file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from pimflow.commands.serve.step_grid import StepCostTable
from pimflow.core.json_form import JsonTree
from pimflow.core.typed_values import read_fields
from pimflow.errors import ProfileError
from pimflow.host.files import replace_file
from pimflow.simulators.serving.scheduler import StepTimes

_MAX_FILE_BYTES = 1 << 24
_FIGURES = 4  # ns and pJ, each as planned and on the GPU alone


@dataclass(frozen=True, kw_only=True)
class HeldOutStep:
    """A searched step that the table does not use, and how far the table is from it.

    Attributes
    ----------
    kind : str
        ``decode``, with requests at once and tokens attended to, or ``chunk``, with its tokens and the number
        of chunks before it.
    relative_error : float
        The largest of times and energies, as planned and on the GPU alone.
    """

    kind: str
    size: int
    length: int
    relative_error: float


@dataclass(frozen=True, kw_only=True)
class StepTable(JsonTree):
    """Costs of all steps of a server, with what they were searched for.

    Attributes
    ----------
    model_digest, system_digest : str
        Of the model's sizes, and of system, goal and sources of times.
    weight_bytes : int
        Rows of PIM that the decode plan with the most of them takes for weights.
    decode, chunks : StepCostTable
        A token for several requests over the tokens that they attend to, and chunks of a prompt over the
        number of whole chunks before them.
    """

    VERSION: ClassVar[str] = "pimflow-step-table/1"

    version: str
    model: str
    system: str
    model_digest: str
    system_digest: str
    context: int
    max_batch: int
    chunk_tokens: int
    weight_bytes: int
    decode: StepCostTable
    chunks: StepCostTable
    held_out: tuple[HeldOutStep, ...]

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> StepTable:
        """Read a table that `save` wrote; raises `ProfileError` for any other file."""
        try:
            with Path(path).open("rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
            if len(data) > _MAX_FILE_BYTES:
                raise ValueError("larger than such tables are")
            table = read_fields(cls, json.loads(data))
            table._require_shape()
        except OSError as error:
            raise ProfileError(f"{path}: {error.strerror or error}") from None
        except (ValueError, TypeError, RecursionError) as error:
            raise ProfileError(f"{path}: is no table of steps that serve-sim wrote: {error}") from None
        return table

    def _require_shape(self) -> None:
        """Raise `ValueError` unless the parts of the table fit one another."""
        if self.version != self.VERSION:
            raise ValueError(f"its version is not {self.VERSION}")
        for table in (self.decode, self.chunks):
            for axis in (table.sizes, table.lengths):
                if not axis or sorted(set(axis)) != list(axis):
                    raise ValueError("points do not rise")
            rows = [len(row) for row in table.figures]
            if rows != [len(table.lengths)] * len(table.sizes):
                raise ValueError("points without costs")
            costs = [cost for row in table.figures for cost in row]
            if any(len(cost) != _FIGURES or min(cost) <= 0 for cost in costs):
                raise ValueError("costs are four numbers above zero")
        if self.decode.sizes[-1] != self.max_batch or self.chunks.sizes[-1] != self.chunk_tokens:
            raise ValueError("its largest steps are not in it")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table to a file; raises `OutputError` if that fails."""
        replace_file(path, (json.dumps(self.to_json()) + "\n").encode())

    def require(self, path: str | os.PathLike[str], **expected: object) -> None:
        """Raise `ProfileError` unless fields have these values."""
        for name, value in expected.items():
            own = getattr(self, name)
            if own == value:
                continue
            what = {
                "model_digest": f"is of another model, '{self.model}'",
                "system_digest": f"is of another system or goal, '{self.system}'",
            }
            reason = what.get(name, f"has --{name.replace('_', '-')} {own}, not {value}")
            raise ProfileError(f"{path}: the table of steps {reason}; search one with --save-steps")

    def times(self, max_batch: int, column: int) -> StepTimes:
        """Times and energies of all steps, as planned (0) or on the GPU alone (1)."""
        sizes, tokens = np.meshgrid(np.arange(1, max_batch + 1), np.arange(self.context + 1), indexing="ij")
        decode = self.decode.values(sizes.ravel(), tokens.ravel()).reshape(max_batch, self.context + 1, -1)
        ends = np.arange(1, self.context + 1)
        number = (ends - 1) // self.chunk_tokens
        chunks = self.chunks.values(ends - number * self.chunk_tokens, number)
        return StepTimes(
            decode_ps=whole(np.pad(decode[:, :, column], ((1, 0), (0, 0))) * 1000),
            decode_pj=whole(np.pad(decode[:, :, 2 + column], ((1, 0), (0, 0)))),
            chunk_ps=whole(np.pad(chunks[:, column], (1, 0)) * 1000),
            chunk_pj=whole(np.pad(chunks[:, 2 + column], (1, 0))),
        )


def whole(numbers: np.ndarray) -> np.ndarray:
    """The nearest whole numbers."""
    rounded: np.ndarray = np.rint(numbers).astype(np.int64)
    return rounded
