"""Does the page work in a browser? In headless Chromium, where that and selenium are installed."""

import pytest
from chromium import NARROW, WIDE, needs_chromium, wait_for

from pimflow.commands.pages import pages

pytestmark = [pytest.mark.long, needs_chromium]


def layers(browser, row_set="active"):
    """Names of the layers that the table shows, in its order."""
    return browser.execute_script(
        f"return pimflow.tables.layers.getRows('{row_set}').map((row) => row.getData().name)"
    )


def domain(browser):
    return browser.execute_script("return pimflow.views.timeline.scale('x').domain()")


def wait_for_redraw(browser):
    browser.execute_async_script("pimflow.views.timeline.runAsync().then(() => arguments[0]())")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1440", "360"])
def test_it_is_drawn_and_fits(opened, size, scheme):
    browser = opened(size=size, scheme=scheme)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= size[0]
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('figure.chart')].map((f) => [f.id, !!f.querySelector('svg')])"
    )
    assert len(drawn) > 5 and all(svg for _, svg in drawn)
    sums = ".map((c) => c.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0))"
    ink, back = browser.execute_script(
        f"const s = getComputedStyle(document.body);return [s.color, s.backgroundColor]{sums}"
    )
    assert (ink < 200 and back > 600) if scheme == "light" else (ink > 600 and back < 200)
    label = browser.execute_script("return getComputedStyle(document.querySelector('#timeline text')).fill")
    assert (sum(map(int, label[4:-1].split(","))) < 300) == (scheme == "light")


def test_the_table_sorts_and_filters(opened):
    browser = opened()
    names = layers(browser)
    browser.execute_script("pimflow.tables.layers.getColumn('before').getElement().click()")
    times = browser.execute_script(
        "return pimflow.tables.layers.getRows('active').map((r) => r.getData().before)"
    )
    assert times == sorted(times) and sorted(layers(browser)) == sorted(names) != names
    field = browser.find_element("css selector", "#layers .tabulator-col[tabulator-field=name] input")
    field.send_keys("conv")
    wait_for(browser, lambda: len(layers(browser)) < len(names))
    assert set(layers(browser)) == {name for name in names if "conv" in name}


def test_a_row_opens_and_closes(opened):
    browser = opened()
    find = "return [...document.querySelectorAll('#layers .tabulator-row')][1]"
    browser.execute_script(f"{find}.querySelector('.tabulator-cell').click()")
    shown = browser.execute_script(f"{find}.querySelector('.details').innerText")
    assert "Candidates" in shown and "SPLIT" in shown and '["GWRITE"' in shown
    chosen = browser.execute_script(f"{find}.querySelectorAll('tr.chosen').length")
    assert chosen == 1
    browser.execute_script(f"{find}.querySelector('.tabulator-cell').click()")
    assert browser.execute_script(f"{find}.querySelector('.details')") is None


def test_the_timeline_zooms_and_searches(opened):
    browser = opened()
    full_domain = domain(browser)
    browser.find_element("css selector", "button[data-zoom='0.5']").click()
    wait_for_redraw(browser)
    begin, end = domain(browser)
    assert full_domain[0] <= begin < end <= full_domain[1] and end - begin == pytest.approx(
        (full_domain[1] - full_domain[0]) / 2
    )
    browser.find_element("css selector", "button[data-zoom='0']").click()
    wait_for_redraw(browser)
    assert domain(browser) == full_domain
    browser.find_element("id", "timeline-search").send_keys("DEPTHWISE")
    wait_for_redraw(browser)
    tasks = browser.execute_script(
        "return [...document.querySelectorAll('#timeline .mark-rect path')]"
        ".map((path) => +path.getAttribute('opacity') || 1)"
    )
    bars = browser.execute_script("return pimflow.data('charts').timeline.data.values")
    shown = sum("depthwise" in f"{bar['name']} {bar['layers']}" for bar in bars)
    assert len({*tasks}) == 2 and tasks.count(1) == shown >= 2  # of the plan, and of the GPU alone


def test_the_button_changes_the_scheme(opened):
    browser = opened()
    browser.find_element("id", "theme").click()
    wait_for(
        browser, lambda: browser.execute_script("return document.documentElement.dataset.drawn") == "dark"
    )
    assert (
        browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 24)"
    )


def test_plans_side_by_side_are_drawn(opened, directory, tmp_path):
    out = pages.write_comparison([directory, directory], tmp_path / "both.html")
    for size in (WIDE, NARROW):
        browser = opened(out, size)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= size[0]
        assert set(browser.execute_script("return Object.keys(pimflow.views)")) == {
            *("timeline", "conventions", "energy")
        }


def test_a_picture_is_interactive(opened, directory, tmp_path):
    from pimflow.commands.compile import timeline

    timeline.draw(tmp_path / "t.html", timeline.trace_plan(directory))
    browser = opened(tmp_path / "t.html")
    assert browser.execute_script("return 'zoom' in pimflow.views.chart.getState().signals")
