"""Do the pages name what is there: files, sections of other pages, the rooms of the house?"""

import re
import shlex
from importlib import import_module as script
from pathlib import Path

import pytest
from test_layering import LAYERS

from pimflow.commands import parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
SOURCES = ("python", "relay_passes", "pim_backend", "simulators", "scripts", "tests")
FILES = {
    f"/{path.relative_to(ROOT).as_posix()}"
    for folder in SOURCES
    for path in (ROOT / folder).rglob("*.*")
    if "__pycache__" not in path.parts
}


MARKED = r"^<!-- (?:(.*?) begin.*?^<!-- \1 end|attention: .*?^<!-- end of attention) -->"  # by scripts


def text_of(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Sections of a page as links name them."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text_of(page))):
        if not target.startswith("http"):
            path, _, anchor = target.partition("#")
            linked_page = (page.parent / path).resolve() if path else page
            assert linked_page.exists(), target
            assert not anchor or anchor in anchors(linked_page), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_a_page_names_are_there(page):
    for name in re.findall(r"`([\w.-]+(?:/[\w.-]+)+\.(?:py|cc|h|toml))`", text_of(page)):
        assert any(path.endswith(f"/{name}") for path in FILES), name


# Figures of sentences, by what stands around them: bounds that a test holds or code has, and what papers say.
FIGURES_OF_SENTENCES = (
    "1.1 times the sum wherever layers",
    "No plan is above 100 %",
    "0 times infinity",
    "less here than the slides' 20 %",
    "what their 20 % and 13 % are",
    "The paper saves 26 %",
    "0.7 % of the GPU's die, says the paper",
    "The paper says 8 times",
    "## Memory for 15 % more time",
    "The paper says 2.2 times",
    "saves 2.2 times",
    "all more than 5 % below the best plan",
    "at most 0.1 % more of either",
    "off by more than 3 % there",
    "misses by more than 3 % becomes a point",
    "a median error of 5 %, a bias within 1 %, τ of 0.93 and ratios within 5 %",
    "outputs move by 1 % or more",
    "75 % of the ideal would need",
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_sentences_have_no_figures_that_a_script_could_print(page):
    """Shares, factors and times stand in tables between marks, or in the list above."""
    text = re.sub(MARKED, "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(?:    .*\n)+|`[^`]*`", "", text, flags=re.MULTILINE)
    text = " ".join(text.split())
    for known in FIGURES_OF_SENTENCES:
        text = text.replace(known, "")
    figure = r"\b\d+(?:\.\d+)?(?:x\b| ?%| times\b)|\b\d+\.\d+ (?:ms|us|s|MB|GiB|mJ)\b"
    assert [text[max(hit.start() - 60, 0) : hit.end()] for hit in re.finditer(figure, text)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_of_figures_are_what_scripts_print(page):
    """They stand between marks; tests hold the table of networks to the networks."""
    text = page.read_text(encoding="utf-8")
    typed = re.sub(MARKED, "", text, flags=re.MULTILINE | re.DOTALL)
    for rows in re.findall(r"(?:^\|.*\n)+", typed, re.MULTILINE):
        figures = re.findall(r"\| *[-+]?\d+\.\d+(?:x| %|%)? *(?=\|)", rows)
        assert len(figures) < 2 or page.stem == "zoo", rows.partition("\n")[0]


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_that_a_page_names_can_be_typed(page):
    for line in re.findall(r"^ {4,}(pimflow [a-z][^[\n]*)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        typed = shlex.split(line.replace("…", "..."), comments=True)
        parser.parse(typed[1:])


def test_the_first_page_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_the_first_page_and_the_examples_have_every_command():
    """In the groups of the help; and an example of each."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Commands\n")[2]
    rows = re.findall(r"^    (\S.*?)  +(\S.*)$", text, re.MULTILINE)
    assert rows == [(", ".join(map(parser.command_name, items)), title) for title, items in parser.GROUPS]
    examples = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^    pimflow ([\w-]+)", examples, re.MULTILINE))
    assert shown == {parser.command_name(command) for command in parser.COMMANDS}


def test_the_first_page_shows_results_of_the_table_of_conventions():
    shown = script("update_readme").results()
    assert shown.count("\n") == 6  # five networks and the heads
    assert shown in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_summary_of_results_has_the_figures_of_the_other_pages():
    text = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    assert script("update_findings").page_with_tables(text) == text, "run scripts/update_findings.py"


def test_the_first_screen_has_the_figures_that_stand_below():
    table = script("update_readme").side_by_side()
    assert f"written by scripts/update_readme.py -->\n{table}\n<!-- first end -->" in PAGES[0].read_text()


def test_the_configuration_stands_above_every_table_of_speed_ups():
    """And a table that is written again gets the line by itself."""
    module = script("configurations")
    for page, tables in module.CONFIGURATIONS.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        for name, configuration in tables.items():
            above = module.line_of_source(text, name)
            assert above is not None, f"{page}: {name}; run scripts/configurations.py"
            assert above["configuration"] == configuration, f"{page}: {name}"
    page = "<!-- copies begin: x -->\n| a |\n<!-- copies end -->"
    written = module.fill(page, "copies", "| b |")
    assert module.line_of_source(written, "copies") is not None and written.count("| b |") == 1
    assert module.fill(written, "copies", "| b |") == written


def test_tables_of_results_are_as_their_scripts_wrote_them():
    """Each names its script, and the commit that it was made on; a digest finds what was edited by hand.

    After a merge of two versions of a table run its script again, or take the newer table with its mark.
    """
    module = script("configurations")
    results = {page.stem for page in PAGES if page.stem.startswith("results")}
    assert {*module.STAMPED_PAGES} == results - {"results_papers"}  # which has no figures
    for page in module.STAMPED_PAGES:
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        for name in re.findall(r"^<!-- (.+?) begin", text, re.MULTILINE):
            mark, written, _ = re.search(module.block(name), text, re.DOTALL).groups()
            stamp = re.search(module.STAMP, mark)
            assert stamp, f"{page}: {name}; run scripts/configurations.py"
            assert stamp["commit"] or module.line_of_source(text, name), f"{page}: {name}"
            assert stamp["digest"] == module.digest(written), f"{page}: {name} was edited; run its script"
            (writer,) = re.findall(r"written by (scripts/\w+\.py)", mark)
            assert f"/{writer}" in FILES, f"{page}: {name}"
    text = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8")
    mark, written, _ = re.search(module.block("kernel-sweep"), text, re.DOTALL).groups()
    assert re.search(module.STAMP, mark)["digest"] == module.digest(written), "run scripts/prove_kernels.py"


# What each paper numbers; the slides of PIMFlow number nothing.
NUMBERED = {
    "TeMCO": [*(f"Figure {n}" for n in range(1, 13)), "Algorithm 1", "Algorithm 2", "Listing 1"],
    "Occamy": [
        *("Figure 1", "Figure 2", "Figure 3", "Algorithm 1", "Algorithm 2", "Table I"),
        *("Figure 4a, 4c", "Figure 4b, 4d", "Figure 5a, 5c", "Figure 5b, 5d"),
    ],
    "TASO": [*(f"Figure {n}" for n in range(1, 11)), "Table 1"],
    "Deep Fusion": [*(f"Figure {n}" for n in range(1, 10)), "Table 1"],
}


def test_the_page_of_papers_has_every_figure_and_its_tables():
    page = ROOT / "docs" / "results_papers.md"
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", page.read_text(), re.MULTILINE | re.DOTALL))
    assert set(sections) == {"PIMFlow", *NUMBERED}
    for paper, section in sections.items():
        rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("|")][2:]
        names = [row[0].strip() for row in rows]
        assert sorted(names) == sorted(NUMBERED.get(paper, names)), paper
        for name, _, made, where in rows:
            tables = re.findall(r"\[`([^`]+)`\]\(([\w.]+)\)", where)
            for table, target in tables:
                assert f"<!-- {table} begin" in (page.parent / target).read_text(), f"{name}: {table}"
            tests = re.findall(r"test `(tests/[\w/]+\.py)`", where)
            assert {f"/{path}" for path in tests} <= FILES, name
            assert made in ("yes", "in part", "no") and (made == "no" or tables or tests or "](" in where), (
                name
            )


def test_a_table_that_is_written_anew_gets_a_stamp():
    """And keeps the one that it has if it is the same; a table under a line that has a commit needs none."""
    module = script("configurations")
    mark = "<!-- example begin: written by scripts/x.py; commit 12345678, sha256 0000000000000000 -->\n"
    page = f"{mark}| a |\n<!-- example end -->"
    same, new = (module.fill(page, "example", body) for body in ("| a |", "| b |"))
    assert "commit 12345678, " in same and module.fill(same, "example", "| a |") == same
    assert "commit 12345678, " not in new
    for text, written in ((same, "| a |\n"), (new, "| b |\n")):
        assert re.search(module.STAMP, text)["digest"] == module.digest(written)
    lined = module.fill(mark.replace("example", "copies") + "<!-- copies end -->", "copies", "| c |")
    assert re.search(module.STAMP, lined)["commit"] is None and "; commit " in lined


@pytest.mark.parametrize("page", ["reference/cli.md", "reference/api.md", "schemas/report.json"])
def test_the_pages_of_reference_are_those_of_the_code(page):
    written = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert script("update_reference").PAGES[page]() == written, "run scripts/update_reference.py"


def test_every_page_is_in_the_table_of_contents():
    listed = set(re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if "docs" in page.parts}


def test_the_page_has_the_rooms_as_a_picture_and_as_a_table():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("\n## Rooms\n")[2].partition("\n## ")[0]
    rooms = {(number, name or "__init__") for number, layer in enumerate(LAYERS, 1) for name in layer}
    for row, name in ((r"^\| (\d+) \| (.*?) \|", r"`(\w+)`"), (r"^ *(\d+) │(.*)│$", r"\w+")):
        shown = re.findall(row, section, re.MULTILINE)
        assert {(int(layer), room) for layer, names in shown for room in re.findall(name, names)} == rooms


def test_the_picture_of_time_has_the_phases_of_a_compilation():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    picture = page.partition("<!-- time begin")[2].partition("<!-- time end")[0]
    rows = re.findall(r"^(.*?) +\d+\.\d s  █+ +(.*)$", picture, re.MULTILINE)
    assert dict(rows) == script("bench_compile").PHASE_ROOMS


def test_the_page_is_one_that_a_person_reads():
    assert len((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()) <= 250
