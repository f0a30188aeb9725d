"""Operators of PyTorch that TVM's importer has no converter for, in terms of those that it has."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def definitions() -> dict[str, Callable[..., Any]]:
    """What computes an operator, by its name and overload.

    Each function takes the operator's arguments, and is traced by PyTorch in place of it.
    """
    import torch

    def exp2(x: torch.Tensor) -> torch.Tensor:
        return torch.pow(2.0, x)

    def erfc(x: torch.Tensor) -> torch.Tensor:
        return 1.0 - torch.erf(x)

    def copysign(x: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
        return torch.where(sign < 0, -x.abs(), x.abs())

    def hypot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(x * x + y * y)

    def fmin(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.where(x.isnan(), y, torch.where(y.isnan(), x, torch.minimum(x, y)))

    def fmax(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.where(x.isnan(), y, torch.where(y.isnan(), x, torch.maximum(x, y)))

    def kthvalue(x: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
        results = [part.narrow(dim, k - 1, 1) for part in torch.sort(x, dim)]
        values, places = results if keepdim else [part.squeeze(dim) for part in results]
        return values, places

    def median(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
        return kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)

    def whole_median(x: torch.Tensor) -> torch.Tensor:
        return median(x.reshape(-1), 0)[0]

    def trilinear(
        first: torch.Tensor,
        second: torch.Tensor,
        third: torch.Tensor,
        expand1: Sequence[int],
        expand2: Sequence[int],
        expand3: Sequence[int],
        sumdim: Sequence[int],
        unroll_dim: int = 1,
    ) -> torch.Tensor:
        factors = []
        for factor, axes in ((first, expand1), (second, expand2), (third, expand3)):
            for axis in axes:
                factor = factor.unsqueeze(axis)
            factors.append(factor)
        return (factors[0] * factors[1] * factors[2]).sum(list(sumdim))

    def distances(x: torch.Tensor, y: torch.Tensor, p: float, compute_mode: int | None) -> torch.Tensor:
        differences = (x.unsqueeze(-2) - y.unsqueeze(-3)).abs()
        if p == math.inf:
            return differences.max(-1)[0]
        if p == 1:
            return differences.sum(-1)
        if p == 2:
            return (differences * differences).sum(-1).sqrt()
        if p == 0:
            return (differences != 0).to(x.dtype).sum(-1)
        return differences.pow(p).sum(-1).pow(1 / p)

    def rrelu(
        x: torch.Tensor,
        noise: torch.Tensor,
        lower: float = 0.125,
        upper: float = 1 / 3,
        training: bool = False,
        generator: Any = None,
    ) -> tuple[Any, Any]:
        if training:
            raise NotImplementedError("RReLU draws slopes in training; export the network in inference")
        return torch.where(x >= 0, x, x * ((lower + upper) / 2)), noise

    def embedding_bag(
        weight: torch.Tensor,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        scale_grad_by_freq: bool = False,
        mode: int = 0,
        sparse: bool = False,
        per_sample_weights: torch.Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int = -1,
    ) -> tuple[Any, Any, Any, Any]:
        if mode == 2 or include_last_offset or padding_idx >= 0:
            raise NotImplementedError("an EmbeddingBag of sums or means without padding is supported")
        place = torch.arange(indices.shape[0], device=indices.device).unsqueeze(0)
        begin = offsets.unsqueeze(1)
        end = torch.cat([offsets[1:], torch.full_like(offsets[:1], indices.shape[0])]).unsqueeze(1)
        members = ((place >= begin) & (place < end)).to(weight.dtype)
        rows = weight.index_select(0, indices)
        rows = rows if per_sample_weights is None else rows * per_sample_weights.unsqueeze(1)
        bags = members @ rows
        bags = bags / members.sum(1, keepdim=True).clamp(min=1) if mode == 1 else bags
        return bags, offsets, offsets, offsets

    def windows(x: torch.Tensor, dimension: int, size: int, step: int) -> torch.Tensor:
        count = (x.shape[dimension] - size) // step + 1
        parts = [x.narrow(dimension, first, (count - 1) * step + 1) for first in range(size)]
        every = torch.arange(0, (count - 1) * step + 1, step, device=x.device)
        return torch.stack([part.index_select(dimension, every) for part in parts], -1)

    return {
        "_cdist_forward.default": distances,
        "_embedding_bag.default": embedding_bag,
        "_embedding_bag_forward_only.default": embedding_bag,
        "_trilinear.default": trilinear,
        "copysign.Tensor": copysign,
        "erfc.default": erfc,
        "exp2.default": exp2,
        "fmax.default": fmax,
        "fmin.default": fmin,
        "hypot.default": hypot,
        "kthvalue.default": kthvalue,
        "median.default": whole_median,
        "median.dim": median,
        "rrelu_with_noise_functional.default": rrelu,
        "special_erfc.default": erfc,
        "unfold.default": windows,
    }
