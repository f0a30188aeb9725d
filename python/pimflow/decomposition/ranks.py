"""Rules for ranks: how many components of a layer are kept. And the spectra that the rules read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pimflow.errors import UsageError

# Squared singular values below this share of the largest are rounding: they come from a Gram matrix.
_SPECTRUM_FLOOR = 1e-15


@dataclass(frozen=True, kw_only=True)
class RankRule:
    """A rule for ranks.

    Attributes
    ----------
    kind : str
        ``ratio``: `share` of the full rank of a matrix of the shape, rounded, at least 1.
        ``energy``: the fewest components that have at least `share` of the sum of squares.
        ``vbmf``: the components above the noise, by analytic variational Bayesian matrix factorisation.
        ``ranks``: the numbers in `ranks`.
    ranks : tuple of int
        In the order of the chain.
    """

    kind: str
    share: float = 0.0
    ranks: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> RankRule:
        """Parse ``0.1``, ``energy=0.9`` or ``vbmf``; raises `UsageError` for anything else."""
        kind, _, value = text.rpartition("=")
        if text == "vbmf":
            return cls(kind="vbmf")
        if kind not in ("", "energy"):
            raise UsageError(f"rank '{text}': give a ratio, energy=SHARE, vbmf, or a .toml file")
        try:
            share = float(value)
        except ValueError:
            raise UsageError(f"rank '{text}': give a ratio, energy=SHARE, vbmf, or a .toml file") from None
        if not 0 < share <= 1:
            raise UsageError(f"rank '{text}': {value} is not in (0, 1]")
        return cls(kind=kind or "ratio", share=share)

    @property
    def text(self) -> str:
        """The rule as `parse` reads it; explicit ranks as a list."""
        shares = {"ratio": f"{self.share:g}", "energy": f"energy={self.share:g}"}
        return shares.get(self.kind, self.kind) if self.kind != "ranks" else str(list(self.ranks))

    def rank(self, extents: tuple[int, int], squares: Callable[[], np.ndarray]) -> int:
        """Rank of a matrix.

        Parameters
        ----------
        extents : (int, int)
            Rows and columns.
        squares : callable
            Gives its squared singular values, as `spectrum` does; called only if the rule needs them.
        """
        max_rank = min(extents)
        if self.kind == "ratio":
            rank = math.floor(self.share * max_rank + 0.5)
        elif self.kind == "energy":
            rank = energy_rank(squares(), self.share)
        else:
            rank = vbmf_rank(squares(), extents)
        return min(max(rank, 1), max_rank)


def spectrum(matrix: np.ndarray) -> np.ndarray:
    """Squared singular values of `matrix` in falling order, one for each index of its shorter side."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    from scipy.linalg import eigvalsh  # slow to import, and needed only here

    return np.clip(eigvalsh(wide @ wide.T)[::-1], 0.0, None)


def energy_rank(squares: np.ndarray, share: float) -> int:
    """How many of the falling `squares` are needed to add up to `share` of their sum."""
    cumulative = np.cumsum(squares)
    return (
        int(np.searchsorted(cumulative, share * cumulative[-1] * (1 - _SPECTRUM_FLOOR * len(cumulative)))) + 1
    )


def vbmf_rank(squares: np.ndarray, extents: tuple[int, int]) -> int:
    """Rank by the global analytic solution of empirical variational Bayesian matrix factorisation.

    Parameters
    ----------
    squares : ndarray
        Squared singular values in falling order.
    extents : (int, int)
        Rows and columns.

    Notes
    -----
    Nakajima, Sugiyama, Babacan, Tomioka: Global analytic solution of fully-observed variational Bayesian
    matrix factorization, JMLR 14 (2013): theorem 2 for the threshold, corollary 1 for the free energy that
    the noise variance minimises. 2.5129 is the paper's approximation of the zero of its function of tau.
    """
    short, long = min(extents), max(extents)
    if not squares[0]:
        return 0
    squares = np.maximum(squares, _SPECTRUM_FLOOR * squares[0])
    alpha = short / long
    tau = 2.5129 * math.sqrt(alpha)
    threshold = (1 + tau) * (1 + alpha / tau)
    first = min(max(math.ceil(short / (1 + alpha)) - 1, 0), short - 1)
    low = max(squares[first] / (long * threshold), squares[first:].mean() / long)
    high = squares.sum() / (short * long)
    if low >= high:
        noise = high
    else:
        from scipy.optimize import minimize_scalar

        noise = minimize_scalar(
            lambda variance: _free_energy(squares / (long * variance), alpha, threshold),
            bounds=(low, high),
            method="bounded",
            options={"xatol": 1e-6 * high},
        ).x
    return int((squares > long * noise * threshold).sum())


def _free_energy(x: np.ndarray, alpha: float, threshold: float) -> float:
    """Free energy of a noise variance, up to a constant.

    `x` are squared singular values, divided by the variance and the long side.
    """
    signal, noise = x[x > threshold], x[x <= threshold]
    centred = signal - (1 + alpha)
    tau = (centred + np.sqrt(centred**2 - 4 * alpha)) / 2
    signal_energy = signal - tau + np.log((tau + 1) / signal) + alpha * np.log(tau / alpha + 1)
    return float((noise - np.log(noise)).sum() + signal_energy.sum())
