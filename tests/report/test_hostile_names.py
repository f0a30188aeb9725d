"""Does a page run what stands in names? In headless Chromium: all is pointed at, clicked and filtered."""

import hashlib
import json
import shutil
from dataclasses import replace
from itertools import cycle

import pytest
from chromium import needs_chromium, open_page
from hostile_names import FOLDERS, MARK, NAMES

from pimflow.commands.compile import timeline
from pimflow.commands.pages import pages
from pimflow.compiler.artifact import TIMELINE
from pimflow.compiler.interface import Interface
from pimflow.core.liveness import Lifetime
from pimflow.memory import plan as plan_memory
from pimflow.memory import plot
from pimflow.report_page.page import render_page

pytestmark = [pytest.mark.long, needs_chromium]

# What Tabulator and Vega listen to; tooltips come at once. Rows that are not in sight are scrolled to.
USE = """
const done = arguments[0], later = window.setTimeout;
window.setTimeout = (call, ms, ...more) => (ms === 300 ? (call(...more), 0) : later(call, ms, ...more));
const frame = () => new Promise(requestAnimationFrame);
const seen = { rows: new Set(), tooltips: new Set(), items: new Set() };
const POINTED = ["pointerover", "pointerenter", "mouseover", "mouseenter", "pointermove", "mousemove"];
function send(target, kinds) {
  for (const kind of kinds) target.dispatchEvent(new MouseEvent(kind, { bubbles: true, cancelable: true }));
}
function point(target) {
  send(target, POINTED);
  for (const shown of document.querySelectorAll(".tabulator-tooltip, #vg-tooltip-element")) {
    if (shown.textContent) seen.tooltips.add(shown.textContent);
    for (const inner of shown.querySelectorAll("*")) send(inner, ["mouseover", "click"]);
  }
  send(target, ["mouseout", "mouseleave", "pointerout"]);
}
async function useTable(table) {
  const holder = table.querySelector(".tabulator-tableholder");
  for (let top = 0; ; top += holder.clientHeight / 2) {
    holder.scrollTop = top;
    holder.dispatchEvent(new Event("scroll"));
    await frame();
    for (const row of table.querySelectorAll(".tabulator-row")) {
      const name = row.querySelector(".tabulator-cell")?.textContent;
      if (seen.rows.has(name)) continue;
      seen.rows.add(name);
      const cells = [...row.querySelectorAll(".tabulator-cell")];
      // The first rows have every name in their other cells and in their details already.
      for (const cell of seen.rows.size > 20 ? cells.slice(0, 2) : cells) {
        if (!seen.tooltips.has(cell.textContent)) point(cell);
      }
      if (seen.rows.size > 20) continue;
      send(cells[0], ["click"]);
      for (const inner of row.querySelectorAll(".details h3, .details td")) {
        send(inner, ["mouseover", "click"]);
      }
      send(cells[0], ["click"]);
    }
    if (top + holder.clientHeight >= holder.scrollHeight) break;
  }
  for (const title of table.querySelectorAll(".tabulator-col")) point(title);
  for (const field of table.querySelectorAll(".tabulator-col input")) {
    field.focus();
    send(field, ["mousedown", "click"]);
    await frame();
    const items = [...document.querySelectorAll(".tabulator-edit-list-item")];
    for (const item of items) {
      seen.items.add(item.textContent);
      for (const target of [item, ...item.querySelectorAll("*")]) send(target, POINTED);
    }
    if (items.length) send(items[items.length - 1], ["mousedown", "click"]);
    field.value = "<img";
    for (const kind of ["input", "change", "search"]) field.dispatchEvent(new Event(kind, { bubbles: true }));
    field.dispatchEvent(new KeyboardEvent("keyup", { key: "g", bubbles: true }));
    await new Promise((call) => later(call, 350));
    document.activeElement.blur();
  }
}
(async () => {
  for (const table of document.querySelectorAll(".table")) await useTable(table);
  for (const mark of document.querySelectorAll("figure svg path, figure svg text")) point(mark);
  for (const text of document.querySelectorAll("header *, section > *, summary, li")) send(text, POINTED);
  for (const button of document.querySelectorAll("button, summary")) send(button, ["click"]);
  const search = document.getElementById("timeline-search");
  if (search) {
    search.value = "<img src=x onerror=window.hostile=1>";
    search.dispatchEvent(new Event("input"));
  }
  await new Promise((call) => later(call, 500));
  done(Object.fromEntries(Object.entries(seen).map(([name, found]) => [name, [...found]])));
})();
"""


def hostile(value, names):
    """`value` of JSON, every text in it another name."""
    if isinstance(value, str):
        return next(names)
    if isinstance(value, list):
        return [hostile(item, names) for item in value]
    if isinstance(value, dict):
        return {key: hostile(item, names) for key, item in value.items()}
    return value


def write_hostile_directory(source, target, names):
    """A compiled directory whose report and timeline have only such names; a layer for each of them."""
    shutil.copytree(source, target)
    report = json.loads((target / "report.json").read_text())
    layers = [report["regions"][number % len(report["regions"])] for number in range(len(names))]
    # What the page knows: its version, and the names of memory regions.
    version, sets = report["schema_version"], report["memory"]["regions"]
    report = hostile(report, cycle(names)) | {"schema_version": version}
    report["memory"]["regions"] = sets
    report["regions"] = [
        hostile(layer, cycle(names[number:])) | {"name": name, "covers": [name], "mode": name}
        for number, (layer, name) in enumerate(zip(layers, names))
    ]
    file = next(iter((target / "programs").iterdir())).relative_to(target).as_posix()
    for program in (program for layer in report["regions"] for program in layer["programs"]):
        program["file"] = file  # of the directory: no other is opened
    for energies in ("energies_pj", "energies_gpu_only_pj"):
        report[energies] = dict(zip(names, [*report[energies].values()]))
    (target / "report.json").write_text(json.dumps(report))
    trace = json.loads((target / TIMELINE).read_text())
    tasks = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    trace["traceEvents"] = [
        event | {"name": name, "args": event["args"] | {"regions": [name]}, "ts": 10 * number, "dur": 9}
        for number, (event, name) in enumerate(zip(cycle(tasks), names))
    ]
    (target / TIMELINE).write_text(json.dumps(trace))
    reseal(target, TIMELINE)
    return target


def reseal(directory, name):
    """Write the digest of a file into the directory's list, as a forger would."""
    interface = Interface.load(directory)
    digest = hashlib.sha256((directory / name).read_bytes()).hexdigest()
    sealed = replace(interface, sha256=interface.sha256 | {name: digest})
    (directory / "interface.json").write_text(sealed.to_json())


def report(directory, folder):
    path = folder / "report.html"
    path.write_bytes(render_page(write_hostile_directory(directory, folder / FOLDERS[0], NAMES)))
    return path


def comparison(directory, folder):
    named = [write_hostile_directory(directory, folder / name, NAMES) for name in FOLDERS[:3]]
    return pages.write_comparison(named, folder / "comparison.html")


def timeline_picture(directory, folder):
    hostile_directory = write_hostile_directory(directory, folder / FOLDERS[0], NAMES)
    timeline.draw(folder / "timeline.html", replace(timeline.trace_plan(hostile_directory), model=NAMES[0]))
    return folder / "timeline.html"


def memory_picture(_directory, folder):
    lifetimes = [
        Lifetime(name=name, begin=number, end=number + 1, size_bytes=1000, memory=NAMES[number % 2])
        for number, name in enumerate(NAMES)
    ]
    plot.write(folder / "memory.html", lifetimes, plan_memory(lifetimes), NAMES[0])
    return folder / "memory.html"


def check_nothing_ran(browser):
    assert browser.execute_script("return window.hostile || 0") == 0
    assert browser.execute_script(f"return document.querySelectorAll('[{MARK}]').length") == 0
    assert browser.get_log("browser") == []  # and nothing tried to, against the policy


@pytest.fixture
def without_policy(chromium):
    chromium.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})
    yield
    chromium.execute_cdp_cmd("Page.setBypassCSP", {"enabled": False})


MAKERS = [report, comparison, timeline_picture, memory_picture]


@pytest.fixture(scope="session")
def made(directory, tmp_path_factory):
    """The pages, by what makes them."""
    assert len(NAMES) >= 200 and len(set(NAMES)) == len(NAMES)
    return {maker: maker(directory, tmp_path_factory.mktemp(maker.__name__)) for maker in MAKERS}


def use(browser, path, maker):
    open_page(browser, path)
    browser.set_script_timeout(300)
    seen = browser.execute_async_script(USE)
    if maker in (report, comparison):
        assert set(seen["rows"]) >= set(NAMES) and set(seen["tooltips"]) >= set(NAMES)
        assert seen["items"]
    else:
        assert len(seen["tooltips"]) >= 200
    check_nothing_ran(browser)


@pytest.mark.parametrize("maker", MAKERS)
def test_names_are_text(chromium, made, without_policy, maker):
    """Without the policy, which would only hide it."""
    use(chromium, made[maker], maker)


@pytest.mark.parametrize("maker", [report, memory_picture])  # the tables and the pictures of all
def test_the_policy_lets_the_page_work(chromium, made, maker):
    use(chromium, made[maker], maker)


INSERT = "for (const name of arguments[0]) document.body.insertAdjacentHTML('beforeend', name)"


def test_the_policy_stops_what_became_html(chromium, made):
    open_page(chromium, made[report])
    chromium.execute_script(INSERT, NAMES)
    chromium.execute_async_script("setTimeout(arguments[0], 500)")
    assert chromium.execute_script("return window.hostile || 0") == 0
    assert len(chromium.get_log("browser")) > 100


def test_the_names_are_hostile(chromium, made, without_policy):
    """Else the others showed nothing. Each by itself: one with another base stops what others fetch."""
    ran = set()
    for name in NAMES[:20]:
        chromium.get("about:blank")
        chromium.execute_script(INSERT, [name])
        chromium.execute_async_script("setTimeout(arguments[0], 200)")
        if chromium.execute_script("return window.hostile"):
            ran.add(name)
    assert len(ran) >= 4  # nothing was pointed at or clicked
