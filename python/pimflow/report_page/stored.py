"""Read compiled directories for pages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pimflow.compiler.artifact import PLAN, REPORT, REPORT_VERSION, TIMELINE
from pimflow.compiler.interface import INTERFACE, Interface
from pimflow.core.table_files import read_json
from pimflow.errors import ArtifactError, is_utf8
from pimflow.report_page.timeline_chart import Bar, TracedTask, sort_bars

_OPENING_BYTES = 3000  # number of bytes of a program that are read to show its first commands
_OPENING_LINES = 24


@dataclass(frozen=True, kw_only=True)
class StoredPlan:
    """The files of a compiled directory that pages need.

    Attributes
    ----------
    interface : Interface
        Names and digests of its files; file names in the report are checked by it.
    bars : tuple of Bar
        The tasks of ``timeline.json``, those of the baseline last.
    digests : dict of str to str
        Digests of the directory, and of the network and the system of the plan.
    """

    path: Path
    name: str
    interface: Interface
    report: dict[str, Any]
    bars: tuple[Bar, ...]
    digests: dict[str, str]

    @classmethod
    def load(cls, path: Path, name: str = "") -> StoredPlan:
        """Read a compiled directory; `name` replaces its own name.

        Raises
        ------
        ArtifactError
            If it is no compiled directory, is damaged, or its name is not UTF-8.
        """
        name = name or path.resolve().name
        if not is_utf8(name):
            raise ArtifactError(f"{path}: '{name}' is not UTF-8; rename it")
        interface = Interface.load(path)
        for file in (TIMELINE, PLAN):
            interface.check(path, file)
        with translate_errors(path):
            report, timeline, plan, sealed = (
                read_json(path / file, ArtifactError) for file in (REPORT, TIMELINE, PLAN, INTERFACE)
            )
            if report.get("schema_version") != REPORT_VERSION:
                raise ValueError("schema_version")
            digests = {"directory": sealed["digest"], "network": plan["model"], "system": plan["system"]}
            return cls(
                path=path,
                name=name,
                interface=interface,
                report=report,
                bars=_bars(timeline),
                digests=digests,
            )

    def first_commands(self, file: str) -> str:
        """The first commands of a program, of its first channel.

        Raises
        ------
        ArtifactError
            If `file` is not of this directory, or was changed.
        """
        self.interface.check(self.path, file)
        with (self.path / file).open("rb") as read:
            lines = read.read(_OPENING_BYTES).decode(errors="ignore").splitlines()[1:]
        commands = [
            line.strip().removesuffix(",") for line in lines[:-1] if line.strip() not in ("[", "]", "],")
        ]
        first = commands[:_OPENING_LINES]
        return "\n".join(
            [*first, "…"] if len(commands) > len(first) or len(lines) > _OPENING_LINES else first
        )


@contextlib.contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Turn errors that a report of another version causes into `ArtifactError`."""
    try:
        yield
    except OSError as error:
        raise ArtifactError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from error
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise ArtifactError(
            f"{path}: {REPORT} was not written by this version of pimflow; compile again"
        ) from error


def _bars(timeline: dict[str, Any]) -> tuple[Bar, ...]:
    events = [event for event in timeline["traceEvents"] if event["ph"] == "X"]
    return tuple(
        sort_bars(
            [
                bar
                for event in events
                for bar in TracedTask.from_event(event).bars(is_baseline=event["pid"] != 0)
            ]
        )
    )
