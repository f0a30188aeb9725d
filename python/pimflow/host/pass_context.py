"""TVM's ``PassContext``, with some of its parts changed for a block."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

_LEAST_LEVEL = 1  # at 0, TVM leaves out passes on which ours rely, such as the one that inlines functions


def changed_copy(context: Any, **changes: Any) -> contextlib.AbstractContextManager[Any]:
    """A copy of a ``PassContext`` to enter, with other values of some of its arguments."""
    arguments = {
        "opt_level": context.opt_level,
        "required_pass": list(context.required_pass),
        "disabled_pass": list(context.disabled_pass),
        "instruments": list(context.instruments),
        "config": dict(context.config),
    }
    copy: contextlib.AbstractContextManager[Any] = type(context)(**(arguments | changes))
    return copy


def all_passes() -> contextlib.AbstractContextManager[Any]:
    """A block in which all passes run that compilation needs, whatever the level of TVM's current context.

    TVM is not imported: where it is not yet, nobody made a context.
    """
    transform = getattr(sys.modules.get("tvm"), "transform", None)
    if transform is None or transform.PassContext.current().opt_level >= _LEAST_LEVEL:
        return contextlib.nullcontext()
    return changed_copy(transform.PassContext.current(), opt_level=_LEAST_LEVEL)
