"""All errors that pimflow raises on purpose.

Each message is one line that says what is wrong, where, and what to do about it. ``exit_code`` is the exit
code of the command; any other error than a :class:`PimflowError` is a bug of pimflow (code 1).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable

MAX_LINE_LENGTH = 300  # maximum characters of a message of another library


def hint(name: str, names: Iterable[str]) -> str:
    """End of a message: the names of `names` that are similar to `name`, or all if none is."""
    names = sorted(names)
    folded = {correct_name.casefold(): correct_name for correct_name in names}
    similar = [folded[n] for n in difflib.get_close_matches(name.casefold(), folded, n=3, cutoff=0.4)]
    return f"did you mean {' or '.join(similar)}?" if similar else f"known: {', '.join(names)}"


# Characters that control a terminal or reorder text on it, but tabs and line breaks.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escape_controls(text: str) -> str:
    """`text` with control characters for terminals as escapes; tabs and line breaks are unchanged."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """`text` with line breaks and other unprintable characters as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def is_utf8(text: str) -> bool:
    """Whether `text`, such as a file name, can be encoded as UTF-8, which JSON, pages and TVM need."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def last_line(error: Exception) -> str:
    """The last line of the message of an error, such as TVM's; at most `MAX_LINE_LENGTH` characters of it."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
    return line if len(line) <= MAX_LINE_LENGTH else f"{line[:MAX_LINE_LENGTH]}…"


class PimflowError(Exception):
    """Base class of all errors of pimflow."""

    exit_code = 3

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...], dict[str, object]]:
        """Pickle the error with its message, since constructors take other arguments."""
        return _error_from_message, (type(self), *self.args), self.__dict__


def _error_from_message(kind: type[PimflowError], *message: object) -> PimflowError:
    return kind.__new__(kind, *message)


class UsageError(PimflowError):
    """An invalid request, such as an option out of range."""

    exit_code = 2


class UnknownNameError(UsageError):
    """A name that does not exist; the message lists similar ones.

    Parameters
    ----------
    kind : str
        Kind of the name, in the singular (``"model"``).
    """

    def __init__(self, kind: str, name: str, names: Iterable[str]):
        super().__init__(f"unknown {kind} '{name}'; {hint(name, names)}")


class ModelError(PimflowError):
    """A network file that cannot be read, or that is no network that pimflow can compile."""


class SpecError(PimflowError):
    """A hardware description with a missing, unknown or impossible field."""


class TraceError(PimflowError):
    """A ``.pim`` or ``.pimprog`` file that is malformed."""


class LifetimeError(PimflowError):
    """A table of buffers and lifetimes that is malformed or contradicts itself."""


class ProfilerError(PimflowError):
    """An external simulator, or a machine, that is missing or fails, or whose output cannot be read."""


class ProfileError(PimflowError):
    """A stored profile that is malformed, of another machine, or without required times."""


class OutputError(PimflowError):
    """A file that cannot be written."""


class PlanError(PimflowError):
    """A plan that is malformed or does not fit the model and system it is applied to."""


class DecompositionError(PimflowError):
    """A file of ranks that is malformed, or names layers or ranks that the network does not have."""


class CalibrationError(PimflowError):
    """Calibration samples that cannot be read, or that do not fit the network."""


class ArtifactError(PimflowError):
    """A compiled directory that cannot be written, read or run."""


class UnsupportedOpError(PimflowError):
    """An operator that the front end or a back end does not support."""


def _amount_text(amount: float) -> str:
    return str(amount) if isinstance(amount, int) else f"{amount:g}"


class InfeasibleError(PimflowError):
    """A demand that exceeds a bound.

    Parameters
    ----------
    what : str
        What does not fit, and where (``"weights of region 'fc' on PIM channel 3"``).
    demand, bound : float
        Both in `unit`.
    unit : str
        Unit of `demand` and `bound`; empty for shares.
    levers : iterable of str
        Changes by the user that may help.
    """

    exit_code = 4

    def __init__(self, subject: str, demand: float, bound: float, unit: str, levers: Iterable[str] = ()):
        self.demand, self.bound, self.unit, self.levers = demand, bound, unit, tuple(levers)
        advice = f"; try {' or '.join(self.levers)}" if self.levers else ""
        needed, available = (f"{_amount_text(amount)} {unit}".rstrip() for amount in (demand, bound))
        super().__init__(f"{subject}: needs {needed}, {available} available{advice}")


class VerificationError(PimflowError):
    """A result that differs from its reference by more than the stated bound."""

    exit_code = 5
