import pytest
from chromium import browser_session, open_page

import pimflow


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("browser") / "toy"
    pimflow.compile("toy", path)
    return path


@pytest.fixture(scope="session")
def chromium():
    with browser_session() as browser:
        yield browser


@pytest.fixture
def opened(chromium, directory):
    """A function that opens a page, by default the directory's, and gives the browser."""

    def open_in(path=directory / "report.html", *args, **options):
        open_page(chromium, path, *args, **options)
        return chromium

    return open_in
