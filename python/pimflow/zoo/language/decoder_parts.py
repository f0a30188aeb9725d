"""Parts of decoders as data: experts, and attention over latent vectors."""

from __future__ import annotations

from dataclasses import dataclass

SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Feed-forward parts that stand side by side; a router chooses some of them for each token.

    A product with the router's weight, and a softmax or sigmoids, give each expert its share. The experts of
    the largest shares are computed, and their results are added by their shares (arXiv 1701.06538,
    2401.04088).

    Attributes
    ----------
    count, used : int
        Experts of a block, and how many of them a token goes through.
    normalised : bool
        Whether the shares of the chosen experts are divided by their sum.
    scores : str
        ``softmax`` over all experts, or the ``sigmoid`` of each.
    corrected : bool
        Whether a weight is added to the shares when experts are chosen, but not when results are added.
    groups, used_groups : int
        Equal groups of experts, and from how many of them a token's experts come: those of the largest sums
        of their `group_best` largest shares (arXiv 2412.19437).
    factor : float
        Factor of the shares.
    shared : int
        Size of a feed-forward part whose result is added for every token; 0 if there is none.
    """

    count: int
    used: int
    normalised: bool = True
    scores: str = "softmax"
    corrected: bool = False
    groups: int = 1
    used_groups: int = 1
    group_best: int = 1
    factor: float = 1.0
    shared: int = 0

    def flaw(self) -> str:
        """What is wrong with these numbers; empty if nothing is."""
        if self.scores not in SCORES:
            return f"shares by {self.scores}: not supported"
        if not 0 < self.used <= self.count:
            return f"a token cannot go through {self.used} of {self.count} experts"
        size, rest = divmod(self.count, self.groups)
        if rest or not 0 < self.used_groups <= self.groups or self.used > self.used_groups * size:
            return f"{self.count} experts cannot be chosen from {self.used_groups} of {self.groups} groups"
        return "" if self.group_best <= size else f"a group has fewer than {self.group_best} experts"


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Keys and values of all heads from one vector a token, which the cache has (MLA, arXiv 2405.04434).

    The key of a head is a product of the latent vector with the head's weights, and behind it a part that all
    heads share and that alone is rotated. Its value is another product of the latent vector. A query is
    multiplied with the weights of its head's keys, and what attention gives with those of its values: so
    attention reads one head of keys, the latent vector and the shared part, and one of values, the latent
    vector.

    Attributes
    ----------
    rank : int
        Size of the latent vector.
    query_rank : int
        Size of a vector between the hidden state and the queries; 0 if there is none.
    """

    rank: int
    value_size: int
    query_rank: int = 0
