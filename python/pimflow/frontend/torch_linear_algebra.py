"""Determinants, inverses and solutions of small systems in PyTorch, by elimination that is written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MOST_ROWS = 16  # of a matrix; each is about ten operators


def _require_small(x: torch.Tensor) -> int:
    """Number of rows of square matrices; raises `NotImplementedError` for more than `MOST_ROWS`."""
    rows, columns = x.shape[-2:]
    if rows != columns or not 0 < rows <= MOST_ROWS:
        raise NotImplementedError(
            f"linear algebra of matrices of {rows} x {columns} is not supported: up to {MOST_ROWS} rows, as "
            "many columns"
        )
    return int(rows)


def _eliminate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of `x` [..., n, m] in the order of their pivots, eliminated below them; the sign of that order.

    Each column's pivot is its largest element in the remaining rows, as LAPACK chooses it. What is below the
    diagonal is not to be read.
    """
    import torch

    rows, sign = x.shape[-2], torch.ones_like(x[..., 0, 0])
    numbers = torch.arange(rows, device=x.device).unsqueeze(-1)
    for k in range(rows - 1):
        size = x[..., k : k + 1].abs().masked_fill(numbers < k, -1.0)
        pivot = size.argmax(-2, keepdim=True)
        first, top = x[..., k : k + 1, :], x.gather(-2, pivot.expand(*x.shape[:-2], 1, x.shape[-1]))
        x = top.where(numbers == k, first.where(numbers == pivot, x))
        sign = sign.where(pivot[..., 0, 0] == k, -sign)
        head = top[..., k : k + 1]
        is_done = (numbers <= k) | (head == 0)  # where the pivot is 0 the rest of the column is too
        x = x - (x[..., k : k + 1] / head).masked_fill(is_done, 0) * top
    return x, sign


def _solution(x: torch.Tensor, right: torch.Tensor, unit: bool = False, upper: bool = True) -> torch.Tensor:
    """Solution of triangular systems; the other half of `x` is not read, nor its diagonal of a `unit` one."""
    import torch

    rows = _require_small(x)
    outer = torch.broadcast_shapes(x.shape[:-2], right.shape[:-2])
    right = right.expand(*outer, *right.shape[-2:])
    solved: list[torch.Tensor] = [right[..., :0, :]] * rows
    for i in reversed(range(rows)) if upper else range(rows):
        value = right[..., i : i + 1, :]
        known = range(i + 1, rows) if upper else range(i)
        if known:
            block = torch.cat([solved[j] for j in known], -2)
            value = value - x[..., i : i + 1, known.start : known.stop] @ block
        solved[i] = value if unit else value / x[..., i : i + 1, i : i + 1]
    return torch.cat(solved, -2)


def _solve(x: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Solution of ``x @ solution == right``, by elimination of both side by side."""
    import torch

    rows = _require_small(x)
    outer = torch.broadcast_shapes(x.shape[:-2], right.shape[:-2])
    sides = [side.expand(*outer, *side.shape[-2:]) for side in (x, right)]
    both, _ = _eliminate(torch.cat(sides, -1))
    return _solution(both[..., :rows], both[..., rows:])


def _linalg_solve(
    x: torch.Tensor, right: torch.Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[torch.Tensor, ...]:
    import torch

    is_vector = right.dim() == 1 or (right.dim() == x.dim() - 1 and right.shape == x.shape[:-1])
    if is_vector:
        right = right.unsqueeze(-1)
    result = _solve(x, right) if left else _solve(x.mT, right.mT).mT
    places = torch.zeros(x.shape[:-1], dtype=torch.int32)
    return result.squeeze(-1) if is_vector else result, x, places, places[..., 0]


def _inverse(x: torch.Tensor, *, check_errors: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    identity = torch.eye(_require_small(x), dtype=x.dtype, device=x.device)
    return _solve(x, identity), torch.zeros(x.shape[:-2], dtype=torch.int32)


def _determinant(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    import torch

    _require_small(x)
    upper, sign = _eliminate(x)
    places = torch.zeros(x.shape[:-1], dtype=torch.int32)
    return upper.diagonal(dim1=-2, dim2=-1).prod(-1) * sign, x, places


def _logarithmic_determinant(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    import torch

    _require_small(x)
    upper, sign = _eliminate(x)
    diagonal = upper.diagonal(dim1=-2, dim2=-1)
    places = torch.zeros(x.shape[:-1], dtype=torch.int32)
    return sign * diagonal.sign().prod(-1), diagonal.abs().log().sum(-1), x, places


def _cholesky(
    x: torch.Tensor, *, upper: bool = False, check_errors: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factor, column by column; only one half of `x` is read."""
    import torch

    rows = _require_small(x)
    x = x.mT if upper else x
    numbers, columns = torch.arange(rows, device=x.device).unsqueeze(-1), []
    for k in range(rows):
        column = x[..., k : k + 1]
        if columns:
            before = torch.cat(columns, -1)
            column = column - before @ before[..., k : k + 1, :].mT
        column = column / column[..., k : k + 1, :].sqrt()
        columns.append(column.masked_fill(numbers < k, 0))
    factor = torch.cat(columns, -1)
    return factor.mT if upper else factor, torch.zeros(x.shape[:-2], dtype=torch.int32)


def _solve_triangular(
    x: torch.Tensor, right: torch.Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> torch.Tensor:
    if left:
        return _solution(x, right, unitriangular, upper)
    return _solution(x.mT, right.mT, unitriangular, not upper).mT


def _triangular_solve(
    right: torch.Tensor,
    x: torch.Tensor,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    matrix, is_upper = (x.mT, not upper) if transpose else (x, upper)
    return _solution(matrix, right, unitriangular, is_upper), x


def _cholesky_solve(right: torch.Tensor, factor: torch.Tensor, upper: bool = False) -> torch.Tensor:
    lower = factor.mT if upper else factor
    return _solution(lower.mT, _solution(lower, right, upper=False))


def _exponential(x: torch.Tensor) -> torch.Tensor:
    """A Taylor series of the matrix over a power of two, squared as often."""
    import torch

    identity = torch.eye(_require_small(x), dtype=x.dtype, device=x.device)
    norm = x.abs().sum(-2, keepdim=True).amax(-1, keepdim=True)
    steps = 12  # norms up to 2048; of larger ones the result is not in fp32
    halvings = norm.clamp(min=0.5).log2().ceil().clamp(max=steps) + 1
    x = x * 2.0**-halvings
    term = result = identity.expand_as(x)
    for order in range(1, 9):
        term = term @ x / order
        result = result + term
    for step in range(steps + 1):
        result = (result @ result).where(halvings > step, result)
    return result


# By name of the operator and its overload. PyTorch's decompositions of those without `_ex` check for errors.
DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "_linalg_det.default": _determinant,
    "_linalg_slogdet.default": _logarithmic_determinant,
    "_linalg_solve_ex.default": _linalg_solve,
    "cholesky_solve.default": _cholesky_solve,
    "inverse.default": lambda x: _inverse(x)[0],
    "linalg_cholesky.default": lambda x, *, upper=False: _cholesky(x, upper=upper)[0],
    "linalg_cholesky_ex.default": _cholesky,
    "linalg_inv.default": lambda x: _inverse(x)[0],
    "linalg_inv_ex.default": _inverse,
    "linalg_matrix_exp.default": _exponential,
    "linalg_solve.default": lambda x, right, *, left=True: _linalg_solve(x, right, left=left)[0],
    "linalg_solve_triangular.default": _solve_triangular,
    "triangular_solve.default": _triangular_solve,
}
