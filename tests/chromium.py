"""Headless Chromium for tests of pages, where that, its driver and selenium are installed."""

import shutil
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WIDE, NARROW = (1440, 900), (360, 740)
WAIT_SECONDS = 60
_DRAWN = (
    "return document.documentElement.dataset.drawn !== undefined && [...document.querySelectorAll("
    "'.table')].every((table) => table.dataset.built)"
)

needs_chromium = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")


@contextmanager
def browser_session():
    """A browser."""
    webdriver = pytest.importorskip("selenium.webdriver")
    service = pytest.importorskip("selenium.webdriver.chrome.service")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=service.Service(DRIVER))
    try:
        yield browser
    finally:
        browser.quit()


def open_page(browser, path: Path, size: tuple[int, int] = WIDE, scheme: str = "light") -> None:
    """Open a page in a size and a scheme, and wait until it is drawn; it logs nothing."""
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get("about:blank")
    browser.get_log("browser")  # of pages before
    browser.get(path.as_uri())
    wait_for(browser, lambda: browser.execute_script(_DRAWN))
    assert browser.get_log("browser") == []


def wait_for(browser, condition: Callable[[], object]) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, WAIT_SECONDS).until(lambda _: condition())
