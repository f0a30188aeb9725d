"""Resources of this machine."""

from __future__ import annotations

import os
import resource
from pathlib import Path

# Memory limits of a container, in versions 2 and 1 of control groups.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def memory_bytes() -> int:
    """Maximum memory of this process: the least of the machine's, the container's and its own limit."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _LIMITS:
        try:
            text = path.read_text(encoding="utf-8").strip()
        except OSError:
            continue
        sizes += [int(text)] if text.isdecimal() else []
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return min(sizes if limit == resource.RLIM_INFINITY else [*sizes, limit])
