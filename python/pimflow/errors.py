"""Every error that pimflow raises on purpose.

Each message is one line that says what is wrong, where, and what to do about it. ``exit_code`` is
what the command line returns; anything that is not a :class:`PimflowError` is our own bug (code 1).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable

LINE = 300  # characters of what others say


def hint(name: str, known: Iterable[str]) -> str:
    """Names of `known` that are similar to the unknown `name`, or all of them, as the end of a message."""
    known = sorted(known)
    folded = {known_name.casefold(): known_name for known_name in known}
    near = [folded[n] for n in difflib.get_close_matches(name.casefold(), folded, n=3, cutoff=0.4)]
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"


# What a terminal obeys, and what reorders text on it; not tabs and line breaks.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def without_controls(text: str) -> str:
    """`text` for a terminal: characters that would steer it as escapes, tabs and line breaks as they are."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """`text` with line breaks and other characters that do not print written as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def is_utf8(text: str) -> bool:
    """Whether `text`, such as a file's name, can be written as UTF-8, which JSON, pages and TVM need."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def last_line(error: Exception) -> str:
    """What an error of others, such as TVM's, says in the end; the begin of it, if that is long."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
    return line if len(line) <= LINE else f"{line[:LINE]}…"


class PimflowError(Exception):
    """Root of the tree."""

    exit_code = 3

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...], dict[str, object]]:
        """Pickled with its message, not with what that was made of."""
        return _of_message, (type(self), *self.args), self.__dict__


def _of_message(kind: type[PimflowError], *message: object) -> PimflowError:
    return kind.__new__(kind, *message)


class UsageError(PimflowError):
    """A request that does not make sense, such as an option out of its range."""

    exit_code = 2


class UnknownNameError(UsageError):
    """A name that does not exist; the message lists similar ones.

    Parameters
    ----------
    kind : str
        What was looked up, in the singular (``"model"``).
    name : str
        What the user wrote.
    known : iterable of str
        Every name that would have worked.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]):
        super().__init__(f"unknown {kind} '{name}'; {hint(name, known)}")


class ModelError(PimflowError):
    """A network file that cannot be read, or that is not a network we can compile."""


class SpecError(PimflowError):
    """A hardware description with a missing, unknown or impossible field."""


class TraceError(PimflowError):
    """A ``.pim`` or ``.pimprog`` file that is malformed."""


class LifetimeError(PimflowError):
    """A table of buffers and lifetimes that is malformed or contradicts itself."""


class ProfilerError(PimflowError):
    """An external simulator, or a machine, that is missing or fails, or whose output cannot be read."""


class ProfileError(PimflowError):
    """A stored profile that is malformed, of another machine, or without the times that are needed."""


class OutputError(PimflowError):
    """A file that cannot be written."""


class PlanError(PimflowError):
    """A plan that is malformed or does not fit the model and system it is applied to."""


class DecompositionError(PimflowError):
    """A file of ranks that is malformed, or that names layers or ranks which the network does not have."""


class CalibrationError(PimflowError):
    """Calibration samples that cannot be read, or that do not fit the network."""


class ArtifactError(PimflowError):
    """A compiled directory that cannot be written, read or run."""


class UnsupportedOpError(PimflowError):
    """An operator that the front end or a back end cannot handle."""


def _exact(amount: float) -> str:
    return str(amount) if isinstance(amount, int) else f"{amount:g}"


class InfeasibleError(PimflowError):
    """A demand above a bound.

    Parameters
    ----------
    what : str
        The thing that does not fit, with its place (``"weights of region 'fc' on PIM channel 3"``).
    demand, bound : float
        Both in `unit`.
    unit : str
        Unit of `demand` and `bound`; empty for shares.
    levers : iterable of str
        What the user can change so that it fits.
    """

    exit_code = 4

    def __init__(self, what: str, demand: float, bound: float, unit: str, levers: Iterable[str] = ()):
        self.demand, self.bound, self.unit, self.levers = demand, bound, unit, tuple(levers)
        hint = f"; try {' or '.join(self.levers)}" if self.levers else ""
        needed, available = (f"{_exact(amount)} {unit}".rstrip() for amount in (demand, bound))
        super().__init__(f"{what}: needs {needed}, {available} available{hint}")


class VerificationError(PimflowError):
    """A result that differs from its reference by more than the stated bound."""

    exit_code = 5
