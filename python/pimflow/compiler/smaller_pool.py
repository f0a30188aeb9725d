"""Networks rewritten to take less memory. A rewrite is kept only if the pool shrinks, or it is demanded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from pimflow.frontend import Network

Own = TypeVar("Own", bound="Rewritten")


@dataclass(frozen=True, kw_only=True)
class Rewritten:
    """A network before and after.

    Attributes
    ----------
    given, network : Network
        As it came, and as it is to be.
    demanded : bool
        Whether it is to be so whatever memory that takes.
    kept_because : str
        Why it stays as it came; empty if it does not.
    pool_given_bytes, pool_bytes : int, optional
        Pools of both, of the whole network on the GPU, once `settled`.
    """

    given: Network
    network: Network
    demanded: bool = False
    kept_because: str = ""
    pool_given_bytes: int | None = None
    pool_bytes: int | None = None

    @property
    def changed(self) -> bool:
        """Whether the rewrite changed the network."""
        return self.network is not self.given

    def settled(self: Own, pool_bytes: Callable[[Network], int]) -> Own:
        """The rewrite with both pools. Unless demanded, it is kept only if its pool is smaller."""
        given_bytes = pool_bytes(self.given)
        found_bytes = pool_bytes(self.network) if self.changed else given_bytes
        pools = replace(self, pool_given_bytes=given_bytes, pool_bytes=found_bytes)
        if not self.changed or self.demanded or found_bytes < given_bytes:
            return pools
        return pools.undone(f"the pool would not shrink: {given_bytes} to {found_bytes} B")

    def undone(self: Own, why: str) -> Own:
        """The rewrite undone: the given network."""
        return replace(self, network=self.given, kept_because=why, pool_bytes=self.pool_given_bytes)
