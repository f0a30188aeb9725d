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
    half = (full_domain[1] - full_domain[0]) / 2
    assert full_domain[0] <= begin < end <= full_domain[1] and end - begin == pytest.approx(half)
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
    colour = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert colour == "rgb(15, 19, 24)"


def test_plans_side_by_side_are_drawn(opened, directory, tmp_path):
    out = pages.write_comparison([directory, directory], tmp_path / "both.html")
    for size in (WIDE, NARROW):
        browser = opened(out, size)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= size[0]
        views = browser.execute_script("return Object.keys(pimflow.views)")
        assert set(views) == {"timeline", "conventions", "energy"}


def test_a_picture_is_interactive(opened, directory, tmp_path):
    from pimflow.commands.compile import timeline

    timeline.draw(tmp_path / "t.html", timeline.trace_plan(directory))
    browser = opened(tmp_path / "t.html")
    assert browser.execute_script("return 'zoom' in pimflow.views.chart.getState().signals")


def test_a_bar_and_a_box_of_the_network_lead_to_the_layer(opened):
    browser = opened()
    opened_rows = "return pimflow.tables.layers.getRows().map((r) => r.getData()).filter((d) => d.open)"
    click = ".dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    browser.execute_script(f"document.querySelector('#timeline .mark-rect path'){click}")
    (row,) = browser.execute_script(opened_rows)
    bar = browser.execute_script("return pimflow.data('charts').timeline.data.values")[0]
    assert row["name"] == bar["layer"]
    shown = browser.execute_script("return document.querySelector('#layers .details').innerText")
    assert "Candidates" in shown and bar["layer"] in shown
    browser.execute_script(f"document.querySelectorAll('#network .layer')[3]{click}")
    names = [row["name"] for row in browser.execute_script(opened_rows)]
    assert len(names) == 2 and layers(browser)[3] in names


def test_the_network_is_moved_enlarged_and_searched(opened):
    browser = opened()
    boxes = browser.execute_script(
        "return [...document.querySelectorAll('#network .layer')].map((b) => b.getAttribute('class'))"
    )
    modes = browser.execute_script("return pimflow.tables.layers.getData().map((row) => row.mode)")
    kinds = {"GPU": "on-gpu", "PIM": "on-pim"}
    assert boxes == [f"layer {kinds.get(mode, 'on-both')}" for mode in modes]
    _, y, width, _ = browser.execute_script("return pimflow.network.view()")
    browser.find_element("css selector", "button[data-scale='0.8']").click()
    assert browser.execute_script("return pimflow.network.view()[2]") == pytest.approx(0.8 * width)
    browser.find_element("id", "network").send_keys("\ue015")  # the arrow down
    assert browser.execute_script("return pimflow.network.view()[1]") > y
    browser.find_element("id", "network-search").send_keys("DEPTHWISE")
    faded = browser.execute_script("return document.querySelectorAll('#network .faded').length")
    assert faded == len(modes) - 1


def test_rows_are_copied_as_csv_and_opened_by_a_key(opened):
    browser = opened()
    field = browser.find_element("css selector", "#layers .tabulator-col[tabulator-field=name] input")
    field.send_keys("down")
    wait_for(browser, lambda: len(layers(browser)) == 1)
    head, row, end = browser.execute_script("return pimflow.csv('layers')").split("\n")
    assert head.startswith('layer,mode,GPU share,shape,"MACs, M"') and end == ""
    assert row.startswith("down.conv,PIM,0,1x16x16x64 → 1x8x8x32,")
    browser.find_element("css selector", "#layers .tabulator-row").send_keys("\n")
    assert browser.execute_script("return document.querySelectorAll('#layers .details').length") == 1
    browser.find_element("css selector", "body").send_keys("/")
    assert browser.execute_script("return document.activeElement.id") == "timeline-search"


def test_it_is_painted_and_takes_under_a_second_of_its_thread(opened):
    browser = opened()
    browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})  # CPU time: others work, too
    opened()
    metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    seconds = {metric["name"]: metric["value"] for metric in metrics}
    paints = "return performance.getEntriesByName('first-contentful-paint').length"
    wait_for(browser, lambda: browser.execute_script(paints) == 1)
    assert 0 < seconds["TaskDuration"] < 1
