"""The part of the report about a network in C."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CReport:
    """A network in C, compiled and timed where there is a compiler.

    Attributes
    ----------
    compiler, flaw : str
        The compiler that was used, or why the source was not compiled.
    options : tuple of str
        Options of the compiler.
    max_relative_error : float or None
        Largest relative error of the outputs.
    measured_ns, parallel_ns : float or None
        Median time of a run on one core, and on all `threads`.
    """

    compiler: str = ""
    options: tuple[str, ...]
    flaw: str = ""
    max_relative_error: float | None = None
    measured_ns: float | None = None
    threads: int = 1
    parallel_ns: float | None = None
    pool_bytes: int
    weight_bytes: int

    def text(self) -> str:
        """The report as a line of text."""
        sizes = f"pool {self.pool_bytes} B, weights {self.weight_bytes} B"
        if self.measured_ns is None:
            return f"C         not built: {self.flaw}; {sizes}"
        parallel = f", {self.parallel_ns / 1e6:.3f} ms on {self.threads}" if self.parallel_ns else ""
        return (
            f"C         {self.measured_ns / 1e6:.3f} ms on one core{parallel} by {self.compiler}, outputs "
            f"match (max rel {self.max_relative_error:.1e}); {sizes}"
        )
