"""Operators of PyTorch that TVM's importer has no converter for, in terms of those that it has.

Each function takes its operator's arguments, and is traced by PyTorch in place of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pimflow.frontend import torch_linear_algebra

if TYPE_CHECKING:
    import torch


def _exp2(x: torch.Tensor) -> torch.Tensor:
    return 2.0**x


def _erfc(x: torch.Tensor) -> torch.Tensor:
    return 1.0 - x.erf()


def _copysign(x: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
    is_negative = (sign < 0) | ((sign == 0) & (1 / sign < 0))  # zero has a sign too
    return (-x.abs()).where(is_negative, x.abs())


def _hypot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The root of the sum of squares, which are of numbers up to 1: others may leave fp16."""
    low, high = x.abs().minimum(y.abs()), x.abs().maximum(y.abs())
    is_plain = (high > 0) & (high < math.inf)
    ratio = (low / high).masked_fill(~is_plain, 0)
    return high * (1 + ratio * ratio).sqrt()


# Coefficients of Lanczos's series with g = 7, by Godfrey.
_LANCZOS = (
    676.5203681218851, -1259.1392167224028, 771.32342877765313, -176.61502916214059, 12.507343278686905,
    -0.13857109526572012, 9.9843695780195716e-6, 1.5056327351493116e-7,
)  # fmt: skip


def _lgamma(x: torch.Tensor) -> torch.Tensor:
    """The logarithm of the gamma function by Lanczos's series, and by reflection below one half."""
    is_low = x < 0.5
    z = (1 - x).where(is_low, x) - 1
    series = 0.99999999999980993 + sum(c / (z + k) for k, c in enumerate(_LANCZOS, 1))
    t = z + 7.5
    result = (z + 0.5) * t.log() - t + (series * math.sqrt(2 * math.pi)).log()
    turned = math.log(math.pi) - ((x - x.floor()) * math.pi).sin().log() - result
    result = turned.where(is_low, result).masked_fill(is_low & (x == x.floor()), math.inf)
    return result.masked_fill(x.isinf(), math.inf)


def _digamma(x: torch.Tensor) -> torch.Tensor:
    """The derivative of `_lgamma`: six steps up, an asymptotic series, and reflection below zero."""
    is_low = x < 0
    z = (1 - x).where(is_low, x)
    y = z + 6
    inverse = 1 / (y * y)
    tail = inverse * (1 / 12 - inverse * (1 / 120 - inverse * (1 / 252 - inverse / 240)))
    result = y.log() - 0.5 / y - tail - sum(1 / (z + k) for k in range(6))
    result = (result - math.pi / ((x - x.floor()) * math.pi).tan()).where(is_low, result)
    result = result.masked_fill(is_low & (x == x.floor()), math.nan)
    return (-1 / x).where(x == 0, result)


def _logcumsumexp(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sums of the logarithms' numbers up to each place: each step adds what lies a power of two before."""
    import torch

    if x.dim() == 0:
        return x
    length, steps = x.shape[dim], 1
    while steps < length:
        before = torch.cat(
            [torch.full_like(x.narrow(dim, 0, steps), -math.inf), x.narrow(dim, 0, length - steps)], dim
        )
        top = x.maximum(before)
        base = top.masked_fill(top.isinf(), 0)
        x = base + ((x - base).exp() + (before - base).exp()).log()
        steps *= 2
    return x


def _fmin(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y.where(x.isnan(), x.where(y.isnan(), x.minimum(y)))


def _fmax(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y.where(x.isnan(), x.where(y.isnan(), x.maximum(y)))


def _kth_value(
    x: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    values, places = (part.narrow(dim, k - 1, 1) for part in x.sort(dim))
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def _median(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    values, places = _kth_value(x, (x.shape[dim] + 1) // 2, dim, keepdim)
    if x.is_floating_point():
        values = values.masked_fill(x.isnan().any(dim, keepdim), math.nan)
    return values, places


def _whole_median(x: torch.Tensor) -> torch.Tensor:
    return _median(x.reshape(-1), 0)[0]


def _trilinear(*operands: Any, **options: Any) -> torch.Tensor:
    """The sum over some axes of the product of three tensors, each with axes of size 1 put in."""
    factors, (expansions, summed) = operands[:3], (operands[3:6], operands[6])
    wide = []
    for factor, axes in zip(factors, expansions):
        for axis in axes:
            factor = factor.unsqueeze(axis)
        wide.append(factor)
    return (wide[0] * wide[1] * wide[2]).sum(list(summed))


def _distances(x: torch.Tensor, y: torch.Tensor, p: float, compute_mode: int | None) -> torch.Tensor:
    """The norms of order `p` of the differences of all rows."""
    differences = (x.unsqueeze(-2) - y.unsqueeze(-3)).abs()
    if p == math.inf:
        return differences.amax(-1)
    if p == 2:
        return (differences * differences).sum(-1).sqrt()
    if p == 0:
        return (differences != 0).to(x.dtype).sum(-1)
    return differences.sum(-1) if p == 1 else differences.pow(p).sum(-1).pow(1 / p)


def _rrelu(x: torch.Tensor, noise: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaky ReLU whose slope is the mean of the bounds; in training it would be drawn."""
    lower, upper, training = (*options[:3], *(0.125, 1 / 3, False)[len(options) :])
    if training:
        raise NotImplementedError("RReLU draws slopes in training; export the network for inference")
    return x.where(x >= 0, x * ((lower + upper) / 2)), noise


def _embedding_bag(
    weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, ...]:
    """Sums or means of rows, a bag from each offset to the next, as a product with who is in which."""
    import torch

    defaults = (False, 0, False, None, False, -1)
    _, mode, _, factors, has_last_offset, padding = (*options[:6], *defaults[len(options) :])
    if mode == 2 or has_last_offset or padding >= 0:
        raise NotImplementedError("EmbeddingBag is supported for sums and means, without padding")
    place = torch.arange(indices.shape[0], device=indices.device).unsqueeze(0)
    ends = torch.cat([offsets[1:], torch.full_like(offsets[:1], indices.shape[0])])
    members = ((place >= offsets.unsqueeze(1)) & (place < ends.unsqueeze(1))).to(weight.dtype)
    rows = weight.index_select(0, indices)
    bags = members @ (rows if factors is None else rows * factors.unsqueeze(1))
    bags = bags / members.sum(1, keepdim=True).clamp(min=1) if mode == 1 else bags
    return bags, offsets, offsets, offsets


def _windows(x: torch.Tensor, dimension: int, size: int, step: int) -> torch.Tensor:
    """Parts of an axis, of one size and one step apart, along a new last axis."""
    import torch

    reach = x.shape[dimension] - size + 1
    starts = torch.arange(0, reach, step, device=x.device)
    parts = [x.narrow(dimension, first, reach).index_select(dimension, starts) for first in range(size)]
    return torch.stack(parts, -1)


# By name of the operator and its overload.
DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    **torch_linear_algebra.DECOMPOSITIONS,
    "_cdist_forward.default": _distances,
    "_embedding_bag.default": _embedding_bag,
    "_embedding_bag_forward_only.default": _embedding_bag,
    "_neg_view.default": lambda x: -x,
    "_trilinear.default": _trilinear,
    "copysign.Tensor": _copysign,
    "digamma.default": _digamma,
    "erfc.default": _erfc,
    "exp2.default": _exp2,
    "fmax.default": _fmax,
    "fmin.default": _fmin,
    "hypot.default": _hypot,
    "kthvalue.default": _kth_value,
    "lgamma.default": _lgamma,
    "logcumsumexp.default": _logcumsumexp,
    "median.default": _whole_median,
    "median.dim": _median,
    "rrelu_with_noise_functional.default": _rrelu,
    "special_erfc.default": _erfc,
    "unfold.default": _windows,
}
