"""Write docs/reference: commands from their parsers, Python names from their signatures and docstrings.

Writes the JSON schema of ``report.json``, too, from the types of a report.
"""

import dataclasses
import inspect
import json
import re
import textwrap

import json_schema
from update_readme import ROOT

import pimflow
from pimflow.commands import parser
from pimflow.commands.shared.report import Report
from pimflow.compiler.plan_pools import PoolChoice
from pimflow.core.options import options_text
from pimflow.relay_passes.regions.kernel_groups import TensorCopy

DOCS = ROOT / "docs"
WRITTEN = "<!-- written by scripts/update_reference.py -->"


def cli() -> str:
    """All commands by group, with the options of each by group."""
    lines = ["# Commands", "", WRITTEN, ""]
    lines += [f"{parser.DESCRIPTION}. `pimflow COMMAND --help` prints the same.", ""]
    for title, commands in parser.GROUPS:
        lines += [f"## To {title}", ""]
        for command in commands:
            sub = parser.build_parser(command)
            lines += [f"### {sub.prog}", "", f"{sub.description} `{sub.usage}`", ""]
            for group, options in sub.help_groups():
                lines += [f"| {group} | |", "|---|---|"]
                lines += [f"| `{_cell(shown)}` | {_cell(help_text)} |" for shown, help_text in options]
                lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", r"\|")


def api() -> str:
    """Every public name, with its signature and docstring."""
    lines = ["# Python", "", WRITTEN, "", f"{pimflow.__doc__.splitlines()[0]} Names of `pimflow`.", ""]
    for name in sorted(pimflow.__all__, key=str.lower):
        member = getattr(pimflow, name)
        signature = re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(member)))
        lines += [
            f"## {name}",
            "",
            *_signature(name, signature),
            "",
            *_text(_documentation(member)),
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def _signature(name: str, signature: str) -> list[str]:
    arguments = signature.replace("'", "")
    return ["```text", *textwrap.wrap(f"pimflow.{name}{arguments}", 110, subsequent_indent="    "), "```"]


def _documentation(member: object) -> str:
    """The docstring of a public name; of a dataclass with its options, as functions have them already."""
    doc = inspect.getdoc(member) or ""
    options = (
        options_text(member, doc) if inspect.isclass(member) and dataclasses.is_dataclass(member) else ""
    )
    return f"{doc}\n\n{options}" if options else doc


def _text(doc: str) -> list[str]:
    """A docstring in NumPy's form, unchanged."""
    return ["```text", *doc.splitlines(), "```"]


def report_schema() -> str:
    """The JSON schema of ``report.json``."""
    title = "report.json: the results of a compilation; times in ns, energies in pJ, sizes in bytes"
    names = {"PoolChoice": PoolChoice, "TensorCopy": TensorCopy}
    return json.dumps(json_schema.file_schema(Report, title, names), indent=1) + "\n"


PAGES = {
    "reference/cli.md": cli,
    "reference/api.md": api,
    "schemas/report.json": report_schema,
}


def main() -> None:
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
