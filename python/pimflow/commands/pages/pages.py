"""Write pages of compiled directories: of one, or of several side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pimflow.compiler.artifact import PAGE
from pimflow.errors import UsageError
from pimflow.host.files import PAGE as PAGE_KIND
from pimflow.host.files import check_file, replace_file
from pimflow.report_page.comparison import render_comparison
from pimflow.report_page.page import render_page

MAX_PLANS = 8  # largest number of plans side by side: more colours cannot be distinguished


def write_report(
    directory: str | os.PathLike[str], out: str | os.PathLike[str] | None = None, *, force: bool = False
) -> Path:
    """Write the page of a compiled directory; returns its path.

    Parameters
    ----------
    out : path, optional
        ``report.html`` in the directory by default.
    force : bool
        Whether to replace a file that is no page of pimflow.

    Raises
    ------
    ArtifactError
        If it is no compiled directory, or damaged, or of another version.
    OutputError
        If the page cannot be written.
    """
    target = Path(directory) / PAGE if out is None else Path(out)
    if out is not None or target.exists():
        check_file(target, PAGE_KIND, force=force)
    replace_file(target, render_page(Path(directory)))
    return target


def write_comparison(
    directories: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], *, force: bool = False
) -> Path:
    """Write a page with the plans of two to `MAX_PLANS` compiled directories side by side.

    `force` is that of `write_report`.

    Raises
    ------
    ArtifactError, OutputError
        As `write_report`.
    UsageError
        For one directory, or too many.
    """
    if not 2 <= len(directories) <= MAX_PLANS:
        raise UsageError(f"{len(directories)} directories: give 2 to {MAX_PLANS} to compare")
    check_file(out, PAGE_KIND, force=force)
    replace_file(out, render_comparison([Path(directory) for directory in directories]))
    return Path(out)
