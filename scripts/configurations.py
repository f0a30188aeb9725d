"""The configuration of the tables on the pages, a line above each, and the stamps of tables.

A stamp stands in the mark where a table begins: the commit that it was made on, unless the line above it
has one, and a digest of the table, so that a test finds what was edited by hand. ``configurations.py`` adds
lines that are missing, and stamps on `STAMPED_PAGES`, with the commit that the table was committed on.
"""

import hashlib
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
GPU, PIM = "rtx-2060-pim32", "newton-gddr6"
CHANNELS = "16 of 32 channels with PIM, time-shared"


def text(
    accounting: str = "full",
    timing: str = "strict",
    pim: str = PIM,
    channels: str = CHANNELS,
    values: str = "fp16, batch 1",
) -> str:
    """A configuration in words."""
    return f"{GPU} + {pim}, {channels}; accounting {accounting}, timing {timing}; {values}"


PUBLISHED = "16 of 32 channels with PIM, partitioned, but pimflow time-shared"
LISTED = "as listed"
LISTED_STEPS = "fp16, batch and tokens as listed"
# By page, then by the name of a table.
CONFIGURATIONS = {
    "README.md": {"results": text("and timing by column, `paper` with ramulator-pimflow", "else strict")},
    "docs/conventions.md": {"networks": text(LISTED, LISTED), "launches": text()},
    "docs/decomposition.md": {"decomposition-pays": text()},
    "docs/devices_compared.md": {
        f"devices-{part}": text(pim="the device listed", channels="channels as listed")
        for part in ("means", "launches", "bounds", "energies", "fastest", "frugal")
    },
    "docs/findings.md": {
        "findings-configurations": text(LISTED, LISTED, channels=PUBLISHED),
        "findings-accounting": text(LISTED, "strict, in `paper` ramulator-pimflow"),
        "findings-gpu": text("paper", "ramulator-pimflow", channels=PUBLISHED),
        "findings-energy": text(),
    },
    "docs/language_models.md": {
        **{
            name: text(pim="the device listed", values=LISTED_STEPS)
            for name in ("decode", "grid", "products", "products behind", "attention")
        },
        "parts": text(pim="the device listed", values="fp16, batch 1, 1024 tokens"),
        "narrow": text(pim="the device listed", values="weights as listed, batch 1, 1024 tokens"),
        "devices": text(
            pim="newton-gddr6-narrow",
            channels="32 of 32 channels with PIM, time-shared",
            values="llama-3-8b, q4_k, batch 1, 1024 tokens; links nvlink-dgx",
        ),
        "plans": text(values="fp16, batch 1"),
    },
    "docs/results.md": {
        "copies": text(),
        "fuse": text(),
        "choices": text(),
        "modes": text("paper"),
        "sensitivity": text(),
        "sharing": text(channels="channels as listed"),
    },
    "docs/results_narrow.md": {
        "narrow-lpddr5x": "lpddr5x-pim, 4 channels, GEMV; timing strict, refreshes charged",
        "narrow-registers": "lpddr5x-pim, 4 channels, GEMV; timing strict, refreshes charged",
        "narrow-groups": "hbm-pim-narrow, 16 channels, GEMV; timing strict, refreshes charged",
        "narrow-phone": "immortalis-g720 + lpddr5x-pim, 4 of 4 channels with PIM, time-shared; "
        "accounting full, timing strict; int4 times int8, batch 1, 320 tokens",
        "narrow-p3": "hbm-pim, 16 channels, a block of Llama-2-7B, batch 1, 4096 tokens; timing strict, "
        "refreshes charged",
        "narrow-roundings": "tiny-lm in NumPy, a text of 54 tokens; fp32, and fp16 for all tensors",
        "narrow-caches": "systems as listed, time-shared; accounting full, timing strict; batch 1",
    },
    "docs/results_pimflow.md": {
        **{
            f"pimflow speed-up {accounting} {timing}": text(accounting, timing, channels=PUBLISHED)
            for accounting in ("paper", "full")
            for timing in ("ramulator-pimflow", "strict")
        },
        "pimflow shares": f"{GPU} alone, 32 channels; fp16, batch 1",
        "pimflow GPU side": text("paper", "ramulator-pimflow", channels=PUBLISHED),
        **{
            f"pimflow {part}": text(LISTED, LISTED, channels=PUBLISHED)
            for part in ("parts", "commands", "command bounds", "energy", "terms", "gains", "sizes")
        },
    },
    "docs/primitives.md": {"gpu-plans": text(values="fp32, batch 1")},
    "docs/validation.md": {
        "simulated networks": text("paper", "ramulator-pimflow"),
        "torch": text(),
    },
}
# Tables that are made of others: the page and the name of the one whose commit counts.
SOURCES = {
    **dict.fromkeys(
        ("results", "findings-accounting", "findings-energy"), ("docs/conventions.md", "networks")
    ),
    "findings-configurations": ("docs/results_pimflow.md", "pimflow speed-up full strict"),
    "findings-gpu": ("docs/results_pimflow.md", "pimflow GPU side"),
}
_BY_NAME = {name: line for tables in CONFIGURATIONS.values() for name, line in tables.items()}
STAMPED_PAGES = (
    *("results", "results_narrow"),
    *(f"results_{paper}" for paper in ("pimflow", "occamy", "temco", "taso", "deep_fusion")),
)
STAMP = r"; (?:commit (?P<commit>[0-9a-f]{7,40}), )?sha256 (?P<digest>[0-9a-f]{16}) -->"
LINE = r"\*(?P<configuration>[^*\n]+); commit (?P<commit>[0-9a-f]{7,40})\*\n\n"


def git(*arguments: str) -> str:
    """What git prints in this repository."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def line(name: str, commit: str = "") -> str:
    """The line above the table called `name`, made on `commit` (by default the current one); may be empty."""
    if name not in _BY_NAME:
        return ""
    if name in SOURCES:
        page, source = SOURCES[name]
        above = line_of_source((ROOT / page).read_text(encoding="utf-8"), source)
        if above is None:
            return ""
        commit = above["commit"]
    return f"*{_BY_NAME[name]}; commit {commit or git('rev-parse', '--short=8', 'HEAD')}*\n\n"


def line_of_source(page_text: str, name: str) -> re.Match[str] | None:
    """The line that stands above a table of a page."""
    match = re.search(block(name), page_text, flags=re.DOTALL)
    return match and re.match(LINE, match[2])


def block(name: str) -> str:
    """The pattern of what stands between the two marks called `name`."""
    return rf"(<!-- {re.escape(name)} begin[^>]*-->\n)(.*?)(<!-- {re.escape(name)} end -->)"


def fill(page_text: str, name: str, body: str) -> str:
    """`page_text` with `body` between the two marks called `name`, under its configuration; renews a stamp.

    A body that is there already keeps the commit that it was made on.
    """

    def replacement(marks: re.Match[str]) -> str:
        """The block with the new body."""
        old_line, old_stamp = re.match(LINE, marks[2]), re.search(STAMP, marks[1])
        is_same = marks[2][old_line.end() if old_line else 0 :] == f"{body}\n"
        written = f"{line(name, old_line['commit'] if old_line and is_same else '')}{body}\n"
        mark = marks[1]
        if old_stamp:
            mark = with_stamp(mark, written, old_stamp["commit"] if is_same else None)
        return f"{mark}{written}{marks[3]}"

    return re.sub(block(name), replacement, page_text, flags=re.DOTALL)


def with_stamp(mark: str, written: str, commit: str | None = None) -> str:
    """The line `mark` with a stamp for `written`, made on `commit` (by default the current one)."""
    commit_text = (
        "" if re.match(LINE, written) else f"commit {commit or git('rev-parse', '--short=8', 'HEAD')}, "
    )
    text_before = re.sub(STAMP, " -->", mark).removesuffix(" -->\n")
    return f"{text_before}; {commit_text}sha256 {digest(written)} -->\n"


def digest(written: str) -> str:
    """The digest of what stands between two marks."""
    return hashlib.sha256(written.encode()).hexdigest()[:16]


def table_commit(path: Path, name: str) -> str:
    """The commit on which a table was made: the one before the last that changed it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    begin = next(i for i, row in enumerate(lines, 1) if row.startswith(f"<!-- {name} begin"))
    end = next(i for i, row in enumerate(lines, 1) if row.startswith(f"<!-- {name} end"))
    blamed = git("blame", "-s", "--abbrev=40", f"-L{begin + 1},{end - 1}", "HEAD", "--", str(path))
    rows = blamed.splitlines()
    commits = {row.split()[0].lstrip("^") for row in [row for row in rows if "|" in row] or rows}
    newest = git("rev-list", "--no-walk=sorted", *sorted(commits)).splitlines()[0]
    return git("rev-parse", "--short=8", f"{newest}^")


def main() -> None:
    """Add the lines that are missing, to tables made of others last, and then the stamps."""
    for page, tables in sorted(
        CONFIGURATIONS.items(), key=lambda item: not SOURCES.keys().isdisjoint(item[1])
    ):
        path = ROOT / page
        page_text = path.read_text(encoding="utf-8")
        for name in tables:
            match = re.search(block(name), page_text, flags=re.DOTALL)
            if match is None:
                raise SystemExit(f"{page} has no table '{name}'")
            if not re.match(LINE, match[2]):
                above = line(name, "" if name in SOURCES else table_commit(path, name))
                page_text = page_text[: match.start(2)] + above + page_text[match.start(2) :]
        path.write_text(page_text, encoding="utf-8")
    for path in (ROOT / "docs" / f"{page}.md" for page in STAMPED_PAGES):
        page_text = path.read_text(encoding="utf-8")
        for name in re.findall(r"^<!-- (.+?) begin", page_text, flags=re.MULTILINE):
            match = re.search(block(name), page_text, flags=re.DOTALL)
            if match is not None and not re.search(STAMP, match[1]):
                commit = None if re.match(LINE, match[2]) else table_commit(path, name)
                mark = with_stamp(match[1], match[2], commit)
                page_text = page_text[: match.start(1)] + mark + page_text[match.end(1) :]
        path.write_text(page_text, encoding="utf-8")


if __name__ == "__main__":
    main()
