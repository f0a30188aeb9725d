"""Tables of README.md, docs/conventions.md and docs/results_pimflow.md, as their figures stand there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
BY_CONVENTION, RESULTS = (ROOT / "docs" / name for name in ("conventions.md", "results_pimflow.md"))


def block(page: Path, name: str) -> str:
    """What stands between the two marks called `name`."""
    text = page.read_text(encoding="utf-8")
    (body,) = re.findall(rf"<!-- {name} begin[^>]*-->\n(.*?)\n?<!-- {name} end -->", text, flags=re.DOTALL)
    return body


def rows(page: Path, name: str) -> list[dict[str, str]]:
    """Rows of the table called `name`, by the titles of its columns."""
    lines = [line for line in block(page, name).splitlines() if line.startswith("|")]
    head, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(head, cells, strict=True)) for cells in body]


def row(page: Path, name: str, **expected: str) -> dict[str, str]:
    """The one row that has certain cells; ``_`` in a title stands for a blank."""
    keys = {title.replace("_", " "): cell for title, cell in expected.items()}
    (matching_row,) = (r for r in rows(page, name) if all(r[key] == cell for key, cell in keys.items()))
    return matching_row
